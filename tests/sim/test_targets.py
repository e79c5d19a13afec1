"""The table of bounds: what it runs, what counts as met, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxyd.cli.main import main
from proxyd.core.errors import EXIT_FAILED, EXIT_OK
from proxyd.sim.link import NANOS
from proxyd.sim.targets import Target, TargetLink, run_targets

QUICK = TargetLink(rate_bytes_per_s=2_500_000, rtt_ns=20_000_000, senders=2, duration_ns=2 * NANOS)


def test_a_bound_is_met_on_its_side() -> None:
    def met(value: float | None, at_least: bool) -> bool:
        return Target("calm", 1.0, 1, "utilisation", value, 0.9, at_least).met

    assert (met(0.9, True), met(0.8, True), met(0.9, False), met(1.0, False)) == (True, False, True, False)
    assert not met(None, True)
    assert not met(None, False)


def test_each_trace_has_its_buffers_and_its_bounds() -> None:
    found = [target for run in run_targets(QUICK, range(3, 4), ("moderate", "halves")) for target in run]
    assert {(one.trace, one.buffer_bdp, one.figure, one.bound) for one in found} == {
        ("moderate", 1.0, "utilisation", 0.95),
        ("moderate", 1.0, "queue_p99_bdp", 0.25),
        ("moderate", 1.0, "loss", 0.001),
        ("moderate", 0.1, "utilisation", 0.95),
        ("moderate", 0.1, "loss", 0.004),
        *(("halves", buffer, "queue_under_tenth_bdp_after_rtts", 5) for buffer in (1.0, 0.5, 0.1)),
        *(("halves", buffer, "loss_of_5_rtts", bound) for buffer, bound in ((1.0, 0.01), (0.5, 0.01), (0.1, 0.18))),
    }
    assert {one.seed for one in found} == {3}


def test_a_step_changes_the_rate_in_the_middle() -> None:
    for trace, factor in (("halves", 0.5), ("doubles", 2.0)):
        experiment = QUICK.experiment(trace, 0.5, 1)
        assert experiment.step_ns == NANOS
        assert experiment.buffer_bytes == 25_000
        assert experiment.rate_bytes_per_s == 2_500_000
        assert experiment.trace.rate_at(NANOS) == 2_500_000 * factor


def test_the_command_prints_the_table_and_fails_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "targets.json"
    options = ["--rate", "20Mbit", "--rtt", "20ms", "--senders", "2", "--seconds", "2", "--trace", "doubles"]
    code = main(["simulate", "targets", *options, "--out", str(out)])
    table = json.loads(out.read_text())
    assert [row["buffer_bdp"] for row in table] == [1.0, 0.5, 0.1]
    assert code == (EXIT_OK if all(row["met"] for row in table) else EXIT_FAILED)
    assert f"{sum(row['met'] for row in table)} of 3 bounds hold" in capsys.readouterr().out
