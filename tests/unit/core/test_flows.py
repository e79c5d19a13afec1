"""What a report adds to its link: agents that are held up are waited for, and what they tell late is spread."""

from __future__ import annotations

from proxyd.core.flows import STALE_READING_NS, flow_of
from proxyd.core.ids import AgentName
from proxyd.core.lanes import Lane
from proxyd.core.tally import Tally
from tests.unit.core.test_lanes import MS, PACE, RTT_NS, report


def lane(session: int, left_bytes: int, now_ns: int) -> Lane:
    """An agent with bytes in flight, that has reported."""
    one = Lane(session, AgentName("a", str(session)))
    one.account.grant(1 << 30, PACE, 10**12, 10**12, 0)
    one.granted(1 << 30, PACE, 0, PACE, idle=True)
    message = report(left_bytes, limited=False)
    object.__setattr__(message, "delivered_bytes", 0)
    flow_of(one, message, [one], True, RTT_NS, now_ns)
    return one


def test_rates_are_not_reckoned_without_an_agent_that_is_held_up() -> None:
    held, other = lane(1, 2_000_000, 1000 * MS), lane(2, 500_000, 1000 * MS)
    for ago_ms, waited_for in ((40, True), (200, True), (STALE_READING_NS // MS + 5, False)):
        now_ns = (1000 + ago_ms) * MS
        message = report(500_000 + ago_ms * 1000, limited=False)
        flow, _ = flow_of(other, message, [held, other], True, RTT_NS, now_ns)
        assert (flow.horizon_ns == 1000 * MS) is waited_for, ago_ms


def test_what_is_told_late_happened_all_the_time_since() -> None:
    one = lane(1, 2_000_000, 1000 * MS)
    flow, _ = flow_of(one, report(4_000_000, limited=False), [one], True, RTT_NS, 1060 * MS)
    assert flow.under_way
    tally = Tally(9000)
    flow.since_ns = 1000 * MS
    for at_ms in range(900, 1060, 5):
        tally.add(type(flow)(at_ns=at_ms * MS, since_ns=(at_ms - 5) * MS), RTT_NS, PACE)
    tally.add(flow, RTT_NS, PACE)
    of_last = [one.delivered_bytes for one in tally.intervals if 1000 * MS < one.end_ns <= 1060 * MS]
    assert max(of_last) < 1.2 * flow.delivered_bytes / 12
