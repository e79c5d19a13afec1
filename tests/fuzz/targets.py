"""Each parser as a function of bytes: it gives a result or raises the parser's own error. Anything else is a defect.

What a parser accepts is written again and read again where that is possible: the second reading must say the same.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import socket
import tempfile
import zlib
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from proxyd.agent import handshake
from proxyd.core import policy, trace_files, units
from proxyd.core.errors import ConfigError, ProxydError
from proxyd.core.ids import AgentName, LinkName
from proxyd.runtime import addresses, config, grant_log, replay, snapshot, translate, translate_admin
from proxyd.v1 import admin_pb2
from proxyd.v1 import coordination_pb2 as pb
from proxyd.wire import arena, client, peer
from proxyd.wire.codec import WireError, decode_body, encode_body
from proxyd.wire.envelope import Envelope, TransferId

Target = Callable[[bytes], object]
ME = handshake.Identity(AgentName("a", "0"), 7, b"")
THERE = AgentName("b", "0")
_PAGE = arena.PAGE_BYTES


def wire_client(data: bytes) -> object:
    """A trainer's byte stream, in two pieces; from a Unix socket and from TCP."""
    for allow_payload in (False, True):
        decoder = client.Decoder(allow_payload=allow_payload)
        pieces = (data[: len(data) // 3], data[len(data) // 3 :])
        try:
            for piece in pieces:
                decoder.feed(piece)
                while (found := decoder.next_frame()) is not None:
                    frame, payload_bytes = found
                    again = client.encode(frame, payload_bytes)
                    assert decode_body(type(frame), again[client.HEADER_BYTES :]) == frame
                    while decoder.take_payload(100):
                        pass
                    if decoder.payload_left_bytes:
                        break
        except WireError:
            pass
        assert len(decoder._buffer) <= len(data)
    return None


def wire_peer(data: bytes) -> object:
    """A peer's control connection. The first byte says whether checksums are put right, so that what is behind them is
    reached too."""
    if data[:1] >= b"\x80":
        data = _with_checksums(data[1:])
    decoder = peer.ControlDecoder()
    try:
        for piece in (data[:50], data[50:]):
            decoder.feed(piece)
            while (found := decoder.next_frame()) is not None:
                transfer, frame = found
                again = peer.ControlDecoder()
                again.feed(peer.encode(frame, transfer))
                assert again.next_frame() == (transfer, frame)
    except WireError:
        return None
    return decoder


def wire_chunk_header(data: bytes) -> object:
    """A header on a data connection."""
    data = data[: peer.HEADER_BYTES]
    if data[:1] >= b"\x80":
        body = data[1:].ljust(peer.HEADER_BYTES - 4, b"\0")[: peer.HEADER_BYTES - 4]
        data = body + zlib.crc32(body).to_bytes(4, "little")
    try:
        header = peer.decode_header(data)
    except WireError:
        return None
    assert header.length <= max(peer.MAX_CHUNK_BYTES, peer.MAX_BODY_BYTES)
    assert peer.decode_header(peer.encode_header(header)) == header
    return header


def _with_checksums(data: bytes) -> bytes:
    """As one frame, with both checksums right."""
    fields = bytearray(data[: peer.HEADER_BYTES - 4].ljust(peer.HEADER_BYTES - 4, b"\0"))
    body = data[peer.HEADER_BYTES - 4 :]
    fields[0:3] = peer.encode_header(peer.Header(1, 0, 0, 0, TransferId(0, 0), 0, 0))[0:3]
    at = peer._FIELDS.size
    header = peer._FIELDS.unpack(fields[:at])
    whole = peer._FIELDS.pack(
        *header[:3], header[3], peer.ChecksumAlgorithm.CRC32, len(body), *header[6:9], zlib.crc32(body)
    )
    return whole + zlib.crc32(whole).to_bytes(4, "little") + body


_BODIES: list[type[Any]] = [*peer.FRAMES.values(), *client.FRAMES.values(), Envelope]


def wire_codec(data: bytes) -> object:
    """The body of any frame, chosen by the first byte."""
    cls = _BODIES[(data[0] if data else 0) % len(_BODIES)]
    try:
        frame = decode_body(cls, data[1:])
    except WireError:
        return None
    assert encode_body(frame) == data[1:]
    return frame


def wire_envelope(data: bytes) -> object:
    """What a message says of itself, and its words for people."""
    try:
        envelope = decode_body(Envelope, data)
    except WireError:
        return None
    assert envelope.describe()
    return envelope


def wire_arena(data: bytes) -> object:
    """Shared memory that a client has written to as it liked."""
    page = bytearray(data[:_PAGE].ljust(_PAGE, b"\0"))
    view = memoryview(page)
    try:
        arena.read_header(view, int.from_bytes(data[24:32], "little"))
    except WireError:
        pass
    assert len(arena.last_delivered(view)) <= arena.DELIVERED_ENTRIES
    arena.record_delivered(view, 5, 6)
    assert arena.last_delivered(view)[5] == 6
    try:
        prefix = arena.read_block_prefix(view)
    except WireError:
        return None
    for index in range(arena.chunk_count(prefix.nbytes, prefix.chunk_bytes)):
        arena.chunk_is_marked(view, index)
    return prefix


_loop: asyncio.AbstractEventLoop | None = None


def agent_handshake(data: bytes) -> object:
    """What a stranger says to the data port, or what answers where we dial (by the first byte)."""
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
    sent = _with_checksums(data[2:]) if data[1:2] >= b"\x80" else data[2:]
    return _loop.run_until_complete(_handshake(data[:1] >= b"\x80", sent))


async def _handshake(dials: bool, sent: bytes) -> object:
    ours, theirs = socket.socketpair()
    try:
        ours.setblocking(False)
        theirs.sendall(sent[:65536])
        theirs.shutdown(socket.SHUT_WR)
        if dials:
            return await handshake.dial(ours, ME, THERE, peer.StreamPurpose.DATA, 1)
        return await handshake.receive_hello(ours, ME)
    except (handshake.HandshakeError, WireError, OSError):
        return None
    finally:
        ours.close()
        theirs.close()


def config_toml(data: bytes) -> object:
    """A configuration file. Only text can be one (the reading of a file says so before)."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    try:
        found = config.parse_config(text, "fuzz.toml")
    except ConfigError as error:
        assert str(error)
        return None
    return found.policy


_WORDS: tuple[Callable[[str], object], ...] = (
    policy.parse_window,
    LinkName.parse,
    AgentName.parse,
    TransferId.parse,
    units.parse_rate,
    units.parse_size,
    units.parse_duration,
    addresses.parse_address,
)


def policy_words(data: bytes) -> object:
    """The small languages of policies and options: windows, names, rates, sizes, durations, addresses."""
    text = data[1:200].decode("utf-8", "replace")
    parse = _WORDS[(data[0] if data else 0) % len(_WORDS)]
    try:
        return parse(text)
    except (ProxydError, ValueError):
        return None


def trace_file(data: bytes) -> object:
    """A mahimahi-style file, or a series of rates."""
    try:
        trace = trace_files.parse_trace(data.decode("utf-8", "replace"), "fuzz").trace
    except ConfigError:
        return None
    assert trace.bytes_by(10**9) >= 0
    return trace


def grant_log_file(data: bytes) -> object:
    """A grant log, read and played again."""
    with tempfile.NamedTemporaryFile(dir=_scratch()) as file:
        file.write(data)
        file.flush()
        try:
            return replay.replay(grant_log.open_log(pathlib.Path(file.name)))
        except grant_log.GrantLogError:
            return None


def _scratch() -> str | None:
    return "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None


def snapshot_json(data: bytes) -> object:
    """A machine's state as JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    try:
        return snapshot.make(value)
    except snapshot.SnapshotError:
        return None


def grpc_messages(data: bytes) -> object:
    """What an agent says to a coordinator, the other way round, and to the Admin service (by the first byte)."""
    kind, body = (data[0] if data else 0) % 6, data[1:]
    try:
        if kind < 2:
            batch = pb.AgentBatch.FromString(body)
            if kind == 0:
                return translate.read_hello(batch)
            messages = translate.agent_messages(batch)
            assert translate.agent_messages(translate.agent_batch(messages)) == messages
            return messages
        if kind == 2:
            return translate.read_welcome(pb.CoordinatorBatch.FromString(body))
        if kind == 3:
            told = translate.coordinator_messages(pb.CoordinatorBatch.FromString(body))
            assert translate.coordinator_messages(translate.coordinator_batch(told)) == told
            return told
        if kind == 4:
            return translate_admin.wanted_links(admin_pb2.LinksRequest.FromString(body))
        return translate_admin.wanted_transfer(admin_pb2.WhyRequest.FromString(body))
    except (DecodeError, translate.TranslateError, ProxydError):
        return None


TARGETS: dict[str, Target] = {
    one.__name__: one
    for one in (
        wire_client,
        wire_peer,
        wire_chunk_header,
        wire_codec,
        wire_envelope,
        wire_arena,
        agent_handshake,
        config_toml,
        policy_words,
        trace_file,
        grant_log_file,
        snapshot_json,
        grpc_messages,
    )
}
"""By name."""
GROUPS: dict[str, tuple[str, ...]] = {
    "wire": ("wire_client", "wire_peer", "wire_chunk_header", "wire_codec", "wire_envelope", "wire_arena"),
    "text": ("config_toml", "policy_words", "trace_file"),
    "files": ("grant_log_file", "snapshot_json"),
    "network": ("agent_handshake", "grpc_messages"),
}
"""Fuzzed in one process each, which takes seconds to start; an input's first byte says for which it is."""


def grouped(group: str) -> Target:
    """All of a group as one."""
    names = GROUPS[group]

    def run(data: bytes) -> object:
        name = names[(data[0] if data else 0) % len(names)]
        try:
            return TARGETS[name](data[1:])
        except Exception as error:
            error.add_note(f"{name} of {data[1:]!r}")
            raise

    return run
