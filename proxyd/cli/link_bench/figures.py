"""From what was seen on a link to its figures; pure. The simulator's report uses the same names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxyd.cli.link_bench.backlog import Flow
from proxyd.cli.link_bench.scenario import LinkScenario
from proxyd.cli.link_bench.watch import Look
from proxyd.wan import History
from proxyd.wan.burst import summarise

PLOT_STEP_NS = 100_000_000
SETTLED_BDP = 0.1
SETTLED_FOR_RTTS = 1
FILLED_SHARE = 0.9
FILLED_FOR_RTTS = 5
STEP_LOSS_RTTS = 5
ESTIMATE_OVER_NS = 100_000_000
"""An estimate is compared with what the link could carry in this time around it."""


@dataclass
class LinkRun:
    """One mode on one link, as it was seen. Times are CLOCK_MONOTONIC."""

    mode: str
    start_ns: int
    """First order."""
    origin_ns: int
    """The trace's beginning."""
    end_ns: int
    history: History
    flows: list[Flow]
    segments: int = 0
    """First transmissions of all hosts' TCP in the measured time."""
    retransmits: int = 0
    looks: list[Look] = field(default_factory=list)
    counters: dict[str, Any] | None = None
    late_p99_ns: int = 0

    def warm_ns(self, scenario: LinkScenario) -> int:
        """When the measured time begins."""
        return self.start_ns + scenario.warmup_ns


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank; NaN-free: 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1 if share > 0 else 0)] if ordered else 0.0


def link_figures(scenario: LinkScenario, run: LinkRun) -> dict[str, Any]:
    """One mode's figures as plain values. Everything but ``start`` leaves the first ten round trips out."""
    warm_ns, end_ns, history = run.warm_ns(scenario), run.end_ns, run.history
    p50, p99 = history.queue_quantiles([0.5, 0.99], warm_ns, end_ns)
    offered = run.segments + run.retransmits
    counted = [flow.seconds for flow in run.flows if warm_ns <= flow.ordered_ns]
    figures: dict[str, Any] = {
        "mode": run.mode,
        "utilisation": round(history.used(warm_ns, end_ns), 4),
        "carried_mbit_per_s": round(history.carried(warm_ns, end_ns) * 8e3 / (end_ns - warm_ns), 1),
        "queue_p50_bdp": round(p50 / scenario.bdp_bytes, 4),
        "queue_p99_bdp": round(p99 / scenario.bdp_bytes, 4),
        "loss": round(history.loss(warm_ns, end_ns), 6),
        "drops": history.drops(warm_ns, end_ns),
        "retransmit_ratio": round(run.retransmits / offered, 6) if offered else 0.0,
        "fct_seconds": {name: round(value, 4) for name, value in summarise(counted).items()} if counted else None,
        "messages": len(counted),
        "start": start_figures(scenario, run),
        "emulator_late_p99_seconds": round(run.late_p99_ns / 1e9, 6),
    }
    figures |= estimate_figures(scenario, run)
    if scenario.step:
        figures["step"] = step_figures(scenario, run)
    if run.counters is not None:
        figures["counters"] = run.counters
    return figures


def start_figures(scenario: LinkScenario, run: LinkRun) -> dict[str, Any]:
    """The first ten round trips: what start-up cost."""
    warm_ns, history = run.warm_ns(scenario), run.history
    filled_ns = history.filled_ns(run.start_ns, run.end_ns, FILLED_SHARE, FILLED_FOR_RTTS * scenario.rtt_ns)
    return {
        "utilisation": round(history.used(run.start_ns, warm_ns), 4),
        "drops": history.drops(run.start_ns, warm_ns),
        "loss": round(history.loss(run.start_ns, warm_ns), 6),
        "filled_rtts": None if filled_ns is None else round((filled_ns - run.start_ns) / scenario.rtt_ns, 1),
    }


def estimate_figures(scenario: LinkScenario, run: LinkRun) -> dict[str, Any]:
    """How far the coordinator's estimate was from what the link could carry as payload at that moment.

    Empty for modes without a coordinator.
    """
    errors: list[float] = []
    half_ns = ESTIMATE_OVER_NS // 2
    share = scenario.payload_rate_bytes_per_s() / scenario.rate_bytes_per_s
    sources: list[str] = []
    for look in run.looks:
        if look.source not in sources:
            sources.append(look.source)
        if run.warm_ns(scenario) <= look.time_ns <= run.end_ns - half_ns:
            capacity = run.history.capacity(look.time_ns - half_ns, look.time_ns + half_ns)
            true = capacity * 1e9 / ESTIMATE_OVER_NS * share
            errors.append(abs(look.estimate_bytes_per_s / true - 1))
    if not errors:
        return {}
    return {
        "estimate_error_p50": round(percentile(errors, 0.5), 4),
        "estimate_error_p95": round(percentile(errors, 0.95), 4),
        "estimate_sources": sources,
    }


def step_figures(scenario: LinkScenario, run: LinkRun) -> dict[str, Any]:
    """What happened after the step, in round trips; None: never before the end.

    When the queue was back under 0.1 BDP for one of them; when 0.9 of the link began to be used for five in a row; the
    share of packets that was dropped in the first five.
    """
    step_ns = run.origin_ns + int(scenario.step_at_s * 1e9)
    rtt_ns, history = scenario.rtt_ns, run.history
    limit_bytes = int(SETTLED_BDP * scenario.bdp_bytes)
    settled_ns = history.settled_ns(step_ns, run.end_ns, limit_bytes, SETTLED_FOR_RTTS * rtt_ns)
    filled_ns = history.filled_ns(step_ns, run.end_ns, FILLED_SHARE, FILLED_FOR_RTTS * rtt_ns)
    return {
        "queue_under_tenth_bdp_after_rtts": None if settled_ns is None else round((settled_ns - step_ns) / rtt_ns, 1),
        "used_90_percent_after_rtts": None if filled_ns is None else round((filled_ns - step_ns) / rtt_ns, 1),
        "loss_of_5_rtts": round(history.loss(step_ns, min(run.end_ns, step_ns + STEP_LOSS_RTTS * rtt_ns)), 6),
    }


def plot_series(scenario: LinkScenario, run: LinkRun) -> dict[str, list[list[float]]]:
    """What the picture shows, seconds since the first order: Mbit/s of the wire, and the queue in BDP."""
    start_ns, bdp = run.start_ns, scenario.bdp_bytes
    to_wire = scenario.rate_bytes_per_s / scenario.payload_rate_bytes_per_s() * 8 / 1e6
    rates = run.history.series(start_ns, run.end_ns, PLOT_STEP_NS)
    middle_ns = PLOT_STEP_NS // 2
    queue = [
        [round((time_ns - start_ns) / 1e9, 3), round(peak / bdp, 4)]
        for time_ns, peak in zip(run.history.times_ns, run.history.peak_bytes, strict=True)
        if start_ns <= time_ns <= run.end_ns
    ]
    looks = [look for look in run.looks if start_ns <= look.time_ns <= run.end_ns]
    return {
        "capacity": [[round((at - middle_ns - start_ns) / 1e9, 3), round(cap * 8 / 1e6, 2)] for at, _, cap in rates],
        "carried": [[round((at - middle_ns - start_ns) / 1e9, 3), round(used * 8 / 1e6, 2)] for at, used, _ in rates],
        "queue_bdp": queue,
        "estimate": [
            [round((look.time_ns - start_ns) / 1e9, 3), round(look.estimate_bytes_per_s * to_wire, 2)] for look in looks
        ],
        "pace": [
            [round((look.time_ns - start_ns) / 1e9, 3), round(look.pace_bytes_per_s * to_wire, 2)] for look in looks
        ],
    }
