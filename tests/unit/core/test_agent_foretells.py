"""Predictions: of what is announced, of what is posted, and of what changes under way."""

from __future__ import annotations

import dataclasses

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.announcing import ANNOUNCEMENTS_PER_CHANNEL, OVERDUE_NS
from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import Announce, Pace, Queued
from proxyd.wire import peer as wire
from proxyd.wire.envelope import Envelope, TrafficClass

from .agent_world import COORDINATOR, INFO, LINK, MS, World

MIB = 1 << 20
RATE = INFO.rate_bytes_per_s


def two_sites() -> World:
    world = World("a/0", "b/0")
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect()
    return world


def envelope(nbytes: int, tag: int = 0) -> Envelope:
    return Envelope("job", 0, 1, "", tag, TrafficClass.PIPELINE, nbytes, "uint8", (nbytes,))


def announce(world: World, nbytes: int, ready_ms: int, *, tag: int = 0) -> None:
    world.put("a/0", ev.SendAnnounced(envelope(nbytes, tag), ready_ms * MS))


def foretold(world: World) -> list[wire.Foretell]:
    return [told.frame for told in world.tells(fx.TellForetold)]


def near(value_ns: int, wanted_ns: int) -> bool:
    return abs(value_ns - wanted_ns) <= 100_000  # the clock of this world moves only when it is told


def test_what_is_announced_is_foretold_to_its_receiver() -> None:
    world = two_sites()
    announce(world, MIB, 50, tag=7)
    [told] = world.tells(fx.TellForetold)
    assert told.endpoint == EndpointName("job", 1)
    assert (told.frame.src_rank, told.frame.tag, told.frame.nbytes) == (0, 7, MIB)
    assert near(told.frame.finish_in_ns, 50 * MS + MIB * 10**9 // RATE)
    assert told.frame.uncertainty_ns > 0


def test_one_that_is_ready_behind_others_waits_for_the_link() -> None:
    world = two_sites()
    for tag in range(3):
        announce(world, 5 * MIB, 10, tag=tag)
    announce(world, MIB, 1, tag=9)  # earlier than those announced before
    each_ns = 5 * MIB * 10**9 // RATE
    first, second, third, early = [told.finish_in_ns for told in foretold(world)]
    assert near(first, 10 * MS + each_ns)
    assert near(second, first + each_ns)
    assert near(third, second + each_ns)
    assert near(early, 1 * MS + MIB * 10**9 // RATE)


def test_what_waits_at_the_coordinator_goes_first() -> None:
    world = two_sites()
    info = dataclasses.replace(INFO, waiting_bytes=10 * MIB)
    world.connect(infos=(info,), epoch=2)
    announce(world, MIB, 10)
    assert near(foretold(world)[-1].finish_in_ns, 11 * MIB * 10**9 // RATE)


def test_a_posted_message_is_no_longer_in_the_way_of_announced_ones() -> None:
    world = two_sites()
    announce(world, MIB, 0, tag=1)
    first = world.post("a/0", 1, 0, 1, MIB, tag=1)
    world.grant("a/0", first, MIB)
    world.delivered("a/0", "b/0")
    announce(world, MIB, 10, tag=2)
    assert near(foretold(world)[-1].finish_in_ns, 10 * MS + MIB * 10**9 // RATE)


def test_an_announcement_whose_message_does_not_come_is_withdrawn_and_counted() -> None:
    world = two_sites()
    announce(world, MIB, 50, tag=3)
    [asked] = world.asks(Announce)
    world.advance(50 + OVERDUE_NS // MS - 1)
    assert len(foretold(world)) == 1
    world.advance(2)
    assert [told.finish_in_ns == 0 for told in foretold(world)] == [False, True]
    assert foretold(world)[0].number == foretold(world)[1].number
    gone = world.asks(Announce)[-1]
    assert (gone.announcement, gone.nbytes) == (asked.announcement, 0)
    assert dict(world.agent("a/0").status(world.now_ns).announced)["unposted"] == 1
    assert world.agent("a/0").sender.asking.announcer.announced.overdue_ns() is None
    world.post("a/0", 1, 0, 1, MIB, tag=3)
    assert dict(world.agent("a/0").status(world.now_ns).announced)["fulfilled"] == 0, "the next one is not it"


def test_the_end_of_a_trainer_withdraws_what_it_had_announced() -> None:
    world = two_sites()
    announce(world, MIB, 50, tag=3)
    world.put("a/0", ev.ClientDetached(EndpointName("job", 0), 100, "closed", True))
    assert foretold(world)[-1].finish_in_ns == 0


def test_more_announcements_than_a_channel_keeps_withdraw_the_oldest() -> None:
    world = two_sites()
    for _ in range(ANNOUNCEMENTS_PER_CHANNEL + 2):
        announce(world, 1000, 0)
    withdrawn = [told.number for told in foretold(world) if not told.finish_in_ns]
    assert withdrawn == [1, 2]


def test_an_agent_believes_only_those_where_the_source_lives() -> None:
    world = World("a/0", "b/0", "c/0")
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect()
    frame = wire.Foretell(1, "job", 0, 1, "", 0, MIB, 5, 5)
    world.put("b/0", ev.PeerFrame(AgentName("c", "0"), True, wire.NO_TRANSFER, frame))
    assert not foretold(world)
    unknown = wire.Foretell(1, "job", 7, 1, "", 0, MIB, 5, 5)
    world.put("b/0", ev.PeerFrame(AgentName("a", "0"), True, wire.NO_TRANSFER, unknown))
    assert not foretold(world)
    elsewhere = wire.Foretell(1, "job", 0, 9, "", 0, MIB, 5, 5)
    world.put("b/0", ev.PeerFrame(AgentName("a", "0"), True, wire.NO_TRANSFER, elsewhere))
    assert not foretold(world)


def test_a_prediction_counts_what_earlier_grants_of_the_message_send_before() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 40 * MIB)
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Queued(transfer, 0, 0, 0, "first")))
    world.grant("a/0", transfer, MIB, start_ms=500)
    world.grant("a/0", transfer, MIB, start_ms=500 + MIB * 1000 // 48_000_000)
    told = world.tells(fx.TellExpect)
    assert near(told[0].finish_in_ns, 500 * MS + 40 * MIB * 10**9 // 48_000_000)
    assert len(told) == 1, "the second slot begins where the first ends: nothing new"


def test_a_slower_pace_is_told_to_the_receiver() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 40 * MIB, filled=MIB)
    world.grant("a/0", transfer, 2 * MIB)
    before = len(world.tells(fx.TellExpect))
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Pace(LINK, 12_000_000, 1)))
    told = world.tells(fx.TellExpect)
    assert len(told) == before + 1
    assert told[-1].finish_in_ns >= 39 * MIB * 10**9 // 12_000_000


def test_a_path_says_how_far_to_trust_its_rate() -> None:
    world = two_sites()
    world.connect(infos=(dataclasses.replace(INFO, confidence=0.25),), epoch=3)
    state = world.agent("a/0").link_state(EndpointName("job", 0), 1, world.now_ns)
    assert state.confidence == 0.25
