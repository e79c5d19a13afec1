"""Slots that are granted before the data exists: held unbound, bound when the message is posted, else given back."""

from __future__ import annotations

import random

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import EndpointName, TransferId
from proxyd.core.messages import Announce, Grant, Report, Request, TransferDone
from proxyd.wire.envelope import Envelope, TrafficClass

from .agent_world import COORDINATOR, LINK, MS, World

MIB = 1 << 20
NULL = TransferId(0, 0)


def two_sites(**kw: int) -> World:
    world = World("a/0", "b/0", **kw)
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect()
    return world


def announce(world: World, nbytes: int, *, tag: int = 0) -> int:
    """Announce a message; the number that the coordinator hears."""
    envelope = Envelope("job", 0, 1, "", tag, TrafficClass.PIPELINE, nbytes, "uint8", (nbytes,))
    before = len(world.asks(Announce))
    world.put("a/0", ev.SendAnnounced(envelope, 50 * MS))
    said = world.asks(Announce)[before:]
    return said[0].announcement if said else 0


def grant_ahead(world: World, number: int, nbytes: int, *, start_ms: int = 0, ttl_ms: int = 50, epoch: int = 1) -> None:
    message = Grant(1, NULL, LINK, nbytes, 48_000_000, start_ms * MS, ttl_ms * MS, epoch, 5 * MS, "ahead", number)
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, message))


def returned(world: World) -> int:
    return max((report.returned_bytes for report in world.asks(Report)), default=0)


def test_a_message_whose_slot_is_here_already_goes_at_once() -> None:
    world = two_sites()
    number = announce(world, MIB)
    grant_ahead(world, number, MIB)
    assert not world.chunks
    transfer = world.post("a/0", 1, 0, 1, MIB)
    assert [effect.transfer for effect in world.tells(fx.TellSendDone)] == [transfer]
    [request] = world.asks(Request)
    assert (request.announcement, request.wanted_bytes) == (number, MIB), "it says which message it has become"
    assert [done.ok for done in world.asks(TransferDone)] == [True]
    assert returned(world) == 0


def test_a_slot_ahead_waits_for_its_start() -> None:
    world = two_sites()
    number = announce(world, MIB)
    grant_ahead(world, number, MIB, start_ms=10)
    world.post("a/0", 1, 0, 1, MIB)
    assert not world.chunks
    world.advance(11)
    assert sum(chunk.length for _, chunk in world.chunks) == MIB


def test_what_is_granted_later_to_the_announcement_is_the_messages() -> None:
    world = two_sites()
    number = announce(world, 2 * MIB)
    grant_ahead(world, number, MIB)
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    grant_ahead(world, number, MIB)  # it crossed the request
    assert [effect.transfer for effect in world.tells(fx.TellSendDone)] == [transfer]


def test_a_slot_ahead_that_nothing_comes_for_goes_back_at_its_end_and_holds_up_nobody() -> None:
    world = two_sites()
    number = announce(world, MIB, tag=1)
    grant_ahead(world, number, MIB)
    other = world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", other, MIB)
    assert [effect.transfer for effect in world.tells(fx.TellSendDone)] == [other], "another one goes ahead"
    world.advance(51)
    assert returned(world) == MIB
    late = world.post("a/0", 2, 0, 1, MIB, tag=1)
    request = world.asks(Request)[-1]
    assert (request.transfer, request.announcement, request.wanted_bytes) == (late, number, 2 * MIB), (
        "what went back is wanted anew"
    )
    world.grant("a/0", late, MIB)
    assert world.tells(fx.TellSendDone)[-1].transfer == late


def test_a_shorter_message_gives_the_rest_back_at_once() -> None:
    world = two_sites()
    number = announce(world, 4 * MIB)
    grant_ahead(world, number, 4 * MIB)
    world.post("a/0", 1, 0, 1, MIB + 5)
    assert world.tells(fx.TellSendDone)
    assert returned(world) == 3 * MIB - 5


def test_a_longer_message_asks_for_the_rest() -> None:
    world = two_sites()
    number = announce(world, MIB)
    grant_ahead(world, number, MIB)
    transfer = world.post("a/0", 1, 0, 1, 3 * MIB)
    assert world.asks(Request)[-1].wanted_bytes == 3 * MIB
    world.grant("a/0", transfer, 2 * MIB)
    assert world.tells(fx.TellSendDone)[-1].transfer == transfer


def test_a_message_so_small_that_it_needs_no_grant_gives_the_slot_back() -> None:
    world = two_sites()
    number = announce(world, MIB)
    grant_ahead(world, number, MIB)
    world.post("a/0", 1, 0, 1, 1000)
    assert returned(world) == MIB
    assert world.asks(Announce)[-1] == Announce(number, LINK, "", TrafficClass.BULK, 0, 0), "withdrawn"


def test_a_small_announced_message_keeps_the_order_of_its_channel() -> None:
    world = two_sites()
    assert announce(world, 1000) == 0, "nothing to ask for"
    number = announce(world, MIB)
    world.post("a/0", 1, 0, 1, 1000)
    world.post("a/0", 2, 0, 1, MIB)
    assert [request.announcement for request in world.asks(Request)] == [number]


def test_a_trainer_that_dies_gives_its_slots_back_and_withdraws() -> None:
    world = two_sites()
    numbers = [announce(world, MIB) for _ in range(3)]
    grant_ahead(world, numbers[0], MIB, ttl_ms=5000)
    world.put("a/0", ev.ClientDetached(EndpointName("job", 0), 100, "killed", False))
    assert returned(world) == MIB
    assert [m.announcement for m in world.asks(Announce) if not m.nbytes] == numbers
    grant_ahead(world, numbers[1], MIB)  # it crossed the withdrawal
    assert returned(world) == 2 * MIB


def test_memory_comes_before_the_slot() -> None:
    """A message without credit can't use its slot: the slot ends, and is wanted anew with the credit."""
    world = two_sites(eager_bytes=0)
    number = announce(world, MIB)
    grant_ahead(world, number, MIB)
    transfer = world.post("a/0", 1, 0, 1, MIB)
    assert not world.asks(Request)
    world.advance(51)
    assert returned(world) == MIB
    world.put("b/0", ev.RecvAccepted(transfer))
    assert world.asks(Request)[-1].wanted_bytes == 2 * MIB
    world.grant("a/0", transfer, MIB)
    assert world.tells(fx.TellSendDone)[-1].transfer == transfer


def test_credit_in_time_binds_the_slot() -> None:
    world = two_sites(eager_bytes=0)
    number = announce(world, MIB)
    grant_ahead(world, number, MIB)
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.put("b/0", ev.RecvAccepted(transfer))
    assert world.tells(fx.TellSendDone)[-1].transfer == transfer


def test_a_message_that_fails_before_it_asked_gives_its_slot_back() -> None:
    world = two_sites(eager_bytes=0)
    number = announce(world, MIB)
    grant_ahead(world, number, MIB, ttl_ms=5000)
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.put("a/0", ev.SendCancelled(transfer))
    assert returned(world) == MIB
    assert world.asks(Announce)[-1].nbytes == 0


def test_a_new_session_knows_nothing_of_earlier_slots() -> None:
    world = two_sites()
    number = announce(world, MIB)
    grant_ahead(world, number, MIB, ttl_ms=5000)
    world.connect(2)
    transfer = world.post("a/0", 1, 0, 1, MIB)
    assert world.asks(Request)[-1].wanted_bytes == MIB
    assert not world.chunks
    world.grant("a/0", transfer, MIB, epoch=2)
    assert world.tells(fx.TellSendDone)


def test_how_plans_turn_out_is_counted() -> None:
    world = two_sites()
    for size in (MIB, MIB, 2 * MIB, 1000, MIB):
        announce(world, size)
    for number, size in enumerate((MIB, 700_000, 2 * MIB, 1000), 1):
        world.post("a/0", number, 0, 1, size)
    outcomes = dict(world.agent("a/0").status(world.now_ns).announced)
    assert outcomes == {"fulfilled": 3, "resized": 1, "unposted": 0}
    world.put("a/0", ev.ClientDetached(EndpointName("job", 0), 100, "killed", False))
    assert dict(world.agent("a/0").status(world.now_ns).announced)["unposted"] == 1


def test_grants_to_announcements_that_nobody_made_go_back() -> None:
    world = two_sites()
    grant_ahead(world, 77, MIB)
    assert returned(world) == MIB


@pytest.mark.parametrize("seed", range(40))
def test_plans_that_turn_out_otherwise_cost_no_more_than_slots(seed: int) -> None:
    """Ten announced; some are posted, in another order, of other sizes, with extras; slots come whenever. Everything
    posted arrives, the coordinator's books close, and nothing is held in the end."""
    chance = random.Random(seed)
    world = two_sites(eager_bytes=chance.choice([0, 64 * MIB]))
    numbers = [announce(world, 2 * MIB, tag=index % 3) for index in range(10)]
    granted = 0
    granted_to: dict[int | TransferId, int] = {}
    posted: list[TransferId] = []
    of: dict[int, TransferId] = {}
    wanted: dict[TransferId, int] = {}

    def learn() -> None:
        for request in world.asks(Request):
            if request.announcement and request.announcement not in of:
                of[request.announcement] = request.transfer
                granted_to[request.transfer] = granted_to.pop(request.announcement, 0)
            wanted[request.transfer] = max(wanted.get(request.transfer, 0), request.wanted_bytes)

    def serve(everything: bool) -> None:
        nonlocal granted
        learn()
        for transfer, nbytes in wanted.items():
            need = nbytes - granted_to.get(transfer, 0)
            if need > 0 and (everything or chance.random() < 0.5):
                granted += need
                granted_to[transfer] = granted_to.get(transfer, 0) + need
                world.grant("a/0", transfer, need)

    for step in range(40):
        match chance.randrange(5):
            case 0:
                number = chance.choice(numbers)
                key = of.get(number, number)
                granted += 512 << 10
                granted_to[key] = granted_to.get(key, 0) + (512 << 10)
                grant_ahead(world, number, 512 << 10, start_ms=chance.choice([0, 5]), ttl_ms=chance.choice([5, 50]))
            case 1 | 2 if len(posted) < 12:
                size = chance.choice([2 * MIB, 2 * MIB, 700_000, 3 * MIB, 1000])
                posted.append(world.post("a/0", step + 1, 0, 1, size, tag=chance.randrange(3)))
            case 3:
                world.advance(chance.choice([1, 10, 60]))
            case _:
                serve(everything=False)
    for _ in range(60):
        for effect in world.tells(fx.TellOffered):
            if not effect.has_memory:
                world.put("b/0", ev.RecvAccepted(effect.transfer))
        serve(everything=True)
        world.advance(5)
    assert {effect.transfer for effect in world.tells(fx.TellSendDone)} == set(posted)
    world.advance(100)
    world.delivered("a/0", "b/0")
    book = world.agent("a/0").sender.asking.links[LINK]
    assert not book.grants
    last = world.asks(Report)[-1] if granted else None
    if last is not None:
        assert last.delivered_bytes + last.returned_bytes == granted
