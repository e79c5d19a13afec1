"""What the demo says: one table, the factors in words, and what was emulated."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from proxyd.cli.demo.results import RunResult, comparable, ratios
from proxyd.cli.demo.scenario import Scenario
from proxyd.wan.burst import summarise

LATE_NS = 500_000
"""An emulator that is later than this shows in the figures."""
GAIN_WORTH_SAYING = 1.15
"""A smaller factor than this is called small."""


def figures_table(scenario: Scenario, results: Sequence[RunResult]) -> Table:
    """One line per mode; seconds."""
    table = Table(
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("mode", "bursts", "mean", "p99", "max", "CCT", "drops", "resent", "Mbit/s"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for result in results:
        fct, cct = summarise(result.fct_seconds), summarise(result.cct_seconds)
        table.add_row(
            result.mode.label,
            str(len(result.cct_seconds)),
            f"{fct['mean']:.2f}",
            f"{fct['p99']:.2f}",
            f"{fct['max']:.2f}",
            f"{cct['mean']:.2f}",
            f"{result.drops:,}",
            f"{result.retransmits:,}",
            f"{result.goodput_mbps:.0f}",
            style="bold green" if result.mode.congestion_control is None else None,
        )
    mean, cct_s = scenario.ideal_mean_fct_seconds, scenario.ideal_cct_seconds
    table.add_row("ideal", "", f"{mean:.2f}", "", "", f"{cct_s:.2f}", "0", "0", "", style="dim")
    return table


def verdict(scenario: Scenario, results: Sequence[RunResult]) -> str:
    """The factors in words; empty if there is nothing to compare."""
    figures = ratios(scenario, results)
    if not figures:
        return ""
    parts = []
    for kind in ("cubic", "bbr"):
        if f"p99_fct_vs_{kind}" in figures:
            several = sum(result.mode.congestion_control == kind for result in comparable(results)) > 1
            name = f"the better {kind}" if several else kind
            p99, mean = figures[f"p99_fct_vs_{kind}"], figures[f"mean_fct_vs_{kind}"]
            small = ", a small gain" if 1.0 <= p99 < GAIN_WORTH_SAYING else ""
            parts.append(f"p99 FCT {factor(p99)} and mean FCT {factor(mean)} than {name}{small}")
    over = figures["p99_fct_over_ideal_cct"]
    return (
        f"proxyd: {'; '.join(parts)}. Its p99 is {over:.2f}x the shortest possible burst "
        f"({scenario.ideal_cct_seconds:.2f} s)."
    )


def factor(ratio: float) -> str:
    """``2.1`` -> "2.1x better", ``0.5`` -> "2.0x worse"."""
    return f"{ratio:.1f}x better" if ratio >= 1.0 else f"{1 / ratio:.1f}x worse"


def emulated(scenario: Scenario, kind: str) -> str:
    """One plain sentence on what was run over what."""
    where = (
        "two sites of network namespaces (every sender on a host of its own, the receivers on one) joined by an "
        "emulated link with a drop-tail buffer; the TCP is the kernel's own"
        if kind == "netns"
        else "loopback behind a userspace bottleneck: no packets are dropped there and TCP's congestion control sees "
        "no delay, so the figures for plain TCP are not those of a WAN"
    )
    return f"Emulated on this machine: {scenario.describe()}; {where}."


def _print_table(console: Console, scenario: Scenario, results: Sequence[RunResult], title: str) -> None:
    console.print()
    # Not the table's own title: that would be wrapped to the table's width.
    console.print(title, style="bold", highlight=False)
    console.print(figures_table(scenario, results))


def print_report(console: Console, scenario: Scenario, results: Sequence[RunResult], kind: str) -> None:
    """Table, factors, sentence."""
    _print_table(
        console, scenario, results, "Seconds until a tensor is there (FCT), and until its burst is (CCT, mean)"
    )
    # On loopback plain TCP meets no lossy link: a comparison would say nothing.
    if kind == "netns" and (text := verdict(scenario, results)):
        console.print(text, style="bold", highlight=False)
    if any(result.mode.slow_start_after_idle for result in results):
        few = "" if len(comparable(results)) == len(results) else " Few bursts: shown, not compared."
        text = f"ssai: TCP's slow start after idle, Linux' default; it is off in the other rows.{few}"
        console.print(text, highlight=False)
    console.print(emulated(scenario, kind), highlight=False)
    late_ns = max((result.late_p99_ns for result in results), default=0)
    if late_ns > LATE_NS:
        console.print(
            f"The emulator was {late_ns / 1e6:.1f} ms late at times (p99): this machine is busy, or the emulator may "
            "not run in real time (it may as root). Figures are worse than the link's.",
            highlight=False,
        )


def print_extras(console: Console, extras: Sequence[tuple[Scenario, Sequence[RunResult]]]) -> None:
    """One small table per variation."""
    for scenario, results in extras:
        _print_table(console, scenario, results, f"{scenario.name}: {scenario.describe()}")
        if text := verdict(scenario, results):
            console.print(text, highlight=False)
