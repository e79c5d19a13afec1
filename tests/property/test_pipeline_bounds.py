"""The bounds against all schedules there are of small steps: none is shorter, and with little memory it is reached."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.core.traces import constant, steps
from proxyd.sim.pipeline.bounds import bounds
from proxyd.sim.pipeline.model import PipelineModel, Wire
from proxyd_client.schedule import Kind, Stage

MS = 1_000_000
RATE_BYTES_PER_S = 1_000_000_000
F, B, W = Kind.F, Kind.B, Kind.W


def orders(micro_batches: int, room: int) -> Iterator[tuple[Kind, ...]]:
    """Every order of one stage that keeps its memory; of each kind, micro-batches come one after the other."""

    def longer(done: tuple[Kind, ...], counts: tuple[int, int, int]) -> Iterator[tuple[Kind, ...]]:
        if counts == (micro_batches,) * 3:
            yield done
        forward, backward, weight = counts
        if forward < micro_batches and forward - weight < room:
            yield from longer((*done, F), (forward + 1, backward, weight))
        if backward < forward:
            yield from longer((*done, B), (forward, backward + 1, weight))
        if weight < backward:
            yield from longer((*done, W), (forward, backward, weight + 1))

    return longer((), (0, 0, 0))


def makespan_ns(model: PipelineModel, chosen: tuple[tuple[Kind, ...], ...]) -> int | None:
    """Of one pipeline, everything as early as its order allows; None: the orders block each other.

    Nothing is shorter with these orders: a wait brings nothing, for messages cross in the order of micro-batches.
    """
    count = len(model.stages)
    free_ns, at = [0] * count, [0] * count
    arrived: dict[tuple[Kind, int, int], int] = {(F, 0, number): 0 for number in range(model.micro_batches)}
    done = [[0, 0, 0] for _ in range(count)]
    taken = dict.fromkeys(model.wires, 0)
    moved = True
    while moved:
        moved = False
        for index, stage in enumerate(model.stages):
            while at[index] < len(chosen[index]):
                kind = chosen[index][at[index]]
                number = done[index][kind]
                ready_ns = 0 if kind == W else arrived.get((kind, index, number))
                if ready_ns is None:
                    break
                took_ns = (stage.forward_ns, stage.backward_ns, stage.weight_ns)[kind]
                end_ns = free_ns[index] = max(free_ns[index], ready_ns) + took_ns
                at[index] += 1
                done[index][kind] += 1
                moved = True
                to = index + 1 if kind == F else index - 1
                if kind == F and to == count:
                    arrived[B, index, number] = end_ns
                elif kind != W and to >= 0:
                    way = (model.sites[index], model.sites[to])
                    if way[0] != way[1]:
                        wire = model.wires[way]
                        taken[way] = max(taken[way], wire.rate.bytes_by(end_ns)) + model.message_bytes
                        end_ns = wire.rate.time_for(taken[way]) + wire.one_way_ns
                    arrived[kind, to, number] = end_ns
    return max(free_ns) if all(place == 3 * model.micro_batches for place in at) else None


def shortest_ns(model: PipelineModel) -> int:
    """Of all schedules."""
    each = list(orders(model.micro_batches, model.activations))
    found = (makespan_ns(model, chosen) for chosen in itertools.product(each, repeat=len(model.stages)))
    return min(one for one in found if one is not None)


@st.composite
def small(draw: st.DrawFn) -> PipelineModel:
    count, micro_batches = draw(st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 2), (4, 2)]))
    stages = tuple(
        Stage(index, index == 0, index == count - 1, *(draw(st.integers(1, 30)) * MS for _ in range(3)))
        for index in range(count)
    )
    rate = constant(RATE_BYTES_PER_S)
    if draw(st.booleans()):
        rate = steps(RATE_BYTES_PER_S, [(draw(st.integers(1, 90)) * MS, 0.1), (100 * MS, 1.5)])
    wire = Wire(rate, draw(st.integers(0, 50)) * MS)
    return PipelineModel(
        stages=stages,
        sites=("a",) + ("b",) * (count - 1),
        pipelines=1,
        micro_batches=micro_batches,
        message_bytes=draw(st.integers(1, 30)) * 1_000_000,
        wires={("a", "b"): wire, ("b", "a"): wire},
        activations=draw(st.integers(1, micro_batches)),
    )


@settings(max_examples=30, deadline=None)
@given(small())
def test_no_schedule_at_all_beats_the_bound(model: PipelineModel) -> None:
    best_ns = shortest_ns(model)
    own = bounds(model, model.activations)
    assert max(own.compute_ns, own.wan_ns, own.queue_ns) <= best_ns
    assert bounds(model).bound_ns <= own.bound_ns


@pytest.mark.parametrize(("room", "micro_batches"), [(1, 3), (2, 3), (3, 3)])
def test_with_little_memory_the_bound_is_reached(room: int, micro_batches: int) -> None:
    """Two stages and a long way: the best of all schedules takes what the bound says, head and tail of the step too."""
    stages = tuple(Stage(index, index == 0, index == 1, 10 * MS, 10 * MS, 10 * MS) for index in range(2))
    wire = Wire(constant(RATE_BYTES_PER_S), 50 * MS)
    model = PipelineModel(
        stages, ("a", "b"), 1, micro_batches, 5_000_000, {("a", "b"): wire, ("b", "a"): wire}, activations=room
    )
    assert shortest_ns(model) <= 1.03 * bounds(model, room).bound_ns
