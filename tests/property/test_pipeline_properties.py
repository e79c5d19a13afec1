"""Random pipelines: no deadlock, no run beats its bound, memory is kept, the same seed gives the same step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.core.traces import RateTrace, constant
from proxyd.sim.pipeline.bounds import bounds
from proxyd.sim.pipeline.engine import Engine, PipelineStalledError, Plant, _Runner
from proxyd.sim.pipeline.model import PipelineModel, Wire
from proxyd.sim.pipeline.systems import run_system
from proxyd.sim.pipeline.wan import FairWan, SerialWan
from proxyd_client.schedule import Kind, Online, Stage, Task

MS = 1_000_000
SYSTEMS = ("1f1b", "zb_h1", "zb_h2", "crosspipe", "pipemorph", "online_fair", "online", "offload_fair", "proxyd")


@st.composite
def rates(draw: st.DrawFn) -> RateTrace:
    """Constant, or pieces of 10 to 200 ms with outages among them."""
    if draw(st.booleans()):
        return constant(draw(st.integers(1_000_000, 50_000_000)))
    pieces = draw(st.lists(st.tuples(st.integers(10, 200), st.integers(0, 20_000_000)), min_size=1, max_size=6))
    starts, at_ms = [], 0
    for length_ms, _ in pieces:
        starts.append(at_ms * MS)
        at_ms += length_ms
    # Repeating, so that no outage is for ever.
    return RateTrace([*starts, at_ms * MS], [*(rate for _, rate in pieces), 5_000_000], (at_ms + 100) * MS)


@st.composite
def models(draw: st.DrawFn) -> PipelineModel:
    """2 to 5 stages at up to 3 sites, of any speeds, with any limits."""
    count = draw(st.integers(2, 5))
    parts = draw(st.sampled_from([1, 1, 3]))
    stages = []
    for index in range(count):
        took = [draw(st.integers(1, 40)) * MS for _ in range(3)]
        stages.append(Stage(index, index == 0, index == count - 1, *took, activation_bytes=100, weight_parts=parts))
    borders = sorted(draw(st.lists(st.integers(0, count), min_size=2, max_size=2)))
    sites = tuple("abc"[sum(index >= border for border in borders)] for index in range(count))
    pairs = [(a, b) for a in "abc" for b in "abc" if a != b]
    return PipelineModel(
        stages=tuple(stages),
        sites=sites,
        pipelines=draw(st.integers(1, 3)),
        micro_batches=draw(st.integers(1, 10)),
        message_bytes=draw(st.sampled_from([1, 100_000, 1_000_000])),
        wires={pair: Wire(draw(rates()), draw(st.integers(0, 60)) * MS) for pair in pairs},
        activations=draw(st.integers(1, 6)),
        offload=draw(st.integers(0, 6)),
        bus_bytes_per_s=draw(st.sampled_from([1000, 10_000, 1_000_000])),
        loss_penalty=draw(st.sampled_from([0.0, 0.15, 1.0])),
        local_ns=draw(st.sampled_from([0, MS])),
        jitter=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 100)),
    )


@settings(max_examples=40, deadline=None)
@given(models(), st.sampled_from(SYSTEMS))
def test_every_step_ends_within_its_memory_and_not_before_its_bound(model: PipelineModel, name: str) -> None:
    one = run_system(name, model)
    assert one.result.iteration_ns >= one.bound_ns
    assert one.bound_ns >= bounds(model).bound_ns
    micro_batches = model.pipelines * len(model.stages) * model.micro_batches
    assert len(one.result.spans) in (3 * micro_batches, (2 + model.stages[0].weight_parts) * micro_batches)
    if name not in ("1f1b", "zb_h1", "zb_h2"):
        assert max(one.result.peak_bytes) <= 100 * model.activations
        assert max(one.result.host_peak_bytes) <= 100 * model.offload
    again = run_system(name, model).result
    assert again.spans == one.result.spans


class _Liars(Engine):
    """Every stage says of every task, to its neighbour and across the WAN, something that is not so, or nothing."""

    lies: list[tuple[int, int] | None]

    def announce(self, runner: _Runner, task: Task, ready_ns: int) -> None:
        to = self._target(task)
        lie = self.lies[(task.micro_batch + 3 * task.stage + runner.pipeline) % len(self.lies)]
        if to is not None and lie is not None:
            target = self.runners[runner.pipeline][self._host[to]]
            kind = Kind.F if task.kind == Kind.F else Kind.B
            target.foretold(kind, to, task.micro_batch, self.clock.now_ns + lie[0], lie[1])


def lies() -> st.SearchStrategy[list[tuple[int, int] | None]]:
    """Predictions: long past, at this very instant, a moment too early, far away, absurd, unsure or sure, none."""
    eta_ns = st.one_of(st.sampled_from([0, 1, MS, -(1 << 62), 1 << 62]), st.integers(-1000 * MS, 10_000 * MS))
    uncertainty_ns = st.one_of(st.sampled_from([0, 1 << 62]), st.integers(-10, 1000 * MS))
    return st.lists(st.one_of(st.none(), st.tuples(eta_ns, uncertainty_ns)), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(models(), lies(), st.dictionaries(st.integers(0, 4), st.integers(1, 4)), st.integers(0, 3), st.integers(1, 2))
def test_wrong_predictions_and_quotas_cost_time_but_never_the_step(
    model: PipelineModel, told: list[tuple[int, int] | None], quotas: dict[int, int], outside: int, each: int
) -> None:
    """With no place outside, or with one, two or three; with one stage on a worker, or with several."""
    count = len(model.stages)
    places = count if each == 1 else 2
    row = tuple(tuple(range(place, count, places)) for place in range(places))
    memory = tuple(100 * max(model.activations, len(stages)) for stages in row)
    host_bytes = 100 * outside if each == 1 else 0
    plant = Plant(row, lambda place, worker: Online(quotas if each == 1 else None), memory, host_bytes=host_bytes)
    engine = _Liars(model, plant, SerialWan(model))
    engine.lies = told
    result = engine.run()
    ran = [(span.pipeline, span.task) for span in result.spans]
    tasks = sum(2 + stage.weight_parts for stage in model.stages) * model.micro_batches * model.pipelines
    assert len(ran) == len(set(ran)) == tasks, "every task, and none of them twice"
    assert all(peak <= limit for peak, limit in zip(result.peak_bytes, memory, strict=True))
    assert max(result.host_peak_bytes) <= host_bytes
    assert all(not (r.worker.held_bytes or r.worker.out_bytes) for each in engine.runners for r in each)
    if each == 1:
        assert result.iteration_ns >= bounds(model, model.activations + outside).bound_ns


@settings(max_examples=15, deadline=None)
@given(models(), lies(), st.data())
def test_a_worker_that_dies_ends_the_step_with_an_error_that_names_it(
    model: PipelineModel, told: list[tuple[int, int] | None], data: st.DataObject
) -> None:
    """At any time, whatever is predicted."""
    memory = tuple(100 * model.activations for _ in model.stages)
    row = tuple((stage.index,) for stage in model.stages)
    plant = Plant(row, lambda place, worker: Online(), memory, host_bytes=100 * model.offload)
    pipeline = data.draw(st.integers(0, model.pipelines - 1))
    place = data.draw(st.integers(0, len(model.stages) - 1))
    engine = _Liars(model, plant, SerialWan(model))
    engine.lies = told
    engine.clock.at(data.draw(st.integers(0, 300)) * MS, engine.kill, pipeline, place)
    try:
        engine.run()
    except PipelineStalledError as error:
        assert f"worker {place} of pipeline {pipeline} is dead" in str(error)
    else:
        assert engine.runners[pipeline][place].worker.done, "it had died after its last task"


@settings(max_examples=20, deadline=None)
@given(models())
def test_several_stages_on_one_worker_never_block_each_other(model: PipelineModel) -> None:
    count = len(model.stages)
    row = tuple(tuple(range(place, count, 2)) for place in range(2))
    memory = tuple(100 * max(model.activations, len(each)) for each in row)
    result = Engine(model, Plant(row, lambda place, worker: Online(), memory), FairWan(model)).run()
    assert all(peak <= limit for peak, limit in zip(result.peak_bytes, memory, strict=True))
