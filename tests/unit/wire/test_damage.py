"""What arrives damaged, cut short or with lengths beyond reason: refused before memory is touched, in whichever field.

A frame between agents carries checksums of its own, so each flipped bit is noticed. A client's frames travel over a
Unix socket, where bits don't flip; there it is lengths and ends that a wrong or hostile client can choose.
"""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import pytest

from proxyd.wire import client, peer
from proxyd.wire.codec import DamagedFrame, WireError
from proxyd.wire.envelope import Envelope, TransferId

EXTREMES = (0, 1 << 31, (1 << 31) - 1, 1 << 63, (1 << 64) - 1)
ENVELOPE = Envelope("job", 0, 1, "g", 7, 0, 1 << 20, "float32", (512, 512))
FRAMES = (
    peer.Offer(ENVELOPE, 5, 1 << 20, True, True),
    peer.Held(1 << 20, (0, 1 << 20, 4 << 20, 1 << 20)),
    peer.Ack(1 << 20, 5),
    peer.Nack(1 << 20, 1 << 20),
    peer.Fail(4, "lost", 7),
    peer.OfferedAll(),
    peer.Ping(7),
)


def names(frame: object) -> str:
    return type(frame).__name__


@pytest.mark.parametrize("frame", FRAMES, ids=names)
def test_each_flipped_bit_of_a_frame_between_agents_is_noticed(frame: peer.Frame) -> None:
    whole = peer.encode(frame, TransferId(3, 4))
    for bit in range(8 * len(whole)):
        harmed = bytearray(whole)
        harmed[bit // 8] ^= 1 << bit % 8
        decoder = peer.ControlDecoder()
        decoder.feed(harmed)
        with pytest.raises(DamagedFrame):
            decoder.next_frame()


@pytest.mark.parametrize("frame", FRAMES, ids=names)
def test_a_frame_that_ends_anywhere_is_no_frame(frame: peer.Frame) -> None:
    whole = peer.encode(frame, TransferId(3, 4))
    for end in range(len(whole)):
        decoder = peer.ControlDecoder()
        decoder.feed(whole[:end])
        assert decoder.next_frame() is None
        decoder.feed(whole[end:])
        assert decoder.next_frame() == (TransferId(3, 4), frame)
        assert decoder.next_frame() is None


@pytest.mark.parametrize("frame", FRAMES, ids=names)
def test_a_body_that_ends_anywhere_is_refused_though_its_checksums_hold(frame: peer.Frame) -> None:
    body = peer.encode(frame)[peer.HEADER_BYTES :]
    for end in range(len(body)):
        header = peer.Header(
            frame.TYPE, 0, peer.ChecksumAlgorithm.CRC32, end, peer.NO_TRANSFER, 0, zlib.crc32(body[:end])
        )
        with pytest.raises(WireError):
            peer.decode_control(header, body[:end])


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("field", ["length", "offset", "checksum", "incarnation", "sequence"])
def test_extreme_figures_of_a_chunk_cost_no_memory(field: str, extreme: int) -> None:
    """A sender that computes checksums well and lies otherwise."""
    values = {"length": 1 << 20, "offset": 0, "checksum": 0, "incarnation": 3, "sequence": 4, field: extreme}
    fields = struct.pack(
        "<HBBHBxI", peer.MAGIC, peer.PROTOCOL_VERSION, peer.DATA_TYPE, 0, 2, values["length"] & 0xFFFFFFFF
    ) + struct.pack("<QQQQ", values["incarnation"], values["sequence"], values["offset"], values["checksum"])
    data = fields + zlib.crc32(fields).to_bytes(4, "little")
    tracemalloc.start()
    try:
        if field == "length" or (field == "offset" and extreme > 1 << 44):
            with pytest.raises(WireError):
                peer.decode_header(data)
        else:
            peer.decode_header(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("allow_payload", [False, True])
def test_extreme_lengths_of_a_clients_frame_cost_no_memory(extreme: int, allow_payload: bool) -> None:
    body = client.encode(client.SendData(1, 0))[client.HEADER_BYTES :]
    tracemalloc.start()
    try:
        decoder = client.Decoder(allow_payload=allow_payload)
        decoder.feed(client.HEADER.pack(len(body), client.SendData.TYPE, 0, extreme) + body)
        if extreme:
            with pytest.raises(WireError):
                decoder.next_frame()
        decoder = client.Decoder(allow_payload=allow_payload)
        decoder.feed(client.HEADER.pack(extreme & 0xFFFFFFFF, client.SendData.TYPE, 0, 0) + body)
        if extreme & 0xFFFFFFFF or not extreme:
            with pytest.raises(WireError):
                decoder.next_frame()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_clients_frame_that_ends_anywhere_waits_or_is_refused() -> None:
    frame = client.PostSend(1, ENVELOPE, 1, 4096, 1 << 20)
    whole = client.encode(frame)
    for end in range(len(whole)):
        decoder = client.Decoder(allow_payload=False)
        decoder.feed(whole[:end])
        assert decoder.next_frame() is None
    body = whole[client.HEADER_BYTES :]
    for end in range(len(body)):
        decoder = client.Decoder(allow_payload=False)
        decoder.feed(client.HEADER.pack(end, frame.TYPE, 0, 0) + body[:end])
        with pytest.raises(WireError):
            decoder.next_frame()
