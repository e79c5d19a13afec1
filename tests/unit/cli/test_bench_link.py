from __future__ import annotations

import argparse
import io
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from proxyd.cli import bench_link
from proxyd.cli.demo.results import Arrival
from proxyd.cli.demo.traffic import DemoError
from proxyd.cli.link_bench import backlog
from proxyd.cli.link_bench.backlog import Backlog, Flow
from proxyd.cli.link_bench.figures import LinkRun, link_figures, percentile, plot_series
from proxyd.cli.link_bench.scenario import LinkScenario, message_bytes
from proxyd.cli.link_bench.table import print_link
from proxyd.cli.link_bench.watch import Look
from proxyd.core.errors import ConfigError
from proxyd.wan import History, PolicerSpec

MS = 1_000_000
S = 1000 * MS
MBIT = 125_000

# 80 Mbit/s, 50 ms: a BDP of 500 kB.
SCENARIO = LinkScenario(
    rate_bytes_per_s=80 * MBIT, rtt_ns=50 * MS, buffer_bytes=500_000, mtu=1500, seconds=4.0, step="halve", step_at_s=2.0
)


def args_of(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_link.add_arguments(parser)
    return parser.parse_args(options)


# ------------------------------------------------------------------------------------------------------------ options


def test_defaults_are_those_of_the_issue() -> None:
    scenario = bench_link.scenario_of(args_of())
    assert (scenario.rate_bytes_per_s, scenario.rtt_ns, scenario.buffer_bytes) == (400 * MBIT, 60 * MS, 3_000_000)
    assert not scenario.configured
    assert scenario.sites == {"a": 8, "b": 1}
    assert scenario.rate_trace().constant


def test_every_option_lands() -> None:
    options = (
        "--rate 100Mbit --rtt 20ms --buffer 0.5bdp --mtu 1500 --trace wild --senders 3 --seconds 6 --message 1MiB "
        "--depth 3 --seed 7 --loss 0.001 --policer 50Mbit:1MiB --cross 10Mbit --cross-tcp bbr --hint"
    )
    scenario = bench_link.scenario_of(args_of(*options.split()))
    assert scenario.buffer_bytes == 125_000
    assert scenario.policer == PolicerSpec(50 * MBIT, 1 << 20)
    assert scenario.cross_flood_bytes_per_s == 10 * MBIT
    # Somebody else has a host at each site.
    assert scenario.sites == {"a": 4, "b": 2}
    forward, back = scenario.links().values()
    assert forward.policer == scenario.policer
    assert back.policer is None
    assert forward.rate_bytes_per_s == scenario.rate_steps().pieces[0][1]
    assert sum(duration for duration, _ in scenario.rate_steps().pieces) == 6 * S
    assert scenario.rate_trace().mean_bytes_per_s == pytest.approx(100 * MBIT, rel=0.001)
    assert "wild" in scenario.describe()
    assert "policed to 50 Mbit/s" in scenario.describe()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seconds", "1"], "too short.*at least 1.3"),
        (["--trace", "stormy"], "cannot read the trace stormy.*calm"),
        (["--policer", "1Mbit"], "names no burst"),
        (["--senders", "0"], "--senders must be 1 to 100"),
        (["--modes", "proxyd,reno"], "no mode 'reno'"),
        (["--out", "/nowhere/at/all.json"], "no directory"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bench_link.run(args_of(*options))


def test_a_file_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "link.trace"
    path.write_text("".join(f"{ms}\n" for ms in range(1, 401) for _ in range(1 + ms // 201)))
    scenario = bench_link.scenario_of(args_of("--trace", str(path), "--rate", "30Mbit"))
    pieces = scenario.rate_steps().pieces
    assert pieces[3][1] == pytest.approx(2 * pieces[0][1], rel=0.02)
    assert scenario.rate_trace().mean_bytes_per_s == pytest.approx(30 * MBIT, rel=0.001)


@pytest.mark.parametrize(("step", "before", "after"), [("halve", 80, 40), ("double", 40, 80)])
def test_a_step_changes_the_rate_once(step: str, before: int, after: int) -> None:
    trace = replace(SCENARIO, step=step).rate_trace()
    assert trace.rate_at(2 * S - 1) == before * MBIT
    assert trace.rate_at(2 * S) == trace.rate_at(3600 * S) == after * MBIT


def test_messages_take_a_part_of_a_second_each() -> None:
    assert message_bytes(400 * MBIT) == 8 << 20
    assert message_bytes(10 * MBIT) == 207 << 10
    assert message_bytes(1 * MBIT) == 128 << 10


# ------------------------------------------------------------------------------------------------------------ backlog


class Prompt:
    """Each order arrives 10 ms later, in order."""

    def __init__(self) -> None:
        self.orders: list[Arrival] = []

    def order(self, number: int, due_ns: int) -> None:
        raise AssertionError("a backlog orders one message at a time")

    def order_one(self, sender: int, number: int, due_ns: int) -> None:
        self.orders.append(Arrival(sender, number, due_ns + 10 * MS))

    def next_arrival(self, timeout_s: float) -> Arrival:
        return self.orders.pop(0)

    def pids(self) -> list[int]:
        return []

    def finish(self, messages: int) -> dict[str, Any] | None:
        return None


def test_each_sender_always_has_its_messages_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(backlog.time, "monotonic_ns", lambda: next(clock))
    traffic = Prompt()
    one = Backlog(traffic, senders=3, depth=2)
    assert one.start() == 0
    assert [(arrival.sender, arrival.number) for arrival in traffic.orders] == [
        (sender, number) for number in range(2) for sender in range(3)
    ]
    one.run(20_000)
    assert len(traffic.orders) == 6, "whoever's message arrives sends the next one"
    assert one.drain() == one.messages == len(one.flows)
    assert {flow.seconds for flow in one.flows} == {0.01}


def test_an_arrival_that_was_never_ordered_is_an_error() -> None:
    traffic = Prompt()
    one = Backlog(traffic, senders=1, depth=1)
    one.start()
    traffic.orders[0] = Arrival(0, 5, 1)
    with pytest.raises(DemoError, match="arrived twice, or was never sent"):
        one.drain()


# ------------------------------------------------------------------------------------------------------------ figures


def run_of(mode: str = "proxyd") -> LinkRun:
    """4 s in samples of 10 ms: nothing carried in the first 100 ms, then full; the rate halves at 2 s, and a queue of
    300 kB stands for 150 ms from there on."""
    columns: list[array[int]] = [array("q") for _ in range(7)]
    carried = capacity = dropped = packets = 0
    for step in range(401):
        rate = 80 * MBIT if step <= 200 else 40 * MBIT
        if step:
            capacity += rate // 100
            carried += rate // 100 if step > 10 else 0
            packets += 10
        dropped += 1 if 200 < step <= 210 else 0
        queue = 300_000 if 200 < step <= 215 else 5_000
        for column, value in zip(
            columns, (step * 10 * MS, queue, queue, carried, capacity, dropped, packets), strict=True
        ):
            column.append(value)
    looks = [
        Look(ms * MS, "estimated", int((80 if ms < 2100 else 40) * MBIT * (1500 - 52) / 1500), 1, 1, 1, 1, 1, 1, 1)
        for ms in range(0, 4000, 100)
    ]
    flows = [Flow(0, number, number * 100 * MS, number * 100 * MS + 50 * MS) for number in range(40)]
    return LinkRun(
        mode,
        start_ns=0,
        origin_ns=0,
        end_ns=4 * S,
        history=History(*columns),
        flows=flows,
        segments=990,
        retransmits=10,
        looks=looks if mode == "proxyd" else [],
    )


def test_figures_of_a_run() -> None:
    figures = link_figures(SCENARIO, run_of())
    assert figures["utilisation"] == 1.0
    assert (figures["queue_p50_bdp"], figures["queue_p99_bdp"]) == (0.01, 0.6)
    assert figures["drops"] == 10
    assert figures["loss"] == pytest.approx(10 / 3510, abs=1e-6)
    assert figures["retransmit_ratio"] == 0.01
    assert figures["fct_seconds"]["mean"] == 0.05
    assert figures["messages"] == 35, "what was ordered in the first ten round trips is not counted"
    assert figures["start"]["utilisation"] == 0.8
    assert figures["start"]["filled_rtts"] == pytest.approx(1.6, abs=0.3)
    assert figures["step"]["queue_under_tenth_bdp_after_rtts"] == 3.0
    assert figures["step"]["used_90_percent_after_rtts"] == 0.0
    assert figures["step"]["loss_of_5_rtts"] == pytest.approx(10 / 260, abs=1e-6)
    # Wrong for one look in 35: at the step's own instant, and 100 ms later it had followed.
    assert figures["estimate_error_p50"] == pytest.approx(0.0, abs=0.001)
    assert figures["estimate_sources"] == ["estimated"]
    assert "estimate_error_p50" not in link_figures(SCENARIO, run_of("cubic"))


def test_a_queue_that_stays_and_a_link_that_never_fills_are_said() -> None:
    run = run_of()
    run.history.peak_bytes[:] = array("q", [400_000] * len(run.history.peak_bytes))
    run.history.carried_bytes[:] = array("q", [value // 2 for value in run.history.carried_bytes])
    figures = link_figures(SCENARIO, run)
    assert figures["step"]["queue_under_tenth_bdp_after_rtts"] is None
    assert figures["step"]["used_90_percent_after_rtts"] is None
    out = io.StringIO()
    print_link(Console(file=out, width=120), "a link", [figures])
    assert "never" in out.getvalue()


def test_the_curves_of_the_picture() -> None:
    series = plot_series(SCENARIO, run_of())
    assert series["capacity"][0] == [0.05, 80.0]
    assert series["capacity"][-1] == [3.95, 40.0]
    assert series["estimate"][0] == pytest.approx([0.0, 80.0], abs=0.01)
    assert max(value for _, value in series["queue_bdp"]) == 0.6


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile([], 0.5) == 0.0
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
