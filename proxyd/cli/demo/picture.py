"""The picture: how long transfers took, what the bottleneck's queue did, and who sent when.

The only file that imports matplotlib (the ``report`` extra), and only when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxyd.cli.demo.results import Activity, RunResult, comparable
from proxyd.cli.demo.scenario import Scenario
from proxyd.cli.demo.table import emulated
from proxyd.wan.burst import summarise

COLOURS = {"cubic": "#c44e52", "bbr": "#dd8452", None: "#2a7f3f"}
IDEAL_COLOUR = "#555555"
BIN_S = 0.02
"""Resolution of the strips of who sends when."""


def draw(path: Path, scenario: Scenario, results: Sequence[RunResult], kind: str) -> None:
    """Write the picture; the format follows the suffix of ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = main_results(results)
    rows = max(1, len(shown))
    figure = plt.figure(figsize=(14, 2.6 + 2.5 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 3, width_ratios=(1.15, 1.0, 1.25))
    _distribution(figure.add_subplot(grid[:, 0]), scenario, shown)
    longest_s = max((_last_burst_s(result) for result in shown), default=0.0) * 1.03 or 1.0
    queue_axes: list[Any] = []
    sends: list[Any] = []
    for row, result in enumerate(shown):
        queue_axes.append(figure.add_subplot(grid[row, 1], sharex=queue_axes[0] if queue_axes else None))
        _queue(queue_axes[-1], scenario, result)
        sends.append(figure.add_subplot(grid[row, 2], sharex=sends[0] if sends else None))
        _who_sends(sends[-1], scenario, result, longest_s)
    if queue_axes:
        queue_axes[0].set_title("Queue at the bottleneck, last bursts", loc="left")
        queue_axes[-1].set_xlabel("seconds")
        sends[0].set_title("Who sends when, one burst (darker: faster)", loc="left")
        sends[-1].set_xlabel("seconds since the burst was due")
    figure.suptitle(
        f"{scenario.senders} tensors of {scenario.tensor_bytes >> 20} MiB, all due at once, over one long shallow link",
        fontsize=15,
        x=0.01,
        ha="left",
    )
    figure.supxlabel(emulated(scenario, kind), fontsize=8.5, color=IDEAL_COLOUR, x=0.01, ha="left", wrap=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main_results(results: Sequence[RunResult]) -> list[RunResult]:
    """One run per kind: the best by p99 where there are several settings."""
    best: dict[str | None, RunResult] = {}
    for result in comparable(results):
        kind = result.mode.congestion_control
        if kind not in best or summarise(result.fct_seconds)["p99"] < summarise(best[kind].fct_seconds)["p99"]:
            best[kind] = result
    return list(best.values())


def colour(result: RunResult) -> str:
    """The same in all panels."""
    return COLOURS.get(result.mode.congestion_control, "#4c72b0")


def _distribution(axes: Any, scenario: Scenario, results: Sequence[RunResult]) -> None:
    axes.set_title("How long a transfer takes (share done within ...)", loc="left")
    for result in results:
        ordered = sorted(result.fct_seconds)
        shares = [(number + 1) / len(ordered) for number in range(len(ordered))]
        figures = summarise(ordered)
        label = f"{result.mode.label}: mean {figures['mean']:.2f} s, p99 {figures['p99']:.2f} s"
        axes.step([0.0, *ordered], [0.0, *shares], where="post", color=colour(result), linewidth=2.2, label=label)
        axes.plot([figures["p99"]], [0.99], "o", color=colour(result), markersize=6)
    ideal = scenario.ideal_cct_seconds
    axes.axvline(
        ideal, color=IDEAL_COLOUR, linestyle="--", linewidth=1.2, label=f"shortest possible burst: {ideal:.2f} s"
    )
    axes.set_xlim(left=0)
    # Below zero there is only the legend: it hides no curve.
    axes.set_ylim(-0.17, 1.01)
    axes.set_yticks([number / 5 for number in range(6)])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("seconds from ready to the receiver's last byte (dots: p99)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9.5, framealpha=1.0)


def _queue(axes: Any, scenario: Scenario, result: RunResult) -> None:
    trace = result.trace
    start_ns = trace.due_ns[0] if trace.due_ns else 0
    times, queue = with_gaps(list(trace.queue_times_ns), list(trace.queue_bytes))
    seconds = [(time_ns - start_ns) / 1e9 for time_ns in times]
    axes.fill_between(seconds, [value / 1e3 for value in queue], step="pre", color=colour(result), linewidth=0)
    axes.axhline(scenario.buffer_bytes / 1e3, color=IDEAL_COLOUR, linestyle="--", linewidth=1)
    axes.set_ylim(0, scenario.buffer_bytes / 1e3 * 1.33)
    axes.set_xlim(left=0)
    axes.set_ylabel("kB")
    dropped = f"{result.drops:,} drop{'' if result.drops == 1 else 's'} in {len(result.cct_seconds)} bursts"
    axes.text(
        0.995,
        0.98,
        f"{result.mode.label}: {dropped}",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=9.5,
        color=colour(result),
        fontweight="bold",
    )
    if result.mode.congestion_control == "cubic":
        axes.text(
            0.005, scenario.buffer_bytes / 1e3, "buffer full", transform=axes.get_yaxis_transform(), va="bottom",
            fontsize=8, color=IDEAL_COLOUR,
        )  # fmt: skip


def _who_sends(axes: Any, scenario: Scenario, result: RunResult, longest_s: float) -> None:
    axes.set_xlim(0, longest_s)
    axes.set_ylim(scenario.senders - 0.5, -0.5)
    axes.set_yticks(range(scenario.senders), [str(number + 1) for number in range(scenario.senders)], fontsize=8)
    axes.set_ylabel("sender")
    trace = result.trace
    if trace.activity is None or not trace.due_ns:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=IDEAL_COLOUR)
        return
    shares = busy_shares(trace.activity, trace.due_ns[-1], longest_s, scenario.rate_bytes_per_s)
    red, green, blue = (int(colour(result)[index : index + 2], 16) / 255 for index in (1, 3, 5))
    # Opacity is the share of the link; a square root keeps an eighth of the link visible.
    image = [[(red, green, blue, min(1.0, share) ** 0.5) for share in row] for row in order_by_start(shares)]
    axes.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        extent=(0, len(shares[0]) * BIN_S, scenario.senders - 0.5, -0.5),
    )
    axes.axvline(_last_burst_s(result), color=colour(result), linewidth=1.5)
    axes.axvline(scenario.ideal_cct_seconds, color=IDEAL_COLOUR, linestyle="--", linewidth=1)
    for number in range(1, scenario.senders):
        axes.axhline(number - 0.5, color="#dddddd", linewidth=0.6)


def _last_burst_s(result: RunResult) -> float:
    trace = result.trace
    return (trace.end_ns[-1] - trace.due_ns[-1]) / 1e9 if trace.due_ns else 0.0


def with_gaps(times_ns: list[int], queue: list[int], interval_ns: int = 5_000_000) -> tuple[list[int], list[int]]:
    """Put zeros where samples are missing: the emulator takes none while the link is idle."""
    out_times: list[int] = []
    out_queue: list[int] = []
    for time_ns, value in zip(times_ns, queue, strict=True):
        if out_times and time_ns - out_times[-1] > 3 * interval_ns:
            out_times += [out_times[-1] + interval_ns, time_ns - interval_ns]
            out_queue += [0, 0]
        out_times.append(time_ns)
        out_queue.append(value)
    return out_times, out_queue


def busy_shares(activity: Activity, start_ns: int, length_s: float, rate_bytes_per_s: int) -> list[list[float]]:
    """Per sender and bin of ``BIN_S``: bytes sent as a share of what the link carries in it.

    What was counted between two samples is spread evenly over the time between them.
    """
    bins = max(1, int(length_s / BIN_S) + 1)
    whole = rate_bytes_per_s * BIN_S
    result = [[0.0] * bins for _ in activity.sent_bytes]
    spans = list(zip(activity.times_ns, activity.times_ns[1:], strict=False))
    for row, series in zip(result, activity.sent_bytes, strict=True):
        for (left_ns, right_ns), nbytes in zip(spans, series, strict=True):
            left, right = (left_ns - start_ns) / 1e9 / BIN_S, (right_ns - start_ns) / 1e9 / BIN_S
            for number in range(max(0, int(left)), min(bins - 1, int(right)) + 1):
                overlap = min(right, number + 1) - max(left, number)
                if overlap > 0:
                    row[number] += nbytes * overlap / (right - left) / whole
    return result


def order_by_start(shares: list[list[float]]) -> list[list[float]]:
    """Rows by the middle of what they sent, so that a staircase looks like one."""

    def middle(row: list[float]) -> float:
        total = sum(row)
        return sum(number * share for number, share in enumerate(row)) / total if total else 0.0

    return sorted(shares, key=middle)
