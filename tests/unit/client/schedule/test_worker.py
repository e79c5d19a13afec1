"""What a worker carries over from step to step, and moves that fail."""

from __future__ import annotations

import pytest

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule import Kind, Place, Stage, Worker

STAGE = Stage(0, first=True, last=False, activation_bytes=10)


def ran(worker: Worker, kind: Kind, start_ns: int, end_ns: int) -> None:
    worker.start(worker.upcoming(kind, 0), start_ns)
    worker.finish(end_ns)


def test_what_was_learned_goes_on_and_progress_does_not() -> None:
    first = Worker([STAGE], 2, 20)
    ran(first, Kind.F, 0, 100)
    first.arrived(Kind.B, 0, 0, 400)
    ran(first, Kind.B, 400, 450)
    ran(first, Kind.W, 450, 480)
    second = Worker([STAGE], 2, 20)
    second.carry_over(first)
    progress = second.stages[0]
    assert progress.durations_ns == [100, 50, 30]
    assert progress.learned == [True] * 3
    assert progress.round_trip_ns == 300
    assert progress.next == [0, 0, 0]
    assert not progress.places
    ran(second, Kind.F, 0, 900)
    assert first.stages[0].durations_ns[0] == 100, "each learns for itself"
    assert progress.durations_ns[0] == 200, "an eighth of the difference"


def test_a_move_that_failed_leaves_the_activation_where_it_was() -> None:
    worker = Worker([STAGE], 2, 10)
    ran(worker, Kind.F, 0, 10)
    worker.leave(0, 0)
    worker.stayed(0, 0)
    assert worker.stages[0].places[0] is Place.DEVICE
    assert (worker.held_bytes, worker.out_bytes) == (10, 0)
    with pytest.raises(ArgumentError, match="is not leaving"):
        worker.stayed(0, 0)


def test_what_comes_back_takes_memory_that_there_is_unless_the_step_would_stand_still() -> None:
    worker = Worker([STAGE], 2, 10)
    ran(worker, Kind.F, 0, 10)
    worker.leave(0, 0)
    assert worker.left(0, 0)
    ran(worker, Kind.F, 10, 20)
    with pytest.raises(ArgumentError, match="0 bytes are free"):
        worker.come_back(0, 0)
    worker.come_back(0, 0, beyond_limit=True)
    worker.came_back(0, 0)
    assert worker.peak_bytes == 20
    assert worker.free_bytes < 0
