"""Plans on constant figures."""

from __future__ import annotations

import pytest

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule import Stage
from proxyd_client.schedule.planner import Hop, best_quotas, plan, tapered


def row(count: int, task_ns: int = 10) -> list[list[Stage]]:
    return [[Stage(i, i == 0, i == count - 1, task_ns, task_ns, task_ns)] for i in range(count)]


def test_a_plan_is_no_longer_than_its_parts_allow_and_keeps_its_memory() -> None:
    made = plan(row(4), 16, [4] * 4, [Hop(5, 20)] * 3)
    assert made.makespan_ns >= 3 * (10 + 25) + 16 * 30
    assert all(order.peak_activations <= 4 for order in made.orders)
    assert all(len(order.tasks) == 48 for order in made.orders)


def test_more_memory_hides_a_delay() -> None:
    few, many = (plan(row(2), 32, [room] * 2, [Hop(0, 100)]).makespan_ns for room in (2, 16))
    assert many == 10 + 100 + 32 * 30
    assert few > 1.5 * many


def test_a_plan_looks_ahead_to_what_the_stage_next_door_is_about_to_send() -> None:
    """Results arrive just when a stage has become idle. Without a look ahead W runs then: 14 % over here."""
    made = plan(row(8), 64, [8] * 8, [*[Hop()] * 3, Hop(7, 10), *[Hop()] * 3])
    assert made.makespan_ns <= 1.08 * (64 * 30 + 7 * 10)


def test_the_best_quotas_win() -> None:
    loose, tight = tapered(2, 16, 16), tapered(2, 1, 1)
    found, took_ns = best_quotas(row(2), 32, [16] * 2, [Hop(0, 100)], [tight, loose])
    assert found == loose
    assert took_ns == 10 + 100 + 32 * 30
    assert tapered(4, 8, 2) == {0: 8, 1: 6, 2: 4, 3: 2}


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(ArgumentError, match="one hop less than stages"):
        plan(row(3), 4, [1] * 3, [Hop()])
    with pytest.raises(ArgumentError, match="duration of F, B and W"):
        plan(row(2, 0), 4, [1] * 2, [Hop()])
    with pytest.raises(ArgumentError, match="impossible"):
        plan(row(2), 4, [0] * 2, [Hop()])
