"""Chunks that come twice, or from somebody else than the sender: none of them touches what a trainer reads."""

from __future__ import annotations

import asyncio
import dataclasses
import socket

import pytest
import xxhash

from proxyd.agent import inbound
from proxyd.core.events import ChunkArrived, InboundClosed
from proxyd.core.ids import AgentName
from proxyd.wire import peer as wire
from tests.unit.agent.test_peers import CHUNK, OFFER, A, Rig, connection, play, poll


def test_a_chunk_that_comes_again_does_not_touch_what_is_there() -> None:
    """Once all of it is there the sender's block is its trainer's again: a second copy that is still on its way may
    end in other bytes, and the receiving trainer reads the first one by now."""

    async def body() -> None:
        rig = Rig(streams=1, nbytes=CHUNK)
        await rig.connect()
        header = wire.encode_data_header(rig.transfer, 0, CHUNK, xxhash.xxh3_64_intdigest(rig.data))
        loop = asyncio.get_running_loop()
        slow = await connection(rig, wire.StreamPurpose.DATA)
        late = await connection(rig, wire.StreamPurpose.DATA)
        block = rig.block
        assert block is not None
        await loop.sock_sendall(slow, header + rig.data[:1000])
        await poll(lambda: bytes(block.payload[:1000]) == rig.data[:1000])
        rig.link.pump()
        await rig.receiver.until(lambda: len(rig.arrived()) == 1)
        await loop.sock_sendall(slow, bytes(CHUNK - 1000))
        await loop.sock_sendall(late, header + bytes(CHUNK))
        await rig.has_read(slow)
        await rig.has_read(late)
        assert bytes(block.payload) == rig.data
        assert len(rig.arrived()) == 1
        assert not rig.receiver.of(InboundClosed)
        slow.close()
        late.close()
        await rig.close()

    play(body)


def test_a_peer_cannot_write_into_the_message_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "OFFER_WAIT_S", 0.01)

    async def body() -> None:
        rig = Rig(streams=1, nbytes=CHUNK)
        await rig.connect()
        other = dataclasses.replace(A, agent=AgentName("a", "other"))
        control = await connection(rig, wire.StreamPurpose.CONTROL, other)
        data = await connection(rig, wire.StreamPurpose.DATA, other)
        wrong = b"x" * CHUNK
        header = wire.encode_data_header(rig.transfer, 0, CHUNK, xxhash.xxh3_64_intdigest(wrong))
        await asyncio.get_running_loop().sock_sendall(data, header + wrong)
        await rig.has_read(data, control)
        assert rig.block is not None
        assert bytes(rig.block.payload) == bytes(CHUNK)
        assert not rig.arrived()
        control.close()
        data.close()
        await rig.close()

    play(body)


def test_a_chunk_that_was_thrown_away_before_its_offer_came_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise both sides would wait for each other: all was sent, and not all was received."""
    monkeypatch.setattr(inbound, "OFFER_WAIT_S", 0.05)

    async def body() -> None:
        rig = Rig(streams=1, nbytes=3 * CHUNK)
        await rig.connect()
        block, rig.block = rig.block, None
        rig.chunks.rotate(-1)
        rig.link.pump()
        await poll(lambda: rig.transfer in rig.listener._peers[A.agent]._missed)
        rig.block = block
        rig.link.send(rig.transfer, OFFER)
        await rig.receiver.until(lambda: len(rig.receiver.of(ChunkArrived)) == 3)
        arrived = [e for e in rig.receiver.of(ChunkArrived) if isinstance(e, ChunkArrived)]
        assert sorted((e.offset, e.good) for e in arrived) == [(0, True), (CHUNK, False), (2 * CHUNK, True)]
        await rig.close()

    play(body)


def test_data_connections_of_a_peer_that_is_replaced_before_it_stands_are_closed() -> None:
    async def body() -> None:
        rig = Rig(streams=1, nbytes=CHUNK)
        before = inbound.InboundPeer(rig.listener, A.agent, A.incarnation, rig.receiver.emit)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        before.add_stream(ours)
        before.replaced()
        assert theirs.recv(1) == b""
        assert not rig.receiver.of(InboundClosed)
        theirs.close()
        await rig.close()

    play(body)
