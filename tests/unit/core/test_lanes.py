"""When a lane counts as slow: several round trips in a row, not one hiccup."""

from __future__ import annotations

import pytest

from proxyd.core.ids import AgentName, LinkName
from proxyd.core.lanes import SLOW_EPOCHS, SLOW_EPOCHS_UNEXPLAINED, Lane
from proxyd.core.messages import Report

MS = 1_000_000
RTT_NS = 60 * MS
PACE = 50_000_000


def report(left_bytes: int, *, limited: bool, backlog_bytes: int = 1 << 20) -> Report:
    return Report(
        link=LinkName("a", "b"),
        left_bytes=left_bytes,
        delivered_bytes=left_bytes,
        returned_bytes=0,
        unscheduled_bytes=0,
        fallback_bytes=0,
        backlog_bytes=backlog_bytes,
        leaves_in_ns=20 * MS,
        srtt_ns=RTT_NS,
        min_rtt_ns=RTT_NS,
        retransmits=0,
        delivery_rate_bytes_per_s=PACE,
        limited=limited,
    )


class Meter:
    """A lane that was granted plenty, fed one round trip at a time."""

    def __init__(self) -> None:
        self.lane = Lane(1, AgentName("a", "0"))
        self.lane.account.grant(1 << 30, PACE, 10**12, 10**12, 0)
        self.lane.granted(1 << 30, PACE, 0, MS, idle=True)
        self.now_ns = 0
        self.left = 0

    def round_trip(self, rate: int, *, limited: bool = True) -> str:
        self.now_ns += RTT_NS
        self.left += rate * RTT_NS // 10**9
        message = report(self.left, limited=limited)
        self.lane.account.report(message, self.now_ns)
        return self.lane.measure(message, self.now_ns, RTT_NS, PACE)


@pytest.mark.parametrize(("limited", "needed"), [(True, SLOW_EPOCHS), (False, SLOW_EPOCHS_UNEXPLAINED)])
def test_a_lane_is_slow_after_several_slow_round_trips(limited: bool, needed: int) -> None:
    meter = Meter()
    meter.round_trip(PACE)
    for _ in range(needed - 1):
        assert meter.round_trip(PACE // 2, limited=limited) == ""
        assert meter.lane.ceiling_bytes_per_s == 0
    assert "sends only" in meter.round_trip(PACE // 2, limited=limited)
    assert PACE // 2 <= meter.lane.ceiling_bytes_per_s <= PACE


def test_hiccups_between_good_round_trips_change_nothing() -> None:
    meter = Meter()
    for _ in range(10):
        assert meter.round_trip(PACE // 2) == ""
        assert meter.round_trip(PACE) == ""
    assert meter.lane.ceiling_bytes_per_s == 0


def test_a_ceiling_that_no_longer_binds_is_lifted() -> None:
    meter = Meter()
    for _ in range(SLOW_EPOCHS):
        meter.round_trip(PACE // 2)
    assert meter.lane.ceiling_bytes_per_s > 0
    for _ in range(3):
        meter.round_trip(PACE)
    assert meter.lane.ceiling_bytes_per_s == 0


def test_a_narrow_window_is_a_ceiling_with_the_report_that_tells_it() -> None:
    lane = Lane(1, AgentName("a", "0"))
    lane.see_window(1_500_000, RTT_NS, PACE, 0)
    assert 0.5 * PACE <= lane.ceiling_bytes_per_s <= 0.65 * PACE
    lane.see_window(1_500_000, RTT_NS, PACE, 0)
    assert lane.ceiling_bytes_per_s == pytest.approx(0.5 * PACE, rel=0.03), "one that doesn't grow is taken at its word"
    lane.see_window(1_518_000, RTT_NS, PACE, 0)
    assert lane.ceiling_bytes_per_s < 0.52 * PACE, "two packets more in a round trip: that isn't slow start"
    lane.see_window(1_600_000, RTT_NS, PACE, 0)
    assert lane.ceiling_bytes_per_s > 0.65 * PACE, "slow start: it may have grown before its next report"
    lane.see_window(6_000_000, RTT_NS, PACE, 0)
    assert lane.ceiling_bytes_per_s == 0, "wide: no ceiling"
    lane.see_window(0, RTT_NS, PACE, 0)
    assert lane.ceiling_bytes_per_s == 0, "not known: no ceiling"


def test_late_reports_are_placed_by_their_agents_clock() -> None:
    lane = Lane(1, AgentName("a", "0"))
    assert lane.read_at(5 * MS, True, 1000 * MS) == 1000 * MS
    assert lane.read_at(5 * MS, True, 1025 * MS) == pytest.approx(1005 * MS, abs=MS // 5), "20 ms late"
    assert lane.read_at(5 * MS, True, 1025 * MS) == pytest.approx(1010 * MS, abs=MS // 3), "with the one before"
    assert lane.read_at(5 * MS, True, 1012 * MS) <= 1012 * MS, "never in the future"
    assert lane.read_at(900 * MS, True, 5000 * MS) == 5000 * MS, "after a long silence the report itself counts"
