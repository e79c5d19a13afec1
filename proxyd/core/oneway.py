"""Queues of one direction, from frames that say when they left and when they arrived.

A round trip is longer by the queues of both directions, and who sends both ways at once would take the other
direction's queue for its own: both slow down for it, and the link's two directions drag each other down. So a frame
goes there and back while data is under way (as in TWAMP, RFC 5357): the sender notes when it left on its clock (t1),
the peer when it arrived and was answered on *its* clock (t2, t3), and the answer comes back at t4 on the sender's.
t2 - t1 and t4 - t3 are delays plus the difference of two clocks that nobody knows; but that is in every sample, and
what a sample is above the least one of the last ten seconds is queue of its own direction (as in LEDBAT, RFC 6817).

Measured with processes' own clocks alone, the milliseconds that a busy host takes to read a frame hide every queue; so
arrivals are the kernel's (``SO_TIMESTAMPNS``).

Clocks of two machines drift apart by some 20 to 100 parts in a million: at most a millisecond within the ten seconds.
"""

from __future__ import annotations

from collections import deque

from proxyd.core.rtt import MIN_RTT_WINDOW_NS
from proxyd.core.windowed import WindowedMin

LATEST = 2
"""Queue is what the least of so many answers shows: processes read their frames late, and never early."""
NOISE_NS = 300_000
"""So much of each answer is what hosts add, and no queue."""
FRESH_NS = 250_000_000
"""Answers that are older than this say nothing of now."""


class OneWayDelays:
    """What the timed frames to one peer say. Times in nanoseconds, each on the clock of who took it."""

    __slots__ = ("_back", "_back_queues", "_forth", "_forth_queues", "_newest_ns", "samples")

    def __init__(self) -> None:
        self._forth = WindowedMin(MIN_RTT_WINDOW_NS)
        self._back = WindowedMin(MIN_RTT_WINDOW_NS)
        self._forth_queues: deque[int] = deque(maxlen=LATEST)
        self._back_queues: deque[int] = deque(maxlen=LATEST)
        self._newest_ns = 0
        self.samples = 0
        """Answers so far."""

    def add(self, left_ns: int, arrived_ns: int, answered_ns: int, now_ns: int) -> None:
        """An answer came: its frame left here at ``left_ns``, arrived there at ``arrived_ns`` and was answered at
        ``answered_ns`` (the peer's clock)."""
        forth_ns, back_ns = arrived_ns - left_ns, now_ns - answered_ns
        self._forth.add(forth_ns, now_ns)
        self._back.add(back_ns, now_ns)
        self._forth_queues.append(forth_ns - (self._forth.get(now_ns) or 0))
        self._back_queues.append(back_ns - (self._back.get(now_ns) or 0))
        self._newest_ns = now_ns
        self.samples += 1

    def back_queue_ns(self, queue_ns: int, now_ns: int) -> int:
        """How much of ``queue_ns`` (a round trip above its least) stood in the way back, for certain; else 0.

        Too much would hide a queue of our own, so all that can be doubted is left to the way there: late processes, and
        what the frame that arrived last has seen there.
        """
        if len(self._back_queues) < LATEST or now_ns - self._newest_ns > FRESH_NS:
            return 0
        return max(0, min(min(self._back_queues) - NOISE_NS, queue_ns - min(self._forth_queues)))
