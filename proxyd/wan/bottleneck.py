"""A drop-tail bottleneck and the delay line behind it, on a virtual clock; pure.

Theory. The link is a *line* (see :mod:`proxyd.wan.trace`): a function from time to the bytes that a never-idle link has
carried. ``position`` is where on that line the last accepted byte will leave. A packet that arrives at ``now``

- finds the link idle if ``position <= bytes_by(now)``: unused capacity is gone:
  ``position`` becomes ``bytes_by(now)``;
- sees a queue of ``position - bytes_by(now)`` bytes (the rest of the packet on the wire included) and is dropped if it
  would push that beyond the buffer;
- otherwise moves ``position`` on by its length and leaves at ``time_for(position)``, ``delay_ns`` later it has arrived.

Departures are computed on arrival, so no timer drives the queue: a process that wakes late delivers late, and the link
still loses no capacity. Departures never decrease and the delay is constant: a deque is enough.

Invariants: 0 <= queue <= buffer; packets keep their order; no packet leaves before ``arrival + length / rate``.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from proxyd.wan.trace import Line

Item = TypeVar("Item")


class Bottleneck(Generic[Item]):
    """Accepts, drops, delays. Time comes in as ``now_ns`` and must not decrease."""

    __slots__ = ("_before_bytes", "_line", "_position_bytes", "accepted_bytes", "buffer_bytes", "delay_ns", "pending")

    def __init__(self, line: Line, *, buffer_bytes: int, delay_ns: int) -> None:
        self._line = line
        self._position_bytes = 0
        self._before_bytes = 0  # what earlier lines can have carried
        self.accepted_bytes = 0
        self.buffer_bytes = buffer_bytes
        self.delay_ns = delay_ns
        self.pending: deque[tuple[int, int, Item]] = deque()
        """``(arrival_ns, position_bytes, item)`` of every packet that was accepted and not yet handed out."""

    def offer(self, item: Item, length_bytes: int, now_ns: int) -> bool:
        """Take a packet in, or return False: the buffer has no room and the packet is gone."""
        carried_bytes = self._line.bytes_by(now_ns)
        position_bytes = max(self._position_bytes, carried_bytes) + length_bytes
        if position_bytes - carried_bytes > self.buffer_bytes:
            return False
        self._position_bytes = position_bytes
        self.accepted_bytes += length_bytes
        self.pending.append((self._line.time_for(position_bytes) + self.delay_ns, position_bytes, item))
        return True

    def next_due_ns(self) -> int | None:
        """When the next packet arrives at the far end; None if nothing is under way."""
        return self.pending[0][0] if self.pending else None

    def pop_due(self, now_ns: int) -> tuple[int, Item] | None:
        """The next packet that has arrived by ``now_ns`` as ``(arrival_ns, item)``, or None."""
        if not self.pending or self.pending[0][0] > now_ns:
            return None
        due_ns, _, item = self.pending.popleft()
        return due_ns, item

    def queue_bytes(self, now_ns: int) -> int:
        """Bytes that wait in the buffer or are half on the wire."""
        return max(0, self._position_bytes - self._line.bytes_by(now_ns))

    def carried_bytes(self, now_ns: int) -> int:
        """Bytes that have left the queue so far."""
        return self.accepted_bytes - self.queue_bytes(now_ns)

    def capacity_bytes(self, now_ns: int) -> int:
        """Bytes that would have left so far, had there always been some to send."""
        return self._before_bytes + self._line.bytes_by(now_ns)

    def change_line(self, line: Line, now_ns: int) -> None:
        """Go on with another line. What still queues leaves at the new rate; what is in flight keeps its arrival."""
        carried_bytes = self._line.bytes_by(now_ns)
        self._before_bytes += carried_bytes
        self._line = line.restarted(now_ns)
        self._position_bytes = max(0, self._position_bytes - carried_bytes)
        again: deque[tuple[int, int, Item]] = deque()
        for due_ns, position_bytes, item in self.pending:
            rest_bytes = position_bytes - carried_bytes
            if rest_bytes > 0:
                due_ns = self._line.time_for(rest_bytes) + self.delay_ns
            again.append((due_ns, max(0, rest_bytes), item))
        self.pending = again
