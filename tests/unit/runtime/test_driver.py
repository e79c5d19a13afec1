"""The driver: order, re-entrancy, timers, failure. With a machine and a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from proxyd.core.events import TimePassed
from proxyd.runtime.driver import Driver


class Counter:
    """A machine that answers each number with that many effects, and wants to be woken at ``deadline_ns``."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, int]] = []
        self.deadline_ns: int | None = None

    def handle(self, event: int | TimePassed, now_ns: int) -> list[str]:
        self.seen.append((event, now_ns))
        if isinstance(event, TimePassed):
            self.deadline_ns = None
            return ["tick"]
        if event < 0:
            raise ValueError("negative")
        return [f"{event}.{i}" for i in range(event)]

    def next_deadline_ns(self) -> int | None:
        return self.deadline_ns


class Hand:
    """A timer that is moved by hand."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.fire = callback
        self.at_ns: int | None = None
        self.closed = False

    def set(self, deadline_ns: int | None) -> None:
        self.at_ns = deadline_ns

    def close(self) -> None:
        self.closed = True


class Bench:
    """A driver with everything around it in reach."""

    def __init__(self, **options: object) -> None:
        self.now_ns = 1000
        self.machine = Counter()
        self.done: list[str] = []
        self.timers: list[Hand] = []
        self.driver: Driver[int, str] = Driver(
            self.machine, self.perform, timer=self.make_timer, clock=lambda: self.now_ns, **options
        )

    @property
    def timer(self) -> Hand:
        return self.timers[0]

    def make_timer(self, callback: Callable[[], None]) -> Hand:
        self.timers.append(Hand(callback))
        return self.timers[-1]

    def perform(self, effects: Sequence[str]) -> None:
        for effect in effects:
            self.done.append(effect)
            if effect == "2.0":
                self.driver.handle(1)


def test_effects_of_one_event_are_not_split_by_an_event_that_they_cause() -> None:
    bench = Bench()
    bench.driver.handle(2)
    assert bench.done == ["2.0", "2.1", "1.0"]


def test_the_timer_follows_the_deadline() -> None:
    bench = Bench()
    bench.machine.deadline_ns = 5000
    bench.driver.start()
    assert bench.timer.at_ns == 5000
    bench.machine.deadline_ns = 3000
    bench.driver.handle(0)
    assert bench.timer.at_ns == 3000


def test_time_passes_only_when_it_is_due() -> None:
    bench = Bench()
    bench.machine.deadline_ns = 5000
    bench.driver.start()
    bench.timer.fire()
    assert bench.machine.seen == []
    assert bench.timer.at_ns == 5000
    bench.now_ns = 5000
    bench.timer.fire()
    assert bench.machine.seen == [(TimePassed(), 5000)]
    assert bench.done == ["tick"]
    assert bench.timer.at_ns is None


def test_a_recording_sees_every_event_with_its_time() -> None:
    recorded: list[tuple[int, object]] = []
    bench = Bench(record=lambda now_ns, event: recorded.append((now_ns, event)))
    bench.driver.handle(2)
    assert recorded == [(1000, 2), (1000, 1)]


def test_a_machine_that_breaks_stops_the_driver_and_says_so() -> None:
    failures: list[BaseException] = []
    bench = Bench(on_failure=failures.append)
    bench.driver.handle(-1)
    assert [str(error) for error in failures] == ["negative"]
    assert bench.driver.closed
    assert bench.timer.closed
    bench.driver.handle(1)
    assert bench.done == []


def test_without_a_listener_the_failure_goes_to_the_caller() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="negative"):
        bench.driver.handle(-1)
    assert bench.driver.closed
