"""Agents far from their coordinator: what they announce is granted before its data exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxyd.core import events as ev
from proxyd.core.ids import EndpointName
from proxyd.sim.scenario import JOB, Run, load_scenario
from proxyd.wire.envelope import Envelope, TrafficClass

MS = 1_000_000
LEAD_NS = 300 * MS
CONTROL_RTT_NS = 60 * MS
SIZE = 1 << 20
TIMES = 6
SCENARIO = """
description = "one sender, its coordinator as far away as the receiver"
duration = "60s"

[[link]]
from = "hami"
to = "shenzhen"
capacity = "100Mbit"
rtt = "60ms"
buffer = "75kB"

[[link]]
from = "shenzhen"
to = "hami"
capacity = "100Mbit"
rtt = "60ms"
buffer = "75kB"

[control]
delay = "30ms"
jitter = "1ms"

[[agents]]
site = "hami"
count = 1
first_rank = 0

[[agents]]
site = "shenzhen"
count = 1
first_rank = 1

[[burst]]
at = "2s"
from = [0, 0]
to = [1, 1]
size = "1MiB"
traffic = "pipeline"
times = 6
gap = "500ms"
"""


class Announcing(Run):
    """Announces each message of the one burst ``LEAD_NS`` before it is posted, or so it says."""

    says = True
    late_ns = 0

    def _plan(self, burst, at_ns, times):  # type: ignore[no-untyped-def]
        world = self.world
        trainer = world.trainers[EndpointName(JOB, 0)]

        def say() -> None:
            envelope = Envelope(JOB, 0, 1, "", 0, TrafficClass.PIPELINE, SIZE, "uint8", (SIZE,))
            trainer._emit(ev.SendAnnounced(envelope, LEAD_NS))

        if self.says:
            world.clock.at(max(world.clock.now_ns, at_ns - LEAD_NS - self.late_ns), say)
        super()._plan(burst, at_ns, times)


def times_of(tmp_path: Path, *, says: bool, late_ns: int = 0, seed: int = 1) -> list[int]:
    """FCT of each message, in order; the run's checks hold."""
    path = tmp_path / "far.toml"
    path.write_text(SCENARIO)
    run = Announcing(load_scenario(path), seed)
    run.says, run.late_ns = says, late_ns
    result = run.result()
    assert not result.problems
    assert result.delivered == TIMES
    fates = sorted(run.world.fates.values(), key=lambda fate: fate.posted_ns)
    return [fate.fct_ns for fate in fates]


def test_the_ask_is_hidden_behind_the_computation(tmp_path: Path) -> None:
    plain = times_of(tmp_path, says=False)
    announced = times_of(tmp_path, says=True)
    saved = [before - after for before, after in zip(plain, announced, strict=True)]
    assert all(abs(one - CONTROL_RTT_NS) < 10 * MS for one in saved[1:]), [one / MS for one in saved]


@pytest.mark.parametrize("late_ms", [30, 150])
def test_data_that_comes_later_than_announced_loses_no_more_than_the_slot(tmp_path: Path, late_ms: int) -> None:
    plain = times_of(tmp_path, says=False)
    announced = times_of(tmp_path, says=True, late_ns=late_ms * MS)
    for before, after in zip(plain[1:], announced[1:], strict=True):
        assert after < before + 40 * MS
