"""A modelled link: a rate that may change, one drop-tail buffer, one delay; and what else may be in the way.

The same virtual clock as in the emulated WAN. The link's rate is a trace (:class:`~proxyd.core.traces.RateTrace`): its
integral says how many bytes a never-idle link has carried by now. What comes queues behind the bytes that came before
it, leaves when the integral has come so far, and the queue is the distance between the two. So a packet's service may
cross any number of steps, and no timer ticks.

Payload comes in *segments* of several packets. What of a segment doesn't fit is dropped packet by packet: a shallow
buffer loses the same share whatever the segment's size.

In front of the buffer a *policer* may stand: a token bucket that passes our traffic at its rate, lets a burst through
and drops the rest without queueing. *Cross traffic* is not ours and shares the buffer: constant, on and off, or a TCP
(:class:`CrossPort` under a :class:`~proxyd.sim.tcp.Stream`) that fills the buffer until something is lost.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

from proxyd.core.traces import RateTrace, constant
from proxyd.sim.clock import Clock

NANOS = 1_000_000_000
HEADERS_BYTES = 52
CROSS_PACKETS_NS = 500_000
"""Link time of one piece of cross traffic; never less than one packet."""


@dataclasses.dataclass(frozen=True, slots=True)
class CrossTraffic:
    """Traffic that isn't ours and heeds nobody: so many wire bytes per second, while it is on."""

    rate_bytes_per_s: int
    on_ns: int = 0
    """It is on for so long, then off for ``off_ns``, again and again; 0: always on."""
    off_ns: int = 0
    start_ns: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Policer:
    """A token bucket: passes ``rate_bytes_per_s`` and bursts of ``burst_bytes``, drops the rest at once."""

    rate_bytes_per_s: int
    burst_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LinkModel:
    """Figures of a link, wire bytes."""

    rate_bytes_per_s: int
    """The mean, where there is a trace."""
    one_way_ns: int
    buffer_bytes: int
    mtu_bytes: int = 9000
    loss: float = 0.0
    """Chance that a packet that has crossed the link is lost."""
    trace: RateTrace | None = None
    cross: CrossTraffic | None = None
    policer: Policer | None = None

    @property
    def service(self) -> RateTrace:
        """The rate over time."""
        return self.trace or constant(self.rate_bytes_per_s)

    @property
    def mss_bytes(self) -> int:
        """Payload of a full packet."""
        return self.mtu_bytes - HEADERS_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class LinkCounts:
    """A link's counters at one instant, wire bytes; two of them say what happened in between."""

    time_ns: int
    capacity_bytes: int
    """What a never-idle link would have carried."""
    carried_bytes: int
    """What it has carried, cross traffic included."""
    cross_bytes: int
    """Cross traffic that the buffer took."""
    offered_bytes: int
    """Ours, before policer and buffer."""
    dropped_bytes: int
    """Ours, by policer and buffer, or lost on the way."""
    queue_bytes: int
    """In the buffer now, the packet on the wire included."""

    def utilisation_since(self, earlier: LinkCounts) -> float:
        """Bytes carried over bytes that could have been."""
        return (self.carried_bytes - earlier.carried_bytes) / max(1, self.capacity_bytes - earlier.capacity_bytes)

    def loss_since(self, earlier: LinkCounts) -> float:
        """Our bytes dropped over our bytes offered."""
        return (self.dropped_bytes - earlier.dropped_bytes) / max(1, self.offered_bytes - earlier.offered_bytes)


class Link:
    """One direction between two sites."""

    def __init__(self, clock: Clock, model: LinkModel, rng: random.Random) -> None:
        self.model = model
        self.service = model.service
        self.dropped = 0
        """Our packets that the buffer or the policer dropped."""
        self.lost = 0
        """Our packets that were lost on the way."""
        self.peak_queue_bytes = 0
        self.offered_bytes = 0
        self.dropped_bytes = 0
        self.accepted_bytes = 0
        self.cross_bytes = 0
        self._clock = clock
        self._rng = rng
        self._behind = 0
        """Position of the service's integral at which the queue will be empty."""
        self._mss = model.mss_bytes
        self._cross_ns = model.cross.start_ns if model.cross is not None else None
        self._tokens = float(model.policer.burst_bytes) if model.policer is not None else 0.0
        self._tokens_ns = 0

    @property
    def queue_bytes(self) -> int:
        """What waits in the buffer now, the packet on the wire included."""
        if self._cross_ns is not None:
            self._cross(self._clock.now_ns)
        return max(0, self._behind - self.service.bytes_by(self._clock.now_ns))

    def wait_ns(self) -> int:
        """How long a packet that comes now waits, others' packets in front of it."""
        return self.service.time_for(self._behind) - self._clock.now_ns if self.queue_bytes else 0

    def counts(self) -> LinkCounts:
        """The counters now."""
        queue = self.queue_bytes
        return LinkCounts(
            time_ns=self._clock.now_ns,
            capacity_bytes=self.service.bytes_by(self._clock.now_ns),
            carried_bytes=self.accepted_bytes + self.cross_bytes - queue,
            cross_bytes=self.cross_bytes,
            offered_bytes=self.offered_bytes,
            dropped_bytes=self.dropped_bytes,
            queue_bytes=queue,
        )

    def wire_bytes(self, payload_bytes: int) -> int:
        """Payload with its packets' headers."""
        return payload_bytes + HEADERS_BYTES * -(-payload_bytes // self._mss)

    def send(self, payload_bytes: int, arrive: Callable[..., object], *args: Any) -> int:
        """Put a segment on the link; answers how much of its payload gets through.

        ``arrive(*args)`` is called when the last packet that does is there; never, when none does.
        """
        now_ns = self._clock.now_ns
        size = self.wire_bytes(payload_bytes)
        self.offered_bytes += size
        passed = payload_bytes
        if self.model.policer is not None:
            passed = self._police(passed, self.model.policer, now_ns)
        passed, left_ns = self._enqueue(passed, now_ns)
        if passed < payload_bytes:
            self.dropped += -(-(payload_bytes - passed) // self._mss)
            self.dropped_bytes += size - self.wire_bytes(passed)
            if not passed:
                return 0
        self.accepted_bytes += self.wire_bytes(passed)
        if self.model.loss:
            packets = -(-passed // self._mss)
            if self._rng.random() < 1 - (1 - self.model.loss) ** packets:
                self.lost += 1
                self.dropped_bytes += min(self.model.mtu_bytes, size)
                passed -= min(passed, self._mss)
                if not passed:
                    return 0
        self._clock.at(left_ns + self.model.one_way_ns, arrive, *args)
        return passed

    def send_cross(self, payload_bytes: int, arrive: Callable[..., object], *args: Any) -> int:
        """The same for a segment that isn't ours."""
        passed, left_ns = self._enqueue(payload_bytes, self._clock.now_ns)
        if passed:
            self.cross_bytes += self.wire_bytes(passed)
            self._clock.at(left_ns + self.model.one_way_ns, arrive, *args)
        return passed

    def _enqueue(self, payload_bytes: int, now_ns: int) -> tuple[int, int]:
        """Payload that the buffer takes, in whole packets, and when its last byte has left."""
        if self._cross_ns is not None:
            self._cross(now_ns)
        served = self.service.bytes_by(now_ns)
        behind = self._behind if self._behind > served else served
        size = self.wire_bytes(payload_bytes)
        room = self.model.buffer_bytes - (behind - served)
        if size > room:
            packets = max(0, room // self.model.mtu_bytes)
            if not packets and behind == served:
                packets = 1  # an idle link takes a packet, however small its buffer
            payload_bytes = min(payload_bytes, packets * self._mss)
            if not payload_bytes:
                return 0, now_ns
            size = self.wire_bytes(payload_bytes)
        if behind - served > self.peak_queue_bytes:
            self.peak_queue_bytes = behind - served
        self._behind = behind + size
        return payload_bytes, self.service.time_for(self._behind)

    def _police(self, payload_bytes: int, policer: Policer, now_ns: int) -> int:
        earned = (now_ns - self._tokens_ns) * policer.rate_bytes_per_s / NANOS
        self._tokens = min(float(policer.burst_bytes), self._tokens + earned)
        self._tokens_ns = now_ns
        if self.wire_bytes(payload_bytes) > self._tokens:
            payload_bytes = min(payload_bytes, int(self._tokens) // self.model.mtu_bytes * self._mss)
        self._tokens -= self.wire_bytes(payload_bytes)
        return payload_bytes

    def _cross(self, until_ns: int) -> None:
        """Let the cross traffic in that has come by now: nobody looks at the queue in between."""
        cross = self.model.cross
        if cross is None or self._cross_ns is None or cross.rate_bytes_per_s <= 0:
            return
        size = max(self.model.mtu_bytes, cross.rate_bytes_per_s * CROSS_PACKETS_NS // NANOS)
        gap_ns = size * NANOS // cross.rate_bytes_per_s
        at_ns = self._cross_ns
        while at_ns <= until_ns:
            if cross.on_ns and (at_ns - cross.start_ns) % (cross.on_ns + cross.off_ns) >= cross.on_ns:
                whole = cross.on_ns + cross.off_ns
                at_ns += whole - (at_ns - cross.start_ns) % whole
                continue
            served = self.service.bytes_by(at_ns)
            behind = max(self._behind, served)
            taken = min(size, max(0, self.model.buffer_bytes - (behind - served)))
            self._behind = behind + taken
            self.cross_bytes += taken
            at_ns += gap_ns
        self._cross_ns = at_ns


class CrossPort:
    """The link as a sender sees it who isn't one of ours: neither policed nor counted as offered."""

    def __init__(self, link: Link) -> None:
        self.model = link.model
        self.send = link.send_cross


def segment_bytes(model: LinkModel) -> int:
    """How much payload to put on a link at a time: about 0.3 ms of link time, 16 KiB at least.

    A kernel sends in bursts of that order as well (TSO sized to the pace), and at 100 Gbit/s packets one by one would
    cost too much. Less than 16 KiB, down to two packets, where a burst would fill a good part of the buffer, or take
    more than the millisecond of the pace that Linux makes a burst of (``tcp_tso_autosize``).
    """
    millisecond = model.rate_bytes_per_s // 1000
    least = min(16 << 10, max(2 * model.mss_bytes, min(model.buffer_bytes // 4, millisecond)))
    packets = max(least, model.rate_bytes_per_s * 3 // 10_000) / model.mss_bytes
    return max(1, math.floor(packets)) * model.mss_bytes


__all__ = ["NANOS", "CrossPort", "CrossTraffic", "Link", "LinkCounts", "LinkModel", "Policer", "segment_bytes"]
