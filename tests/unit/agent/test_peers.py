"""Two agents' connections over loopback: handshake, control frames, chunks, failures. No machine behind them."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable

import pytest
import uvloop
import xxhash

from proxyd.agent import handshake, inbound
from proxyd.agent.arenas import Arena, Block, BlockAllocator, make_receive_block
from proxyd.agent.handshake import Identity
from proxyd.agent.inbound import InboundListener
from proxyd.agent.peers import PeerLink
from proxyd.agent.streams import Outgoing
from proxyd.core.effects import Chunk
from proxyd.core.events import (
    AgentEvent,
    ChunkArrived,
    InboundClosed,
    InboundOpened,
    PeerConnected,
    PeerDisconnected,
    PeerFrame,
    PeerUnreachable,
    SendProgress,
)
from proxyd.core.ids import AgentName
from proxyd.runtime.addresses import Address
from proxyd.runtime.metrics import listen_tcp
from proxyd.wire import peer as wire
from proxyd.wire.client import ArenaKind
from proxyd.wire.envelope import Envelope, ErrorCode, TransferId

TOKEN = b"a shared secret of the two sites"
A = Identity(AgentName("a", "one"), 101, TOKEN)
B = Identity(AgentName("b", "two"), 202, TOKEN)
TIMEOUT_NS = 30_000_000_000
CHUNK = 64 << 10


OFFER = wire.Offer(Envelope("j", 0, 1, "", 7, 0, 10 * CHUNK, "", ()), 0, CHUNK, True)


class Events:
    """What one side was told, and a way to wait for more of it."""

    def __init__(self) -> None:
        self.all: list[AgentEvent] = []
        self._news = asyncio.Event()

    def emit(self, event: AgentEvent) -> None:
        self.all.append(event)
        self._news.set()

    def of(self, kind: type[AgentEvent]) -> list[AgentEvent]:
        return [event for event in self.all if isinstance(event, kind)]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                await self._news.wait()


class Rig:
    """A's link to B, B's listener, and one message's memory on each side."""

    def __init__(
        self, *, streams: int = 2, dialler: Identity = A, peer: AgentName = B.agent, nbytes: int = 0, places: int = 1024
    ) -> None:
        self.senders = {dialler.agent}
        self.sender = Events()
        self.receiver = Events()
        self.streams = streams
        self.transfer = TransferId(7, 1)
        self.chunks: deque[Chunk] = deque()
        self.data = random.Random(nbytes).randbytes(nbytes)
        self.block: Block | None = None
        self._others: dict[TransferId, Block] = {}
        if nbytes:
            self.block = block_for(self.transfer, nbytes)
            for offset in range(0, nbytes, CHUNK):
                self.chunks.append(Chunk(self.transfer, offset, min(CHUNK, nbytes - offset), True))
        self.listener = InboundListener(
            listen_tcp(Address("127.0.0.1", 0), "data_listen"),
            B,
            eager_bytes=5_000_000,
            peer_timeout_ns=TIMEOUT_NS,
            block_of=self._block_of,
            emit=self.receiver.emit,
            places=places,
        )
        self.link = PeerLink(
            dialler,
            peer,
            take=self._take,
            took=lambda: None,
            emit=self.sender.emit,
            congestion_control="reno",
            peer_timeout_ns=TIMEOUT_NS,
            seed=1,
        )

    def _block_of(self, peer: AgentName, transfer: TransferId) -> Block | None:
        own = self.block if transfer == self.transfer and peer in self.senders else None
        return own or self._others.get(transfer)

    def _take(self, peer: AgentName) -> Outgoing | None:
        assert peer == B.agent
        if not self.chunks:
            return None
        chunk = self.chunks.popleft()
        return Outgoing(chunk, memoryview(self.data)[chunk.offset : chunk.offset + chunk.length])

    def want(self) -> None:
        self.link.want(str(self.listener.address), B.incarnation, self.streams)

    async def connect(self) -> None:
        self.want()
        await self.sender.until(lambda: bool(self.sender.of(PeerConnected)))
        await self.receiver.until(lambda: bool(self.receiver.of(InboundOpened)))

    def arrived(self) -> list[ChunkArrived]:
        """What was told of the message's chunks."""
        chunks = [event for event in self.receiver.all if isinstance(event, ChunkArrived)]
        return [chunk for chunk in chunks if chunk.transfer == self.transfer]

    async def has_read(self, data: socket.socket, control: socket.socket | None = None) -> None:
        """Wait until the receiver has read all that was sent on a data connection: a chunk of another message comes
        behind it. ``control``: of the same peer, where that isn't ours."""
        loop = asyncio.get_running_loop()
        transfer = TransferId(8, 1 + len(self._others))
        self._others[transfer] = block_for(transfer, CHUNK)
        if control is None:
            self.link.send(transfer, OFFER)
        else:
            await loop.sock_sendall(control, wire.encode(OFFER, transfer))
        header = wire.encode_data_header(transfer, 0, CHUNK, xxhash.xxh3_64_intdigest(bytes(CHUNK)))
        await loop.sock_sendall(data, header + bytes(CHUNK))
        await self.receiver.until(
            lambda: any(isinstance(event, ChunkArrived) and event.transfer == transfer for event in self.receiver.all)
        )

    async def talk(self) -> None:
        """Frames there and back for much longer than a link takes to be dialled."""
        for number in range(100):
            self.link.send(self.transfer, wire.Cancel(ErrorCode.CANCELLED, "no longer"))
            await self.receiver.until(lambda n=number: len(self.receiver.of(PeerFrame)) > n)  # type: ignore[misc]
            self.listener.send(A.agent, self.transfer, wire.Credit())
            await self.sender.until(lambda n=number: len(self.sender.of(PeerFrame)) > n)  # type: ignore[misc]

    async def close(self) -> None:
        await asyncio.gather(*self.link.close("test over"), return_exceptions=True)
        await self.listener.close("test over")


def block_for(transfer: TransferId, nbytes: int) -> Block:
    """Memory for a message, in an arena of its own."""
    arena = Arena(1, ArenaKind.RECEIVE, nbytes + (1 << 20), endpoint_incarnation=1, agent_incarnation=2)
    return make_receive_block(transfer, arena, BlockAllocator(4096, arena.size_bytes), nbytes, CHUNK)


async def poll(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 # it is a few turns of the loop away
            await asyncio.sleep(0)


def play(body: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_bounded(body))


async def _bounded(body: Callable[[], Awaitable[None]]) -> None:
    problems: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    async with asyncio.timeout(30):
        await body()
    assert not problems


def test_chunks_land_in_place_over_several_streams() -> None:
    async def body() -> None:
        rig = Rig(streams=3, nbytes=5 * CHUNK * 40 + 17)
        await rig.connect()
        assert rig.sender.of(PeerConnected) == [PeerConnected(B.agent, B.incarnation, 5_000_000)]
        assert rig.listener.connection_count == 4
        total = len(rig.chunks)
        rig.link.pump()
        await rig.receiver.until(lambda: len(rig.receiver.of(ChunkArrived)) == total)
        assert rig.block is not None
        assert bytes(rig.block.payload) == rig.data
        arrived = rig.receiver.of(ChunkArrived)
        assert all(isinstance(event, ChunkArrived) and event.good for event in arrived)
        await rig.sender.until(
            lambda: any(
                isinstance(event, SendProgress) and event.granted_delivered_bytes == len(rig.data)
                for event in rig.sender.all
            )
        )
        last = rig.sender.of(SendProgress)[-1]
        assert isinstance(last, SendProgress)
        assert last.granted_left_bytes == len(rig.data)
        assert last.unsent_bytes == 0
        assert last.srtt_ns > 0
        await rig.close()

    play(body)


def test_control_frames_go_both_ways() -> None:
    async def body() -> None:
        rig = Rig()
        await rig.connect()
        rig.link.send(rig.transfer, wire.Cancel(ErrorCode.CANCELLED, "no longer"))
        await rig.receiver.until(lambda: bool(rig.receiver.of(PeerFrame)))
        frame = rig.receiver.of(PeerFrame)[0]
        assert frame == PeerFrame(A.agent, True, rig.transfer, wire.Cancel(ErrorCode.CANCELLED, "no longer"))
        rig.listener.send(A.agent, rig.transfer, wire.Credit())
        rig.listener.send(AgentName("no", "body"), rig.transfer, wire.Credit())
        await rig.sender.until(lambda: bool(rig.sender.of(PeerFrame)))
        assert rig.sender.of(PeerFrame) == [PeerFrame(B.agent, False, rig.transfer, wire.Credit())]
        await rig.close()

    play(body)


def test_chunks_for_nobody_are_drained_and_the_stream_stays_in_step() -> None:
    async def body() -> None:
        rig = Rig(streams=1, nbytes=10 * CHUNK)
        real = list(rig.chunks)
        stranger = [dataclasses.replace(chunk, transfer=TransferId(9, 9)) for chunk in real]
        rig.chunks = deque(chunk for pair in zip(stranger, real, strict=True) for chunk in pair)
        await rig.connect()
        rig.link.send(TransferId(9, 9), OFFER)
        rig.link.pump()
        await rig.receiver.until(lambda: len(rig.receiver.of(ChunkArrived)) == len(real))
        assert rig.block is not None
        assert bytes(rig.block.payload) == rig.data
        await rig.close()

    play(body)


def test_a_block_that_its_trainer_has_back_is_written_from_a_copy() -> None:
    async def body() -> None:
        rig = Rig(streams=1, nbytes=600 * CHUNK)
        before, rig.data = rig.data, bytearray(rig.data)  # type: ignore[assignment]
        await rig.connect()
        rig.link.send(rig.transfer, OFFER)
        rig.link.pump()  # until the socket is full, in the middle of a chunk
        taken = 600 - len(rig.chunks)
        assert 0 < taken < 600
        rig.link.keep(rig.transfer)
        rig.chunks.clear()
        rig.data[:] = bytes(len(before))  # type: ignore[index]
        await rig.receiver.until(lambda: len(rig.arrived()) == taken)
        assert all(chunk.good for chunk in rig.arrived())
        await rig.close()

    play(body)


def test_padding_is_drained_counts_as_granted_and_says_nothing() -> None:
    async def body() -> None:
        rig = Rig(streams=1, nbytes=4 * CHUNK)
        real = list(rig.chunks)
        pads = [Chunk(TransferId(1, 1), 0, size, True, padding=True) for size in (CHUNK, 1, 300_000 % CHUNK, CHUNK)]
        rig.chunks = deque(chunk for pair in zip(pads, real, strict=True) for chunk in pair)
        await rig.connect()
        rig.link.pump()
        rig.link.send(rig.transfer, OFFER)
        await rig.receiver.until(lambda: len(rig.receiver.of(ChunkArrived)) == len(real))
        assert rig.block is not None
        assert bytes(rig.block.payload) == rig.data
        total = sum(chunk.length for chunk in [*pads, *real])
        await rig.sender.until(lambda: rig.sender.of(SendProgress)[-1].granted_delivered_bytes == total)  # type: ignore[attr-defined]
        await rig.close()

    play(body)


def test_a_new_link_says_at_once_that_its_windows_are_cold() -> None:
    async def body() -> None:
        rig = Rig(streams=2)
        await rig.connect()
        first = next(iter(rig.sender.of(SendProgress)))
        assert isinstance(first, SendProgress)
        assert first.window_bytes > 0
        assert first.window_grows
        assert first.min_rtt_ns > 0
        await rig.close()

    play(body)


def test_a_chunk_that_overtakes_its_offer_waits_for_it() -> None:
    async def body() -> None:
        rig = Rig(streams=1, nbytes=3 * CHUNK)
        await rig.connect()
        block, rig.block = rig.block, None
        rig.link.pump()
        await poll(lambda: rig.transfer in rig.listener._peers[A.agent]._early)
        assert not rig.receiver.of(ChunkArrived)
        rig.block = block
        rig.link.send(rig.transfer, OFFER)
        await rig.receiver.until(lambda: len(rig.receiver.of(ChunkArrived)) == 3)
        assert block is not None
        assert bytes(block.payload) == rig.data
        await rig.close()

    play(body)


def test_a_chunk_whose_offer_never_comes_does_not_block_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "OFFER_WAIT_S", 0.05)

    async def body() -> None:
        rig = Rig(streams=1, nbytes=2 * CHUNK)
        real = list(rig.chunks)
        rig.chunks.appendleft(dataclasses.replace(real[0], transfer=TransferId(9, 9)))
        await rig.connect()
        rig.link.pump()
        await rig.receiver.until(lambda: len(rig.receiver.of(ChunkArrived)) == 2)
        await rig.close()

    play(body)


def test_a_block_freed_under_way_is_written_no_more() -> None:
    async def body() -> None:
        rig = Rig(streams=1, nbytes=CHUNK)
        await rig.connect()
        block = rig.block
        assert block is not None
        assert block.arena is not None
        whole = block.arena.view
        at = block.offset
        rig.chunks.clear()
        raw = await connection(rig, wire.StreamPurpose.DATA)
        header = wire.encode_data_header(rig.transfer, 0, CHUNK, xxhash.xxh3_64_intdigest(rig.data))
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(raw, header + rig.data[:1000])
        await poll(lambda: bytes(whole[at : at + 1000]) == rig.data[:1000])
        block.release()
        rig.block = None
        rig.link.send(rig.transfer, OFFER)
        await loop.sock_sendall(raw, rig.data[1000:] + header + rig.data)
        await rig.has_read(raw)
        assert bytes(whole[at + 1000 : at + CHUNK]) == bytes(CHUNK - 1000)
        assert not rig.arrived()
        assert not rig.receiver.of(InboundClosed)
        raw.close()
        await rig.close()

    play(body)


async def connection(rig: Rig, purpose: wire.StreamPurpose, who: Identity = A) -> socket.socket:
    """A connection past its handshake, for bytes that no link would send."""
    address = rig.listener.address
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
    await handshake.dial(sock, who, B.agent, purpose, 1)
    return sock


def test_a_damaged_chunk_is_reported_and_not_marked() -> None:
    async def body() -> None:
        rig = Rig(streams=1, nbytes=CHUNK)
        await rig.connect()
        raw = await connection(rig, wire.StreamPurpose.DATA)
        header = wire.encode_data_header(rig.transfer, 0, CHUNK, 12345)
        await asyncio.get_running_loop().sock_sendall(raw, header + rig.data)
        await rig.receiver.until(lambda: bool(rig.receiver.of(ChunkArrived)))
        assert rig.receiver.of(ChunkArrived) == [ChunkArrived(A.agent, rig.transfer, 0, CHUNK, False)]
        raw.close()
        await rig.close()

    play(body)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere.example.org\r\nAccept: */*\r\n\r\n",
        wire.encode_data_header(TransferId(7, 1), 17, CHUNK, 0),
        wire.encode_data_header(TransferId(7, 1), 0, CHUNK - 1, 0),
        wire.encode_data_header(TransferId(7, 1), 64 * CHUNK, CHUNK, 0),
        wire.encode(wire.Credit()),
    ],
    ids=["http", "odd offset", "short chunk", "beyond the end", "control frame"],
)
def test_garbage_on_a_data_connection_ends_that_peer_only(garbage: bytes) -> None:
    async def body() -> None:
        rig = Rig(streams=1, nbytes=2 * CHUNK)
        await rig.connect()
        other = dataclasses.replace(A, agent=AgentName("c", "three"))
        rig.senders.add(other.agent)
        control = await connection(rig, wire.StreamPurpose.CONTROL, other)
        data = await connection(rig, wire.StreamPurpose.DATA, other)
        await asyncio.get_running_loop().sock_sendall(data, garbage + bytes(100))
        await rig.receiver.until(lambda: bool(rig.receiver.of(InboundClosed)))
        closed = rig.receiver.of(InboundClosed)
        assert [event.peer for event in closed if isinstance(event, InboundClosed)] == [other.agent]
        rig.link.pump()
        await rig.receiver.until(lambda: len(rig.receiver.of(ChunkArrived)) == 2)
        control.close()
        data.close()
        await rig.close()

    play(body)


def test_a_lost_peer_is_dialled_again() -> None:
    async def body() -> None:
        rig = Rig()
        await rig.connect()
        address = rig.listener.address
        await rig.listener.close("restarting")
        await rig.sender.until(lambda: bool(rig.sender.of(PeerDisconnected)))
        lost = rig.sender.of(PeerDisconnected)[0]
        assert isinstance(lost, PeerDisconnected)
        assert "restarting" in lost.reason
        await rig.sender.until(lambda: bool(rig.sender.of(PeerUnreachable)))
        unreachable = rig.sender.of(PeerUnreachable)[0]
        assert isinstance(unreachable, PeerUnreachable)
        assert str(address) in unreachable.reason
        assert "Connection refused" in unreachable.reason
        rig.listener = InboundListener(
            listen_tcp(address, "data_listen"),
            B,
            eager_bytes=1,
            peer_timeout_ns=TIMEOUT_NS,
            block_of=lambda *_: None,
            emit=rig.receiver.emit,
        )
        await rig.sender.until(lambda: len(rig.sender.of(PeerConnected)) == 2)
        await rig.close()

    play(body)


def test_the_last_words_of_a_peer_are_heard_though_its_data_connection_is_reset_first() -> None:
    """An agent that stops in the middle of a message: what it says of it must not go with the connections."""

    async def body() -> None:
        rig = Rig(streams=1)
        await rig.connect()
        fail = wire.Fail(ErrorCode.PEER_LOST, "its agent stops", 0)
        rig.listener.send(A.agent, rig.transfer, fail)
        loop = asyncio.get_running_loop()
        closing = loop.create_task(rig.listener.close("two stops"))
        # It left chunks unread, and the loop sees the reset that comes of it before it looks at the control connection.
        loop.call_soon(rig.link._streams[0]._fail, "Connection reset by peer")
        await rig.sender.until(lambda: bool(rig.sender.of(PeerDisconnected)))
        heard = [event for event in rig.sender.all if isinstance(event, PeerFrame | PeerDisconnected)]
        assert heard[0] == PeerFrame(B.agent, False, rig.transfer, fail)
        assert isinstance(heard[1], PeerDisconnected)
        assert "two stops" in heard[1].reason
        assert len(heard) == 2
        await closing
        await rig.close()

    play(body)


def ceilings(rig: Rig) -> list[int]:
    return [stream.pace_bytes_per_s for stream in rig.link._streams]


def test_streams_without_a_chunk_leave_their_part_of_the_pace_to_the_others() -> None:
    async def body() -> None:
        rig = Rig(streams=4, nbytes=2 * CHUNK)
        second = rig.chunks.pop()
        await rig.connect()
        rig.link.set_pace(80_000_000)
        assert ceilings(rig) == [20_000_000] * 4
        rig.link.pump()
        assert sorted(ceilings(rig)) == [40_000_000] * 3 + [80_000_000]
        one = ceilings(rig).index(80_000_000)
        rig.chunks.append(second)
        rig.link._streams[one - 1].pump()
        assert sorted(ceilings(rig)) == [80_000_000 // 3] * 2 + [40_000_000] * 2
        await poll(lambda: rig.link.progress() is not None and len(set(ceilings(rig))) == 1)  # both have left
        assert ceilings(rig) == [20_000_000] * 4
        await rig.close()

    play(body)


def test_more_streams_come_beside_those_that_stand() -> None:
    async def body() -> None:
        rig = Rig(streams=1)
        await rig.connect()
        rig.link.set_pace(90_000_000)
        rig.streams = 20
        rig.want()
        await poll(lambda: rig.link.stream_count == 20 and rig.listener.connection_count == 21)
        assert len(rig.sender.of(PeerConnected)) == 1
        assert not rig.sender.of(PeerDisconnected)
        await rig.close()

    play(body)


@pytest.mark.parametrize(
    ("dialler", "peer", "words"),
    [
        (dataclasses.replace(A, token=b"another secret altogether"), B.agent, "token"),
        (dataclasses.replace(A, token=b""), B.agent, "token"),
        (A, AgentName("b", "three"), "this is b/two"),
    ],
    ids=["wrong token", "no token", "wrong agent"],
)
def test_who_may_not_connect_hears_why(dialler: Identity, peer: AgentName, words: str) -> None:
    async def body() -> None:
        rig = Rig(dialler=dialler, peer=peer)
        rig.want()
        await rig.sender.until(lambda: bool(rig.sender.of(PeerUnreachable)))
        refused = rig.sender.of(PeerUnreachable)[0]
        assert isinstance(refused, PeerUnreachable)
        assert words in refused.reason
        assert not rig.receiver.all
        await rig.close()

    play(body)


def test_a_listener_that_cannot_prove_itself_is_refused() -> None:
    async def body() -> None:
        server = socket.create_server(("127.0.0.1", 0))
        server.setblocking(False)
        sock = socket.socket()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()

        async def impostor() -> None:
            other, _ = await loop.sock_accept(server)
            await loop.sock_sendall(other, wire.encode(wire.Challenge(wire.PROTOCOL_VERSION, bytes(32))))
            await loop.sock_recv(other, 1000)
            await loop.sock_sendall(other, wire.encode(wire.Welcome(1, 0, 1 << 20, bytes(32))))
            other.close()

        task = asyncio.create_task(impostor())
        await loop.sock_connect(sock, server.getsockname())
        with pytest.raises(handshake.HandshakeError, match="did not prove"):
            await handshake.dial(sock, A, B.agent, wire.StreamPurpose.CONTROL, 0)
        await task
        sock.close()
        server.close()

    play(body)


def test_silent_strangers_are_closed_and_do_not_keep_peers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)

    async def body() -> None:
        rig = Rig(places=4)
        address = rig.listener.address
        silent = [socket.create_connection((address.host, address.port)) for _ in range(12)]
        await rig.connect()
        async with asyncio.timeout(5):
            for sock in silent:
                sock.setblocking(False)
                while await asyncio.get_running_loop().sock_recv(sock, 4096):
                    pass
                sock.close()
        assert not rig.sender.of(PeerDisconnected)
        await rig.close()

    play(body)


def test_the_newest_connection_of_a_peer_wins() -> None:
    async def body() -> None:
        rig = Rig()
        first = await connection(rig, wire.StreamPurpose.CONTROL)
        reborn = dataclasses.replace(A, incarnation=999)
        control = await connection(rig, wire.StreamPurpose.CONTROL, reborn)
        await rig.receiver.until(lambda: len(rig.receiver.of(InboundOpened)) == 2)
        kinds = [type(event) for event in rig.receiver.all]
        assert kinds == [InboundOpened, InboundClosed, InboundOpened]
        with pytest.raises(handshake.HandshakeError, match="same life"):
            await connection(rig, wire.StreamPurpose.DATA, A)
        first.close()
        control.close()
        await rig.close()

    play(body)
