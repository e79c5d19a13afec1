"""Agents that are started again, with trainers that live on: each message once, in order, or an error on both sides."""

from __future__ import annotations

import dataclasses

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import EndpointName, TransferId
from proxyd.core.messages import Directory, EndpointUp
from proxyd.core.transfer import RecvState, SendState
from proxyd.wire import peer as wire
from proxyd.wire.envelope import Envelope, ErrorCode
from proxyd.wire.fence import Fate, Fence
from tests.unit.core.agent_world import COORDINATOR, MS, World
from tests.unit.core.test_agent_resume import A, B, done, grant_all, landed_whole, two_sites

MIB = 1 << 20
RANK0, RANK1 = EndpointName("job", 0), EndpointName("job", 1)


def envelope(nbytes: int, src: int = 0, dst: int = 1) -> Envelope:
    return Envelope("job", src, dst, "", 0, 0, nbytes, "uint8", (nbytes,))


OFFER = wire.Offer(envelope(1000), 101, 65536, True)


def restarted_receiver() -> World:
    """Agent b was killed in the middle of a message and is back, its trainer is not yet."""
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.grant("a/0", transfer, MIB)
    world.restart("b/0")
    world.told.clear()
    world.connect(epoch=2)
    world.heal("a/0", "b/0")
    return world


def knows(highest: int = 1, delivered: tuple[int, ...] = (), awaited: tuple[int, ...] = (1,)) -> tuple[ev.Past, ...]:
    return (ev.Past(0, 100, highest, delivered, awaited),)


def returns(world: World, past: tuple[ev.Past, ...] = knows()) -> None:
    world.attach("b/0", 1, past=past)
    world.publish()


def out(world: World, sequence: int) -> SendState:
    return world.agent("a/0").sender.transfers[TransferId(100, sequence)].state


def receives_failed(world: World) -> list[tuple[int, ErrorCode]]:
    return [(told.transfer.sequence, told.code) for told in world.tells(fx.TellRecvFailed)]


def sends_failed(world: World) -> list[tuple[int, ErrorCode]]:
    return [(told.transfer.sequence, told.code) for told in world.tells(fx.TellSendFailed)]


# ------------------------------------------------------------------------------------- the sending agent's patience


def test_a_message_waits_for_its_receiver_at_the_restarted_agent_and_new_ones_behind_it() -> None:
    world = restarted_receiver()
    later = world.post("a/0", 2, 0, 1, 1000)
    world.advance(5_000)
    assert out(world, 1) is SendState.BROKEN
    assert out(world, 2) is SendState.RESOLVING
    assert not world.tells(fx.TellSendFailed)
    returns(world)
    grant_all(world, epoch=2)
    assert [told.transfer.sequence for told in world.tells(fx.TellOffered)] == [1, 2]
    assert sorted(done(world)) == sorted(landed_whole(world)) == [TransferId(100, 1), later]


def test_the_wait_counts_from_the_last_word_of_the_old_life() -> None:
    world = two_sites()
    world.post("a/0", 1, 0, 1, 2 * MIB)
    world.restart("b/0")
    world.advance(20_000)
    world.connect(epoch=2)
    world.heal("a/0", "b/0")
    world.advance(9_900)
    assert not world.tells(fx.TellSendFailed)
    world.advance(200)
    assert sends_failed(world) == [(1, ErrorCode.PEER_LOST)]
    assert "job/1 has not come back to it" in world.tells(fx.TellSendFailed)[0].message


def test_new_messages_to_a_receiver_that_does_not_come_back_fail_too() -> None:
    world = restarted_receiver()
    world.post("a/0", 2, 0, 1, 1000)
    world.advance(31_000)
    assert sorted(sends_failed(world)) == [(1, ErrorCode.PEER_LOST), (2, ErrorCode.UNKNOWN_DESTINATION)]


def test_a_receiver_that_comes_back_as_another_process_gets_nothing() -> None:
    world = restarted_receiver()
    world.attach("b/0", 1, incarnation=777)
    world.publish()
    assert sends_failed(world) == [(1, ErrorCode.PEER_LOST)]
    assert not world.tells(fx.TellOffered)


def test_receivers_come_back_one_by_one_and_nobody_waits_for_another() -> None:
    world = two_sites()
    world.attach("b/0", 2)
    world.publish()
    first, second = world.post("a/0", 1, 0, 1, MIB), world.post("a/0", 2, 0, 2, MIB)
    world.restart("b/0")
    world.connect(epoch=2)
    world.heal("a/0", "b/0")
    world.attach("b/0", 2, past=())
    world.publish()
    grant_all(world, epoch=2)
    assert done(world) == [second]
    returns(world, ())
    grant_all(world, epoch=2)
    assert done(world) == [second, first]


def test_a_connection_that_breaks_while_receivers_are_awaited() -> None:
    world = restarted_receiver()
    world.cut("a/0", "b/0")
    world.run()
    returns(world)
    assert out(world, 1) is SendState.BROKEN
    world.heal("a/0", "b/0")
    grant_all(world, epoch=2)
    assert done(world) == [TransferId(100, 1)]


def test_a_message_that_was_given_up_while_its_receiver_is_awaited() -> None:
    world = restarted_receiver()
    world.post("a/0", 2, 0, 1, 1000)
    world.put("a/0", ev.SendCancelled(TransferId(100, 1)))
    returns(world, knows())
    assert receives_failed(world) == [(1, ErrorCode.PEER_LOST)], "it was not there when the agent said so"
    assert [told.transfer.sequence for told in world.tells(fx.TellOffered)] == [2]


# ---------------------------------------------------------------------------------- what the receiving agent is told


def test_what_was_delivered_is_acknowledged_and_not_delivered_again() -> None:
    world = restarted_receiver()
    returns(world, knows(delivered=(1,), awaited=()))
    assert done(world) == [TransferId(100, 1)]
    assert not world.tells(fx.TellOffered)


def test_what_nobody_knows_of_is_an_error_and_never_a_success() -> None:
    world = restarted_receiver()
    returns(world, knows(highest=5, awaited=()))
    assert sends_failed(world) == [(1, ErrorCode.PEER_LOST)]
    assert "how is no longer known" in world.tells(fx.TellSendFailed)[0].message
    assert not world.tells(fx.TellOffered)


def test_what_was_never_told_is_new() -> None:
    world = restarted_receiver()
    returns(world, ())
    grant_all(world, epoch=2)
    assert done(world) == landed_whole(world) == [TransferId(100, 1)]


def test_a_later_message_ends_the_wait_for_those_before_it() -> None:
    world = restarted_receiver()
    world.put("a/0", ev.SendCancelled(TransferId(100, 1)))
    returns(world, knows(highest=4, awaited=(1, 4)))
    later = world.post("a/0", 5, 0, 1, 1000)
    assert receives_failed(world) == [(1, ErrorCode.PEER_LOST), (4, ErrorCode.PEER_LOST)]
    assert "goes on with message 5" in world.tells(fx.TellRecvFailed)[0].message
    assert done(world) == [later]


def test_a_message_that_its_sender_takes_back_meanwhile() -> None:
    world = restarted_receiver()
    returns(world, knows(highest=3, awaited=(1, 3)))
    world.put("b/0", ev.PeerFrame(A, True, TransferId(100, 3), wire.Cancel(ErrorCode.CANCELLED, "by its owner")))
    assert receives_failed(world) == [(3, ErrorCode.CANCELLED)]
    grant_all(world, epoch=2)
    assert done(world) == [TransferId(100, 1)]


def test_what_is_awaited_fails_in_bounded_time() -> None:
    world = restarted_receiver()
    returns(world, knows(highest=3, awaited=(1, 2, 3)))
    grant_all(world, epoch=2)
    world.advance(29_900)
    assert not world.tells(fx.TellRecvFailed)
    world.advance(200)
    assert receives_failed(world) == [(2, ErrorCode.PEER_LOST), (3, ErrorCode.PEER_LOST)]
    world.advance(60_000)
    assert len(receives_failed(world)) == 2


def test_the_end_of_a_sender_ends_the_wait_for_it() -> None:
    world = restarted_receiver()
    returns(world, knows(highest=3, awaited=(1, 3)))
    grant_all(world, epoch=2)
    gone = Directory((), ((RANK0, 100, "its process ended"),), full=False)
    world.put("b/0", ev.CoordinatorSaid(COORDINATOR, gone))
    world.advance(4_100)
    assert receives_failed(world) == [(3, ErrorCode.PEER_LOST)]


def test_what_was_awaited_and_failed_is_refused_when_it_comes_after_all() -> None:
    world = two_sites()
    world.restart("b/0")
    world.told.clear()
    world.attach("b/0", 1, past=knows())
    world.connect(epoch=2)
    world.heal("a/0", "b/0")
    world.advance(30_100)
    assert receives_failed(world) == [(1, ErrorCode.PEER_LOST)]
    world.put("a/0", ev.SendPosted(TransferId(100, 1), envelope(1000), 1000, again=True))
    assert sends_failed(world) == [(1, ErrorCode.PEER_LOST)]


def test_a_trainer_that_ends_awaits_nothing() -> None:
    world = restarted_receiver()
    returns(world)
    world.put("b/0", ev.ClientDetached(RANK1, 101, "killed", False))
    world.advance(60_000)
    assert not world.tells(fx.TellRecvFailed)
    assert world.agent("b/0").next_deadline_ns() is None


def test_more_lives_than_are_remembered_leave_no_deadline_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxyd.core.remembering.MAX_FENCES", 1)
    world = two_sites()
    past = tuple(ev.Past(0, life, 1, (), (1,)) for life in range(1, 4))
    world.attach("b/0", 1, past=past)
    world.advance(30_100)
    assert world.agent("b/0").next_deadline_ns() is None


def test_a_message_is_acknowledged_only_when_its_trainer_was_told_of_it() -> None:
    """One whose memory is there before that of an earlier message is complete before it may be told."""
    world = two_sites()
    machine = world.agent("b/0")
    for sequence in (1, 2):
        machine.handle(
            ev.PeerFrame(A, True, TransferId(100, sequence), wire.Offer(envelope(1000), 101, 65536, True)), 0
        )
    machine.handle(ev.BlockAllocated(TransferId(100, 2), 1, 4096), 0)
    effects = machine.handle(ev.ChunkArrived(A, TransferId(100, 2), 0, 1000, True), 0)
    assert machine.receiver.transfers[TransferId(100, 2)].state is RecvState.LANDED
    assert not effects
    again = dataclasses.replace(OFFER, again=True)
    assert not machine.handle(ev.PeerFrame(A, True, TransferId(100, 2), again), 0)
    effects = machine.handle(ev.BlockAllocated(TransferId(100, 1), 1, 8192), 0)
    kinds = [type(effect).__name__ for effect in effects]
    assert kinds == ["TellOffered", "TellOffered", "TellLanded", "ToPeer"]
    assert isinstance(effects[-1], fx.ToPeer)
    assert isinstance(effects[-1].frame, wire.Ack)


# --------------------------------------------------------------------------------------------- within one host


def local() -> World:
    world = World("a/0")
    world.attach("a/0", 0)
    world.attach("a/0", 1)
    return world


def again(world: World, sequence: int, *, life: int = 0) -> TransferId:
    transfer = TransferId(100, sequence)
    world.put("a/0", ev.SendPosted(transfer, envelope(1000), 1000, again=True, dst_incarnation=life))
    return transfer


def test_messages_within_a_host_go_on() -> None:
    world = local()
    world.restart("a/0")
    world.told.clear()
    world.attach("a/0", 0, past=())
    posted = [again(world, sequence) for sequence in (3, 4, 5)]
    world.attach("a/0", 1, past=knows(highest=4, delivered=(3,), awaited=(4,)))
    assert done(world) == posted[:1], "delivered before; its block comes back at once"
    assert [told.transfer for told in world.tells(fx.TellOffered)] == posted[1:]
    assert [told.transfer for told in world.tells(fx.TellSendDelivered)] == posted[1:]


def test_a_message_within_a_host_is_not_for_a_later_life_of_its_receiver() -> None:
    world = local()
    world.restart("a/0")
    world.told.clear()
    world.attach("a/0", 0, past=())
    early = again(world, 3, life=101)
    world.attach("a/0", 1, incarnation=777)
    late = again(world, 4, life=101)
    assert [told.transfer for told in world.tells(fx.TellSendFailed)] == [early, late]
    assert {told.code for told in world.tells(fx.TellSendFailed)} == {ErrorCode.PEER_LOST}
    assert not world.tells(fx.TellOffered)


def test_a_message_that_was_posted_again_is_not_for_a_later_life_of_a_distant_receiver() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.restart("a/0")
    world.attach("b/0", 1, incarnation=777)
    world.attach("a/0", 0, past=())
    world.told.clear()
    world.put("a/0", ev.SendPosted(transfer, envelope(2 * MIB), 2 * MIB, again=True, dst_incarnation=101))
    world.connect(epoch=2)
    world.heal("a/0", "b/0")
    assert sends_failed(world) == [(1, ErrorCode.PEER_LOST)]
    assert not world.tells(fx.TellOffered)


# -------------------------------------------------------------------------------------------------- coming and going


def test_the_age_of_a_trainer_is_its_own_and_not_that_of_its_return() -> None:
    world = World("a/0")
    world.connect()
    world.put("a/0", ev.ClientAttached(RANK0, 100, (), 5_000 * MS))
    assert world.asks(EndpointUp)[-1].age_ns == 5_000 * MS
    world.advance(1_000)
    world.connect(epoch=2)
    assert world.asks(EndpointUp)[-1].age_ns == 6_000 * MS
    assert world.agent("a/0").status(world.now_ns).resumed_clients == 1


def test_an_agent_that_stops_fails_nothing_and_acknowledges_nothing_any_more() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.lose_chunks = True
    world.grant("a/0", transfer, MIB)
    world.put("b/0", ev.Stopping("SIGTERM"))
    closed = world.tells(fx.CloseClient)
    assert [(c.endpoint, c.code) for c in closed] == [(RANK1, ErrorCode.AGENT_STOPS)]
    machine = world.agent("b/0")
    assert not machine.expects_chunks(A, transfer)
    assert not machine.handle(ev.ChunkArrived(A, transfer, 0, 262144, True), world.now_ns)
    assert not machine.handle(ev.PeerFrame(A, True, TransferId(100, 2), wire.Offer(envelope(1), 101, 65536, True)), 0)
    assert machine.next_deadline_ns() is None
    assert machine.next_chunk(B, world.now_ns) is None
    world.advance(20_000)
    assert not world.tells(fx.TellSendFailed)
    assert not world.tells(fx.TellRecvFailed)


# ------------------------------------------------------------------------------------------------------------- fence


def test_a_fence_that_learnt_from_its_destination_claims_no_more_than_that_knew() -> None:
    fence = Fence()
    fence.learn(10, (4, 7), (9,))
    fates = {sequence: fence.fate(sequence) for sequence in (3, 4, 7, 8, 9, 10, 11)}
    assert fates == {
        3: Fate.FORGOTTEN,
        4: Fate.DELIVERED,
        7: Fate.DELIVERED,
        8: Fate.FORGOTTEN,
        9: Fate.AWAITED,
        10: Fate.FORGOTTEN,
        11: Fate.NEW,
    }
    fence.offered(9)
    assert fence.fate(9) is Fate.FORGOTTEN, "under way: whoever has it in hand knows better"
    fence.ended_well(9)
    assert fence.fate(9) is Fate.DELIVERED
    fence.offered(11)
    assert fence.fate(11) is Fate.DELIVERED
    fence.ended_badly(11)
    assert fence.fate(11) is Fate.FAILED
