"""The two-site pipeline: how long an iteration takes, and how long each activation is under way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxyd.cli.torch_bench.options import WAYS, Line
from proxyd.cli.torch_bench.sites import SETTLE_S, TwoSites, quantile
from proxyd.core.errors import ProxydError

ELEMENT_BYTES = 4
WARMUPS = 2
"""Iterations of each way that are in no figure: torch agrees on shapes, TCP finds its window."""


@dataclass(frozen=True)
class PipelineScenario:
    """``pipelines`` of two stages each, one stage per site; every rank on a host of its own, with its own agent."""

    line: Line
    ratio: float
    """Communication / computation, both of one iteration: the bytes that all pipelines send one way at the link's
    rate, over the forwards and backwards of one stage."""
    schedule: str = "1f1b"
    pipelines: int = 2
    microbatches: int = 16
    forward_ns: int = 20_000_000
    backward_ns: int = 40_000_000
    iterations: int = 10

    @property
    def compute_s(self) -> float:
        """Of one stage and iteration, as asked for."""
        return self.microbatches * (self.forward_ns + self.backward_ns) / 1e9

    @property
    def elements(self) -> int:
        """Of one activation."""
        one_way_bytes = self.ratio * self.compute_s * self.line.payload_bytes_per_s
        return int(one_way_bytes / (self.pipelines * self.microbatches) / ELEMENT_BYTES) // 64 * 64

    @property
    def activation_bytes(self) -> int:
        """Of one micro-batch."""
        return self.elements * ELEMENT_BYTES

    @property
    def one_way_s(self) -> float:
        """What the link needs for all activations of an iteration."""
        return self.activation_bytes * self.microbatches * self.pipelines / self.line.payload_bytes_per_s

    def spec(self) -> dict[str, Any]:
        """For the workers."""
        return {
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "elements": self.elements,
            "forward_ns": self.forward_ns,
            "backward_ns": self.backward_ns,
        }


def measure(scenario: PipelineScenario, ways: Sequence[str], report: Callable[[str], None]) -> dict[str, Any]:
    """Iterations of all ways in turns, on one WAN. Raises ProxydError if anything is not as it must be."""
    world = 2 * scenario.pipelines
    with (
        TwoSites(scenario.line, scenario.pipelines) as sites,
        sites.ranks(world, pipelines=scenario.pipelines) as ranks,
    ):
        for way in ways:
            sites.open_way(ranks, way, *WAYS[way])
        spec = scenario.spec()
        alone_s = max(answer["seconds"] for answer in ranks.ask("compute", spec=spec))
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        proof = ""
        for number in range(-WARMUPS, scenario.iterations):
            for way in ways:
                before = sites.wan.counters()
                answers = ranks.ask("pipeline", way=way, spec=spec)
                run = digest_iteration(scenario, answers)
                time.sleep(SETTLE_S)
                run["wan_bytes"], run["dropped_packets"] = sites.crossed(before)
                proof = proof or run["proof"]
                if run["proof"] != proof:
                    raise ProxydError(
                        f"{way} gives other losses or gradients than {ways[0]}", why="the same was computed"
                    )
                if number >= 0:
                    runs[way].append(run)
                report(f"{way} {number + 1}/{scenario.iterations}: {run['seconds']:.3f} s")
        late_s = sites.wan.fidelity().late_p99_ns / 1e9
    return {
        "line": scenario.line.to_json(),
        "schedule": scenario.schedule,
        "pipelines": scenario.pipelines,
        "microbatches": scenario.microbatches,
        "activation_bytes": scenario.activation_bytes,
        "compute_seconds": alone_s,
        "communication_seconds": scenario.one_way_s,
        "ratio": scenario.one_way_s / alone_s,
        "emulator_late_p99_seconds": late_s,
        "ways": {way: figures(runs[way]) for way in ways},
    }


def digest_iteration(scenario: PipelineScenario, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """From all ranks' answers: how long it took, and each activation's and gradient's time under way."""
    first, half = answers[0]["at_ns"], scenario.pipelines
    times: dict[str, list[float]] = {"activation": [], "gradient": []}
    for pipeline in range(half):
        near, far = answers[pipeline], answers[pipeline + half]
        for kind, source, target in (("activation", near, far), ("gradient", far, near)):
            # The first iteration has torch's own messages in front.
            sends, arrivals = (one[-scenario.microbatches :] for one in (source["sends"], target["arrivals"]))
            times[kind] += [(end - begin) / 1e9 for begin, end in zip(sends, arrivals, strict=True)]
    return {
        "seconds": (max(answer["end_ns"] for answer in answers) - first) / 1e9,
        "proof": repr([(answer["losses"], answer["digest"]) for answer in answers]),
        "fct": times,
    }


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one way."""
    seconds = [run["seconds"] for run in runs]
    result: dict[str, Any] = {
        "iteration_seconds": seconds,
        "iteration_median_seconds": statistics.median(seconds),
        "wan_bytes_per_iteration": statistics.median(run["wan_bytes"] for run in runs),
        "dropped_packets_per_iteration": statistics.median(run["dropped_packets"] for run in runs),
    }
    for kind in ("activation", "gradient"):
        times = [value for run in runs for value in run["fct"][kind]]
        result[f"{kind}_fct_seconds"] = {
            "p50": quantile(times, 0.5),
            "p99": quantile(times, 0.99),
            "mean": statistics.fmean(times),
        }
    return result
