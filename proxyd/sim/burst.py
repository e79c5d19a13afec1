"""The burst of the demo on modelled links, for comparison with the same burst over real sockets.

Several senders, each on a host of its own, send one message each at the same moment, again and again: the next burst
begins a pause after the last arrival. With a cold start (:attr:`BurstFct.cold`: the first burst of fresh connections)
and warm (all later ones). :func:`burst_fct` runs proxyd, :func:`plain_fct` the same TCP without any coordination.

The test over real sockets runs the same figures through ``proxyd.cli.demo`` and compares mean and 99th percentile.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque

from proxyd.core.traces import constant
from proxyd.sim.clock import Clock
from proxyd.sim.experiment import LinkExperiment, LinkRun
from proxyd.sim.link import NANOS, Link, LinkModel
from proxyd.sim.tcp import Stream

GAP_NS = 350_000_000
"""As the experiment's workload has it."""
CHUNK_BYTES = 128 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class BurstSpec:
    """What is sent over what; the demo's figures unless told otherwise. ``rate_bytes_per_s`` counts headers."""

    senders: int = 8
    message_bytes: int = 8 << 20
    rate_bytes_per_s: int = 50_000_000
    rtt_ns: int = 60_000_000
    buffer_bytes: int = 300_000
    mtu_bytes: int = 9000
    bursts: int = 6

    @property
    def ideal_cct_s(self) -> float:
        """Time of one burst on the link, and one way."""
        packets = -(-self.message_bytes // (self.mtu_bytes - 52))
        nbytes = self.senders * (self.message_bytes + 52 * packets)
        return nbytes / self.rate_bytes_per_s + self.rtt_ns / 2 / NANOS


@dataclasses.dataclass(frozen=True, slots=True)
class BurstFct:
    """Completion times in seconds, burst by burst: from the send to the last byte at the receiver."""

    bursts: tuple[tuple[float, ...], ...]
    retransmits: int
    """Packets, over all bursts."""

    @property
    def cold(self) -> tuple[float, ...]:
        """Of the first burst."""
        return self.bursts[0]

    def ordered(self, first: int = 0) -> list[float]:
        """Of all bursts from the ``first`` on, ordered."""
        return sorted(fct for burst in self.bursts[first:] for fct in burst)

    def mean(self, first: int = 0) -> float:
        """Mean from the ``first`` burst on; 0: with the cold start."""
        fcts = self.ordered(first)
        return sum(fcts) / len(fcts)

    def p99(self, first: int = 0) -> float:
        """99th percentile (nearest rank) from the ``first`` burst on."""
        fcts = self.ordered(first)
        return fcts[-(-99 * len(fcts) // 100) - 1]


def burst_fct(spec: BurstSpec | None = None, *, told: bool = True, fixed: bool = False, seed: int = 1) -> BurstFct:
    """The burst through both machines.

    :param told: the coordinator knows the link's rate, round trip and buffer; else it knows nothing.
    :param fixed: it believes that rate for ever instead of following the link.
    """
    spec = spec or BurstSpec()
    experiment = LinkExperiment(
        trace=constant(spec.rate_bytes_per_s),
        rtt_ns=spec.rtt_ns,
        buffer_bytes=spec.buffer_bytes,
        senders=spec.senders,
        # As long as it could take at a sixth of the link's rate.
        duration_ns=int(spec.bursts * (6 * spec.ideal_cct_s + GAP_NS / NANOS) * NANOS),
        seed=seed,
        workload="burst",
        message_bytes=spec.message_bytes,
        hint_bytes_per_s=spec.rate_bytes_per_s if told else 0,
        told=told,
        fixed=fixed,
        mtu_bytes=spec.mtu_bytes,
        bursts=spec.bursts,
    )
    run = LinkRun(experiment)
    result = run.result()
    fates = sorted((fate for fate in run.world.fates.values() if fate.landed_ns), key=lambda fate: fate.posted_ns)
    times = [fate.fct_ns / NANOS for fate in fates]
    bursts = tuple(tuple(times[at : at + spec.senders]) for at in range(0, len(times), spec.senders))
    return BurstFct(bursts, result.retransmits)


def plain_fct(spec: BurstSpec | None = None, *, slow_start_after_idle: bool = False, seed: int = 1) -> BurstFct:
    """The burst over the modelled TCP alone: persistent connections, no pacing, nobody who coordinates."""
    return _Plain(spec or BurstSpec(), slow_start_after_idle, seed).run()


class _Plain:
    """One stream for each sender."""

    def __init__(self, spec: BurstSpec, slow_start_after_idle: bool, seed: int) -> None:
        self._spec = spec
        self._rng = random.Random(seed)
        self._clock = Clock()
        model = LinkModel(spec.rate_bytes_per_s, spec.rtt_ns // 2, spec.buffer_bytes, mtu_bytes=spec.mtu_bytes)
        self._link = Link(self._clock, model, self._rng)
        self._queues: list[deque[tuple[object, int, bool]]] = [deque() for _ in range(spec.senders)]
        self._streams = [self._stream(queue, slow_start_after_idle) for queue in self._queues]
        self._begun_ns = [0] * spec.senders
        self._bursts: list[list[float]] = []

    def _stream(self, queue: deque[tuple[object, int, bool]], slow_start_after_idle: bool) -> Stream:
        return Stream(
            self._clock,
            self._link,
            self._spec.rtt_ns - self._spec.rtt_ns // 2,
            slow_start_after_idle=slow_start_after_idle,
            ask=lambda: queue.popleft() if queue else None,
            arrived=self._arrived,
        )

    def run(self) -> BurstFct:
        """All bursts."""
        self._burst()
        most_ns = int(self._spec.bursts * (60 * self._spec.ideal_cct_s + GAP_NS / NANOS) * NANOS)
        self._clock.run(most_ns, done=lambda: len(self._bursts) == self._spec.bursts and not self._open)
        retransmits = sum(stream.retransmits for stream in self._streams)
        return BurstFct(tuple(tuple(burst) for burst in self._bursts), retransmits)

    @property
    def _open(self) -> bool:
        return len(self._bursts[-1]) < self._spec.senders

    def _burst(self) -> None:
        self._bursts.append([])
        for sender in range(self._spec.senders):
            self._clock.after(self._rng.randrange(200_000), self._post, sender)

    def _post(self, sender: int) -> None:
        self._begun_ns[sender] = self._clock.now_ns
        left = self._spec.message_bytes
        while left > 0:
            nbytes = min(CHUNK_BYTES, left)
            left -= nbytes
            self._queues[sender].append((sender if not left else None, nbytes, True))
        self._streams[sender].pump()

    def _arrived(self, sender: object) -> None:
        if not isinstance(sender, int):
            return
        self._bursts[-1].append((self._clock.now_ns - self._begun_ns[sender]) / NANOS)
        if not self._open and len(self._bursts) < self._spec.bursts:
            self._clock.after(GAP_NS, self._burst)
