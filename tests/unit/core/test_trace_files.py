"""Trace files of both forms: what they mean, and one clear error for each kind of what means nothing."""

from __future__ import annotations

import pytest

from proxyd.core.errors import ConfigError
from proxyd.core.trace_files import parse_trace
from proxyd.core.traces import RateTrace

NANOS = 1_000_000_000
MS = 1_000_000


def test_a_series_of_rates() -> None:
    found = parse_trace("# time, rate\n5, 8e9\n5.5 , 0   # an outage\n\n6.0\t4e9\n", "f")
    assert found.remark == ""
    assert found.trace.starts_ns == (0, 500 * MS, 1000 * MS)
    assert found.trace.rates_bytes_per_s == (1_000_000_000, 0, 500_000_000)
    assert found.trace.period_ns == 1500 * MS, "the last rate lasts as long as most"


def test_the_first_line_says_which_form_it_is() -> None:
    assert parse_trace("1\n2\n250\n", "f").trace.period_ns == 250 * MS


def test_the_rate_before_a_gap_holds_and_the_gap_is_told() -> None:
    lines = [(at / 10, 8e9) for at in range(10)] + [(30.0 + at / 10, 4e9) for at in range(10)]
    found = parse_trace("".join(f"{at},{rate}\n" for at, rate in lines), "f")
    assert (found.gaps, found.longest_gap_ns) == (1, 29_100 * MS)
    assert found.remark == "a gap of 29.1 s: the rate before it is taken to hold"
    assert found.trace.rate_at(20 * NANOS) == 1_000_000_000
    assert found.trace.rate_at(30 * NANOS + 50 * MS) == 500_000_000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "f: no opportunity"),
        ("# nothing\n\n", "no opportunity|whole number"),
        ("0, 1e9\n", "f: 1 lines of time and rate; two at least"),
        ("0, 1e9\n1, nan\n", "f:2: nan bit/s is no rate"),
        ("0, 1e9\n1, inf\n", "f:2: inf bit/s is no rate"),
        ("0, 1e9\n1, -5\n", "f:2: -5 bit/s is no rate"),
        ("0, 1e9\n1, 1e30\n", "f:2: 1e[+]30 bit/s is no rate"),
        ("-1, 1e9\n1, 1e9\n", "f:1: -1 s is no time"),
        ("nan, 1e9\n1, 1e9\n", "f:1: nan s is no time"),
        ("0, 1e9\n1e9, 1e9\n", "f:2: 1e[+]09 s is no time .*more than a day|1e[+]09 s is no time"),
        ("0, 1e9\n0, 1e9\n", "f:2: 0 s isn't after"),
        ("1, 1e9\n0.5, 1e9\n", "f:2: 0.5 s isn't after"),
        ("0, 0\n1, 0\n", "f: every rate is 0"),
        ("0, 1e9, 3\n", "f:1: '0, 1e9, 3' is not a time and a rate"),
        ("time,rate\n0, 1e9\n", "f:1: 'time,rate' is not a time and a rate"),
        ("0, 1e9\n7\n", "f:2: '7' is not a time and a rate"),
        ("-3\n4\n", "f:1: -3 ms is before the trace's start"),
        ("0\nnan\n", "f:2: 'nan' is not a whole number"),
        ("0\n0\n", "f: no opportunity after millisecond 0"),
    ],
)
def test_what_is_no_trace_names_its_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_trace(text, "f")


def test_a_trace_begun_elsewhere_is_the_same_round() -> None:
    trace = RateTrace((0, 10, 40), (5 * NANOS, 0, 2 * NANOS), 100)
    for by_ns in (0, 1, 10, 25, 40, 99, 100, 250):
        turned = trace.turned(by_ns)
        assert turned.period_ns == 100
        assert [turned.rate_at(at) for at in range(120)] == [trace.rate_at(at + by_ns) for at in range(120)]
    with pytest.raises(ConfigError, match="with a period"):
        RateTrace((0,), (5,)).turned(3)
