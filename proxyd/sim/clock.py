"""Simulated time: a heap of things to do. Nothing else moves the clock, so a run depends on its seed alone."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """What is due when. Things due at the same time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, time_ns: int, do: Callable[..., object], *args: Any) -> None:
        """Plan ``do(*args)``; a time that has passed means now."""
        self._order += 1
        if time_ns < self.now_ns:
            time_ns = self.now_ns
        heappush(self._heap, (time_ns, self._order, do, args))

    def after(self, delay_ns: int, do: Callable[..., object], *args: Any) -> None:
        """Plan ``do(*args)`` for ``delay_ns`` from now."""
        self.at(self.now_ns + delay_ns, do, *args)

    def run(
        self, until_ns: int, after_each: Callable[[], None] | None = None, done: Callable[[], bool] | None = None
    ) -> None:
        """Do what is due up to ``until_ns``, or until ``done()``; ``after_each`` runs after every event."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns:
            self.now_ns, _, do, args = heappop(heap)
            self.events += 1
            do(*args)
            if after_each is not None:
                after_each()
            if done is not None and done():
                return
        self.now_ns = max(self.now_ns, until_ns)


class Alarm:
    """A machine's one timer: the earliest time asked for counts, later ones are forgotten when it rings."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._due_ns: int | None = None
        self._planned_ns: int | None = None
        """The earliest time at which the clock will call: a later due time waits for that call and plans anew, so a
        machine that moves its deadline after each event doesn't fill the heap."""

    def set(self, due_ns: int | None) -> None:
        """Ring at ``due_ns``; None: not at all."""
        if due_ns is None:
            self._due_ns = None
            return
        self._due_ns = due_ns = max(due_ns, self._clock.now_ns)
        if self._planned_ns is None or due_ns < self._planned_ns:
            self._planned_ns = due_ns
            self._clock.at(due_ns, self._fire, due_ns)

    def _fire(self, planned_ns: int) -> None:
        if self._planned_ns != planned_ns:
            return  # an earlier call took its place
        self._planned_ns = None
        due_ns = self._due_ns
        if due_ns is None:
            return
        if due_ns > planned_ns:
            self.set(due_ns)
            return
        self._due_ns = None
        self._ring()
