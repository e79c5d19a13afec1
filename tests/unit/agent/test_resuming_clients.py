"""Trainers that come from an earlier life of the agent, and what an agent that may die any moment says when."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from proxyd.agent import client_session
from proxyd.agent.outbox import Outbox
from proxyd.core.effects import AllocateBlock, TellLanded, TellOffered
from proxyd.core.events import BlockAllocated, ClientAttached, ClientDetached, Past, SendPosted
from proxyd.core.ids import EndpointName, TransferId
from proxyd.core.units import MAX_DURATION_NS
from proxyd.wire import client as wire
from proxyd.wire.envelope import ErrorCode
from tests.unit.agent.test_outbox import play as play_outbox
from tests.unit.agent.test_review_clients import MIB, Rig, Trainer, envelope, play

OTHER_LIFE = 3
"""Of the agent; the rig's is 7."""
RANK0 = EndpointName("j", 0)


async def returns(trainer: Trainer, rank: int, incarnation: int, *, life: int = OTHER_LIFE, age_ns: int = 0) -> None:
    hello = wire.Hello(
        wire.PROTOCOL_VERSION, "j", rank, incarnation, 1, bytes(32), b"", True, resumes=life, age_ns=age_ns
    )
    await trainer.say(hello)


async def all_of(trainer: Trainer) -> None:
    """A read ends where a descriptor came along."""
    for _ in range(4):
        await trainer.listen()


def refusal(trainer: Trainer) -> tuple[int, str]:
    [frame] = trainer.heard(wire.Refused)
    assert isinstance(frame, wire.Refused)
    return frame.code, frame.message


def test_it_is_attached_when_it_has_said_all_that_it_knows() -> None:
    async def body(rig: Rig) -> None:
        trainer = Trainer(rig.hub)
        await returns(trainer, 0, 77, age_ns=5)
        assert trainer.heard(wire.Welcome)
        await trainer.say(wire.Resume(1, 50, 9, (7, 8), (9,)))
        assert not rig.of(ClientAttached)
        await trainer.say(wire.Resumed())
        assert rig.of(ClientAttached) == [ClientAttached(RANK0, 77, (Past(1, 50, 9, (7, 8), (9,)),), 5)]
        await trainer.say(wire.PostSend(4, envelope(0, 1, 0), 0, 0, 0, again=True, dst_incarnation=50))
        [posted] = rig.of(SendPosted)
        assert isinstance(posted, SendPosted)
        assert (posted.again, posted.dst_incarnation) == (True, 50)

    play(body)


def test_a_claimed_age_is_bounded() -> None:
    async def body(rig: Rig) -> None:
        trainer = Trainer(rig.hub)
        await returns(trainer, 0, 77, age_ns=(1 << 64) - 1)
        await trainer.say(wire.Resumed())
        assert rig.of(ClientAttached) == [ClientAttached(RANK0, 77, (), MAX_DURATION_NS)]

    play(body)


def test_anything_else_before_that_ends_the_session() -> None:
    async def body(rig: Rig) -> None:
        trainer = Trainer(rig.hub)
        await returns(trainer, 0, 77)
        await trainer.say(wire.PostSend(1, envelope(0, 1, 0), 0, 0, 0))
        await all_of(trainer)
        [bye] = trainer.heard(wire.Bye)
        assert isinstance(bye, wire.Bye)
        assert bye.code == ErrorCode.PROTOCOL
        assert not rig.of(ClientAttached)
        fresh = Trainer(rig.hub)
        await fresh.hello(1, 78)
        await fresh.say(wire.Resume(1, 50, 9, (), ()))
        await all_of(fresh)
        assert fresh.heard(wire.Bye)

    play(body)


def test_claims_without_end_end_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_session, "MAX_PAST_SEQUENCES", 100)

    async def body(rig: Rig) -> None:
        trainer = Trainer(rig.hub)
        await returns(trainer, 0, 77)
        for _ in range(2):
            await trainer.say(wire.Resume(1, 50, 99, tuple(range(60)), ()))
        await all_of(trainer)
        assert trainer.heard(wire.Bye)
        assert not rig.of(ClientAttached)

    play(body)


def test_one_that_never_ends_its_list_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_session, "HELLO_S", 0.05)

    async def body(rig: Rig) -> None:
        trainer = Trainer(rig.hub)
        await returns(trainer, 0, 77)
        async with asyncio.timeout(5):
            while trainer.session.is_open:
                await trainer.listen()
        assert rig.hub.client_count == 0
        assert rig.hub.budget.used_bytes == 0

    play(body)


def test_a_life_that_ended_the_session_takes_nobody_back() -> None:
    async def body(rig: Rig) -> None:
        trainer = Trainer(rig.hub)
        await returns(trainer, 0, 77, life=7)
        code, message = refusal(trainer)
        assert code == ErrorCode.AGENT_UNAVAILABLE
        assert "this life of the agent" in message

    play(body)


def test_one_that_comes_once_more_because_the_agent_was_slow_is_no_newer_process() -> None:
    async def body(rig: Rig) -> None:
        first, second = Trainer(rig.hub), Trainer(rig.hub)
        await returns(first, 0, 77)
        await returns(second, 0, 77)
        await second.say(wire.Resumed())
        assert rig.of(ClientAttached) == [ClientAttached(RANK0, 77, (), 0)]
        assert rig.hub.client_count == 1
        assert not first.session.is_open

    play(body)


def test_a_newer_process_stays() -> None:
    async def body(rig: Rig) -> None:
        newer, older = Trainer(rig.hub), Trainer(rig.hub)
        await newer.hello(0, 78)
        await returns(older, 0, 77)
        assert refusal(older)[0] == ErrorCode.CLOSED
        assert newer.session.is_open

    play(body)


def test_a_newer_process_wins_over_one_that_is_still_saying_what_it_knows() -> None:
    async def body(rig: Rig) -> None:
        older, newer = Trainer(rig.hub), Trainer(rig.hub)
        await returns(older, 0, 77)
        await newer.hello(0, 78)
        await all_of(older)
        [bye] = older.heard(wire.Bye)
        assert isinstance(bye, wire.Bye)
        assert bye.code == ErrorCode.CLOSED
        assert rig.of(ClientAttached) == [ClientAttached(RANK0, 78, None, 0)]
        assert not [event for event in rig.of(ClientDetached) if event == ClientDetached(RANK0, 78, "", False)]
        assert rig.hub.client_count == 1

    play(body)


# ------------------------------------------------------------------------------------------ what is said when


def test_nobody_hears_of_a_delivery_before_the_kernel_has_what_tells_its_receiver() -> None:
    async def body(rig: Rig) -> None:
        trainer = Trainer(rig.hub)
        await trainer.hello(0, 77)
        said: list[str] = []
        large, empty = TransferId(50, 1), TransferId(50, 2)
        rig.hub.allocate(AllocateBlock(large, RANK0, 1000, 65536, False))
        assert rig.of(BlockAllocated)
        # It doesn't read, and its socket is full.
        trainer.session._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        for number in range(3000):
            trainer.session.tell(wire.PeerHere(number, 1, "b" * 200))
        await asyncio.sleep(0.01)
        rig.hub.tell_offered(TellOffered(RANK0, large, envelope(1, 0, 1000), True))
        rig.hub.tell_landed(TellLanded(RANK0, large, 1000))
        rig.hub.once_told(large, lambda: said.append("large"))
        rig.hub.tell_offered(TellOffered(RANK0, empty, envelope(1, 0, 0), True))
        rig.hub.once_told(empty, lambda: said.append("empty"))
        await asyncio.sleep(0.01)
        assert not said
        rig.hub.once_told(TransferId(50, 3), lambda: said.append("none of its"))
        assert said == ["none of its"]
        async with asyncio.timeout(5):
            while len(said) < 3:
                await trainer.listen()
        assert said == ["none of its", "large", "empty"]
        rig.hub.once_told(empty, lambda: said.append("again"))
        assert said[-1] == "again"

    play(body)


def test_what_the_socket_never_took_is_not_said_to_be_told_when_the_client_goes_on_elsewhere() -> None:
    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        said: list[str] = []
        box.then(lambda: said.append("empty"))
        box.frame(b"first")
        box.then(lambda: said.append("first"))
        assert said == ["empty"]
        await asyncio.sleep(0.01)
        assert said == ["empty", "first"]
        box.payload(memoryview(os.urandom(4 * MIB)))
        box.then(lambda: said.append("payload"))
        box.close(lives_on=True)
        assert said == ["empty", "first"]
        box.then(lambda: said.append("closed"))
        assert said[-1] == "closed"

    play_outbox(body)


def test_at_the_end_of_a_session_whoever_waited_goes_on() -> None:
    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        said: list[str] = []
        box.payload(memoryview(os.urandom(4 * MIB)))
        box.then(lambda: said.append("payload"))
        box.close()
        assert said == ["payload"]

    play_outbox(body)
