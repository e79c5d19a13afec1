"""An agent's sessions against the coordinator's servicer, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc.aio
import pytest
import uvloop

from proxyd.agent.session import CoordinatorSessions
from proxyd.coordinator import servicer as servicer_module
from proxyd.coordinator.servicer import SessionServicer
from proxyd.core.effects import CloseSession, CoordinatorEffect, ToAgent
from proxyd.core.events import (
    AgentEvent,
    CoordinatorConnected,
    CoordinatorEvent,
    CoordinatorLost,
    CoordinatorSaid,
    SessionClosed,
    SessionMessage,
    SessionOpened,
)
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Beat, Denied, EndpointUp, Queued, Request, Welcome
from proxyd.runtime import translate
from proxyd.runtime.grpc_options import server_options
from proxyd.v1 import coordination_pb2 as pb
from proxyd.v1.coordination_pb2_grpc import CoordinationStub, add_CoordinationServicer_to_server
from proxyd.wire.auth import token_mac
from proxyd.wire.envelope import TrafficClass

TOKEN = b"a shared secret of the two sites"
HELLO = AgentHello(AgentName("a", "one"), 7, "127.0.0.1:7601")
log = logging.getLogger("test")


class Coordinator:
    """The servicer with answers of the test's own behind it."""

    def __init__(self, token: bytes = TOKEN) -> None:
        self.events: list[CoordinatorEvent] = []
        self.servicer = SessionServicer(token, self.on_event)
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(options=server_options())
        add_CoordinationServicer_to_server(self.servicer, self._server)
        port = self._server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self.servicer.stop()
        await self._server.stop(0.5)

    def on_event(self, event: CoordinatorEvent) -> None:
        self.events.append(event)
        if isinstance(event, SessionOpened):
            self.say(event.session, Welcome("central", 5, ("*->*",), 150_000_000, 2_000_000_000, ()))
        elif isinstance(event, SessionMessage) and isinstance(event.message, Request):
            transfer = event.message.transfer
            self.say(event.session, Queued(transfer, 1, 2, 3, "first in line"), Denied(transfer, "a test"))

    def say(self, session: int, *messages: object) -> None:
        effects: Sequence[CoordinatorEffect] = [ToAgent(session, message) for message in messages]  # type: ignore[arg-type]
        self.servicer.perform(effects)


class Agent:
    """Sessions whose events are kept."""

    def __init__(self, *addresses: str, token: bytes = TOKEN) -> None:
        self.events: list[AgentEvent] = []
        self._news = asyncio.Event()
        self.sessions = CoordinatorSessions(addresses, lambda: HELLO, token, self._on_event, logger=log)

    def _on_event(self, event: AgentEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def until(self, kind: type[AgentEvent], count: int = 1, timeout_s: float = 8.0) -> AgentEvent:
        """The ``count``-th event of a kind."""
        async with asyncio.timeout(timeout_s):
            while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
                self._news.clear()
                await self._news.wait()
        return found[count - 1]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


async def until(condition: Callable[[], bool], timeout_s: float = 8.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 # the servicer's end of a stream has no event to wait for
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_hello_welcome_and_messages_both_ways(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        coordinator = Coordinator()
        await coordinator.start("127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/c.sock")
        agent = Agent(coordinator.address)
        agent.sessions.start()
        connected = await agent.until(CoordinatorConnected)
        assert isinstance(connected, CoordinatorConnected)
        assert connected.address == coordinator.address
        assert isinstance(connected.message, Welcome)
        assert connected.message.epoch == 5
        assert coordinator.events == [SessionOpened(1, HELLO)]
        request = Request(TransferId(1, 1), LinkName("a", "b"), AgentName("b", "x"), "j", TrafficClass.BULK, 9)
        agent.sessions.send(coordinator.address, EndpointUp(EndpointName("j", 0), 3))
        agent.sessions.send(coordinator.address, request)
        await agent.until(CoordinatorSaid, 2)
        assert [event.message for event in agent.events if isinstance(event, CoordinatorSaid)] == [
            Queued(TransferId(1, 1), 1, 2, 3, "first in line"),
            Denied(TransferId(1, 1), "a test"),
        ]
        assert coordinator.events[1:] == [
            SessionMessage(1, EndpointUp(EndpointName("j", 0), 3)),
            SessionMessage(1, request),
        ]
        await agent.sessions.close()
        await until(lambda: isinstance(coordinator.events[-1], SessionClosed))
        assert not any(isinstance(event, CoordinatorLost) for event in agent.events)
        await coordinator.stop()

    run(main)


def test_what_was_queued_before_close_still_arrives() -> None:
    async def main() -> None:
        coordinator = Coordinator()
        await coordinator.start()
        agent = Agent(coordinator.address)
        agent.sessions.start()
        await agent.until(CoordinatorConnected)
        for number in range(500):
            agent.sessions.send(coordinator.address, EndpointUp(EndpointName("j", number), 3))
        await agent.sessions.close()
        await until(lambda: isinstance(coordinator.events[-1], SessionClosed))
        assert len(coordinator.events) == 502
        await coordinator.stop()

    run(main)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (b"", TOKEN, "unauthenticated: agent a/one has no token and this coordinator needs one"),
        (b"wrong and long enough", TOKEN, "unauthenticated: agent a/one has another token"),
        (TOKEN, b"", "unauthenticated: agent a/one has a token and this coordinator has none"),
    ],
)
def test_a_wrong_token_is_refused_with_words(ours: bytes, theirs: bytes, words: str) -> None:
    async def main() -> None:
        coordinator = Coordinator(theirs)
        await coordinator.start()
        agent = Agent(coordinator.address, token=ours)
        agent.sessions.start()
        lost = await agent.until(CoordinatorLost)
        assert isinstance(lost, CoordinatorLost)
        assert words in lost.reason
        assert coordinator.events == []
        await agent.sessions.close()
        await coordinator.stop()

    run(main)


@pytest.mark.parametrize(("proof", "words"), [(b"", "no proof"), (b"x" * 32, "a wrong proof")])
def test_a_coordinator_without_the_token_is_not_believed(
    proof: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets the agent in, and cannot prove itself."""
    monkeypatch.setattr(
        servicer_module,
        "token_mac",
        lambda token, role, *rest: proof if role == "accept" else token_mac(token, role, *rest),
    )

    async def main() -> None:
        coordinator = Coordinator()
        await coordinator.start()
        agent = Agent(coordinator.address)
        agent.sessions.start()
        lost = await agent.until(CoordinatorLost)
        assert isinstance(lost, CoordinatorLost)
        assert words in lost.reason
        assert not any(isinstance(event, CoordinatorConnected) for event in agent.events)
        await agent.sessions.close()
        await coordinator.stop()

    run(main)


def test_reconnect_within_five_seconds_and_one_loss_per_outage() -> None:
    async def main() -> None:
        first = Coordinator()
        await first.start()
        agent = Agent(first.address)
        agent.sessions.start()
        await agent.until(CoordinatorConnected)
        await first.stop()
        await agent.until(CoordinatorLost)
        await asyncio.sleep(2.5)  # several attempts fail meanwhile
        second = Coordinator()
        begun_s = asyncio.get_running_loop().time()
        await second.start(first.address)
        await agent.until(CoordinatorConnected, 2)
        assert asyncio.get_running_loop().time() - begun_s < 5
        assert len([event for event in agent.events if isinstance(event, CoordinatorLost)]) == 1
        [opened] = second.events
        assert isinstance(opened, SessionOpened)
        assert isinstance(opened.message, AgentHello)
        assert opened.message.epoch_seen == 5
        await agent.sessions.close()
        await second.stop()

    run(main)


def test_an_absent_coordinator_is_a_loss_with_the_reason() -> None:
    async def main() -> None:
        agent = Agent("127.0.0.1:1")
        agent.sessions.start()
        lost = await agent.until(CoordinatorLost)
        assert isinstance(lost, CoordinatorLost)
        assert "unavailable" in lost.reason
        agent.sessions.send("127.0.0.1:1", EndpointUp(EndpointName("j", 0), 3))
        await agent.sessions.close()

    run(main)


def test_close_session_tells_the_agent_why_after_what_was_queued() -> None:
    async def main() -> None:
        coordinator = Coordinator()
        await coordinator.start()
        agent = Agent(coordinator.address)
        agent.sessions.start()
        await agent.until(CoordinatorConnected)
        coordinator.servicer.perform([ToAgent(1, Beat(5, (), ())), CloseSession(1, "a newer life took over")])
        lost = await agent.until(CoordinatorLost)
        assert isinstance(lost, CoordinatorLost)
        assert lost.reason == "aborted: a newer life took over"
        assert CoordinatorSaid(coordinator.address, Beat(5, (), ())) in agent.events
        await agent.sessions.close()
        await coordinator.stop()

    run(main)


async def _abuse(address: str, *batches: pb.AgentBatch) -> grpc.aio.AioRpcError:
    async with grpc.aio.insecure_channel(address) as channel:
        call = CoordinationStub(channel).Session()
        await call.read()
        for batch in batches:
            await call.write(batch)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return caught.value


def test_a_message_that_breaks_the_protocol_ends_its_session_only() -> None:
    async def main() -> None:
        coordinator = Coordinator(b"")
        await coordinator.start()
        agent = Agent(coordinator.address, token=b"")
        agent.sessions.start()
        await agent.until(CoordinatorConnected)
        error = await _abuse(coordinator.address, pb.AgentBatch(messages=[pb.AgentMessage(request=pb.Request())]))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "begins with one hello" in (error.details() or "")
        assert len([event for event in coordinator.events if isinstance(event, SessionOpened)]) == 1
        assert agent.sessions.connected == (coordinator.address,)
        await agent.sessions.close()
        await coordinator.stop()

    run(main)


def test_the_text_of_an_exception_inside_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        coordinator = Coordinator(b"")

        def broken(event: CoordinatorEvent) -> None:
            if isinstance(event, SessionOpened):
                raise RuntimeError("secret detail")

        coordinator.servicer._on_event = broken
        await coordinator.start()
        agent = Agent(coordinator.address, token=b"")
        agent.sessions.start()
        lost = await agent.until(CoordinatorLost)
        assert isinstance(lost, CoordinatorLost)
        told = re.fullmatch(
            r"internal: internal error; the coordinator's log has it under reference ([0-9a-f]{8})", lost.reason
        )
        assert told is not None
        assert f"internal error, reference {told[1]}" in caplog.text
        await agent.sessions.close()
        await coordinator.stop()

    run(main)
    assert "secret detail" in caplog.text


def test_an_agent_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "MAX_QUEUED_MESSAGES", 100)

    async def main() -> None:
        coordinator = Coordinator()
        await coordinator.start()
        agent = Agent(coordinator.address)
        agent.sessions.start()
        await agent.until(CoordinatorConnected)
        # All in one tick: the writer has no chance to drain the queue.
        coordinator.say(1, *[Beat(5, (), ())] * 102)
        lost = await agent.until(CoordinatorLost)
        assert isinstance(lost, CoordinatorLost)
        assert "resource exhausted: the agent does not read" in lost.reason
        await agent.sessions.close()
        await coordinator.stop()

    run(main)


def test_an_agent_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "WRITE_TIMEOUT_S", 0.4)

    async def main() -> None:
        coordinator = Coordinator(b"")
        await coordinator.start()
        async with grpc.aio.insecure_channel(coordinator.address) as channel:
            call = CoordinationStub(channel).Session()
            challenge = await call.read()
            assert isinstance(challenge, pb.CoordinatorBatch)
            proof = token_mac(b"", "dial", challenge.messages[0].challenge.nonce, b"n" * 32, str(HELLO.agent))
            await call.write(translate.hello_batch(translate.SignedHello(HELLO, b"n" * 32, proof)))
            await call.read()
            # More than all windows and buffers on the way hold, and less than what the queue may hold.
            for number in range(12_000):
                coordinator.say(1, Denied(TransferId(1, number), "x" * 4_000))
            await until(lambda: coordinator.servicer.open_sessions == 0)
            assert coordinator.events[-1] == SessionClosed(1, "the agent took nothing for 0.4 s")
            call.cancel()
        await coordinator.stop()

    run(main)
