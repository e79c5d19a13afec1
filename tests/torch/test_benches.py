"""The examples and the PyTorch benchmarks end to end, small: what they print is there and can be true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxyd.cli.main import main

pytestmark = [pytest.mark.needs_torch, pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(180)]


def test_the_pipeline_example_learns_the_same_through_proxyd(tmp_path: Path) -> None:
    out = tmp_path / "example.json"
    place = ["--ranks", "1", "--steps", "3", "--ways", "gloo bbr,proxyd", "--out", str(out)]
    model = ["--layers", "2", "--width", "32", "--microbatches", "4", "--sequences", "4"]
    assert main(["example", "pipeline", *place, "--", *model]) == 0
    report = json.loads(out.read_text())
    gloo, ours = report["ways"]["gloo bbr"], report["ways"]["proxyd"]
    assert ours["losses"] == gloo["losses"], "bit by bit"
    assert ours["losses"][-1] < ours["losses"][0]
    # Activations there, gradients back: 3 steps of 4 micro-batches.
    crossed = 2 * 3 * 4 * (4 * 128 * 32 * 4)
    for way in (gloo, ours):
        assert way["wan_bytes"] > crossed
        assert way["tokens_per_s"] > 0


def test_the_pipeline_benchmark_compares_ways(tmp_path: Path) -> None:
    out = tmp_path / "pipeline.json"
    size = ["--ratios", "0.5", "--iterations", "2", "--microbatches", "4", "--forward", "4ms"]
    place = ["--rate", "100Mbit", "--rtt", "20ms", "--ways", "gloo cubic,proxyd"]
    assert main(["bench", "torch-pipeline", *size, *place, "--out", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["communication_seconds"] == pytest.approx(0.5 * 4 * 0.012, rel=0.05)
    assert run["compute_seconds"] >= 4 * 0.012
    for way in run["ways"].values():
        assert len(way["iteration_seconds"]) == 2
        assert min(way["iteration_seconds"]) >= run["compute_seconds"] * 0.5
        # Two pipelines, there and back.
        assert way["wan_bytes_per_iteration"] > 2 * 2 * 4 * run["activation_bytes"]
        for kind in ("activation", "gradient"):
            assert way[f"{kind}_fct_seconds"]["p99"] >= way[f"{kind}_fct_seconds"]["p50"] >= 0.01


def test_the_local_benchmark_compares_ways(tmp_path: Path) -> None:
    out = tmp_path / "local.json"
    assert main(["bench", "torch-local", "--rounds", "1", "--messages", "2", "--pings", "20", "--out", str(out)]) == 0
    for way in json.loads(out.read_text())["ways"].values():
        assert way["gb_per_s"] > 0
        assert way["cpu_s_per_gb"] > 0
        assert way["ping_p99_us"] >= way["ping_p50_us"] > 0
