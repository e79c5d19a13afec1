"""The data listener: peer agents' control and data connections to this agent.

Strangers are cheap: a handshake has ten seconds and one small frame, at most :data:`MAX_HANDSHAKES` run at a time, and
descriptors for those who are welcome are kept back from those who are not.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import OrderedDict
from collections.abc import Callable

from proxyd.agent import tcp
from proxyd.agent.arenas import Block
from proxyd.agent.channel import ControlChannel
from proxyd.agent.handshake import HandshakeError, Identity, receive_hello, refuse, send_welcome
from proxyd.agent.streams import ReceiveStream
from proxyd.core.events import AgentEvent, ChunkArrived, InboundClosed, InboundOpened, PeerFrame
from proxyd.core.ids import AgentName, TransferId
from proxyd.runtime.addresses import Address
from proxyd.runtime.logs import Throttle, fields
from proxyd.wire import peer as wire
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import ErrorCode

MAX_HANDSHAKES = 256
MAX_STREAMS_PER_PEER = 256
OFFERS_REMEMBERED = 65536
"""Offers that a peer made, kept to tell a chunk that came too early from one that came too late."""
MISSED_REMEMBERED = 1024
OFFER_WAIT_S = 10.0
"""How long a chunk may wait for its OFFER: several retransmissions of the control connection."""
_EMFILE_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


def bound_address(sock: socket.socket) -> Address:
    """Where a TCP socket is bound."""
    name = sock.getsockname()
    return Address(host=name[0], port=name[1])


class InboundPeer:
    """One peer's connections to this agent; also the sink of its chunks."""

    def __init__(
        self, owner: InboundListener, peer: AgentName, incarnation: int, emit: Callable[[AgentEvent], None]
    ) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self._owner = owner
        self._emit = emit
        self._channel: ControlChannel | None = None
        self._streams: list[ReceiveStream] = []
        self._offered: OrderedDict[TransferId, None] = OrderedDict()
        self._early: dict[TransferId, list[tuple[wire.Header, Callable[[], None]]]] = {}
        """Chunks that wait for their OFFER, and what lets their streams go on."""
        self._missed: OrderedDict[TransferId, list[wire.Header]] = OrderedDict()
        """Chunks that were thrown away because they had waited too long for it."""

    def open(self, sock: socket.socket) -> None:
        """Its control connection stands."""
        self._channel = ControlChannel(sock, self._on_frame, self._ended, timeout_ns=self._owner.peer_timeout_ns)
        self._emit(InboundOpened(self.peer, self.incarnation))

    def add_stream(self, sock: socket.socket) -> None:
        """A data connection of the same life."""
        self._streams.append(ReceiveStream(sock, self, self._ended))

    @property
    def stream_count(self) -> int:
        """Data connections that stand."""
        return len(self._streams)

    def send(self, transfer: TransferId, frame: wire.Frame) -> None:
        """A control frame back to the sender."""
        if self._channel is not None:
            self._channel.send(frame, transfer)

    def block_of(self, transfer: TransferId) -> Block | None:
        return self._owner.block_of(self.peer, transfer)

    def arrived(self, transfer: TransferId, offset: int, length: int, good: bool) -> None:
        self._emit(ChunkArrived(self.peer, transfer, offset, length, good))

    def was_offered(self, transfer: TransferId) -> bool:
        return transfer in self._offered

    def when_offered(self, header: wire.Header, go_on: Callable[[], None]) -> None:
        waiting = self._early.setdefault(header.transfer, [])
        waiting.append((header, go_on))
        if len(waiting) == 1:
            asyncio.get_running_loop().call_later(OFFER_WAIT_S, self._give_up, header.transfer)

    def _release(self, transfer: TransferId) -> None:
        """Its OFFER came. Chunks that wait go on, into their block or to nowhere; one that is lost is asked for again.

        Without that both sides would wait: all was sent, and not all was received.
        """
        for _, go_on in self._early.pop(transfer, ()):
            go_on()
        for header in self._missed.pop(transfer, ()):
            if self.block_of(transfer) is not None:
                self.arrived(transfer, header.offset, header.length, False)

    def _give_up(self, transfer: TransferId) -> None:
        """No OFFER: the chunks that wait for it go nowhere, and the connections that they block go on."""
        for header, go_on in self._early.pop(transfer, ()):
            self._missed.setdefault(transfer, []).append(header)
            go_on()
        if len(self._missed) > MISSED_REMEMBERED:
            self._missed.popitem(last=False)

    def _on_frame(self, transfer: TransferId, frame: wire.Frame) -> None:
        self._emit(PeerFrame(self.peer, True, transfer, frame))
        if isinstance(frame, wire.Offer):
            self._offered[transfer] = None
            if len(self._offered) > OFFERS_REMEMBERED:
                self._offered.popitem(last=False)
            # The machine has answered by now: either there is a block, or the chunks are unwanted.
            self._release(transfer)

    def _ended(self, reason: str) -> None:
        if self._channel is not None:
            self.close("")
            self._owner.forget(self)
            _log.info("inbound peer is gone", extra=fields(peer=self.peer, reason=reason))
            self._emit(
                InboundClosed(self.peer, self.incarnation, f"the connection from agent {self.peer} ended: {reason}")
            )

    def close(self, good_bye: str) -> None:
        """Close all connections; no event follows."""
        if self._channel is not None:
            self._channel.close(good_bye)
            self._channel = None
        for stream in self._streams:
            stream.close()
        self._streams = []

    def replaced(self) -> None:
        """Another connection of this peer took over."""
        self._ended("another connection of it took over")
        self.close("")  # data connections can be there before the control connection stands


class InboundListener:
    """Accepts peers. ``emit`` gets InboundOpened, InboundClosed, PeerFrame (inbound), ChunkArrived.

    :param block_of: memory of a message that this peer sends, for its chunks; None: it isn't expected (any more).
    """

    def __init__(
        self,
        sock: socket.socket,
        me: Identity,
        *,
        eager_bytes: int,
        peer_timeout_ns: int,
        block_of: Callable[[AgentName, TransferId], Block | None],
        emit: Callable[[AgentEvent], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._me = me
        self._eager_bytes = eager_bytes
        self.peer_timeout_ns = peer_timeout_ns
        self.block_of = block_of
        self._emit = emit
        self._peers: dict[AgentName, InboundPeer] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        self._throttle = Throttle(_log)
        self._accepting = False
        self._closed = False
        self._resume()

    @property
    def address(self) -> Address:
        """Where it listens."""
        return bound_address(self._sock)

    @property
    def connection_count(self) -> int:
        """Connections that stand."""
        return sum(1 + peer.stream_count for peer in self._peers.values())

    def send(self, peer: AgentName, transfer: TransferId, frame: wire.Frame) -> None:
        """A control frame to a sender; dropped when it is no longer connected."""
        inbound = self._peers.get(peer)
        if inbound is not None:
            inbound.send(transfer, frame)

    def forget(self, inbound: InboundPeer) -> None:
        """``inbound`` has ended."""
        if self._peers.get(inbound.peer) is inbound:
            del self._peers[inbound.peer]

    def _resume(self) -> None:
        if not self._accepting and not self._closed and len(self._handshakes) < MAX_HANDSHAKES:
            self._accepting = True
            self._loop.add_reader(self._sock, self._on_acceptable)

    def _pause(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._sock)

    def _on_acceptable(self) -> None:
        for _ in range(64):
            if len(self._handshakes) >= MAX_HANDSHAKES:
                self._pause()  # the kernel's backlog holds the others; a finished handshake resumes
                return
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._throttle.error("accept", f"cannot accept connections of peers: {error.strerror or error}")
                self._pause()
                self._loop.call_later(_EMFILE_PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            task = self._loop.create_task(self._greet(sock, f"{address[0]}:{address[1]}"))
            self._handshakes.add(task)
            task.add_done_callback(self._greeted)

    def _greeted(self, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._resume()

    async def _greet(self, sock: socket.socket, address: str) -> None:
        adopted = False
        try:
            tcp.prepare(sock, peer_timeout_ns=self.peer_timeout_ns)
            hello, challenge = await receive_hello(sock, self._me)
            adopted = await self._adopt(sock, hello, challenge)
        except (HandshakeError, WireError) as error:
            self._throttle.warning("handshake", f"refused a connection to the data port: {error}", address=address)
        except TimeoutError:
            self._throttle.warning("handshake", "closed a silent connection to the data port", address=address)
        except OSError as error:
            self._throttle.warning(
                "handshake", f"a connection ended in its handshake: {error.strerror or error}", address=address
            )
        finally:
            if not adopted:
                sock.close()

    async def _adopt(self, sock: socket.socket, hello: wire.Hello, challenge: bytes) -> bool:
        name = AgentName(hello.site, hello.name)
        if hello.purpose == wire.StreamPurpose.CONTROL:
            if self.connection_count >= _connection_limit():
                await refuse(sock, ErrorCode.RESOURCE, f"{self._me.agent} has no descriptors left for more peers")
                return False
            inbound = InboundPeer(self, name, hello.incarnation, self._emit)
            # Registered before the welcome: the data connections may come as soon as that is read.
            before = self._peers.get(name)
            if before is not None:
                before.replaced()
            self._peers[name] = inbound
            try:
                await send_welcome(sock, self._me, hello, challenge, self._eager_bytes)
            except BaseException:
                self.forget(inbound)
                raise
            if self._closed or self._peers.get(name) is not inbound:
                return False
            inbound.open(sock)
            return True
        known = self._peers.get(name)
        if known is None or known.incarnation != hello.incarnation or known.stream_count >= MAX_STREAMS_PER_PEER:
            await refuse(sock, ErrorCode.PROTOCOL, "a data connection needs a control connection of the same life")
            return False
        await send_welcome(sock, self._me, hello, challenge, self._eager_bytes)
        if self._closed or self._peers.get(name) is not known:
            return False
        known.add_stream(sock)
        return True

    async def close(self, reason: str) -> None:
        """Accept no more and hang up on everybody. No event follows."""
        self._closed = True
        self._pause()
        self._sock.close()
        for inbound in list(self._peers.values()):
            inbound.close(reason)
        self._peers.clear()
        tasks = list(self._handshakes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _connection_limit() -> int:
    """Connections of peers in all: three quarters of the descriptors; the rest is for trainers and control."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4)
