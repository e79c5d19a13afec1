"""Streams on real loopback sockets: what they ask the kernel for."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Iterator

import pytest
import xxhash

from proxyd.agent import tcp
from proxyd.agent.arenas import Block
from proxyd.agent.streams import PIECE_BYTES, WAKE_OF_BUFFER, Outgoing, ReceiveStream, SendStream
from proxyd.core.effects import Chunk
from proxyd.core.ids import TransferId
from proxyd.core.striping import Stripe, least_pace
from proxyd.wire import peer as wire

TRANSFER = TransferId(1, 1)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    one.setblocking(False)
    two.setblocking(False)
    with one, two:
        yield one, two


def ceiling(sock: socket.socket) -> int:
    value: int = struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, tcp.SO_MAX_PACING_RATE, 8))[0]
    return value


def test_a_stream_with_nothing_to_send_has_no_ceiling_until_it_writes(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    async def body() -> None:
        sock, other = pair
        chunks = [Outgoing(Chunk(TRANSFER, 0, 1000, True, False), memoryview(bytes(1000)))]
        stripe = Stripe()
        stream = SendStream(sock, stripe, lambda: chunks.pop() if chunks else None, lambda: None, lambda reason: None)
        stream.set_pace(50_000_000)
        assert ceiling(sock) == 50_000_000
        stream.look(tcp.read_tcp_state(sock), 60_000_000, 0)
        assert ceiling(sock) == tcp.UNPACED
        stream.set_pace(20_000_000)
        assert ceiling(sock) == tcp.UNPACED, "it has nothing to send yet"
        stream.pump()
        assert ceiling(sock) == 20_000_000
        await asyncio.get_running_loop().sock_recv(other, 2000)
        stream.close()

    asyncio.run(body())


def test_no_ceiling_is_so_low_that_the_kernel_waits_for_long(pair: tuple[socket.socket, socket.socket]) -> None:
    async def body() -> None:
        sock = pair[0]
        stream = SendStream(sock, Stripe(), lambda: None, lambda: None, lambda reason: None)
        stream.set_pace(50_000_000)
        stream.set_pace(1)
        assert ceiling(sock) == least_pace(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG), 50_000_000)
        stream.set_pace(0)
        assert ceiling(sock) == tcp.UNPACED
        stream.close()

    asyncio.run(body())


class OneChunk:
    """A message of one chunk; :attr:`began` and :attr:`ended` are set once the turn is over in which it did."""

    def __init__(self, nbytes: int) -> None:
        self.block = Block(TRANSFER, None, 0, 0, nbytes, nbytes)
        self.block.payload = memoryview(bytearray(nbytes))
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self.good: list[bool] = []

    def block_of(self, transfer: TransferId) -> Block:
        asyncio.get_running_loop().call_soon(self.began.set)
        return self.block

    def was_offered(self, transfer: TransferId) -> bool:
        return True

    def when_offered(self, header: wire.Header, go_on: object) -> None:
        raise AssertionError(header)

    def arrived(self, transfer: TransferId, offset: int, length: int, good: bool) -> None:
        self.good.append(good)
        asyncio.get_running_loop().call_soon(self.ended.set)


@pytest.mark.parametrize("length", [5_000, 100_000, 1 << 20])
def test_wakeups_are_few_but_never_limit_the_window(pair: tuple[socket.socket, socket.socket], length: int) -> None:
    """Were the low-water mark near the receive buffer, the kernel would limit the window to it for good."""

    async def body() -> None:
        sock, other = pair
        sink = OneChunk(length)
        stream = ReceiveStream(sock, sink, lambda reason: None)
        data = bytes(length)
        loop = asyncio.get_running_loop()
        header = wire.encode_data_header(TRANSFER, 0, length, xxhash.xxh3_64_intdigest(data))
        async with asyncio.timeout(20):
            await loop.sock_sendall(other, header + data[:1000])
            await sink.began.wait()
            low = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
            assert 1 < low <= sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // WAKE_OF_BUFFER
            assert low <= length - 1000, "the end of a chunk always wakes"
            await loop.sock_sendall(other, data[1000:])
            await sink.ended.wait()
            assert sink.good == [True]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1, "between chunks every byte wakes"
        stream.close()

    asyncio.run(body())


@pytest.mark.parametrize("length", [5_000, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 7])
def test_a_chunk_is_verified_in_pieces(pair: tuple[socket.socket, socket.socket], length: int) -> None:
    """However it is cut on its way; damage shows, and the chunk behind it is judged by itself."""

    async def body() -> None:
        sock, other = pair
        sink = OneChunk(length)
        stream = ReceiveStream(sock, sink, lambda reason: None)
        data = random.Random(length).randbytes(length)
        header = wire.encode_data_header(TRANSFER, 0, length, xxhash.xxh3_64_intdigest(data))
        async with asyncio.timeout(20):
            for damaged_at in (length - 1, length // 2, None):
                sent = bytearray(data)
                if damaged_at is not None:
                    sent[damaged_at] ^= 1
                sink.ended.clear()
                await asyncio.get_running_loop().sock_sendall(other, header + sent)
                await sink.ended.wait()
        assert sink.good == [False, False, True]
        assert sink.block.payload == data
        stream.close()

    asyncio.run(body())
