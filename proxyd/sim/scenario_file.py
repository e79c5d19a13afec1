"""Scenario files: who is there, what happens, what must come out.

TOML::

    description = "eight senders at once"
    duration = "20s"                       # the longest it may take; it ends when all has settled

    [[link]]                               # each direction by itself
    from = "hami"
    to = "shenzhen"
    capacity = "400Mbit"
    rtt = "60ms"                           # to and fro; half of it each way
    buffer = "300kB"                       # or a share of the BDP: "0.1bdp"
    mtu = 9000                             # optional
    loss = 0.0                             # optional: chance of a packet to be lost
    trace = "moderate"                     # optional: a class of core/traces.py, or a mahimahi-style file beside this
    trace_seed = 1                         # optional: else the run's seed draws the trace as well
    steps = [["5s", 0.5], ["9s", 1.0]]     # optional, without a trace: from then on so many times the capacity
    cross = "100Mbit"                      # optional: traffic that isn't ours,
    cross_on = "2s"                        # ... optional: on for so long,
    cross_off = "3s"                       # ... and then off,
    cross_from = "1s"                      # ... optional: from then on
    cross_tcp = 0                          # optional: so many TCP connections that aren't ours, from the start
    policer = "300Mbit"                    # optional: a token bucket in front of the link
    policer_burst = "2MB"
    live = false                           # optional: the coordinator finds and follows the rate by itself, and is told
    hint = "300Mbit"                       # ... optional: this for a start, and neither round trip nor buffer

    [[line]]                               # optional: a site's access line, shared by all links out of it or into it
    site = "hami"
    direction = "egress"                   # or "ingress"
    capacity = "400Mbit"
    buffer = "300kB"
    told = true                            # optional: the coordinator knows that there is such a line,
    known = true                           # ... and what it carries

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

    [[backlog]]                            # each rank of `from` always has messages posted
    at = "1s"
    for = "10s"
    from = [0, 7]
    to = [8, 15]
    size = "8MiB"
    traffic = "pipeline"
    depth = 4                              # optional: so many at a time

    [[pipeline]]                           # micro-batches there, their gradients back: both directions at once
    at = "1s"
    from = [0, 3]
    to = [4, 7]
    size = "4MiB"
    compute = "100ms"                      # from a message's arrival to the answer, and between two first sends
    in_flight = 2                          # micro-batches under way for each pair
    count = 8                              # micro-batches of each pair

    [[checkpoint]]                         # bulk: each rank of `from` posts `size`, cut into messages
    at = "1s"
    from = [0, 3]
    to = [4, 7]
    size = "64MiB"
    message = "16MiB"
    every = "5s"
    times = 2

    [[fault]]                              # optional
    at = "2s"
    do = "kill_agent"                      # kill_agent | kill_trainer | kill_coordinator | start_coordinator
    rank = 0                               # of an agent's trainer

    [expect]                               # optional bounds
    after_rounds = 1                       # optional: completion times count from this round on (warm connections)
    drops = 0                              # packets, over all links
    failed = 0
    fct_p99_over_ideal = 1.08
    fct_mean_over_ideal = 0.65
    measure = ["3s", "11s"]                # the first link (or line) between these two times:
    measure_line = true                    # ... optional: the first line instead of the first link
    utilisation_least = 0.9                # ... bytes carried over bytes that could have been,
    queue_p99_bdp = 0.25                   # ... the queue that is exceeded 1 % of the time,
    loss = 0.001                           # ... bytes dropped over bytes offered, ours

The invariants of :mod:`proxyd.sim.checks` hold in every scenario without being named.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.errors import ConfigError
from proxyd.core.ids import LinkName
from proxyd.core.policy import BottleneckSettings
from proxyd.core.traces import TRACE_CLASSES, RateTrace, from_opportunities, parse_opportunities, steps, synthetic
from proxyd.core.units import parse_buffer, parse_duration, parse_rate, parse_size
from proxyd.sim.link import CrossTraffic, LinkModel, Policer
from proxyd.wire.envelope import TrafficClass


@dataclasses.dataclass(frozen=True, slots=True)
class LinkPlan:
    """One link of a scenario. Its trace may depend on the run's seed."""

    name: LinkName
    base: LinkModel
    """Without a trace."""
    trace_class: str
    trace_seed: int | None
    trace: RateTrace | None
    cross_tcp: int
    live: bool
    hint_bytes_per_s: int

    def model(self, seed: int, duration_ns: int) -> LinkModel:
        """The link in a run."""
        trace = self.trace
        if self.trace_class:
            trace_seed = seed if self.trace_seed is None else self.trace_seed
            trace = synthetic(self.trace_class, self.base.rate_bytes_per_s, duration_ns, trace_seed)
        return dataclasses.replace(self.base, trace=trace)

    def settings(self) -> LinkSettings:
        """What the coordinator is told."""
        base = self.base
        if self.live:
            source = "configured" if self.hint_bytes_per_s else "default"
            return LinkSettings(self.name, self.hint_bytes_per_s, mtu_bytes=base.mtu_bytes, source=source, live=True)
        return LinkSettings(
            self.name, base.rate_bytes_per_s, 2 * base.one_way_ns, base.buffer_bytes, mtu_bytes=base.mtu_bytes
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Agents:
    """Agents of one site."""

    site: str
    count: int
    first_rank: int
    ranks_each: int
    memory_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """Who sends to whom: each of the first range to the one at the same place of the second."""

    first: tuple[int, int]
    second: tuple[int, int]

    def pairs(self) -> list[tuple[int, int]]:
        """(sender, receiver)."""
        span = self.second[1] - self.second[0] + 1
        return [
            (rank, self.second[0] + place % span) for place, rank in enumerate(range(self.first[0], self.first[1] + 1))
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Burst:
    """Messages that are posted together."""

    at_ns: int
    ranks: Ranks
    size_bytes: int
    traffic: TrafficClass
    times: int
    gap_ns: int
    spread_ns: int
    cancel: float
    cancel_within_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class BacklogPlan:
    """Senders that always have something to send."""

    at_ns: int
    for_ns: int
    ranks: Ranks
    size_bytes: int
    traffic: TrafficClass
    depth: int


@dataclasses.dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Micro-batches there and back."""

    at_ns: int
    ranks: Ranks
    size_bytes: int
    compute_ns: int
    in_flight: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Bulk, again and again."""

    at_ns: int
    ranks: Ranks
    size_bytes: int
    message_bytes: int
    every_ns: int
    times: int


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
    links: tuple[LinkPlan, ...]
    lines: Mapping[tuple[str, bool], LinkModel]
    """Access lines by (site, egress)."""
    bottlenecks: tuple[BottleneckSettings, ...]
    """What the coordinator is told of them."""
    control_ns: int
    jitter_ns: int
    pause_every_ns: int
    """0: never."""
    pause_most_ns: int
    slow_start_after_idle: bool
    agents: tuple[Agents, ...]
    bursts: tuple[Burst, ...]
    backlogs: tuple[BacklogPlan, ...]
    pipelines: tuple[PipelinePlan, ...]
    checkpoints: tuple[CheckpointPlan, ...]
    faults: tuple[Fault, ...]
    expect: Mapping[str, float]
    measure_ns: tuple[int, int] | None
    measure_line: bool


_EGRESS = {"egress": True, "ingress": False}
_KEYS = {
    "": {
        "description",
        "duration",
        "slow_start_after_idle",
        "link",
        "line",
        "control",
        "pauses",
        "agents",
        "burst",
        "backlog",
        "pipeline",
        "checkpoint",
        "fault",
        "expect",
    },
    "link": {
        "from",
        "to",
        "capacity",
        "rtt",
        "buffer",
        "mtu",
        "loss",
        "trace",
        "trace_seed",
        "steps",
        "cross",
        "cross_on",
        "cross_off",
        "cross_from",
        "cross_tcp",
        "policer",
        "policer_burst",
        "live",
        "hint",
    },
    "line": {"site", "direction", "capacity", "buffer", "told", "known"},
    "control": {"delay", "jitter"},
    "pauses": {"every", "most"},
    "agents": {"site", "count", "first_rank", "ranks_each", "memory"},
    "burst": {"at", "from", "to", "size", "traffic", "times", "gap", "spread", "cancel", "cancel_within"},
    "backlog": {"at", "for", "from", "to", "size", "traffic", "depth"},
    "pipeline": {"at", "from", "to", "size", "compute", "in_flight", "count"},
    "checkpoint": {"at", "from", "to", "size", "message", "every", "times"},
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
        "measure",
        "measure_line",
        "utilisation_least",
        "queue_p99_bdp",
        "loss",
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
        return _scenario(path, data)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error


def _ranks(entry: Mapping[str, Any]) -> Ranks:
    return Ranks((entry["from"][0], entry["from"][1]), (entry["to"][0], entry["to"][1]))


def _scenario(path: Path, data: Mapping[str, Any]) -> Scenario:
    control, pauses, expect = data.get("control", {}), data.get("pauses", {}), dict(data.get("expect", {}))
    measure, measure_line = expect.pop("measure", None), bool(expect.pop("measure_line", False))
    if measure_line and not data.get("line"):
        raise ValueError("measure_line needs a [[line]]")
    return Scenario(
        name=path.stem,
        description=data["description"],
        duration_ns=parse_duration(data["duration"]),
        links=tuple(_link(path, link) for link in data["link"]),
        lines={
            (line["site"], _EGRESS[line["direction"]]): LinkModel(
                parse_rate(line["capacity"]), 0, parse_size(line["buffer"])
            )
            for line in data.get("line", ())
        },
        bottlenecks=tuple(
            BottleneckSettings(
                line["site"], _EGRESS[line["direction"]], parse_rate(line["capacity"]) if line.get("known") else 0
            )
            for line in data.get("line", ())
            if line.get("told") or line.get("known")
        ),
        control_ns=parse_duration(control.get("delay", "300us")),
        jitter_ns=parse_duration(control.get("jitter", "200us")),
        pause_every_ns=parse_duration(pauses["every"]) if pauses else 0,
        pause_most_ns=parse_duration(pauses["most"]) if pauses else 0,
        slow_start_after_idle=bool(data.get("slow_start_after_idle", False)),
        agents=tuple(
            Agents(a["site"], a["count"], a["first_rank"], a.get("ranks_each", 1), parse_size(a.get("memory", "1GiB")))
            for a in data["agents"]
        ),
        bursts=tuple(_burst(entry) for entry in data.get("burst", ())),
        backlogs=tuple(
            BacklogPlan(
                parse_duration(b["at"]),
                parse_duration(b["for"]),
                _ranks(b),
                parse_size(b["size"]),
                TrafficClass.parse(b["traffic"]),
                b.get("depth", 4),
            )
            for b in data.get("backlog", ())
        ),
        pipelines=tuple(
            PipelinePlan(
                parse_duration(p["at"]),
                _ranks(p),
                parse_size(p["size"]),
                parse_duration(p["compute"]),
                p.get("in_flight", 2),
                p["count"],
            )
            for p in data.get("pipeline", ())
        ),
        checkpoints=tuple(
            CheckpointPlan(
                parse_duration(c["at"]),
                _ranks(c),
                parse_size(c["size"]),
                parse_size(c["message"]),
                parse_duration(c["every"]),
                c.get("times", 1),
            )
            for c in data.get("checkpoint", ())
        ),
        faults=tuple(Fault(parse_duration(f["at"]), f["do"], f.get("rank", -1)) for f in data.get("fault", ())),
        expect=expect,
        measure_ns=None if measure is None else (parse_duration(measure[0]), parse_duration(measure[1])),
        measure_line=measure_line,
    )


def _burst(entry: Mapping[str, Any]) -> Burst:
    return Burst(
        parse_duration(entry["at"]),
        _ranks(entry),
        parse_size(entry["size"]),
        TrafficClass.parse(entry["traffic"]),
        entry.get("times", 1),
        parse_duration(entry.get("gap", "350ms")),
        parse_duration(entry.get("spread", "0.2ms")),
        float(entry.get("cancel", 0.0)),
        parse_duration(entry.get("cancel_within", "2s")),
    )


def _link(path: Path, entry: Mapping[str, Any]) -> LinkPlan:
    rate, rtt_ns = parse_rate(entry["capacity"]), parse_duration(entry["rtt"])
    kind, trace = entry.get("trace", ""), None
    if kind and kind not in TRACE_CLASSES:
        file = path.parent / kind
        try:
            text = file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: trace {kind!r} is no class, and {file} can't be read",
                next_step=f"Classes: {', '.join(TRACE_CLASSES)}",
            ) from error
        trace, kind = from_opportunities(parse_opportunities(text, str(file))).scaled(rate), ""
    elif "steps" in entry:
        trace = steps(rate, [(parse_duration(at), float(factor)) for at, factor in entry["steps"]])
    cross = policer = None
    if "cross" in entry:
        on_ns = parse_duration(entry["cross_on"]) if "cross_on" in entry else 0
        cross = CrossTraffic(
            parse_rate(entry["cross"]),
            on_ns,
            parse_duration(entry["cross_off"]) if on_ns else 0,
            parse_duration(entry.get("cross_from", "0s"), zero_ok=True),
        )
    if "policer" in entry:
        policer = Policer(parse_rate(entry["policer"]), parse_size(entry["policer_burst"]))
    return LinkPlan(
        name=LinkName(entry["from"], entry["to"]),
        base=LinkModel(
            rate,
            rtt_ns // 2,
            parse_buffer(entry["buffer"], rate, rtt_ns),
            mtu_bytes=entry.get("mtu", 9000),
            loss=float(entry.get("loss", 0.0)),
            cross=cross,
            policer=policer,
        ),
        trace_class=kind,
        trace_seed=entry.get("trace_seed"),
        trace=trace,
        cross_tcp=entry.get("cross_tcp", 0),
        live=bool(entry.get("live", False)),
        hint_bytes_per_s=parse_rate(entry["hint"]) if "hint" in entry else 0,
    )
