"""What an agent holds for a copy goes to the tensor that comes, and is paid back."""

from __future__ import annotations

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import TransferId
from proxyd.core.linkbook import LinkBook
from proxyd.core.messages import Report, Request
from proxyd.core.transfer import Outgoing
from proxyd.wire.envelope import TrafficClass
from tests.unit.core.agent_world import LINK, MS, World

CHUNK = 256 << 10
MIB = 1 << 20
BULK, SYNC, PIPELINE = TrafficClass.BULK, TrafficClass.SYNC, TrafficClass.PIPELINE


def holding(nbytes: int = 2 * MIB, *, start_ms: int = 1000) -> tuple[World, TransferId]:
    """A copy that holds a grant that has not begun: nothing of it is handed over meanwhile."""
    world = World("a/0", "b/0", "b/1")
    for name, rank in (("a/0", 0), ("b/0", 1), ("b/1", 2)):
        world.attach(name, rank)
    world.connect()
    copy = world.post("a/0", 1, 0, 1, 8 * MIB, traffic=BULK)
    world.grant("a/0", copy, nbytes, start_ms=start_ms)
    return world, copy


def book(world: World) -> LinkBook:
    return world.agent("a/0").sender.asking.links[LINK]


def out(world: World, transfer: TransferId) -> Outgoing:
    return world.agent("a/0").sender.transfers[transfer]


def held(world: World) -> list[tuple[TransferId, int]]:
    return [(one.transfer, one.left_bytes) for one in book(world).grants]


def sent(world: World, transfer: TransferId) -> int:
    return sum(chunk.length for _, chunk in world.chunks if chunk.transfer == transfer)


def wanted(world: World, transfer: TransferId) -> int:
    return [ask.wanted_bytes for ask in world.asks(Request) if ask.transfer == transfer][-1]


def test_a_tensor_takes_what_is_held_for_a_copy_and_asks_for_all_it_needs() -> None:
    world, copy = holding()
    tensor = world.post("a/0", 2, 0, 1, MIB)
    assert held(world) == [(tensor, MIB), (copy, MIB)]
    assert (wanted(world, tensor), wanted(world, copy)) == (MIB, 8 * MIB)
    world.advance(1000)
    assert (sent(world, tensor), sent(world, copy)) == (MIB, MIB)
    assert book(world).problem() == ""


def test_it_goes_at_once_where_the_slot_has_begun() -> None:
    world, copy = holding(MIB, start_ms=0)
    world.put("a/0", ev.SendFilled(copy, 8 * MIB))
    more = world.post("a/0", 2, 0, 1, 8 * MIB, traffic=BULK, filled=0)
    world.grant("a/0", more, 2 * MIB)  # its trainer still copies: the agent holds it
    tensor = world.post("a/0", 3, 0, 1, MIB)
    assert sent(world, tensor) == MIB
    assert held(world) == [(more, MIB)]


def test_nothing_is_taken_from_a_message_to_another_peer() -> None:
    """What its streams have in the kernel leaves at the whole rate, and so would the tensor."""
    world, copy = holding()
    world.post("a/0", 2, 0, 2, MIB)
    assert held(world) == [(copy, 2 * MIB)]


def test_what_is_granted_to_it_later_is_the_copys() -> None:
    world, copy = holding()
    tensor = world.post("a/0", 2, 0, 1, 3 * MIB)
    assert held(world) == [(tensor, 2 * MIB)]
    world.grant("a/0", tensor, MIB)
    world.grant("a/0", tensor, 2 * MIB, start_ms=1000)
    assert held(world)[-1] == (copy, 2 * MIB)
    assert (out(world, copy).lent_bytes, out(world, tensor).owed_bytes) == (0, 0)
    world.advance(1000)
    assert (sent(world, tensor), sent(world, copy)) == (3 * MIB, 2 * MIB)
    assert world.asks(Report)[-1].returned_bytes == 0
    assert book(world).problem() == ""


def test_what_was_paid_back_is_not_lent_again() -> None:
    world, copy = holding()
    tensor = world.post("a/0", 2, 0, 1, 2 * MIB)
    world.grant("a/0", tensor, 2 * MIB, start_ms=1000)
    world.post("a/0", 3, 0, 1, MIB)
    assert held(world) == [(tensor, 2 * MIB), (copy, 2 * MIB)]


def test_nothing_is_taken_from_its_own_class_or_a_more_urgent_one() -> None:
    world, _ = holding()
    sync = world.post("a/0", 2, 0, 1, 2 * MIB, traffic=SYNC)
    bulk = world.post("a/0", 3, 0, 1, MIB, traffic=BULK)
    other = world.post("a/0", 4, 0, 1, MIB, traffic=SYNC)
    assert held(world) == [(sync, 2 * MIB)]
    tensor = world.post("a/0", 5, 0, 1, MIB)
    assert held(world) == [(tensor, MIB), (sync, MIB)]
    assert [out(world, one).granted_bytes for one in (bulk, other)] == [0, 0]


def test_grants_that_come_late_for_a_copy_go_to_a_tensor_that_waits() -> None:
    world, copy = holding(CHUNK)
    tensor = world.post("a/0", 2, 0, 1, MIB)
    world.grant("a/0", copy, CHUNK, start_ms=1000)
    assert held(world) == [(tensor, CHUNK), (tensor, CHUNK)]
    assert out(world, tensor).need_bytes == MIB - 2 * CHUNK


def test_a_copy_asks_by_itself_when_the_tensor_ends() -> None:
    world, copy = holding()
    tensor = world.post("a/0", 2, 0, 1, 4 * MIB)
    world.put("a/0", ev.SendCancelled(tensor))
    assert wanted(world, copy) == 10 * MIB
    assert (out(world, copy).granted_bytes, out(world, copy).need_bytes) == (2 * MIB, 8 * MIB)
    assert held(world) == []


def test_a_copy_asks_by_itself_after_half_a_second_and_the_tensor_borrows_no_more() -> None:
    world, copy = holding()
    tensor = world.post("a/0", 2, 0, 1, 4 * MIB)
    world.advance(501)
    assert wanted(world, copy) == 10 * MIB
    world.grant("a/0", copy, MIB, start_ms=1000)
    assert held(world)[-1] == (copy, MIB)
    world.grant("a/0", tensor, 4 * MIB)
    world.delivered("a/0", "b/0")
    assert world.asks(Report)[-1].returned_bytes == 2 * MIB
    assert book(world).problem() == ""


def test_a_new_session_begins_without_debts() -> None:
    world, copy = holding()
    tensor = world.post("a/0", 2, 0, 1, 3 * MIB)
    world.connect(2)
    assert (wanted(world, tensor), wanted(world, copy)) == (3 * MIB, 8 * MIB)
    assert [(out(world, one).lent_bytes, out(world, one).owed_bytes) for one in (copy, tensor)] == [(0, 0), (0, 0)]


def test_little_of_a_copy_waits_in_the_kernel() -> None:
    world, _ = holding(MIB, start_ms=0)
    assert world.tells(fx.SetPace)[-1].yields
    tensor = world.post("a/0", 2, 0, 1, MIB)
    world.now_ns += MS
    world.grant("a/0", tensor, MIB)
    assert not world.tells(fx.SetPace)[-1].yields
