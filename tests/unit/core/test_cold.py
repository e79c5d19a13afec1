"""How long a cold window takes to send what it is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.core.cold import MAX_LEAVES_NS, leaving_ns

MS = 1_000_000
RTT = 60 * MS
RATE = 50_000_000
"""A round trip holds 3 MB."""


def test_a_wide_or_unknown_window_leaves_the_pace_alone() -> None:
    for window in (0, 3_000_000, 10_000_000):
        assert leaving_ns(1_000_000, RATE, window, RTT, grows=True) == 20 * MS


def test_slow_start_doubles_from_round_trip_to_round_trip() -> None:
    # 100 + 200 + 400 kB in three round trips, the last 300 kB at twice 800 kB per round trip.
    assert leaving_ns(1_000_000, RATE, 100_000, RTT, grows=True) == 3 * RTT + RTT * 300_000 // 1_600_000
    # 1 + 2 MB, then it is wide enough: the rest goes at the pace.
    assert leaving_ns(8_000_000, RATE, 1_000_000, RTT, grows=True) == 2 * RTT + 100 * MS


def test_a_window_that_was_cut_stays() -> None:
    assert leaving_ns(1_000_000, RATE, 100_000, RTT, grows=False) == 10 * RTT


def test_a_prediction_has_an_end() -> None:
    assert leaving_ns(10**12, RATE, 1000, RTT, grows=False) == MAX_LEAVES_NS


@given(st.integers(1, 10**10), st.integers(1, 10**10), st.integers(0, 10**9), st.integers(0, 10**10), st.booleans())
def test_never_faster_than_the_pace_and_no_slower_with_a_wider_window(
    nbytes: int, rate: int, window: int, rtt_ns: int, grows: bool
) -> None:
    took = leaving_ns(nbytes, rate, window, rtt_ns, grows)
    assert min(MAX_LEAVES_NS, nbytes * 10**9 // rate) <= took <= MAX_LEAVES_NS
    if window:
        assert leaving_ns(nbytes, rate, 4 * window, rtt_ns, grows) <= took + rtt_ns


@pytest.mark.parametrize("nbytes", [0, 1])
def test_nothing_takes_no_time(nbytes: int) -> None:
    assert leaving_ns(nbytes, RATE, 100_000, RTT, grows=True) < MS
