"""Figures of ``proxyd bench predict`` from made-up messages, and what its options mean."""

from __future__ import annotations

import pytest

from proxyd.cli.bench_predict import cases_of
from proxyd.cli.link_bench.predict import WORD_NS, Told, case_figures
from proxyd.core.errors import ConfigError

MS = 1_000_000
ONE_WAY_NS = 30 * MS


def told(*beliefs: tuple[int, int], posted_ms: int = 100, granted_ms: int = 110, arrived_ms: int = 310) -> Told:
    """Times in milliseconds; beliefs as (when, predicted arrival)."""
    points = [(when * MS, at * MS) for when, at in beliefs]
    return Told(0, posted_ms * MS, granted_ms * MS, arrived_ms * MS, points)


def test_each_moment_takes_what_was_believed_then() -> None:
    word_ms = WORD_NS // MS
    one = told((31, 400), (120, 390), (139 + word_ms, 350), (200, 330), (300, 310))
    errors = one.errors_ns(ONE_WAY_NS)
    assert errors == {"announce": 90 * MS, "grant": 40 * MS, "half-way": 20 * MS}


def test_what_was_not_predicted_is_told_apart_from_what_was_wrong() -> None:
    assert told().errors_ns(ONE_WAY_NS) == {"announce": None, "grant": None, "half-way": None}
    late = told((120, 300), (250, 310)).errors_ns(ONE_WAY_NS)
    assert late["announce"] is None, "it was posted already"
    assert late["grant"] == -10 * MS
    figures = case_figures(1, 1000, [told(), told((31, 331))], ONE_WAY_NS)
    announce = figures["moments"]["announce"]
    assert (figures["messages"], announce["predicted"]) == (2, 1)
    assert announce["error_p50_s"] == pytest.approx(0.021)
    assert announce["relative_p50"] == pytest.approx(0.1)
    assert announce["bias_p50_s"] == pytest.approx(0.021)


def test_errors_to_both_sides_count_and_their_bias_is_kept() -> None:
    figures = case_figures(2, 1000, [told((31, 290)), told((31, 290)), told((31, 340))], ONE_WAY_NS)
    announce = figures["moments"]["announce"]
    assert (announce["error_p50_s"], announce["error_p95_s"], announce["bias_p50_s"]) == (0.02, 0.03, -0.02)


def test_cases() -> None:
    assert cases_of("1x1MiB, 2x64KiB") == [(1, 1 << 20), (2, 64 << 10)]


@pytest.mark.parametrize("text", ["", "8MiB", "0x1MiB", "17x1MiB", "ax1MiB"])
def test_what_is_no_case_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is no case"):
        cases_of(text)
