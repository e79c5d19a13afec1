"""A link's series: counts land where they happened, stalls are averaged, and who decides is told apart."""

from __future__ import annotations

import pytest

from proxyd.core.tally import Flow, Tally

MS = 1_000_000
RTT_NS = 60 * MS
RATE = 50_000_000.0
PER_REPORT = 250_000
"""5 ms of it."""


def flow(at_ms: float, delivered: int, sent: int, since_ms: float) -> Flow:
    at_ns = int(at_ms * MS)
    return Flow(delivered, sent, since_ns=int(since_ms * MS), at_ns=at_ns, horizon_ns=at_ns)


def steady(tally: Tally, begin_ms: int, end_ms: int, delivered: int = PER_REPORT, sent: int = PER_REPORT) -> None:
    for at_ms in range(begin_ms, end_ms, 5):
        tally.add(flow(at_ms + 5, delivered, sent, at_ms), RTT_NS, int(RATE))


def test_reports_of_several_agents_add_up_wherever_their_times_lie() -> None:
    tally = Tally(9000)
    tally.add(flow(0, 0, 0, 0), RTT_NS, int(RATE))
    for at_ms in range(0, 200, 5):
        tally.add(flow(at_ms + 5, 150_000, 0, at_ms), RTT_NS, int(RATE))
        tally.add(flow(at_ms + 8.5, 100_000, 0, at_ms + 3.5), RTT_NS, int(RATE))
    tally.settle(200 * MS, RATE, RTT_NS)
    assert tally.delivered_rate(6) == pytest.approx(RATE, rel=0.01)


def test_what_lies_behind_the_horizon_is_not_judged_yet() -> None:
    tally = Tally(9000)
    steady(tally, 0, 100)
    tally.settle(80 * MS, RATE, RTT_NS)
    assert tally.intervals[tally.complete - 1].end_ns <= 80 * MS
    assert tally.judged_ns <= 80 * MS


def test_a_stall_and_its_burst_count_by_their_average() -> None:
    tally = Tally(9000)
    steady(tally, 0, 100)
    steady(tally, 100, 120, delivered=0)
    tally.settle(120 * MS, RATE, RTT_NS)
    assert tally.begins_ns(1) < 100 * MS, "not judged before it is over"
    tally.add(flow(125, 5 * PER_REPORT, PER_REPORT, 120), RTT_NS, int(RATE))
    tally.settle(125 * MS, RATE, RTT_NS)
    assert tally.delivered_rate(5) == pytest.approx(RATE, rel=0.02)
    assert max(one.delivered_bytes for one in tally.intervals) < 1.1 * PER_REPORT


def test_an_outage_is_believed_after_half_a_round_trip() -> None:
    tally = Tally(9000)
    steady(tally, 0, 100)
    steady(tally, 100, 135, delivered=0)
    tally.settle(135 * MS, RATE, RTT_NS)
    assert tally.delivered_rate(6) < 0.1 * RATE


@pytest.mark.parametrize("stall_ms", [35, 60])
def test_what_comes_after_an_outage_is_no_higher_rate(stall_ms: int) -> None:
    tally = Tally(9000)
    steady(tally, 0, 200)
    steady(tally, 200, 200 + stall_ms, delivered=0)
    end_ms = 200 + 2 * stall_ms
    steady(tally, 200 + stall_ms, end_ms, delivered=2 * PER_REPORT)
    tally.settle(end_ms * MS, RATE, RTT_NS)
    rate = tally.delivered_rate(6)
    assert rate > 1.8 * RATE
    assert tally.lasting_rate(rate, RATE, 6, RTT_NS) < 1.1 * RATE
    assert tally.lasting_rate(rate, 0.0, 6, RTT_NS) > 1.4 * RATE, "the whole of it would be believed"


def test_the_link_decides_when_less_arrives_than_was_sent() -> None:
    tally = Tally(9000)
    steady(tally, 0, 200, delivered=PER_REPORT // 2)
    tally.settle(200 * MS, RATE, RTT_NS)
    rate = tally.delivered_rate(6)
    assert tally.link_decides(rate, RATE, 6, RTT_NS)
    assert not tally.link_decides(RATE, RATE, 6, RTT_NS)


def test_cold_senders_explain_themselves() -> None:
    """Little was sent a round trip ago, so little arrives now, whatever is sent now."""
    tally = Tally(9000)
    steady(tally, 0, 60, delivered=0, sent=PER_REPORT // 10)
    steady(tally, 60, 120, delivered=PER_REPORT // 10, sent=PER_REPORT)
    tally.settle(120 * MS, RATE, RTT_NS)
    assert not tally.link_decides(tally.delivered_rate(6), RATE, 6, RTT_NS)


def test_holes_are_what_was_not_sent_of_the_pace() -> None:
    full, holed = Tally(9000), Tally(9000)
    steady(full, 0, 100)
    steady(holed, 0, 60)
    steady(holed, 60, 100, sent=PER_REPORT // 2)
    for tally in (full, holed):
        tally.settle(100 * MS, RATE, RTT_NS)
    assert not full.has_holes(RTT_NS)
    assert holed.has_holes(RTT_NS)


def test_acknowledgements_that_waited_count_when_their_data_arrived() -> None:
    """A queue of the other direction grows by 20 ms within 50 and shrinks again: acknowledgements come at 5/7 of the
    rate and at 5/3 of it, and what they acknowledge arrived at one rate all the time."""
    tally = Tally(9000)
    steady(tally, 0, 100)
    waited_ns, at_ms = 0, 100.0
    for step in range(20):
        wait_ns = (2 * (step + 1) if step < 10 else 2 * (19 - step)) * MS
        since_ms, at_ms = at_ms, at_ms + 5 + (wait_ns - waited_ns) / MS
        late = flow(at_ms, PER_REPORT, PER_REPORT, since_ms)
        late.ack_wait_ns, late.ack_waited_ns, waited_ns = wait_ns, waited_ns, wait_ns
        late.horizon_ns -= wait_ns
        tally.add(late, RTT_NS, int(RATE))
    tally.settle(200 * MS, RATE, RTT_NS)
    counted = [one.delivered_bytes for one in tally.intervals if 100 * MS < one.end_ns <= 195 * MS]
    assert len(counted) >= 18
    assert counted == pytest.approx([PER_REPORT] * len(counted), rel=0.01)
