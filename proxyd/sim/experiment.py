"""One link under load, measured: what ``proxyd simulate link`` runs.

Two sites, senders at one and receivers at the other, one coordinator beside the senders (or as far away as told) that
knows nothing of the link unless a hint is given. The way there plays a rate trace; the way back is of the mean rate and
carries only what the workload sends back.

**Figures** begin after the first ten round trips (:attr:`LinkExperiment.warm_up_ns`): start-up is another question.

* ``utilisation``: bytes that the link carried over bytes that it could have carried, cross traffic included.
* ``queue_p99_bdp``: the queue that was exceeded 1 % of the time, in BDP of the *mean* rate.
* ``loss``: bytes dropped (buffer, policer) or lost on the way over bytes offered, ours alone.
* ``fct_seconds``: of messages that were posted after the warm-up and have arrived by the end.
* ``estimate_error_p50`` and ``_p95``: ``|estimate - true| / true``, sampled every 10 ms, where *true* is the payload
  rate that is left for us at that instant: of the trace, less constant cross traffic, at most the policer's.
* ``step``, where the rate changes once: after how many round trips the queue is back under 0.1 BDP and stays there for
  one, after how many 0.9 of the link is used for five in a row, and the loss of the five round trips after the change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig
from proxyd.core.coordinator_status import LinkStatus
from proxyd.core.errors import ConfigError
from proxyd.core.ids import AgentName, EndpointName, LinkName
from proxyd.core.traces import MAX_RATE_BYTES_PER_S, MIN_RATE_BYTES_PER_S, RateTrace
from proxyd.sim.checks import check_coordinator
from proxyd.sim.cross import start_cross_tcp
from proxyd.sim.link import HEADERS_BYTES, NANOS, CrossTraffic, LinkCounts, LinkModel, Policer
from proxyd.sim.workloads import Backlog, Checkpoint, Pair, Pipeline, Rounds, Workload
from proxyd.sim.world import World
from proxyd.wire.envelope import TrafficClass

COORDINATOR = "coordinator:7600"
THERE = LinkName("a", "b")
BACK = LinkName("b", "a")
JOB = "sim"
SAMPLE_NS = 10_000_000
QUEUE_SAMPLE_NS = 1_000_000
WARM_UP_ROUND_TRIPS = 10
WORKLOADS = ("backlog", "burst", "pipeline", "mixed", "checkpoint")


@dataclasses.dataclass(frozen=True, slots=True)
class LinkExperiment:
    """Everything that a run depends on. Raises ConfigError for what can't be simulated."""

    trace: RateTrace
    """Wire bytes per second, over the time since the workload began."""
    rtt_ns: int
    buffer_bytes: int
    senders: int
    duration_ns: int
    seed: int = 1
    nominal_bytes_per_s: int = 0
    """What counts as the link's rate; 0: the trace's mean."""
    step_ns: int = 0
    """When the rate changes for good; 0: it doesn't."""
    workload: str = "backlog"
    message_bytes: int = 8 << 20
    traffic: TrafficClass = TrafficClass.PIPELINE
    hint_bytes_per_s: int = 0
    """Configured capacity, wire; 0: none, everything is found."""
    fixed: bool = False
    """The hint is believed for ever (no live estimate)."""
    told: bool = False
    """The coordinator knows round trip and buffer."""
    cross: CrossTraffic | None = None
    cross_tcp: int = 0
    """So many TCP connections that aren't ours, from one round trip after the start on."""
    policer: Policer | None = None
    loss: float = 0.0
    control_rtt_ns: int = 1_000_000
    mtu_bytes: int = 1500
    slow_start_after_idle: bool = False
    congestion_control: str = "cubic"
    """Of the agents' streams, below their grants: cubic or bbr."""
    bursts: int = 0
    """Of the burst workload: so many, then the run is over when all have arrived; 0: until the end of its time."""
    check: bool = False
    """Look at the coordinator's invariants after each of its events."""

    def __post_init__(self) -> None:
        rate = self.rate_bytes_per_s
        if not MIN_RATE_BYTES_PER_S <= rate <= MAX_RATE_BYTES_PER_S:
            raise ConfigError(f"a link of {rate} bytes/s is not simulated: 10 Mbit/s to 100 Gbit/s are")
        if self.workload not in WORKLOADS:
            raise ConfigError(f"there is no workload {self.workload!r}", next_step=f"Known: {', '.join(WORKLOADS)}")
        if self.rtt_ns < 100_000 or self.senders < 1 or self.senders > 1000 or self.buffer_bytes < self.mtu_bytes:
            raise ConfigError(
                f"round trip {self.rtt_ns} ns, {self.senders} senders and a buffer of {self.buffer_bytes} bytes: not "
                "simulated",
                why="the round trip must be 0.1 ms or more, senders 1 to 1000, and the buffer must hold a packet",
            )
        if not 0 <= self.loss < 0.5:
            raise ConfigError(f"a loss of {self.loss} is not simulated: from 0 to less than 0.5 is")
        if self.duration_ns <= self.warm_up_ns:
            raise ConfigError(
                f"{self.duration_ns / NANOS:g} s are too short: figures begin after {self.warm_up_ns / NANOS:g} s "
                f"(ten round trips)"
            )

    @property
    def rate_bytes_per_s(self) -> int:
        """Mean rate of the link, wire."""
        return self.nominal_bytes_per_s or self.trace.mean_bytes_per_s

    @property
    def bdp_bytes(self) -> int:
        """Of the mean rate."""
        return self.rate_bytes_per_s * self.rtt_ns // NANOS

    @property
    def start_ns(self) -> int:
        """When the workload begins: control sessions and connections stand by then."""
        return max(NANOS // 2, 4 * self.rtt_ns + 4 * self.control_rtt_ns)

    @property
    def warm_up_ns(self) -> int:
        """From the workload's beginning to that of the figures."""
        return WARM_UP_ROUND_TRIPS * self.rtt_ns


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The link and its coordinator at one instant."""

    time_ns: int
    """Since the workload began."""
    rate_bytes_per_s: int
    """True payload rate left for us."""
    estimate_bytes_per_s: int
    pace_bytes_per_s: int
    queue_bytes: int
    """At the gateway, wire."""
    outstanding_bytes: int
    """Granted and not acknowledged."""


@dataclasses.dataclass(slots=True)
class LinkResult:
    """What came out."""

    utilisation: float
    queue_p99_bdp: float
    loss: float
    fct_ns: list[int]
    estimate_error_p50: float
    estimate_error_p95: float
    ours_share: float
    """Our wire bytes over what the link could carry."""
    retransmits: int
    """Packets, over the whole run."""
    messages: int
    """Arrived, over the whole run."""
    events: int
    step: dict[str, float | None]
    series: list[Sample]

    def figures(self) -> dict[str, Any]:
        """As ``proxyd simulate link`` writes them."""
        fct_s = sorted(fct / NANOS for fct in self.fct_ns)
        figures: dict[str, Any] = {
            "utilisation": round(self.utilisation, 5),
            "queue_p99_bdp": round(self.queue_p99_bdp, 5),
            "loss": round(self.loss, 7),
            "fct_seconds": {
                "mean": round(sum(fct_s) / len(fct_s), 6) if fct_s else None,
                "p50": round(percentile(fct_s, 0.5), 6) if fct_s else None,
                "p99": round(percentile(fct_s, 0.99), 6) if fct_s else None,
            },
            "estimate_error_p50": round(self.estimate_error_p50, 5),
            "estimate_error_p95": round(self.estimate_error_p95, 5),
            "ours_share": round(self.ours_share, 5),
            "retransmits": self.retransmits,
            "messages": self.messages,
        }
        if self.step:
            figures["step"] = {key: None if value is None else round(value, 5) for key, value in self.step.items()}
        return figures


def percentile(ordered: list[float], share: float) -> float:
    """Nearest rank of an ordered list that isn't empty."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * len(ordered) * 1000) // 1000)))]


class LinkRun:
    """One run. Use :func:`run_link`."""

    def __init__(self, experiment: LinkExperiment) -> None:
        self.experiment = experiment
        self.world = _world(experiment)
        self.coordinator = self.world.coordinators[COORDINATOR]
        self.link = self.world.link(THERE.src_site, THERE.dst_site)
        self.series: list[Sample] = []
        self.workloads: list[Workload] = []
        self._counts: list[LinkCounts] = []
        """One each millisecond, from the end of the warm-up on."""
        self._end_ns = experiment.start_ns + experiment.duration_ns
        self._from_ns = experiment.start_ns + experiment.warm_up_ns
        clock = self.world.clock
        clock.at(experiment.start_ns, self._start)
        clock.at(self._from_ns, self._count)

    def _start(self) -> None:
        pairs = [
            Pair(EndpointName(JOB, rank), EndpointName(JOB, self.experiment.senders + rank))
            for rank in range(self.experiment.senders)
        ]
        self.workloads = _workloads(self.experiment, self.world, pairs, self._end_ns)
        for workload in self.workloads:
            workload.start()
        for _ in range(self.experiment.cross_tcp):
            start_cross_tcp(self.world.clock, self.link, self.experiment.rtt_ns, self.world.rng)
        self._sample()

    def true_bytes_per_s(self, time_ns: int) -> int:
        """Payload rate that is left for us, cross TCP aside."""
        experiment = self.experiment
        wire = self.link.service.rate_at(time_ns)
        cross = experiment.cross
        if cross is not None and time_ns >= cross.start_ns:
            on = not cross.on_ns or (time_ns - cross.start_ns) % (cross.on_ns + cross.off_ns) < cross.on_ns
            wire -= cross.rate_bytes_per_s if on else 0
        if experiment.policer is not None:
            wire = min(wire, experiment.policer.rate_bytes_per_s)
        mtu = experiment.mtu_bytes
        return max(1, wire * (mtu - HEADERS_BYTES) // mtu)

    def status(self) -> LinkStatus:
        """What the coordinator says of the link."""
        statuses = self.coordinator.machine.links_status(self.world.clock.now_ns)
        return next(status for status in statuses if status.link == THERE)

    def _sample(self) -> None:
        now_ns = self.world.clock.now_ns
        status = self.status()
        self.series.append(
            Sample(
                now_ns - self.experiment.start_ns,
                self.true_bytes_per_s(now_ns),
                status.bottleneck_bytes_per_s,
                status.pace_bytes_per_s,
                self.link.queue_bytes,
                status.outstanding_bytes,
            )
        )
        self.world.clock.after(SAMPLE_NS, self._sample)

    def _count(self) -> None:
        self._counts.append(self.link.counts())
        self.world.clock.after(QUEUE_SAMPLE_NS, self._count)

    def result(self) -> LinkResult:
        """Run it to its end."""
        clock, link, experiment = self.world.clock, self.link, self.experiment
        clock.run(self._end_ns, done=self._over if experiment.bursts else None)
        before, after = self._counts[0], link.counts()
        warm_ns = experiment.warm_up_ns
        errors = sorted(
            abs(sample.estimate_bytes_per_s - sample.rate_bytes_per_s) / sample.rate_bytes_per_s
            for sample in self.series
            if sample.time_ns >= warm_ns
        )
        fates = [fate for fate in self.world.fates.values() if fate.landed_ns]
        ours = (after.carried_bytes - before.carried_bytes) - (after.cross_bytes - before.cross_bytes)
        streams = [s for host in self.world.hosts.values() for peer in host.peers.values() for s in peer.streams]
        return LinkResult(
            utilisation=after.utilisation_since(before),
            queue_p99_bdp=percentile(sorted(float(c.queue_bytes) for c in self._counts), 0.99) / experiment.bdp_bytes,
            loss=after.loss_since(before),
            fct_ns=[fate.fct_ns for fate in fates if fate.posted_ns >= self._from_ns],
            estimate_error_p50=percentile(errors, 0.5),
            estimate_error_p95=percentile(errors, 0.95),
            ours_share=max(0, ours) / max(1, after.capacity_bytes - before.capacity_bytes),
            retransmits=sum(stream.retransmits for stream in streams),
            messages=len(fates),
            events=clock.events,
            step=self._after_step() if experiment.step_ns else {},
            series=self.series,
        )

    def _over(self) -> bool:
        if self.world.clock.now_ns <= self._from_ns or any(workload.pending for workload in self.workloads):
            return False
        return all(fate.settled for fate in self.world.fates.values())

    def _after_step(self) -> dict[str, float | None]:
        experiment, rtt_ns = self.experiment, self.experiment.rtt_ns
        step_ns = experiment.start_ns + experiment.step_ns
        counts = [one for one in self._counts if one.time_ns >= step_ns]
        per_rtt = max(1, rtt_ns // QUEUE_SAMPLE_NS)
        low, run = experiment.bdp_bytes / 10, 0
        queue_after: float | None = None
        for one in counts:
            run = run + 1 if one.queue_bytes <= low else 0
            if run == per_rtt:
                queue_after = max(0.0, (one.time_ns - step_ns) / rtt_ns - 1)
                break
        used_after: float | None = None
        for place in range(len(counts) - 5 * per_rtt):
            if counts[place + 5 * per_rtt].utilisation_since(counts[place]) >= 0.9:
                used_after = (counts[place].time_ns - step_ns) / rtt_ns
                break
        return {
            "queue_under_tenth_bdp_after_rtts": queue_after,
            "used_90_percent_after_rtts": used_after,
            "loss_of_5_rtts": counts[min(5 * per_rtt, len(counts) - 1)].loss_since(counts[0]),
        }


def run_link(experiment: LinkExperiment) -> LinkResult:
    """Run it; the same result for the same experiment."""
    return LinkRun(experiment).result()


def _world(experiment: LinkExperiment) -> World:
    one_way_ns = experiment.rtt_ns // 2
    rate = experiment.rate_bytes_per_s
    there = LinkModel(
        rate,
        one_way_ns,
        experiment.buffer_bytes,
        mtu_bytes=experiment.mtu_bytes,
        loss=experiment.loss,
        trace=experiment.trace.restarted(experiment.start_ns),
        cross=None
        if experiment.cross is None
        else dataclasses.replace(experiment.cross, start_ns=experiment.cross.start_ns + experiment.start_ns),
        policer=experiment.policer,
    )
    back = LinkModel(rate, experiment.rtt_ns - one_way_ns, experiment.buffer_bytes, mtu_bytes=experiment.mtu_bytes)
    jitter_ns = min(200_000, experiment.control_rtt_ns // 4)
    bdp = experiment.bdp_bytes
    world = World(
        experiment.seed,
        {THERE: there, BACK: back},
        control_ns=(experiment.control_rtt_ns - jitter_ns) // 2,
        control_jitter_ns=jitter_ns,
        # Hosts tuned for their path: neither receive memory nor send buffers shall be what is measured.
        eager_bytes=max(64 << 20, 4 * bdp, 4 * experiment.message_bytes),
        stream_capacity_bytes=max(4 << 20, bdp // 2),
        slow_start_after_idle=experiment.slow_start_after_idle,
        congestion_control=experiment.congestion_control,
    )
    if experiment.check:
        world.check_coordinator = check_coordinator
    links = tuple(_settings(experiment, name) for name in (THERE, BACK))
    config = CoordinatorConfig(links=links, control_rtt_ns=experiment.control_rtt_ns)
    world.start_coordinator(COORDINATOR, config, 1)
    memory_bytes = 1 << 50
    for index in range(experiment.senders):
        for site, first in ((THERE.src_site, 0), (THERE.dst_site, experiment.senders)):
            host = world.start_agent(AgentName(site, f"host{index}"), (COORDINATOR,), memory_bytes)
            world.start_trainer(host, EndpointName(JOB, first + index))
    return world


def _settings(experiment: LinkExperiment, name: LinkName) -> LinkSettings:
    return LinkSettings(
        name,
        experiment.hint_bytes_per_s,
        experiment.rtt_ns if experiment.told else 0,
        experiment.buffer_bytes if experiment.told else 0,
        mtu_bytes=experiment.mtu_bytes,
        source="configured" if experiment.hint_bytes_per_s else "default",
        live=not experiment.fixed,
    )


def _workloads(experiment: LinkExperiment, world: World, pairs: list[Pair], end_ns: int) -> list[Workload]:
    nbytes = experiment.message_bytes
    match experiment.workload:
        case "backlog":
            return [Backlog(world, pairs, nbytes, experiment.traffic, depth=_depth(experiment), until_ns=end_ns)]
        case "burst":
            until_ns = 0 if experiment.bursts else end_ns
            return [
                Rounds(
                    world,
                    pairs,
                    nbytes,
                    experiment.traffic,
                    gap_ns=350_000_000,
                    times=experiment.bursts,
                    until_ns=until_ns,
                )
            ]
        case "pipeline":
            # Both directions busy three quarters of the time, if each pair had nobody beside it.
            compute_ns = len(pairs) * nbytes * NANOS // experiment.rate_bytes_per_s
            in_flight = 2 + 2 * experiment.rtt_ns // max(1, compute_ns)
            return [Pipeline(world, pairs, nbytes, compute_ns=compute_ns, in_flight=in_flight, until_ns=end_ns)]
        case "mixed":
            half = pairs[: max(1, len(pairs) // 2)]
            return [
                Backlog(world, half, nbytes, TrafficClass.BULK, depth=_depth(experiment), until_ns=end_ns),
                Rounds(world, pairs, max(1, nbytes // 8), TrafficClass.SYNC, gap_ns=NANOS, until_ns=end_ns),
                Rounds(world, pairs, max(1, nbytes // 16), TrafficClass.PIPELINE, gap_ns=300_000_000, until_ns=end_ns),
            ]
        case _:
            # A checkpoint that takes half of its ten seconds, and tensors in between.
            size = max(nbytes, experiment.rate_bytes_per_s * 5 // len(pairs))
            return [
                Checkpoint(world, pairs, size, message_bytes=8 * nbytes, every_ns=10 * NANOS, until_ns=end_ns),
                Rounds(world, pairs, max(1, nbytes // 8), TrafficClass.PIPELINE, gap_ns=500_000_000, until_ns=end_ns),
            ]


def _depth(experiment: LinkExperiment) -> int:
    """Messages per sender, so that one alone can fill the path and has more waiting."""
    return 3 + -(-2 * experiment.bdp_bytes // experiment.message_bytes)
