"""Sessions, directory, beats and answers of the coordinator machine."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CloseSession, ToAgent
from proxyd.core.errors import ConfigError
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import (
    AgentHello,
    AgentMessage,
    Announce,
    Beat,
    CancelRequest,
    Denied,
    Directory,
    Echo,
    EndpointDown,
    EndpointUp,
    Grant,
    Queued,
    Report,
    Request,
    TransferDone,
    Welcome,
)
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000
SECOND = 1_000 * MS
LINK = LinkName("hami", "shenzhen")
BACK = LinkName("shenzhen", "hami")
FAR = AgentName("shenzhen", "0")
MIB = 1 << 20
T = TypeVar("T")


class Desk:
    """A machine, and all it said, by session."""

    def __init__(
        self, *, owns: tuple[str, ...] = ("*->*",), links: tuple[LinkName, ...] = (LINK,), absent_ns: int = 2 * SECOND
    ) -> None:
        settings = tuple(LinkSettings(link, 50_000_000, 60 * MS, 300_000, mtu_bytes=9000) for link in links)
        config = CoordinatorConfig(name="c", owns=owns, links=settings, absent_ns=absent_ns)
        self.machine = CoordinatorMachine(config, epoch=7)
        self.now_ns = SECOND
        self.said: dict[int, list[object]] = {}
        self.closed: dict[int, str] = {}
        self.answers = False
        """Whether agents answer its beats, at once."""

    def put(self, event: CoordinatorEvent) -> None:
        beats: list[tuple[int, int]] = []
        for effect in self.machine.handle(event, self.now_ns):
            match effect:
                case ToAgent(session, message):
                    assert session not in self.closed, f"{message} on a closed session"
                    self.said.setdefault(session, []).append(message)
                    if self.answers and isinstance(message, Beat) and message.number:
                        beats.append((session, message.number))
                case CloseSession(session, reason):
                    self.closed[session] = reason
        assert self.machine.audit(self.now_ns) == ""
        for session, number in beats:
            self.say(session, Echo(number, 0))

    def open(self, session: int, site: str = "hami", name: str = "", incarnation: int = 0) -> None:
        agent = AgentName(site, name or f"host{session}")
        self.put(SessionOpened(session, AgentHello(agent, incarnation or session, f"10.0.0.{session}:7500")))

    def say(self, session: int, message: AgentMessage) -> None:
        self.put(SessionMessage(session, message))

    def heard(self, session: int, kind: type[T]) -> list[T]:
        return [message for message in self.said.get(session, []) if isinstance(message, kind)]

    def advance(self, by_ns: int) -> None:
        end_ns = self.now_ns + by_ns
        while (due_ns := self.machine.next_deadline_ns()) is not None and due_ns <= end_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.put(TimePassed())
        self.now_ns = end_ns

    def request(self, session: int, sequence: int, nbytes: int, **more: object) -> TransferId:
        transfer = TransferId(session, sequence)
        request = Request(transfer, LINK, FAR, "job", TrafficClass.PIPELINE, nbytes)
        self.say(session, dataclasses.replace(request, **more))  # type: ignore[arg-type]
        return transfer


def report(left: int, delivered: int, backlog: int = 0, leaves_in_ns: int = 0, returned: int = 0) -> Report:
    return Report(
        LINK, left, delivered, returned, 0, 0, backlog, leaves_in_ns, 60 * MS, 60 * MS, 0, 0, limited=backlog > 0
    )


# ---------------------------------------------------------------------------------------- sessions


def test_a_session_is_welcomed_with_links_directory_and_beat() -> None:
    desk = Desk()
    desk.open(1)
    (welcome,) = desk.heard(1, Welcome)
    assert (welcome.coordinator, welcome.epoch, welcome.owns) == ("c", 7, ("*->*",))
    (info,) = welcome.links
    assert (info.link, info.source, info.rtt_ns) == (LINK, "configured", 60 * MS)
    assert desk.heard(1, Directory)[0].full
    assert desk.heard(1, Beat)


def test_beats_come_at_their_pace_and_only_while_somebody_listens() -> None:
    desk = Desk()
    assert desk.machine.next_deadline_ns() is None
    desk.open(1)
    before = len(desk.heard(1, Beat))
    desk.advance(1500 * MS)
    assert len(desk.heard(1, Beat)) - before == 10
    desk.put(SessionClosed(1, "gone"))
    desk.advance(10 * SECOND)
    assert desk.machine.next_deadline_ns() is None


def test_the_newest_session_of_an_agent_wins() -> None:
    desk = Desk()
    desk.open(1, name="gw")
    transfer = desk.request(1, 1, MIB)
    desk.open(2, name="gw", incarnation=99)
    assert "newer session" in desk.closed[1]
    desk.say(1, CancelRequest(transfer, "too late"))  # crosses the close
    assert [agent.session for agent in desk.machine.status(desk.now_ns).agents] == [2]
    assert desk.machine.why(transfer) is None


def test_a_session_that_does_not_begin_with_a_hello_is_closed() -> None:
    desk = Desk()
    desk.put(SessionOpened(1, EndpointUp(EndpointName("job", 0), 1)))
    assert "hello" in desk.closed[1]
    desk.open(2)
    desk.say(2, AgentHello(AgentName("hami", "x"), 1, "a:1"))
    assert "second hello" in desk.closed[2]
    assert desk.machine.status(desk.now_ns).protocol_errors == 2


# --------------------------------------------------------------------------------------- directory


def test_endpoints_reach_every_session_in_batches() -> None:
    desk = Desk()
    desk.open(1)
    desk.open(2, "shenzhen")
    desk.advance(SECOND)
    before = len(desk.heard(2, Directory))
    for rank in range(100):
        desk.say(1, EndpointUp(EndpointName("job", rank), rank + 1))
    desk.advance(20 * MS)
    told = desk.heard(2, Directory)[before:]
    assert len(told) == 2, "the first at once, the other 99 together"
    assert sum(len(part.entries) for part in told) == 100
    assert not any(part.full for part in told)
    desk.open(3, "shenzhen")
    (whole,) = desk.heard(3, Directory)
    assert whole.full
    assert len(whole.entries) == 100
    assert whole.entries[5].data_address == "10.0.0.1:7500"


def test_a_lost_agent_keeps_its_endpoints_for_longer_than_its_lease() -> None:
    """A host that is cut off for a while is not gone: PeerLost comes of its death, or of a long silence."""
    desk = Desk(absent_ns=30 * SECOND)
    desk.open(1)
    desk.open(2, "shenzhen")
    desk.say(1, EndpointUp(EndpointName("job", 0), 5))
    desk.advance(SECOND)
    desk.put(SessionClosed(1, "stream broke"))
    desk.advance(29_990 * MS)
    assert not [gone for part in desk.heard(2, Directory) for gone in part.gone]
    desk.advance(20 * MS)
    ((name, life, reason),) = [gone for part in desk.heard(2, Directory) for gone in part.gone]
    assert (name, life) == (EndpointName("job", 0), 5)
    assert "hami/host1" in reason


def test_an_endpoint_that_ends_is_told_with_its_reason() -> None:
    desk = Desk()
    desk.open(1)
    desk.open(2, "shenzhen")
    desk.say(1, EndpointUp(EndpointName("job", 0), 5))
    desk.say(1, EndpointDown(EndpointName("job", 0), 5, "its process was killed"))
    desk.advance(10 * MS)
    gone = [item for part in desk.heard(2, Directory) for item in part.gone]
    assert gone == [(EndpointName("job", 0), 5, "its process was killed")]


# ---------------------------------------------------------------------------------------- requests


def test_a_request_is_queued_at_once_and_granted() -> None:
    desk = Desk()
    desk.open(1)
    transfer = desk.request(1, 1, 8 * MIB)
    (queued,) = desk.heard(1, Queued)
    assert (queued.transfer, queued.position, queued.starts_in_ns) == (transfer, 0, 0)
    assert 150 * MS < queued.finishes_in_ns < 200 * MS
    grants = desk.heard(1, Grant)
    (link,) = desk.machine.status(desk.now_ns).links
    assert grants[0].epoch == 7
    assert grants[0].rate_bytes_per_s == link.pace_bytes_per_s
    assert grants[0].nbytes % link.chunk_bytes == 0
    assert "first in line" in grants[0].reason
    assert "first in line" in (desk.machine.why(transfer) or "")
    assert sum(grant.nbytes for grant in grants) == link.outstanding_bytes <= link.window_bytes


def test_those_behind_learn_their_place_and_when() -> None:
    desk = Desk()
    desk.open(1)
    desk.open(2)
    desk.request(1, 1, 8 * MIB)
    desk.request(2, 1, 8 * MIB)
    (queued,) = desk.heard(2, Queued)
    assert queued.position == 1
    assert 100 * MS < queued.starts_in_ns < 200 * MS
    assert not desk.heard(2, Grant), "one at a time"


def test_a_repeated_request_changes_nothing() -> None:
    desk = Desk()
    desk.open(1)
    desk.request(1, 1, 64 << 10)
    desk.request(1, 1, 64 << 10)
    assert [grant.nbytes for grant in desk.heard(1, Grant)] == [64 << 10]
    desk.request(1, 1, 128 << 10)  # a chunk has to be sent again
    assert [grant.nbytes for grant in desk.heard(1, Grant)] == [64 << 10, 64 << 10]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"link": LinkName("hami", "tokyo")}, "does not own link hami->tokyo"),
        ({"link": BACK}, "must lead from site hami"),
        ({"link": LinkName("hami", "hami")}, "must lead from site hami"),
        ({"wanted_bytes": 0}, "0 bytes"),
        ({"wanted_bytes": -5}, "-5 bytes"),
        ({"wanted_bytes": 1 << 60}, "can't be granted"),
        ({"traffic": 17}, "traffic class 17"),
    ],
)
def test_what_cannot_be_served_is_denied_with_the_reason(more: dict[str, object], told: str) -> None:
    desk = Desk(owns=("hami->shenzhen", "shenzhen->*"))
    desk.open(1)
    desk.request(1, 1, MIB, **more)
    (denied,) = desk.heard(1, Denied)
    assert told in denied.reason
    assert not desk.heard(1, Grant)
    desk.request(1, 2, MIB)
    assert desk.heard(1, Grant), "the next one is right"


def test_an_owned_link_without_figures_gets_the_safe_start() -> None:
    desk = Desk(links=())
    desk.open(1)
    desk.open(2, "shenzhen")
    infos = {info.link: info for beat in desk.heard(1, Beat) for info in beat.links}
    assert infos[LINK].source == "default"
    assert infos[LINK].rtt_ns == 50 * MS
    assert infos[LINK].rate_bytes_per_s < 12_500_000
    desk.request(1, 1, MIB)
    assert desk.heard(1, Grant)


def test_an_announced_message_keeps_its_place() -> None:
    desk = Desk()
    for session in (1, 2, 3):
        desk.open(session)
    desk.request(1, 1, 64 * MIB)  # the link is taken
    desk.say(2, Announce(41, LINK, "job", TrafficClass.PIPELINE, MIB, 5 * MS))
    desk.request(3, 1, MIB)
    desk.request(2, 1, MIB, announcement=41)
    waiting = [item.transfer for item in desk.machine.status(desk.now_ns).links[0].transfers]
    assert waiting == [TransferId(1, 1), TransferId(2, 1), TransferId(3, 1)]


def test_a_cancelled_waiter_makes_room_and_returned_bytes_open_the_window() -> None:
    desk = Desk()
    desk.open(1)
    desk.open(2)
    transfer = desk.request(1, 1, 64 * MIB)
    granted = sum(grant.nbytes for grant in desk.heard(1, Grant))
    desk.request(2, 1, MIB)
    assert not desk.heard(2, Grant)
    desk.say(1, CancelRequest(transfer, "timed out"))
    assert not desk.heard(2, Grant), "what it was granted may still be leaving"
    desk.say(1, report(0, 0, returned=granted))
    assert desk.heard(2, Grant)
    assert desk.heard(2, Grant)[0].start_in_ns == 0


def test_done_transfers_are_counted_by_class() -> None:
    desk = Desk()
    desk.open(1)
    transfer = desk.request(1, 1, 64 << 10, traffic=TrafficClass.SYNC)
    desk.say(1, report(64 << 10, 64 << 10))
    desk.say(1, TransferDone(transfer, LINK, TrafficClass.SYNC, 64 << 10, True, 0))
    desk.say(1, TransferDone(TransferId(1, 9), LINK, TrafficClass.BULK, -5, True, 0))
    (link,) = desk.machine.status(desk.now_ns).links
    assert link.totals.class_bytes == [0, 64 << 10, 0]
    assert link.totals.delivered_bytes == 64 << 10
    assert link.outstanding_bytes == 0


# ------------------------------------------------------------------------- hand-over and silence


def test_the_successor_starts_when_the_last_byte_has_left() -> None:
    desk = Desk()
    desk.open(1)
    desk.open(2)
    desk.request(1, 1, 256 << 10)
    desk.request(2, 1, MIB)
    assert not desk.heard(2, Grant)
    desk.now_ns += 5 * MS
    desk.say(1, report(176 << 10, 0, backlog=80 << 10, leaves_in_ns=2 * MS))
    (grant, *_) = desk.heard(2, Grant)
    assert grant.start_in_ns == 2 * MS - MS  # less the round trip that the news and the answer take
    assert "has left" in grant.reason
    (link,) = desk.machine.status(desk.now_ns).links
    assert link.granted_rate_bytes_per_s <= link.pace_bytes_per_s
    assert [lane.leaving for lane in link.lanes] == [True, False]


def test_a_holder_that_hangs_frees_the_link_when_its_time_is_over_and_not_before() -> None:
    desk = Desk()
    desk.open(1)
    desk.open(2)
    desk.request(1, 1, 64 * MIB)
    desk.request(2, 1, MIB)
    ttl_ns = desk.heard(1, Grant)[0].ttl_ns
    desk.advance(ttl_ns)
    assert not desk.heard(2, Grant)
    desk.advance(SECOND - ttl_ns)
    assert desk.heard(2, Grant)
    desk.advance(2 * SECOND)
    (link,) = desk.machine.status(desk.now_ns).links
    assert link.totals.forgiven_bytes > 0


def test_an_agent_out_of_reach_keeps_its_fallback_share_for_its_lease() -> None:
    desk = Desk()
    desk.answers = True
    desk.open(1)
    desk.open(2)
    desk.advance(SECOND)
    shares = dict(desk.heard(1, Beat)[-1].fallback)
    assert 0 < shares[LINK] * 2 <= 50_000_000 * 0.8
    desk.put(SessionClosed(1, "stream broke"))
    desk.request(2, 1, 64 * MIB)
    (link,) = desk.machine.status(desk.now_ns).links
    assert desk.heard(2, Grant)[0].rate_bytes_per_s == link.pace_bytes_per_s - shares[LINK]
    desk.advance(300 * MS)
    assert dict(desk.heard(2, Beat)[-1].fallback)[LINK] <= shares[LINK] + 1
    desk.advance(2 * SECOND)
    desk.say(2, report(0, 0, returned=sum(grant.nbytes for grant in desk.heard(2, Grant))))
    assert desk.heard(2, Grant)[-1].rate_bytes_per_s == link.pace_bytes_per_s
    assert dict(desk.heard(2, Beat)[-1].fallback)[LINK] == pytest.approx(0.8 * 49_711_111, rel=0.001)


def test_an_urgent_class_goes_first_at_the_next_slot() -> None:
    desk = Desk()
    desk.open(1)
    desk.open(2)
    desk.request(1, 1, 640 * MIB, traffic=TrafficClass.BULK)
    granted = sum(grant.nbytes for grant in desk.heard(1, Grant))
    desk.request(2, 1, MIB)
    desk.now_ns += 5 * MS
    desk.say(1, report(granted - (100 << 10), 0, backlog=100 << 10, leaves_in_ns=2 * MS))
    assert desk.heard(2, Grant)
    assert sum(grant.nbytes for grant in desk.heard(1, Grant)) == granted


def test_barriers_share_the_link_equally() -> None:
    desk = Desk()
    for session in (1, 2, 3, 4):
        desk.open(session)
    for session in (2, 3, 4):
        desk.request(session, 1, 8 * MIB, traffic=TrafficClass.SYNC)
    (link,) = desk.machine.status(desk.now_ns).links
    assert desk.heard(2, Grant)[0].rate_bytes_per_s == link.pace_bytes_per_s, "alone at first"
    left = sum(grant.nbytes for grant in desk.heard(2, Grant))
    desk.now_ns += 10 * MS
    desk.say(2, report(left, 0))
    rates = {session: desk.heard(session, Grant)[-1].rate_bytes_per_s for session in (2, 3, 4)}
    assert max(rates.values()) - min(rates.values()) <= 1, "whole bytes"
    assert 0 <= link.pace_bytes_per_s - sum(rates.values()) <= 2
    assert "3 agents at once" in desk.heard(3, Grant)[0].reason


# ----------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "wrong",
    [
        {"beat_ns": 0},
        {"lease_ns": 100 * MS},
        {"control_rtt_ns": -1},
        {"links": (LinkSettings(LINK, 50_000_000, MS), LinkSettings(LINK, 50_000_000, MS))},
        {"links": (LinkSettings(LinkName("a", "a"), 50_000_000, MS),)},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        CoordinatorConfig(**wrong)  # type: ignore[arg-type]


def test_links_that_are_configured_but_not_owned_are_left_alone() -> None:
    desk = Desk(owns=("shenzhen->*",), links=(LINK, BACK))
    assert [link.link for link in desk.machine.status(0).links] == [BACK]
