"""The agent's side of the control sessions: one stream to each configured coordinator, for as long as the agent lives.

A session that ends is tried again after 0.1 s, then more slowly, at
most every 2 s, with jitter, so that a restarted coordinator has everybody back within some seconds and not all at one
instant. The machine hears of three things only: connected (with the Welcome), said, lost (once per outage, also when
there was no session before it; with the reason in words).

A *standby* keeps the stream and says nothing until it takes over: that costs no dialling in vain, and its connection
stands when it is needed. A Welcome of a coordinator whose lock another one has taken over is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import grpc.aio

from proxyd.core.events import AgentEvent, CoordinatorConnected, CoordinatorLost, CoordinatorSaid
from proxyd.core.messages import AgentHello, AgentMessage, CoordinatorMessage, Welcome
from proxyd.core.owners import Fences
from proxyd.runtime import translate
from proxyd.runtime.grpc_options import (
    MAX_REQUEST_BYTES,
    RECONNECT_INITIAL_NS,
    RECONNECT_MAX_NS,
    channel_options,
)
from proxyd.runtime.tls import COORDINATOR_NAME, TlsIdentity, TlsKeeper
from proxyd.v1 import coordination_pb2 as pb
from proxyd.v1.coordination_pb2_grpc import CoordinationStub
from proxyd.wire.auth import NONCE_BYTES, mac_is_right, token_mac

if TYPE_CHECKING:
    from proxyd.v1.coordination_pb2_grpc import CoordinationAsyncStub

HELLO_TIMEOUT_S = 10.0
MAX_PENDING_MESSAGES = 20_000
"""A coordinator that reads nothing while this much waits is given up; the machine says everything again later."""
FLUSH_TIMEOUT_S = 0.5
LOG_INTERVAL_S = 30.0
TAKEN_OVER_S = (0.02, 0.3)
"""How soon agents come back to a standby that takes over."""

_Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.AgentBatch, pb.CoordinatorBatch]"


class _SessionError(Exception):
    """The session can't stand or go on, with the reason in words."""


class CoordinatorSessions:
    """All control sessions of an agent. To be used from the event loop's thread only.

    :param addresses: as configured (``host:port``, ``unix:/path``); they name the sessions in events and in send().
    :param hello: asked at each attempt; ``epoch_seen`` is filled in here.
    :param token: the shared secret; empty: none.
    :param on_event: gets CoordinatorConnected, CoordinatorSaid and CoordinatorLost, in order for each session.
    :param tls: this agent's certificate; None: no TLS. Sockets of this host (``unix:``) never have any.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        hello: Callable[[], AgentHello],
        token: bytes,
        on_event: Callable[[AgentEvent], None],
        *,
        logger: logging.Logger,
        tls: TlsKeeper | None = None,
    ) -> None:
        fences = Fences()
        self._sessions = {
            address: _Session(
                address, hello, token, on_event, logger, None if address.startswith("unix:") else tls, fences
            )
            for address in addresses
        }

    def start(self) -> None:
        """Begin to dial, on the running loop."""
        for session in self._sessions.values():
            session.start()

    def send(self, address: str, message: AgentMessage) -> None:
        """Queue a message; all of one tick of the loop travel in one batch. Without a session it is dropped: the
        machine says everything again after CoordinatorConnected."""
        self._sessions[address].send(message)

    @property
    def connected(self) -> tuple[str, ...]:
        """Addresses whose session stands now."""
        return tuple(address for address, session in self._sessions.items() if session.connected)

    async def close(self) -> None:
        """Send what is queued (for at most half a second) and hang up. No event comes after it."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))


class _Session:
    def __init__(
        self,
        address: str,
        hello: Callable[[], AgentHello],
        token: bytes,
        on_event: Callable[[AgentEvent], None],
        logger: logging.Logger,
        tls: TlsKeeper | None,
        fences: Fences,
    ) -> None:
        self._address = address
        self._tls = tls
        self._fences = fences
        self._stood_by = False
        """In this life of the stream its coordinator was a standby."""
        self._hello = hello
        self._token = token
        self._on_event = on_event
        self._log = logger
        self.connected = False
        self._closing = False
        self._outage_told = False
        self._logged_at_s = 0.0
        self._epoch = 0
        self._pending: list[AgentMessage] = []
        self._idle: asyncio.Future[None] | None = None
        """What the writer waits for while there is nothing to write."""
        self._flushed = asyncio.Event()
        self._overflow = False
        self._call: _Call | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"coordinator {self._address}")
        self._task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        # The task ends by close() only. Anything else would leave the agent without a coordinator, silently.
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": f"session task of coordinator {self._address} failed", "exception": error, "task": task}
            )

    def send(self, message: AgentMessage) -> None:
        if not self.connected:
            self._log.debug("coordinator %s: no session, dropped %s", self._address, type(message).__name__)
            return
        if len(self._pending) >= MAX_PENDING_MESSAGES:
            if not self._overflow and self._call is not None:
                self._overflow = True
                self._call.cancel()
            return
        self._pending.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def close(self) -> None:
        self._closing = True
        if self._task is None:
            return
        if self.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_TIMEOUT_S):
                    self._flushed.clear()
                    self._wake()
                    await self._flushed.wait()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        delay_ns = RECONNECT_INITIAL_NS
        while not self._closing:
            # A channel keeps the certificate it was made with: after a rotation the next session gets another one.
            identity = None if self._tls is None else self._tls.current()
            async with self._channel(identity) as channel:
                stub = CoordinationStub(channel)
                while self._tls is None or self._tls.current() is identity:
                    try:
                        reason = await self._one_session(stub)
                    except grpc.aio.AioRpcError as error:
                        reason = _describe(error) + self._about_certificate(error)
                    except (_SessionError, translate.TranslateError) as error:
                        reason = str(error)
                    except TimeoutError:
                        reason = f"no answer to the hello within {HELLO_TIMEOUT_S:g} s"
                    if self.connected:
                        delay_ns = RECONNECT_INITIAL_NS
                    self._lost(reason)
                    # No cryptography here: the jitter only spreads the agents of one coordinator.
                    if self._stood_by:
                        # It takes over, or has gone: the first wants all of us back soon, and not at one instant.
                        self._stood_by, delay_ns = False, RECONNECT_INITIAL_NS
                        await asyncio.sleep(random.uniform(*TAKEN_OVER_S))
                    else:
                        await asyncio.sleep(delay_ns * random.uniform(0.8, 1.2) / 1e9)
                        delay_ns = min(2 * delay_ns, RECONNECT_MAX_NS)

    def _channel(self, identity: TlsIdentity | None) -> grpc.aio.Channel:
        if identity is None:
            return grpc.aio.insecure_channel(self._address, options=channel_options())
        credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.chain_pem)
        # Whatever the address: whoever answers there must have a coordinator's certificate.
        options = [*channel_options(), ("grpc.ssl_target_name_override", COORDINATOR_NAME)]
        return grpc.aio.secure_channel(self._address, credentials, options=options)

    def _about_certificate(self, error: grpc.aio.AioRpcError) -> str:
        """What gRPC doesn't see: in TLS 1.3 a refused certificate looks like a connection that was closed."""
        if self._tls is None or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return ""
        uris = ", ".join(self._tls.current().uris)
        return f" (this agent's certificate: {uris}, {self._tls.state}; does the coordinator's tls_ca know its CA?)"

    def _lost(self, reason: str) -> None:
        now_s = time.monotonic()
        if not self._outage_told or now_s - self._logged_at_s >= LOG_INTERVAL_S:
            self._logged_at_s = now_s
            self._log.warning("coordinator %s: %s; trying again", self._address, reason)
        self.connected = False
        self._pending.clear()
        if not self._outage_told and not self._closing:
            self._outage_told = True
            self._on_event(CoordinatorLost(self._address, reason))

    async def _one_session(self, stub: CoordinationAsyncStub) -> str:
        """One life of the stream; answers why it ended, or raises what :meth:`_run` catches."""
        call: _Call = stub.Session()
        writer: asyncio.Task[None] | None = None
        self._call, self._overflow = call, False
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                answer = await self._greet(call)
            if isinstance(answer, translate.Standby):
                return await self._wait_for_standby(call, answer)
            welcome, rest = answer
            if why := self._fences.admits(welcome, time.monotonic_ns()):
                raise _SessionError(why)
            self._epoch = welcome.epoch
            self._pending.clear()
            self.connected = True
            self._outage_told = False
            self._log.info("coordinator %s: session with %s, epoch %d", self._address, welcome.coordinator, self._epoch)
            writer = asyncio.get_running_loop().create_task(self._write(call))
            self._on_event(CoordinatorConnected(self._address, welcome))
            for message in rest:
                self._on_event(CoordinatorSaid(self._address, message))
            while True:
                batch = await call.read()
                if not isinstance(batch, pb.CoordinatorBatch):
                    return "the coordinator ended the session"
                self._fences.heard(welcome, time.monotonic_ns())
                for message in translate.coordinator_messages(batch):
                    self._on_event(CoordinatorSaid(self._address, message))
        except asyncio.CancelledError:
            if self._overflow and not self._closing:
                return f"it took none of {MAX_PENDING_MESSAGES} messages"
            raise
        finally:
            self._call = None
            if writer is not None:
                writer.cancel()
            call.cancel()

    async def _wait_for_standby(self, call: _Call, standby: translate.Standby) -> str:
        """Until it takes over, or is gone."""
        self._stood_by = True
        active = f"; the active one is at {standby.active}" if standby.active else ""
        self._log.info("coordinator %s: stands by for %s%s", self._address, standby.coordinator, active)
        if not self._outage_told:
            self._outage_told = True
            self._on_event(CoordinatorLost(self._address, f"it stands by for {standby.coordinator}{active}"))
        while isinstance(await call.read(), pb.CoordinatorBatch):
            pass  # nothing that concerns us
        return "the standby ended the session"

    async def _greet(self, call: _Call) -> tuple[Welcome, list[CoordinatorMessage]] | translate.Standby:
        """Challenge, hello, welcome: each side proves that it holds the token. Also what came with the welcome."""
        challenge = translate.read_challenge(await _read(call))
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = dataclasses.replace(self._hello(), epoch_seen=self._epoch)
        mac = token_mac(self._token, "dial", challenge, nonce, str(hello.agent))
        await call.write(translate.hello_batch(translate.SignedHello(hello, nonce, mac)))
        first = await _read(call)
        if (standby := translate.read_standby(first)) is not None:
            return standby
        welcome, its_mac, rest = translate.read_welcome(first)
        if not mac_is_right(self._token, "accept", challenge, nonce, welcome.coordinator, its_mac):
            raise _SessionError(
                f"{welcome.coordinator!r} there does not hold this agent's token: its welcome has "
                + ("a wrong proof" if its_mac else "no proof")
                + ". Give both the same token_file, or correct the address"
            )
        return welcome, rest

    async def _write(self, call: _Call) -> None:
        """Send what is pending, a batch at a time; ends with the stream, whose reader knows the reason."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._pending:
                    messages, self._pending = self._pending, []
                    for batch in _batches(messages):
                        await call.write(batch)
                self._flushed.set()
                # Not an Event: its bookkeeping for each message costs as much as a small write.
                self._idle = loop.create_future()
                await self._idle


def _batches(messages: Sequence[AgentMessage]) -> Iterator[pb.AgentBatch]:
    """One batch, or as many as a coordinator takes them."""
    batch = translate.agent_batch(messages)
    if len(messages) == 1 or batch.ByteSize() <= MAX_REQUEST_BYTES:
        yield batch
        return
    half = len(messages) // 2
    yield from _batches(messages[:half])
    yield from _batches(messages[half:])


async def _read(call: _Call) -> pb.CoordinatorBatch:
    batch = await call.read()
    if not isinstance(batch, pb.CoordinatorBatch):
        raise _SessionError("the coordinator ended the session before it stood")
    return batch


def _describe(error: grpc.aio.AioRpcError) -> str:
    """The reason in words: the coordinator's own, or what gRPC saw."""
    details = (error.details() or "no details").strip()
    return f"{error.code().name.lower().replace('_', ' ')}: {details}"
