"""Random pipelines: no deadlock, no run beats its bound, memory is kept, the same seed gives the same step."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.core.traces import RateTrace, constant
from proxyd.sim.pipeline.bounds import bounds
from proxyd.sim.pipeline.engine import Engine, PipelineStalledError, Plant, _Runner
from proxyd.sim.pipeline.model import PipelineModel, Wire
from proxyd.sim.pipeline.systems import run_system
from proxyd.sim.pipeline.wan import FairWan, SerialWan
from proxyd_client.schedule import Kind, Move, Offload, Online, Place, Stage, Task, Tier, Worker

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


def slower() -> st.SearchStrategy[tuple[int, int, int] | None]:
    """A slower tier: bytes, and time there and back."""
    way_ns = st.integers(0, 300 * MS)
    return st.one_of(st.none(), st.tuples(st.integers(0, 400), way_ns, way_ns))


class _Counted(Offload):
    """Whenever it is asked, every byte of an activation is in one place, and every move can be made."""

    def out(self, worker: Worker, now_ns: int) -> Move | None:
        progress = next(iter(worker.stages.values()))
        nbytes, places = progress.stage.activation_bytes, progress.places
        outside = [number for number, place in places.items() if place == Place.OUT]
        assert worker.held_bytes == nbytes * (len(places) - len(outside))
        assert worker.out_bytes == nbytes * len(outside)
        assert worker.far_bytes == nbytes * len(progress.far.intersection(outside))
        assert not worker.out_bytes or worker.far_bytes <= worker.out_bytes
        return super().out(worker, now_ns)

    def out_far(self, worker: Worker, now_ns: int) -> Move | None:
        move = super().out_far(worker, now_ns)
        if move is not None and "needs a place" not in move.reason:
            assert self.ssd is not None
            progress = worker.stages[move.stage]
            room_bytes = self.host_bytes - worker.out_bytes + worker.far_bytes
            assert room_bytes < 2 * progress.stage.activation_bytes, "host memory comes first"
            needed_ns = self.needed_ns(progress, move.micro_batch, now_ns)
            assert needed_ns >= now_ns + self.ssd.out_ns + self.ssd.back_ns, (
                "back before its B, as far as it is foretold"
            )
        return move


@settings(max_examples=30, deadline=None)
@given(
    models(),
    lies(),
    st.dictionaries(st.integers(0, 4), st.integers(1, 4)),
    st.integers(0, 3),
    slower(),
    st.integers(1, 2),
)
def test_wrong_predictions_and_quotas_cost_time_but_never_the_step(
    model: PipelineModel,
    told: list[tuple[int, int] | None],
    quotas: dict[int, int],
    outside: int,
    ssd: tuple[int, int, int] | None,
    each: int,
) -> None:
    """With no place outside, or up to three, and four on a slower tier; with one stage on a worker, or several."""
    count = len(model.stages)
    places = count if each == 1 else 2
    row = tuple(tuple(range(place, count, places)) for place in range(places))
    memory = tuple(100 * max(model.activations, len(stages)) for stages in row)
    host_bytes = 100 * outside if each == 1 else 0
    tier = Tier(*ssd) if ssd and host_bytes else None
    policy = Online(quotas if each == 1 else None)
    plant = Plant(row, lambda place, worker: policy, memory, host_bytes=host_bytes, ssd=tier)
    engine = _Liars(model, plant, SerialWan(model))
    for runner in itertools.chain(*engine.runners):
        if runner.offload is not None:
            runner.offload = _Counted(host_bytes, runner.offload.transfer_ns, tier)
    engine.lies = told
    result = engine.run()
    ran = [(span.pipeline, span.task) for span in result.spans]
    tasks = sum(2 + stage.weight_parts for stage in model.stages) * model.micro_batches * model.pipelines
    assert len(ran) == len(set(ran)) == tasks, "every task, and none of them twice"
    assert all(peak <= limit for peak, limit in zip(result.peak_bytes, memory, strict=True))
    far_bytes = tier.nbytes if tier else 0
    assert max(result.host_peak_bytes) <= host_bytes
    assert max(result.ssd_peak_bytes) <= far_bytes
    for runner in itertools.chain(*engine.runners):
        assert (runner.worker.held_bytes, runner.worker.out_bytes, runner.worker.far_bytes) == (0, 0, 0)
    if each == 1:
        assert result.iteration_ns >= bounds(model, model.activations + outside + far_bytes // 100).bound_ns


@settings(max_examples=15, deadline=None)
@given(models(), lies(), st.data())
def test_a_worker_that_dies_ends_the_step_with_an_error_that_names_it(
    model: PipelineModel, told: list[tuple[int, int] | None], data: st.DataObject
) -> None:
    """At any time, whatever is predicted; and nobody asks or moves for ever while nothing happens."""
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
    looks = sum(2 + stage.weight_parts for stage in model.stages) * model.micro_batches * model.pipelines
    assert engine.decisions <= 20 * looks
    assert sum(runner.moves for row in engine.runners for runner in row) <= 20 * looks


@settings(max_examples=20, deadline=None)
@given(models())
def test_several_stages_on_one_worker_never_block_each_other(model: PipelineModel) -> None:
    count = len(model.stages)
    row = tuple(tuple(range(place, count, 2)) for place in range(2))
    memory = tuple(100 * max(model.activations, len(each)) for each in row)
    result = Engine(model, Plant(row, lambda place, worker: Online(), memory), FairWan(model)).run()
    assert all(peak <= limit for peak, limit in zip(result.peak_bytes, memory, strict=True))
