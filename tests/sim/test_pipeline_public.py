"""Our static schedules and our engine beside public packages that know no torch: the same orders, the same times.

``zbpp-light`` is from the authors of "Zero Bubble Pipeline Parallelism". Colossal-AI can't be installed beside the
torch that the tests use, so what its schedule simulator answered is kept in ``zero_bubble_v.json``: orders of ZB-V, and
when each task ends at a constant delay. ``tests/torch/test_schedule_simulators.py`` has the comparisons with torch.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from zbpp_light.auto_schedule import auto_schedule

from proxyd_client.schedule import Kind, Task, orders
from tests.sim.static_orders import step

ANSWERS = json.loads((Path(__file__).parent / "zero_bubble_v.json").read_text())


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 3])
def test_zb_h1_is_the_authors_order(workers: int, rounds: int) -> None:
    theirs = auto_schedule(workers, rounds * workers)
    for place, row in enumerate(theirs):
        tasks = tuple(Task(Kind[one.type], one.stage, one.minibatch) for one in row if one.type in ("F", "B", "W"))
        assert tasks == orders.zb_h1(workers, place, rounds * workers).tasks


@pytest.mark.parametrize("answer", ANSWERS["timelines"], ids=lambda one: f"delay-{one['delay']}")
def test_the_engine_ends_each_task_of_a_public_zb_v_when_its_authors_say(answer: dict[str, object]) -> None:
    workers = answer["workers"]
    assert isinstance(workers, int)
    rows, expected = [], {}
    for place, text in enumerate(answer["rows"]):  # type: ignore[arg-type, var-annotated]
        row = []
        for word in text.split():
            name, _, end = word.partition(":")
            stage = place if name[-1] == "d" else 2 * workers - 1 - place
            row.append(Task(Kind[name[0]], stage, int(name[1:-1])))
            expected[row[-1]] = int(end)
        rows.append(row)
    result = step(rows, tuple(answer["durations"]), answer["delay"])  # type: ignore[arg-type]
    assert {span.task: span.end_ns for span in result.spans} == expected
    assert result.iteration_ns == max(expected.values())


@pytest.mark.parametrize("answer", ANSWERS["steps_of_unit_tasks"], ids=str)
def test_our_zb_v_takes_as_long_as_a_public_one(answer: dict[str, int]) -> None:
    """Where F = B = W, which it is made for."""
    workers, batches = answer["workers"], answer["micro_batches"]
    rows = [orders.zb_v(workers, place, batches).tasks for place in range(workers)]
    assert step(rows, (1, 1, 1), answer["delay"]).iteration_ns == answer["step"]
