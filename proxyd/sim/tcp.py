"""TCP as the grants see it: a paced, window-limited, in-order byte stream over a lossy link.

Modelled per segment of 16 KiB: slow start and a cold start, a congestion window that grows only while it is the
limit, its collapse after idleness (when the kernel is set so), pacing, loss found one round trip later and repaired
before anything new, one window reduction per round trip, in-order delivery. Not modelled: cubic's curve, selective
acknowledgement's details, delayed acknowledgements. The point is what makes grants hard: a sender that can't yet send
at the granted rate, and bytes that can't be called back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from proxyd.sim.clock import Clock
from proxyd.sim.link import NANOS, Link

SEGMENT_BYTES = 16 << 10
INITIAL_WINDOW_BYTES = 10 * 8948
UNSENT_LOW_BYTES = 16 << 10
UNSENT_LOW_NS = 8_000_000
"""``TCP_NOTSENT_LOWAT``, as the agent sets it: with less than this much time's worth unsent a stream asks for more."""
LOSS_FACTOR = 0.7
IDLE_RESET_NS = 250_000_000


class Segment:
    """A stretch of one chunk."""

    __slots__ = ("chunk", "delivered", "end_of_chunk", "granted", "nbytes", "number", "sent_ns")

    def __init__(self, number: int, chunk: object, nbytes: int, granted: bool, end_of_chunk: bool) -> None:
        self.number = number
        self.chunk = chunk
        self.nbytes = nbytes
        self.granted = granted
        self.end_of_chunk = end_of_chunk
        self.sent_ns = 0
        self.delivered = False


class Stream:
    """One data connection, sender and receiver.

    :param ask: called for the next chunk: ``(chunk, nbytes, granted)`` or None.
    :param arrived: called at the receiver with a chunk whose last byte is in place, in order.
    """

    def __init__(
        self,
        clock: Clock,
        link: Link,
        back_ns: int,
        *,
        slow_start_after_idle: bool,
        ask: Callable[[], tuple[object, int, bool] | None],
        arrived: Callable[[object], None],
    ) -> None:
        self.clock = clock
        self.link = link
        self.back_ns = back_ns
        """Delay of acknowledgements."""
        self.open = True
        self.pace_bytes_per_s = 0
        self.window_bytes = INITIAL_WINDOW_BYTES
        self.granted_left_bytes = 0
        self.granted_delivered_bytes = 0
        self.unsent_bytes = 0
        self.in_flight_bytes = 0
        self.retransmits = 0
        self.window_limited = False
        """The congestion window held something back; whoever reads it clears it."""
        self.srtt_ns = 0
        self.min_rtt_ns = 0
        self._slow_start_after_idle = slow_start_after_idle
        self._threshold_bytes = 1 << 62
        self._ask = ask
        self._arrived = arrived
        self._queue: deque[Segment] = deque()
        self._again: deque[Segment] = deque()
        self._numbers = 0
        self._expected = 0
        self._early: dict[int, Segment] = {}
        self._next_ns = 0
        self._reduced_ns = -NANOS
        self._last_sent_ns = 0
        self._planned = False

    @property
    def settled(self) -> bool:
        """Nothing is unsent or unacknowledged."""
        return not (self._queue or self._again or self.in_flight_bytes)

    @property
    def _low_bytes(self) -> int:
        return max(UNSENT_LOW_BYTES, self.pace_bytes_per_s * UNSENT_LOW_NS // NANOS)

    def close(self) -> None:
        """Cut the connection: nothing arrives any more."""
        self.open = False
        self._queue.clear()
        self._again.clear()

    def pump(self) -> None:
        """There may be something to send, or a new pace."""
        if not self.open:
            return
        if not self._queue and self.settled and self._slow_start_after_idle:
            idle_ns = self.clock.now_ns - self._last_sent_ns
            if idle_ns > IDLE_RESET_NS:
                self.window_bytes = min(self.window_bytes, INITIAL_WINDOW_BYTES)
        while self.unsent_bytes < self._low_bytes and (asked := self._ask()) is not None:
            self._take(*asked)
        self._send()

    def _take(self, chunk: object, nbytes: int, granted: bool) -> None:
        self.unsent_bytes += nbytes
        while nbytes > 0:
            size = min(SEGMENT_BYTES, nbytes)
            nbytes -= size
            self._queue.append(Segment(self._numbers, chunk, size, granted, nbytes == 0))
            self._numbers += 1

    def _send(self) -> None:
        clock = self.clock
        while self.open and (self._again or self._queue):
            again = bool(self._again)
            segment = self._again[0] if again else self._queue[0]
            if self.in_flight_bytes and self.in_flight_bytes + segment.nbytes > self.window_bytes:
                self.window_limited = True
                return  # an acknowledgement will call
            if clock.now_ns < self._next_ns:
                self._plan()
                return
            (self._again if again else self._queue).popleft()
            if self.pace_bytes_per_s:
                gap_ns = segment.nbytes * NANOS // self.pace_bytes_per_s
                self._next_ns = max(self._next_ns, clock.now_ns) + gap_ns
            self._put(segment, again)
            if not again and self.unsent_bytes < self._low_bytes and (asked := self._ask()) is not None:
                self._take(*asked)

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            self.clock.at(self._next_ns, self._go_on)

    def _go_on(self) -> None:
        self._planned = False
        self._send()

    def _put(self, segment: Segment, again: bool) -> None:
        segment.sent_ns = self._last_sent_ns = self.clock.now_ns
        self.in_flight_bytes += segment.nbytes
        if again:
            self.retransmits += 1
        else:
            self.unsent_bytes -= segment.nbytes
            if segment.granted:
                self.granted_left_bytes += segment.nbytes
        if not self.link.send(segment.nbytes, lambda: self._receive(segment)):
            # Later segments' acknowledgements show the hole; without any, a timeout does.
            wait_ns = self.link.model.one_way_ns + self.back_ns + 2_000_000
            if not self._queue:
                wait_ns += 200_000_000
            self.clock.after(wait_ns, lambda: self._lost(segment))

    def _receive(self, segment: Segment) -> None:
        if not self.open:
            return
        self._early[segment.number] = segment
        while (ready := self._early.pop(self._expected, None)) is not None:
            self._expected += 1
            if ready.end_of_chunk:
                self._arrived(ready.chunk)
        self.clock.after(self.back_ns, lambda: self._acked(segment))

    def _acked(self, segment: Segment) -> None:
        if not self.open:
            return
        limited = self.in_flight_bytes + 2 * SEGMENT_BYTES >= self.window_bytes // 2
        self.in_flight_bytes -= segment.nbytes
        if segment.granted:
            self.granted_delivered_bytes += segment.nbytes
        rtt_ns = self.clock.now_ns - segment.sent_ns
        self.srtt_ns += (rtt_ns - self.srtt_ns) // 8 if self.srtt_ns else rtt_ns
        self.min_rtt_ns = min(self.min_rtt_ns or rtt_ns, rtt_ns)
        if limited:
            if self.window_bytes < self._threshold_bytes:
                self.window_bytes += segment.nbytes
            else:
                self.window_bytes += segment.nbytes * SEGMENT_BYTES // self.window_bytes
        self._send()

    def _lost(self, segment: Segment) -> None:
        if not self.open:
            return
        self.in_flight_bytes -= segment.nbytes
        self._again.append(segment)
        if segment.sent_ns > self._reduced_ns:  # once per round trip
            self._reduced_ns = self.clock.now_ns
            self.window_bytes = max(2 * SEGMENT_BYTES, int(self.window_bytes * LOSS_FACTOR))
            self._threshold_bytes = self.window_bytes
        self._send()
