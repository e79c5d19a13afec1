"""Hand-over between two lanes, one report at a time."""

from __future__ import annotations

from proxyd.core.allocation import Waiting
from proxyd.core.bandwidth import LinkSettings
from proxyd.core.grants import LinkGranter
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import Grant, Report
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000
RATE = 50_000_000
LINK = LinkName("a", "b")
MIB = 1 << 20


def granter() -> LinkGranter:
    settings = LinkSettings(LINK, RATE, 60 * MS, 300_000)
    return LinkGranter(settings, epoch=1, control_rtt_ns=MS, lease_ns=2_000 * MS)


def ask(link: LinkGranter, session: int, nbytes: int) -> None:
    agent = AgentName("a", str(session))
    link.lane(session, agent)
    waiting = Waiting(
        TransferId(session, 1), session, LINK, AgentName("b", "0"), "job", TrafficClass.PIPELINE, session, 0
    )
    link.queue.want(waiting, nbytes)


def report(link: LinkGranter, session: int, left: int, backlog: int, now_ns: int) -> None:
    lane = link.lanes[session]
    message = Report(
        link=LINK,
        left_bytes=left,
        delivered_bytes=left,
        returned_bytes=0,
        unscheduled_bytes=0,
        fallback_bytes=0,
        backlog_bytes=backlog,
        leaves_in_ns=backlog * 1_000_000_000 // lane.rate_bytes_per_s,
        srtt_ns=60 * MS,
        min_rtt_ns=60 * MS,
        retransmits=0,
        delivery_rate_bytes_per_s=RATE,
        limited=False,
    )
    link.report(lane, message, now_ns)


def granted_bytes(grants: list[tuple[int, Grant]], session: int) -> int:
    return sum(grant.nbytes for number, grant in grants if number == session)


def test_a_sender_that_stalls_at_its_end_delays_its_successor_only_until_it_goes_on() -> None:
    link = granter()
    ask(link, 1, 512 << 10)
    ask(link, 2, 8 * MIB)
    first = link.decide(0)
    assert granted_bytes(first, 1) == 512 << 10
    report(link, 1, 300 << 10, 212 << 10, 6 * MS)
    link.decide(6 * MS)
    # Almost over by its own account, so its turn is passed on; then nothing leaves for two reports.
    later = link.decide(9 * MS)
    for now_ns in (12 * MS, 18 * MS):
        report(link, 1, 300 << 10, 212 << 10, now_ns)
        later += link.decide(now_ns)
    assert max((grant.start_in_ns for _, grant in later), default=0) < 20 * MS, "no start beyond what can be known"
    # It goes on and ends: the successor is granted at once.
    report(link, 1, 512 << 10, 0, 23 * MS)
    now = link.decide(23 * MS)
    assert granted_bytes(now, 2) + granted_bytes(later, 2) > 0
    assert all(grant.start_in_ns <= MS for _, grant in now)
