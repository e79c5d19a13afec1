"""Frames between agents: the header's own checksum, limits, and what a control connection refuses."""

from __future__ import annotations

import dataclasses
import zlib

import pytest

from proxyd.wire import peer
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import TransferId

TRANSFER = TransferId(1, 2)


def test_a_data_header_round_trips() -> None:
    header = peer.decode_header(peer.encode_data_header(TRANSFER, 1 << 30, 1 << 20, 2**64 - 1))
    expected = peer.Header(peer.DATA_TYPE, 0, peer.ChecksumAlgorithm.XXH3_64, 1 << 20, TRANSFER, 1 << 30, 2**64 - 1)
    assert header == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"length": 0}, "outside the limits"),
        ({"length": peer.MAX_CHUNK_BYTES + 1}, "outside the limits"),
        ({"offset": (1 << 44) + 1}, "outside the limits"),
        ({"checksum_algorithm": peer.ChecksumAlgorithm.CRC32}, "algorithm 1 is unknown"),
        ({"type": 99}, "frame type 99"),
        ({"type": peer.Ping.TYPE, "length": peer.MAX_BODY_BYTES + 1}, "claims a body"),
    ],
)
def test_headers_beyond_the_limits_are_refused(change: dict[str, int], text: str) -> None:
    good = peer.Header(peer.DATA_TYPE, 0, peer.ChecksumAlgorithm.XXH3_64, 1000, TRANSFER, 0, 5)
    with pytest.raises(WireError, match=text):
        peer.decode_header(peer.encode_header(good._replace(**change)))


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    header = peer.encode_data_header(TRANSFER, 0, 4096, 77)
    for bit in range(8 * len(header)):
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(WireError):
            peer.decode_header(damaged)


def test_strangers_and_other_versions_are_told_apart() -> None:
    good = peer.encode_data_header(TRANSFER, 0, 4096, 77)[:-4]
    for position, value, text in ((0, 0, "not a proxyd peer"), (2, 9, "speaks protocol version 9")):
        fields = bytearray(good)
        fields[position] = value
        with pytest.raises(WireError, match=text):
            peer.decode_header(bytes(fields) + zlib.crc32(fields).to_bytes(4, "little"))
    with pytest.raises(WireError, match="48 bytes, not 5"):
        peer.decode_header(b"hello")


def test_a_control_connection_carries_no_data_and_checks_bodies() -> None:
    decoder = peer.ControlDecoder()
    decoder.feed(peer.encode_data_header(TRANSFER, 0, 5, 0) + b"12345")
    with pytest.raises(WireError, match="DATA frame on a control connection"):
        decoder.next_frame()
    frame = bytearray(peer.encode(peer.Cancel(1, "reason"), TRANSFER))
    frame[-1] ^= 1
    decoder = peer.ControlDecoder()
    decoder.feed(frame)
    with pytest.raises(WireError, match="fails its checksum"):
        decoder.next_frame()


def test_types_are_unique_and_none_is_data() -> None:
    assert len(peer.FRAMES) == len(peer.Frame.__args__)
    assert peer.DATA_TYPE not in peer.FRAMES
    assert all(dataclasses.is_dataclass(cls) for cls in peer.FRAMES.values())
