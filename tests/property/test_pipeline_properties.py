"""Random pipelines: no deadlock, no run beats its bound, memory is kept, the same seed gives the same step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.core.traces import RateTrace, constant
from proxyd.sim.pipeline.bounds import bounds
from proxyd.sim.pipeline.engine import Engine, Plant
from proxyd.sim.pipeline.model import PipelineModel, Wire
from proxyd.sim.pipeline.systems import run_system
from proxyd.sim.pipeline.wan import Direction, FairWan, Prediction, SerialWan
from proxyd_client.schedule import Online, Stage

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


class _Liar(SerialWan):
    """Predictions that are anything but true."""

    lies: list[tuple[int, int]]

    def predict(self, pipeline: int, direction: Direction, ready_ns: int) -> Prediction | None:
        eta_ns, uncertainty_ns = self.lies[(ready_ns // MS + pipeline) % len(self.lies)]
        return Prediction(self.clock.now_ns + eta_ns, uncertainty_ns) if eta_ns else None


@settings(max_examples=25, deadline=None)
@given(
    models(),
    st.lists(st.tuples(st.integers(-1000 * MS, 10_000 * MS), st.integers(-10, 1000 * MS)), min_size=1, max_size=8),
    st.dictionaries(st.integers(0, 4), st.integers(1, 4)),
)
def test_wrong_predictions_and_quotas_cost_time_but_never_the_step(
    model: PipelineModel, lies: list[tuple[int, int]], quotas: dict[int, int]
) -> None:
    wan = _Liar(model)
    wan.lies = lies
    memory = tuple(100 * model.activations for _ in model.stages)
    row = tuple((stage.index,) for stage in model.stages)
    plant = Plant(row, lambda place, worker: Online(quotas), memory, host_bytes=100 * model.offload)
    result = Engine(model, plant, wan).run()
    assert max(result.peak_bytes) <= 100 * model.activations
    assert result.iteration_ns >= bounds(model, model.activations + model.offload).bound_ns


@settings(max_examples=20, deadline=None)
@given(models())
def test_several_stages_on_one_worker_never_block_each_other(model: PipelineModel) -> None:
    count = len(model.stages)
    row = tuple(tuple(range(place, count, 2)) for place in range(2))
    memory = tuple(100 * max(model.activations, len(each)) for each in row)
    result = Engine(model, Plant(row, lambda place, worker: Online(), memory), FairWan(model)).run()
    assert all(peak <= limit for peak, limit in zip(result.peak_bytes, memory, strict=True))
