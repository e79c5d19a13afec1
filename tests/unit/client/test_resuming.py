"""The agent ends and another life of it comes: what waits goes on, once and in order, or ends with an error."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import proxyd_client
from proxyd.agent.local import UNREAD_BYTES
from proxyd.wire import arena as layout
from proxyd.wire import client as wire
from proxyd.wire.envelope import Envelope, ErrorCode, TransferId
from proxyd_client import (
    AgentUnavailable,
    ClosedError,
    ConfigError,
    PeerLost,
    TransferCancelled,
    TransferTimeout,
)
from proxyd_client.link import Link
from proxyd_client.resuming import MOST_SENDERS, REMEMBERED, Knowledge
from tests.fakes.fake_agent import FakeAgent
from tests.unit.client.conftest import Connect

SECOND = 1_000_000_000
BIG = 5 << 20

Lives = Callable[..., FakeAgent]


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Lives]:
    """The agent's next life at the same place; the one before it is killed."""
    with ExitStack() as stack:
        lives: list[FakeAgent] = []

        def start(**knobs: Any) -> FakeAgent:
            if lives:
                lives[-1].kill()
            knobs.setdefault("reconnect_ns", 10 * SECOND)
            agent = FakeAgent(tmp_path, incarnation=len(lives) + 1, **knobs)
            lives.append(stack.enter_context(agent))
            return agent

        yield start


def content(nbytes: int, number: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return (np.arange(nbytes, dtype=np.uint64) * np.uint64(2 * number + 1) >> np.uint64(3)).astype(np.uint8)


def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)


def posts(agent: FakeAgent) -> list[tuple[int, bool]]:
    return [(post.sequence, post.again) for post in agent.posts]


# ------------------------------------------------------------------------------------------------------------ sending


@pytest.mark.parametrize("nbytes", [0, 1000, BIG])
def test_what_was_not_acknowledged_is_posted_again_in_order(life: Lives, connect: Connect, nbytes: int) -> None:
    old = life(hold=True)
    sender, receiver = connect(old, 0), connect(old, 1)
    handles = [sender.isend(content(nbytes, number), dst=1, tag=number % 2) for number in range(4)]
    until(lambda: len(old.posts) == 4)
    new = life()
    for number in (1, 3, 0, 2):
        got = receiver.recv(src=0, tag=number % 2, timeout_s=5)
        assert np.array_equal(got.array, content(nbytes, number))
    for handle in handles:
        handle.wait(5)
    assert posts(new) == [(1, True), (2, True), (3, True), (4, True)]
    lives = {hello.rank: hello.incarnation for hello in old.hellos}
    assert {hello.rank: (hello.incarnation, hello.resumes) for hello in new.hellos} == {
        rank: (incarnation, 1) for rank, incarnation in lives.items()
    }
    assert {post.dst_incarnation for post in new.posts} == {lives[1]}
    assert all(hello.age_ns > 0 for hello in new.hellos)


def test_what_was_acknowledged_is_not_posted_again(life: Lives, connect: Connect) -> None:
    old = life()
    sender, receiver = connect(old, 0), connect(old, 1)
    sender.send(content(1000), dst=1, timeout_s=5)
    old.change(hold=True)
    handle = sender.isend(content(1000, 1), dst=1)
    new = life()
    assert np.array_equal(receiver.recv(src=0, timeout_s=5).array, content(1000))
    assert np.array_equal(receiver.recv(src=0, timeout_s=5).array, content(1000, 1))
    handle.wait(5)
    assert posts(new) == [(2, True)]


def test_new_messages_wait_for_the_agent_and_go_behind_the_old_ones(life: Lives, connect: Connect) -> None:
    old = life(hold=True)
    sender = connect(old, 0)
    handles = [sender.isend(content(1000), dst=1)]
    until(lambda: old.posts)
    old.kill()
    until(lambda: sender._session.core.away)
    with pytest.raises(TransferTimeout, match="its next life was not ready") as caught:
        sender.isend(content(1000), dst=1, timeout_s=0.05)
    assert caught.value.phase == "waiting for this host's agent to come back"
    with pytest.raises(TransferTimeout, match="waiting for this host's agent to come back"):
        handles[0].wait(0.01)
    handles.append(sender.isend(b"", dst=1))
    waiting = threading.Thread(target=lambda: handles.append(sender.isend(content(BIG, 2), dst=1)))
    waiting.start()
    new = life()
    waiting.join(5)
    receiver = connect(new, 1)
    sizes = [receiver.recv(src=0, timeout_s=5).nbytes for _ in range(3)]
    for handle in handles:
        handle.wait(5)
    assert sizes == [1000, 0, BIG]
    assert [sequence for sequence, _ in posts(new)] == [1, 2, 3]


def test_more_waits_than_the_next_life_has_room_for(life: Lives, connect: Connect) -> None:
    old = life(hold=True)
    sender, receiver = connect(old, 0), connect(old, 1)
    handles = [sender.isend(content(BIG, number), dst=1) for number in range(3)]
    until(lambda: len(old.posts) == 3)
    new = life(send_arena_bytes=6 << 20, memory_limit_bytes=6 << 20)
    for number in range(3):
        assert np.array_equal(receiver.recv(src=0, timeout_s=5).array, content(BIG, number))
    for handle in handles:
        handle.wait(5)
    assert [sequence for sequence, _ in posts(new)] == [1, 2, 3]


def test_a_message_that_no_longer_fits_fails_and_the_others_go_on(life: Lives, connect: Connect) -> None:
    old = life(hold=True)
    sender, receiver = connect(old, 0), connect(old, 1)
    large, small = sender.isend(content(BIG), dst=1, tag=1), sender.isend(content(1000), dst=1, tag=2)
    until(lambda: len(old.posts) == 2)
    life(send_arena_bytes=1 << 20, memory_limit_bytes=2 << 20)
    with pytest.raises(AgentUnavailable, match="no memory for its 5242880 bytes"):
        large.wait(5)
    assert receiver.recv(src=0, tag=2, timeout_s=5).nbytes == 1000
    small.wait(5)


def test_a_send_that_was_cancelled_is_not_posted_again(
    life: Lives, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = life(hold=True)
    sender = connect(old, 0)
    before, during, stays = (sender.isend(content(1000), dst=1, tag=tag) for tag in range(3))
    until(lambda: len(old.posts) == 3)
    monkeypatch.setattr(old, "_on_cancel", lambda *_: None)  # it ends before it can answer
    assert before.cancel()
    old.kill()
    until(lambda: sender._session.core.away)
    assert during.cancel()
    for handle in (before, during):
        with pytest.raises(TransferCancelled):
            handle.wait(1)
        assert not handle.cancel()
    new = life()
    assert connect(new, 1).recv(src=0, tag=2, timeout_s=5).nbytes == 1000
    stays.wait(5)
    assert posts(new) == [(3, True)]


def test_a_message_whose_copy_is_under_way_when_the_agent_ends(
    life: Lives, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = life(hold=True)
    sender, receiver = connect(old, 0), connect(old, 1)
    copyto, started, go_on = np.copyto, threading.Event(), threading.Event()

    def slowly(into: Any, data: Any) -> None:
        copyto(into, data)
        if threading.current_thread().name == "trainer" and not started.is_set():
            started.set()
            assert go_on.wait(5)

    monkeypatch.setattr(np, "copyto", slowly)
    handles: list[Any] = []
    trainer = threading.Thread(target=lambda: handles.append(sender.isend(content(BIG), dst=1)), name="trainer")
    trainer.start()
    assert started.wait(5)
    handles.append(sender.isend(content(1000, 1), dst=1))
    new = life()
    until(lambda: new.call(lambda: len(new.sessions) == 2 and all(s.past is None for s in new.sessions.values())))
    sender._session.link_state(1, 5)  # what was to be posted before that would be there by now
    assert not new.posts, "in order: the first one is not whole yet"
    go_on.set()
    trainer.join(5)
    assert np.array_equal(receiver.recv(src=0, timeout_s=5).array, content(BIG))
    assert np.array_equal(receiver.recv(src=0, timeout_s=5).array, content(1000, 1))
    for handle in handles:
        handle.wait(5)
    assert posts(new) == [(1, True), (2, True)]


def test_a_send_that_is_handed_over_is_done_and_stays_readable(life: Lives, connect: Connect) -> None:
    old = life(hand_over=True)
    sender, receiver = connect(old, 0), connect(old, 1)
    handle = sender.isend(content(BIG), dst=1)
    got = receiver.recv(src=0, timeout_s=5)
    handle.wait(5)
    new = life(hand_over=True)
    sender.send(content(BIG, 1), dst=1, timeout_s=5)
    assert np.array_equal(got.array, content(BIG))
    assert np.array_equal(receiver.recv(src=0, timeout_s=5).array, content(BIG, 1))
    assert posts(new)[0][0] == 2


# ---------------------------------------------------------------------------------------------------------- receiving


def test_what_is_under_way_lands_anew_in_the_receive_that_had_it(life: Lives, connect: Connect) -> None:
    old = life(stall_at_bytes=3 << 20, eager_bytes=64 << 20)
    sender, receiver = connect(old, 0), connect(old, 1)
    out = np.zeros(BIG, np.uint8)
    into = receiver.irecv_into(out, src=0, tag=1)
    plain = receiver.irecv(src=0, tag=2)
    handles = [sender.isend(content(BIG, tag), dst=1, tag=tag) for tag in (1, 2)]
    until(lambda: all(t.landed_bytes == 3 << 20 for t in old.transfers.values()) and len(old.transfers) == 2)
    life()
    assert into.wait(5) == BIG
    assert np.array_equal(out, content(BIG, 1))
    assert np.array_equal(plain.wait(5).array, content(BIG, 2))
    for handle in handles:
        handle.wait(5)


def test_what_is_awaited_keeps_its_place_in_the_channel(life: Lives, connect: Connect) -> None:
    old = life(stall_at_bytes=1 << 20, eager_bytes=64 << 20)
    sender, receiver = connect(old, 0), connect(old, 1)
    first = sender.isend(content(BIG, 1), dst=1)
    second = sender.isend(content(1000, 2), dst=1)
    second.wait(5)  # it is here, behind one that is not
    new = life()
    assert np.array_equal(receiver.recv(src=0, timeout_s=5).array, content(BIG, 1))
    assert np.array_equal(receiver.recv(src=0, timeout_s=5).array, content(1000, 2))
    first.wait(5)
    assert posts(new) == [(1, True)]
    assert new.call(lambda: [f.highest for f in new.sessions["job", 1].fences.values()]) == [2]


def test_a_message_that_landed_whole_without_a_word_is_delivered(life: Lives, connect: Connect) -> None:
    """Its agent died between the last chunk and the frame that says so: the block's own map is all there is."""
    old = life(stall_at_bytes=1 << 20, eager_bytes=64 << 20)
    sender, receiver = connect(old, 0), connect(old, 1)
    handle = sender.isend(content(BIG), dst=1)
    receive = receiver.irecv(src=0)
    until(lambda: any(t.landed_bytes == 1 << 20 for t in old.transfers.values()))
    until(lambda: sender.isend(b"", dst=1, tag=9).wait(1) is None)

    def land(chunks: int) -> None:
        [transfer] = [t for t in old.transfers.values() if t.envelope.nbytes == BIG]
        assert transfer.block is not None
        memory, offset, start = transfer.block
        memory.view[offset : offset + BIG] = transfer.source
        for index in range(chunks):
            layout.mark_chunk(memory.view[start:offset], index)

    old.call(lambda: land(BIG // old.chunk_bytes))
    new = life()
    assert np.array_equal(receive.wait(5).array, content(BIG))
    handle.wait(5)
    until(lambda: len(posts(new)) == 1)
    assert new.count(wire.Release) == 0, "it was the old life's"


def test_a_map_with_a_hole_or_of_another_message_is_no_delivery(life: Lives, connect: Connect) -> None:
    old = life(stall_at_bytes=1 << 20, eager_bytes=64 << 20)
    sender, receiver = connect(old, 0), connect(old, 1)
    handles = [sender.isend(content(BIG, tag), dst=1, tag=tag) for tag in range(2)]
    until(lambda: sum(t.landed_bytes == 1 << 20 for t in old.transfers.values()) == 2)

    def spoil() -> None:
        for number, transfer in enumerate(old.transfers.values()):
            assert transfer.block is not None
            memory, offset, start = transfer.block
            prefix = memory.view[start:offset]
            if number:
                layout.write_block_prefix(prefix, layout.BlockPrefix(TransferId(7, 7), BIG, old.chunk_bytes))
            for index in range(BIG // old.chunk_bytes - (not number)):
                layout.mark_chunk(prefix, index)

    old.call(spoil)
    life()
    for tag in range(2):
        assert np.array_equal(receiver.recv(src=0, tag=tag, timeout_s=5).array, content(BIG, tag))
        handles[tag].wait(5)


def test_what_was_received_stays_readable_and_is_given_back_to_nobody(life: Lives, connect: Connect) -> None:
    old = life()
    sender, receiver = connect(old, 0), connect(old, 1)
    for number in range(3):
        sender.send(content(100_000, number), dst=1, timeout_s=5)
    kept = receiver.recv(src=0, timeout_s=5)
    new = life()
    until(lambda: len(new.sessions) == 2)
    later = [receiver.recv(src=0, timeout_s=5) for _ in range(2)]
    assert np.array_equal(kept.array, content(100_000, 0))
    assert [np.array_equal(one.array, content(100_000, number)) for number, one in enumerate(later, 1)] == [True, True]
    del kept, later
    sender.send(content(1000, 9), dst=1, timeout_s=5)
    out = np.zeros(1000, np.uint8)
    receiver.recv_into(out, src=0, timeout_s=5)
    until(lambda: new.count(wire.Release) == 1)


def test_what_will_not_come_after_all_fails_or_makes_way(life: Lives, connect: Connect) -> None:
    old = life(stall_at_bytes=1 << 20, eager_bytes=64 << 20)
    sender, receiver = connect(old, 0), connect(old, 1)
    for tag in range(2):
        sender.isend(content(BIG, tag), dst=1, tag=tag)
    receives = [receiver.irecv(src=0, tag=tag) for tag in range(2)]
    until(lambda: sum(t.landed_bytes == 1 << 20 for t in old.transfers.values()) == 2)
    incarnation = sender._session.core.identity.incarnation
    old.kill()
    sender.close(linger_s=0)
    new = life()
    until(lambda: ("job", 1) in new.sessions)
    new.tell(1, wire.RecvFailed(incarnation, 1, ErrorCode.PEER_LOST, "its sender has not gone on with it", 0))
    with pytest.raises(PeerLost, match="has not gone on with it"):
        receives[0].wait(5)
    new.tell(1, wire.RecvFailed(incarnation, 2, ErrorCode.CANCELLED, "taken back", 0))
    again = connect(new, 0)
    again.send(content(1000), dst=1, tag=1, timeout_s=5)
    assert receives[1].wait(5).nbytes == 1000


def test_a_message_that_is_offered_twice_ends_the_session_rather_than_being_delivered_twice(
    life: Lives, connect: Connect
) -> None:
    old = life()
    sender, receiver = connect(old, 0), connect(old, 1)
    sender.send(content(1000), dst=1, timeout_s=5)
    receiver.recv(src=0, timeout_s=5)
    new = life()
    until(lambda: ("job", 1) in new.sessions)
    envelope = old.posts[0].envelope
    incarnation = sender._session.core.identity.incarnation
    new.tell(1, wire.Offered(incarnation, 1, envelope, 0, 0))
    with pytest.raises(AgentUnavailable, match="offered twice"):
        receiver.recv(src=0, timeout_s=5)


def test_a_rank_that_ended_meanwhile_is_lost_in_time(life: Lives, connect: Connect) -> None:
    old = life()
    sender, receiver = connect(old, 0), connect(old, 1)
    receive = receiver.irecv(src=0)
    until(lambda: receiver._session.receiver.life_of(0))
    old.kill()
    sender.close(linger_s=0)
    life(reconnect_ns=SECOND // 5)
    with pytest.raises(PeerLost, match=r"not seen again within 0\.2 s of the return"):
        receive.wait(5)


# -------------------------------------------------------------------------------------------------------- the session


def test_it_is_told_to_go_and_comes_back(life: Lives, connect: Connect) -> None:
    old = life(hold=True)
    sender = connect(old, 0)
    handle = sender.isend(content(1000), dst=1)
    until(lambda: old.posts)
    old.tell(0, wire.Bye(ErrorCode.AGENT_STOPS, "the agent stops: SIGTERM"))
    until(lambda: sender._session.core.away)
    new = life()
    connect(new, 1).recv(src=0, timeout_s=5)
    handle.wait(5)


def test_an_agent_that_stays_away_is_an_error_after_the_time(life: Lives, connect: Connect) -> None:
    old = life(hold=True, reconnect_ns=SECOND // 2)
    sender = connect(old, 0)
    handle, receive = sender.isend(content(1000), dst=1), sender.irecv(src=1)
    old.kill()
    begun = time.monotonic()
    for wait in (handle.wait, receive.wait):
        with pytest.raises(AgentUnavailable, match=r"is gone.*not come back within 0\.[5-9] s \(there is no such"):
            wait(5)
    assert 0.4 < time.monotonic() - begun < 3
    with pytest.raises(AgentUnavailable):
        sender.isend(b"x", dst=1)
    sender.close()


def test_timeouts_say_that_it_is_the_agent_that_is_away(life: Lives, connect: Connect) -> None:
    """And not, say, that nobody is registered as the sender."""
    old = life(hold=True)
    endpoint = connect(old, 0)
    handle, receive = endpoint.isend(content(1000), dst=1), endpoint.irecv(src=1)
    old.kill()
    until(lambda: endpoint._session.core.away)
    for wait in (handle.wait, receive.wait):
        with pytest.raises(TransferTimeout, match="waiting for this host's agent to come back") as caught:
            wait(0)
        assert caught.value.phase == "waiting for this host's agent to come back"
    life()
    endpoint.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.CLOSED, ClosedError),
        (ErrorCode.REFUSED, ConfigError),
        (ErrorCode.AGENT_UNAVAILABLE, AgentUnavailable),
    ],
)
def test_a_refusal_is_final(life: Lives, connect: Connect, code: ErrorCode, kind: type[Exception]) -> None:
    old = life(hold=True)
    sender = connect(old, 0)
    handle = sender.isend(content(1000), dst=1)
    new = life(refuses=wire.Refused(code, "for a reason"))
    with pytest.raises(kind, match="for a reason"):
        handle.wait(5)
    assert len(new.hellos) == 1


def test_no_place_for_everybody_at_once_is_not_final(life: Lives, connect: Connect) -> None:
    old = life(hold=True)
    sender = connect(old, 0)
    handle = sender.isend(content(1000), dst=1)
    new = life(refuses=wire.Refused(ErrorCode.RESOURCE, "full"))
    until(lambda: new.hellos)
    new.refuses = None
    connect(new, 1).recv(src=0, timeout_s=5)
    handle.wait(5)


def test_the_agent_ends_again_and_again(life: Lives, connect: Connect) -> None:
    agent = life(hold=True)
    sender, receiver = connect(agent, 0), connect(agent, 1)
    handles = [sender.isend(content(BIG, number), dst=1) for number in range(2)]
    for posted in range(3):
        agent = life(hold=True)
        until(lambda agent=agent, posted=posted: agent.hellos and len(agent.posts) >= posted)
    life()
    for number in range(2):
        assert np.array_equal(receiver.recv(src=0, timeout_s=8).array, content(BIG, number))
        handles[number].wait(5)


def test_close_while_the_agent_is_away(life: Lives, connect: Connect) -> None:
    old = life(hold=True)
    sender = connect(old, 0)
    handle = sender.isend(content(1000), dst=1)
    old.kill()
    until(lambda: sender._session.core.away)
    begun = time.monotonic()
    sender.close(linger_s=0.2)
    assert 0.15 < time.monotonic() - begun < 2
    with pytest.raises(ClosedError):
        handle.wait(1)
    new = life()
    until(lambda: not any(thread.name == "proxyd-reconnect" for thread in threading.enumerate()))
    assert new.call(lambda: not new.sessions)


def test_close_lingers_for_the_next_life(life: Lives, connect: Connect) -> None:
    old = life(hold=True)
    sender = connect(old, 0)
    handle = sender.isend(content(1000), dst=1)
    until(lambda: old.posts)
    old.kill()
    until(lambda: sender._session.core.away)
    closing = threading.Thread(target=lambda: sender.close(linger_s=5))
    closing.start()
    new = life()
    assert connect(new, 1).recv(src=0, timeout_s=5).nbytes == 1000
    closing.join(5)
    handle.wait(0)


def test_questions_about_links_are_asked_again(life: Lives, connect: Connect) -> None:
    old = life()
    sender = connect(old, 0)
    connect(old, 1)
    old.kill()
    until(lambda: sender._session.core.away)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(sender.link_state(0, timeout_s=5)))
    asking.start()
    until(lambda: sender._session._link_questions)
    life()
    asking.join(5)
    assert answers[0].link == "here"


def test_a_forked_child_of_a_process_whose_agent_is_away(life: Lives, connect: Connect) -> None:
    old = life(hold=True)
    sender = connect(old, 0)
    handle = sender.isend(content(1000), dst=1)
    old.kill()
    until(lambda: sender._session.core.away)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sender.isend(b"x", dst=1)
        except ClosedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    new = life()
    connect(new, 1).recv(src=0, timeout_s=5)
    handle.wait(5)


def test_nothing_is_left_when_the_search_is_over(life: Lives) -> None:
    old = life(reconnect_ns=SECOND // 4)
    sender = proxyd_client.connect("job", 0, socket=old.path)
    session = weakref.ref(sender._session.sender)
    gc.collect()
    gc.disable()
    try:
        old.kill()
        with pytest.raises(AgentUnavailable):
            sender.recv(src=1, timeout_s=5)
        until(lambda: not any(thread.name == "proxyd-reconnect" for thread in threading.enumerate()))
        del sender
        until(lambda: session() is None)
    finally:
        gc.enable()


def test_all_that_a_dead_agent_had_said_is_read_although_it_left_things_unread() -> None:
    """The rules depend on it. A Unix socket whose other end was closed with unread data reports a reset, but only
    behind what it holds."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = Link(ours, wire.Decoder(allow_payload=False), [], shared_memory=True)
    link.send(wire.CancelSend(1))
    said = [wire.SendDone(sequence) for sequence in range(2000)]
    theirs.sendall(b"".join(map(wire.encode, said)))
    theirs.close()
    heard: list[wire.Frame] = []

    def read() -> None:
        for _ in range(50):
            link.pump(lambda frame, fd: heard.append(frame), lambda *_: None)

    with pytest.raises(ConnectionError, match="reset"):
        read()
    assert heard == said
    link.close()


def test_a_session_over_tcp_ends_with_its_agent(life: Lives, connect: Connect) -> None:
    """What the agent had for it, and acknowledged, is gone with the agent."""
    old = life(hold=True, reconnect_ns=0)
    sender = connect(old, 0, tcp=True)
    handle = sender.isend(content(1000), dst=1)
    old.kill()
    with pytest.raises(AgentUnavailable, match="is gone"):
        handle.wait(5)


# ------------------------------------------------------------------------------------------------------ what it knows


def test_knowledge_is_bounded_and_never_claims_more_than_it_holds() -> None:
    knowledge = Knowledge()
    for sequence in range(1, REMEMBERED + 101):
        assert knowledge.offered(3, TransferId(77, sequence))
        knowledge.delivered(3, TransferId(77, sequence))
    assert not knowledge.offered(3, TransferId(77, 5))
    assert knowledge.offered(3, TransferId(77, 9000))
    first, *others = knowledge.frames([(3, TransferId(77, 9000))])
    assert first == wire.Resume(3, 77, 9000, tuple(range(101, wire.MAX_RESUMED + 101)), (9000,))
    told = [sequence for frame in (first, *others) if isinstance(frame, wire.Resume) for sequence in frame.delivered]
    assert told == list(range(101, REMEMBERED + 101))
    assert all(len(wire.encode(frame)) < wire.MAX_BODY_BYTES for frame in (first, *others))
    for life in range(MOST_SENDERS + 10):
        knowledge.offered(1, TransferId(1000 + life, 1))
    assert len(knowledge.frames([])) == MOST_SENDERS


def test_more_is_remembered_than_the_kernel_holds_for_a_trainer_that_stands_still() -> None:
    """What it reads when it goes on may all be unacknowledged, and its agent dead."""
    least = wire.Offered(1 << 40, 1 << 40, Envelope("", 0, 1, "", 0, 0, 0, "", ()), 0, 0)
    assert UNREAD_BYTES // len(wire.encode(least)) < REMEMBERED


def test_many_awaited_messages_go_in_several_frames() -> None:
    knowledge = Knowledge()
    awaited = [(3, TransferId(77, sequence)) for sequence in range(1, 2 * wire.MAX_RESUMED + 2)]
    for rank, transfer in awaited:
        knowledge.offered(rank, transfer)
    frames = knowledge.frames(awaited)
    assert [len(frame.awaited) for frame in frames if isinstance(frame, wire.Resume)] == [2048, 2048, 1]
    for frame in frames:
        assert len(wire.encode(frame)) < wire.MAX_BODY_BYTES
