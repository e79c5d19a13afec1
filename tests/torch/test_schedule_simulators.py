"""Our static schedules and our engine beside torch's: the same orders, and the same times at a constant delay.

Three judges that share no code with ours. *Orders* are those of ``torch.distributed.pipelining``, task by task. *Times*
of an order at a constant delay are the longest path through its graph, by networkx. *Torch's own simulator* dry-runs an
order with sends and receives that torch puts in, and says when it would stand still; it knows steps, not durations.

The figures of docs/scheduling.md, "Beside public simulators", are computed here; the page is held to them.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxyd.sim.pipeline.model import preset_model
from proxyd.sim.pipeline.systems import hops
from proxyd_client.schedule import Kind, Task, orders
from proxyd_client.schedule.planner import plan
from tests.sim.static_orders import Durations, step

pytestmark = pytest.mark.needs_torch

DOCUMENT = Path(__file__).parents[2] / "docs" / "scheduling.md"
EQUAL: Durations = (1, 1, 1)
UNEVEN: Durations = (10, 14, 8)
DELAYS = (0, 3, 50)
SIZES = [(2, 6), (4, 8), (8, 16)]

Rows = list[list[Task]]


def torchs(name: str, workers: int, micro_batches: int, chunks: int) -> dict[int, list[Any]]:
    """The order of a schedule class of torch, by rank. Only what its stages say of their places is looked at."""
    from torch.distributed.pipelining import schedules

    count = workers * chunks
    places = (0, count - 1) if name == "ScheduleZBVZeroBubble" else tuple(range(0, count, workers))
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=place,
            num_stages=count,
            group_size=workers,
            group_rank=0,
            submod=None,
            has_backward=True,
            is_first=place == 0,
            is_last=place == count - 1,
        )
        for place in places
    ]
    if name == "Schedule1F1B":
        return schedules.Schedule1F1B(stages[0], micro_batches)._get_pipeline_order()  # type: ignore[return-value]
    return getattr(schedules, name)(stages, micro_batches).pipeline_order  # type: ignore[no-any-return]


def tasks_of(actions: Sequence[Any]) -> list[Task]:
    """Torch's actions in our words. A full backward is B and W. Forwards are counted anew: the list of torch 2.13 for
    the last rank of 1F1B counts them from 1."""
    tasks: list[Task] = []
    forwards: Counter[int] = Counter()
    for action in actions:
        match action and action.computation_type.name:
            case "FORWARD":
                tasks.append(Task(Kind.F, action.stage_index, forwards[action.stage_index]))
                forwards[action.stage_index] += 1
            case "BACKWARD_INPUT":
                tasks.append(Task(Kind.B, action.stage_index, action.microbatch_index))
            case "BACKWARD_WEIGHT":
                tasks.append(Task(Kind.W, action.stage_index, action.microbatch_index))
            case "FULL_BACKWARD":
                tasks += [Task(kind, action.stage_index, action.microbatch_index) for kind in (Kind.B, Kind.W)]
    return tasks


SCHEDULES: dict[str, tuple[str, int, bool]] = {
    "1F1B": ("Schedule1F1B", 1, True),
    "ZB-H1": ("ScheduleInterleavedZeroBubble", 1, False),
    "interleaved": ("ScheduleInterleaved1F1B", 2, True),
    "ZB-V": ("ScheduleZBVZeroBubble", 2, False),
}
"""Torch's class, stages per worker, and whether backward is one piece."""


def ours(name: str, workers: int, micro_batches: int) -> Rows:
    """The same of ours."""
    made = {
        "1F1B": lambda place: orders.one_f_one_b(workers, place, micro_batches),
        "ZB-H1": lambda place: orders.zb_h1(workers, place, micro_batches),
        "interleaved": lambda place: orders.interleaved(workers, place, 2, micro_batches),
        "ZB-V": lambda place: orders.zb_v(workers, place, micro_batches),
    }[name]
    return [list(made(place).tasks) for place in range(workers)]


def theirs(name: str, workers: int, micro_batches: int) -> Rows:
    found = torchs(SCHEDULES[name][0], workers, micro_batches, SCHEDULES[name][1])
    return [tasks_of(found[rank]) for rank in range(workers)]


def longest_path(rows: Rows, durations: Durations, delay: int, fused: bool) -> int:
    """When the last task of these orders ends: each follows the one before it on its worker and what it is fed by."""
    import networkx

    host = {task.stage: place for place, row in enumerate(rows) for task in row}
    last = max(host)
    graph = networkx.DiGraph()
    for place, row in enumerate(rows):
        for before, task in itertools.pairwise(row):
            graph.add_edge(before, task, weight=durations[before.kind])
        graph.add_edge(row[-1], "end", weight=durations[row[-1].kind])
        for task in row:
            source = None
            if task.kind == Kind.F and task.stage:
                source = task._replace(stage=task.stage - 1)
            elif task.kind == Kind.B and task.stage < last:
                source = task._replace(stage=task.stage + 1, kind=Kind.W if fused else Kind.B)
            if source is not None:
                way = delay if host[source.stage] != place else 0
                weight = max(durations[source.kind] + way, graph.get_edge_data(source, task, {"weight": 0})["weight"])
                graph.add_edge(source, task, weight=weight)
    return int(networkx.dag_longest_path_length(graph))


def torch_steps(rows: Rows, fused: bool) -> int:
    """Steps in torch's simulator, in which each send and receive takes one too. Raises when it stands still."""
    from torch.distributed.pipelining import schedules

    host = {task.stage: place for place, row in enumerate(rows) for task in row}
    kinds = schedules._ComputationType
    words = {Kind.F: kinds.FORWARD, Kind.B: kinds.FULL_BACKWARD if fused else kinds.BACKWARD_INPUT}
    words |= {} if fused else {Kind.W: kinds.BACKWARD_WEIGHT}
    actions = {
        rank: [schedules._Action(t.stage, words[t.kind], t.micro_batch) for t in row if t.kind in words]
        for rank, row in enumerate(rows)
    }
    count = len(host)
    with contextlib.redirect_stdout(io.StringIO()):
        whole = schedules._add_send_recv(actions, host.__getitem__, count)
        played = schedules._simulate_comms_compute(whole, host.__getitem__, count)
    assert {rank: sum(one is not None for one in row) for rank, row in played.items()} == {
        rank: len(row) for rank, row in whole.items()
    }
    return max(len(row) for row in played.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_orders_are_torchs(name: str) -> None:
    for size in [*SIZES, (2, 2), (4, 4), (8, 24)]:
        assert ours(name, *size) == theirs(name, *size), size


@pytest.mark.parametrize("durations", [EQUAL, UNEVEN], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_times_at_a_constant_delay_are_those_of_the_longest_path(name: str, durations: Durations) -> None:
    fused = SCHEDULES[name][2]
    for size in SIZES:
        for delay in DELAYS:
            took = step(ours(name, *size), durations, delay, fused=fused).iteration_ns
            assert took == longest_path(theirs(name, *size), durations, delay, fused), (size, delay)


def test_what_torch_has_not_goes_through_torchs_simulator_and_the_longest_path() -> None:
    """ZB-H2, and plans for a WAN: there is no order to compare with, but they stand still nowhere, and take as long."""
    model = preset_model("L1", trace="constant", micro_batches=24, weight_parts=1)
    planned = plan([[stage] for stage in model.stages], 24, [8 << 30] * 8, hops(model))
    wide = [orders.delay_aware(187, [0, 0, 0, 100, 0, 0, 0], place, 24, 12) for place in range(8)]
    for each in ([orders.zb_h2(8, place, 24) for place in range(8)], planned.orders, wide):
        rows = [list(order.tasks) for order in each]
        assert torch_steps(rows, fused=False) >= 3 * 24
        for delay in DELAYS:
            assert step(rows, UNEVEN, delay).iteration_ns == longest_path(rows, UNEVEN, delay, fused=False)


def test_torchs_simulator_sees_an_order_that_stands_still() -> None:
    """So it can say no to ours: the first stage waits for a gradient before it sends what that comes from."""
    rows = [list(orders.zb_h1(2, place, 2).tasks) for place in range(2)]
    rows[0].sort(key=lambda task: task.kind != Kind.B)
    with pytest.raises(Exception, match=r"not progressing|Malformed|progress"):
        torch_steps(rows, fused=False)


def test_the_page_has_these_figures() -> None:
    """Four workers, twelve micro-batches, F = B = W = 1. Stages of a worker with two are half as long: 1 and not 2."""
    lines = []
    for name, (_, _, fused) in SCHEDULES.items():
        rows, public = ours(name, 4, 12), theirs(name, 4, 12)
        took = [step(rows, EQUAL, delay, fused=fused).iteration_ns for delay in DELAYS]
        path = [longest_path(public, EQUAL, delay, fused) for delay in DELAYS]
        cells = [name, " / ".join(map(str, took)), " / ".join(map(str, path)), str(torch_steps(public, fused))]
        lines.append(f"| {' | '.join(cells)} |")
    text = DOCUMENT.read_text()
    print("\n".join(lines))
    for line in lines:
        assert line[:-1] in text, line
