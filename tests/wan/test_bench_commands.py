"""``proxyd bench link`` and ``bench ways`` end to end, small: what they write is there and can be true."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from proxyd.cli.main import main
from proxyd.wan import available

REASON = available()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None and os.environ.get("CI") != "true", reason=f"no emulated WAN: {REASON}"),
    pytest.mark.timeout(120),
]
LINK = "--rate 100Mbit --rtt 20ms --senders 2"


def test_bench_link_beside_plain_tcp(tmp_path: Path) -> None:
    out, plot = tmp_path / "link.json", tmp_path / "link.png"
    options = f"{LINK} --seconds 3 --step halve --modes proxyd,cubic --series --out {out} --plot {plot}"
    assert main(["bench", "link", *options.split()]) == 0
    report = json.loads(out.read_text())
    ours, cubic = report["runs"]
    assert (ours["mode"], cubic["mode"]) == ("proxyd", "cubic")
    for run in (ours, cubic):
        assert 0 < run["utilisation"] <= 1.001
        assert 0 <= run["queue_p50_bdp"] <= run["queue_p99_bdp"] <= 1.001
        assert 0 <= run["loss"] < 0.5
        capacity = [value for at, value in run["series"]["capacity"]]
        assert capacity[0] == pytest.approx(100, rel=0.02)
        assert capacity[-1] == pytest.approx(50, rel=0.02)
    # Plain TCP fills a deep buffer and is in nobody's way but its own.
    assert cubic["utilisation"] > 0.9
    assert ours["counters"]["fallback_bytes"] == ours["counters"]["window_violations"] == 0
    assert ours["counters"]["granted_bytes"] >= ours["counters"]["payload_bytes"] > 0
    assert "estimated" in ours["estimate_sources"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_ways_with_a_far_coordinator_and_urgent_messages(tmp_path: Path) -> None:
    out = tmp_path / "ways.json"
    options = f"{LINK} --seconds 1 --parts far,urgent --urgent 1KiB --control-rtt 60ms --hint --out {out}"
    assert main(["bench", "ways", *options.split()]) == 0
    report = json.loads(out.read_text())
    assert 0 < report["far"]["used_far"] <= 1.001
    assert 0 < report["far"]["used_beside"] <= 1.001
    small = report["urgent"]["1024"]
    assert small["messages"] > 0
    # It crossed the link: one way at least.
    assert small["p50_seconds"] >= 0.01


def test_bench_predict(tmp_path: Path) -> None:
    out = tmp_path / "predict.json"
    options = f"--rate 40Mbit --rtt 20ms --buffer 1bdp --cases 1x256KiB --messages 5 --out {out}"
    assert main(["bench", "predict", *options.split()]) == 0
    [case] = json.loads(out.read_text())["cases"]
    assert case["took_p50_s"] >= 0.05
    for moment in ("announce", "grant", "half-way"):
        figures = case["moments"][moment]
        assert figures["predicted"] == 5, moment
        assert figures["relative_p50"] < 1, "it is no guess: 0.1 on a quiet machine"
