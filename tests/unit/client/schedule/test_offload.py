"""What moves to host memory, and back."""

from __future__ import annotations

import pytest

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule import Kind, Move, Offload, Online, Place, Stage, Task, Tier, Worker

MS = 1_000_000
F, B, W = Kind.F, Kind.B, Kind.W


def filled(count: int, memory: int = 4) -> Worker:
    """A first stage that has run ``count`` F of 10 ms each."""
    worker = Worker([Stage(0, True, False, 10 * MS, 10 * MS, 10 * MS)], 20, memory)
    for number in range(count):
        worker.start(Task(F, 0, number), number * 10 * MS)
        worker.finish((number + 1) * 10 * MS)
    return worker


def test_nothing_moves_while_there_is_room() -> None:
    assert Offload(10, 5 * MS).out(filled(2), 30 * MS) is None


def test_the_one_needed_last_goes_when_memory_is_short_and_the_gradient_far() -> None:
    worker, offload = filled(3), Offload(10, 5 * MS)
    worker.foretell(B, 0, 0, 500 * MS, 0)
    move = offload.out(worker, 30 * MS)
    assert move is not None
    assert (move.outwards, move.micro_batch) == (True, 2)
    assert "needed in 530 ms" in move.reason
    near = filled(3)
    near.foretell(B, 0, 0, 31 * MS, 30 * MS)
    assert Offload(10, 30 * MS).out(near, 30 * MS) is None, "it would be needed before it is back"
    assert Offload(0, 5 * MS).out(worker, 30 * MS) is None, "there is no host memory"


@pytest.mark.parametrize("overdue", [False, True])
def test_nothing_leaves_that_would_be_called_back_at_once(overdue: bool) -> None:
    """Whatever goes out stays out while nothing happens but that time passes and a gradient is late."""
    for period_ms in range(1, 40):
        worker = Worker([Stage(0, True, False, period_ms * MS, 10 * MS, 10 * MS)], 20, 4)
        for number in range(3):
            worker.start(Task(F, 0, number), number * period_ms * MS)
            worker.finish((number + 1) * period_ms * MS)
        now_ns = 3 * period_ms * MS
        worker.foretell(B, 0, 0, 1 if overdue else now_ns + 5 * MS, 0)
        offload = Offload(10, 12 * MS)
        move = offload.out(worker, now_ns)
        if move is not None:
            worker.leave(0, move.micro_batch)
            worker.left(0, move.micro_batch)
            assert offload.back(worker, now_ns + offload.transfer_ns) is None


def test_it_comes_back_before_it_is_needed_and_not_long_before() -> None:
    worker, offload = filled(3), Offload(10, 5 * MS)
    worker.foretell(B, 0, 0, 500 * MS, 0)
    worker.leave(0, 2)
    assert worker.left(0, 2)
    assert (worker.held_bytes, worker.out_bytes) == (2, 1)
    assert offload.back(worker, 30 * MS) is None
    due_ns = offload.next_ns(worker, 30 * MS)
    assert due_ns == (500 + 2 * 30 - 2 * 5 - 2 * 30) * MS
    move = offload.back(worker, due_ns)
    assert move == Move(False, 0, 2, "its B is near")


def test_the_next_one_comes_back_whatever_is_predicted() -> None:
    worker, offload = filled(1), Offload(10, 5 * MS)
    worker.leave(0, 0)
    worker.left(0, 0)
    assert offload.back(worker, 10 * MS) == Move(False, 0, 0, "its B is the next one")
    worker.come_back(0, 0)
    worker.arrived(B, 0, 0, 20 * MS)
    assert not worker.ready(B, 0), "it is still on its way"
    worker.came_back(0, 0)
    assert worker.ready(B, 0)


def with_waiting_w(memory: int, host: int) -> tuple[Worker, Offload]:
    """Four B have run, no W; the gradients of all others are about to come."""
    worker = filled(memory, memory)
    for number in range(4):
        worker.arrived(B, 0, number, 100 * MS)
        worker.start(Task(B, 0, number), 100 * MS)
        worker.finish(110 * MS)
    worker.foretell(B, 0, 4, 111 * MS, 0)
    return worker, Offload(host, 5 * MS)


def test_one_of_which_only_w_is_left_goes_when_no_other_can_and_comes_back_in_order() -> None:
    worker, offload = with_waiting_w(5, 10)
    move = offload.out(worker, 110 * MS)
    assert move is not None
    assert (move.micro_batch, move.reason) == (3, "memory is short, and only its W is left to do")
    for number in (3, 2, 1):
        worker.leave(0, number)
        worker.left(0, number)
    assert offload.out(worker, 110 * MS) is None, "the next W's activation stays"
    assert offload.back(worker, 110 * MS) is None
    worker.start(Task(W, 0, 0), 110 * MS)
    worker.finish(120 * MS)
    assert offload.back(worker, 120 * MS) == Move(False, 0, 1, "its W is the next one")


def test_the_one_behind_a_w_that_has_begun_is_on_the_device_in_time() -> None:
    """A W in parts counts as the next one until its last part starts, and then it is too late for the one behind."""
    worker = Worker([Stage(0, True, False, 10 * MS, 10 * MS, 10 * MS, weight_parts=3)], 20, 5)
    for number in range(4):
        worker.start(Task(F, 0, number), 0)
        worker.finish(10 * MS)
    for number in range(3):
        worker.arrived(B, 0, number, 100 * MS)
        worker.start(Task(B, 0, number), 100 * MS)
        worker.finish(110 * MS)
    offload = Offload(10, 5 * MS)
    worker.leave(0, 1)
    worker.left(0, 1)
    worker.foretell(B, 0, 3, 500 * MS, 0)
    assert offload.back(worker, 110 * MS) is None
    worker.start(Task(W, 0, 0, 0), 110 * MS)
    assert offload.back(worker, 110 * MS) == Move(False, 0, 1, "its W is the next one")
    worker.finish(113 * MS)
    assert offload.back(worker, 113 * MS) == Move(False, 0, 1, "its W is the next one")
    worker.come_back(0, 1)
    worker.came_back(0, 1)
    while worker.free_bytes > 1:
        worker.start(worker.upcoming(F, 0), 120 * MS)
        worker.finish(130 * MS)
    worker.foretell(B, 0, 3, 131 * MS, 0)
    move = offload.out(worker, 130 * MS)
    assert move is not None
    assert move.micro_batch == 2, "the one behind the W that has begun stays"


def test_the_last_place_outside_is_for_making_room_in_need() -> None:
    worker, _ = with_waiting_w(5, 2)
    assert Offload(1, 5 * MS).out(worker, 110 * MS) is None
    offload = Offload(2, 5 * MS)
    assert offload.out(worker, 110 * MS) is not None
    worker.leave(0, 3)
    worker.left(0, 3)
    assert offload.out(worker, 110 * MS) is None, "one place is left outside, and nothing is stuck"


def test_a_w_voids_a_move_that_is_under_way() -> None:
    worker, _ = with_waiting_w(5, 10)
    worker.leave(0, 0)
    worker.start(Task(W, 0, 0), 110 * MS)
    assert not worker.left(0, 0)
    worker.finish(120 * MS)
    assert (worker.held_bytes, worker.out_bytes) == (4, 0)


def test_a_b_voids_a_move_that_is_under_way() -> None:
    worker = filled(1)
    worker.leave(0, 0)
    worker.arrived(B, 0, 0, 20 * MS)
    worker.start(Task(B, 0, 0), 20 * MS)
    assert not worker.left(0, 0)
    assert worker.stages[0].places[0] == Place.DEVICE
    assert (worker.held_bytes, worker.out_bytes) == (1, 0)


def test_an_f_leaves_room_for_what_must_come_back() -> None:
    worker = filled(3)
    worker.leave(0, 2)
    worker.left(0, 2)
    assert Online().decide(worker, 50 * MS).task == Task(F, 0, 3)
    worker.start(Task(F, 0, 3), 50 * MS)
    worker.finish(60 * MS)
    said = Online().decide(worker, 60 * MS)
    assert said.task is None
    assert "memory is full (3 of 4 bytes)" in said.reason


def with_a_full_host(wait_ms: int) -> tuple[Worker, Offload]:
    """Two of four places outside are taken, the last one is for need; the next gradient comes after a while."""
    worker = filled(6, 6)
    for number in (5, 4):
        worker.leave(0, number)
        worker.left(0, number)
    for number in (6, 7):
        worker.start(Task(F, 0, number), 60 * MS)
        worker.finish(60 * MS)
    worker.foretell(B, 0, 0, wait_ms * MS, 0)
    return worker, Offload(3, 5 * MS, Tier(2, 60 * MS, 100 * MS))


def test_the_slower_tier_is_for_long_waits_when_host_memory_is_full() -> None:
    worker, offload = with_a_full_host(500)
    assert offload.out(worker, 60 * MS) is None
    move = offload.out_far(worker, 60 * MS)
    assert move is not None
    assert (move.micro_batch, move.far, move.outwards) == (7, True, True)
    assert "host memory is full" in move.reason
    assert Offload(8, 5 * MS, Tier(2, 60 * MS, 100 * MS)).out_far(worker, 60 * MS) is None, "the host has room"
    assert Offload(3, 5 * MS, Tier(0, 60 * MS, 100 * MS)).out_far(worker, 60 * MS) is None, "it is full"
    assert Offload(3, 5 * MS).out_far(worker, 60 * MS) is None, "there is none"
    near, offload = with_a_full_host(61)
    assert offload.out_far(near, 60 * MS) is None, "it would not be back in time"


def test_what_is_on_the_slower_tier_starts_back_as_early_as_its_way_is_long() -> None:
    worker, offload = with_a_full_host(500)
    worker.leave(0, 7, far=True)
    assert worker.left(0, 7)
    assert (worker.out_bytes, worker.far_bytes, worker.held_bytes) == (3, 1, 5)
    assert offload.back(worker, 60 * MS, far=True) is None
    due_ns = (500 + 7 * 30 - 2 * 100 - 2 * 30) * MS
    assert offload.back(worker, due_ns - 1, far=True) is None
    assert offload.back(worker, due_ns, far=True) == Move(False, 0, 7, "its B is near", far=True)
    assert offload.next_ns(worker, 60 * MS) == due_ns, "before one that is needed earlier and lies nearer"
    worker.come_back(0, 7)
    worker.came_back(0, 7)
    assert (worker.out_bytes, worker.far_bytes, worker.held_bytes) == (2, 0, 6)


def test_the_last_free_place_is_for_the_next_one_from_whichever_tier() -> None:
    worker = filled(2, 2)
    worker.leave(0, 0, far=True)
    worker.leave(0, 1)
    assert worker.left(0, 0)
    assert worker.left(0, 1)
    worker.start(Task(F, 0, 2), 20 * MS)
    worker.finish(30 * MS)
    worker.arrived(B, 0, 0, 40 * MS)
    offload = Offload(3, 5 * MS, Tier(2, 40 * MS, 50 * MS))
    assert offload.back(worker, 40 * MS) is None, "B1 is near, but the only place is for B0"
    assert offload.back(worker, 40 * MS, far=True) == Move(False, 0, 0, "its B is the next one", far=True)


def test_a_void_move_to_the_slower_tier_is_forgotten_and_not_begun_again_meanwhile() -> None:
    worker = filled(3)
    worker.leave(0, 0, far=True)
    worker.arrived(B, 0, 0, 40 * MS)
    worker.start(Task(B, 0, 0), 40 * MS)
    worker.finish(50 * MS)
    worker.foretell(B, 0, 1, 51 * MS, 0)
    offload = Offload(9, 5 * MS)
    assert worker.stages[0].moving == {0}
    assert offload._last_here(worker.stages[0], 0, 1, -1) is None, "its copy is still under way"
    assert not worker.left(0, 0)
    assert (worker.out_bytes, worker.far_bytes, worker.stages[0].far, worker.stages[0].moving) == (0, 0, set(), set())


def test_bad_moves_and_figures_are_refused() -> None:
    worker = filled(4)
    with pytest.raises(ArgumentError, match="is not out"):
        filled(1).come_back(0, 0)
    with pytest.raises(ArgumentError, match="is not device"):
        worker.leave(0, 7)
    with pytest.raises(ArgumentError, match="neither may be below 0"):
        Offload(-1, 0)
    with pytest.raises(ArgumentError, match="slower tier of -1 bytes"):
        Offload(1, 0, Tier(-1, 0, 0))
    two = Worker([Stage(0, True, False), Stage(1, False, True)], 4, 2)
    with pytest.raises(ArgumentError, match="one stage"):
        Offload(10, 1).out(two, 0)
