"""What a link did over time, as the emulator wrote it down, and the figures that come out of it; pure.

One sample per interval (5 ms while packets pass, up to 50 ms while none do). Cumulative values are exact at each
sample; between two samples they are taken to grow evenly.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxyd.wan.errors import WanError

NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class History:
    """Columns of equal length, oldest sample first. Times are CLOCK_MONOTONIC."""

    times_ns: array[int] = field(default_factory=lambda: array("q"))
    peak_bytes: array[int] = field(default_factory=lambda: array("q"))
    """The longest queue since the sample before."""
    queue_bytes: array[int] = field(default_factory=lambda: array("q"))
    """The queue at that instant."""
    carried_bytes: array[int] = field(default_factory=lambda: array("q"))
    """Cumulative: what has left the queue."""
    capacity_bytes: array[int] = field(default_factory=lambda: array("q"))
    """Cumulative: what would have left it, had there always been something to send."""
    dropped_packets: array[int] = field(default_factory=lambda: array("q"))
    """Cumulative: by a full buffer or a policer."""
    accepted_packets: array[int] = field(default_factory=lambda: array("q"))
    """Cumulative: taken into the queue."""

    def _at(self, column: Sequence[int], time_ns: int) -> float:
        """A cumulative column at any time between the first and the last sample; beyond them the nearest."""
        if not self.times_ns:
            raise WanError("the link has no samples: nothing was measured")
        right = bisect_left(self.times_ns, time_ns)
        if right == 0:
            return column[0]
        if right == len(self.times_ns):
            return column[-1]
        before_ns, after_ns = self.times_ns[right - 1], self.times_ns[right]
        share = (time_ns - before_ns) / (after_ns - before_ns)
        return column[right - 1] + (column[right] - column[right - 1]) * share

    def carried(self, start_ns: int, end_ns: int) -> float:
        """Bytes that left the queue between two instants."""
        return self._at(self.carried_bytes, end_ns) - self._at(self.carried_bytes, start_ns)

    def capacity(self, start_ns: int, end_ns: int) -> float:
        """Bytes that could have."""
        return self._at(self.capacity_bytes, end_ns) - self._at(self.capacity_bytes, start_ns)

    def used(self, start_ns: int, end_ns: int) -> float:
        """Carried over capacity; 0 where nothing could be carried."""
        capacity = self.capacity(start_ns, end_ns)
        return self.carried(start_ns, end_ns) / capacity if capacity > 0 else 0.0

    def drops(self, start_ns: int, end_ns: int) -> int:
        """Packets dropped between two instants."""
        return round(self._at(self.dropped_packets, end_ns) - self._at(self.dropped_packets, start_ns))

    def loss(self, start_ns: int, end_ns: int) -> float:
        """Packets dropped over packets offered, between two instants; 0 where none was offered."""
        drops = self.drops(start_ns, end_ns)
        accepted = round(self._at(self.accepted_packets, end_ns) - self._at(self.accepted_packets, start_ns))
        return drops / (drops + accepted) if drops else 0.0

    def series(self, start_ns: int, end_ns: int, step_ns: int) -> list[tuple[int, float, float]]:
        """``(end of the step in ns, carried, capacity)`` in bytes per second for each whole step."""
        found = []
        for left_ns in range(start_ns, end_ns - step_ns + 1, step_ns):
            right_ns = left_ns + step_ns
            per_s = NS_PER_S / step_ns
            found.append((right_ns, self.carried(left_ns, right_ns) * per_s, self.capacity(left_ns, right_ns) * per_s))
        return found

    def queue_quantiles(self, shares: Sequence[float], start_ns: int, end_ns: int) -> list[int]:
        """The queue in bytes that is not exceeded in each share of the *time* between two instants.

        A sample stands for the time since the one before it. 0 without samples.
        """
        first, last = bisect_right(self.times_ns, start_ns), bisect_right(self.times_ns, end_ns)
        weighted = sorted(
            (self.queue_bytes[number], self.times_ns[number] - max(start_ns, self.times_ns[number - 1]))
            for number in range(max(1, first), last)
        )
        total = sum(weight for _, weight in weighted)
        found = []
        for share in shares:
            seen = answer = 0
            for value, weight in weighted:
                seen += weight
                answer = value
                if seen >= share * total:
                    break
            found.append(answer)
        return found

    def settled_ns(self, start_ns: int, end_ns: int, limit_bytes: int, hold_ns: int) -> int | None:
        """When the queue is back: the first instant after ``start_ns`` from which it stays at or below ``limit_bytes``
        for ``hold_ns``, by its longest value in each interval. None: not before ``end_ns``."""
        candidate_ns = start_ns
        for number in range(bisect_right(self.times_ns, start_ns), len(self.times_ns)):
            time_ns = self.times_ns[number]
            if self.peak_bytes[number] > limit_bytes:
                candidate_ns = time_ns
            if time_ns - candidate_ns >= hold_ns:
                return candidate_ns if candidate_ns <= end_ns else None
        return None

    def filled_ns(self, start_ns: int, end_ns: int, share: float, window_ns: int) -> int | None:
        """When the link is used: the beginning of the first stretch of ``window_ns`` after ``start_ns`` in which at
        least ``share`` of it was carried. None: no such stretch ends before ``end_ns``."""
        for number in range(bisect_right(self.times_ns, start_ns), bisect_right(self.times_ns, end_ns)):
            time_ns = self.times_ns[number]
            if time_ns - window_ns >= start_ns and self.used(time_ns - window_ns, time_ns) >= share:
                return time_ns - window_ns
        return None
