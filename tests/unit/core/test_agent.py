"""The agent machine, both halves driven through each other."""

from __future__ import annotations

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import CancelRequest, Denied, Directory, EndpointUp, Report, Request, TransferDone
from proxyd.core.transfer import RECV_TABLE, SEND_TABLE, RecvState, SendInput, SendState, TransitionError, step
from proxyd.wire import peer as wire
from proxyd.wire.client import SendPhase
from proxyd.wire.envelope import ErrorCode, TransferId

from .agent_world import COORDINATOR, MS, World

MIB = 1 << 20


def two_sites(**kw: int) -> World:
    world = World("a/0", "b/0", **kw)
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect()
    return world


def test_a_granted_transfer_arrives_whole_and_is_acknowledged() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 3 * MIB)
    assert [r.wanted_bytes for r in world.asks(Request)] == [3 * MIB]
    assert not world.chunks, "nothing may leave before a grant"
    world.grant("a/0", transfer, MIB)
    assert sum(c.length for _, c in world.chunks) == MIB
    world.grant("a/0", transfer, 2 * MIB)
    assert [t.nbytes for t in world.tells(fx.TellLanded)][-1] == 3 * MIB
    assert [t.transfer for t in world.tells(fx.TellSendDone)] == [transfer]
    assert world.asks(TransferDone)[0].ok
    assert all(c.granted for _, c in world.chunks)


def test_a_small_message_goes_at_once_and_is_accounted_afterwards() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 64 << 10)
    assert [t.transfer for t in world.tells(fx.TellSendDone)] == [transfer]
    assert not world.asks(Request)
    assert world.agent("a/0").status(world.now_ns).links[0].unscheduled_bytes == 64 << 10


def test_an_empty_message_is_delivered_in_order_without_memory() -> None:
    world = two_sites()
    world.post("a/0", 1, 0, 1, MIB)
    world.post("a/0", 2, 0, 1, 0)
    offered = world.tells(fx.TellOffered)
    assert [o.transfer.sequence for o in offered] == [1, 2]
    assert [t.transfer.sequence for t in world.tells(fx.TellSendDone)] == [2]


def test_data_is_sent_as_the_trainer_fills_the_block() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB, filled=0)
    world.grant("a/0", transfer, MIB)
    assert not world.chunks
    world.put("a/0", ev.SendFilled(transfer, 300_000))
    assert [c.length for _, c in world.chunks] == [256 << 10]
    world.put("a/0", ev.SendFilled(transfer, MIB))
    assert world.tells(fx.TellSendDone)


def test_a_grant_waits_for_its_start() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", transfer, MIB, start_ms=20)
    world.advance(19)
    assert not world.chunks
    world.advance(2)
    assert sum(c.length for _, c in world.chunks) == MIB


def test_an_expired_grant_is_returned_and_asked_for_again() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB, filled=0)
    world.grant("a/0", transfer, MIB, ttl_ms=100)
    world.advance(150)
    assert world.asks(Report)[-1].returned_bytes == MIB
    assert [r.wanted_bytes for r in world.asks(Request)] == [MIB, 2 * MIB]


def test_a_grant_of_another_epoch_is_refused() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", transfer, MIB, epoch=7)
    assert not world.chunks


def test_a_grant_for_a_finished_transfer_is_returned() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.put("a/0", ev.SendCancelled(transfer))
    assert world.asks(CancelRequest)
    world.grant("a/0", transfer, MIB)
    world.advance(1)
    assert world.asks(Report)[-1].returned_bytes == MIB


def test_more_than_needed_is_returned_at_once() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 100_000)
    world.grant("a/0", transfer, MIB)
    assert world.asks(Report)[-1].returned_bytes == MIB - 100_000


def test_the_lead_is_reported_before_the_backlog_leaves() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB, filled=0)
    world.grant("a/0", transfer, MIB, rate=50_000_000)
    before = len(world.asks(Report))
    world.advance(14)
    assert len(world.asks(Report)) == before
    world.advance(3)
    report = world.asks(Report)[-1]
    assert report.backlog_bytes == MIB
    assert report.leaves_in_ns == pytest.approx(MIB * 1e9 / 50_000_000, rel=0.01)


def test_reports_count_what_left_and_what_was_delivered() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.grant("a/0", transfer, 2 * MIB)
    world.delivered("a/0", "b/0", unsent=MIB)
    report = world.asks(Report)[-1]
    assert (report.left_bytes, report.delivered_bytes, report.backlog_bytes) == (MIB, MIB, MIB)
    world.delivered("a/0", "b/0")
    report = world.asks(Report)[-1]
    assert (report.left_bytes, report.delivered_bytes, report.backlog_bytes) == (2 * MIB, 2 * MIB, 0)


def test_a_corrupt_chunk_is_sent_again_under_a_grant_of_its_own() -> None:
    world = two_sites()
    transfer = TransferId(100, 1)
    world.corrupt.add((transfer, 0))
    world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", transfer, MIB)
    assert not world.tells(fx.TellSendDone)
    assert world.asks(Request)[-1].wanted_bytes == MIB + (256 << 10)
    world.grant("a/0", transfer, 256 << 10)
    assert world.tells(fx.TellSendDone)
    assert world.agent("b/0").status(world.now_ns).corrupt_chunks == 1


def test_a_message_beyond_the_eager_budget_waits_for_a_posted_receive() -> None:
    world = two_sites(eager_bytes=MIB)
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    offered = world.tells(fx.TellOffered)[0]
    assert not offered.has_memory
    assert not world.asks(Request)
    assert world.tells(fx.TellSendState)[-1].phase is SendPhase.CREDIT
    world.put("b/0", ev.RecvAccepted(transfer))
    assert world.tells(fx.TellBlock)
    assert world.asks(Request)
    world.grant("a/0", transfer, 2 * MIB)
    assert world.tells(fx.TellSendDone)


def test_the_eager_budget_comes_back_with_the_release() -> None:
    world = two_sites(eager_bytes=MIB)
    first = world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", first, MIB)
    world.post("a/0", 2, 0, 1, MIB)
    assert [o.has_memory for o in world.tells(fx.TellOffered)] == [True, False]
    world.put("b/0", ev.RecvReleased(first))
    assert world.tells(fx.FreeBlock)[0].transfer == first
    world.post("a/0", 3, 0, 1, MIB)
    assert [o.has_memory for o in world.tells(fx.TellOffered)] == [True, False, True]


def test_an_eager_offer_without_memory_is_turned_down_and_sent_again_on_credit() -> None:
    world = two_sites()
    transfer = TransferId(100, 1)
    world.deny.add(transfer)
    world.post("a/0", 1, 0, 1, MIB)
    assert not world.tells(fx.TellOffered)[0].has_memory
    assert world.tells(fx.TellSendState)[-1].phase is SendPhase.CREDIT
    world.deny.clear()
    world.put("b/0", ev.RecvAccepted(transfer))
    world.grant("a/0", transfer, MIB)
    assert world.tells(fx.TellSendDone)


def test_memory_that_is_freed_serves_the_one_that_was_denied() -> None:
    world = two_sites(eager_bytes=0)
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.deny.add(transfer)
    world.put("b/0", ev.RecvAccepted(transfer))
    assert not world.tells(fx.TellBlock)
    world.deny.clear()
    world.put("b/0", ev.MemoryFreed(EndpointName("job", 1)))
    assert world.tells(fx.TellBlock)


def test_within_a_host_the_block_is_handed_over_and_given_back_on_release() -> None:
    world = World("a/0")
    world.attach("a/0", 0)
    world.attach("a/0", 1)
    transfer = world.post("a/0", 1, 0, 1, MIB, filled=0)
    world.put("a/0", ev.SendFilled(transfer, 1000))
    world.put("a/0", ev.SendFilled(transfer, MIB))
    assert [t.nbytes for t in world.tells(fx.TellLanded)] == [1000, MIB]
    assert [t.transfer for t in world.tells(fx.TellSendDelivered)] == [transfer], "keeping it blocks nobody"
    assert not world.tells(fx.TellSendDone)
    world.put("a/0", ev.RecvReleased(transfer))
    assert world.tells(fx.TellSendDone)
    assert not world.chunks
    assert world.agent("a/0").status(world.now_ns).outgoing == 0


def test_within_a_site_no_grant_is_asked_for() -> None:
    world = World("a/0", "a/1")
    world.attach("a/0", 0)
    world.attach("a/1", 1)
    world.connect()
    world.post("a/0", 1, 0, 1, 5 * MIB)
    assert world.tells(fx.TellSendDone)
    assert not world.asks(Request)
    assert not any(c.granted for _, c in world.chunks)


def test_messages_wait_for_their_destination_and_keep_their_order() -> None:
    world = World("a/0", "b/0")
    world.attach("a/0", 0)
    world.connect()
    for sequence in (1, 2, 3):
        world.post("a/0", sequence, 0, 1, 1000 * sequence)
    assert not world.tells(fx.TellOffered)
    world.attach("b/0", 1)
    world.publish()
    assert [o.transfer.sequence for o in world.tells(fx.TellOffered)] == [1, 2, 3]


def test_an_unknown_destination_fails_with_the_known_ranks() -> None:
    world = two_sites()
    world.post("a/0", 1, 0, 9, MIB)
    world.advance(10_001)
    failed = world.tells(fx.TellSendFailed)[0]
    assert failed.code is ErrorCode.UNKNOWN_DESTINATION
    assert "job/9" in failed.message
    assert "[0, 1]" in failed.message


def test_without_any_coordinator_the_error_names_those_configured() -> None:
    world = World("a/0")
    world.attach("a/0", 0)
    world.post("a/0", 1, 0, 1, MIB)
    world.advance(10_001)
    failed = world.tells(fx.TellSendFailed)[0]
    assert failed.code is ErrorCode.CONTROL_LOST
    assert COORDINATOR in failed.message


def test_a_link_that_nobody_owns_fails_in_bounded_time() -> None:
    world = World("a/0", "b/0")
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect(owns=("x->y",))
    world.post("a/0", 1, 0, 1, MIB)
    world.advance(31_000)
    assert world.tells(fx.TellSendFailed)[0].code is ErrorCode.CONTROL_LOST


def test_a_denial_reaches_the_trainer_with_its_reason() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Denied(transfer, "job may not use a->b")))
    failed = world.tells(fx.TellSendFailed)[0]
    assert failed.code is ErrorCode.REFUSED
    assert "job may not use a->b" in failed.message


def test_a_silent_coordinator_is_replaced_by_the_fallback_rate() -> None:
    world = two_sites()
    world.beat("a/0", 10_000_000)
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.advance(450)
    assert not world.chunks
    world.advance(500)
    sent = sum(c.length for _, c in world.chunks)
    assert 0 < sent <= 10_000_000 * 0.5 + MIB
    world.advance(200)
    assert transfer in [t.transfer for t in world.tells(fx.TellSendDone)]
    assert world.agent("a/0").status(world.now_ns).links[0].fallback_bytes == 2 * MIB


def test_a_new_session_asks_again_for_what_is_left() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.grant("a/0", transfer, MIB)
    world.put("a/0", ev.CoordinatorLost(COORDINATOR, "killed"))
    world.connect(epoch=2)
    assert world.asks(Request)[-1].wanted_bytes == MIB
    assert EndpointUp(EndpointName("job", 0), 100) in world.asks(EndpointUp)
    world.grant("a/0", transfer, MIB, epoch=2)
    assert world.tells(fx.TellSendDone)
    world.delivered("a/0", "b/0")
    assert world.asks(Report)[-1].delivered_bytes == MIB, "bytes of the earlier session don't count in this one"


def test_a_lost_peer_fails_what_is_under_way_on_both_sides() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.grant("a/0", transfer, MIB)
    world.put("a/0", ev.PeerDisconnected(AgentName("b", "0"), "reset"))
    world.put("b/0", ev.InboundClosed(AgentName("a", "0"), 1, "reset"))
    world.advance(29_000)
    assert not world.tells(fx.TellSendFailed)
    assert not world.tells(fx.TellRecvFailed)
    assert world.asks(Report)[-1].returned_bytes == 0
    assert world.asks(Report)[-1].delivered_bytes == MIB, "bytes that died with their connection are not outstanding"
    world.advance(1_100)
    failed = world.tells(fx.TellSendFailed)[0]
    assert failed.code is ErrorCode.PEER_LOST
    assert failed.bytes_done == MIB
    assert "agent b/0 at b/0:1 has been away for 30.0 s" in failed.message
    assert world.tells(fx.TellRecvFailed)[0].code is ErrorCode.PEER_LOST


def test_a_dead_receiver_fails_its_senders() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.put("b/0", ev.ClientDetached(EndpointName("job", 1), 101, "killed", False))
    assert [(f.transfer, f.code) for f in world.tells(fx.TellSendFailed)] == [(transfer, ErrorCode.PEER_LOST)]
    assert world.tells(fx.FreeBlock)


def test_a_dead_sender_tells_the_receiver() -> None:
    world = two_sites()
    world.post("a/0", 1, 0, 1, 2 * MIB)
    world.put("a/0", ev.ClientDetached(EndpointName("job", 0), 100, "killed", False))
    assert world.tells(fx.TellRecvFailed)[0].code is ErrorCode.PEER_LOST


def test_close_lingers_for_what_is_filled() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.put("a/0", ev.ClientDetached(EndpointName("job", 0), 100, "closed", True))
    world.grant("a/0", transfer, MIB)
    assert world.tells(fx.TellLanded)[-1].nbytes == MIB
    late = two_sites()
    late.post("a/0", 1, 0, 1, MIB)
    late.put("a/0", ev.ClientDetached(EndpointName("job", 0), 100, "closed", True))
    late.advance(5_001)
    assert late.tells(fx.TellRecvFailed)


def test_the_newest_life_of_an_endpoint_wins() -> None:
    world = two_sites()
    world.attach("a/0", 0, incarnation=555)
    closed = world.tells(fx.CloseClient)[0]
    assert (closed.incarnation, closed.code) == (100, ErrorCode.CLOSED)


def test_an_offer_for_an_earlier_life_is_refused() -> None:
    world = two_sites()
    envelope_of = world.post("a/0", 1, 0, 1, MIB)
    offer = world.agent("a/0").sender.transfers[envelope_of].envelope
    stale = wire.Offer(offer, 999, 256 << 10, True)
    world.put("b/0", ev.PeerFrame(AgentName("a", "0"), True, TransferId(100, 2), stale))
    assert world.agent("b/0").status(world.now_ns).incoming == 1


def test_an_offer_repeated_after_delivery_is_acknowledged_and_not_delivered_twice() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 1000)
    world.put("b/0", ev.RecvReleased(transfer))
    before = len(world.tells(fx.TellOffered))
    offer = wire.Offer(world.tells(fx.TellOffered)[0].envelope, 101, 64 << 10, True)
    world.put("b/0", ev.PeerFrame(AgentName("a", "0"), True, transfer, offer))
    assert len(world.tells(fx.TellOffered)) == before


def test_announcements_are_matched_to_the_next_message_of_their_channel() -> None:
    world = two_sites()
    transfer = TransferId(100, 1)
    world.post("a/0", 1, 0, 1, MIB)
    envelope = world.agent("a/0").sender.transfers[transfer].envelope
    world.put("a/0", ev.SendAnnounced(envelope, 50 * MS))
    world.post("a/0", 2, 0, 1, MIB)
    world.post("a/0", 3, 0, 1, MIB)
    assert [r.announcement for r in world.asks(Request)] == [0, 1, 0]


def test_what_is_not_in_the_table_cannot_happen() -> None:
    with pytest.raises(TransitionError):
        step(SEND_TABLE, SendState.DONE, SendInput.GRANTED)
    assert not any(state is SendState.DONE for state, _ in SEND_TABLE)
    assert not any(state in (RecvState.RELEASED, RecvState.FAILED) for state, _ in RECV_TABLE)


def test_a_grant_that_crosses_a_turn_down_is_wanted_anew() -> None:
    world = two_sites()
    transfer = TransferId(100, 1)
    world.deny.add(transfer)
    world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", transfer, MIB)
    assert not world.chunks
    world.deny.clear()
    world.put("b/0", ev.RecvAccepted(transfer))
    assert world.asks(Request)[-1].wanted_bytes == 2 * MIB, "the coordinator counts the refused grant as given"
    world.grant("a/0", transfer, MIB)
    assert world.tells(fx.TellSendDone)


def test_delivered_bytes_go_on_counting_over_a_peer_that_was_dropped_and_dialled_anew() -> None:
    world = two_sites()
    first = world.post("a/0", 1, 0, 1, 3 * MIB)
    world.grant("a/0", first, 3 * MIB)
    world.delivered("a/0", "b/0")
    # The job ends: nobody needs the connections any more. The next one's connections count from zero.
    gone = world.endpoints.pop()
    world.put(
        "a/0", ev.CoordinatorSaid(COORDINATOR, Directory((), ((gone.endpoint, gone.incarnation, "ended"),), full=False))
    )
    assert world.tells(fx.DropPeer)
    world._taken.clear()
    world.attach("b/0", 1, 900)
    world.publish()
    second = world.post("a/0", 2, 0, 1, MIB)
    world.grant("a/0", second, MIB)
    world.delivered("a/0", "b/0")
    world.advance(10)
    report = world.asks(Report)[-1]
    assert (report.left_bytes, report.delivered_bytes) == (4 * MIB, 4 * MIB)


def test_what_is_in_the_kernel_leaves_at_the_pace_of_its_own_grant() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", transfer, MIB, rate=10_000_000)
    world.delivered("a/0", "b/0", unsent=500_000)
    assert world.asks(Report)[-1].leaves_in_ns == 50 * MS, "not at the whole link's rate"


def test_an_agent_that_did_not_get_to_run_reads_before_it_calls_its_coordinator_silent() -> None:
    world = two_sites()
    world.beat("a/0", 10_000_000)
    world.post("a/0", 1, 0, 1, 2 * MIB)
    # A second passes without this agent: its timer comes first, the beats wait in its socket.
    world.now_ns += 1000 * MS
    world.put("a/0", ev.TimePassed())
    assert not world.chunks
    world.beat("a/0", 10_000_000)
    world.advance(400)
    assert world.agent("a/0").status(world.now_ns).links[0].fallback_bytes == 0
    # Nothing was there to read: it is silent, and the second look has cost a tenth of a second.
    world.now_ns += 1000 * MS
    world.put("a/0", ev.TimePassed())
    world.advance(150)
    assert world.agent("a/0").status(world.now_ns).links[0].fallback_bytes > 0
