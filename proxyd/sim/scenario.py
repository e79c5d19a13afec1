"""Scenario files: who is there, what happens, what must come out.

TOML::

    description = "eight senders at once"
    duration = "20s"                       # the longest it may take; it ends when all has settled

    [[link]]                               # each direction by itself
    from = "hami"
    to = "shenzhen"
    capacity = "400Mbit"
    rtt = "60ms"                           # to and fro; half of it each way
    buffer = "300kB"
    loss = 0.0                             # optional

    [control]                              # optional
    delay = "300us"
    jitter = "200us"

    [pauses]                               # optional: busy hosts, whose processes are kept waiting
    every = "300ms"                        # each process so often (on average)
    most = "20ms"                          # for up to so long

    [[agents]]                             # `count` agents named host0, host1, ...
    site = "hami"
    count = 8
    first_rank = 0
    ranks_each = 1                         # optional: trainers at each
    memory = "256MiB"                      # optional: receive memory

    [[burst]]                              # each rank of `from` sends to the rank at the same place of `to`
    at = "1s"
    from = [0, 7]                          # first and last rank
    to = [8, 15]
    size = "8MiB"
    traffic = "pipeline"
    times = 3                              # optional: again so often,
    gap = "350ms"                          # ... so long after the last arrival
    spread = "0.2ms"                       # optional: posted at random times within it
    cancel = 0.0                           # optional: share of the messages that is given up,
    cancel_within = "2s"                   # ... at a random time so soon after it was posted

    [[fault]]                              # optional
    at = "2s"
    do = "kill_agent"                      # kill_agent | kill_trainer | kill_coordinator | start_coordinator
    rank = 0                               # of an agent's trainer

    [expect]                               # optional bounds
    after_rounds = 1                       # optional: completion times count from this round on (warm connections)
    drops = 0
    failed = 0
    fct_p99_over_ideal = 1.08
    fct_mean_over_ideal = 0.65

The invariants of :mod:`proxyd.sim.checks` hold in every scenario without being named.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig
from proxyd.core.errors import ConfigError
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.units import parse_duration, parse_rate, parse_size
from proxyd.sim.checks import InvariantError, check_coordinator, check_end
from proxyd.sim.host import AgentHost
from proxyd.sim.link import NANOS, LinkModel
from proxyd.sim.trainer import Fate
from proxyd.sim.world import CoordinatorHost, World
from proxyd.wire.envelope import TrafficClass

JOB = "sim"
COORDINATOR = "coordinator:7600"
SETTLE_NS = 12 * NANOS
"""After the last message: leases, lingering and time-outs come to their ends."""
STEP_NS = 50_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Agents:
    """Agents of one site."""

    site: str
    count: int
    first_rank: int
    ranks_each: int
    memory_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Burst:
    """Messages that are posted together."""

    at_ns: int
    first: tuple[int, int]
    second: tuple[int, int]
    size_bytes: int
    traffic: TrafficClass
    times: int
    gap_ns: int
    spread_ns: int
    cancel: float
    cancel_within_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Something breaks, or comes back."""

    at_ns: int
    do: str
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """One file."""

    name: str
    description: str
    duration_ns: int
    links: Mapping[LinkName, LinkModel]
    control_ns: int
    jitter_ns: int
    pause_every_ns: int
    """0: never."""
    pause_most_ns: int
    slow_start_after_idle: bool
    agents: tuple[Agents, ...]
    bursts: tuple[Burst, ...]
    faults: tuple[Fault, ...]
    expect: Mapping[str, float]


@dataclasses.dataclass(slots=True)
class Result:
    """What came out of one run."""

    scenario: str
    seed: int
    simulated_ns: int
    events: int
    messages: int
    delivered: int
    failed: int
    cancelled: int
    drops: int
    retransmits: int
    peak_queue_bytes: int
    fallback_bytes: int
    fct_ns: list[int]
    cct_ns: list[int]
    """Of each burst: from its first post to its last arrival."""
    ideal_cct_ns: int
    """Of the first burst: its bytes at the link's rate, and one way; 0 without one."""
    problems: list[str]
    """Expectations that weren't met; empty: passed."""

    def percentile_ns(self, share: float) -> int:
        """Of the completion times."""
        ordered = sorted(self.fct_ns)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


_KEYS = {
    "": {
        "description",
        "duration",
        "slow_start_after_idle",
        "link",
        "control",
        "pauses",
        "agents",
        "burst",
        "fault",
        "expect",
    },
    "link": {"from", "to", "capacity", "rtt", "buffer", "loss"},
    "control": {"delay", "jitter"},
    "pauses": {"every", "most"},
    "agents": {"site", "count", "first_rank", "ranks_each", "memory"},
    "burst": {"at", "from", "to", "size", "traffic", "times", "gap", "spread", "cancel", "cancel_within"},
    "fault": {"at", "do", "rank"},
    "expect": {
        "after_rounds",
        "drops",
        "failed",
        "delivered_least",
        "fct_p99_over_ideal",
        "fct_mean_over_ideal",
        "fallback",
        "queue_over_buffer",
    },
}


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file. Raises ConfigError, naming the file and what is wrong."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read scenario {path}", why=str(error)) from error
    for table, keys in _KEYS.items():
        value = data if not table else data.get(table, {})
        for entry in value if isinstance(value, list) else [value]:
            for key in sorted(set(entry) - keys):
                raise ConfigError(
                    f"{path}: [{table}] has no key {key!r}", next_step=f"Known: {', '.join(sorted(keys))}"
                )
    try:
        return _scenario(path.stem, data)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error


def _scenario(name: str, data: Mapping[str, Any]) -> Scenario:
    control, pauses = data.get("control", {}), data.get("pauses", {})
    return Scenario(
        name=name,
        description=data["description"],
        duration_ns=parse_duration(data["duration"]),
        links={
            LinkName(link["from"], link["to"]): LinkModel(
                parse_rate(link["capacity"]),
                parse_duration(link["rtt"]) // 2,
                parse_size(link["buffer"]),
                loss=float(link.get("loss", 0.0)),
            )
            for link in data["link"]
        },
        control_ns=parse_duration(control.get("delay", "300us")),
        jitter_ns=parse_duration(control.get("jitter", "200us")),
        pause_every_ns=parse_duration(pauses["every"]) if pauses else 0,
        pause_most_ns=parse_duration(pauses["most"]) if pauses else 0,
        slow_start_after_idle=bool(data.get("slow_start_after_idle", False)),
        agents=tuple(
            Agents(a["site"], a["count"], a["first_rank"], a.get("ranks_each", 1), parse_size(a.get("memory", "1GiB")))
            for a in data["agents"]
        ),
        bursts=tuple(
            Burst(
                parse_duration(b["at"]),
                (b["from"][0], b["from"][1]),
                (b["to"][0], b["to"][1]),
                parse_size(b["size"]),
                TrafficClass.parse(b["traffic"]),
                b.get("times", 1),
                parse_duration(b.get("gap", "350ms")),
                parse_duration(b.get("spread", "0.2ms")),
                float(b.get("cancel", 0.0)),
                parse_duration(b.get("cancel_within", "2s")),
            )
            for b in data.get("burst", ())
        ),
        faults=tuple(Fault(parse_duration(f["at"]), f["do"], f.get("rank", -1)) for f in data.get("fault", ())),
        expect=data.get("expect", {}),
    )


class Run:
    """One run of a scenario with one seed."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.world = world = World(
            seed,
            dict(scenario.links),
            control_ns=scenario.control_ns,
            control_jitter_ns=scenario.jitter_ns,
            slow_start_after_idle=scenario.slow_start_after_idle,
        )
        world.check_coordinator = check_coordinator
        self._config = CoordinatorConfig(
            links=tuple(
                LinkSettings(
                    name,
                    model.rate_bytes_per_s,
                    2 * model.one_way_ns,
                    model.buffer_bytes,
                    mtu_bytes=model.mtu_bytes,
                )
                for name, model in scenario.links.items()
            ),
            control_rtt_ns=2 * scenario.control_ns + scenario.jitter_ns,
        )
        self._epoch = 1
        world.start_coordinator(COORDINATOR, self._config, self._epoch)
        self._agent_of: dict[int, AgentName] = {}
        self._pending = len(scenario.faults) + sum(burst.times for burst in scenario.bursts)
        self._rounds: list[list[TransferId]] = []
        for group in scenario.agents:
            for index in range(group.count):
                name = AgentName(group.site, f"host{index}")
                host = world.start_agent(name, (COORDINATOR,), group.memory_bytes)
                for rank in range(index * group.ranks_each, (index + 1) * group.ranks_each):
                    self._agent_of[group.first_rank + rank] = name
                    world.start_trainer(host, EndpointName(JOB, group.first_rank + rank))
        for burst in scenario.bursts:
            self._plan(burst, burst.at_ns, burst.times)
        if scenario.pause_every_ns:
            self._pause_later(world.coordinators[COORDINATOR])
            for host in world.hosts.values():
                self._pause_later(host)
        for fault in scenario.faults:
            world.clock.at(fault.at_ns, partial(self._break, fault))

    def result(self) -> Result:
        """Run it to its end. Raises InvariantError when something that must hold doesn't."""
        world, scenario = self.world, self.scenario
        clock = world.clock
        while clock.now_ns < scenario.duration_ns and not self._settled:
            clock.run(min(clock.now_ns + STEP_NS, scenario.duration_ns))
        ended_ns = clock.now_ns
        clock.run(ended_ns + SETTLE_NS)
        check_end(world)
        return self._judge(ended_ns)

    @property
    def _settled(self) -> bool:
        return self._pending == 0 and all(fate.settled for fate in self._live_fates())

    def _live_fates(self) -> list[Fate]:
        trainers = self.world.trainers
        return [f for f in self.world.fates.values() if trainers[f.envelope.source].alive]

    def _pause_later(self, process: AgentHost | CoordinatorHost) -> None:
        world, scenario = self.world, self.scenario

        def pause() -> None:
            if process.alive:
                process.pause(world.rng.randrange(1, scenario.pause_most_ns))
                self._pause_later(process)

        world.clock.after(int(world.rng.expovariate(1 / scenario.pause_every_ns)), pause)

    def _plan(self, burst: Burst, at_ns: int, times: int) -> None:
        self.world.clock.at(at_ns, lambda: self._post(burst, times))

    def _post(self, burst: Burst, times: int) -> None:
        self._pending -= 1
        world = self.world
        sent: list[TransferId] = []
        self._rounds.append(sent)
        ranks = range(burst.first[0], burst.first[1] + 1)
        for place, rank in enumerate(ranks):
            to_rank = burst.second[0] + place % (burst.second[1] - burst.second[0] + 1)
            delay_ns = world.rng.randrange(max(1, burst.spread_ns))
            gives_up = world.rng.random() < burst.cancel

            def post(rank: int = rank, to_rank: int = to_rank, gives_up: bool = gives_up) -> None:
                trainer = world.trainers[EndpointName(JOB, rank)]
                if trainer.alive:
                    transfer = trainer.send(to_rank, burst.size_bytes, burst.traffic)
                    sent.append(transfer)
                    if gives_up:
                        after_ns = world.rng.randrange(burst.cancel_within_ns)
                        world.clock.after(after_ns, lambda: trainer.cancel(transfer))

            world.clock.after(delay_ns, post)
        if times > 1:
            self._again(burst, times - 1, sent)

    def _again(self, burst: Burst, times: int, sent: list[TransferId]) -> None:
        """The next round begins a gap after the last arrival of this one."""
        world = self.world
        begun_ns = world.clock.now_ns

        def look() -> None:
            fates = [world.fates[transfer] for transfer in sent]
            ended = all(fate.settled or not world.trainers[fate.envelope.source].alive for fate in fates)
            if ended and world.clock.now_ns > begun_ns + burst.spread_ns:
                last_ns = max((fate.landed_ns for fate in fates), default=world.clock.now_ns)
                self._plan(burst, max(world.clock.now_ns, last_ns + burst.gap_ns), times)
            else:
                world.clock.after(5_000_000, look)

        world.clock.after(5_000_000, look)

    def _break(self, fault: Fault) -> None:
        self._pending -= 1
        world = self.world
        match fault.do:
            case "kill_agent":
                world.kill_agent(self._agent_of[fault.rank])
            case "kill_trainer":
                host = world.hosts[self._agent_of[fault.rank]]
                if host.alive and world.trainers[EndpointName(JOB, fault.rank)].alive:
                    host.kill_trainer(EndpointName(JOB, fault.rank), "killed")
            case "kill_coordinator":
                world.coordinators[COORDINATOR].kill("killed")
            case "start_coordinator":
                self._epoch += 1
                world.start_coordinator(COORDINATOR, self._config, self._epoch)
            case other:
                raise ConfigError(f"scenario {self.scenario.name}: unknown fault {other!r}")

    def _judge(self, ended_ns: int) -> Result:
        world = self.world
        fates = list(world.fates.values())
        links = [world.link(*name) for name in self.scenario.links]
        rounds = [[world.fates[transfer] for transfer in sent] for sent in self._rounds]
        counted = [fate for fates in rounds[int(self.scenario.expect.get("after_rounds", 0)) :] for fate in fates]
        result = Result(
            scenario=self.scenario.name,
            seed=self.seed,
            simulated_ns=ended_ns,
            events=world.clock.events,
            messages=len(fates),
            delivered=sum(1 for fate in fates if fate.landed_ns),
            failed=sum(1 for fate in fates if fate.failed is not None and not fate.cancelled),
            cancelled=sum(1 for fate in fates if fate.cancelled),
            drops=sum(link.dropped for link in links),
            retransmits=sum(s.retransmits for h in world.hosts.values() for p in h.peers.values() for s in p.streams),
            peak_queue_bytes=max(link.peak_queue_bytes for link in links),
            fallback_bytes=sum(
                link.fallback_bytes for h in world.hosts.values() for link in h.machine.status(ended_ns).links
            ),
            fct_ns=[fate.fct_ns for fate in counted if fate.landed_ns],
            cct_ns=[
                max(fate.landed_ns for fate in fates) - min(fate.posted_ns for fate in fates)
                for fates in rounds
                if fates and all(fate.landed_ns for fate in fates)
            ],
            ideal_cct_ns=self._ideal_ns(),
            problems=[],
        )
        result.problems = self._problems(result)
        return result

    def _ideal_ns(self) -> int:
        """Of the first burst, when it has the link for itself."""
        if not self.scenario.bursts:
            return 0
        burst = self.scenario.bursts[0]
        link = self.world.link(self._agent_of[burst.first[0]].site, self._agent_of[burst.second[0]].site)
        count = burst.first[1] - burst.first[0] + 1
        nbytes = count * link.wire_bytes(burst.size_bytes)
        return nbytes * NANOS // link.model.rate_bytes_per_s + link.model.one_way_ns

    def _problems(self, result: Result) -> list[str]:
        expect, ideal_ns = self.scenario.expect, max(1, result.ideal_cct_ns)
        mean_ns = sum(result.fct_ns) / max(1, len(result.fct_ns))
        buffer_bytes = min(model.buffer_bytes for model in self.scenario.links.values())
        measured: dict[str, float] = {
            "drops": result.drops,
            "failed": result.failed,
            "fct_p99_over_ideal": result.percentile_ns(0.99) / ideal_ns,
            "fct_mean_over_ideal": mean_ns / ideal_ns,
            "fallback": result.fallback_bytes,
            "queue_over_buffer": result.peak_queue_bytes / buffer_bytes,
        }
        problems = [
            f"{key} is {value:g}, at most {expect[key]:g} expected"
            for key, value in measured.items()
            if key in expect and value > expect[key]
        ]
        if result.delivered < expect.get("delivered_least", 0):
            problems.append(f"{result.delivered} of {result.messages} messages delivered")
        if "failed" not in expect and not self.scenario.faults and result.failed:
            problems.append(f"{result.failed} messages failed without a fault")
        return problems


def run_scenario(path: Path | str, seed: int) -> Result:
    """Run one scenario file with one seed. Raises InvariantError; expectations that weren't met are in ``problems``."""
    return Run(load_scenario(Path(path)), seed).result()


__all__ = ["InvariantError", "Result", "Run", "Scenario", "load_scenario", "run_scenario"]
