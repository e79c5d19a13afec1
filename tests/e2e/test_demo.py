"""The demo, small: every mode over both kinds of network, the proof by counters, and what a Ctrl-C leaves behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import proxyd.cli.demo.session as session
from proxyd.cli.demo.counters import Counters
from proxyd.cli.demo.scenario import WARMUP_BURSTS, Mode, Scenario
from proxyd.cli.demo.traffic import DemoError, ProxydTraffic
from proxyd.wan.topology import module_environment

SMALL = replace(
    Scenario(),
    name="small",
    senders=3,
    tensor_bytes=1 << 20,
    rate_bytes_per_s=25_000_000,
    rtt_ns=20_000_000,
    buffer_bytes=100_000,
    gap_ns=100_000_000,
)
BURSTS = 3
MODES = [Mode("plain-bbr", "bbr", BURSTS), Mode("proxyd", None, BURSTS)]


def check(results: list[session.RunResult], scenario: Scenario) -> None:
    """What holds whatever the machine does besides."""
    directions = 2 if scenario.both_directions else 1
    for result in results:
        assert len(result.fct_seconds) == BURSTS * scenario.senders * directions
        assert min(result.fct_seconds) > scenario.rtt_ns / 2e9
        assert max(result.cct_seconds) >= scenario.ideal_cct_seconds * 0.97
    proxyd = results[-1]
    counters = proxyd.counters
    assert counters is not None
    payload = (WARMUP_BURSTS + BURSTS) * scenario.senders * scenario.tensor_bytes
    assert counters["payload_bytes"] == payload
    assert counters["transfer_bytes"] == counters["received_bytes"] == payload
    assert counters["granted_bytes"] >= payload
    assert counters["fallback_bytes"] == counters["window_violations"] == counters["corrupt_chunks"] == 0


def run(scenario: Scenario, kind: str) -> list[session.RunResult]:
    with session.Watcher(Console(file=io.StringIO()), 10) as watcher:
        return session.run_scenario(scenario, MODES, watcher, kind)


@pytest.mark.netns
@pytest.mark.slow
def test_bursts_cross_the_emulated_wan_under_grants() -> None:
    results = run(SMALL, "netns")
    check(results, SMALL)
    for result in results:
        trace = result.trace
        assert len(trace.queue_bytes) > 0, "the bottleneck's queue was seen"
        assert trace.activity is not None
        assert [sum(series) >= SMALL.tensor_bytes for series in trace.activity.sent_bytes] == [True] * SMALL.senders


@pytest.mark.netns
@pytest.mark.slow
def test_both_directions_at_once() -> None:
    both = replace(SMALL, both_directions=True)
    check(run(both, "netns"), both)


@pytest.mark.slow
def test_without_namespaces_it_runs_on_loopback() -> None:
    check(run(SMALL, "loopback"), SMALL)


@pytest.mark.slow
def test_without_proof_the_demo_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ProxydTraffic._counters

    def some_by_fallback(self: ProxydTraffic) -> Counters:
        seen = real(self)
        return replace(seen, fallback_bytes=seen.transfer_bytes // 2)

    monkeypatch.setattr(ProxydTraffic, "_counters", some_by_fallback)
    with pytest.raises(DemoError, match="don't prove"):
        run(SMALL, "loopback")


def marked(mark: str) -> list[int]:
    """Processes with this variable in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in environment:
                found.append(int(entry.name))
    return found


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_it_and_everything_it_started(tmp_path: Path, number: signal.Signals) -> None:
    mark = f"DEMO_TEST_MARK={os.getpid()}-{number}"
    name, _, value = mark.partition("=")
    out = tmp_path / "demo.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "proxyd.cli.main", "demo", "--quick", "--out", str(out)],
        env={**module_environment(), name: value},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Its Ctrl-C must reach it alone, as a terminal's would reach its group.
        start_new_session=True,
    )
    try:
        deadline_s = time.monotonic() + 30
        # Namespaces, emulator, one receiver and eight senders.
        while len(marked(mark)) < 12:
            assert process.poll() is None
            assert time.monotonic() < deadline_s, "it did not get going"
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not out.exists()
    deadline_s = time.monotonic() + 10
    while left := marked(mark):
        assert time.monotonic() < deadline_s, f"left behind: {left}"
        time.sleep(0.1)


@pytest.mark.netns
@pytest.mark.slow
def test_the_command_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from proxyd.cli.main import main

    monkeypatch.setattr(session, "Scenario", lambda configured: replace(SMALL, configured=configured))
    monkeypatch.setattr(session, "QUICK_BURSTS", BURSTS)
    out = tmp_path / "demo.json"
    assert main(["demo", "--quick", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [one["mode"] for one in report["runs"]] == ["plain-cubic", "plain-bbr", "proxyd"]
    assert report["wan"]["kind"] == "netns"
    assert report["wan"]["configured"] is False, "nobody told the coordinator of the link"
    assert report["runs"][-1]["counters"]["fallback_bytes"] == 0
