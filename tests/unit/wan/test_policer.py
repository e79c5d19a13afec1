from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.wan import PolicerSpec, WanError
from proxyd.wan.policer import Policer

packets = st.lists(st.tuples(st.integers(0, 50_000_000), st.integers(40, 9000)), min_size=1, max_size=80)


@given(packets, st.integers(1_000, 10**8), st.integers(9_000, 10**6))
def test_no_stretch_of_time_passes_more_than_the_contract(
    arrivals: list[tuple[int, int]], rate: int, burst_bytes: int
) -> None:
    policer = Policer(PolicerSpec(rate, burst_bytes), 0)
    now, passed = 0, []
    for gap_ns, length in arrivals:
        now += gap_ns
        if policer.admits(length, now):
            passed.append((now, length))
    for first in range(len(passed)):
        total = 0
        for when, length in passed[first:]:
            total += length
            assert total <= burst_bytes + (when - passed[first][0]) * rate / 10**9 + 1


@given(packets, st.integers(9_000, 10**6))
def test_what_keeps_the_contract_always_passes(arrivals: list[tuple[int, int]], burst_bytes: int) -> None:
    policer = Policer(PolicerSpec(10**6, burst_bytes), 0)
    now = 0
    for gap_ns, length in arrivals:
        now += gap_ns + length * 1_000  # at least the time that its tokens take
        assert policer.admits(length, now)


def test_a_refused_packet_costs_no_tokens() -> None:
    policer = Policer(PolicerSpec(1_000, 1_000), 0)
    assert policer.admits(1_000, 0)
    assert not policer.admits(500, 400_000_000)
    assert policer.admits(500, 500_000_000)


def test_an_empty_contract_is_refused() -> None:
    with pytest.raises(WanError, match="policer needs"):
        PolicerSpec(0, 1)
