"""What a live link must show, as runs with bounds: ``proxyd simulate targets``.

Backlogged senders, no hint, figures after the first ten round trips; each run is one :class:`LinkExperiment` and each
of its bounds one line of the table. The trace is drawn by the seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from proxyd.core.traces import constant, steps, synthetic
from proxyd.sim.experiment import LinkExperiment, LinkResult, run_link
from proxyd.sim.link import NANOS

LEAST_USED = {"constant": 0.95, "calm": 0.95, "moderate": 0.95, "drift": 0.9, "wild": 0.9}
MOST_QUEUED_AT_1_BDP = {"constant": 0.1, "calm": 0.1, "moderate": 0.25, "wild": 0.5}
"""In BDP, exceeded 1 % of the time."""
MOST_LOST = {
    ("constant", 1.0): 0.001,
    ("constant", 0.1): 0.001,
    ("calm", 1.0): 0.001,
    ("calm", 0.1): 0.001,
    ("moderate", 1.0): 0.001,
    ("moderate", 0.1): 0.004,
    ("drift", 1.0): 0.002,
    ("drift", 0.1): 0.002,
    ("wild", 0.1): 0.015,
}
QUEUE_BACK_RTTS = 5
MOST_LOST_WHEN_HALVED = {1.0: 0.01, 0.5: 0.01, 0.1: 0.18}
"""Of what is sent in the five round trips after the step. Perfect knowledge one round trip late loses 0.4 BDP of the
three that are sent then, at a buffer of 0.1 BDP: 0.13 to 0.14 can't be avoided."""
USED_AGAIN_RTTS = 20
BUFFERS_BDP = (1.0, 0.1)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One bound of one run."""

    trace: str
    buffer_bdp: float
    seed: int
    figure: str
    value: float | None
    """None: it never came to that."""
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether it holds."""
        if self.value is None:
            return False
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def text(self) -> str:
        """For people."""
        value = "never" if self.value is None else f"{self.value:.4g}"
        sign = ">=" if self.at_least else "<="
        name = f"{self.trace}, {self.buffer_bdp:g} BDP, seed {self.seed}"
        return f"{'ok  ' if self.met else 'MISS'} {name:<28} {self.figure:<36} {value:>8} {sign} {self.bound:g}"


@dataclasses.dataclass(frozen=True, slots=True)
class TargetLink:
    """What all runs have in common."""

    rate_bytes_per_s: int = 125_000_000
    rtt_ns: int = 60_000_000
    senders: int = 8
    duration_ns: int = 60 * NANOS

    def experiment(self, trace: str, buffer_bdp: float, seed: int) -> LinkExperiment:
        """One run."""
        rate, duration_ns, step_ns = self.rate_bytes_per_s, self.duration_ns, 0
        if trace in ("halves", "doubles"):
            step_ns = duration_ns // 2
            series = steps(rate, [(step_ns, 0.5 if trace == "halves" else 2.0)])
        else:
            series = constant(rate) if trace == "constant" else synthetic(trace, rate, duration_ns, seed)
        return LinkExperiment(
            trace=series,
            rtt_ns=self.rtt_ns,
            buffer_bytes=int(buffer_bdp * rate * self.rtt_ns / NANOS),
            senders=self.senders,
            duration_ns=duration_ns,
            seed=seed,
            nominal_bytes_per_s=rate,
            step_ns=step_ns,
        )


def run_targets(link: TargetLink, seeds: range, traces: tuple[str, ...] = ()) -> Iterator[list[Target]]:
    """Run what the traces (all, when none is named) have bounds for; the bounds of each run as it ends."""
    for seed in seeds:
        for trace in LEAST_USED:
            for buffer_bdp in BUFFERS_BDP:
                if not traces or trace in traces:
                    result = run_link(link.experiment(trace, buffer_bdp, seed))
                    yield list(_steady(trace, buffer_bdp, seed, result))
        for trace in ("halves", "doubles"):
            for buffer_bdp in MOST_LOST_WHEN_HALVED:
                if not traces or trace in traces:
                    result = run_link(link.experiment(trace, buffer_bdp, seed))
                    yield list(_stepped(trace, buffer_bdp, seed, result))


def _steady(trace: str, buffer_bdp: float, seed: int, result: LinkResult) -> Iterator[Target]:
    yield Target(trace, buffer_bdp, seed, "utilisation", result.utilisation, LEAST_USED[trace], at_least=True)
    if buffer_bdp == 1 and trace in MOST_QUEUED_AT_1_BDP:
        most = MOST_QUEUED_AT_1_BDP[trace]
        yield Target(trace, buffer_bdp, seed, "queue_p99_bdp", result.queue_p99_bdp, most, at_least=False)
    if (trace, buffer_bdp) in MOST_LOST:
        yield Target(trace, buffer_bdp, seed, "loss", result.loss, MOST_LOST[trace, buffer_bdp], at_least=False)


def _stepped(trace: str, buffer_bdp: float, seed: int, result: LinkResult) -> Iterator[Target]:
    bounds: dict[str, float] = {"used_90_percent_after_rtts": USED_AGAIN_RTTS}
    if trace == "halves":
        lost = MOST_LOST_WHEN_HALVED[buffer_bdp]
        bounds = {"queue_under_tenth_bdp_after_rtts": QUEUE_BACK_RTTS, "loss_of_5_rtts": lost}
    for figure, bound in bounds.items():
        yield Target(trace, buffer_bdp, seed, figure, result.step[figure], bound, at_least=False)
