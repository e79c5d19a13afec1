"""How streams share a peer's pace, and when their windows are reopened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.core.striping import CALM_RTTS, Stripe, Stripes, WindowKeeper, least_pace, stream_paces

MS = 1_000_000
RTT_NS = 60 * MS


def test_a_fresh_stream_gets_what_slow_start_can_use() -> None:
    warm, cold = stream_paces(50_000_000, [3_000_000, 30_000], RTT_NS)
    assert cold == 2 * 30_000 * 1_000_000_000 // RTT_NS
    assert warm == 50_000_000 - cold


def test_a_window_that_slow_start_has_left_gets_what_it_holds() -> None:
    """At twice that it would leave the other half of its share to nobody."""
    warm, small = stream_paces(50_000_000, [3_000_000, 300_000], RTT_NS, [False, False])
    assert 1 < small / (300_000 * 1_000_000_000 // RTT_NS) < 1.1, "a little more, or it would never be the limit"
    assert warm == 50_000_000 - small
    assert stream_paces(50_000_000, [3_000_000, 300_000], RTT_NS, [False, True])[1] == 2 * 300_000 * 10**9 // RTT_NS


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


def test_streams_with_nothing_to_send_leave_their_part_to_the_others() -> None:
    windows = [3_000_000, 3_000_000, 3_000_000, 300_000]
    paces = stream_paces(60_000_000, windows, RTT_NS, busy=[True, True, False, False])
    assert paces[:2] == [30_000_000, 30_000_000]
    assert paces[2:] == [20_000_000, 20_000_000], "what it may begin with, as one of three"
    alone = stream_paces(60_000_000, windows, RTT_NS, [False] * 4, [False, False, False, True])
    assert alone == [30_000_000, 30_000_000, 30_000_000, 60_000_000]
    one, two, cold, _ = stream_paces(60_000_000, windows[:2] + [30_000, 0], RTT_NS, busy=[True, True, True, False])
    assert cold <= 2 * 30_000 * 10**9 // RTT_NS + 1
    assert one == two >= (60_000_000 - cold) // 2
    nobody = [False] * 4
    assert stream_paces(60_000_000, windows, RTT_NS, busy=nobody) == stream_paces(60_000_000, windows, RTT_NS)


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


# ------------------------------------------------------------------------------------------- a stripe that is slow


class Path:
    """Streams that carry so much each, at equal ceilings."""

    def __init__(self, *rates: int) -> None:
        self.rates = list(rates)
        self.stripes = [Stripe() for _ in rates]
        self.acked = [0.0 for _ in rates]
        self.together = Stripes()
        self.now_ns = 0

    def go_on(self, for_ns: int, *, busy: bool = True) -> list[int]:
        """Who rests at its end. Streams that keep up with their ceilings have nothing waiting now and then."""
        for _ in range(for_ns // (5 * MS)):
            self.now_ns += 5 * MS
            for number, (stripe, rate) in enumerate(zip(self.stripes, self.rates, strict=True)):
                takes = busy and not stripe.rests(self.now_ns)
                self.acked[number] += rate * 0.005 if takes else 0
                stripe.seen(int(self.acked[number]), 1_000_000, busy=takes and 0 < rate < 900_000)
            self.together.look(self.stripes, 60 * MS, self.now_ns)
        return [number for number, stripe in enumerate(self.stripes) if stripe.rests(self.now_ns)]


def test_a_stripe_at_a_tenth_rests_and_is_tried_again_ever_more_seldom() -> None:
    path = Path(1_000_000, 100_000, 1_000_000, 1_000_000)
    assert path.go_on(1_000 * MS) == [1]
    tried = 0
    for _ in range(200):
        tried += path.go_on(100 * MS) == []
    assert 3 <= tried / 4 <= 7, "for some 0.3 to 0.5 s after 1, 2, 4, 8 s"
    path.rates[1] = 1_000_000
    path.go_on(31_000 * MS)
    assert path.go_on(2_000 * MS) == [], "it has mended"


def test_a_slow_path_makes_nobody_rest() -> None:
    path = Path(100_000, 80_000, 120_000, 60_000)
    assert path.go_on(3_000 * MS) == []


def test_who_alone_has_something_left_does_not_lag() -> None:
    path = Path(1_000_000, 600_000)
    assert path.go_on(500 * MS) == []
    path.rates[0] = 0  # it has nothing to send any more
    assert path.go_on(3_000 * MS) == []


def test_a_stripe_whose_ceiling_is_low_may_carry_little() -> None:
    stripes, together = [Stripe(), Stripe()], Stripes()
    for step in range(1, 400):
        stripes[0].seen(step * 50_000, 10_000_000, busy=False)
        stripes[1].seen(step * 4_000, 1_000_000, busy=True)  # its window is small
        together.look(stripes, 60 * MS, step * 5 * MS)
        assert not any(stripe.rests(step * 5 * MS) for stripe in stripes)
