"""Runs of scenario files (their format: :mod:`proxyd.sim.scenario_file`): the invariants hold, the bounds are met."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from proxyd.core.coordinator import CoordinatorConfig
from proxyd.core.errors import ConfigError
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.sim.checks import InvariantError, check_coordinator, check_end
from proxyd.sim.cross import start_cross_tcp
from proxyd.sim.host import AgentHost
from proxyd.sim.link import NANOS, Link, LinkCounts
from proxyd.sim.scenario_file import Burst, Fault, Ranks, Scenario, load_scenario
from proxyd.sim.trainer import Fate
from proxyd.sim.workloads import Backlog, Checkpoint, Pair, Pipeline, Workload
from proxyd.sim.world import CoordinatorHost, World

JOB = "sim"
COORDINATOR = "coordinator:7600"
SETTLE_NS = 12 * NANOS
"""After the last message: leases, lingering and time-outs come to their ends."""
STEP_NS = 50_000_000
COUNT_NS = 1_000_000
"""How often the measured link is looked at."""


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
    utilisation: float
    """Of the first link (or line), in the time that ``measure`` names; 0 without it."""
    problems: list[str]
    """Expectations that weren't met; empty: passed."""

    def percentile_ns(self, share: float) -> int:
        """Of the completion times."""
        ordered = sorted(self.fct_ns)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


class Run:
    """One run of a scenario with one seed."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.world = world = World(
            seed,
            {plan.name: plan.model(seed, scenario.duration_ns + SETTLE_NS) for plan in scenario.links},
            lines=dict(scenario.lines),
            control_ns=scenario.control_ns,
            control_jitter_ns=scenario.jitter_ns,
            slow_start_after_idle=scenario.slow_start_after_idle,
        )
        world.check_coordinator = check_coordinator
        self._config = CoordinatorConfig(
            links=tuple(plan.settings() for plan in scenario.links),
            bottlenecks=scenario.bottlenecks,
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
        self._workloads: list[Workload] = []
        self._plan_workloads()
        for plan in scenario.links:
            for _ in range(plan.cross_tcp):
                link = world.link(plan.name.src_site, plan.name.dst_site)
                start_cross_tcp(world.clock, link, 2 * plan.base.one_way_ns, world.rng)
        self._counts: list[LinkCounts] = []
        if scenario.measure_ns is not None:
            world.clock.at(scenario.measure_ns[0], self._count, scenario.measure_ns[1])
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
        if self._pending or any(workload.pending for workload in self._workloads):
            return False
        return all(fate.settled for fate in self._live_fates())

    def _count(self, until_ns: int) -> None:
        self._counts.append(self._measured.counts())
        if self.world.clock.now_ns < until_ns:
            self.world.clock.after(COUNT_NS, self._count, until_ns)

    @property
    def _measured(self) -> Link:
        if self.scenario.measure_line:
            return next(iter(self.world.access.values()))
        name = self.scenario.links[0].name
        return self.world.link(name.src_site, name.dst_site)

    def _plan_workloads(self) -> None:
        world, scenario = self.world, self.scenario
        planned: list[tuple[int, Workload]] = []
        for backlog in scenario.backlogs:
            planned.append(
                (
                    backlog.at_ns,
                    Backlog(
                        world,
                        _pairs(backlog.ranks),
                        backlog.size_bytes,
                        backlog.traffic,
                        depth=backlog.depth,
                        until_ns=backlog.at_ns + backlog.for_ns,
                    ),
                )
            )
        for pipeline in scenario.pipelines:
            planned.append(
                (
                    pipeline.at_ns,
                    Pipeline(
                        world,
                        _pairs(pipeline.ranks),
                        pipeline.size_bytes,
                        compute_ns=pipeline.compute_ns,
                        in_flight=pipeline.in_flight,
                        count=pipeline.count,
                    ),
                )
            )
        for checkpoint in scenario.checkpoints:
            planned.append(
                (
                    checkpoint.at_ns,
                    Checkpoint(
                        world,
                        _pairs(checkpoint.ranks),
                        checkpoint.size_bytes,
                        message_bytes=checkpoint.message_bytes,
                        every_ns=checkpoint.every_ns,
                        times=checkpoint.times,
                    ),
                )
            )
        for at_ns, workload in planned:
            self._workloads.append(workload)
            world.clock.at(at_ns, workload.start)

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
        for rank, to_rank in burst.ranks.pairs():
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
        links = [world.link(plan.name.src_site, plan.name.dst_site) for plan in self.scenario.links]
        links += world.access.values()
        rounds = [[world.fates[transfer] for transfer in sent] for sent in self._rounds]
        counted = [fate for fates in rounds[int(self.scenario.expect.get("after_rounds", 0)) :] for fate in fates]
        if not rounds:
            counted = fates
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
            utilisation=0.0,
            problems=[],
        )
        result.problems = self._problems(result)
        return result

    def _ideal_ns(self) -> int:
        """Of the first burst, when it has the link for itself."""
        if not self.scenario.bursts:
            return 0
        burst = self.scenario.bursts[0]
        pairs = burst.ranks.pairs()
        link = self.world.link(self._agent_of[pairs[0][0]].site, self._agent_of[pairs[0][1]].site)
        count = len(pairs)
        nbytes = count * link.wire_bytes(burst.size_bytes)
        return nbytes * NANOS // link.model.rate_bytes_per_s + link.model.one_way_ns

    def _problems(self, result: Result) -> list[str]:
        expect, ideal_ns = self.scenario.expect, max(1, result.ideal_cct_ns)
        mean_ns = sum(result.fct_ns) / max(1, len(result.fct_ns))
        buffer_bytes = min(plan.base.buffer_bytes for plan in self.scenario.links)
        measured: dict[str, float] = {
            "drops": result.drops,
            "failed": result.failed,
            "fct_p99_over_ideal": result.percentile_ns(0.99) / ideal_ns,
            "fct_mean_over_ideal": mean_ns / ideal_ns,
            "fallback": result.fallback_bytes,
            "queue_over_buffer": result.peak_queue_bytes / buffer_bytes,
        }
        if self._counts:
            queues = sorted(one.queue_bytes for one in self._counts)
            bdp = self._measured.model.rate_bytes_per_s * 2 * self.scenario.links[0].base.one_way_ns / NANOS
            measured["queue_p99_bdp"] = queues[int(0.99 * (len(queues) - 1))] / bdp
            measured["loss"] = self._counts[-1].loss_since(self._counts[0])
            result.utilisation = self._counts[-1].utilisation_since(self._counts[0])
        problems = [
            f"{key} is {value:g}, at most {expect[key]:g} expected"
            for key, value in measured.items()
            if key in expect and value > expect[key]
        ]
        if result.delivered < expect.get("delivered_least", 0):
            problems.append(f"{result.delivered} of {result.messages} messages delivered")
        if result.utilisation < expect.get("utilisation_least", 0):
            problems.append(
                f"{result.utilisation:.3f} of the link was used, at least {expect['utilisation_least']:g} expected"
            )
        if "failed" not in expect and not self.scenario.faults and result.failed:
            problems.append(f"{result.failed} messages failed without a fault")
        return problems


def _pairs(ranks: Ranks) -> list[Pair]:
    return [Pair(EndpointName(JOB, one), EndpointName(JOB, other)) for one, other in ranks.pairs()]


def run_scenario(path: Path | str, seed: int) -> Result:
    """Run one scenario file with one seed. Raises InvariantError; expectations that weren't met are in ``problems``."""
    return Run(load_scenario(Path(path)), seed).result()


__all__ = ["InvariantError", "Result", "Run", "Scenario", "load_scenario", "run_scenario"]
