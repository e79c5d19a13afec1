"""How inputs are noticed where a group's works are not proxyd's, and how one stage's end is told to all."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytestmark = pytest.mark.needs_torch


class FakeWork:
    """A receive whose end the test decides."""

    def __init__(self, *, knows: bool) -> None:
        self._knows = knows
        self._ended = threading.Event()
        self._error: Exception | None = None
        self.waits = 0

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._ended.set()

    def is_completed(self) -> bool:
        return self._knows and self._ended.is_set()

    def wait(self) -> None:
        self.waits += 1
        assert self._ended.wait(30)
        if self._error is not None:
            raise self._error


def inputs(knows: bool, count: int, tensors: int = 2) -> list[tuple[int, list[FakeWork]]]:
    return [(number, [FakeWork(knows=knows) for _ in range(tensors)]) for number in range(count)]


def until_here(arrivals: Any) -> list[Any]:
    while not (found := arrivals.here()):
        arrivals.wait(30)
    return list(found)


def to_the_end(arrivals: Any) -> None:
    while True:
        until_here(arrivals)


def test_works_that_do_not_know_are_waited_for_by_a_thread_in_their_order() -> None:
    pytest.importorskip("torch")
    from proxyd_client.schedule import Kind
    from proxyd_client.torch.pipeline.arrivals import Waited
    from proxyd_client.torch.pipeline.errors import PipelineError

    arrivals = Waited("gloo")
    assert "gloo" in arrivals.reason
    forward, backward = inputs(False, 3), inputs(False, 1)
    arrivals.post(Kind.F, forward)
    arrivals.post(Kind.B, backward)
    assert arrivals.here() == []
    arrivals.wait(0)
    forward[1][1][0].end()
    forward[1][1][1].end()
    forward[0][1][0].end()
    assert arrivals.here() == [], "half of an input is none, and the second waits for the first"
    assert arrivals.awaits() == [(Kind.F, 0), (Kind.B, 0)]
    forward[0][1][1].end()
    assert until_here(arrivals)[0] == (Kind.F, 0)
    threading.Timer(0.02, arrivals.wake).start()
    arrivals.wait(30)
    for work in backward[0][1]:
        work.end()
    seen: list[Any] = []
    while (Kind.B, 0) not in seen:
        seen += until_here(arrivals)
    forward[2][1][0].end(RuntimeError("Connection closed by peer"))
    with pytest.raises(PipelineError, match=r"the input of F2 did not come: RuntimeError: Connection closed by peer"):
        to_the_end(arrivals)


def test_works_that_know_are_asked_at_intervals_and_waited_for_by_the_computing_thread() -> None:
    pytest.importorskip("torch")
    from proxyd_client.schedule import Kind
    from proxyd_client.torch.pipeline.arrivals import POLL_S, Asked

    slept: list[float] = []
    forward = inputs(True, 2)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            for work in forward[0][1]:
                work.end()

    arrivals = Asked("nccl", sleep)
    arrivals.post(Kind.F, forward)
    arrivals.wait(None)
    assert slept == [POLL_S] * 3
    assert arrivals.here() == [(Kind.F, 0)]
    assert [work.waits for work in forward[0][1]] == [1, 1], "of nccl the wait is what orders the streams"
    arrivals.wait(2 * POLL_S)
    assert len(slept) == 5
    arrivals.wake()
    arrivals.wait(None)
    assert len(slept) == 5
    assert arrivals.awaits() == [(Kind.F, 1)]


def test_the_first_reason_is_what_all_hear_and_another_life_of_a_group_hears_nothing() -> None:
    torch = pytest.importorskip("torch")
    from proxyd_client.torch.pipeline.alarm import alarm_of

    store = torch.distributed.HashStore()

    class Group:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def rank(self) -> int:
            return self._rank

        def get_group_store(self) -> Any:
            return store

    members = [Group(rank) for rank in range(3)]
    alarms = [alarm_of(member) for member in members]
    assert alarm_of(members[0]) is alarms[0]
    assert [alarm.heard() for alarm in alarms] == ["", "", ""]
    alarms[1].ring("stage 1: its reason")
    alarms[2].ring("stage 2: because of stage 1")
    assert {alarm.heard() for alarm in alarms} == {"stage 1: its reason"}
    assert [alarm.raised for alarm in alarms] == ["", "stage 1: its reason", "stage 2: because of stage 1"]
    again = [alarm_of(member) for member in [Group(rank) for rank in range(3)]]
    assert [alarm.heard() for alarm in again] == ["", "", ""]
