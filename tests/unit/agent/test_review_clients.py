"""Trainers that lie, clash, or come when descriptors are used up: the agent goes on, and the others with it."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import os
import socket
import weakref
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from proxyd.agent import client_session, outbox
from proxyd.agent.client_session import ClientSession, Credentials
from proxyd.agent.clients import ClientHub
from proxyd.agent.handshake import Identity
from proxyd.core.agent import PathState
from proxyd.core.effects import AllocateBlock, TellLanded, TellOffered, TellSendDone
from proxyd.core.events import (
    AgentEvent,
    BlockAllocated,
    BlockDenied,
    ClientAttached,
    SendAnnounced,
    SendCancelled,
    SendPosted,
)
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.core.units import MAX_DURATION_NS
from proxyd.wire import client as wire
from proxyd.wire.envelope import Envelope, ErrorCode

MIB = 1 << 20


class Trainer:
    """The other end of a session."""

    def __init__(self, hub: ClientHub, *, uid: int = 1000) -> None:
        self.sock, ours = socket.socketpair()
        self.sock.setblocking(False)
        ours.setblocking(False)
        self.session = ClientSession(hub, ours, Credentials(uid, 1, -1, "test"), shared_memory=True)
        hub.greet(self.session)
        self.frames: list[wire.Frame] = []
        self._decoder = wire.Decoder(allow_payload=False)

    async def say(self, frame: wire.Frame) -> None:
        self.sock.send(wire.encode(frame))
        await self.listen()

    async def listen(self) -> None:
        for _ in range(10):  # a socket pair hands over at once: what can happen happens in a few turns of the loop
            await asyncio.sleep(0)
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, MIB, 64)
        except BlockingIOError:
            return
        for fd in fds:
            os.close(fd)
        self._decoder.feed(data)
        while (item := self._decoder.next_frame()) is not None:
            self.frames.append(item[0])

    async def hello(self, rank: int, incarnation: int) -> None:
        await self.say(wire.Hello(wire.PROTOCOL_VERSION, "j", rank, incarnation, 1, bytes(32), b"", True))

    def heard(self, kind: type[wire.Frame]) -> list[wire.Frame]:
        return [frame for frame in self.frames if isinstance(frame, kind)]


class Rig:
    def __init__(self) -> None:
        self.events: list[AgentEvent] = []
        self.hub = ClientHub(
            Identity(AgentName("a", "0"), 7, b""),
            memory_bytes=64 * MIB,
            arena_bytes=2 * MIB,
            linger_ns=1,
            emit=self.events.append,
            link_state=lambda *_: PathState("", "none", 0, 0, 0, 0, 0, ""),
            prefault_bytes=0,
        )

    def of(self, kind: type[AgentEvent]) -> list[AgentEvent]:
        return [event for event in self.events if isinstance(event, kind)]


def play(body: Callable[[Rig], Awaitable[None]]) -> None:
    problems: list[dict[str, object]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        rig = Rig()
        try:
            async with asyncio.timeout(20):
                await body(rig)
        finally:
            rig.hub.close("test over")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())
    assert not problems


def envelope(src: int, dst: int, nbytes: int) -> Envelope:
    return Envelope("j", src, dst, "", 0, 0, nbytes, "", ())


def test_two_trainers_of_one_incarnation_do_not_share_the_names_of_their_messages() -> None:
    async def body(rig: Rig) -> None:
        first, second = Trainer(rig.hub), Trainer(rig.hub, uid=2000)
        await first.hello(0, 77)
        await second.hello(1, 77)
        assert rig.of(ClientAttached) == [ClientAttached(EndpointName("j", 0), 77)]
        refused = second.heard(wire.Refused)[0]
        assert isinstance(refused, wire.Refused)
        assert refused.code == ErrorCode.REFUSED
        assert "incarnation" in refused.message

    play(body)


def test_an_incarnation_whose_messages_linger_is_taken() -> None:
    async def body(rig: Rig) -> None:
        first = Trainer(rig.hub)
        await first.hello(0, 77)
        await first.say(wire.PostSend(1, envelope(0, 1, 0), 0, 0, 0))
        assert len(rig.of(SendPosted)) == 1
        await first.say(wire.Bye(0, "done"))
        again = Trainer(rig.hub)
        await again.hello(0, 77)
        assert again.heard(wire.Refused)
        rig.hub.tell_send_done(TellSendDone(EndpointName("j", 0), TransferId(77, 1)))
        later = Trainer(rig.hub)
        await later.hello(0, 77)
        assert later.heard(wire.Welcome)

    play(body)


@pytest.mark.parametrize("source", [("other", 0), ("j", 1)], ids=["job", "rank"])
def test_nobody_sends_in_anothers_name(source: tuple[str, int]) -> None:
    """What a job's token and the job's rules are worth depends on it."""

    async def body(rig: Rig) -> None:
        trainer = Trainer(rig.hub)
        await trainer.hello(0, 77)
        job, rank = source
        await trainer.say(wire.PostSend(1, dataclasses.replace(envelope(rank, 2, 0), job=job), 0, 0, 0))
        assert not rig.of(SendPosted)
        assert not trainer.session.is_open

    play(body)


def test_a_trainer_cannot_keep_the_agent_from_its_coordinator_with_a_time_beyond_reason() -> None:
    async def body(rig: Rig) -> None:
        trainer = Trainer(rig.hub)
        await trainer.hello(0, 1)
        await trainer.say(wire.AnnounceSend(1, "", 0, 0, 10, (1 << 64) - 1))
        announced = rig.of(SendAnnounced)
        assert all(isinstance(e, SendAnnounced) and e.ready_in_ns <= MAX_DURATION_NS for e in announced)
        assert not rig.of(SendCancelled)

    play(body)


@pytest.mark.parametrize("local", [True, False], ids=["handed over", "new arena"])
def test_no_descriptors_left_means_no_memory(local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(rig: Rig) -> None:
        sender, receiver = Trainer(rig.hub), Trainer(rig.hub)
        await sender.hello(0, 10)
        await receiver.hello(1, 20)
        arena = next(f for f in sender.heard(wire.ArenaGranted) if isinstance(f, wire.ArenaGranted) and f.kind == 1)
        await sender.say(wire.PostSend(1, envelope(0, 1, 100), arena.arena, 4096, 100))
        used = rig.hub.budget.used_bytes

        def dup(fd: int) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        transfer = TransferId(10, 1) if local else TransferId(99, 1)
        effect = AllocateBlock(transfer, EndpointName("j", 1), 100 if local else 8 * MIB, 64 << 10, local)
        with monkeypatch.context() as patch:
            patch.setattr(outbox.os, "dup", dup)
            rig.hub.allocate(effect)
        assert len(rig.of(BlockDenied)) == 1
        assert not rig.of(BlockAllocated)
        assert rig.hub.budget.used_bytes == used
        rig.hub.allocate(effect)
        assert len(rig.of(BlockAllocated)) == 1

    play(body)


@pytest.mark.parametrize("way", ["garbage", "silence", "pushed out", "hello and end"])
def test_a_connection_that_ended_is_freed_at_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when the garbage collector runs: each may hold 256 KiB that it has said."""

    if way == "silence":
        monkeypatch.setattr(client_session, "HELLO_S", 0)

    async def body(rig: Rig) -> None:
        trainer = Trainer(rig.hub)
        session = weakref.ref(trainer.session)
        gc.collect()
        gc.disable()
        try:
            if way == "garbage":
                trainer.sock.send(bytes(10_000))
            elif way == "pushed out":
                trainer.session.turn_away("others came")
            elif way == "hello and end":
                await trainer.hello(0, 77)
                trainer.sock.send(wire.encode(wire.Bye(ErrorCode.CLOSED, "")))
            await trainer.listen()
            assert not trainer.session.is_open
            del trainer.session
            await asyncio.sleep(0)
            assert session() is None, gc.get_referrers(session())
        finally:
            gc.enable()

    play(body)


def test_a_block_is_handed_over_ahead_only_to_who_has_seen_its_arena() -> None:
    """Whether it may see it, and can be passed it, was found out then."""

    async def body(rig: Rig) -> None:
        sender, receiver, stranger = Trainer(rig.hub), Trainer(rig.hub), Trainer(rig.hub, uid=2000)
        for rank, trainer in enumerate((sender, receiver, stranger)):
            await trainer.hello(rank, 10 + rank)
        arena = next(f for f in sender.heard(wire.ArenaGranted) if isinstance(f, wire.ArenaGranted) and f.kind == 1)
        for sequence, rank in enumerate((1, 2, 3, 1, 2), 1):
            offset = 4096 * sequence
            await sender.say(wire.PostSend(sequence, envelope(0, rank, 100), arena.arena, offset, 100))
            effect = AllocateBlock(TransferId(10, sequence), EndpointName("j", rank), 100, 1 << 20, True)
            posted = rig.of(SendPosted)[-1]
            assert isinstance(posted, SendPosted)
            assert posted.handed_over == (sequence == 4)
            if not posted.handed_over:
                rig.hub.allocate(effect)
        assert [event.transfer.sequence for event in rig.of(BlockAllocated) if isinstance(event, BlockAllocated)] == [1]
        for sequence in (1, 4):
            transfer = TransferId(10, sequence)
            rig.hub.tell_offered(TellOffered(EndpointName("j", 1), transfer, envelope(0, 1, 100), True))
            rig.hub.tell_landed(TellLanded(EndpointName("j", 1), transfer, 100))
        while len(receiver.heard(wire.Offered)) < 2:
            await receiver.listen()
        offers = [(f.sequence, f.landed_bytes) for f in receiver.heard(wire.Offered) if isinstance(f, wire.Offered)]
        assert offers == [(1, 0), (4, 100)]
        landed = [(f.sequence, f.nbytes) for f in receiver.heard(wire.Landed) if isinstance(f, wire.Landed)]
        assert landed == [(1, 100)], "an offer that says it all isn't followed by another frame"

    play(body)
