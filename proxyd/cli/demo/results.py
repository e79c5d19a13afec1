"""From arrivals to figures: the same arithmetic for every mode."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxyd.cli.demo.scenario import Mode, Scenario
from proxyd.wan.burst import busy_seconds, summarise


@dataclass(frozen=True)
class Arrival:
    """A receiver's last byte of one transfer, on CLOCK_MONOTONIC."""

    sender: int
    number: int
    end_ns: int


@dataclass(frozen=True)
class Activity:
    """What each sending host put on its network interface over time: bytes between one time and the next."""

    times_ns: list[int]
    sent_bytes: list[list[int]]
    """Per sender, one value less than there are times."""


@dataclass
class Trace:
    """What the picture shows of a mode beside its figures: its last bursts."""

    due_ns: list[int] = field(default_factory=list)
    """When the last counted bursts were due."""
    end_ns: list[int] = field(default_factory=list)
    """Their last arrivals."""
    queue_times_ns: array[int] = field(default_factory=lambda: array("q"))
    queue_bytes: array[int] = field(default_factory=lambda: array("q"))
    activity: Activity | None = None
    """Of the very last burst."""


@dataclass
class RunResult:
    """One mode. Warm-up bursts are in ``warmup_drops`` and nowhere else."""

    mode: Mode
    fct_seconds: list[float]
    cct_seconds: list[float]
    drops: int
    retransmits: int
    goodput_mbps: float
    warmup_drops: int
    counters: dict[str, Any] | None = None
    """Of proxyd's daemons, for the counted bursts and the warm-up together."""
    late_p99_ns: int = 0
    """How late the emulator was, from its start to the end of this mode."""
    trace: Trace = field(default_factory=Trace)

    def to_json(self) -> dict[str, Any]:
        """Plain values, seconds to a tenth of a millisecond."""
        fields: dict[str, Any] = {
            "mode": self.mode.name,
            "note": self.mode.note,
            "bursts": len(self.cct_seconds),
            "fct_seconds": rounded(summarise(self.fct_seconds)),
            "cct_seconds": rounded(summarise(self.cct_seconds)),
            "drops": self.drops,
            "retransmits": self.retransmits,
            "goodput_mbps": round(self.goodput_mbps, 1),
            "warmup_drops": self.warmup_drops,
            "emulator_late_p99_seconds": round(self.late_p99_ns / 1e9, 6),
            "all_fct_seconds": [round(value, 4) for value in self.fct_seconds],
        }
        if self.counters is not None:
            fields["counters"] = self.counters
        return fields


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """Seconds to a tenth of a millisecond: finer than the emulator is exact."""
    return {name: round(value, 4) for name, value in figures.items()}


def make_result(
    scenario: Scenario,
    mode: Mode,
    due_ns: Sequence[int],
    arrivals: Sequence[Sequence[Arrival]],
    *,
    warmup: int,
    drops: tuple[int, int, int],
    retransmits: int,
) -> RunResult:
    """The figures of one mode.

    :param due_ns: when each burst was due, warm-up first.
    :param arrivals: of each burst.
    :param drops: at the bottleneck before the first burst, after the warm-up, after the last.
    """
    counted = list(zip(due_ns, arrivals, strict=True))[warmup:]
    spans = [(due, max(arrival.end_ns for arrival in burst)) for due, burst in counted]
    payload_bits = sum(len(burst) for _, burst in counted) * scenario.tensor_bytes * 8
    return RunResult(
        mode=mode,
        fct_seconds=[(arrival.end_ns - due) / 1e9 for due, burst in counted for arrival in burst],
        cct_seconds=[(end - due) / 1e9 for due, end in spans],
        drops=drops[2] - drops[1],
        retransmits=retransmits,
        goodput_mbps=payload_bits / 1e6 / busy_seconds(spans),
        warmup_drops=drops[1] - drops[0],
        trace=Trace(due_ns=[due for due, _ in spans[-3:]], end_ns=[end for _, end in spans[-3:]]),
    )


def comparable(results: Sequence[RunResult]) -> list[RunResult]:
    """Runs with as many bursts as the longest: the p99 of a few transfers is their longest, and says little."""
    most = max((len(result.cct_seconds) for result in results), default=0)
    return [result for result in results if len(result.cct_seconds) == most]


def ratios(scenario: Scenario, results: Sequence[RunResult]) -> dict[str, float]:
    """How proxyd compares: with the ideal, and with the better (lower p99) run of each baseline.

    Empty if proxyd or a baseline is missing.
    """
    by_kind: dict[str, dict[str, float]] = {}
    for result in comparable(results):
        fct = summarise(result.fct_seconds)
        kind = result.mode.congestion_control or "proxyd"
        if kind not in by_kind or fct["p99"] < by_kind[kind]["p99"]:
            by_kind[kind] = fct
    if "proxyd" not in by_kind or len(by_kind) < 2:
        return {}
    ours = by_kind.pop("proxyd")
    ideal = scenario.ideal_cct_seconds
    figures = {"p99_fct_over_ideal_cct": ours["p99"] / ideal, "mean_fct_over_ideal_cct": ours["mean"] / ideal}
    for kind, theirs in sorted(by_kind.items()):
        figures[f"p99_fct_vs_{kind}"] = theirs["p99"] / ours["p99"]
        figures[f"mean_fct_vs_{kind}"] = theirs["mean"] / ours["mean"]
    return {name: round(value, 3) for name, value in figures.items()}
