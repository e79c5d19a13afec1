"""Sessions of agents: gRPC streams on one side, events and effects of the coordinator machine on the other.

Each session is a reader (stream -> events), a queue and a writer (queue -> stream). Effects only append to queues, so
the machine never waits for a network; all that one tick of the loop produced for one agent travels in one batch. An
agent that does not read is cut off: by the length of its queue, or by a write that does not finish.

A *standby* (:mod:`proxyd.coordinator.election`) lets agents in too, tells them who is active and keeps their streams.
When it takes over it ends them, and all come back within some tenths of a second, over connections that stand.

What a peer is told when its session ends is text that was written for it; never that of an exception from inside.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from proxyd.coordinator.guard import Guard, reference
from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage, SessionOpened
from proxyd.core.messages import CoordinatorMessage, Welcome
from proxyd.runtime import translate
from proxyd.runtime.limits import STRANGERS, WaitingRoom, fair_address
from proxyd.runtime.logs import Throttle, fields
from proxyd.v1 import coordination_pb2 as pb
from proxyd.v1.coordination_pb2_grpc import CoordinationServicer
from proxyd.wire.auth import NONCE_BYTES, macs_are_equal, token_mac

log = logging.getLogger("proxyd.coordinator")

HELLO_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 10.0
MAX_QUEUED_MESSAGES = 50_000
MAX_BATCH_MESSAGES = 2_000
MAX_STANDING_BY = 20_000
"""Agents that wait at a standby for it to take over: each costs an idle stream."""

_Context = grpc.aio.ServicerContext[Any, Any]


REFUSALS = ("crowded", "hello", "silent", "unread")
"""Pushed out by others before it was known; a hello that is none, or is refused; nothing said in time; took nothing."""


class _Refuse(Exception):
    """End the session with this status; the text is for the peer's eyes."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclasses.dataclass(eq=False)
class _Session:
    number: int
    sign: Callable[[Welcome], bytes]
    queue: list[CoordinatorMessage] = dataclasses.field(default_factory=list)
    idle: asyncio.Future[None] | None = None
    """What the writer waits for while there is nothing to write."""
    writing_since_s: float | None = None
    end: _Refuse | None = None

    def wake(self) -> None:
        """There is something for the writer."""
        if self.idle is not None and not self.idle.done():
            self.idle.set_result(None)

    def finish(self, code: grpc.StatusCode, text: str) -> None:
        """Send what is queued, then end. The first reason stands."""
        if self.end is None:
            self.end = _Refuse(code, text)
        self.wake()


class SessionServicer(CoordinationServicer):
    """The Coordination service.

    :param token: the shared secret; empty: none is needed.
    :param on_event: takes SessionOpened, SessionMessage, SessionClosed; it must not raise. None: this one stands by,
        until :meth:`activate`.
    :param guard: compares certificates with names.
    :param name: of the coordinator, and ``active`` where the active one is: what a standby says.
    """

    def __init__(
        self,
        token: bytes,
        on_event: Callable[[CoordinatorEvent], None] | None = None,
        guard: Guard | None = None,
        *,
        name: str = "",
        active: Callable[[], str] = str,
        places: int = STRANGERS,
    ) -> None:
        self._token = token
        self._guard = Guard() if guard is None else guard
        self._may_speak: Callable[[], bool] = lambda: True
        self._standing_by: set[asyncio.Future[None]] = set()
        self._name, self._active = name, active
        self._is_active = on_event is not None
        self._on_event: Callable[[CoordinatorEvent], None] = on_event or (lambda _: None)
        self._numbers = itertools.count(1)
        self._sessions: dict[int, _Session] = {}
        self.strangers = WaitingRoom(places)
        self.refused: Counter[str] = Counter()
        """Sessions that were refused or cut off, by reason: one of :data:`REFUSALS`."""
        self._throttle = Throttle(log)
        self._stopping = False

    @property
    def open_sessions(self) -> int:
        """Authenticated sessions that stand now."""
        return len(self._sessions)

    def activate(
        self, on_event: Callable[[CoordinatorEvent], None], may_speak: Callable[[], bool] = lambda: True
    ) -> None:
        """Take over: those that wait come back as sessions.

        :param may_speak: asked before every write; once it says no, nothing of what is queued leaves.
        """
        self._on_event, self._may_speak, self._is_active = on_event, may_speak, True
        for waiting in self._standing_by:
            if not waiting.done():
                waiting.set_result(None)

    def perform(self, effects: Sequence[CoordinatorEffect]) -> None:
        """Carry out the machine's effects. A session that ended meanwhile is passed over: its SessionClosed follows."""
        for effect in effects:
            session = self._sessions.get(effect.session)
            if session is None:
                continue
            if isinstance(effect, ToAgent):
                session.queue.append(effect.message)
                session.wake()
                if len(session.queue) > MAX_QUEUED_MESSAGES:
                    session.queue.clear()
                    self.refused["unread"] += 1
                    session.finish(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"the agent does not read: {MAX_QUEUED_MESSAGES} messages wait for it",
                    )
            else:
                session.finish(grpc.StatusCode.ABORTED, effect.reason)

    async def stop(self) -> None:
        """End all sessions with UNAVAILABLE ("come back"); new ones are refused."""
        self._stopping = True
        for waiting in self._standing_by:
            waiting.cancel()
        for session in self._sessions.values():
            session.finish(grpc.StatusCode.UNAVAILABLE, "the coordinator stops")

    async def Session(self, request_iterator: AsyncIterator[pb.AgentBatch], context: _Context) -> None:  # type: ignore[override] # the read/write form
        """One agent's session, from its first byte to its last."""
        try:
            self._guard.saw_call(context)
            await self._serve(context)
        except _Refuse as refusal:
            level = logging.WARNING if refusal.code is grpc.StatusCode.UNAUTHENTICATED else logging.INFO
            self._throttle.emit(level, refusal.code.name, f"session of {context.peer()} ends: {refusal.text}")
            await context.abort(refusal.code, refusal.text)
        except translate.TranslateError as error:
            self._throttle.warning("protocol", f"session of {context.peer()} broke the protocol: {error}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DecodeError:
            self._throttle.warning("protocol", f"session of {context.peer()} broke the protocol: no AgentBatch")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "what came is no AgentBatch")
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 # whatever it is, the other side gets none of it
            await context.abort(grpc.StatusCode.INTERNAL, reference(error, f"session of {context.peer()}"))

    async def _serve(self, context: _Context) -> None:
        if self._stopping:
            raise _Refuse(grpc.StatusCode.UNAVAILABLE, "the coordinator stops")
        visitor = self.strangers.enter(_host_of(context.peer()))
        pushed_out = ""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S) as patience:

                def dismiss(reason: str) -> None:
                    nonlocal pushed_out
                    if not patience.expired():
                        pushed_out = reason
                        patience.reschedule(0)

                visitor.dismiss = dismiss
                signed, sign = await self._greet(context)
        except TimeoutError:
            self.refused["crowded" if pushed_out else "silent"] += 1
            if pushed_out:
                raise _Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, pushed_out) from None
            raise _Refuse(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {HELLO_TIMEOUT_S:g} s") from None
        except (_Refuse, translate.TranslateError, DecodeError):
            self.refused["hello"] += 1
            raise
        finally:
            visitor.leave()
        if not self._is_active:
            await self._stand_by(context)
        session = _Session(next(self._numbers), sign)
        self._sessions[session.number] = session
        agent = str(signed.hello.agent)
        log.info("session opened", extra=fields(agent=agent, session=session.number, peer=context.peer()))
        reason = "the connection was lost"
        try:
            self._on_event(SessionOpened(session.number, signed.hello))
            reason = await self._run(session, context)
        except _Refuse as refusal:
            reason = refusal.text
            raise
        except translate.TranslateError as error:
            reason = str(error)
            raise
        except DecodeError:
            reason = "what came is no AgentBatch"
            raise
        finally:
            del self._sessions[session.number]
            log.info("session closed: %s", reason, extra=fields(agent=agent, session=session.number))
            self._on_event(SessionClosed(session.number, reason))

    async def _greet(self, context: _Context) -> tuple[translate.SignedHello, Callable[[Welcome], bytes]]:
        """Challenge and hello; answers the hello and how to sign the Welcome."""
        challenge = secrets.token_bytes(NONCE_BYTES)
        await context.write(translate.challenge_batch(challenge))
        signed = translate.read_hello(await _read(context))
        expected = token_mac(self._token, "dial", challenge, signed.nonce, str(signed.hello.agent))
        if problem := self._guard.problem(context, signed.hello.agent):
            raise _Refuse(grpc.StatusCode.UNAUTHENTICATED, f"agent {signed.hello.agent}: {problem}")
        if not macs_are_equal(expected, signed.mac):
            self._guard.refusals.add("control", "token")
            raise _Refuse(grpc.StatusCode.UNAUTHENTICATED, _why_unauthenticated(self._token, signed))

        def sign(welcome: Welcome) -> bytes:
            return token_mac(self._token, "accept", challenge, signed.nonce, welcome.coordinator)

        return signed, sign

    async def _stand_by(self, context: _Context) -> NoReturn:
        """Keep an agent's stream until this coordinator takes over, or stops."""
        if len(self._standing_by) >= MAX_STANDING_BY:
            raise _Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STANDING_BY} agents wait at this standby already")
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._standing_by.add(taken)
        hung_up = asyncio.ensure_future(context.read())
        try:
            await context.write(translate.standby_batch(self._name, self._active()))
            await asyncio.wait((taken, hung_up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._standing_by.discard(taken)
            hung_up.cancel()
        if self._stopping or taken.cancelled():
            raise _Refuse(grpc.StatusCode.UNAVAILABLE, "the coordinator stops")
        if taken.done():
            raise _Refuse(grpc.StatusCode.UNAVAILABLE, f"this coordinator takes over as {self._name}: come back")
        raise _Refuse(grpc.StatusCode.CANCELLED, "the agent hung up while it waited")

    async def _run(self, session: _Session, context: _Context) -> str:
        """Until the agent hangs up (answers the reason) or the session is to be ended (raises)."""
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read_all(session, context))
        writer = loop.create_task(self._write_all(session, context))
        try:
            ended: set[asyncio.Task[str]] = set()
            while not ended:
                # A look at the clock now and then costs less than a timer for each write.
                ended, _ = await asyncio.wait(
                    (reader, writer), timeout=WRITE_TIMEOUT_S / 4, return_when=asyncio.FIRST_COMPLETED
                )
                if session.writing_since_s is not None and loop.time() - session.writing_since_s >= WRITE_TIMEOUT_S:
                    self.refused["unread"] += 1
                    raise _Refuse(
                        grpc.StatusCode.RESOURCE_EXHAUSTED, f"the agent took nothing for {WRITE_TIMEOUT_S:g} s"
                    )
            # What the reader found is the cause; a writer that failed with it is only the consequence.
            return reader.result() if reader.done() else writer.result()
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read_all(self, session: _Session, context: _Context) -> str:
        while True:
            batch = await context.read()
            if not isinstance(batch, pb.AgentBatch):
                return "the agent ended the session"
            for message in translate.agent_messages(batch):
                self._on_event(SessionMessage(session.number, message))

    async def _write_all(self, session: _Session, context: _Context) -> str:
        loop = asyncio.get_running_loop()
        queue = session.queue
        while True:
            while queue:
                messages = queue[:MAX_BATCH_MESSAGES]
                del queue[:MAX_BATCH_MESSAGES]
                if not self._may_speak():
                    raise _Refuse(grpc.StatusCode.UNAVAILABLE, "this coordinator has lost its lock")
                session.writing_since_s = loop.time()
                await context.write(translate.coordinator_batch(messages, session.sign))
                session.writing_since_s = None
            if session.end is not None:
                raise session.end
            # Not an Event: its bookkeeping for each message costs as much as a small write.
            session.idle = loop.create_future()
            await session.idle


def _host_of(peer: str) -> str:
    """Of gRPC's name of a peer, like ``ipv6:[::1]:50432`` or ``unix:``."""
    host = peer.partition(":")[2].rpartition(":")[0].strip("[]").replace("%5B", "").replace("%5D", "")
    return fair_address(host) if host else peer


def _why_unauthenticated(token: bytes, signed: translate.SignedHello) -> str:
    agent = signed.hello.agent
    if not token:
        return f"agent {agent} has a token and this coordinator has none; give both the same token_file"
    if not signed.mac:
        return f"agent {agent} has no token and this coordinator needs one; set token_file in its [agent]"
    return f"agent {agent} has another token than this coordinator; give both the same token_file"


async def _read(context: _Context) -> pb.AgentBatch:
    batch = await context.read()
    if not isinstance(batch, pb.AgentBatch):
        raise _Refuse(grpc.StatusCode.CANCELLED, "the agent hung up before its hello")
    return batch
