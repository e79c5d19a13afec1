"""Fixed orders: complete, within the memory that they promise, and refused where they make no sense."""

from __future__ import annotations

from collections import Counter

import pytest

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule import Kind, Order, orders

F, B, W = Kind.F, Kind.B, Kind.W


def complete(order: Order, stages: int, micro_batches: int) -> None:
    assert len(order.tasks) == len(set(order.tasks)) == 3 * stages * micro_batches
    seen: Counter[tuple[Kind, int]] = Counter()
    for task in order.tasks:
        assert task.micro_batch == seen[task.kind, task.stage], f"{task} is out of order"
        seen[task.kind, task.stage] += 1
        assert seen[F, task.stage] >= seen[B, task.stage] >= seen[W, task.stage]


@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
@pytest.mark.parametrize("index", range(4))
def test_orders_hold_what_they_promise(index: int, micro_batches: int) -> None:
    for each, peak in ((orders.one_f_one_b, 4 - index), (orders.zb_h1, 4), (orders.zb_h2, 7)):
        order = each(4, index, micro_batches)
        complete(order, 1, micro_batches)
        assert order.peak_activations <= peak
        if micro_batches >= 8:
            assert order.peak_activations == peak


@pytest.mark.parametrize("index", range(4))
def test_interleaved(index: int) -> None:
    complete(orders.interleaved(4, index, 2, 8), 2, 8)
    with pytest.raises(ArgumentError, match="no multiple"):
        orders.interleaved(4, index, 2, 9)


@pytest.mark.parametrize("micro_batches", [1, 3, 6, 7, 20])
@pytest.mark.parametrize("index", range(4))
def test_zb_v_has_two_stages_each_in_the_memory_of_1f1b(index: int, micro_batches: int) -> None:
    order = orders.zb_v(4, index, micro_batches)
    complete(order, 2, micro_batches)
    assert {task.stage for task in order.tasks} == {index, 7 - index}
    assert order.peak_activations <= 8, "halves"
    if micro_batches >= 7:
        assert order.peak_activations == 8


def test_delays_widen_the_gap_in_the_warm_up_where_memory_allows() -> None:
    def warm_up(activations: int) -> list[int]:
        made = [orders.delay_aware(100, [0, 130, 0], index, 20, activations) for index in range(4)]
        return [next(place for place, task in enumerate(one.tasks) if task.kind == B) - 1 for one in made]

    assert warm_up(20) == [6, 5, 1, 0]
    assert warm_up(5) == [4, 3, 1, 0]
    assert warm_up(4) == [3, 2, 1, 0]
    for index in range(4):
        assert orders.delay_aware(100, [0, 130, 0], index, 20, 6).peak_activations <= 6
    with pytest.raises(ArgumentError, match="0 activations"):
        orders.delay_aware(100, [0], 0, 4, 0)


def test_a_stage_outside_the_row_is_refused() -> None:
    with pytest.raises(ArgumentError, match="stage 4 of 4"):
        orders.one_f_one_b(4, 4, 8)
