"""The data listener: peer agents' control and data connections to this agent.

Strangers are cheap: a handshake has ten seconds and one small frame, the door has so many places for them and no more
(:mod:`proxyd.runtime.limits`), and descriptors for those who are welcome are kept back from those who are not.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable

from proxyd.agent import tcp
from proxyd.agent.arenas import Block
from proxyd.agent.channel import ControlChannel
from proxyd.agent.handshake import HandshakeError, Identity, receive_hello, refuse, send_welcome
from proxyd.agent.offers import OfferMemory
from proxyd.agent.streams import ReceiveStream
from proxyd.agent.tls_socket import Connection
from proxyd.core.events import AgentEvent, ChunkArrived, InboundClosed, InboundOpened, PeerFrame
from proxyd.core.ids import AgentName, TransferId
from proxyd.runtime.addresses import Address
from proxyd.runtime.limits import STRANGERS, Descriptors, Dismiss, Door, Listening, cancel
from proxyd.runtime.logs import fields
from proxyd.runtime.refusals import PROOFS
from proxyd.wire import peer as wire
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import ErrorCode

MAX_STREAMS_PER_PEER = 256
MISSED_REMEMBERED = 1024
OFFER_WAIT_S = 10.0
"""How long a chunk may wait for its OFFER: several retransmissions of the control connection."""

_log = logging.getLogger(__name__)


def bound_address(sock: Listening) -> Address:
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
        self._offered = OfferMemory()
        self._early: dict[TransferId, list[tuple[wire.Header, Callable[[], None]]]] = {}
        """Chunks that wait for their OFFER, and what lets their streams go on."""
        self._missed: OrderedDict[TransferId, list[wire.Header]] = OrderedDict()
        """Chunks that were thrown away because they had waited too long for it."""

    def open(self, sock: Connection) -> None:
        """Its control connection stands."""
        self._channel = ControlChannel(sock, self._on_frame, self._ended, timeout_ns=self._owner.peer_timeout_ns)
        self._emit(InboundOpened(self.peer, self.incarnation))

    def add_stream(self, sock: Connection) -> None:
        """A data connection of the same life."""
        self._streams.append(ReceiveStream(sock, self, self._stream_ended))

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

    def damaged(self) -> None:
        self._owner.damaged_frames += 1

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
            self._offered.add(transfer)
            # The machine has answered by now: either there is a block, or the chunks are unwanted.
            self._release(transfer)

    def _stream_ended(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.last_words()  # CANCELs, or why it ends
        self._ended(reason)

    def _ended(self, reason: str) -> None:
        if self._channel is not None:
            silent_ns = self._channel.silent_ns
            self._owner.damaged_frames += self._channel.damaged
            self.close("")
            self._owner.forget(self)
            _log.info("inbound peer is gone", extra=fields(peer=self.peer, reason=reason))
            text = f"the connection from agent {self.peer} ended: {reason}"
            self._emit(InboundClosed(self.peer, self.incarnation, text, silent_ns))

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
        sock: Listening,
        me: Identity,
        *,
        eager_bytes: int,
        peer_timeout_ns: int,
        block_of: Callable[[AgentName, TransferId], Block | None],
        emit: Callable[[AgentEvent], None],
        places: int = STRANGERS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._me = me
        self._eager_bytes = eager_bytes
        self.peer_timeout_ns = peer_timeout_ns
        self.block_of = block_of
        self._emit = emit
        self._peers: dict[AgentName, InboundPeer] = {}
        self.damaged_frames = 0
        """Frames that failed their checksum here, each the end of a connection."""
        self._handshakes: set[asyncio.Task[None]] = set()
        self._closed = False
        self.door = Door(sock, "data", self._arrived, _log, places=places)

    @property
    def address(self) -> Address:
        """Where it listens."""
        return bound_address(self._sock)

    @property
    def connection_count(self) -> int:
        """Connections that stand."""
        return sum(1 + peer.stream_count for peer in self._peers.values())

    @property
    def data_connection_count(self) -> int:
        """Those that carry payload."""
        return sum(peer.stream_count for peer in self._peers.values())

    def send(self, peer: AgentName, transfer: TransferId, frame: wire.Frame) -> None:
        """A control frame to a sender; dropped when it is no longer connected."""
        inbound = self._peers.get(peer)
        if inbound is not None:
            inbound.send(transfer, frame)

    def forget(self, inbound: InboundPeer) -> None:
        """``inbound`` has ended."""
        if self._peers.get(inbound.peer) is inbound:
            del self._peers[inbound.peer]

    def _arrived(self, sock: socket.socket, address: object, leave: Callable[[], None]) -> Dismiss:
        host, port = address[:2] if isinstance(address, tuple) else ("?", 0)
        task = self._loop.create_task(self._greet(sock, f"{host}:{port}"))
        self._handshakes.add(task)

        def greeted(task: asyncio.Task[None]) -> None:
            self._handshakes.discard(task)
            leave()
            if task.cancelled():
                sock.close()  # also where it was dismissed before its first step

        task.add_done_callback(greeted)
        return lambda reason: cancel(task)

    async def _greet(self, sock: socket.socket, address: str) -> None:
        adopted = False
        try:
            tcp.prepare(sock, peer_timeout_ns=self.peer_timeout_ns)
            connection, hello, challenge = await receive_hello(sock, self._me)
            adopted = await self._adopt(connection, hello, challenge)
        except (HandshakeError, WireError) as error:
            reason = error.reason if isinstance(error, HandshakeError) else "protocol"
            if reason in PROOFS:
                self._me.refusals.add("data", reason)
            self.door.refuse("hello", f"refused a connection to the data port from {address}: {error}", kind=reason)
        except TimeoutError:
            self.door.refuse("silent", f"closed a connection to the data port from {address} that said no hello")
        except OSError as error:
            self.door.refuse("hello", f"a connection from {address} ended in its handshake: {error.strerror or error}")
        finally:
            if not adopted:
                sock.close()

    async def _adopt(self, sock: Connection, hello: wire.Hello, challenge: bytes) -> bool:
        name = AgentName(hello.site, hello.name)
        if hello.purpose == wire.StreamPurpose.CONTROL:
            if self.connection_count >= _connection_limit():
                self.door.refuse("limit", f"refused agent {name}: {self.connection_count} connections of peers stand")
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
        self.door.close()
        for inbound in list(self._peers.values()):
            inbound.close(reason)
        self._peers.clear()
        tasks = list(self._handshakes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _connection_limit() -> int:
    """Connections of peers in all: three quarters of the descriptors; the rest is for trainers and control."""
    return max(16, Descriptors.here().limit * 3 // 4)
