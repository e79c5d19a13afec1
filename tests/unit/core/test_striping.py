"""How streams share a peer's pace, and when their windows are reopened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.core.striping import CALM_RTTS, WindowKeeper, least_pace, stream_paces

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


def test_no_ceiling_makes_two_packets_wait_for_long() -> None:
    assert 2 * 8948 / least_pace(8948, 50_000_000) == pytest.approx(0.025, rel=0.001)
    assert least_pace(1448, 50_000_000) < least_pace(8948, 50_000_000)
    assert least_pace(65_483, 1_000_000) <= 1_000_000 / 32, "what was never fast isn't hurried"


def reopens(keeper: WindowKeeper, now_ns: int, **other: int | bool) -> bool:
    """A stream of 25 MB/s whose window was left at a fifth of what that needs, or as said otherwise."""
    seen = {
        "window_bytes": 300_000,
        "in_slow_start": False,
        "retransmits": 0,
        "recovers": False,
        "pace_bytes_per_s": 25_000_000,
        "rtt_ns": RTT_NS,
    }
    return keeper.reopens(now_ns=now_ns, **{**seen, **other})  # type: ignore[arg-type]


def test_a_window_in_the_way_is_reopened_and_no_other() -> None:
    keeper = WindowKeeper()
    assert reopens(keeper, 0)
    assert not reopens(keeper, 0, in_slow_start=True), "it goes on by itself"
    assert not reopens(keeper, 0, window_bytes=3_100_000), "twice what is in flight: wide"
    assert not reopens(keeper, 0, pace_bytes_per_s=0), "nothing else would hold it back"
    assert not reopens(keeper, 0, rtt_ns=0)


@pytest.mark.parametrize("harm", [{"retransmits": 3}, {"recovers": True}])
def test_after_losses_a_window_is_left_alone_for_a_while(harm: dict[str, int | bool]) -> None:
    keeper = WindowKeeper()
    again = {"retransmits": harm.get("retransmits", 0)}
    assert not reopens(keeper, 0, **harm)
    assert not reopens(keeper, (CALM_RTTS - 1) * RTT_NS, **again)
    assert reopens(keeper, CALM_RTTS * RTT_NS, **again)
