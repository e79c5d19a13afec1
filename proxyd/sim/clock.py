"""Simulated time: a heap of things to do. Nothing else moves the clock, so a run depends on its seed alone."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Clock:
    """What is due when. Things due at the same time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0

    def at(self, time_ns: int, do: Callable[[], None]) -> None:
        """Plan ``do``; a time that has passed means now."""
        self._order += 1
        heappush(self._heap, (max(time_ns, self.now_ns), self._order, do))

    def after(self, delay_ns: int, do: Callable[[], None]) -> None:
        """Plan ``do`` for ``delay_ns`` from now."""
        self.at(self.now_ns + delay_ns, do)

    def run(
        self, until_ns: int, after_each: Callable[[], None] | None = None, done: Callable[[], bool] | None = None
    ) -> None:
        """Do what is due up to ``until_ns``, or until ``done()``; ``after_each`` runs after every event."""
        while self._heap and self._heap[0][0] <= until_ns:
            self.now_ns, _, do = heappop(self._heap)
            self.events += 1
            do()
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

    def set(self, due_ns: int | None) -> None:
        """Ring at ``due_ns``; None: not at all."""
        if due_ns is None:
            self._due_ns = None
            return
        due_ns = max(due_ns, self._clock.now_ns)
        if due_ns != self._due_ns:
            self._due_ns = due_ns
            self._clock.at(due_ns, lambda: self._fire(due_ns))

    def _fire(self, due_ns: int) -> None:
        if self._due_ns == due_ns:
            self._due_ns = None
            self._ring()
