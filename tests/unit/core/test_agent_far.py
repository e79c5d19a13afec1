"""An agent far from its coordinator holds a window ahead: several slots, peers and starts, each in its turn."""

from __future__ import annotations

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import AgentName
from proxyd.core.messages import Pace, Report

from .agent_world import COORDINATOR, LINK, MS, World

MIB = 1 << 20
B0, B1 = AgentName("b", "0"), AgentName("b", "1")
RATE = 50_000_000
SLOT_MS = MIB * 1000 // RATE + 1


def far_agent() -> World:
    world = World("a/0", "b/0", "b/1")
    for name, rank in (("a/0", 0), ("b/0", 1), ("b/1", 2)):
        world.attach(name, rank)
    world.connect()
    return world


def returned(world: World) -> int:
    return max((report.returned_bytes for report in world.asks(Report)), default=0)


def test_slots_of_several_messages_and_peers_go_in_order_each_from_its_start() -> None:
    world = far_agent()
    one, two, three = (world.post("a/0", number, 0, dst, MIB) for number, dst in ((1, 1), (2, 2), (3, 1)))
    for number, transfer in enumerate((one, two, three)):
        world.grant("a/0", transfer, MIB, rate=RATE, start_ms=10 + number * SLOT_MS, ttl_ms=200)
    assert not world.chunks
    for number, transfer in enumerate((one, two, three)):
        world.advance(11 if not number else SLOT_MS)
        assert [effect.transfer for effect in world.tells(fx.TellSendDone)][-1] == transfer
        assert len(world.tells(fx.TellSendDone)) == number + 1, "no other one before its start"
    assert returned(world) == 0


def test_slots_that_wait_for_others_do_not_end_meanwhile() -> None:
    """A slot behind more than one ttl of others is not given back before its turn."""
    world = far_agent()
    first = world.post("a/0", 1, 0, 1, 8 * MIB, filled=0)
    second = world.post("a/0", 2, 0, 2, MIB)
    world.grant("a/0", first, 8 * MIB, rate=RATE, ttl_ms=50)
    world.grant("a/0", second, MIB, rate=RATE, ttl_ms=50, start_ms=20)
    book = world.agent("a/0").sender.asking.links[LINK]
    assert book.grants[1].expires_ns - world.now_ns == 50 * MS + 8 * MIB * 10**9 // RATE


def test_a_slot_that_tcp_sends_slowly_is_not_cut_off_by_its_ttl() -> None:
    world = far_agent()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB, filled=MIB)
    world.grant("a/0", transfer, 4 * MIB, rate=RATE, ttl_ms=30)
    world.advance(100)
    assert returned(world) == 0, "begun: what is left of it may take twice its time at the pace"
    world.advance(110)
    assert returned(world) == 3 * MIB, "but not for ever"


def test_a_slot_that_is_not_begun_ends_with_its_ttl() -> None:
    world = far_agent()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB, filled=0)
    world.grant("a/0", transfer, 4 * MIB, rate=RATE, ttl_ms=30)
    world.advance(31)
    assert returned(world) == 4 * MIB


def test_the_lead_of_a_far_coordinator_is_said_one_round_trip_early() -> None:
    """``lead_ns`` is the coordinator's word: with 60 ms it hears of the end 60 ms before, while the next slots' starts
    count as well."""
    world = far_agent()
    transfer = world.post("a/0", 1, 0, 1, 8 * MIB, filled=0)
    world.grant("a/0", transfer, 8 * MIB, rate=RATE, start_ms=20)
    book = world.agent("a/0").sender.asking.links[LINK]
    book.grants[0].lead_ns = 60 * MS
    leaves_ns = world.now_ns + 20 * MS + 8 * MIB * 10**9 // RATE
    assert book.lead_due_ns == pytest.approx(leaves_ns - 60 * MS, abs=1000)


def test_a_cold_peer_says_from_the_first_report_on_that_its_slot_takes_longer() -> None:
    world = far_agent()
    cold = ev.SendProgress(B0, 0, 0, 0, 60 * MS, 60 * MS, 0, 0, window_bytes=100_000, window_grows=True)
    world.put("a/0", cold)
    world.post("a/0", 1, 0, 1, 4 * MIB, filled=0)
    assert world.asks(Report)[-1].window_bytes == 100_000, "before anything is granted"
    transfer = next(iter(world.agent("a/0").sender.transfers))
    world.grant("a/0", transfer, MIB, rate=RATE)
    book = world.agent("a/0").sender.asking.links[LINK]
    # 100 + 200 + 400 kB in three round trips, the rest at twice 800 kB per round trip: not 21 ms.
    assert book.leaves_in_ns() == pytest.approx(3 * 60 * MS + 60 * MS * (MIB - 700_000) / 1_600_000, rel=0.01)


def test_the_round_trip_of_a_peer_to_which_nothing_is_under_way_is_old_news() -> None:
    world = far_agent()
    first = world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", first, MIB, rate=RATE)
    world.put("a/0", ev.SendProgress(B0, MIB, MIB, 0, 90 * MS, 60 * MS, 0, 0))
    assert world.asks(Report)[-1].srtt_ns == 90 * MS, "the last word of it"
    second = world.post("a/0", 2, 0, 2, MIB)
    world.grant("a/0", second, MIB, rate=RATE)
    world.put("a/0", ev.SendProgress(B1, 1000, 1000, 500, 61 * MS, 60 * MS, 0, 0))
    assert world.asks(Report)[-1].srtt_ns == 61 * MS


def test_a_pace_is_not_answered_while_the_next_counts_are_near() -> None:
    """Else a coordinator that steps by what it is told would step on each of its own steps."""
    world = far_agent()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB, filled=MIB)
    world.grant("a/0", transfer, 4 * MIB, rate=RATE)
    world.put("a/0", ev.SendProgress(B0, 1000, 1000, 500_000, 60 * MS, 60 * MS, 0, 0))
    before = len(world.asks(Report))
    for step in range(10):
        world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Pace(LINK, RATE - step * 1_000_000, 1)))
    assert len(world.asks(Report)) == before
