"""The demo's arithmetic and texts; what it runs is tested end to end in tests/e2e."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import proxyd.cli.demo.session as session
from proxyd.cli.burst_worker import content, digest
from proxyd.cli.cluster import Cluster
from proxyd.cli.demo.activity import sent_bytes, tcp_count, total_segments
from proxyd.cli.demo.counters import Counters
from proxyd.cli.demo.measure import measure
from proxyd.cli.demo.net import LocalPlace, free_port
from proxyd.cli.demo.picture import busy_shares, draw, main_results, order_by_start, with_gaps
from proxyd.cli.demo.results import Activity, Arrival, RunResult, make_result, ratios
from proxyd.cli.demo.scenario import (
    WARMUP_BURSTS,
    Mode,
    Scenario,
    extra_scenarios,
    idle_restart_modes,
    main_modes,
    open_period_ns,
)
from proxyd.cli.demo.session import scenario_json, shortened, write_json
from proxyd.cli.demo.table import factor, print_report, verdict
from proxyd.cli.demo.traffic import DemoError
from proxyd.cli.main import main
from proxyd.wan import WanError
from proxyd.wan.crew import Place

MS = 1_000_000
CUBIC, BBR, PROXYD = main_modes(2)


def run_of(mode: Mode, fct: Sequence[float], drops: int = 0) -> RunResult:
    return RunResult(mode, list(fct), [max(fct)], drops, drops, 300.0, 0)


# ------------------------------------------------------------------------------------------------------------ scenario


def test_the_default_is_the_case_that_was_studied() -> None:
    scenario = Scenario()
    assert scenario.ideal_cct_seconds == pytest.approx(1.380, abs=0.001)
    assert scenario.buffer_bytes == pytest.approx(0.1 * scenario.bdp_bytes)
    assert scenario.sites == {"a": 8, "b": 1}
    assert scenario.tcp_buffer_max_bytes is None, "Linux' own buffers carry this link"
    assert "8 senders x 8 MiB, 400 Mbit/s, RTT 60 ms, buffer 300 kB (0.1 BDP)" in scenario.describe()


def test_one_at_a_time_halves_the_mean() -> None:
    scenario = Scenario()
    assert scenario.ideal_mean_fct_seconds == pytest.approx(
        (scenario.ideal_cct_seconds - 0.03) * (8 + 1) / 16 + 0.03, abs=0.001
    )


def test_the_modes_carry_the_names_that_reports_promise() -> None:
    assert [mode.name for mode in main_modes(24)] == ["plain-cubic", "plain-bbr", "proxyd"]
    assert {mode.congestion_control for mode in idle_restart_modes(4)} == {"cubic", "bbr"}
    assert all(mode.slow_start_after_idle for mode in idle_restart_modes(4))


def test_what_comes_last_is_shortened_to_the_time_that_is_left() -> None:
    on = idle_restart_modes(3)[0]
    seen = [RunResult(CUBIC, [1.0], [2.0, 1.0], 0, 0, 1.0, 0), RunResult(BBR, [1.0], [9.0], 0, 0, 1.0, 0)]
    one_s = 1.3 * 2.0 + 0.35
    assert shortened(on, 100.0, seen, Scenario()) == on
    assert shortened(on, 4.5 * one_s, seen, Scenario()) == replace(on, bursts=2)
    assert shortened(on, 2.9 * one_s, seen, Scenario()) is None


def test_the_extras_differ_from_the_default_and_scale_their_buffers() -> None:
    extras = {scenario.name: scenario for scenario in extra_scenarios(Scenario())}
    assert len(extras) == 8
    for name, scenario in extras.items():
        share = scenario.buffer_bytes / scenario.bdp_bytes
        assert share == pytest.approx(1.0 if "BDP" in name else 0.1, rel=0.01)
    assert extras["1 Gbit/s"].tcp_buffer_max_bytes, "one stream of 4 MB would run at half speed"
    assert extras["both directions"].receiving_hosts == 8
    period_ns = open_period_ns(extras["80 % open load"])
    assert 8 * 8 * 2**20 / (period_ns / 1e9) == pytest.approx(0.8 * 50e6, rel=1e-6)


# ------------------------------------------------------------------------------------------------------------- results


def test_warm_up_is_in_no_figure() -> None:
    scenario = replace(Scenario(), senders=2, tensor_bytes=1_000_000)
    due = [0, 10_000 * MS, 20_000 * MS]
    late = [[Arrival(0, 0, 9_000 * MS), Arrival(1, 0, 9_000 * MS)]]
    good = [
        [Arrival(0, n, due[n] + 100 * MS), Arrival(1, n, due[n] + 200 * MS)] for n in (1, 2)
    ]  # fmt: skip
    result = make_result(scenario, PROXYD, due, late + good, warmup=1, drops=(5, 12, 15), retransmits=4)
    assert result.fct_seconds == pytest.approx([0.1, 0.2, 0.1, 0.2])
    assert result.cct_seconds == pytest.approx([0.2, 0.2])
    assert (result.warmup_drops, result.drops, result.retransmits) == (7, 3, 4)
    assert result.goodput_mbps == pytest.approx(4 * 8e6 / 1e6 / 0.4)


def test_ratios_compare_with_the_better_run_of_each_baseline() -> None:
    on, _ = idle_restart_modes(4)
    runs = [run_of(CUBIC, [2.0, 3.0]), run_of(on, [1.0, 4.0]), run_of(BBR, [1.5, 2.0]), run_of(PROXYD, [0.5, 1.0])]
    figures = ratios(Scenario(), runs)
    assert figures["p99_fct_vs_cubic"] == pytest.approx(2.99 / 0.995, rel=1e-3)
    assert figures["mean_fct_vs_cubic"] == pytest.approx(2.5 / 0.75, rel=1e-3)
    assert figures["p99_fct_over_ideal_cct"] == pytest.approx(0.995 / 1.38, rel=1e-3)
    assert ratios(Scenario(), runs[:3]) == {}
    assert [result.mode.name for result in main_results(runs)] == ["plain-cubic", "plain-bbr", "proxyd"]


def test_many_bursts_are_not_compared_with_few() -> None:
    runs = [run_of(CUBIC, [2.0, 3.0]), run_of(BBR, [0.1]), run_of(PROXYD, [0.5, 1.0])]
    for run in (runs[0], runs[2]):
        run.cct_seconds.append(1.0)
    figures = ratios(Scenario(), runs)
    assert "p99_fct_vs_cubic" in figures
    assert "p99_fct_vs_bbr" not in figures


def test_the_report_has_what_readers_rely_on(tmp_path: Path) -> None:
    runs = [run_of(CUBIC, [2.0, 3.0], 7), run_of(BBR, [1.5, 2.0]), run_of(PROXYD, [0.5, 1.0])]
    runs[2].counters = {"fallback_bytes": 0}
    path = tmp_path / "demo.json"
    write_json(path, scenario_json(Scenario(), runs))
    report = json.loads(path.read_text())
    assert [run["mode"] for run in report["runs"]] == ["plain-cubic", "plain-bbr", "proxyd"]
    for run in report["runs"]:
        assert set(run["fct_seconds"]) == set(run["cct_seconds"]) == {"mean", "p50", "p95", "p99", "max"}
        assert {"drops", "retransmits", "goodput_mbps"} <= set(run)
    assert report["runs"][2]["counters"] == {"fallback_bytes": 0}
    assert report["ideal_cct_seconds"] == pytest.approx(1.38, abs=0.001)
    wan = report["wan"]
    assert (wan["kind"], wan["rate_bits_per_s"], wan["rtt_seconds"], wan["buffer_bytes"], wan["mtu"]) == (
        "netns", 400_000_000, 0.06, 300_000, 9000,
    )  # fmt: skip
    assert (wan["senders"], wan["tensor_bytes"], wan["bursts"]) == (8, 8 << 20, 1)
    assert list(tmp_path.iterdir()) == [path], "no half-written file stays"


def test_counters_that_prove_nothing_are_named() -> None:
    good = Counters(100, 100, 100, 0, 0, 0, 0, 3)
    assert good.problems(100) == []
    assert good.since(Counters(40, 40, 40, 0, 0, 0, 0, 1)) == Counters(60, 60, 60, 0, 0, 0, 0, 2)
    assert "granted_bytes is 90" in replace(good, granted_bytes=90).problems(100)[0]
    assert "fallback_bytes is 5, should be 0" in replace(good, fallback_bytes=5).problems(100)
    assert len(replace(good, window_violations=1, corrupt_chunks=1).problems(100)) == 2


# ---------------------------------------------------------------------------------------------------------- proc files


def test_bytes_of_one_interface() -> None:
    text = (
        "Inter-|   Receive    |  Transmit\n face |bytes packets ...|bytes ...\n"
        "    lo: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0\n"
        "  eth0: 200 2 0 0 0 0 0 0 4321 3 0 0 0 0 0 0\n"
    )
    assert sent_bytes(text) == 4321
    assert sent_bytes(text, "wan") == 0


def test_retransmits_by_name_not_by_place() -> None:
    text = "Ip: A B\nIp: 1 2\nTcp: InSegs RetransSegs OutSegs\nTcp: 10 77 30\nUdp: X\nUdp: 1\n"
    assert tcp_count(text, "RetransSegs") == 77


def test_a_sender_that_is_gone_is_said_so() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(WanError, match="a sender has ended"):
        total_segments([process.pid])


# ------------------------------------------------------------------------------------------------------------- content


def test_every_burst_of_every_sender_is_different() -> None:
    base = np.arange(1024, dtype=np.uint32)
    out = np.empty_like(base)
    seen = set()
    for sender in range(8):
        for number in range(40):
            content(base, out, sender, number)
            seen.add(digest(out))
    assert len(seen) == 8 * 40
    content(base, out, 3, 5)
    first = digest(out)
    out[17] ^= 1
    assert digest(out) != first


# -------------------------------------------------------------------------------------------------------------- measure


class StillNet:
    """A network on which nothing is lost but what a test says."""

    kind = "loopback"

    def __init__(self) -> None:
        self.dropped = 0

    def place(self, site: str, number: int) -> Place:
        return LocalPlace()

    def listen_address(self, site: str, number: int) -> str:
        return "127.0.0.1"

    def path_to(self, src: str, dst: str, address: str, port: int) -> tuple[str, int]:
        return address, port

    def slow_start_after_idle(self, on: bool) -> None:
        pass

    def drops(self, src: str, dst: str) -> int:
        return self.dropped

    def retransmits(self, pids: Sequence[int]) -> int:
        return self.dropped

    def queue(self, src: str, dst: str) -> tuple[array[int], array[int]]:
        return array("q", [0, time.monotonic_ns()]), array("q", [1, 2])

    def late_p99_ns(self) -> int:
        return 70_000

    def cluster(self, ending: ExitStack) -> Cluster:
        raise AssertionError("not needed")


class Scripted:
    """Answers each order at once: sender i arrives (i + 1) x 10 ms after it was due; each burst costs a drop."""

    def __init__(self, net: StillNet, senders: int) -> None:
        self.net = net
        self.senders = senders
        self.due: list[int] = []
        self.waiting: list[Arrival] = []
        self.finished = 0

    def order(self, number: int, due_ns: int) -> None:
        self.due.append(due_ns)
        self.net.dropped += 1
        self.waiting += [Arrival(i, number, due_ns + (i + 1) * 10 * MS) for i in range(self.senders)]

    def order_one(self, sender: int, number: int, due_ns: int) -> None:
        raise AssertionError("bursts are ordered as a whole")

    def next_arrival(self, timeout_s: float) -> Arrival:
        return self.waiting.pop(0)

    def pids(self) -> list[int]:
        return []

    def finish(self, messages: int) -> dict[str, Any] | None:
        self.finished = messages
        return {"messages": messages}


def test_closed_loop_waits_for_the_last_arrival_and_the_gap() -> None:
    scenario = replace(Scenario(), senders=2, gap_ns=500 * MS)
    net = StillNet()
    traffic = Scripted(net, 2)
    told = []
    result = measure(net, scenario, Mode("proxyd", None, 3), traffic, on_burst=lambda: told.append(1))
    assert len(traffic.due) == len(told) == WARMUP_BURSTS + 3
    assert traffic.finished == 2 * len(told)
    assert [after - before for before, after in zip(traffic.due, traffic.due[1:], strict=False)] == [520 * MS] * 4
    assert result.fct_seconds == pytest.approx([0.01, 0.02] * 3)
    assert (result.warmup_drops, result.drops) == (WARMUP_BURSTS, 3)
    assert result.counters == {"messages": 10}
    assert result.to_json()["emulator_late_p99_seconds"] == 0.00007
    assert list(result.trace.queue_bytes) == [] or min(result.trace.queue_times_ns) >= result.trace.due_ns[0]


def test_open_loop_offers_its_load_whatever_arrives() -> None:
    scenario = replace(Scenario(), senders=2, open_load=0.8)
    net = StillNet()
    traffic = Scripted(net, 2)
    result = measure(net, scenario, Mode("proxyd", None, 4), traffic)
    steps = [after - before for before, after in zip(traffic.due, traffic.due[1:], strict=False)]
    assert steps[WARMUP_BURSTS:] == [open_period_ns(scenario)] * 3
    assert steps[0] == scenario.gap_ns + 20 * MS, "the warm-up leaves no backlog"
    assert result.drops == 4
    assert len(result.fct_seconds) == 8


def test_an_arrival_that_comes_twice_is_an_error() -> None:
    net = StillNet()
    traffic = Scripted(net, 2)
    traffic.next_arrival = lambda timeout_s: Arrival(0, 0, 1)  # type: ignore[method-assign]
    with pytest.raises(DemoError, match="arrived twice"):
        measure(net, replace(Scenario(), senders=2), Mode("proxyd", None, 1), traffic)


def test_one_failed_variation_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(scenario: Scenario, modes: Sequence[Mode], *rest: object) -> list[RunResult]:
        if scenario.name == "2 MiB":
            raise DemoError("no proof")
        return [run_of(mode, [1.0, 2.0]) for mode in modes]

    monkeypatch.setattr(session, "available", lambda: None)
    monkeypatch.setattr(session, "run_scenario", fake)
    all_of_it = session.Session(Console(file=io.StringIO()), quick=False, full=True)
    all_of_it.run()
    report = all_of_it.to_json()
    assert report["failures"] == {"2 MiB": "no proof"}
    assert len(report["extras"]) == len(extra_scenarios(Scenario())) - 1
    assert [run["mode"] for run in report["runs"]][:3] == ["plain-cubic", "plain-bbr", "proxyd"]


# --------------------------------------------------------------------------------------------------------------- texts


def test_the_verdict_says_better_and_worse() -> None:
    runs = [run_of(CUBIC, [2.0, 3.0]), run_of(BBR, [0.6, 1.05]), run_of(PROXYD, [0.5, 1.0])]
    text = verdict(Scenario(), runs)
    assert "p99 FCT 3.0x better and mean FCT 3.3x better than cubic;" in text
    assert "than bbr, a small gain" in text
    assert factor(0.5) == "2.0x worse"
    assert verdict(Scenario(), runs[:2]) == ""


@pytest.mark.parametrize(("kind", "words"), [("netns", "network namespaces"), ("loopback", "userspace bottleneck")])
def test_the_report_fits_a_terminal_and_says_what_was_emulated(kind: str, words: str) -> None:
    out = io.StringIO()
    runs = [run_of(mode, [1.0, 2.0], 12_345) for mode in (CUBIC, BBR, PROXYD, *idle_restart_modes(4))]
    print_report(Console(file=out, width=80), Scenario(), runs, kind)
    text = out.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert words in " ".join(text.split())
    assert "\x1b" not in text, "no colours where there is no terminal"


@pytest.mark.parametrize(("late_ns", "said"), [(100_000, False), (2_000_000, True)])
def test_a_late_emulator_is_owned_up_to(late_ns: int, said: bool) -> None:
    out = io.StringIO()
    runs = [run_of(CUBIC, [2.0]), run_of(PROXYD, [1.0])]
    runs[1].late_p99_ns = late_ns
    print_report(Console(file=out, width=80), Scenario(), runs, "netns")
    assert ("2.0 ms late" in out.getvalue()) is said


# -------------------------------------------------------------------------------------------------------------- picture


def test_bytes_are_spread_over_the_bins_they_were_sent_in() -> None:
    # 20 ms bins at 1 MB/s hold 20,000 bytes each; 30,000 bytes between 10 and 40 ms.
    shares = busy_shares(Activity([10 * MS, 40 * MS], [[30_000], [0]]), 0, 0.06, 1_000_000)
    assert shares[0] == pytest.approx([0.5, 1.0, 0.0, 0.0])
    assert sum(shares[1]) == 0
    assert order_by_start([[0.0, 1.0], [1.0, 0.0]]) == [[1.0, 0.0], [0.0, 1.0]]


def test_an_idle_link_is_drawn_empty() -> None:
    times, queue = with_gaps([0, 5 * MS, 100 * MS], [10, 20, 30])
    assert times == [0, 5 * MS, 10 * MS, 95 * MS, 100 * MS]
    assert queue == [10, 20, 0, 0, 30]


@pytest.mark.parametrize("kind", ["netns", "loopback"])
def test_a_picture_is_drawn(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    runs = [run_of(mode, [1.0, 2.0], 5) for mode in (CUBIC, BBR, PROXYD)]
    if kind == "netns":
        for run in runs:
            run.trace.due_ns, run.trace.end_ns = [0], [1_500 * MS]
            run.trace.queue_times_ns, run.trace.queue_bytes = array("q", [0, 5 * MS]), array("q", [1000, 2000])
            run.trace.activity = Activity([0, 10 * MS], [[500_000]] * 8)
    path = tmp_path / "demo.png"
    draw(path, Scenario(), runs, kind)
    assert path.read_bytes()[:4] == b"\x89PNG"


# ------------------------------------------------------------------------------------------------------------- command


def test_a_place_that_cannot_be_written_is_known_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path / "no" / "such.json")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_quick_and_full_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--full"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from proxyd.cli.main import main; main(['demo', '--help']); "
        "sys.exit(bool({'grpc', 'matplotlib', 'rich', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--plot" in done.stdout


def test_a_local_place_runs_commands() -> None:
    process = LocalPlace().popen([sys.executable, "-c", "print('here')"], stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=20)
    assert out == b"here\n"
    assert 1024 <= free_port() <= 65535
