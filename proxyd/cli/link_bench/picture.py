"""The picture of a link over time, one row per mode: rates above, the queue below.

The only file here that imports matplotlib (the ``report`` extra), and only when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxyd.cli.link_bench.figures import LinkRun, link_figures, plot_series
from proxyd.cli.link_bench.scenario import LinkScenario

COLOURS = {"cubic": "#c44e52", "bbr": "#dd8452", "proxyd": "#2a7f3f"}
GREY = "#555555"


def draw(path: Path, scenario: LinkScenario, runs: Sequence[LinkRun]) -> None:
    """Write the picture; the format follows the suffix of ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        2 * len(runs),
        1,
        figsize=(11, 3.4 * len(runs) + 0.6),
        sharex=True,
        layout="constrained",
        squeeze=False,
        gridspec_kw={"height_ratios": [2, 1] * len(runs)},
    )
    for number, run in enumerate(runs):
        series, figures = plot_series(scenario, run), link_figures(scenario, run)
        _rates(grid[2 * number][0], scenario, run, series, figures)
        _queue(grid[2 * number + 1][0], scenario, run, series)
    grid[-1][0].set_xlabel("seconds since the first send")
    figure.suptitle(scenario.describe(), fontsize=9.5, x=0.01, ha="left", color=GREY)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _rates(
    axes: Any, scenario: LinkScenario, run: LinkRun, series: dict[str, list[list[float]]], figures: dict[str, Any]
) -> None:
    colour = COLOURS.get(run.mode, "#4c72b0")
    axes.step(*_xy(series["capacity"]), where="mid", color="black", linewidth=1.0, label="the link's rate")
    axes.step(*_xy(series["carried"]), where="mid", color=colour, linewidth=1.6, label="carried")
    if series["estimate"]:
        axes.plot(*_xy(series["estimate"]), color="#4c72b0", linewidth=1.2, label="estimate")
        axes.plot(*_xy(series["pace"]), color="#8172b3", linewidth=0.9, linestyle="--", label="pace")
    axes.set_ylim(0, 1.35 * max(value for _, value in series["capacity"]))
    axes.set_ylabel("Mbit/s")
    axes.axvspan(0, scenario.warmup_ns / 1e9, color="#eeeeee", zorder=0)
    text = (
        f"{run.mode}: {figures['utilisation']:.1%} used, queue p99 {figures['queue_p99_bdp']:.2f} BDP, "
        f"loss {figures['loss']:.2%}"
    )
    axes.set_title(text, loc="left", color=colour, fontsize=11)
    axes.legend(loc="upper right", ncols=4, fontsize=8, framealpha=0.9)
    axes.grid(alpha=0.3)


def _queue(axes: Any, scenario: LinkScenario, run: LinkRun, series: dict[str, list[list[float]]]) -> None:
    limit = scenario.buffer_bytes / scenario.bdp_bytes
    times, queue = _xy(series["queue_bdp"])
    axes.fill_between(times, queue, step="pre", color=COLOURS.get(run.mode, "#4c72b0"), linewidth=0)
    axes.axhline(limit, color=GREY, linestyle="--", linewidth=0.8)
    axes.set_ylim(0, 1.15 * limit)
    axes.set_ylabel("queue, BDP")
    axes.grid(alpha=0.3)


def _xy(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]
