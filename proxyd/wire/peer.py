"""Frames between two agents.

For each direction A -> B, A dials B: one *control* connection and N *data* connections. Control frames of both sides
travel on the control connection (OFFER, FORETELL, EXPECT, CANCEL from A; CREDIT, ACK, NACK, FAIL from B), so they never
queue behind bulk data; DATA frames travel on the data connections only.

Set-up of each connection: B ``CHALLENGE`` -> A ``HELLO`` -> B ``WELCOME`` | ``REFUSED``.

A transfer::

    A                                             B
    OFFER (eager: within the advertised budget) -> allocate a block, tell the receiving client
                                    <- CREDIT      (only when the offer was not eager, or was turned down: RETRY_LATER)
    (announced before: FORETELL)
    (grant) EXPECT, DATA, DATA ...  ------------>  into the receiver's arena at its offset; verify; client hears LANDED
                                    <- NACK        (a chunk failed its checksum: send it again)
                                    <- ACK         (all there: whole, verified, told to the client) => done

OFFERs go out in the order in which the client posted; B keeps that order towards the receiving client. A DATA frame for
a transfer that B doesn't know (turned down, cancelled) is read and thrown away: a connection never loses step.

After a break A dials again and says what it still has to deliver, in order; B answers each, and only what B lacks is
sent (:mod:`proxyd.core.transfer` has the rules)::

    OFFER (again = 1) ------------------------->   known: <- HELD (ranges that are in place) | ACK (whole, maybe long
    OFFER (again = 1) ------------------------->   ago) | FAIL (ended otherwise) | nothing (no memory yet: CREDIT comes)
    CANCEL of what was given up meanwhile ------>  unknown (B was restarted): as a new one; CREDIT once it has memory
    OFFERED_ALL ------------------------------->   what else B has of this life of A will not come

Every frame starts with a 48-byte header that carries its own CRC-32; the payload or body has a checksum of its own
(algorithm byte), so a flipped bit anywhere is noticed before a length is believed.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import zlib
from typing import Any, NamedTuple, TypeAlias, get_args

from proxyd.wire.auth import MAC_BYTES, NONCE_BYTES
from proxyd.wire.codec import (
    DamagedFrame,
    WireError,
    blob,
    decode_body,
    encode_body,
    flag,
    i64,
    nested,
    note,
    text,
    u8,
    u16,
    u32,
    u64,
    u64_list,
)
from proxyd.wire.envelope import MAX_GROUP_BYTES, MAX_JOB_BYTES, MAX_TRANSFER_BYTES, Envelope, TransferId

PROTOCOL_VERSION = 2
MAGIC = 0x7850  # "Px"
_FIELDS = struct.Struct(
    "<HBBHBxIQQQQ"
)  # magic, version, type, flags, checksum algorithm, length, id (2 x u64), offset, checksum
HEADER_BYTES = _FIELDS.size + 4  # and the CRC-32 of the fields
MAX_BODY_BYTES = 16 << 10
MIN_CHUNK_BYTES = 64 << 10
MAX_CHUNK_BYTES = 4 << 20
MAX_HELD_RANGES = 500
"""Ranges that one HELD tells. Chunks arrive nearly in order, so there are about as many ranges as streams."""


class ChecksumAlgorithm(enum.IntEnum):
    """How ``Header.checksum`` was computed."""

    NONE = 0
    CRC32 = 1
    """zlib's; control frames, whose bodies are tiny."""
    XXH3_64 = 2
    """DATA: 50 GB/s, and the extension releases the GIL."""


class StreamPurpose(enum.IntEnum):
    """What a connection carries."""

    CONTROL = 1
    DATA = 2


class Header(NamedTuple):
    """A frame's fixed part. ``length`` counts the payload (DATA) or body bytes behind it."""

    type: int
    flags: int
    checksum_algorithm: int
    length: int
    transfer: TransferId
    offset: int
    checksum: int


DATA_TYPE = 16
PADDING_TYPE = 18
"""On a data connection: bytes that the receiver throws away. They warm the connection up."""
DATA_TYPES = (DATA_TYPE, PADDING_TYPE)
NO_TRANSFER = TransferId(0, 0)


def encode_header(header: Header) -> bytes:
    """48 bytes, the last four the CRC-32 of the first 44."""
    fields = _FIELDS.pack(
        MAGIC,
        PROTOCOL_VERSION,
        header.type,
        header.flags,
        header.checksum_algorithm,
        header.length,
        header.transfer.incarnation,
        header.transfer.sequence,
        header.offset,
        header.checksum,
    )
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def encode_data_header(transfer: TransferId, offset: int, length: int, checksum: int) -> bytes:
    """Header of one chunk; ``checksum`` is the payload's xxh3_64."""
    return encode_header(Header(DATA_TYPE, 0, ChecksumAlgorithm.XXH3_64, length, transfer, offset, checksum))


def encode_padding_header(length: int) -> bytes:
    """Header of a chunk that means nothing."""
    return encode_header(Header(PADDING_TYPE, 0, ChecksumAlgorithm.NONE, length, NO_TRANSFER, 0, 0))


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Check and split 48 bytes. Raises WireError: after it the connection's framing is lost for good."""
    view = memoryview(data)
    if len(view) != HEADER_BYTES:
        raise WireError(f"a header has {HEADER_BYTES} bytes, not {len(view)}")
    if zlib.crc32(view[: _FIELDS.size]) != int.from_bytes(view[_FIELDS.size :], "little"):
        raise DamagedFrame("frame header fails its CRC: not a proxyd peer, or corrupted on the way")
    magic, version, kind, flags, algorithm, length, incarnation, sequence, offset, checksum = _FIELDS.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"frame magic is {magic:#06x}, not {MAGIC:#06x}: not a proxyd peer")
    if version != PROTOCOL_VERSION:
        raise WireError(f"peer speaks protocol version {version}, this agent {PROTOCOL_VERSION}: upgrade the older one")
    if kind in DATA_TYPES:
        if not 0 < length <= MAX_CHUNK_BYTES or offset > MAX_TRANSFER_BYTES:
            raise WireError(f"chunk of {length} bytes at offset {offset} is outside the limits")
        if algorithm not in (ChecksumAlgorithm.NONE, ChecksumAlgorithm.XXH3_64):
            raise WireError(f"chunk checksum algorithm {algorithm} is unknown")
    elif kind not in FRAMES:
        raise WireError(f"frame type {kind} is unknown to protocol version {PROTOCOL_VERSION}")
    elif length > MAX_BODY_BYTES:
        raise WireError(f"control frame claims a body of {length} bytes; the limit is {MAX_BODY_BYTES}")
    return Header(kind, flags, algorithm, length, TransferId(incarnation, sequence), offset, checksum)


@dataclasses.dataclass(frozen=True)
class Challenge:
    """Acceptor's first frame."""

    TYPE = 1
    version: int = u16()
    nonce: bytes = blob(NONCE_BYTES)


@dataclasses.dataclass(frozen=True)
class Hello:
    """Dialler's first frame. ``to_site``/``to_name``: whom it means to reach, so that a wrong address is noticed."""

    TYPE = 2
    version: int = u16()
    purpose: int = u8()
    stream: int = u16()
    site: str = text(255)
    name: str = text(255)
    incarnation: int = u64()
    to_site: str = text(255)
    to_name: str = text(255)
    nonce: bytes = blob(NONCE_BYTES)
    mac: bytes = blob(MAC_BYTES)


@dataclasses.dataclass(frozen=True)
class Welcome:
    """The connection stands. ``eager_bytes``: budget for offers without credit, per pair of endpoints."""

    TYPE = 3
    incarnation: int = u64()
    eager_bytes: int = u64()
    max_chunk_bytes: int = u32()
    mac: bytes = blob(MAC_BYTES)


@dataclasses.dataclass(frozen=True)
class Refused:
    """The connection doesn't stand."""

    TYPE = 4
    code: int = u16()
    message: str = note(2048)


@dataclasses.dataclass(frozen=True)
class Offer:
    """A message is coming. ``eager``: the sender counted it against its budget and will not wait for CREDIT.

    ``dst_incarnation``: the life of the receiver that the sender means (0: any); a later life must not get an earlier
    life's messages. ``again``: it may have been offered before, over a connection that broke or by an earlier life of
    this agent; nothing of it is sent before the receiver has answered.
    """

    TYPE = 5
    envelope: Envelope = nested(Envelope)
    dst_incarnation: int = u64()
    chunk_bytes: int = u32()
    eager: bool = flag()
    again: bool = flag(False)


@dataclasses.dataclass(frozen=True)
class Credit:
    """The receiver holds memory for it: ask for a grant and send."""

    TYPE = 6


@dataclasses.dataclass(frozen=True)
class TurnedDown:
    """An eager offer found no memory: its data is thrown away; keep it whole and wait for CREDIT."""

    TYPE = 7
    message: str = note(1024)


@dataclasses.dataclass(frozen=True)
class Ack:
    """Whole, verified, told to the receiving client. ``arrival_span_ns``: last minus first chunk's arrival."""

    TYPE = 8
    nbytes: int = u64()
    arrival_span_ns: int = u64()


@dataclasses.dataclass(frozen=True)
class Nack:
    """The chunk at ``offset`` failed its checksum: send it again."""

    TYPE = 9
    offset: int = u64()
    length: int = u32()


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Sender gives up; the receiver tells its client and frees the block."""

    TYPE = 10
    code: int = u16()
    message: str = note(4096)


@dataclasses.dataclass(frozen=True)
class Fail:
    """Receiver gives up (its client is gone, the envelope is refused); the sender tells its client."""

    TYPE = 11
    code: int = u16()
    message: str = note(4096)
    bytes_done: int = u64()


@dataclasses.dataclass(frozen=True)
class Expect:
    """Prediction, sent when its place is known, at the first grant and on change: all of it will be there
    ``finish_in_ns`` after this frame."""

    TYPE = 12
    nbytes: int = u64()
    finish_in_ns: int = u64()
    uncertainty_ns: int = u64()


@dataclasses.dataclass(frozen=True)
class Foretell:
    """Prediction of a message that was announced and has not been posted: there is no transfer yet that could be named.

    ``number`` names the announcement among those of the sending agent. ``finish_in_ns`` counts from this frame; 0:
    it was withdrawn.
    """

    TYPE = 21
    number: int = u64()
    job: str = text(MAX_JOB_BYTES)
    src_rank: int = u32()
    dst_rank: int = u32()
    group: str = text(MAX_GROUP_BYTES)
    tag: int = i64()
    nbytes: int = u64()
    finish_in_ns: int = u64()
    uncertainty_ns: int = u64()


@dataclasses.dataclass(frozen=True)
class Ping:
    """Answered by Pong at once: liveness of an idle control connection, and, while data is under way, the delays of
    both directions. ``left_ns``: when it left, on its sender's clock."""

    TYPE = 13
    left_ns: int = u64()


@dataclasses.dataclass(frozen=True)
class Pong:
    """Answer to Ping, whose ``left_ns`` it repeats. ``arrived_ns``, ``answered_ns``: when the Ping
    arrived and when this left, on this side's clock."""

    TYPE = 14
    left_ns: int = u64()
    arrived_ns: int = u64()
    answered_ns: int = u64()


@dataclasses.dataclass(frozen=True)
class EagerReturned:
    """``nbytes`` of the budget of this endpoint pair are free again (a block was released)."""

    TYPE = 15
    job: str = text(MAX_JOB_BYTES)
    src_rank: int = u32()
    dst_rank: int = u32()
    nbytes: int = u64()


@dataclasses.dataclass(frozen=True)
class Held:
    """Answer to an offer that is made again: the receiver holds memory for it, and these bytes of it, verified.

    ``ranges``: offset and length in turns, ascending. There may be more than are told: what isn't told is sent again,
    and thrown away. ``chunk_bytes``: of the map that the receiver keeps; the sender goes on with it.
    """

    TYPE = 19
    chunk_bytes: int = u32()
    ranges: tuple[int, ...] = u64_list(2 * MAX_HELD_RANGES)


@dataclasses.dataclass(frozen=True)
class OfferedAll:
    """Everything that was under way before the connection broke has been offered again."""

    TYPE = 20


@dataclasses.dataclass(frozen=True)
class Bye:
    """Orderly end of the connection."""

    TYPE = 17
    message: str = note(1024)


Frame: TypeAlias = (
    Challenge
    | Hello
    | Welcome
    | Refused
    | Offer
    | Credit
    | TurnedDown
    | Ack
    | Nack
    | Cancel
    | Fail
    | Expect
    | Foretell
    | Ping
    | Pong
    | EagerReturned
    | Held
    | OfferedAll
    | Bye
)

FRAMES: dict[int, type[Any]] = {cls.TYPE: cls for cls in get_args(Frame)}


def encode(frame: Frame, transfer: TransferId = NO_TRANSFER) -> bytes:
    """One control frame: header and body."""
    body = encode_body(frame)
    if len(body) > MAX_BODY_BYTES:
        raise WireError(f"{type(frame).__name__} has a body of {len(body)} bytes; the limit is {MAX_BODY_BYTES}")
    header = Header(frame.TYPE, 0, ChecksumAlgorithm.CRC32, len(body), transfer, 0, zlib.crc32(body))
    return encode_header(header) + body


def decode_control(header: Header, body: bytes | bytearray | memoryview) -> Frame:
    """Body of a control frame. Raises WireError when its checksum or its fields are wrong."""
    if header.checksum_algorithm != ChecksumAlgorithm.CRC32 or zlib.crc32(body) != header.checksum:
        raise DamagedFrame("control frame fails its checksum: corrupted on the way")
    frame: Frame = decode_body(FRAMES[header.type], body)
    return frame


class ControlDecoder:
    """Incremental decoder of a control connection (no DATA): feed bytes, take ``(transfer, frame)``."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append received bytes."""
        self._buffer += data

    def next_frame(self) -> tuple[TransferId, Frame] | None:
        """Next whole frame, or None. Raises WireError, also for a DATA frame: it has no business here."""
        if len(self._buffer) < HEADER_BYTES:
            return None
        header = decode_header(self._buffer[:HEADER_BYTES])
        if header.type in DATA_TYPES:
            raise WireError("DATA frame on a control connection")
        end = HEADER_BYTES + header.length
        if len(self._buffer) < end:
            return None
        frame = decode_control(header, self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return header.transfer, frame
