"""Announcements at the coordinator: far agents are granted ahead, and plans that turn out otherwise cost a slot."""

from __future__ import annotations

import random

import pytest

from proxyd.core.announced import FORGET_NS, MOST_AHEAD, TTL_NS, Place, Places, ahead_bytes
from proxyd.core.ids import LinkName
from proxyd.core.messages import Announce, Beat, CancelRequest, Echo, Grant, Request, TransferDone
from proxyd.wire.envelope import TrafficClass

from .test_coordinator import FAR, LINK, MIB, MS, Desk, report

RTT_NS = 60 * MS


def desk_with(*sessions: int, far: bool = True) -> Desk:
    """Sessions whose control round trip has been measured."""
    desk = Desk()
    for session in sessions:
        desk.open(session)
    desk.advance(150 * MS)
    beats = {session: desk.heard(session, Beat)[-1].number for session in sessions}
    desk.advance(RTT_NS if far else MS)
    for session, number in beats.items():
        desk.say(session, Echo(number, 0))
    return desk


def announce(desk: Desk, session: int, number: int, nbytes: int, ready_ms: int, **more: object) -> None:
    link = more.get("link", LINK)
    traffic = more.get("traffic", TrafficClass.PIPELINE)
    desk.say(session, Announce(number, link, "job", traffic, nbytes, ready_ms * MS))  # type: ignore[arg-type]


def ahead(desk: Desk, session: int) -> list[Grant]:
    return [grant for grant in desk.heard(session, Grant) if grant.announcement]


def test_the_grant_arrives_a_moment_before_the_data() -> None:
    desk = desk_with(1)
    announce(desk, 1, 41, 8 * MIB, 500)
    desk.advance(500 * MS - RTT_NS - 2 * MS)
    assert not ahead(desk, 1)
    desk.advance(2 * MS)
    (grant,) = ahead(desk, 1)
    assert (grant.announcement, tuple(grant.transfer), grant.ttl_ns) == (41, (0, 0), TTL_NS)
    pace = desk.machine.status(desk.now_ns).links[0].pace_bytes_per_s
    assert grant.nbytes >= pace * RTT_NS // 10**9, "what goes out until the request can be answered"
    assert grant.nbytes < pace * (RTT_NS + 25 * MS) // 10**9


def test_the_message_takes_over_what_was_granted_ahead() -> None:
    desk = desk_with(1)
    announce(desk, 1, 41, 8 * MIB, 50)
    desk.advance(50 * MS)
    first = sum(grant.nbytes for grant in ahead(desk, 1))
    transfer = desk.request(1, 1, 8 * MIB, announcement=41)
    left = 0
    for _ in range(300):
        desk.advance(10 * MS)
        granted = sum(grant.nbytes for grant in desk.heard(1, Grant))
        left = granted
        desk.say(1, report(left, left))
        if granted == 8 * MIB:
            break
    assert sum(grant.nbytes for grant in desk.heard(1, Grant)) == 8 * MIB, "no byte twice"
    later = [grant for grant in desk.heard(1, Grant) if not grant.announcement]
    assert sum(grant.nbytes for grant in later) == 8 * MIB - first
    assert {grant.transfer for grant in later} == {transfer}


def test_near_agents_ask_in_time_and_keep_their_place() -> None:
    desk = desk_with(1, far=False)
    announce(desk, 1, 41, 8 * MIB, 10)
    desk.advance(100 * MS)
    assert not ahead(desk, 1)


def test_one_that_never_comes_is_granted_once() -> None:
    desk = desk_with(1)
    announce(desk, 1, 41, 8 * MIB, 40)
    desk.advance(60 * MS)
    (grant,) = ahead(desk, 1)
    desk.say(1, report(0, 0, returned=grant.nbytes))
    desk.advance(5_000 * MS)
    assert len(ahead(desk, 1)) == 1
    assert desk.machine.status(desk.now_ns).links[0].outstanding_bytes == 0
    assert desk.machine.status(desk.now_ns).links[0].waiting == 0


def test_what_expired_is_granted_again_when_it_comes_late() -> None:
    desk = desk_with(1)
    announce(desk, 1, 41, MIB, 40)
    desk.advance(60 * MS)
    (grant,) = ahead(desk, 1)
    desk.say(1, report(0, 0, returned=grant.nbytes))
    # The agent's count: what went back is wanted anew.
    transfer = desk.request(1, 1, MIB + grant.nbytes, announcement=41)
    assert sum(grant.nbytes for grant in desk.heard(1, Grant) if grant.transfer == transfer) == MIB


def test_a_session_has_few_unproven_at_a_time() -> None:
    desk = desk_with(1)
    for number in range(1, 8):
        announce(desk, 1, number, MIB, 40)
    desk.advance(60 * MS)
    granted = ahead(desk, 1)
    assert {grant.announcement for grant in granted} == set(range(1, MOST_AHEAD + 1))
    desk.request(1, 1, MIB, announcement=1)
    desk.say(1, report(MIB, MIB, returned=sum(grant.nbytes for grant in granted) - MIB))
    desk.advance(MS)
    assert {grant.announcement for grant in ahead(desk, 1)} == set(range(1, MOST_AHEAD + 2)), "one has proven right"


def test_a_withdrawn_one_leaves_the_queue() -> None:
    desk = desk_with(1, 2)
    desk.request(2, 1, 64 * MIB)  # the link is taken
    announce(desk, 1, 41, MIB, 5)
    desk.advance(10 * MS)
    assert desk.machine.status(desk.now_ns).links[0].waiting == 2
    desk.say(1, Announce(41, LINK, "", TrafficClass.BULK, 0, 0))
    assert desk.machine.status(desk.now_ns).links[0].waiting == 1
    announce(desk, 1, 42, MIB, 500)
    desk.say(1, Announce(42, LINK, "", TrafficClass.BULK, 0, 0))
    desk.advance(1_000 * MS)
    assert not ahead(desk, 1)


def test_a_lost_session_takes_its_announcements_along() -> None:
    desk = desk_with(1, 2)
    desk.request(2, 1, 64 * MIB)
    announce(desk, 1, 41, MIB, 5)
    announce(desk, 1, 42, MIB, 500)
    desk.advance(10 * MS)
    desk.open(3, name="host1", incarnation=9)  # the same agent anew
    desk.advance(2_000 * MS)
    assert not [grant for grant in desk.heard(3, Grant) if grant.announcement]


@pytest.mark.parametrize(
    "kind",
    [{"traffic": TrafficClass.SYNC}, {"job": "other"}],
    ids=["another class", "another job"],
)
def test_a_message_of_another_kind_than_announced_goes_on_with_what_it_holds(kind: dict[str, object]) -> None:
    desk = desk_with(1)
    announce(desk, 1, 41, 8 * MIB, 40)
    desk.advance(60 * MS)
    first = sum(grant.nbytes for grant in ahead(desk, 1))
    transfer = desk.request(1, 1, first + MIB, announcement=41, **kind)
    desk.say(1, report(first, first))
    later = [grant for grant in desk.heard(1, Grant) if grant.transfer == transfer]
    assert sum(grant.nbytes for grant in later) == MIB


def test_links_of_others_are_not_granted_ahead() -> None:
    desk = desk_with(1)
    announce(desk, 1, 41, MIB, 5, link=LinkName("shenzhen", "hami"))
    announce(desk, 1, 42, MIB, 5, link=LinkName("hami", "nowhere"))
    desk.advance(100 * MS)
    assert not ahead(desk, 1)


def test_places_are_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxyd.core.announced.MOST_PLACES", 3)
    places = Places()
    for number in range(5):
        places.add(number, Place(number), 0)
    assert len(places) == 3
    assert [places.take(number) is not None for number in range(5)] == [False, False, True, True, True]


def test_unproven_ones_count_for_a_second_only() -> None:
    desk = desk_with(1)
    for number in range(1, MOST_AHEAD + 2):
        announce(desk, 1, number, MIB, 40)
    desk.advance(60 * MS)
    desk.say(1, report(0, 0, returned=sum(grant.nbytes for grant in ahead(desk, 1))))
    for _ in range(FORGET_NS // (150 * MS) + 1):  # it hears beats and answers them: it is there
        desk.advance(150 * MS)
        desk.say(1, Echo(desk.heard(1, Beat)[-1].number, 0))
    assert {grant.announcement for grant in ahead(desk, 1)} == set(range(1, MOST_AHEAD + 2))


def test_ahead_is_whole_chunks_and_no_more_than_the_message() -> None:
    assert ahead_bytes(100, 10**9, 60 * MS, MIB, 64 << 10) == 100
    assert ahead_bytes(1 << 30, 10**8, 60 * MS, MIB, 64 << 10) % (64 << 10) == 0
    assert ahead_bytes(1 << 30, 1, 0, 1, 64 << 10) == 64 << 10


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_announced_and_comes_the_books_close(seed: int) -> None:
    """Agents that announce, ask, cancel and report at random. ``Desk`` audits after each event."""
    chance = random.Random(seed)
    desk = desk_with(1, 2)
    books = {session: {"granted": 0, "left": 0, "returned": 0} for session in (1, 2)}
    seen = dict.fromkeys((1, 2), 0)
    numbers: dict[int, list[int]] = {1: [], 2: []}

    def settle(session: int, share: float) -> None:
        desk.say(session, Echo(desk.heard(session, Beat)[-1].number, 0))  # else it would be out of reach
        grants = desk.heard(session, Grant)
        book = books[session]
        book["granted"] += sum(grant.nbytes for grant in grants[seen[session] :])
        seen[session] = len(grants)
        held = book["granted"] - book["left"] - book["returned"]
        lost = int(held * share) if chance.random() < 0.3 else 0
        book["returned"] += lost
        book["left"] += int((held - lost) * share)
        desk.say(session, report(book["left"], book["left"], returned=book["returned"]))

    for counter in range(1, 81):
        session = chance.choice((1, 2))
        match chance.randrange(6):
            case 0:
                announce(desk, session, counter, chance.choice([0, MIB, 9 * MIB]), chance.choice([0, 30, 100]))
                numbers[session].append(counter)
            case 1:
                number = chance.choice([0, *numbers[session]])
                desk.request(session, counter, chance.choice([100, MIB, 9 * MIB]), announcement=number)
            case 2 if counter > 3:
                cancelled = Request(
                    desk.request(session, counter, MIB), LINK, FAR, "job", TrafficClass.PIPELINE, MIB
                ).transfer
                desk.say(session, CancelRequest(cancelled, "test"))
                desk.say(session, TransferDone(cancelled, LINK, TrafficClass.PIPELINE, MIB, False, 0))
            case 3:
                desk.advance(chance.choice([1, 10, 100]) * MS)
            case _:
                settle(session, chance.random())
    for _ in range(400):
        for session in (1, 2):
            settle(session, 1.0)
        desk.advance(20 * MS)
    assert desk.machine.status(desk.now_ns).links[0].outstanding_bytes == 0
    assert desk.machine.waiting == 0
