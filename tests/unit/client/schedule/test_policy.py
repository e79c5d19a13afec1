"""One worker and what its policy answers."""

from __future__ import annotations

import time

import pytest

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule import FixedOrder, Kind, Online, Order, Stage, Task, Worker, fixed
from proxyd_client.schedule.orders import one_f_one_b

MS = 1_000_000
F, B, W = Kind.F, Kind.B, Kind.W


def middle(memory: int = 3, micro_batches: int = 4, parts: int = 1) -> Worker:
    stage = Stage(1, False, False, 10 * MS, 10 * MS, 10 * MS, activation_bytes=1, weight_parts=parts)
    return Worker([stage], micro_batches, memory)


def ran(worker: Worker, task: Task, start_ns: int = 0, took_ns: int = 10 * MS) -> None:
    worker.start(task, start_ns)
    worker.finish(start_ns + took_ns)


def test_b_comes_before_f_and_f_before_w() -> None:
    worker, policy = middle(), Online()
    for number in range(3):
        worker.arrived(F, 1, number, 0)
    ran(worker, Task(F, 1, 0))
    ran(worker, Task(F, 1, 1))
    worker.arrived(B, 1, 0, 50)
    assert policy.decide(worker, 50).task == Task(B, 1, 0)
    ran(worker, Task(B, 1, 0))
    assert policy.decide(worker, 60).task == Task(F, 1, 2)
    ran(worker, Task(F, 1, 2))
    assert policy.decide(worker, 70).task == Task(W, 1, 0)


def test_without_memory_w_runs_and_the_reason_says_so() -> None:
    worker, policy = middle(memory=1), Online()
    worker.arrived(F, 1, 0, 0)
    worker.arrived(F, 1, 1, 0)
    ran(worker, Task(F, 1, 0))
    said = policy.decide(worker, 10)
    assert said.task is None
    assert "memory is full (1 of 1 bytes)" in said.reason
    worker.arrived(B, 1, 0, 20)
    ran(worker, Task(B, 1, 0))
    said = policy.decide(worker, 30)
    assert said.task == Task(W, 1, 0)
    assert "memory is full" in said.reason


def test_a_quota_holds_f_back() -> None:
    worker, policy = middle(), Online({1: 1})
    worker.arrived(F, 1, 0, 0)
    worker.arrived(F, 1, 1, 0)
    ran(worker, Task(F, 1, 0))
    assert "quota of 1" in policy.decide(worker, 10).reason
    with pytest.raises(ArgumentError, match="one micro-batch in flight"):
        Online({1: 0})


def near_gradient(uncertainty_ns: int, eta_ns: int) -> Worker:
    """W0 could run; B1 is foretold."""
    worker = middle()
    for number in range(2):
        worker.arrived(F, 1, number, 0)
        ran(worker, Task(F, 1, number))
    worker.arrived(B, 1, 0, 0)
    ran(worker, Task(B, 1, 0))
    worker.foretell(B, 1, 1, eta_ns, uncertainty_ns)
    return worker


def test_a_long_task_waits_for_a_b_that_is_almost_there() -> None:
    said = Online().decide(near_gradient(0, 101 * MS), 100 * MS)
    assert said.task is None
    assert said.until_ns == 101 * MS
    assert "predicted in 1.0 ms" in said.reason
    assert Online(holds_back=False).decide(near_gradient(0, 101 * MS), 100 * MS).task == Task(W, 1, 0)


@pytest.mark.parametrize(
    ("eta_ns", "uncertainty_ns"), [(0, 0), (-5, 0), (99 * MS, 0), (150 * MS, 0), (101 * MS, 50 * MS)]
)
def test_no_late_far_or_unsure_prediction_makes_a_stage_idle(eta_ns: int, uncertainty_ns: int) -> None:
    assert Online().decide(near_gradient(uncertainty_ns, eta_ns), 100 * MS).task == Task(W, 1, 0)


def next_door(eta_ns: int, memory: int = 3) -> Worker:
    """W0 could run; F1 is foretold."""
    worker = middle(memory)
    worker.arrived(F, 1, 0, 0)
    ran(worker, Task(F, 1, 0))
    worker.arrived(B, 1, 0, 0)
    ran(worker, Task(B, 1, 0))
    worker.foretell(F, 1, 1, eta_ns, 0)
    return worker


def test_a_w_waits_for_an_f_that_is_almost_there_if_memory_allows_it() -> None:
    said = Online().decide(next_door(101 * MS), 100 * MS)
    assert said.task is None
    assert "F1@1 is predicted in 1.0 ms" in said.reason
    assert Online().decide(next_door(104 * MS), 100 * MS).task == Task(W, 1, 0)
    full = next_door(101 * MS, memory=1)
    assert Online().decide(full, 100 * MS).task == Task(W, 1, 0), "it could not run when it is there"
    assert Online({1: 1}).decide(next_door(101 * MS), 100 * MS).task is None, "none is in flight"


@pytest.mark.parametrize("worker", [next_door(100 * MS), near_gradient(0, 100 * MS)])
def test_what_is_due_at_this_instant_is_waited_for_and_a_moment_later_no_more(worker: Worker) -> None:
    """Its event may be the next one at the same time; if it doesn't come, somebody must ask again."""
    said = Online().decide(worker, 100 * MS)
    assert said.task is None
    assert said.until_ns == 100 * MS + 1
    assert Online().decide(worker, said.until_ns).task == Task(W, 1, 0)


def test_an_f_is_not_held_back_for_another_f() -> None:
    two = Worker([Stage(i, False, False, 10 * MS, 10 * MS, 10 * MS) for i in (1, 2)], 8, 8)
    two.arrived(F, 1, 0, 0)
    two.foretell(F, 2, 0, 100 * MS, 0)
    assert Online().decide(two, 100 * MS).task == Task(F, 1, 0)


def test_a_waiting_b_gets_between_the_parts_of_a_w() -> None:
    worker, policy = middle(parts=2), Online()
    worker.arrived(F, 1, 0, 0)
    worker.arrived(F, 1, 1, 0)
    ran(worker, Task(F, 1, 0))
    ran(worker, Task(F, 1, 1))
    worker.arrived(B, 1, 0, 0)
    ran(worker, Task(B, 1, 0))
    ran(worker, Task(W, 1, 0, 0))
    worker.arrived(B, 1, 1, 0)
    assert policy.decide(worker, 0).task == Task(B, 1, 1)
    assert worker.held_bytes == 2
    ran(worker, Task(B, 1, 1))
    ran(worker, Task(W, 1, 0, 1))
    assert worker.held_bytes == 1


def test_a_fixed_order_waits_for_what_it_says() -> None:
    worker = Worker([Stage(0, True, False, 1, 1, 1)], 2, 2)
    policy = FixedOrder(one_f_one_b(2, 0, 2))
    ran(worker, Task(F, 0, 0))
    ran(worker, Task(F, 0, 1))
    assert policy.decide(worker, 5).task is None
    worker.arrived(B, 0, 0, 5)
    assert policy.decide(worker, 5).task == Task(B, 0, 0)


def test_an_order_that_needs_more_memory_than_there_is_is_refused_before_the_run() -> None:
    worker = Worker([Stage(0, True, False, 1, 1, 1, activation_bytes=10)], 8, 20)
    with pytest.raises(ArgumentError, match=r"4 activations at once, 40 bytes; the limit is 20 bytes"):
        fixed(one_f_one_b(4, 0, 8), worker)


def test_events_that_cannot_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match="impossible: one micro-batch needs 5 bytes"):
        Worker([Stage(0, True, True, activation_bytes=5)], 1, 4)
    worker = middle()
    with pytest.raises(ArgumentError, match="is the next"):
        worker.arrived(F, 1, 1, 0)
    with pytest.raises(ArgumentError, match="before its F ran"):
        worker.arrived(B, 1, 0, 0)
    with pytest.raises(ArgumentError, match="not here"):
        worker.start(Task(F, 1, 0), 0)
    worker.arrived(F, 1, 0, 0)
    with pytest.raises(ArgumentError, match="is first"):
        worker.start(Task(F, 1, 1), 0)
    with pytest.raises(ArgumentError, match="nothing runs"):
        worker.finish(0)


def test_durations_are_learned() -> None:
    worker = middle(memory=100, micro_batches=100)
    for number in range(60):
        worker.arrived(F, 1, number, 0)
        ran(worker, Task(F, 1, number), took_ns=20 * MS if number < 30 else 40 * MS)
        if number == 0:
            assert worker.stages[1].durations_ns[F] == 20 * MS
    assert 39 * MS < worker.stages[1].durations_ns[F] <= 40 * MS


def test_everything_done_is_said() -> None:
    worker = Worker([Stage(0, True, True)], 1, 1)
    for kind in (F, B, W):
        ran(worker, Task(kind, 0, 0))
    assert worker.done
    assert Online().decide(worker, 0).reason == "everything has run"
    assert FixedOrder(Order((), 0)).decide(worker, 0).reason == "everything has run"


def test_a_decision_is_cheap() -> None:
    """50 us are asked for; ten times that leaves room for a busy machine. Measured: 3 to 6 us."""
    worker = near_gradient(0, 500 * MS)
    policy = Online({1: 8})
    best_s = 1.0
    for _ in range(20):
        begin_s = time.perf_counter()
        for _ in range(100):
            policy.decide(worker, 100 * MS)
        best_s = min(best_s, (time.perf_counter() - begin_s) / 100)
    assert best_s < 500e-6
