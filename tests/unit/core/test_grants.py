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


def granter(*, live: bool = False) -> LinkGranter:
    settings = LinkSettings(LINK, RATE, 60 * MS, 300_000, live=live)
    return LinkGranter(settings, epoch=1, control_rtt_ns=MS, lease_ns=2_000 * MS)


def ask(link: LinkGranter, session: int, nbytes: int) -> None:
    agent = AgentName("a", str(session))
    link.lane(session, agent)
    waiting = Waiting(
        TransferId(session, 1), session, LINK, AgentName("b", "0"), "job", TrafficClass.PIPELINE, session, 0
    )
    link.queue.want(waiting, nbytes)


def report(
    link: LinkGranter,
    session: int,
    left: int,
    delivered: int,
    backlog: int,
    now_ns: int,
    leaves_in_ns: int | None = None,
    back_queue_ns: int = 0,
    sacked: int = 0,
) -> None:
    lane = link.lanes[session]
    if leaves_in_ns is None:
        leaves_in_ns = backlog * 1_000_000_000 // lane.rate_bytes_per_s
    message = Report(
        link=LINK,
        left_bytes=left,
        delivered_bytes=delivered,
        returned_bytes=0,
        unscheduled_bytes=0,
        fallback_bytes=0,
        backlog_bytes=backlog,
        leaves_in_ns=leaves_in_ns,
        srtt_ns=60 * MS + back_queue_ns,
        min_rtt_ns=60 * MS,
        retransmits=0,
        delivery_rate_bytes_per_s=RATE,
        limited=False,
        back_queue_ns=back_queue_ns,
        sacked_bytes=sacked,
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


class Sender:
    """Session 1 sends at its rate, and hears from its peer a round trip (and ``late_ns``) later."""

    def __init__(self, link: LinkGranter, late_ns: int = 0) -> None:
        self.link = link
        self.now_ns = 0
        self.left = 0
        self.granted = 0
        self._late_ns = late_ns
        self._history = [0] * (13 + late_ns // (5 * MS))
        self.others: list[tuple[int, Grant]] = []
        self.hole: int | None = None
        """A packet is lost here: what arrives behind it can't be delivered."""
        self._decide()

    def _decide(self) -> None:
        grants = [one for one in self.link.decide(self.now_ns) if isinstance(one[1], Grant)]
        self.granted += granted_bytes(grants, 1)
        self.others += [one for one in grants if one[0] != 1]

    def step(self, leaves_in_ns: int | None = None) -> None:
        """5 ms go by. ``leaves_in_ns``: nothing leaves, and the rest only then."""
        self.now_ns += 5 * MS
        moved = self.link.lanes[1].rate_bytes_per_s * 5 // 1000 if leaves_in_ns is None else 0
        self.left = min(self.granted, self.left + moved)
        self._history.append(self.left)
        arrived, backlog = self._history.pop(0), self.granted - self.left
        delivered = arrived if self.hole is None else min(arrived, self.hole)
        sacked = arrived - delivered
        report(self.link, 1, self.left, delivered, backlog, self.now_ns, leaves_in_ns, self._late_ns, sacked)
        self._decide()


def test_a_last_chunk_that_creeps_out_of_a_cold_stream_holds_nobody_up() -> None:
    """Also when it was said to leave before: with several streams that is where a link of 360 ms idled for seconds."""
    link = granter(live=True)
    ask(link, 1, 8 * MIB)
    ask(link, 2, 8 * MIB)
    sender = Sender(link)
    while not link.lanes[1].leaving:
        sender.step()
    sender.others.clear()
    assert sender.granted - sender.left > 0
    for _ in range(4):
        sender.step(leaves_in_ns=900 * MS)
    assert granted_bytes(sender.others, 2) > 0
    assert all(grant.start_in_ns < 5 * MS for _, grant in sender.others)


def test_what_is_acknowledged_late_has_a_place_in_the_window() -> None:
    """A queue of the other direction keeps acknowledgements; with a window of a round trip the link would idle."""
    windows = []
    for late_ns in (0, 40 * MS):
        link = granter(live=True)
        ask(link, 1, 64 * MIB)
        sender = Sender(link, late_ns)
        for _ in range(60):
            sender.step()
        windows.append(link.window_bytes)
    assert windows[1] - windows[0] > RATE * 35 // 1000


def test_what_has_arrived_behind_a_hole_keeps_nothing_from_being_sent() -> None:
    """A lost packet comes again a round trip later, and until then nothing behind it is delivered: with all of that in
    the window a link of 360 ms lay idle for half a second after each loss, and the estimate fell to a third."""
    link = granter(live=True)
    ask(link, 1, 64 * MIB)
    sender = Sender(link)
    for _ in range(60):
        sender.step()
    before, window, sender.hole = sender.left, link.window_bytes, sender.left
    for _ in range(60):
        sender.step()
        assert link.outstanding_bytes <= link.window_bytes
    assert sender.left - before > 0.95 * 60 * link.lanes[1].rate_bytes_per_s * 5 // 1000
    sender.hole = None
    for _ in range(30):
        sender.step()
    assert link.window_bytes < 1.1 * window, "mended"
