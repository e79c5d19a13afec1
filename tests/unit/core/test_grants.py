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


def report(link: LinkGranter, session: int, left: int, delivered: int, backlog: int, now_ns: int) -> None:
    lane = link.lanes[session]
    message = Report(
        link=LINK,
        left_bytes=left,
        delivered_bytes=delivered,
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
    ask(link, 1, 8 * MIB)
    ask(link, 2, 8 * MIB)
    step_ns, now_ns = 5 * MS, 0
    granted = granted_bytes(link.decide(0), 1)
    left, history = 0, [0] * 13
    per_step = link.lanes[1].rate_bytes_per_s * step_ns // 1_000_000_000

    def tell(moved: int) -> list[tuple[int, Grant]]:
        """5 ms later: ``moved`` more bytes have left, what left 65 ms ago is delivered."""
        nonlocal now_ns, left, granted
        now_ns += step_ns
        left = min(granted, left + moved)
        history.append(left)
        report(link, 1, left, history[-14], granted - left, now_ns)
        grants = link.decide(now_ns)
        granted += granted_bytes(grants, 1)
        return grants

    grants: list[tuple[int, Grant]] = []
    while not granted_bytes(grants, 2) and granted - left > 0 and 8 * MIB - left > per_step:
        grants = tell(per_step)
    # Its end is near; now nothing leaves for a while. What is handed out meanwhile must not be put off for long.
    for _ in range(3):
        grants = tell(0)
        assert all(grant.start_in_ns < 20 * MS for number, grant in grants if number == 2)
    # It goes on and ends: the successor may start.
    grants = [*tell(per_step), *tell(per_step)]
    assert left == 8 * MIB
    assert granted_bytes(grants, 2) > 0
    assert all(grant.start_in_ns <= step_ns for number, grant in grants if number == 2)
