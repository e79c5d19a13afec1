"""Schedules beside each other: 1F1B over gloo and through the agents, and the schedule that is chosen at run time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxyd.cli.torch_bench.options import Line
from proxyd.cli.torch_bench.sites import SETTLE_S, SITES, Ranks, TwoSites
from proxyd.core.errors import ProxydError
from proxyd.wan import RateSteps

ELEMENT_BYTES = 4
WARMUPS = 2
HOPELESS = 3.0
PATIENCE = 2
"""A way that takes so many times what the fastest one takes is tried so often, and no more."""
REAL = {"layers": 1, "heads": 4, "width": 128, "context": 64, "sequences": 8, "seed": 1}
"""A stage's blocks of the examples' GPT."""


@dataclass(frozen=True)
class Way:
    """Who carries the bytes, and who says which task comes next."""

    backend: str
    control: str | None
    schedule: str


WAYS = {
    "gloo-cubic": Way("gloo", "cubic", "1f1b"),
    "gloo-bbr": Way("gloo", "bbr", "1f1b"),
    "1f1b": Way("proxyd", None, "1f1b"),
    "run-time": Way("proxyd", None, "run-time"),
    "few": Way("proxyd", None, "few"),
    "offload": Way("proxyd", None, "offload"),
}


@dataclass(frozen=True)
class Scenario:
    """One pipeline, half of its stages at each site, every rank on a host of its own."""

    line: Line
    steps: RateSteps | None
    """Of the rate, both ways, from the beginning of each turn on; None: it stays."""
    ratio: float
    """Communication / computation, both of one iteration: the bytes that cross one way at the mean rate, over what one
    stage computes."""
    stages: int = 2
    microbatches: int = 16
    forward_ns: int = 20_000_000
    """F, B and W each."""
    iterations: int = 6
    real: bool = False
    activations: int = 8
    told: bool = False
    """The coordinator is configured with the link's mean rate, round trip and buffer."""
    offload_to: str = ""
    """A directory for what is moved out; else it goes to host memory."""

    @property
    def elements(self) -> int:
        """Of one stretched activation."""
        nbytes = self.ratio * 3 * self.forward_ns / 1e9 * self.line.payload_bytes_per_s
        return max(64 * 64, int(nbytes / ELEMENT_BYTES) // 64 * 64)

    def spec(self) -> dict[str, Any]:
        """For the workers."""
        return {
            "stages": self.stages,
            "microbatches": self.microbatches,
            "elements": self.elements,
            "forward_ns": self.forward_ns,
            "backward_ns": self.forward_ns,
            "weight_ns": self.forward_ns,
            "activations": self.activations,
            "offload_to": self.offload_to,
            "real": REAL if self.real else None,
        }

    def describe(self) -> str:
        """In a few words."""
        moves = "constant" if self.steps is None else "stepping"
        return f"{self.stages} stages, RTT {self.line.rtt_ns / 1e6:g} ms, {moves} rate, ratio {self.ratio:g}"


def measure(scenario: Scenario, ways: Sequence[str], report: Callable[[str], None]) -> dict[str, Any]:
    """Iterations of all ways in turns, on one WAN of its own. See :func:`measure_on`."""
    with opened(scenario, ways) as (sites, ranks):
        return measure_on(sites, ranks, scenario, ways, report)


class opened:
    """A place for scenarios that differ in ratio and rate only. A context manager."""

    def __init__(self, scenario: Scenario, ways: Sequence[str]) -> None:
        self._sites = TwoSites(scenario.line, scenario.stages // 2, told=scenario.told)
        self._world, self._ways = scenario.stages, ways
        self._ranks: Ranks | None = None

    def __enter__(self) -> tuple[TwoSites, Ranks]:
        sites = self._sites.__enter__()
        try:
            self._ranks = sites.ranks(self._world, pipelines=0).__enter__()
            for name in self._ways:
                sites.open_way(self._ranks, name, WAYS[name].backend, WAYS[name].control)
        except BaseException:
            self.__exit__()
            raise
        return sites, self._ranks

    def __exit__(self, *_: object) -> None:
        if self._ranks is not None:
            self._ranks.__exit__(None, None, None)
        self._sites.__exit__()


def measure_on(
    sites: TwoSites, ranks: Ranks, scenario: Scenario, ways: Sequence[str], report: Callable[[str], None]
) -> dict[str, Any]:
    """Iterations of all ways in turns, each from the beginning of the rate's steps on; whose turn is first moves on.

    Raises ProxydError where losses or gradients are not those of the whole pipeline in one process.
    """
    spec = scenario.spec()
    alone = ranks.ask("schedule_alone", spec=spec)
    compute_s = max(answer["seconds"] for answer in alone)
    message_bytes = max(answer["message_bytes"] for answer in alone)
    sent_bytes = message_bytes * scenario.microbatches
    rate, steps = scenario.line.rate_bytes_per_s, scenario.steps
    if scenario.real:
        # What layers compute is given, and so is what they send: the link has to fit.
        share = sent_bytes / compute_s / scenario.ratio / scenario.line.payload_bytes_per_s
        rate = int(rate * share)
        if steps is not None:
            steps = RateSteps(tuple((every_ns, int(one * share)) for every_ns, one in steps.pieces))
    proof = [{"losses": answer["losses"], "digest": answer["digest"]} for answer in alone]
    proof = [
        {**one, "losses": one["losses"] if stage == scenario.stages - 1 else []} for stage, one in enumerate(proof)
    ]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    hopeless: set[str] = set()
    for number in range(-WARMUPS, scenario.iterations):
        turn = (number + WARMUPS) % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            if way in hopeless:
                continue
            for src, dst in (SITES, SITES[::-1]):
                if steps is not None:
                    sites.wan.set_link(src, dst, rates=steps)
                else:
                    sites.wan.set_link(src, dst, rate_bytes_per_s=rate)
            before = sites.wan.counters()
            answers = ranks.ask("schedule", way=way, spec=spec, schedule=WAYS[way].schedule)
            time.sleep(SETTLE_S)
            crossed, dropped = sites.crossed(before)
            believed = sites.believed_rates()
            for stage, (answer, expected) in enumerate(zip(answers, proof, strict=True)):
                if any(answer[name] != value for name, value in expected.items()):
                    raise ProxydError(
                        f"{way}: stage {stage} has other losses or gradients than the pipeline in one process",
                        next_step="Report this",
                    )
            seconds = (max(answer["end_ns"] for answer in answers) - answers[0]["at_ns"]) / 1e9
            said = ", ".join(f"{link} {rate * 8 / 1e6:.0f}" for link, rate in believed.items())
            turn_of = f"{scenario.describe()}: {way} {number + 1}/{scenario.iterations}"
            report(f"{turn_of}: {seconds:.3f} s; granted now: {said} Mbit/s")
            if number >= 0:
                own = [answer["report"] for answer in answers]
                runs[way].append(
                    {
                        "seconds": seconds,
                        "wan_bytes": crossed,
                        "dropped_packets": dropped,
                        "stages": own,
                        "believed_bytes_per_s": believed,
                    }
                )
        if number == PATIENCE - 1:
            medians = {way: statistics.median(run["seconds"] for run in seen) for way, seen in runs.items()}
            hopeless = {way for way, median in medians.items() if median > HOPELESS * min(medians.values())}
    communication_s = sent_bytes / scenario.line.payload_bytes_per_s * scenario.line.rate_bytes_per_s / rate
    return {
        "setting": scenario.describe(),
        "line": {**scenario.line.to_json(), "rate_bits_per_s": rate * 8},
        "rate_steps": steps.to_json() if steps is not None else None,
        "stages": scenario.stages,
        "microbatches": scenario.microbatches,
        "real": scenario.real,
        "told": scenario.told,
        "message_bytes": message_bytes,
        "compute_seconds": compute_s,
        "communication_seconds": communication_s,
        "ratio": communication_s / compute_s,
        "emulator_late_p99_seconds": sites.wan.fidelity().late_p99_ns / 1e9,
        "gradients": "bitwise equal in all ways and to one process",
        "ways": {way: figures(runs[way]) for way in ways},
    }


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one way; what stages report is that of the iteration in the middle."""
    ordered = sorted(runs, key=lambda run: float(run["seconds"]))
    middle = ordered[len(ordered) // 2]
    held = [max(run["stages"][stage]["peak_bytes"] for run in runs) for stage in range(len(middle["stages"]))]
    return {
        "iteration_seconds": [run["seconds"] for run in runs],
        "iteration_median_seconds": statistics.median(run["seconds"] for run in runs),
        "wan_bytes_per_iteration": statistics.median(run["wan_bytes"] for run in runs),
        "dropped_packets_per_iteration": statistics.median(run["dropped_packets"] for run in runs),
        "peak_activation_bytes": held,
        "believed_bytes_per_s": [run["believed_bytes_per_s"] for run in runs],
        "peak_resident_bytes": [
            statistics.median(run["stages"][stage]["peak_resident_bytes"] for run in runs)
            for stage in range(len(middle["stages"]))
        ],
        "stages": middle["stages"],
    }
