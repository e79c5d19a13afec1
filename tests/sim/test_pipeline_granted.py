"""Pipelines over proxyd's own machines: coordinator, agents and TCP, with nobody telling them the rate."""

from __future__ import annotations

from proxyd.core.traces import RateTrace, constant
from proxyd.sim.pipeline.granted import GrantedWan, delayed, warm_up_ns
from proxyd.sim.pipeline.model import preset_model
from proxyd.sim.pipeline.systems import run_system

SECOND_NS = 1_000_000_000


def test_granted_slots_cost_little_over_one_message_at_a_time() -> None:
    """A trace may begin with a fall, and a short step has no time to make up for that: over six seeds it took 1.00 to
    1.49 times ideal slots. This holds the worst of them; docs/scheduling.md has whole steps."""
    model = preset_model("L1", seed=1, micro_batches=16)
    ideal = run_system("proxyd", model)
    granted = run_system("proxyd_core", model)
    assert granted.result.iteration_ns >= granted.bound_ns
    assert granted.result.iteration_ns <= 1.6 * ideal.result.iteration_ns
    assert granted.result.use.keys() == {("a", "b"), ("b", "a")}


def test_a_wire_of_360_ms_whose_rate_stays_costs_hardly_more_than_an_ideal_one() -> None:
    """Packet headers are 0.6 % of it. Without windows that agents reopen it was 1.08."""
    model = preset_model("L2", trace="constant", seed=1, micro_batches=16)
    ideal = run_system("proxyd", model)
    granted = run_system("proxyd_core", model)
    assert granted.result.iteration_ns <= 1.05 * ideal.result.iteration_ns


def test_before_the_step_wires_are_busy_for_40_round_trips() -> None:
    assert warm_up_ns(preset_model("L2")) == 40 * 360_000_000
    assert warm_up_ns(preset_model("L3")) == 4 * SECOND_NS


def test_the_trace_begins_with_the_step() -> None:
    trace = RateTrace((0, SECOND_NS), (10_000, 30_000), 2 * SECOND_NS)
    later = delayed(trace, 5 * SECOND_NS)
    assert later.rate_at(SECOND_NS) == 20_000
    for at_ns in (0, SECOND_NS, 3 * SECOND_NS // 2):
        assert later.rate_at(5 * SECOND_NS + at_ns) == trace.rate_at(at_ns)
    assert delayed(constant(7_000), SECOND_NS).constant


def test_messages_arrive_in_the_order_of_their_sends() -> None:
    wan = GrantedWan(preset_model("L3", seed=1, micro_batches=8))
    wan.start()
    begun_ns = wan.clock.now_ns
    seen: list[int] = []
    for number in range(6):
        wan.send(0, ("a", "b"), lambda number=number: seen.append(number))  # type: ignore[misc]
    wan.clock.run(begun_ns + 10 * SECOND_NS, done=lambda: len(seen) == 6)
    assert seen == list(range(6))
