"""The agent machine in the corners: ends that cross, lives that clash, and others' names in a frame."""

from __future__ import annotations

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.wire import peer as wire
from proxyd.wire.envelope import Envelope, ErrorCode, TrafficClass

from .agent_world import World

MIB = 1 << 20
A, B, C = AgentName("a", "0"), AgentName("b", "0"), AgentName("b", "1")
RANK = [EndpointName("job", rank) for rank in range(4)]


def two_sites(**kw: int) -> World:
    world = World("a/0", "b/0", **kw)
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect()
    return world


def one_host(*ranks: int) -> World:
    world = World("a/0")
    for rank in ranks:
        world.attach("a/0", rank)
    return world


# -- within a host -----------------------------------------------------------------------------------------------------


def test_a_message_of_a_closed_trainer_that_found_its_local_receiver_outlives_the_linger_time() -> None:
    world = one_host(0)
    transfer = world.post("a/0", 1, 0, 1, 1000)
    world.put("a/0", ev.ClientDetached(RANK[0], 100, "closed", True))
    world.attach("a/0", 1)
    assert [o.transfer for o in world.tells(fx.TellOffered)] == [transfer]
    world.advance(10_000)
    assert not world.tells(fx.TellSendFailed), "it is in the receiver's hands"
    world.put("a/0", ev.RecvReleased(transfer))
    assert len(world.tells(fx.TellSendDone)) == 1
    assert len(world.tells(fx.FreeBlock)) == 1


def test_a_message_of_a_closed_trainer_may_be_released_before_the_linger_time_is_over() -> None:
    world = one_host(0)
    transfer = world.post("a/0", 1, 0, 1, 1000)
    world.put("a/0", ev.ClientDetached(RANK[0], 100, "closed", True))
    world.attach("a/0", 1)
    world.put("a/0", ev.RecvReleased(transfer))
    world.advance(10_000)
    assert len(world.tells(fx.TellSendDone)) == 1
    assert not world.tells(fx.TellSendFailed)


def test_an_empty_message_keeps_its_place_behind_one_that_waits_for_its_block() -> None:
    world = one_host(0)
    world.post("a/0", 1, 0, 1, 1000)
    world.post("a/0", 2, 0, 1, 0)
    world.post("a/0", 3, 0, 1, 1000)
    world.attach("a/0", 1)
    assert [o.transfer.sequence for o in world.tells(fx.TellOffered)] == [1, 2, 3]
    assert [d.transfer.sequence for d in world.tells(fx.TellSendDone)] == [2]
    assert world.agent("a/0").status(world.now_ns).outgoing == 2


def test_messages_for_a_local_receiver_that_dies_are_forgotten() -> None:
    world = one_host(0, 1)
    world.post("a/0", 1, 0, 1, 1000)
    world.post("a/0", 2, 0, 1, 1000, filled=10)
    world.put("a/0", ev.ClientDetached(RANK[1], 101, "killed", False))
    ends = [t.transfer.sequence for t in [*world.tells(fx.TellSendDone), *world.tells(fx.TellSendFailed)]]
    assert sorted(ends) == [1, 2]
    status = world.agent("a/0").status(world.now_ns)
    assert (status.outgoing, status.incoming) == (0, 0)


# -- others' names in a frame ------------------------------------------------------------------------------------------


def offer_of(transfer: TransferId, src: int, dst: int, nbytes: int) -> wire.Offer:
    envelope = Envelope("job", src, dst, "", 0, TrafficClass.PIPELINE, nbytes, "uint8", (nbytes,))
    return wire.Offer(envelope, 0, 64 << 10, True)


def test_a_peer_has_no_say_in_the_messages_of_another_peer() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    before = len(world.told)
    for frame in (wire.Cancel(ErrorCode.CANCELLED, "no"), wire.Expect(MIB, 5, 5)):
        world.put("b/0", ev.PeerFrame(C, True, transfer, frame))
    world.put("b/0", ev.ChunkArrived(C, transfer, 0, 256 << 10, True))
    world.put("b/0", ev.ChunkArrived(C, transfer, 0, 256 << 10, False))
    assert world.told[before:] == []
    assert world.agent("b/0").status(world.now_ns).received_bytes == 0
    world.grant("a/0", transfer, MIB)
    assert world.tells(fx.TellSendDone)


def test_two_senders_that_draw_the_same_incarnation_do_not_get_each_others_acknowledgements() -> None:
    """A clash of random numbers, or a trainer that lies: the second message fails, loudly, and isn't lost."""
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 1000)
    refused = world.agent("b/0").handle(ev.PeerFrame(C, True, transfer, offer_of(transfer, 7, 1, 1000)), world.now_ns)
    assert [type(e.frame) for e in refused if isinstance(e, fx.ToPeer)] == [wire.Fail, wire.EagerReturned]
    world.put("b/0", ev.RecvReleased(transfer))
    late = world.agent("b/0").handle(ev.PeerFrame(C, True, transfer, offer_of(transfer, 7, 1, 1000)), world.now_ns)
    assert not [e for e in late if isinstance(e, fx.ToPeer) and isinstance(e.frame, wire.Ack)]


# -- ends that cross ---------------------------------------------------------------------------------------------------


def test_memory_that_is_found_for_a_message_that_has_ended_is_freed() -> None:
    world = two_sites()
    machine = world.agent("b/0")
    transfer = TransferId(100, 1)
    machine.handle(ev.PeerFrame(A, True, transfer, offer_of(transfer, 0, 1, MIB)), world.now_ns)
    machine.handle(ev.InboundClosed(A, 1, "reset"), world.now_ns)
    effects = machine.handle(ev.BlockAllocated(transfer, 1, 4096), world.now_ns)
    assert effects == [fx.FreeBlock(transfer, RANK[1])]
    assert machine.handle(ev.BlockAllocated(transfer, 1, 4096), world.now_ns) == []


def eager_left_bytes(world: World) -> int:
    used = world.agent("a/0").sender._eager_used_bytes
    return world.eager_bytes - sum(used.values())


def test_the_eager_budget_of_an_offer_that_is_refused_comes_back() -> None:
    world = two_sites(eager_bytes=4 * MIB)
    world.agent("b/0").handle(ev.ClientDetached(RANK[1], 101, "killed", False), world.now_ns)  # a doesn't know yet
    world.post("a/0", 1, 0, 1, MIB)
    assert world.tells(fx.TellSendFailed)[0].code is ErrorCode.PEER_LOST
    assert eager_left_bytes(world) == 4 * MIB


def test_the_eager_budget_comes_back_when_a_turn_down_crosses_a_cancel() -> None:
    world = two_sites(eager_bytes=4 * MIB)
    transfer = TransferId(100, 1)
    a, b = world.agent("a/0"), world.agent("b/0")
    envelope = offer_of(transfer, 0, 1, MIB).envelope
    posted = a.handle(ev.SendPosted(transfer, envelope, MIB), world.now_ns)
    cancelled = a.handle(ev.SendCancelled(transfer), world.now_ns)
    to_b = [e for e in [*posted, *cancelled] if isinstance(e, fx.ToPeer)]
    answers = b.handle(ev.PeerFrame(A, True, transfer, to_b[0].frame), world.now_ns)
    answers += b.handle(ev.BlockDenied(transfer, "full", False), world.now_ns)
    for frame in to_b[1:]:
        answers += b.handle(ev.PeerFrame(A, True, transfer, frame.frame), world.now_ns)
    for answer in answers:
        if isinstance(answer, fx.ToPeer):
            world.put("a/0", ev.PeerFrame(B, False, answer.transfer, answer.frame))
    assert eager_left_bytes(world) == 4 * MIB


def test_a_turn_down_gives_the_eager_budget_back_once() -> None:
    world = two_sites(eager_bytes=4 * MIB)
    transfer = TransferId(100, 1)
    world.post("a/0", 2, 0, 1, MIB)
    world.deny.add(transfer)
    world.post("a/0", 1, 0, 1, MIB)
    assert eager_left_bytes(world) == 3 * MIB
    world.deny.clear()
    world.put("b/0", ev.RecvAccepted(transfer))
    world.grant("a/0", transfer, MIB)
    world.put("b/0", ev.RecvReleased(transfer))
    assert eager_left_bytes(world) == 3 * MIB
