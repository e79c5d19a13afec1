"""Codecs: every frame survives the round trip, however the bytes are cut; and no bytes do worse than WireError."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.wire import arena, client, codec, peer
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import Envelope, TransferId

_RANGES = {
    codec._U8: (0, 2**8 - 1),
    codec._U16: (0, 2**16 - 1),
    codec._U32: (0, 2**32 - 1),
    codec._U64: (0, 2**64 - 1),
    codec._I64: (-(2**63), 2**63 - 1),
}


def _limit(field_codec: Any) -> int:
    """The limit that a text, blob or list codec was built with."""
    found = inspect.getclosurevars(field_codec.decode).nonlocals
    if "raw" in found:
        return _limit(found["raw"])
    return int(found.get("limit_bytes", found.get("limit", 0)))


def _values(name: str, kind: str, field_codec: Any) -> st.SearchStrategy[Any]:
    if field_codec in _RANGES:
        low, high = _RANGES[field_codec]
        return st.one_of(st.integers(low, high), st.sampled_from([low, high]))
    if kind == "bool":
        return st.booleans()
    if kind == "str":
        text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
        return text.filter(lambda value: len(value.encode()) <= _limit(field_codec))
    if kind == "bytes":
        return st.binary(max_size=_limit(field_codec))
    if kind == "tuple[int, ...]":
        return st.lists(st.integers(0, 2**64 - 1), max_size=min(6, _limit(field_codec))).map(tuple)
    if kind == "Envelope":
        return frames_of(Envelope)
    raise AssertionError(f"no strategy for {name}: {kind}")


def frames_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    fields = {
        field.name: _values(field.name, str(field.type), field.metadata[codec._KEY])
        for field in dataclasses.fields(cls)
    }
    return st.builds(cls, **fields)


client_frames = st.one_of([frames_of(cls) for cls in client.FRAMES.values()])
peer_frames = st.one_of([frames_of(cls) for cls in peer.FRAMES.values()])
transfers = st.builds(TransferId, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(at)]


@settings(deadline=None)
@given(st.lists(st.tuples(client_frames, st.binary(max_size=200)), min_size=1, max_size=6), st.lists(st.integers(0)))
def test_client_frames_come_back_however_they_are_cut(items: list[tuple[Any, bytes]], cuts: list[int]) -> None:
    expected: list[tuple[Any, bytes]] = []
    stream = b""
    for frame, payload in items:
        carried = payload if isinstance(frame, client.SendData | client.RecvData) else b""
        stream += client.encode(frame, len(carried)) + carried
        expected.append((frame, carried))
    decoder = client.Decoder(allow_payload=True)
    got: list[tuple[Any, bytes]] = []
    for piece in cut(stream, cuts):
        decoder.feed(piece)
        while True:
            if decoder.payload_left_bytes:
                taken = decoder.take_payload(64)
                if not taken:
                    break
                got[-1] = got[-1][0], got[-1][1] + taken
                continue
            item = decoder.next_frame()
            if item is None:
                break
            got.append((item[0], b""))
    assert got == expected


@settings(deadline=None)
@given(client_frames)
def test_one_byte_at_a_time(frame: Any) -> None:
    decoder = client.Decoder(allow_payload=False)
    data = client.encode(frame)
    for index in range(len(data) - 1):
        decoder.feed(data[index : index + 1])
        assert decoder.next_frame() is None
    decoder.feed(data[-1:])
    assert decoder.next_frame() == (frame, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(transfers, peer_frames), min_size=1, max_size=6), st.lists(st.integers(0)))
def test_peer_frames_come_back_however_they_are_cut(items: list[tuple[TransferId, Any]], cuts: list[int]) -> None:
    decoder = peer.ControlDecoder()
    got = []
    for piece in cut(b"".join(peer.encode(frame, transfer) for transfer, frame in items), cuts):
        decoder.feed(piece)
        while (item := decoder.next_frame()) is not None:
            got.append(item)
    assert got == items


def _feed_all(decoder: Any, pieces: list[bytes]) -> None:
    """Drive a decoder as its users do: until a WireError, after which it is not asked again."""
    for piece in pieces:
        decoder.feed(piece)
        while True:
            if getattr(decoder, "payload_left_bytes", 0):
                if not decoder.take_payload(1 << 20):
                    break
            elif decoder.next_frame() is None:
                break


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0), max_size=5))
@pytest.mark.parametrize(
    "make",
    [
        lambda: client.Decoder(allow_payload=True),
        lambda: client.Decoder(allow_payload=False),
        peer.ControlDecoder,
    ],
)
def test_garbage_is_a_wire_error_or_waits(make: Callable[[], Any], data: bytes, cuts: list[int]) -> None:
    try:
        _feed_all(make(), cut(data, cuts))
    except WireError:
        pass


@settings(max_examples=300, deadline=None)
@given(client_frames, st.data())
def test_a_damaged_client_frame_is_a_wire_error_or_another_frame(frame: Any, data: st.DataObject) -> None:
    stream = bytearray(client.encode(frame))
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        _feed_all(client.Decoder(allow_payload=False), [bytes(stream)])
    except WireError:
        pass


@settings(max_examples=300, deadline=None)
@given(transfers, peer_frames, st.data())
def test_a_flipped_bit_in_a_peer_frame_never_passes(transfer: TransferId, frame: Any, data: st.DataObject) -> None:
    stream = bytearray(peer.encode(frame, transfer))
    position = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[position // 8] ^= 1 << (position % 8)
    decoder = peer.ControlDecoder()
    decoder.feed(stream)
    with pytest.raises(WireError):
        decoder.next_frame()


@settings(deadline=None)
@given(st.sampled_from([*client.FRAMES.values(), *peer.FRAMES.values(), Envelope]), st.binary(max_size=300))
def test_bodies_of_garbage_are_wire_errors_or_frames(cls: type[Any], body: bytes) -> None:
    try:
        frame = codec.decode_body(cls, body)
    except WireError:
        return
    assert codec.encode_body(frame) == body


@settings(deadline=None)
@given(st.integers(1, 1 << 30), st.sampled_from([64 << 10, 1 << 20, 4 << 20]), st.data())
def test_block_maps_remember_exactly_what_was_marked(nbytes: int, chunk_bytes: int, data: st.DataObject) -> None:
    count = arena.chunk_count(nbytes, chunk_bytes)
    view = memoryview(bytearray(arena.block_prefix_bytes(nbytes, chunk_bytes)))
    prefix = arena.BlockPrefix(TransferId(5, 6), nbytes, chunk_bytes)
    arena.write_block_prefix(view, prefix)
    marked = data.draw(st.sets(st.integers(0, count - 1), max_size=20))
    for index in marked:
        arena.mark_chunk(view, index)
    assert arena.read_block_prefix(view) == prefix
    probe = data.draw(st.integers(0, count - 1))
    assert arena.chunk_is_marked(view, probe) == (probe in marked)


damage = st.lists(st.tuples(st.integers(0, 63), st.integers(0, 255)), max_size=4)


@settings(deadline=None)
@given(st.integers(0, 1 << 40), damage)
def test_a_damaged_arena_header_is_refused_or_claims_what_is_mapped(
    size_bytes: int, changes: list[tuple[int, int]]
) -> None:
    view = memoryview(bytearray(arena.PAGE_BYTES))
    arena.write_header(view, arena.ArenaHeader(1, 2, size_bytes, 3, 4))
    for position, value in changes:
        view[position] = value
    assert len(arena.last_delivered(view)) <= arena.DELIVERED_ENTRIES
    try:
        assert arena.read_header(view, size_bytes).size_bytes == size_bytes
    except WireError:
        pass


@settings(deadline=None)
@given(st.integers(1, 1 << 32), damage)
def test_a_damaged_block_prefix_is_refused_or_fits_its_pages(nbytes: int, changes: list[tuple[int, int]]) -> None:
    view = memoryview(bytearray(arena.block_prefix_bytes(nbytes, 1 << 20)))
    arena.write_block_prefix(view, arena.BlockPrefix(TransferId(1, 2), nbytes, 1 << 20))
    for position, value in changes:
        view[position] = value
    try:
        prefix = arena.read_block_prefix(view)
    except WireError:
        return
    assert arena.block_prefix_bytes(prefix.nbytes, prefix.chunk_bytes) <= len(view)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 2**64 - 1)), max_size=600))
def test_last_delivered_keeps_the_newest_senders(events: list[tuple[int, int]]) -> None:
    view = memoryview(bytearray(arena.PAGE_BYTES))
    expected: dict[int, int] = {}
    for incarnation, sequence in events:
        arena.record_delivered(view, incarnation, sequence)
        if incarnation not in expected and len(expected) == arena.DELIVERED_ENTRIES:
            del expected[next(iter(expected))]
        expected[incarnation] = sequence
    assert arena.last_delivered(view) == expected
