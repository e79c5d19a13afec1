"""Rate traces: the integral and its inverse, the classes' own figures, steps, and files."""

from __future__ import annotations

import random
import statistics

import pytest

from proxyd.core.errors import ConfigError
from proxyd.core.traces import (
    NANOS,
    SAMPLE_NS,
    TRACE_CLASSES,
    RateTrace,
    constant,
    from_opportunities,
    parse_opportunities,
    steps,
    synthetic,
)

MBIT = 1_000_000 // 8
MS = 1_000_000


@pytest.mark.parametrize(
    "trace",
    [
        constant(1_234_567),
        steps(50_000_000, [(MS, 0.5), (3 * MS, 2.0)]),
        RateTrace([0, 5 * MS, 6 * MS], [1000 * MBIT, 0, 7], 10 * MS, origin_ns=123),
        synthetic("wild", 10 * MBIT, 3 * NANOS, 1),
        synthetic("calm", 100_000 * MBIT, 3 * NANOS, 1),
    ],
)
def test_time_for_is_the_exact_inverse_of_bytes_by(trace: RateTrace) -> None:
    rng = random.Random(3)
    for _ in range(300):
        position = rng.randrange(1, 3 * trace.mean_bytes_per_s)
        at_ns = trace.time_for(position)
        assert trace.bytes_by(at_ns) >= position
        assert trace.bytes_by(at_ns - 1) < position


def test_an_answer_does_not_depend_on_the_ones_before() -> None:
    trace = synthetic("moderate", 100 * MBIT, 2 * NANOS, 5)
    times = random.Random(1).sample(range(7 * NANOS), 200)
    fresh = [synthetic("moderate", 100 * MBIT, 2 * NANOS, 5).bytes_by(at) for at in times]
    assert [trace.bytes_by(at) for at in times] == fresh


def test_a_service_across_a_step_takes_both_rates() -> None:
    trace = steps(1_000_000, [(NANOS, 0.5)])
    assert trace.bytes_by(3 * NANOS) == 2_000_000
    assert trace.time_for(1_250_000) == NANOS * 3 // 2
    assert (trace.rate_at(NANOS - 1), trace.rate_at(NANOS)) == (1_000_000, 500_000)


def test_a_period_repeats_and_an_origin_shifts() -> None:
    trace = RateTrace([0, NANOS], [100, 300], 2 * NANOS)
    assert [trace.bytes_by(at * NANOS) for at in range(5)] == [0, 100, 400, 500, 800]
    later = trace.restarted(7 * NANOS)
    assert [later.bytes_by(at * NANOS) for at in (6, 7, 8, 9)] == [0, 0, 100, 400]
    assert later.series(NANOS, 4 * NANOS) == [100, 300, 100, 300]


@pytest.mark.parametrize("kind", TRACE_CLASSES)
@pytest.mark.parametrize("rate", [10 * MBIT, 1000 * MBIT, 100_000 * MBIT])
def test_a_class_has_the_mean_that_was_asked_for_and_its_seed_repeats(kind: str, rate: int) -> None:
    trace = synthetic(kind, rate, 60 * NANOS, 1)
    assert trace.mean_bytes_per_s == pytest.approx(rate, rel=1e-4)
    assert trace.series(SAMPLE_NS, 60 * NANOS) == synthetic(kind, rate, 60 * NANOS, 1).series(SAMPLE_NS, 60 * NANOS)
    assert trace.series(SAMPLE_NS, 60 * NANOS) != synthetic(kind, rate, 60 * NANOS, 2).series(SAMPLE_NS, 60 * NANOS)


def correlation(series: list[int], lag: int) -> float:
    return statistics.correlation(series[:-lag], series[lag:])


@pytest.mark.parametrize(("kind", "cv", "tau_s"), [("calm", 0.08, 2.0)])
def test_a_lognormal_class_has_its_spread_and_its_memory(kind: str, cv: float, tau_s: float) -> None:
    series = synthetic(kind, 1000 * MBIT, 8000 * NANOS, 1).series(SAMPLE_NS, 8000 * NANOS)
    assert statistics.pstdev(series) / statistics.fmean(series) == pytest.approx(cv, rel=0.08)
    assert correlation(series, int(tau_s * NANOS) // SAMPLE_NS) == pytest.approx(0.368, abs=0.06)  # 1/e


@pytest.mark.parametrize(("kind", "every_s", "length_s", "to"), [("moderate", 30, 2, 0.4), ("wild", 20, 3, 0.25)])
def test_dips_come_as_often_as_they_should(kind: str, every_s: float, length_s: float, to: float) -> None:
    dips = TRACE_CLASSES[kind].dips
    assert dips is not None
    factors = dips.factors(200_000, 0.1, random.Random(1))
    share = factors.count(to) / len(factors)
    assert set(factors) == {1.0, to}
    assert share == pytest.approx(1 - 2.718281828 ** (-length_s / every_s), rel=0.08)  # dips may overlap


def test_the_real_class_has_the_three_figures_of_its_model() -> None:
    seconds = 10_000
    series = synthetic("real", 1000 * MBIT, seconds * NANOS, 1).series(NANOS, seconds * NANOS)
    tens = [series[at : at + 10] for at in range(0, seconds, 10)]
    within = statistics.fmean(statistics.pstdev(ten) / statistics.fmean(ten) for ten in tens)
    median = statistics.median(series)
    assert statistics.pstdev(series) / statistics.fmean(series) == pytest.approx(0.19, abs=0.015)
    assert within == pytest.approx(0.12, abs=0.012)
    assert sum(rate < median / 2 for rate in series) / seconds == pytest.approx(0.026, abs=0.006)


def test_a_file_keeps_its_bytes_and_its_period() -> None:
    text = "".join(f"{ms}\n" for ms in range(1, 101)) + "".join(f"{ms}\n" for ms in range(102, 251, 2))
    trace = from_opportunities(parse_opportunities(text, "link.trace"))
    assert trace.period_ns == 250 * MS
    assert trace.bytes_by(250 * MS) == pytest.approx(175 * 1504, abs=3)
    assert trace.rate_at(50 * MS) == 1504 * 1000
    assert trace.rate_at(150 * MS) == 1504 * 500
    assert trace.scaled(10 * MBIT).mean_bytes_per_s == pytest.approx(10 * MBIT, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1\nx\n", "f:2: 'x' is not a whole number"),
        ("5\n4\n", "f:2: 4 ms is before"),
        ("0\n\n", "no opportunity"),
        ("1\n86400001\n", "f:2: 86400001 ms is more than a day"),
        (f"{10**4000}\n", "f:1: .* is more than a day"),
    ],
)
def test_a_wrong_file_names_its_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_opportunities(text, "f")


def test_what_is_no_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trace class 'stormy'"):
        synthetic("stormy", MBIT, NANOS, 1)
    with pytest.raises(ConfigError, match="silence for ever"):
        RateTrace([0, 1], [5, 0])
    with pytest.raises(ConfigError, match="one after the other"):
        RateTrace([0, 5, 5], [1, 1, 1])
