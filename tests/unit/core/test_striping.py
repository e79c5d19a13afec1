"""How streams share a peer's pace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxyd.core.striping import stream_paces

RTT_NS = 60_000_000


def test_a_fresh_stream_gets_what_slow_start_can_use() -> None:
    warm, cold = stream_paces(50_000_000, [3_000_000, 30_000], RTT_NS)
    assert cold == 2 * 30_000 * 1_000_000_000 // RTT_NS
    assert warm == 50_000_000 - cold


def test_wide_and_unknown_windows_share_equally() -> None:
    assert stream_paces(40_000_000, [9_000_000, 0], RTT_NS) == [20_000_000, 20_000_000]
    assert stream_paces(40_000_000, [10, 10], 0) == [20_000_000, 20_000_000]


@given(
    st.integers(1, 10**10),
    st.lists(st.integers(0, 10**9), min_size=1, max_size=32),
    st.integers(0, 10**9),
)
def test_nothing_of_the_pace_is_lost(pace: int, windows: list[int], rtt_ns: int) -> None:
    paces = stream_paces(pace, windows, rtt_ns)
    assert all(one >= 1 for one in paces)
    assert pace <= sum(paces) <= pace + 2 * len(windows)
