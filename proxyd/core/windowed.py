"""Minimum and maximum over a sliding stretch of time, in constant time per sample.

A monotonic queue: a sample that a newer, better one has overtaken can never be the answer again and is dropped, so the
front is always the extreme of what is still young enough. Unlike an all-time extreme it forgets: a path that changed is
noticed after one window.
"""

from __future__ import annotations

from collections import deque


class WindowedMin:
    """The least of the samples of the last ``span_ns``."""

    __slots__ = ("_samples", "span_ns")

    def __init__(self, span_ns: int) -> None:
        self.span_ns = span_ns
        self._samples: deque[tuple[int, int]] = deque()

    def add(self, value: int, now_ns: int) -> None:
        """Take a sample; time never goes backwards."""
        samples = self._samples
        while samples and samples[-1][1] >= value:
            samples.pop()
        samples.append((now_ns, value))
        before_ns = now_ns - self.span_ns
        while samples[0][0] < before_ns:
            samples.popleft()

    def get(self, now_ns: int) -> int | None:
        """The minimum, or None when every sample is older than the window."""
        samples = self._samples
        before_ns = now_ns - self.span_ns
        while samples and samples[0][0] < before_ns:
            samples.popleft()
        return samples[0][1] if samples else None
