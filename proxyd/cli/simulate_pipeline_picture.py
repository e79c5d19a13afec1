"""A picture of simulated steps: what each stage did when, when the wires were used, and memory.

Imports matplotlib (the ``report`` extra), and only when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxyd.sim.pipeline.report import Experiment
    from proxyd.sim.pipeline.systems import SystemResult

COLORS = {"F": "tab:blue", "B": "tab:orange", "W": "tab:green"}
SHOWN = ("1f1b", "proxyd")


def draw(path: Path, title: str, experiment: Experiment) -> None:
    """Write the picture. Raises OSError when it can't be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [one for one in experiment.systems if one.system in SHOWN]
    figure, rows = pyplot.subplots(
        3 * len(shown),
        1,
        sharex=True,
        figsize=(14, 5.2 * len(shown)),
        height_ratios=(4, 1, 1.4) * len(shown),
        layout="constrained",
    )
    for place, one in enumerate(shown):
        _one(rows[3 * place : 3 * place + 3], one, experiment)
    rows[-1].set_xlabel("seconds since the step began (first pipeline)")
    figure.suptitle(f"{title}\nbound {experiment.bounds.bound_ns / 1e9:.2f} s", fontsize=11)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _one(axes: Any, one: SystemResult, experiment: Experiment) -> None:
    gantt, wires, memory = axes
    result = one.result
    stages = len(result.memory)
    for kind, color in COLORS.items():
        for stage in range(stages):
            bars = [
                (span.start_ns / 1e9, (span.end_ns - span.start_ns) / 1e9)
                for span in result.spans
                if span.pipeline == 0 and span.worker == stage and span.task.kind.name == kind
            ]
            gantt.broken_barh(bars, (stage - 0.4, 0.8), color=color, lw=0, label=kind if stage == 0 else None)
    gantt.set_ylim(stages - 0.4, -0.6)
    gantt.set_ylabel("stage")
    gantt.set_title(f"{one.system}: {result.iteration_ns / 1e9:.2f} s ({one.assumptions})", fontsize=10, loc="left")
    gantt.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=7, frameon=False)
    directions = sorted(result.use)
    for row, direction in enumerate(directions):
        bars = [(start / 1e9, (end - start) / 1e9) for start, end in result.use[direction]]
        wires.broken_barh(bars, (row - 0.4, 0.8), color="tab:purple", lw=0)
    wires.set_yticks(range(len(directions)), ["->".join(direction) for direction in directions])
    wires.set_ylabel("wire busy")
    nbytes = experiment.model.stages[0].activation_bytes
    for stage in (0, stages // 2):
        times = [at / 1e9 for at, _, _ in result.memory[stage]]
        held = [device / nbytes for _, device, _ in result.memory[stage]]
        memory.step(times, held, where="post", lw=0.8, label=f"stage {stage}, device")
        if max(result.host_peak_bytes):
            out = [host / nbytes for _, _, host in result.memory[stage]]
            memory.step(times, out, where="post", lw=0.8, ls=":", label=f"stage {stage}, host")
    memory.set_ylabel("activations")
    memory.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=7, frameon=False)
    for each in axes:
        each.margins(x=0)
