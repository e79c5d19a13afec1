"""Connections that break: what is under way goes on over the next one, once, in order, or fails on both sides."""

from __future__ import annotations

from collections import Counter

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.core.messages import CancelRequest, Directory, Report, Request
from proxyd.core.transfer import SendState
from proxyd.wire import peer as wire
from proxyd.wire.envelope import Envelope, ErrorCode
from tests.unit.core.agent_world import COORDINATOR, MS, World

KIB, MIB = 1 << 10, 1 << 20
A, B = AgentName("a", "0"), AgentName("b", "0")
RANK1 = EndpointName("job", 1)


def two_sites(**options: int) -> World:
    world = World("a/0", "b/0", **options)
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect()
    return world


def grant_all(world: World, epoch: int = 1) -> None:
    """Grant what waits, until nothing does."""
    for _ in range(200):
        needy = [o for o in world.agent("a/0").sender.transfers.values() if o.requested and o.need_bytes]
        if not needy:
            return
        world.grant("a/0", needy[0].transfer, min(needy[0].need_bytes, MIB), epoch=epoch)
    raise AssertionError("what waits for grants doesn't end")


def done(world: World) -> list[TransferId]:
    return [told.transfer for told in world.tells(fx.TellSendDone)]


def landed_whole(world: World) -> list[TransferId]:
    sizes = {told.transfer: told.envelope.nbytes for told in world.tells(fx.TellOffered)}
    return [told.transfer for told in world.tells(fx.TellLanded) if told.nbytes == sizes[told.transfer]]


def outstanding_is_zero(world: World) -> None:
    world.delivered("a/0", "b/0")
    world.advance(10)
    book = next(iter(world.agent("a/0").sender.asking.links.values()))
    assert not book.grants
    report = world.asks(Report)[-1]
    assert report.delivered_bytes + report.returned_bytes == book._granted_bytes


def test_only_what_is_missing_is_sent_again() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.grant("a/0", transfer, MIB)
    world.cut("a/0", "b/0")
    world.run()
    assert world.asks(CancelRequest)[-1].transfer == transfer, "nobody shall grant to it meanwhile"
    world.advance(10_000)
    world.heal("a/0", "b/0")
    assert world.asks(Request)[-1].wanted_bytes == MIB
    grant_all(world)
    assert done(world) == landed_whole(world) == [transfer]
    assert len(world.arrivals) == len(set(world.arrivals)), "no byte twice"
    assert world.agent("a/0").sender.kept_bytes == MIB
    outstanding_is_zero(world)


def test_holes_are_filled_and_nothing_else() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    chunk = world.agent("a/0").sender.transfers[transfer].chunk_bytes
    world.lose_chunks = True
    world.grant("a/0", transfer, 2 * MIB)
    for index in (1, 2, 5):
        world.put("b/0", ev.ChunkArrived(A, transfer, index * chunk, chunk, True))
    world.lose_chunks = False
    before = len(world.chunks)
    world.cut("a/0", "b/0")
    world.heal("a/0", "b/0")
    grant_all(world)
    again = sorted(piece.offset // chunk for _, piece in world.chunks[before:])
    assert again == [index for index in range(2 * MIB // chunk) if index not in (1, 2, 5)]
    assert done(world) == [transfer]


def test_an_acknowledgement_that_got_lost_is_given_again() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.lose_chunks = True
    world.grant("a/0", transfer, MIB)
    machine = world.agent("b/0")
    chunk = world.agent("a/0").sender.transfers[transfer].chunk_bytes
    for offset in range(0, MIB, chunk):
        effects = machine.handle(ev.ChunkArrived(A, transfer, offset, chunk, True), world.now_ns)
    assert any(isinstance(effect, fx.ToPeer) and isinstance(effect.frame, wire.Ack) for effect in effects)
    machine.handle(ev.RecvReleased(transfer), world.now_ns)
    world.cut("a/0", "b/0")
    world.heal("a/0", "b/0")
    assert done(world) == [transfer]
    assert len(world.tells(fx.TellOffered)) == 1, "delivered once"


def test_a_failure_that_got_lost_is_given_again_and_never_becomes_a_success() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.post("a/0", 2, 0, 1, MIB)
    machine = world.agent("b/0")
    machine.handle(ev.BlockDenied(transfer, "never", True), world.now_ns)  # its FAIL is lost
    world.cut("a/0", "b/0")
    world.heal("a/0", "b/0")
    failed = world.tells(fx.TellSendFailed)
    assert [(f.transfer, f.code) for f in failed] == [(transfer, ErrorCode.PEER_LOST)]
    assert "ended before" in failed[0].message
    grant_all(world)
    assert done(world) == [TransferId(100, 2)]


def test_a_cancel_that_got_lost_is_said_again_with_its_reason() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    other = world.post("a/0", 2, 0, 1, MIB)
    world.cut("a/0", "b/0")
    world.run()
    world.put("a/0", ev.SendCancelled(transfer))
    world.heal("a/0", "b/0")
    assert [(f.transfer, f.code) for f in world.tells(fx.TellRecvFailed)] == [(transfer, ErrorCode.CANCELLED)]
    grant_all(world)
    assert done(world) == [other]


def test_a_cancel_of_long_ago_is_not_kept_over_connections_that_stand() -> None:
    world = two_sites()
    cancels = world.agent("a/0").sender.peers[B].cancels

    def given_up(sequence: int) -> TransferId:
        transfer = world.post("a/0", sequence, 0, 1, MIB)
        world.put("a/0", ev.SendCancelled(transfer))
        return transfer

    first = given_up(1)
    world.advance(59_000)
    second = given_up(2)
    assert list(cancels) == [first, second]
    world.advance(2_000)
    third = given_up(3)
    assert list(cancels) == [second, third]
    world.cut("a/0", "b/0")
    world.run()
    world.advance(20_000)
    world.heal("a/0", "b/0")
    assert not cancels, "said again, all of them"


def test_what_the_sender_no_longer_knows_ends_with_its_list() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.cut("a/0", "b/0")
    world.run()
    world.put("a/0", ev.SendCancelled(transfer))
    world.agent("a/0").sender.peers[B].cancels.clear()
    world.heal("a/0", "b/0")
    failed = world.tells(fx.TellRecvFailed)
    assert [(f.transfer, f.code) for f in failed] == [(transfer, ErrorCode.PEER_LOST)]
    assert "gave it up while the connection was down" in failed[0].message


def test_new_messages_go_behind_those_that_are_offered_again() -> None:
    world = two_sites()
    world.post("a/0", 1, 0, 1, MIB)
    world.cut("a/0", "b/0")
    world.run()
    world.post("a/0", 2, 0, 1, 1000)
    world.heal("a/0", "b/0")
    grant_all(world)
    assert [told.transfer.sequence for told in world.tells(fx.TellOffered)] == [1, 2]
    assert sorted(t.sequence for t in done(world)) == [1, 2]


def test_time_away_counts_from_the_last_word_and_the_next_message_after_it_works() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.advance(7_000)
    world.cut("a/0", "b/0", silent_ms=6_000)
    world.run()
    world.advance(23_900)
    assert not world.tells(fx.TellSendFailed)
    world.advance(200)
    assert [f.transfer for f in world.tells(fx.TellSendFailed)] == [transfer]
    assert [f.transfer for f in world.tells(fx.TellRecvFailed)] == [transfer]
    later = world.post("a/0", 2, 0, 1, MIB)
    world.heal("a/0", "b/0")
    grant_all(world)
    assert done(world) == [later]
    outstanding_is_zero(world)


def test_a_path_that_takes_small_frames_only_fails_within_the_time_and_says_so() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.lose_chunks = True
    for _ in range(4):
        grant_all(world)
        world.advance(8_000)
        world.cut("a/0", "b/0")
        world.run()
        world.advance(200)
        world.heal("a/0", "b/0")
        if world.tells(fx.TellSendFailed):
            break
    world.cut("a/0", "b/0")
    world.advance(6_000)
    failed = world.tells(fx.TellSendFailed)
    assert [f.transfer for f in failed] == [transfer]
    for words in ("no progress", "MTU", "a/0:1", "b/0:1", f"of {MIB} bytes"):
        assert words in failed[0].message
    assert world.now_ns <= (1_000 + 8_000 + 36_000) * MS


def test_progress_ends_the_time_away() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 8 * MIB)
    for _ in range(6):
        world.grant("a/0", transfer, MIB)
        world.delivered("a/0", "b/0")
        world.advance(6_000)
        world.cut("a/0", "b/0")
        world.run()
        world.heal("a/0", "b/0")
    assert not world.tells(fx.TellSendFailed)
    grant_all(world)
    assert done(world) == [transfer]


def test_waiting_in_the_queue_for_long_is_no_time_away() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    for _ in range(3):
        world.cut("a/0", "b/0")
        world.run()
        world.advance(1_000)
        world.heal("a/0", "b/0")
        world.advance(25_000)
        world.beat("a/0", 0)
    assert world.agent("a/0").sender.transfers[transfer].state is SendState.QUEUED
    grant_all(world)
    assert done(world) == [transfer]


def test_a_receiver_without_memory_is_asked_again_and_credits_once_it_has_some() -> None:
    world = two_sites(eager_bytes=0)
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.cut("a/0", "b/0")
    world.heal("a/0", "b/0")
    assert world.agent("a/0").sender.transfers[transfer].state is SendState.CREDIT
    world.cut("a/0", "b/0")
    world.run()
    world.put("b/0", ev.RecvAccepted(transfer))  # its CREDIT is lost
    world.heal("a/0", "b/0")
    grant_all(world)
    assert done(world) == [transfer]


def test_a_turn_down_that_got_lost_is_given_again() -> None:
    world = two_sites()
    transfer = TransferId(100, 1)
    world.deny.add(transfer)
    world.break_at = world.steps + 3  # the offer has been taken in, its answer is lost
    world.post("a/0", 1, 0, 1, MIB)
    world.deny.clear()
    world.heal("a/0", "b/0")
    world.heal("b/0", "a/0")
    world.put("b/0", ev.RecvAccepted(transfer))
    grant_all(world)
    assert done(world) == [transfer]
    world.put("b/0", ev.RecvReleased(transfer))
    assert not world.agent("a/0").sender.peers[B].eager_used_bytes


def test_claims_to_hold_what_cannot_be_are_refused() -> None:
    for chunk, ranges in (
        (0, ()),
        (1, ()),
        (64 * KIB, (1, 64 * KIB)),
        (64 * KIB, (0, 65 * KIB)),
        (64 * KIB, (64 * KIB, 64 * KIB, 0, 64 * KIB)),
        (64 * KIB, (0, 2 * MIB)),
        (64 * KIB, (0, 0)),
    ):
        world = two_sites()
        transfer = world.post("a/0", 1, 0, 1, MIB)
        world.cut("a/0", "b/0")
        world.run()
        world.agent("a/0").handle(ev.PeerConnected(B, 2, MIB), world.now_ns)
        world.put("a/0", ev.PeerFrame(B, False, transfer, wire.Held(chunk, ranges)))
        assert [f.code for f in world.tells(fx.TellSendFailed)] == [ErrorCode.PROTOCOL], ranges


def test_a_restarted_receiver_gets_all_of_it_again() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.grant("a/0", transfer, MIB)
    world.restart("b/0")
    world.told.clear()
    world.attach("b/0", 1)  # its trainer kept its life
    world.connect(epoch=2)
    world.heal("a/0", "b/0")
    grant_all(world, epoch=2)
    assert done(world) == landed_whole(world) == [transfer]


def test_a_restarted_sender_continues_the_message() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.grant("a/0", transfer, MIB)
    world.restart("a/0")
    world.attach("a/0", 0)
    before = len(world.chunks)
    world.connect(epoch=2)
    world.heal("a/0", "b/0")
    envelope = Envelope("job", 0, 1, "", 0, 0, 2 * MIB, "uint8", (2 * MIB,))
    world.put("a/0", ev.SendPosted(transfer, envelope, 2 * MIB, again=True))
    grant_all(world, epoch=2)
    assert sum(chunk.length for _, chunk in world.chunks[before:]) == MIB
    assert done(world) == landed_whole(world) == [transfer]
    assert len(world.tells(fx.TellOffered)) == 1


def test_what_a_restarted_sender_does_not_offer_again_fails_in_time() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.grant("a/0", transfer, MIB)
    world.restart("a/0")
    world.connect(epoch=2)
    world.put("b/0", ev.InboundOpened(A, 101))
    world.advance(3_900)
    assert not world.tells(fx.TellRecvFailed)
    world.advance(200)
    assert [f.transfer for f in world.tells(fx.TellRecvFailed)] == [transfer]
    assert "started again" in world.tells(fx.TellRecvFailed)[0].message


def test_a_later_life_of_the_receiver_gets_nothing_of_an_earlier_ones() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.cut("a/0", "b/0")
    world.run()
    world.attach("b/0", 1, incarnation=777)
    world.told.clear()
    world.heal("a/0", "b/0")
    grant_all(world)
    assert [f.transfer for f in world.tells(fx.TellSendFailed)] == [transfer]
    assert not world.tells(fx.TellOffered)


@pytest.mark.parametrize("eager_bytes", [64 * MIB, 0])
def test_a_break_at_any_step(eager_bytes: int) -> None:
    """Cut everything before each single step of a few messages: all of them arrive, whole, once, in order."""
    steps, step = 10_000, 0
    while step < steps:
        step += 1
        world = two_sites(eager_bytes=eager_bytes)
        world.corrupt.add((TransferId(100, 2), 256 * KIB))
        world.break_at = world.steps + step
        sizes = {1: 0, 2: MIB, 3: 1000, 4: 300 * KIB}
        for sequence, nbytes in sizes.items():
            world.post("a/0", sequence, 0, 1, nbytes)
        for _ in range(6):
            for told in world.tells(fx.TellOffered):
                if not told.has_memory and told.transfer not in world.allocated and told.envelope.nbytes:
                    world.put("b/0", ev.RecvAccepted(told.transfer))
            grant_all(world)
            world.advance(5)
            for link in sorted(world.down):
                world.heal(str(link[0]), str(link[1]))
        if world.break_at > world.steps:
            steps, world.break_at = step, 0  # that was after the end
        context = f"break before step {step}"
        wanted = [TransferId(100, sequence) for sequence in sizes]
        assert sorted(done(world)) == wanted, context
        assert [told.transfer for told in world.tells(fx.TellOffered)] == wanted, context
        assert sorted(landed_whole(world)) == wanted, context
        assert max(Counter(world.arrivals).values()) == 1, context
        for transfer in wanted[1:]:
            world.put("b/0", ev.RecvReleased(transfer))
        assert not world.agent("a/0").sender.peers[B].eager_used_bytes, context
        assert not world.agent("b/0").receiver.transfers
        outstanding_is_zero(world)
    assert steps > 30


def test_the_receiving_trainers_end_while_the_path_is_down() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.cut("a/0", "b/0")
    world.run()
    world.put("b/0", ev.ClientDetached(EndpointName("job", 1), 101, "killed", False))
    world.heal("a/0", "b/0")
    assert [(f.transfer, f.code) for f in world.tells(fx.TellSendFailed)] == [(transfer, ErrorCode.PEER_LOST)]


def gone(world: World, *, unsure: bool) -> None:
    world.put(
        "a/0",
        ev.CoordinatorSaid(
            COORDINATOR, Directory((), ((RANK1, 101, "not heard of"),), False, (RANK1,) if unsure else ())
        ),
    )


def test_a_trainer_that_a_coordinator_lost_sight_of_is_waited_for() -> None:
    """A cut between the sites takes agent b's session with a coordinator at a, too: its trainers are not dead."""
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.cut("a/0", "b/0")
    world.run()
    gone(world, unsure=True)
    later = world.post("a/0", 2, 0, 1, MIB)
    world.advance(20_000)
    assert not world.tells(fx.TellSendFailed)
    assert not world.tells(fx.TellPeerGone)
    world.heal("a/0", "b/0")
    world.publish()
    grant_all(world)
    assert done(world) == [transfer, later]
    world.advance(40_000)
    assert not world.tells(fx.TellPeerGone)


def test_one_that_stays_unseen_is_gone_after_the_peer_timeout_and_a_certain_end_counts_at_once() -> None:
    world = two_sites()
    gone(world, unsure=True)
    world.advance(29_900)
    assert not world.tells(fx.TellPeerGone)
    world.advance(200)
    assert [(t.rank, t.incarnation) for t in world.tells(fx.TellPeerGone)] == [(1, 101)]
    other = two_sites()
    gone(other, unsure=False)
    assert [(t.rank, t.incarnation) for t in other.tells(fx.TellPeerGone)] == [(1, 101)]


def test_a_new_life_ends_the_wait_for_the_one_that_is_unseen() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    gone(world, unsure=True)
    world.attach("b/0", 1, incarnation=777)
    world.publish()
    assert [(t.rank, t.incarnation) for t in world.tells(fx.TellPeerGone) if t.rank == 1] == [(1, 101)]
    assert [(f.transfer, f.code) for f in world.tells(fx.TellSendFailed)] == [(transfer, ErrorCode.PEER_LOST)]


def test_one_whose_agent_has_been_away_for_long_is_gone_with_the_coordinators_word() -> None:
    """Else a coordinator's patience and ours would add up."""
    world = two_sites()
    for link in (("a/0", "b/0"), ("b/0", "a/0")):
        world.cut(*link)
    world.run()
    world.advance(25_000)
    gone(world, unsure=True)
    world.advance(4_900)
    assert not world.tells(fx.TellPeerGone)
    world.advance(200)
    ended = [told for told in world.tells(fx.TellPeerGone) if not told.returns]
    assert [(t.rank, t.incarnation) for t in ended] == [(1, 101)]


def test_a_sender_that_was_started_again_and_does_not_come_is_judged_when_it_is_reached() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.grant("a/0", transfer, MIB)
    world.restart("a/0")
    world.put("b/0", ev.PeerConnected(A, 101, MIB))
    world.advance(4_100)
    assert [f.transfer for f in world.tells(fx.TellRecvFailed)] == [transfer]
