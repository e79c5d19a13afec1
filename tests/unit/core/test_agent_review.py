"""The agent machine in the corners: ends that cross, lives that clash, and others' names in a frame."""

from __future__ import annotations

import dataclasses

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.core.messages import Directory, TransferDone
from proxyd.core.units import MAX_DURATION_NS
from proxyd.wire import peer as wire
from proxyd.wire.envelope import Envelope, ErrorCode, TrafficClass

from .agent_world import COORDINATOR, LINK, World

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
    machine.handle(ev.PeerFrame(A, True, transfer, wire.Cancel(ErrorCode.CANCELLED, "")), world.now_ns)
    effects = machine.handle(ev.BlockAllocated(transfer, 1, 4096), world.now_ns)
    assert effects == [fx.FreeBlock(transfer, RANK[1])]
    assert machine.handle(ev.BlockAllocated(transfer, 1, 4096), world.now_ns) == []


def eager_left_bytes(world: World) -> int:
    return world.eager_bytes - sum(world.agent("a/0").sender.peers[B].eager_used_bytes.values())


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


# -- grants ------------------------------------------------------------------------------------------------------------


def three_agents() -> World:
    world = World("a/0", "b/0", "b/1")
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.attach("b/1", 2)
    world.connect()
    return world


def test_a_grant_goes_ahead_of_one_whose_trainer_is_still_copying() -> None:
    """Also to another peer, and also when nothing else happens."""
    for destination in (1, 2):
        world = three_agents()
        copying = world.post("a/0", 1, 0, 1, MIB, filled=0)
        ready = world.post("a/0", 2, 0, destination, MIB)
        world.grant("a/0", copying, MIB)
        world.grant("a/0", ready, MIB)
        assert sum(c.length for _, c in world.chunks if c.transfer == ready) == MIB
        world.put("a/0", ev.SendFilled(copying, MIB))
        assert len(world.tells(fx.TellSendDone)) == 2


def test_a_grant_that_starts_later_goes_ahead_too() -> None:
    for destination in (1, 2):
        world = three_agents()
        copying = world.post("a/0", 1, 0, 1, MIB, filled=0)
        ready = world.post("a/0", 2, 0, destination, MIB)
        world.grant("a/0", copying, MIB)
        world.grant("a/0", ready, MIB, start_ms=20)
        assert not world.chunks
        world.advance(21)
        assert sum(c.length for _, c in world.chunks if c.transfer == ready) == MIB


def test_the_next_peer_is_pumped_when_the_first_one_is_done() -> None:
    world = three_agents()
    first = world.post("a/0", 1, 0, 1, MIB, filled=0)
    second = world.post("a/0", 2, 0, 2, MIB, filled=0)
    world.grant("a/0", first, MIB)
    world.grant("a/0", second, MIB)
    world.put("a/0", ev.SendCancelled(first))
    assert not world.chunks
    world.put("a/0", ev.SendFilled(second, MIB))
    assert [d.transfer for d in world.tells(fx.TellSendDone)] == [second]


def test_grants_smaller_than_a_chunk_add_up() -> None:
    """A coordinator that came back with smaller chunks than this message was cut into."""
    world = three_agents()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    other = world.post("a/0", 2, 0, 2, MIB, filled=0)
    for _ in range(16):
        world.grant("a/0", transfer, 64 << 10)
        world.grant("a/0", other, 64 << 10)
    assert [d.transfer for d in world.tells(fx.TellSendDone)] == [transfer]
    book = world.agent("a/0").sender.asking.links[LINK]
    assert book.untaken_bytes == MIB
    world.put("a/0", ev.SendFilled(other, MIB))
    assert len(world.tells(fx.TellSendDone)) == 2
    assert book.untaken_bytes == 0


# -- odds and ends -----------------------------------------------------------------------------------------------------


def test_counts_of_connections_that_are_gone_are_not_taken() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", transfer, MIB)
    world.put("a/0", ev.PeerDisconnected(B, "reset"))
    world.put("a/0", ev.SendProgress(B, MIB, MIB, 5 * MIB, 1, 1, 0, 1))
    assert world.agent("a/0").sender.asking.links[LINK].backlog_bytes() == 0


def test_announcements_end_with_their_trainer() -> None:
    world = two_sites()
    for tag in range(50):
        envelope = Envelope("job", 0, 1, "", tag, TrafficClass.PIPELINE, MIB, "", ())
        world.put("a/0", ev.SendAnnounced(envelope, 1_000_000))
    world.put("a/0", ev.ClientDetached(RANK[0], 100, "closed", True))
    assert not len(world.agent("a/0").sender.asking.announcer.announced)


def test_a_peer_cannot_end_the_session_with_a_time_beyond_reason() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.put("a/0", ev.PeerFrame(B, False, transfer, wire.Ack(MIB, (1 << 64) - 1)))
    assert world.asks(TransferDone)[0].arrival_span_ns <= MAX_DURATION_NS


def test_filling_goes_on_while_the_receivers_block_is_looked_for() -> None:
    world = one_host(0, 1)
    machine = world.agent("a/0")
    transfer = TransferId(100, 1)
    envelope = offer_of(transfer, 0, 1, MIB).envelope
    machine.handle(ev.SendPosted(transfer, envelope, 0), world.now_ns)
    machine.handle(ev.SendFilled(transfer, MIB), world.now_ns)
    landed = machine.handle(ev.BlockAllocated(transfer, 1, 4096), world.now_ns)
    assert [e.nbytes for e in landed if isinstance(e, fx.TellLanded)] == [MIB]


# -- memory that many wait for -----------------------------------------------------------------------------------------


class Receivers:
    """One receiving agent with messages that were accepted and have no memory. ``room``: what the next blocks get."""

    def __init__(self, *sizes: int) -> None:
        self.world = two_sites()
        self.machine = self.world.agent("b/0")
        self.asked: list[int] = []
        self.room = 0
        self.size = {TransferId(100, index + 1): nbytes for index, nbytes in enumerate(sizes)}
        for transfer, nbytes in self.size.items():
            offer = dataclasses.replace(offer_of(transfer, 0, 1, nbytes), eager=False)
            self.put(ev.PeerFrame(A, True, transfer, offer))
            self.put(ev.RecvAccepted(transfer))
        self.asked.clear()

    def put(self, event: ev.AgentEvent) -> None:
        for effect in self.machine.handle(event, self.world.now_ns):
            if isinstance(effect, fx.AllocateBlock):
                self.asked.append(effect.transfer.sequence)
                if effect.nbytes <= self.room:
                    self.room -= effect.nbytes
                    self.put(ev.BlockAllocated(effect.transfer, 1, 4096))
                else:
                    self.put(ev.BlockDenied(effect.transfer, "full", False))

    def freed(self, nbytes: int) -> list[int]:
        self.room += nbytes
        self.asked.clear()
        self.put(ev.MemoryFreed(RANK[1]))
        return self.asked


def test_one_vain_try_speaks_for_all_messages_of_its_size() -> None:
    """Memory is freed for each message that is received: trying all that wait each time would cost n squared."""
    rig = Receivers(*[MIB] * 500)
    assert rig.freed(0) == [1]
    assert rig.freed(3 * MIB) == [1, 2, 3, 4]
    assert rig.freed(MIB) == [4, 5]


def test_a_smaller_message_does_not_wait_for_a_larger_one() -> None:
    """The receiving trainer may need it before it gives anything back."""
    rig = Receivers(8 * MIB, 4 * MIB, 6 * MIB, 2 * MIB)
    assert rig.freed(2 * MIB) == [1, 2, 4]
    assert rig.freed(8 * MIB) == [1, 2]


def test_messages_that_ended_while_they_waited_are_passed_over() -> None:
    rig = Receivers(MIB, MIB)
    rig.put(ev.PeerFrame(A, True, TransferId(100, 1), wire.Cancel(ErrorCode.CANCELLED, "no")))
    assert rig.freed(2 * MIB) == [2]
    rig.put(ev.ClientDetached(RANK[1], 101, "killed", False))
    assert not rig.machine.receiver._denied


def test_a_grant_that_is_too_small_for_a_chunk_does_not_hold_up_another_peer() -> None:
    world = three_agents()
    small = world.post("a/0", 1, 0, 1, MIB)
    other = world.post("a/0", 2, 0, 2, MIB)
    world.grant("a/0", small, 64 << 10)
    world.grant("a/0", other, MIB)
    assert [d.transfer for d in world.tells(fx.TellSendDone)] == [other]


# -- lives of trainers -------------------------------------------------------------------------------------------------


def test_a_trainer_that_moved_away_is_found_once_its_old_process_has_ended() -> None:
    """Its old process hangs: the new one, at another agent, was registered while the old one was still here."""
    world = World("a/0", "b/0")
    world.attach("a/0", 0)
    world.attach("a/0", 1)
    world.connect()
    world.attach("b/0", 1, incarnation=201)
    world.publish()
    world.put("a/0", ev.ClientDetached(RANK[1], 101, "killed", False))
    world.post("a/0", 1, 0, 1, 1000)
    assert [d.transfer.sequence for d in world.tells(fx.TellSendDone)] == [1]
    here = [t for n, t in world.told if n == A and isinstance(t, fx.TellPeerHere) and t.endpoint == RANK[0]]
    assert here[-1].incarnation == 201


def test_word_of_a_life_elsewhere_that_has_ended_is_not_kept() -> None:
    world = World("a/0", "b/0")
    world.attach("a/0", 0)
    world.attach("a/0", 1)
    world.connect()
    world.attach("b/0", 1, incarnation=201)
    world.publish()
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Directory((), ((RANK[1], 201, "killed"),), full=False)))
    world.put("a/0", ev.ClientDetached(RANK[1], 101, "killed", False))
    world.post("a/0", 1, 0, 1, 1000)
    world.advance(10_001)
    assert world.tells(fx.TellSendFailed)[0].code is ErrorCode.UNKNOWN_DESTINATION
    assert not world.agent("a/0")._elsewhere


def test_what_lingers_of_one_life_does_not_end_with_the_next() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.put("a/0", ev.ClientDetached(RANK[0], 100, "closed", True))
    world.put("a/0", ev.ClientAttached(RANK[0], 500))
    world.put("a/0", ev.ClientDetached(RANK[0], 500, "killed", False))
    assert not world.tells(fx.TellSendFailed)
    world.grant("a/0", transfer, MIB)
    assert [d.transfer for d in world.tells(fx.TellSendDone)] == [transfer]


def test_a_new_connection_starts_with_whole_budgets_also_of_endpoints_that_are_away() -> None:
    world = two_sites(eager_bytes=4 * MIB)
    world.post("a/0", 1, 0, 1, MIB)
    world.put("a/0", ev.PeerDisconnected(B, "reset"))
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Directory((), ((RANK[1], 101, "killed"),), full=False)))
    world.post("a/0", 2, 0, 1, MIB)
    world.publish()
    assert [o.transfer.sequence for o in world.tells(fx.TellOffered)] == [1, 2]
    assert eager_left_bytes(world) == 3 * MIB
