"""What can't be used by those who hear nothing, or go on by themselves, the others are told to leave: at once, and for
all that they hold."""

from __future__ import annotations

import random

import pytest

from proxyd.core.allocation import Waiting
from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import ToAgent
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage, SessionOpened, TimePassed
from proxyd.core.grants import LinkGranter
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.link_status import link_problem
from proxyd.core.messages import AgentHello, AgentMessage, Beat, Carried, Echo, Grant, Pace, Report, Request
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000
RATE = 50_000_000
LINK = LinkName("a", "b")
FAR = AgentName("b", "0")
MIB = 1 << 20


class Desk:
    """A coordinator with agents at one site; its rules are looked at after every event."""

    def __init__(self, *, live: bool = False, epoch: int = 7) -> None:
        links = (LinkSettings(LINK, RATE, 60 * MS, 300_000, live=live),)
        self.machine = CoordinatorMachine(CoordinatorConfig(links=links), epoch)
        self.now_ns = 1_000 * MS
        self.said: list[tuple[int, object]] = []
        self.answering: dict[int, bool] = {}
        """Sessions, and whether they answer beats."""

    def put(self, event: CoordinatorEvent) -> None:
        before = len(self.said)
        for effect in self.machine.handle(event, self.now_ns):
            if isinstance(effect, ToAgent):
                self.said.append((effect.session, effect.message))
        assert self.machine.audit(self.now_ns) == ""
        for session, message in self.said[before:]:
            if isinstance(message, Beat) and message.number and self.answering.get(session):
                self.say(session, Echo(message.number, 0))

    def say(self, session: int, message: AgentMessage) -> None:
        self.put(SessionMessage(session, message))

    def open(self, session: int, host: int, epoch_seen: int = 0, *, life: int = 0, answers: bool = True) -> None:
        self.answering[session] = answers
        hello = AgentHello(AgentName("a", str(host)), life or session, "a:1", epoch_seen)
        self.put(SessionOpened(session, hello))

    def close(self, session: int) -> None:
        del self.answering[session]
        self.put(SessionClosed(session, "gone"))

    def request(self, session: int, sequence: int, nbytes: int) -> None:
        self.say(session, Request(TransferId(session, sequence), LINK, FAR, "j", TrafficClass.SYNC, nbytes))

    def settle(self, session: int) -> None:
        """All that it was granted has arrived."""
        nbytes = self.granted_bytes(session)
        self.say(session, Report(LINK, nbytes, nbytes, 0, 0, 0, 0, 0, 60 * MS, 60 * MS, 0, 0, limited=False))

    def granted_bytes(self, session: int) -> int:
        return sum(m.nbytes for to, m in self.said if to == session and isinstance(m, Grant))

    def advance(self, by_ns: int) -> None:
        end_ns = self.now_ns + by_ns
        while (due_ns := self.machine.next_deadline_ns()) is not None and due_ns <= end_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.put(TimePassed())
        self.now_ns = end_ns

    def rate(self, session: int) -> int:
        """At which it was told to send last."""
        return next(
            m.rate_bytes_per_s for to, m in reversed(self.said) if to == session and isinstance(m, Grant | Pace)
        )

    @property
    def pace(self) -> int:
        return next(link.pace_bytes_per_s for link in self.machine.status(self.now_ns).links if link.link == LINK)

    def fallback(self, session: int) -> int:
        beats = [m for to, m in self.said if to == session and isinstance(m, Beat)]
        return dict(beats[-1].fallback).get(LINK, 0)


@pytest.mark.parametrize("nbytes", [MIB // 2, 64 * MIB], ids=["all granted", "more to come"])
def test_who_holds_grants_hears_of_a_session_that_ended(nbytes: int) -> None:
    desk = Desk()
    desk.open(1, 1)
    desk.open(2, 2)
    desk.advance(500 * MS)
    kept = desk.fallback(2)
    desk.request(1, 1, nbytes)
    assert desk.rate(1) == desk.pace
    desk.close(2)
    assert desk.rate(1) == desk.pace - kept
    desk.open(3, 2)
    desk.settle(1)
    desk.request(1, 2, MIB)
    assert desk.rate(1) == desk.pace, "it is back, and sends under grants"


def test_who_holds_grants_hears_of_an_agent_that_is_out_of_reach() -> None:
    desk = Desk()
    desk.open(1, 1)
    desk.open(2, 2)
    desk.advance(500 * MS)
    kept = desk.fallback(2)
    desk.answering[2] = False
    desk.advance(300 * MS)
    desk.request(1, 1, 64 * MIB)
    assert desk.rate(1) == desk.pace
    desk.advance(400 * MS)
    assert desk.rate(1) == desk.pace - kept


def test_a_coordinator_that_learns_late_that_it_succeeds_another_tells_whom_it_granted_all() -> None:
    desk = Desk(epoch=500)
    desk.open(1, 1)
    desk.request(1, 1, 64 * MIB)
    whole = desk.pace
    assert desk.rate(1) == whole
    desk.open(2, 2, epoch_seen=400)
    assert desk.rate(1) == desk.pace == whole // 6


def test_a_lane_that_is_leaving_when_its_session_ends_may_go_on_all_the_same() -> None:
    desk = Desk()
    desk.open(1, 1)
    desk.open(2, 2)
    desk.advance(500 * MS)
    kept = desk.fallback(2)
    desk.request(2, 1, MIB // 8)
    desk.request(1, 1, 64 * MIB)  # starts when lane 2 has left
    desk.settle(2)
    desk.close(2)
    desk.settle(1)
    assert desk.rate(1) == desk.pace - kept


@pytest.mark.parametrize("closed", [True, False], ids=["lost before", "replaced"])
def test_an_agent_with_a_new_session_counts_with_what_it_holds(closed: bool) -> None:
    desk = Desk()
    desk.open(1, 1, life=7)
    desk.advance(500 * MS)
    whole = desk.fallback(1)
    if closed:
        desk.close(1)
    desk.open(2, 1, life=7, answers=False)
    desk.answering.pop(1, None)
    desk.open(3, 3)
    desk.advance(300 * MS)
    assert desk.fallback(3) == 0, "agent 1 has not answered yet: it may hold all"
    desk.answering[2] = True
    desk.advance(300 * MS)
    assert [desk.fallback(session) for session in (2, 3)] == [whole // 2] * 2


def test_an_agent_that_was_started_anew_holds_nothing() -> None:
    desk = Desk()
    desk.open(1, 1)
    desk.advance(500 * MS)
    whole = desk.fallback(1)
    desk.open(3, 3)
    desk.close(1)
    desk.open(2, 1, answers=False)
    desk.advance(300 * MS)
    assert [desk.fallback(session) for session in (2, 3)] == [whole // 2] * 2


def granter(*, live: bool) -> LinkGranter:
    settings = LinkSettings(LINK, RATE, 60 * MS, 300_000, live=live)
    return LinkGranter(settings, epoch=1, control_rtt_ns=MS, lease_ns=2_000 * MS)


def ask(link: LinkGranter, session: int, nbytes: int, sequence: int = 1) -> None:
    link.lane(session, AgentName("a", str(session)))
    traffic = TrafficClass.SYNC
    link.queue.want(Waiting(TransferId(session, sequence), session, LINK, FAR, "j", traffic, session, 0), nbytes)


@pytest.mark.parametrize("nbytes", [MIB // 2, 64 * MIB], ids=["all granted", "more to come"])
def test_a_reserve_above_a_pace_that_fell_leaves_next_to_nothing(nbytes: int) -> None:
    link = granter(live=True)
    ask(link, 1, nbytes)
    link.decide(0)
    link.session_ended(2, AgentName("a", "2"), 20_000_000, MS)
    link.estimator.pace_bytes_per_s = 15_000_000
    told = [message for _, message in link.decide(MS)]
    assert isinstance(told[-1], Pace)
    assert told[-1].rate_bytes_per_s == 15_000_000 // 64
    assert link_problem(link, MS) == ""
    link.estimator.pace_bytes_per_s = 45_000_000
    told = [message for _, message in link.decide(2 * MS)]
    assert told[-1].rate_bytes_per_s == 25_000_000, "and what there is again when the pace has risen"


@pytest.mark.parametrize("live", [False, True])
def test_parts_do_not_shrink_from_decision_to_decision(live: bool) -> None:
    link = granter(live=live)
    link.session_ended(3, AgentName("a", "3"), 20_000_000, 0)
    ask(link, 1, MIB // 4)
    ask(link, 2, 64 * MIB)
    for now_ns in range(0, 10 * MS, MS):
        link.decide(now_ns)
        rates = [lane.account.binding_rate(now_ns) for lane in link.active_lanes if lane.hears and not lane.leaving]
        assert sum(rates) >= 0.9 * (link.pace_bytes_per_s(now_ns) - 20_000_000)
        assert link_problem(link, now_ns) == ""


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_to_agents_the_others_are_told(seed: int) -> None:
    rng = random.Random(seed)
    desk = Desk(live=seed % 2 == 1, epoch=500)
    hosts: dict[int, int] = {}
    sequence = 0
    for session in range(1, 60):
        host = rng.randrange(5)
        if host not in hosts or rng.random() < 0.3:
            desk.open(session, host, epoch_seen=rng.choice((0, 0, 400)))
            desk.answering.pop(hosts.get(host, 0), None)
            hosts[host] = session
            if rng.random() < 0.5:
                unsent, rate = rng.choice(((0, 0), (300_000, 10_000_000)))
                desk.say(session, Carried(LINK, 10_000_000, 40_000_000, unsent, rate, 0, 0))
        for _ in range(rng.randrange(6)):
            if not hosts:
                break
            host, of_host = rng.choice(sorted(hosts.items()))
            what = rng.random()
            if what < 0.4:
                sequence += 1
                desk.request(of_host, sequence, rng.choice((MIB // 8, MIB, 16 * MIB)))
            elif what < 0.7:
                desk.settle(of_host)
            elif what < 0.8:
                desk.close(of_host)
                del hosts[host]
            else:
                desk.answering[of_host] = rng.random() < 0.4
            desk.advance(rng.choice((0, 3, 50, 400)) * MS)
