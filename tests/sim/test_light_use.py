"""Field case 5 on the simulator's clock: ten minutes of light use leave the estimate where a saturated link put it."""

from __future__ import annotations

import dataclasses

import pytest

from proxyd.core.ids import EndpointName
from proxyd.core.traces import constant, steps
from proxyd.sim.experiment import JOB, LinkExperiment, LinkRun
from proxyd.sim.workloads import Backlog, Pair, Rounds
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000
NANOS = 1_000_000_000
RATE = 25_000_000
"""200 Mbit/s."""
SATURATED_NS, LIGHT_NS, AGAIN_NS = 8 * NANOS, 600 * NANOS, 10 * NANOS
LIGHT_FROM_NS, LIGHT_TO_NS = SATURATED_NS, SATURATED_NS + LIGHT_NS
EXPERIMENT = LinkExperiment(
    trace=constant(RATE),
    rtt_ns=100 * MS,
    buffer_bytes=RATE // 10,
    senders=1,
    duration_ns=SATURATED_NS + LIGHT_NS + AGAIN_NS,
    nominal_bytes_per_s=RATE,
    message_bytes=4 << 20,
)


class LightUse(LinkRun):
    """A backlog, then 1 MB/s in messages of a quarter of a megabyte for ``light_ns``, then a backlog again."""

    def __init__(self, experiment: LinkExperiment, light_ns: int) -> None:
        self.light_ns = light_ns
        super().__init__(experiment)

    def _start(self) -> None:
        world, traffic, pairs = self.world, TrafficClass.PIPELINE, [Pair(EndpointName(JOB, 0), EndpointName(JOB, 1))]
        light_from_ns = self.experiment.start_ns + SATURATED_NS
        light_to_ns = light_from_ns + self.light_ns
        before = Backlog(world, pairs, 4 << 20, traffic, depth=4, until_ns=light_from_ns)
        light = Rounds(world, pairs, 250_000, traffic, gap_ns=180 * MS, until_ns=light_to_ns)
        after = Backlog(world, pairs, 4 << 20, traffic, depth=4, until_ns=light_to_ns + 60 * NANOS)
        before.start()
        world.clock.at(light_from_ns + NANOS, light.start)
        world.clock.at(light_to_ns, after.start)
        self._sample()


def test_ten_minutes_of_light_use_leave_the_estimate_alone() -> None:
    run = LightUse(EXPERIMENT, LIGHT_NS)
    result = run.result()
    estimates = {sample.time_ns: sample.estimate_bytes_per_s for sample in result.series}
    saturated = estimates[SATURATED_NS]
    true = result.series[0].rate_bytes_per_s
    assert saturated == pytest.approx(true, rel=0.1)
    light = [value for time_ns, value in estimates.items() if LIGHT_FROM_NS <= time_ns <= LIGHT_TO_NS]
    assert len(light) > 50_000, "a sample each 10 ms"
    assert min(light) >= 0.8 * saturated
    assert max(light) <= 1.2 * saturated
    delivered = sum(1 for fate in run.world.fates.values() if fate.landed_ns)
    assert delivered > 2000, "it was used all the time"
    # And a backlog fills the link at once: nine tenths of it from the tenth round trip on.
    carried = [one for one in run._counts if one.time_ns >= EXPERIMENT.start_ns + LIGHT_TO_NS + NANOS]
    assert carried[-1].utilisation_since(carried[0]) >= 0.9


def test_a_cut_during_light_use_is_seen_within_ten_seconds_of_load() -> None:
    quarter = steps(RATE, [(LIGHT_FROM_NS + 2 * NANOS, 0.25)])
    light_ns = 8 * NANOS
    experiment = dataclasses.replace(EXPERIMENT, trace=quarter, duration_ns=SATURATED_NS + light_ns + 10 * NANOS)

    result = LightUse(experiment, light_ns).result()
    last = result.series[-1]
    assert last.estimate_bytes_per_s <= 1.1 * last.rate_bytes_per_s
    assert last.estimate_bytes_per_s >= 0.7 * last.rate_bytes_per_s
