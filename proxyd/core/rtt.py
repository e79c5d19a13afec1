"""What the agents' round-trip times say about a link: its least delay, and the queue on top of it.

Samples of all agents are pooled: the least of them is the path's own delay, since no agent can see less than that. The
minimum is windowed, so that a rerouted path is believed after a while. What the latest samples show above it is time
spent in queues (0.3-0.9 ms of it is noise of the hosts).
"""

from __future__ import annotations

from proxyd.core.windowed import WindowedMin

MIN_RTT_WINDOW_NS = 10_000_000_000
MAX_PLAUSIBLE_RTT_NS = 10_000_000_000
"""Nothing on Earth takes longer; a larger sample is a broken agent's."""


class RttTracker:
    """Pooled round-trip times of one link."""

    __slots__ = ("_least", "smoothed_ns")

    def __init__(self) -> None:
        self._least = WindowedMin(MIN_RTT_WINDOW_NS)
        self.smoothed_ns = 0
        """Exponential average (1/8) of the agents' own smoothed times; 0 before the first sample."""

    def add(self, srtt_ns: int, min_rtt_ns: int, now_ns: int) -> None:
        """Take one report's figures; zeros mean "not measured" and implausible ones are ignored."""
        if 0 < min_rtt_ns <= MAX_PLAUSIBLE_RTT_NS:
            self._least.add(min_rtt_ns, now_ns)
        if 0 < srtt_ns <= MAX_PLAUSIBLE_RTT_NS:
            self.smoothed_ns += (srtt_ns - self.smoothed_ns) // 8 if self.smoothed_ns else srtt_ns

    def min_rtt_ns(self, now_ns: int) -> int:
        """Least round trip of the last ten seconds; 0 when there was none."""
        return self._least.get(now_ns) or 0

    def queue_ns(self, now_ns: int) -> int:
        """Delay above the least one."""
        least = self._least.get(now_ns)
        return max(0, self.smoothed_ns - least) if least is not None else 0
