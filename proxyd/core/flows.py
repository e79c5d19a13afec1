"""What one report of one agent adds to its link's totals (:class:`~proxyd.core.tally.Flow`)."""

from __future__ import annotations

from collections.abc import Iterable

from proxyd.core.lanes import Lane
from proxyd.core.messages import Report
from proxyd.core.tally import Flow

STALE_READING_NS = 250_000_000
"""An agent that has bytes in flight reports every few milliseconds. One that doesn't was held up (30 ms and more are
usual on a busy host), and the link's rate isn't reckoned without what it will tell; after so long it is."""


def flow_of(
    lane: Lane, report: Report, lanes: Iterable[Lane], wanted: bool, rtt_ns: int, now_ns: int
) -> tuple[Flow, int]:
    """Take a report into its lane; answers what it adds to the link's totals, and the bytes that it settled.

    :param lanes: all that hold something on the link.
    :param wanted: transfers wait for the link.
    """
    account = lane.account
    under_way = lane.in_flight_bytes > 0
    flow = Flow(
        -lane.arrived_bytes,
        -account.left_bytes,
        -account.retransmits,
        since_ns=lane.counted_ns,
        window_limited=report.limited,
        control_rtt_ns=lane.control_rtt_ns,
        demand=wanted,
        under_way=under_way,
        ack_waited_ns=lane.ack_wait_ns,
    )
    settled = lane.reported(report, now_ns)
    flow.delivered_bytes += lane.arrived_bytes
    flow.sent_bytes += account.left_bytes
    flow.retransmits += account.retransmits
    flow.at_ns = flow.horizon_ns = lane.read_at(
        report.elapsed_ns, bool(flow.delivered_bytes or flow.sent_bytes), now_ns
    )
    flow.ack_wait_ns = lane.ack_wait_ns
    if not under_way:
        flow.ack_waited_ns = flow.ack_wait_ns
    flow.horizon_ns -= flow.ack_wait_ns
    stale_ns = now_ns - max(STALE_READING_NS, rtt_ns // 2)
    for other in lanes:
        if not other.ended:
            in_flight = other.in_flight_bytes
            flow.in_flight_bytes += in_flight
            flow.missing_bytes += in_flight + other.lost_bytes
            if in_flight and stale_ns < other.counted_ns:
                flow.horizon_ns = min(flow.horizon_ns, other.counted_ns - other.ack_wait_ns)
            flow.demand = flow.demand or (other.account.at_host_bytes > 0 and not other.padding)
    return flow, settled
