"""What ``bench link`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

LATE_S = 0.0005


def print_link(console: Console, description: str, runs: Sequence[dict[str, Any]]) -> None:
    """One line per mode."""
    steps = any("step" in run for run in runs)
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    names = ["mode", "used", "q p50", "q p99", "loss", "resent", "mean", "p99", "full", "off by"]
    names += ["q back", "full"] if steps else []
    for name in names:
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for run in runs:
        fct = run["fct_seconds"] or {}
        row = [
            run["mode"],
            f"{run['utilisation']:.1%}",
            f"{run['queue_p50_bdp']:.2f}",
            f"{run['queue_p99_bdp']:.2f}",
            f"{run['loss']:.2%}",
            f"{run['retransmit_ratio']:.2%}",
            seconds(fct.get("mean")),
            seconds(fct.get("p99")),
            rtts(run["start"]["filled_rtts"]),
            f"{run['estimate_error_p50']:.0%}, {run['estimate_error_p95']:.0%}" if "estimate_error_p50" in run else "",
        ]
        if steps:
            step = run["step"]
            row += [rtts(step["queue_under_tenth_bdp_after_rtts"]), rtts(step["used_90_percent_after_rtts"])]
        table.add_row(*row, style="bold green" if run["mode"] == "proxyd" else None)
    console.print(description, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        "used: of what the link could carry after the first ten round trips; q: queue in BDP; resent: by TCP; "
        "mean, p99: seconds until a message is there; full: round trips until 90 % used, from the start (and the step);"
        " off by: error of the coordinator's estimate, p50 and p95"
        + ("; q back: round trips until under 0.1 BDP." if steps else "."),
        highlight=False,
    )
    late = max(run["emulator_late_p99_seconds"] for run in runs)
    if late > LATE_S:
        console.print(
            f"The emulator was {late * 1e3:.1f} ms late at times (p99): this machine is busy, and figures are worse "
            "than the link's.",
            highlight=False,
        )


def seconds(value: float | None) -> str:
    """Or a dash."""
    return "-" if value is None else f"{value:.2f}"


def rtts(value: float | None) -> str:
    """Round trips, or that it never came to it."""
    return "never" if value is None else f"{value:.1f}"
