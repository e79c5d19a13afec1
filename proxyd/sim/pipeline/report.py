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
MORE_SYSTEMS = ("interleaved", "zb_v", "crosspipe", "pipemorph", "crosspipe_paced", "pipemorph_paced", "offline_paced")


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
            "moves": one.result.moves,
            "assumptions": one.assumptions,
        }

    def table(self) -> str:
        """For people."""
        ours = self.of("proxyd").result.iteration_ns
        lines = [
            f"{'system':<16}{'seconds':>9}{'x bound':>9}{'x own':>8}{'held':>7}{'outside':>9}{'proxyd is':>11}  on"
        ]
        for figures, one in zip(self.figures()["systems"], self.systems, strict=True):
            faster = one.result.iteration_ns / ours
            lines.append(
                f"{one.system:<16}{figures['iteration_seconds']:>9.2f}{figures['ratio_to_bound']:>9.3f}"
                f"{figures['ratio_to_own_bound']:>8.3f}{figures['peak_activations']:>7.4g}"
                f"{figures['peak_host_activations']:>9.4g}{faster:>10.2f}x  {one.assumptions}"
            )
        each = self.bounds
        lines.append(
            f"{'bound':<16}{each.bound_ns / NANOS:>9.2f}  compute {each.compute_ns / NANOS:.2f}, "
            f"WAN {each.wan_ns / NANOS:.2f}, queues in a row {each.queue_ns / NANOS:.2f}"
        )
        return "\n".join(lines)


def experiment(
    model: PipelineModel, systems: Sequence[str] = SYSTEMS, *, proxyd_wan: WanMaker | None = None
) -> Experiment:
    """Run them all. ``proxyd_wan``: the wire of the system proxyd, in place of one message at a time."""
    names = list(systems) if "proxyd" in systems else [*systems, "proxyd"]
    results = [run_system(name, model, wan=proxyd_wan if name == "proxyd" else None) for name in names]
    return Experiment(model, bounds(model), results)
