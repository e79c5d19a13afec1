"""One experiment: all systems on one model, as figures and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from proxyd.sim.pipeline.bounds import Bounds, bounds
from proxyd.sim.pipeline.model import NANOS, PipelineModel
from proxyd.sim.pipeline.systems import SystemResult, WanMaker, run_system

SYSTEMS = ("1f1b", "zb_h1", "zb_h2", "offline", "1f1b_paced", "online_fair", "online", "offload_fair", "proxyd")
"""What a run compares unless it is told otherwise; the last one is what the speed-ups are about."""
MORE_SYSTEMS = (
    "interleaved",
    "zb_v",
    "crosspipe",
    "pipemorph",
    "crosspipe_paced",
    "pipemorph_paced",
    "offline_paced",
    "proxyd_core",
)


@dataclasses.dataclass(slots=True)
class Experiment:
    """What came out."""

    model: PipelineModel
    bounds: Bounds
    """Without a limit of memory: of every system."""
    systems: list[SystemResult]

    def of(self, name: str) -> SystemResult:
        """One system's result."""
        return next(one for one in self.systems if one.system == name)

    def figures(self) -> dict[str, Any]:
        """As ``proxyd simulate pipeline`` writes them."""
        bound_ns = self.bounds.bound_ns
        ours = self.of("proxyd").result.iteration_ns
        return {
            "bound_seconds": round(bound_ns / NANOS, 6),
            "bounds": {
                "compute_seconds": round(self.bounds.compute_ns / NANOS, 6),
                "wan_seconds": round(self.bounds.wan_ns / NANOS, 6),
                "queue_seconds": round(self.bounds.queue_ns / NANOS, 6),
            },
            "systems": [self._figures(one, bound_ns) for one in self.systems],
            "speedup_of_proxyd_over": {
                one.system: round(one.result.iteration_ns / ours, 4) for one in self.systems if one.system != "proxyd"
            },
        }

    def _figures(self, one: SystemResult, bound_ns: int) -> dict[str, Any]:
        took_ns = one.result.iteration_ns
        nbytes = max(stage.activation_bytes for stage in self.model.stages)
        return {
            "system": one.system,
            "iteration_seconds": round(took_ns / NANOS, 6),
            "ratio_to_bound": round(took_ns / bound_ns, 5),
            "own_bound_seconds": round(one.bound_ns / NANOS, 6),
            "ratio_to_own_bound": round(took_ns / one.bound_ns, 5),
            "peak_activations": round(max(one.result.peak_bytes) / nbytes, 2),
            "peak_host_activations": round(max(one.result.host_peak_bytes) / nbytes, 2),
            "peak_ssd_activations": round(max(one.result.ssd_peak_bytes) / nbytes, 2),
            "moves": one.result.moves,
            "assumptions": one.assumptions,
        }


def mean_figures(experiments: Sequence[Experiment]) -> dict[str, Any]:
    """Of the same experiment with several seeds: the mean of each figure, and of the ratios the mean of the ratios.

    Beside the means: each system's worst ratio to the bound, and the least and the most of proxyd's speed-ups.
    """
    each = [one.figures() for one in experiments]
    if len(each) == 1:
        return each[0]
    mean = dict(each[0])
    mean["bound_seconds"] = _mean([one["bound_seconds"] for one in each])
    for part in ("bounds", "speedup_of_proxyd_over"):
        mean[part] = {key: _mean([one[part][key] for one in each]) for key in each[0][part]}
    for word, choose in (("least", min), ("most", max)):
        mean[f"{word}_speedup_of_proxyd_over"] = {
            system: choose(one["speedup_of_proxyd_over"][system] for one in each)
            for system in each[0]["speedup_of_proxyd_over"]
        }
    mean["systems"] = []
    for row in zip(*(one["systems"] for one in each), strict=True):
        merged = dict(row[0])
        for key, value in row[0].items():
            if isinstance(value, int | float):
                merged[key] = _mean([one[key] for one in row])
        merged["worst_ratio_to_bound"] = max(one["ratio_to_bound"] for one in row)
        mean["systems"].append(merged)
    return mean


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 6)


def table(figures: dict[str, Any]) -> str:
    """For people."""
    faster = {**figures["speedup_of_proxyd_over"], "proxyd": 1.0}
    lines = [f"{'system':<16}{'seconds':>9}{'x bound':>9}{'x own':>8}{'held':>7}{'outside':>9}{'proxyd is':>11}  on"]
    for one in figures["systems"]:
        lines.append(
            f"{one['system']:<16}{one['iteration_seconds']:>9.2f}{one['ratio_to_bound']:>9.3f}"
            f"{one['ratio_to_own_bound']:>8.3f}{one['peak_activations']:>7.4g}"
            f"{one['peak_host_activations']:>9.4g}{faster[one['system']]:>10.2f}x  {one['assumptions']}"
        )
    each = figures["bounds"]
    lines.append(
        f"{'bound':<16}{figures['bound_seconds']:>9.2f}  compute {each['compute_seconds']:.2f}, "
        f"WAN {each['wan_seconds']:.2f}, queues in a row {each['queue_seconds']:.2f}"
    )
    return "\n".join(lines)


def experiment(
    model: PipelineModel,
    systems: Sequence[str] = SYSTEMS,
    *,
    proxyd_wan: WanMaker | None = None,
    core_wan: WanMaker | None = None,
) -> Experiment:
    """Run them all. ``proxyd_wan``: the wire of the system proxyd, in place of one message at a time; ``core_wan``:
    that of proxyd_core, in place of one as its class says."""
    wans = {"proxyd": proxyd_wan, "proxyd_core": core_wan}
    names = list(systems) if "proxyd" in systems else [*systems, "proxyd"]
    results = [run_system(name, model, wan=wans.get(name)) for name in names]
    return Experiment(model, bounds(model), results)
