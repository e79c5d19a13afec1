"""A modelled link: one rate, one drop-tail buffer, one delay.

The same virtual clock as in the emulated WAN: the link is busy up to ``busy_ns``; what comes queues behind that, and is
dropped when the queue would exceed the buffer.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from proxyd.sim.clock import Clock

NANOS = 1_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class LinkModel:
    """Figures of a link, wire bytes."""

    rate_bytes_per_s: int
    one_way_ns: int
    buffer_bytes: int
    mtu_bytes: int = 9000
    loss: float = 0.0


class Link:
    """One direction between two sites."""

    def __init__(self, clock: Clock, model: LinkModel, rng: random.Random) -> None:
        self.model = model
        self.carried_bytes = 0
        self.dropped = 0
        self.lost = 0
        self.peak_queue_bytes = 0
        self._clock = clock
        self._rng = rng
        self._busy_ns = 0

    @property
    def queue_bytes(self) -> int:
        """What waits in the buffer now."""
        return max(0, self._busy_ns - self._clock.now_ns) * self.model.rate_bytes_per_s // NANOS

    def wire_bytes(self, payload_bytes: int) -> int:
        """Payload with its packets' headers."""
        packets = -(-payload_bytes // (self.model.mtu_bytes - 52))
        return payload_bytes + 52 * packets

    def send(self, payload_bytes: int, arrive: Callable[[], None]) -> bool:
        """Put a segment on the link; False: dropped (full buffer), or lost on the way."""
        model = self.model
        size = self.wire_bytes(payload_bytes)
        now_ns = self._clock.now_ns
        queue = self.queue_bytes + size
        if queue > model.buffer_bytes + size and queue > size:
            self.dropped += 1
            return False
        if model.loss and self._rng.random() < model.loss * (size / model.mtu_bytes):
            self.lost += 1
            return False
        self.peak_queue_bytes = max(self.peak_queue_bytes, queue - size)
        self._busy_ns = max(self._busy_ns, now_ns) + size * NANOS // model.rate_bytes_per_s
        self.carried_bytes += size
        self._clock.at(self._busy_ns + model.one_way_ns, arrive)
        return True
