"""TCP as the grants see it: a paced, window-limited, in-order byte stream over a lossy link.

Theory of operation
-------------------
The unit is a *segment* of several packets (:func:`~proxyd.sim.link.segment_bytes`), cut when it is sent; each of its
transmissions is a *flight*. A flight may get through in part. Modelled is what makes grants hard:

* **Cold start**: ten packets, then slow start: the window grows by what is acknowledged, until a loss, until
  acknowledgements come without a gap for half a round trip (a whole one when paced), or until the first round trips of
  a round are 1/8 longer than the least one (HyStart, as Linux has it: Ha and Rhee, 2011).
* **Growth only where it limits** (Linux ``tcp_cwnd_validate``): in slow start while less than twice the most in flight,
  later only while the window itself held something back. A stream that is paced below its window keeps it for ever.
* **CUBIC** (RFC 9438): beta 0.7, ``W(t) = 0.4 (t - K)^3 + Wmax`` with fast convergence and the Reno-friendly floor.
* **Loss recovery**: acknowledgements are selective and nothing is reordered, so what was sent before an acknowledged
  flight and isn't acknowledged is lost: found one round trip later, repaired before anything new. One reduction of the
  window per round trip; while it lasts, 0.7 bytes go out for each that is acknowledged (as RFC 6937 does), so that the
  repair doesn't wait until what is in flight has fallen below the smaller window.
* **Tail loss**: with nothing acknowledged after the hole, a probe goes out after two round trips (RFC 8985, section 7),
  and a retransmission timeout (RFC 6298, 200 ms above the round trip at least, doubling) starts over from one packet.
* **Idle collapse**: where the kernel does ``tcp_slow_start_after_idle``, the window halves for each timeout's worth of
  silence, down to ten packets.
* **Pacing**: the ceiling that the agent sets, or the kernel's own pace where that is less: window over round trip,
  times 2 early in slow start and times 1.2 later.
* **What can't be called back**: bytes handed over and unsent, held to 8 ms of the pace (``TCP_NOTSENT_LOWAT``).

Counters are what ``TCP_INFO`` and ``SIOCOUTQ`` would say: retransmits in packets; ``granted_delivered_bytes`` counts
in-order acknowledgements, which stall while a hole is open, and ``granted_sacked_bytes`` all of them; the delivery rate
is that of the latest acknowledgement over its round trip. Not modelled: delayed acknowledgements and their loss,
reordering, and receive windows. Windows that agents reopen (:meth:`Stream.look`) are left out where first bursts are
looked at: as modelled that made them an eighth faster than they are on real sockets; without it they agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from proxyd.core.striping import WindowKeeper, least_pace
from proxyd.sim.bbr import BbrWindow
from proxyd.sim.clock import Clock
from proxyd.sim.cubic import BETA, UNLIMITED, CubicWindow
from proxyd.sim.link import NANOS, LinkModel, segment_bytes

UNSENT_LOW_BYTES = 16 << 10
UNSENT_LOW_NS = 8_000_000
UNSENT_LOW_YIELDING_NS = 3_000_000
"""``TCP_NOTSENT_LOWAT``, as the agent sets it: with less than this much time's worth unsent a stream asks for more. The
latter for what gives way to whatever comes."""
UNSENT_UNPACED_BYTES = 4 << 20
MIN_RTO_NS = 200_000_000
MAX_RTO_NS = 120 * NANOS
MIN_RTT_WINDOW_NS = 300 * NANOS
HYSTART_LEAST_PACKETS = 16
HYSTART_SAMPLES = 8
HYSTART_GAP_NS = 2_000_000
HYSTART_SLACK_NS = 1_000_000
HYSTART_MIN_NS = 4_000_000
HYSTART_MAX_NS = 16_000_000
NEARLY_FULL = 0.9
"""As the agent reads TCP_INFO: a window in use to this part, or a kernel's pace below this part of ours, limits."""


class Port(Protocol):
    """Where a stream puts its segments: a link, or somebody else's way onto it."""

    model: LinkModel

    @property
    def send(self) -> Callable[..., int]:
        """``send(payload_bytes, arrive, *args)``: answers how much gets through."""


WINDOWS: dict[str, type[CubicWindow] | type[BbrWindow]] = {"cubic": CubicWindow, "bbr": BbrWindow}


class Segment:
    """A stretch of one chunk."""

    __slots__ = ("chunk", "end_of_chunk", "granted", "missing_bytes", "nbytes", "number")

    def __init__(self, number: int, chunk: object, nbytes: int, granted: bool, end_of_chunk: bool) -> None:
        self.number = number
        self.chunk = chunk
        self.nbytes = nbytes
        self.granted = granted
        self.end_of_chunk = end_of_chunk
        self.missing_bytes = nbytes
        """What the receiver doesn't have yet."""


class Flight:
    """One transmission of a segment."""

    __slots__ = (
        "ack_wait_ns",
        "acked",
        "app_limited",
        "delivered_before",
        "delivered_ns",
        "first_sent_ns",
        "in_order_bytes",
        "lost",
        "nbytes",
        "new_bytes",
        "order",
        "passed_bytes",
        "segment",
        "sent_ns",
    )

    def __init__(self, segment: Segment, nbytes: int, order: int, sent_ns: int) -> None:
        self.segment = segment
        self.nbytes = nbytes
        self.order = order
        self.sent_ns = sent_ns
        self.passed_bytes = 0
        """What gets through of it."""
        self.new_bytes = 0
        self.in_order_bytes = 0
        """Granted bytes in order at the receiver, as its acknowledgement says."""
        self.ack_wait_ns = 0
        self.acked = False
        self.lost = False
        self.app_limited = False
        self.delivered_before = 0
        self.delivered_ns = 0
        self.first_sent_ns = 0


class Stream:
    """One data connection, sender and receiver.

    :param back_ns: delay of acknowledgements.
    :param back_wait_ns: what an acknowledgement that sets out now waits in queues on its way, besides.
    :param ask: called for the next chunk: ``(chunk, nbytes, granted)`` or None.
    :param arrived: called at the receiver with a chunk whose last byte is in place, in order.
    :param begins: called when there is something to send after there was nothing.
    """

    def __init__(
        self,
        clock: Clock,
        link: Port,
        back_ns: int,
        *,
        back_wait_ns: Callable[[], int] = lambda: 0,
        slow_start_after_idle: bool,
        congestion_control: str = "cubic",
        ask: Callable[[], tuple[object, int, bool] | None],
        arrived: Callable[[Any], object],
        begins: Callable[[], object] = lambda: None,
    ) -> None:
        self.clock = clock
        self.link = link
        self.back_ns = back_ns
        self._back_wait_ns = back_wait_ns
        self.ack_wait_ns = 0
        """What the latest acknowledgement waited on its way ..."""
        self.acked_ns = 0
        """... and when it came."""
        self.open = True
        self.pace_bytes_per_s = 0
        self.window: CubicWindow | BbrWindow = WINDOWS[congestion_control](link.model.mss_bytes)
        self._highest_pace = 0
        self._keeper = WindowKeeper()
        self.granted_left_bytes = 0
        self.granted_delivered_bytes = 0
        """Acknowledged in order: what ``SIOCOUTQ`` tells."""
        self.granted_sacked_bytes = 0
        """Acknowledged at all: what TCP_INFO's ``delivered`` tells."""
        self.unsent_bytes = 0
        self.yields = False
        """What goes now gives way to others."""
        self.in_flight_bytes = 0
        self.retransmits = 0
        """Packets."""
        self.srtt_ns = 0
        self.min_rtt_ns = 0
        self._var_ns = 0
        self._min_rtt_since_ns = 0
        self._mss = link.model.mss_bytes
        self._segment_bytes = segment_bytes(link.model)
        self._slow_start_after_idle = slow_start_after_idle
        self._ask = ask
        self._arrived = arrived
        self._begins = begins
        self._queue: deque[list[Any]] = deque()
        """Chunks not sent in full: chunk, bytes left, granted."""
        self._again: deque[Segment] = deque()
        self._outstanding: deque[Flight] = deque()
        self._orders = 0
        self._numbers = 0
        self._next_ns = 0
        self._planned = False
        self._last_sent_ns = 0
        # Growth and reduction, once per round: a round ends when what was sent after its beginning is acknowledged.
        self._round_order = 0
        self._round_most_bytes = 0
        self._round_limited = False
        self._limited = False
        self._round_rtt_ns = 0
        self._round_samples = 0
        self._round_ns = 0
        self._train_ns = 0
        self._recovery_order = 0
        self._recovering = False
        self._recovery_room_bytes = 0.0
        # The timer for tail losses.
        self._progress_ns = 0
        self._timer_ns = 0
        """When it rings; it may be early and is then set anew. 0: not set."""
        self._probed = False
        self._backoff = 0
        # Delivery rate (draft-cheng-iccrg-delivery-rate-estimation).
        self._delivered_bytes = 0
        self._delivered_ns = 0
        self._first_sent_ns = 0
        self._sample = (0, 1)
        # The receiver.
        self._expected = 0
        self._in_order_bytes = 0
        self._early: dict[int, Segment] = {}

    # ---------------------------------------------------------------------------- what the agent reads

    @property
    def window_bytes(self) -> int:
        """The congestion window."""
        return self.window.bytes

    def set_pace(self, rate_bytes_per_s: int) -> None:
        """Another ceiling. What waits for its time by the old one waits no longer than two packets of it: the kernel
        paces by so little, the model by whole segments."""
        if rate_bytes_per_s:
            self._highest_pace = max(self._highest_pace, rate_bytes_per_s)
            rate_bytes_per_s = max(rate_bytes_per_s, least_pace(self._mss, self._highest_pace))
        before, self.pace_bytes_per_s = self.pace_bytes_per_s, rate_bytes_per_s
        now_ns = self.clock.now_ns
        if before and rate_bytes_per_s > before and self._next_ns > now_ns:
            next_ns = now_ns + min(self._next_ns - now_ns, 2 * self._mss * NANOS // before)
            if next_ns < self._next_ns:
                self._next_ns = next_ns
                self.clock.at(next_ns, self._send)

    def look(self) -> None:
        """The agent has read the kernel: it reopens a window that stands in the way (:mod:`proxyd.core.striping`)."""
        window = self.window
        if isinstance(window, CubicWindow) and self._keeper.reopens(
            window_bytes=window.bytes,
            in_slow_start=window.in_slow_start,
            retransmits=self.retransmits,
            recovers=self._recovering,
            pace_bytes_per_s=self.pace_bytes_per_s,
            rtt_ns=self.min_rtt_ns,
            now_ns=self.clock.now_ns,
        ):
            window.reopened()

    @property
    def lost_bytes(self) -> int:
        """Taken for lost and not sent again yet."""
        return sum(segment.missing_bytes for segment in self._again)

    @property
    def has_to_send(self) -> bool:
        """Something of it hasn't left, or must leave again, or left a moment ago at its pace."""
        return bool(self._queue or self._again) or self.clock.now_ns < self._next_ns

    @property
    def settled(self) -> bool:
        """Nothing is unsent or unacknowledged."""
        return not (self._queue or self._again or self._outstanding)

    @property
    def delivery_rate_bytes_per_s(self) -> int:
        """Of the latest acknowledgement, over its round trip."""
        nbytes, span_ns = self._sample
        return nbytes * NANOS // max(1, span_ns)

    @property
    def path_limited(self) -> bool:
        """TCP holds bytes back at this instant, rather than our ceiling or a lack of data."""
        if self.unsent_bytes <= 0:
            return False
        full = self.in_flight_bytes >= NEARLY_FULL * self.window.bytes
        return full or self._kernel_pace() < NEARLY_FULL * self.pace_bytes_per_s

    def _kernel_pace(self) -> int:
        """The kernel's own pace."""
        if not self.srtt_ns:
            return UNLIMITED
        window = self.window
        if isinstance(window, BbrWindow) and window.pace_bytes_per_s:
            return window.pace_bytes_per_s
        rate = max(window.bytes, self.in_flight_bytes) * NANOS // self.srtt_ns
        return rate * 2 if 2 * window.bytes < window.threshold_bytes else rate * 6 // 5

    @property
    def _low_bytes(self) -> int:
        if not self.pace_bytes_per_s:
            return UNSENT_UNPACED_BYTES
        low_ns = UNSENT_LOW_YIELDING_NS if self.yields else UNSENT_LOW_NS
        return min(UNSENT_UNPACED_BYTES, max(UNSENT_LOW_BYTES, self.pace_bytes_per_s * low_ns // NANOS))

    # ---------------------------------------------------------------------------------------- sending

    def close(self) -> None:
        """Cut the connection: nothing arrives any more."""
        self.open = False
        self._queue.clear()
        self._again.clear()
        self._outstanding.clear()

    def pump(self) -> None:
        """There may be something to send, or a new pace."""
        if self.open:
            self._fill()
            self._send()

    def _fill(self) -> None:
        low, had_to_send = self._low_bytes, self.has_to_send
        while self.unsent_bytes < low and (asked := self._ask()) is not None:
            chunk, nbytes, granted = asked
            self.unsent_bytes += nbytes
            self._queue.append([chunk, nbytes, granted])
        if not had_to_send and self._queue:
            self._begins()

    def _send(self) -> None:
        clock, again, queue = self.clock, self._again, self._queue
        while self.open:
            while again and not again[0].missing_bytes:
                again.popleft()
            if again:
                want = again[0].missing_bytes
            elif queue:
                want = min(self._segment_bytes, queue[0][1])
            else:
                return
            room = self.window.bytes - self.in_flight_bytes
            if self._recovering and room < self._recovery_room_bytes:
                room = int(self._recovery_room_bytes)
            if room < want and self.in_flight_bytes:
                if again or room < self._mss or self.in_flight_bytes >= 2 * want:
                    self._limited = self._round_limited = True
                    return  # an acknowledgement will call
                want = room // self._mss * self._mss
            elif not again and room < want:
                want = min(want, max(1, room // self._mss) * self._mss)
            if clock.now_ns < self._next_ns:
                if not self._planned:
                    self._planned = True
                    clock.at(self._next_ns, self._go_on)
                return
            self._hold_pace(want)
            if again:
                segment = again.popleft()
                self.retransmits += -(-want // self._mss)
                self._put(segment, want)
                continue
            head = queue[0]
            head[1] -= want
            self.unsent_bytes -= want
            segment = Segment(self._numbers, head[0], want, head[2], head[1] == 0)
            self._numbers += 1
            if segment.granted:
                self.granted_left_bytes += want
            if not head[1]:
                queue.popleft()
            self._put(segment, want)
            if self.unsent_bytes < self._low_bytes:
                self._fill()

    def _hold_pace(self, nbytes: int) -> None:
        if self.pace_bytes_per_s:
            rate = min(self.pace_bytes_per_s, self._kernel_pace())
            self._next_ns = max(self._next_ns, self.clock.now_ns) + nbytes * NANOS // max(1, rate)

    def _go_on(self) -> None:
        self._planned = False
        self._send()

    def _put(self, segment: Segment, nbytes: int) -> None:
        now_ns = self.clock.now_ns
        if not self.in_flight_bytes and not self._backoff:
            self._after_silence(now_ns)
        self._orders += 1
        flight = Flight(segment, nbytes, self._orders, now_ns)
        flight.delivered_before, flight.delivered_ns = self._delivered_bytes, self._delivered_ns
        flight.first_sent_ns = self._first_sent_ns
        flight.app_limited = not self._queue and not self._again
        self._last_sent_ns = now_ns
        self.in_flight_bytes += nbytes
        if self._recovering:
            self._recovery_room_bytes -= nbytes
        if self.in_flight_bytes > self._round_most_bytes:
            self._round_most_bytes = self.in_flight_bytes
        self._outstanding.append(flight)
        flight.passed_bytes = self.link.send(nbytes, self._receive, flight)
        due_ns = now_ns + self._probe_ns()
        if not self._timer_ns or due_ns < self._timer_ns:
            self._timer_ns = due_ns
            self.clock.at(due_ns, self._timer, due_ns)

    def _after_silence(self, now_ns: int) -> None:
        idle_ns = now_ns - self._last_sent_ns
        self._first_sent_ns = self._delivered_ns = self._progress_ns = now_ns
        self._probed = False
        if self._last_sent_ns and idle_ns > 0:
            self.window.idle(idle_ns)
            if self._slow_start_after_idle:
                self.window.restart(idle_ns // self._timeout_ns())

    # ---------------------------------------------------------------------------------------- receiving

    def _receive(self, flight: Flight) -> None:
        if not self.open:
            return
        segment = flight.segment
        if segment.missing_bytes:
            flight.new_bytes = min(flight.passed_bytes, segment.missing_bytes)
            segment.missing_bytes -= flight.new_bytes
            if not segment.missing_bytes:
                self._in_place(segment)
        flight.in_order_bytes = self._in_order_bytes
        flight.ack_wait_ns = self._back_wait_ns()
        self.clock.at(self.clock.now_ns + self.back_ns + flight.ack_wait_ns, self._acked, flight)

    def _in_place(self, segment: Segment) -> None:
        if segment.number != self._expected:
            self._early[segment.number] = segment
            return
        ready: Segment | None = segment
        while ready is not None:
            self._expected += 1
            if ready.granted:
                self._in_order_bytes += ready.nbytes
            if ready.end_of_chunk:
                self._arrived(ready.chunk)
            ready = self._early.pop(self._expected, None) if self._early else None

    # ---------------------------------------------------------------------------------- acknowledgements

    def _acked(self, flight: Flight) -> None:
        if not self.open:
            return
        now_ns = self.clock.now_ns
        self.ack_wait_ns, self.acked_ns = flight.ack_wait_ns, now_ns
        self._measure(now_ns - flight.sent_ns, now_ns)
        self._progress_ns, self._probed, self._backoff = now_ns, False, 0
        if not flight.lost:
            self.in_flight_bytes -= flight.passed_bytes
        flight.acked = True
        if flight.segment.granted:
            self.granted_sacked_bytes += flight.new_bytes
        if flight.in_order_bytes > self.granted_delivered_bytes:
            self.granted_delivered_bytes = flight.in_order_bytes
        self._delivered_bytes += flight.new_bytes
        self._delivered_ns = now_ns
        self._first_sent_ns = flight.sent_ns
        self._sample = (
            self._delivered_bytes - flight.delivered_before,
            max(now_ns - flight.delivered_ns, flight.sent_ns - flight.first_sent_ns),
        )
        outstanding = self._outstanding
        while outstanding and outstanding[0].order < flight.order:
            self._lost(outstanding.popleft())
        if outstanding and outstanding[0] is flight and flight.passed_bytes == flight.nbytes:
            outstanding.popleft()
        window = self.window
        if isinstance(window, BbrWindow):
            window.sampled(
                float(self.delivery_rate_bytes_per_s),
                flight.app_limited,
                flight.order >= self._round_order,
                now_ns - flight.sent_ns,
                self.in_flight_bytes,
                now_ns,
            )
        if self._recovering:
            self._recovery_room_bytes += BETA * flight.passed_bytes
            self._recovering = flight.order <= self._recovery_order
        if flight.order > self._recovery_order and (
            self._limited or (window.bytes < window.threshold_bytes and window.bytes < 2 * self._round_most_bytes)
        ):
            window.acknowledged(flight.passed_bytes, now_ns, self.min_rtt_ns)
        if flight.order >= self._round_order:
            self._end_round()
        self._send()

    def _end_round(self) -> None:
        self._round_order = self._orders + 1
        self._limited, self._round_limited = self._round_limited, False
        self._round_most_bytes = self.in_flight_bytes
        self._round_rtt_ns = self._round_samples = 0
        self._round_ns = self._train_ns = self.clock.now_ns

    def _measure(self, rtt_ns: int, now_ns: int) -> None:
        if self.srtt_ns:
            error_ns = rtt_ns - self.srtt_ns
            self.srtt_ns += error_ns // 8
            self._var_ns += (abs(error_ns) - self._var_ns) // 4
        else:
            self.srtt_ns, self._var_ns = rtt_ns, rtt_ns // 2
        if rtt_ns <= self.min_rtt_ns or not self.min_rtt_ns or now_ns - self._min_rtt_since_ns > MIN_RTT_WINDOW_NS:
            self.min_rtt_ns, self._min_rtt_since_ns = rtt_ns, now_ns
        window = self.window
        if window.bytes < window.threshold_bytes and isinstance(window, CubicWindow):
            self._hystart(rtt_ns, now_ns)

    def _hystart(self, rtt_ns: int, now_ns: int) -> None:
        """Whether slow start has opened the window far enough."""
        self._round_samples += 1
        if not self._round_rtt_ns or rtt_ns < self._round_rtt_ns:
            self._round_rtt_ns = rtt_ns
        least_ns, window = self.min_rtt_ns, self.window
        train_ns = now_ns - self._round_ns
        if now_ns - self._train_ns <= HYSTART_GAP_NS:
            self._train_ns = now_ns
        if window.bytes < HYSTART_LEAST_PACKETS * self._mss:
            return
        train = self._train_ns == now_ns and train_ns > (
            least_ns + HYSTART_SLACK_NS if self.pace_bytes_per_s else least_ns // 2
        )
        longer_ns = least_ns + min(max(least_ns // 8, HYSTART_MIN_NS), HYSTART_MAX_NS)
        if train or (self._round_samples >= HYSTART_SAMPLES and self._round_rtt_ns >= longer_ns):
            window.threshold_bytes = window.bytes

    def _lost(self, flight: Flight) -> None:
        """What didn't get through of a flight is sent again, before anything new."""
        if flight.lost or flight.passed_bytes == flight.nbytes:
            return
        flight.lost = True
        self.in_flight_bytes -= flight.nbytes - (flight.passed_bytes if flight.acked else 0)
        if flight.segment.missing_bytes:
            self._again.append(flight.segment)
        if flight.order > self._recovery_order:  # the first one of its round trip
            self._recovery_order = self._orders
            self._recovering, self._recovery_room_bytes = True, float(self._mss)
            self.window.reduced()

    # ------------------------------------------------------------------------------------------- the timer

    def _timeout_ns(self) -> int:
        return min(MAX_RTO_NS, (self.srtt_ns or NANOS) + max(MIN_RTO_NS, 4 * self._var_ns))

    def _probe_ns(self) -> int:
        if self._probed or not self.srtt_ns:
            return min(MAX_RTO_NS, self._timeout_ns() << min(self._backoff, 10))
        return min(2 * self.srtt_ns + 2_000_000, self._timeout_ns())

    def _timer(self, set_for_ns: int) -> None:
        if set_for_ns != self._timer_ns:
            return
        self._timer_ns = 0
        if not self.open or not self._outstanding:
            return  # the next transmission arms it again
        now_ns = self.clock.now_ns
        # The kernel arms it anew with each transmission and each acknowledgement.
        due_ns = max(self._progress_ns, self._last_sent_ns) + self._probe_ns()
        if now_ns >= due_ns:
            if self._probed or not self.srtt_ns:
                self._timed_out()
            else:
                self._probe()
            due_ns = now_ns + self._probe_ns()
        if not self._timer_ns or due_ns < self._timer_ns:
            self._timer_ns = due_ns
            self.clock.at(due_ns, self._timer, due_ns)

    def _probe(self) -> None:
        """Send the last segment again: its acknowledgement shows the hole before it."""
        self._probed = True
        segment = self._outstanding[-1].segment
        if segment.missing_bytes:
            nbytes = min(segment.missing_bytes, self._mss)
            self.retransmits += 1
            self._put(segment, nbytes)

    def _timed_out(self) -> None:
        self._backoff += 1
        segments = {flight.segment.number: flight.segment for flight in self._outstanding}
        segments |= {segment.number: segment for segment in self._again}
        for flight in self._outstanding:
            flight.lost = True
        self._outstanding.clear()
        self._again.clear()
        self._again.extend(segments[number] for number in sorted(segments) if segments[number].missing_bytes)
        self.in_flight_bytes = 0
        self._recovery_order, self._recovering = self._orders, False
        self.window.timed_out()
        self._send()
