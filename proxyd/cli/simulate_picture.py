"""A picture of one simulated link: rate, estimate and pace over time, and the queue below them.

The only file of the simulator that imports matplotlib (the ``report`` extra), and only when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxyd.sim.experiment import LinkExperiment, LinkResult

MBIT = 1e6 / 8


def draw(path: Path, title: str, experiment: LinkExperiment, result: LinkResult) -> None:
    """Write the picture. Raises OSError when it can't be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = [one.time_ns / 1e9 for one in result.series]
    figure, (rates, queue) = pyplot.subplots(
        2, 1, sharex=True, figsize=(11, 6.5), height_ratios=(2, 1), layout="constrained"
    )
    rates.plot(times, [one.rate_bytes_per_s / MBIT for one in result.series], color="0.55", lw=2.2, label="true rate")
    rates.plot(times, [one.pace_bytes_per_s / MBIT for one in result.series], color="tab:orange", lw=0.8, label="pace")
    rates.plot(times, [one.estimate_bytes_per_s / MBIT for one in result.series], color="tab:blue", label="estimate")
    rates.set_ylabel("payload, Mbit/s")
    rates.set_ylim(bottom=0, top=1.6 * max(one.rate_bytes_per_s for one in result.series) / MBIT)
    rates.legend(loc="upper right", ncols=3)
    queue.fill_between(times, [one.queue_bytes / experiment.bdp_bytes for one in result.series], color="tab:red", lw=0)
    queue.axhline(experiment.buffer_bytes / experiment.bdp_bytes, color="0.3", ls="--", lw=0.8)
    queue.set_ylabel("queue, BDP (dashed: buffer)")
    queue.set_xlabel("seconds since the first message")
    warm_s = experiment.warm_up_ns / 1e9
    for axes in (rates, queue):
        axes.axvspan(0, warm_s, color="0.93", zorder=0)
        axes.margins(x=0)
    figures = result.figures()
    figure.suptitle(
        f"{title}\nused {figures['utilisation']:.1%}, queue p99 {figures['queue_p99_bdp']:.2f} BDP, "
        f"loss {figures['loss']:.2%} (after the grey start)",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
