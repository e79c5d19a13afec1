"""Damage on real connections, frame by frame: each is ended, counted, and leaves neither descriptors nor memory behind.

What the decoders make of each bit and each length is in unit/wire/test_damage.py; here it is the agent that must let
go of the connection, the trainer and its arenas.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxyd.agent import handshake
from proxyd.cli.cluster import AgentMember, Cluster
from proxyd.cli.scrape import scrape
from proxyd.core.ids import AgentName
from proxyd.wire import client, peer
from proxyd.wire.envelope import Envelope, TransferId
from tests.integration.relay_rig import content, endpoints, exchange, until

GROWTH_BYTES = 1 << 20
TRAINERS = 40
"""At once: more of them cost memory that is kept for the next crowd, and look like a leak."""
LENGTHS = (0, 1 << 31, (1 << 32) - 1)
"""Of a frame's field of four bytes; a client's payload has eight."""
PAYLOADS = (1 << 31, 1 << 63, (1 << 64) - 1)
ENVELOPE = Envelope("job", 0, 1, "g", 7, 0, 1 << 20, "float32", (512, 512))
OFFER = peer.encode(peer.Offer(ENVELOPE, 5, 1 << 20, True, True), TransferId(3, 4))
POST = client.encode(client.PostSend(1, ENVELOPE, 1, 4096, 1 << 20))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster({"a": 1}, agent={"arena": "1MiB", "memory": "512MiB"}) as one:
        yield one
        assert not one.deaths()


def descriptors(member: AgentMember) -> int:
    return len(os.listdir(f"/proc/{member.pid}/fd"))


def rss_bytes(member: AgentMember) -> int:
    lines = Path(f"/proc/{member.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def flipped(frame: bytes) -> list[bytes]:
    """One bit of each byte, another one from byte to byte."""
    return [frame[:at] + bytes([frame[at] ^ 1 << at % 8]) + frame[at + 1 :] for at in range(len(frame))]


def of_length(length: int) -> bytes:
    """The offer with another length in its header, whose checksum is right."""
    fields = OFFER[:4] + struct.pack("<BBH", *OFFER[4:6], *struct.unpack("<H", OFFER[6:8])) + struct.pack("<I", length)
    fields += OFFER[12 : peer.HEADER_BYTES - 4]
    return fields + zlib.crc32(fields).to_bytes(4, "little") + OFFER[peer.HEADER_BYTES :]


async def finish(sock: socket.socket, data: bytes) -> None:
    """Say that, end, and listen until hung up on."""
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(sock, data)
        sock.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(sock, 65536):
            pass
    except OSError:
        pass
    finally:
        sock.close()


class Speaker:
    """Speaks to one agent, as a peer and as a trainer."""

    def __init__(self, cluster: Cluster, agent: AgentMember) -> None:
        host, _, port = agent.data_address.rpartition(":")
        self.data_door = host, int(port)
        self.agent = agent
        self.me = handshake.Identity(AgentName("x", "new"), 77, cluster.token_file.read_bytes().strip())

    async def peer(self) -> socket.socket:
        """A proven connection of an agent."""
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.data_door)
        name = AgentName(self.agent.site, self.agent.name)
        await handshake.dial(sock, self.me, name, peer.StreamPurpose.CONTROL, 0)
        return sock

    async def stranger(self) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.data_door)
        return sock

    async def trainer(self, rank: int) -> socket.socket:
        """A connection over the Unix socket, that of an attached trainer: its hello was taken, and its arenas came."""
        sock = await self.unix()
        await asyncio.get_running_loop().sock_sendall(sock, hello(rank))
        decoder, arenas = client.Decoder(allow_payload=False), 0
        while arenas < 2:
            await readable(sock)
            data, fds, _, _ = socket.recv_fds(sock, 65536, 16)
            assert data, "the agent hung up"
            for fd in fds:
                os.close(fd)
            decoder.feed(data)
            while (item := decoder.next_frame()) is not None:
                arenas += isinstance(item[0], client.ArenaGranted)
        return sock

    async def unix(self) -> socket.socket:
        """One that has said nothing yet."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.agent.socket)
        return sock

    async def damage(self) -> int:
        """All kinds; answers how many of them a checksum must have caught."""
        harmed = flipped(OFFER)
        for end in range(len(peer_hello())):
            await finish(await self.stranger(), peer_hello()[:end])
        for frame in (*(OFFER[:end] for end in range(len(OFFER))), *harmed, *map(of_length, LENGTHS)):
            await finish(await self.peer(), frame)
        # At the end of a trainer's connection the agent waits a moment for that of its process: some at a time.
        places = asyncio.Semaphore(TRAINERS)
        said = [POST[:end] for end in range(len(POST))]
        said += [client.HEADER.pack(size, client.PostSend.TYPE, 0, 0) + POST[client.HEADER_BYTES :] for size in LENGTHS]
        said += [client.HEADER.pack(12, client.SendData.TYPE, 0, size) + bytes(12) for size in PAYLOADS]

        async def trainer(rank: int, frame: bytes) -> None:
            async with places:
                await finish(await self.trainer(rank), frame)

        async def stranger(end: int) -> None:
            async with places:
                await finish(await self.unix(), hello(0)[:end])

        await asyncio.gather(*(stranger(end) for end in range(len(hello(0)))))
        await asyncio.gather(*(trainer(rank, frame) for rank, frame in enumerate(said)))
        # A body of length 0 has another checksum than the one that the header tells.
        return len(harmed) + 1


def peer_hello() -> bytes:
    return peer.encode(
        peer.Hello(
            version=peer.PROTOCOL_VERSION,
            purpose=peer.StreamPurpose.CONTROL,
            stream=0,
            site="x",
            name="new",
            incarnation=5,
            to_site="a",
            to_name="a-0",
            nonce=bytes(32),
            mac=bytes(32),
        )
    )


def hello(rank: int) -> bytes:
    life = secrets.randbits(63) + 1
    return client.encode(client.Hello(client.PROTOCOL_VERSION, "harm", rank, life, os.getpid(), bytes(32), b"", True))


async def readable(sock: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        async with asyncio.timeout(10):
            await ready.wait()
    finally:
        loop.remove_reader(sock)


def test_damaged_connections_leave_neither_descriptors_nor_memory(cluster: Cluster) -> None:
    agent = cluster.agent("a")
    speaker = Speaker(cluster, agent)
    asyncio.run(speaker.damage())  # as much at once as is to come: what is loaded and kept for use again is there then
    until(lambda: scrape(agent.metrics).total("proxyd_clients") == 0, 5)
    before, rss_before = descriptors(agent), rss_bytes(agent)
    caught = scrape(agent.metrics).total("proxyd_corrupt_frames_total")
    number = asyncio.run(speaker.damage())
    until(lambda: descriptors(agent) <= before, 5)
    until(lambda: rss_bytes(agent) - rss_before <= GROWTH_BYTES, 5)
    metrics = scrape(agent.metrics)
    assert metrics.total("proxyd_corrupt_frames_total") == caught + number
    assert metrics.total("proxyd_clients") == metrics.total("proxyd_arena_bytes", kind="used") == 0
    with endpoints((agent, 0), (agent, 1)) as (one, two):
        exchange(one, two, content(1_000_000, 2), src=0, dst=1, tag=1)
