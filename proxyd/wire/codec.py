"""Field-by-field binary codec for frame bodies.

A frame is a frozen dataclass whose fields name their encoding (``u64()``, ``text(255)``, ...). :func:`encode_body` and
:func:`decode_body` walk the fields in order; there is no tag per field, so the protocol version decides the layout.
Little-endian throughout: every machine that trains models is, and it saves a swap per field.

Decoding never trusts a length: each variable part has a limit that is checked before a byte is copied, and trailing
bytes are an error (they mean that the two sides disagree on the layout, which must not pass silently).

A small message between two trainers is six frames, each written and read once: what the codec takes is a good part of
its latency. So neighbouring fields of fixed size are packed and unpacked in one step (:func:`_run`); one by one they
are only looked at when something is wrong with them, to say what.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F")

Encoder = Callable[[Any], bytes]
Decoder = Callable[[memoryview, int], tuple[Any, int]]


class WireError(Exception):
    """The peer's bytes don't follow the protocol; the connection they came on can't be trusted any further."""


class DamagedFrame(WireError):
    """A checksum of the frame's own doesn't hold: bits were lost on the way, or whoever sends doesn't speak this
    protocol at all."""


@dataclasses.dataclass(frozen=True)
class _Codec:
    encode: Encoder
    decode: Decoder
    fmt: str = ""
    """Of a field of fixed size: its letter in :mod:`struct`."""


class _Step(NamedTuple):
    """How one or more neighbouring fields of a frame are written and read."""

    encode: Encoder
    """Of a whole frame: the bytes of these fields."""
    decode: Callable[[memoryview, int, list[Any]], int]
    """Appends their values; answers where the next field starts."""


def _fixed(fmt: str, low: int, high: int) -> _Codec:
    packer = struct.Struct("<" + fmt)

    def encode(value: Any) -> bytes:
        if not low <= value <= high:
            raise WireError(f"value {value} does not fit its field ({low} to {high})")
        return packer.pack(value)

    def decode(view: memoryview, at: int) -> tuple[int, int]:
        end = at + packer.size
        if end > len(view):
            raise WireError(
                f"frame body ends at byte {len(view)}, inside a {packer.size}-byte field that starts at {at}"
            )
        return packer.unpack_from(view, at)[0], end

    return _Codec(encode, decode, fmt)


_U8 = _fixed("B", 0, 2**8 - 1)
_U16 = _fixed("H", 0, 2**16 - 1)
_U32 = _fixed("I", 0, 2**32 - 1)
_U64 = _fixed("Q", 0, 2**64 - 1)
_I64 = _fixed("q", -(2**63), 2**63 - 1)
_LENGTH = struct.Struct("<H")
"""In front of each variable field."""


def _blob(limit_bytes: int) -> _Codec:
    def encode(value: Any) -> bytes:
        if len(value) > limit_bytes:
            raise WireError(f"field of {len(value)} bytes exceeds its limit of {limit_bytes}")
        return b"".join((_LENGTH.pack(len(value)), value))

    def decode(view: memoryview, at: int) -> tuple[bytes, int]:
        start, end = _extent(view, at, limit_bytes)
        return bytes(view[start:end]), end

    return _Codec(encode, decode)


def _extent(view: memoryview, at: int, limit_bytes: int) -> tuple[int, int]:
    """Where a variable field's bytes start and end; its length stands at ``at``."""
    start = at + _LENGTH.size
    length = _LENGTH.unpack_from(view, at)[0] if start <= len(view) else _U16.decode(view, at)[0]
    if length > limit_bytes or start + length > len(view):
        raise WireError(f"field claims {length} bytes; {min(limit_bytes, len(view) - start)} are allowed here")
    return start, start + length


def _text(limit_bytes: int, *, cut: bool = False) -> _Codec:
    raw = _blob(limit_bytes)

    def decode(view: memoryview, at: int) -> tuple[str, int]:
        start, end = _extent(view, at, limit_bytes)
        try:
            return str(view[start:end], "utf-8"), end
        except UnicodeDecodeError as error:
            raise WireError(f"text field is not UTF-8: {error.reason} at byte {error.start}") from error

    def encode(value: Any) -> bytes:
        if cut:
            return raw.encode(_shortened(value, limit_bytes))
        try:
            return raw.encode(value.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise WireError(f"text field can't be written as UTF-8: {error.reason}") from error

    return _Codec(encode, decode)


def _shortened(value: str, limit_bytes: int) -> bytes:
    encoded = value.encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded
    return encoded[:limit_bytes].decode("utf-8", "ignore").encode()


def _u64_list(limit: int) -> _Codec:
    def encode(value: Any) -> bytes:
        if len(value) > limit:
            raise WireError(f"list of {len(value)} entries exceeds its limit of {limit}")
        try:
            return struct.pack(f"<H{len(value)}Q", len(value), *value)
        except struct.error:
            return _U16.encode(len(value)) + b"".join(map(_U64.encode, value))  # says which one doesn't fit

    def decode(view: memoryview, at: int) -> tuple[tuple[int, ...], int]:
        count, at = _U16.decode(view, at)
        if count > limit or at + 8 * count > len(view):
            raise WireError(f"list claims {count} entries; at most {limit} and what the body holds are allowed")
        return struct.unpack_from(f"<{count}Q", view, at), at + 8 * count

    return _Codec(encode, decode)


def _flag_codec() -> _Codec:
    def decode(view: memoryview, at: int) -> tuple[bool, int]:
        value, end = _U8.decode(view, at)
        if value > 1:
            raise WireError(f"boolean field holds {value}")
        return bool(value), end

    return _Codec(lambda value: b"\x01" if value else b"\x00", decode, "?")


_FLAG = _flag_codec()


_KEY = "proxyd.wire"
_BYTES = "_wire_bytes"


def _field(codec: _Codec, default: Any) -> Any:
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata={_KEY: codec})
    return dataclasses.field(default=default, metadata={_KEY: codec})


def u8(default: Any = dataclasses.MISSING) -> Any:
    """Unsigned 8-bit field."""
    return _field(_U8, default)


def u16(default: Any = dataclasses.MISSING) -> Any:
    """Unsigned 16-bit field."""
    return _field(_U16, default)


def u32(default: Any = dataclasses.MISSING) -> Any:
    """Unsigned 32-bit field."""
    return _field(_U32, default)


def u64(default: Any = dataclasses.MISSING) -> Any:
    """Unsigned 64-bit field."""
    return _field(_U64, default)


def i64(default: Any = dataclasses.MISSING) -> Any:
    """Signed 64-bit field."""
    return _field(_I64, default)


def flag(default: Any = dataclasses.MISSING) -> Any:
    """Boolean field, one byte, 0 or 1."""
    return _field(_FLAG, default)


def text(limit_bytes: int, default: Any = dataclasses.MISSING) -> Any:
    """UTF-8 text of at most ``limit_bytes`` encoded bytes."""
    return _field(_text(limit_bytes), default)


def note(limit_bytes: int, default: Any = dataclasses.MISSING) -> Any:
    """Text for people: what is beyond ``limit_bytes`` is left out. Such texts quote what others said (a reason, a
    name), and no length or character of theirs may keep an error from being reported."""
    return _field(_text(limit_bytes, cut=True), default)


def blob(limit_bytes: int, default: Any = dataclasses.MISSING) -> Any:
    """Raw bytes, at most ``limit_bytes`` of them."""
    return _field(_blob(limit_bytes), default)


def u64_list(limit: int, default: Any = dataclasses.MISSING) -> Any:
    """Tuple of unsigned 64-bit integers, at most ``limit`` of them."""
    return _field(_u64_list(limit), default)


def nested(cls: type[Any]) -> Any:
    """Another frame dataclass, inlined. It keeps its bytes: what an agent reads it mostly writes on to somebody."""

    def encode(frame: Any) -> bytes:
        kept: bytes | None = frame.__dict__.get(_BYTES)
        if kept is None:
            kept = frame.__dict__[_BYTES] = _layout(cls).encode(frame)
        return kept

    def decode(view: memoryview, at: int) -> tuple[Any, int]:
        frame, end = _layout(cls).decode(view, at)
        frame.__dict__[_BYTES] = bytes(view[at:end])
        return frame, end

    return _field(_Codec(encode, decode), dataclasses.MISSING)


def _run(names: Sequence[str], codecs: Sequence[_Codec]) -> _Step:
    """Neighbouring fields of fixed size, in one step."""
    packer = struct.Struct("<" + "".join(codec.fmt for codec in codecs))
    pack, unpack_from, size = packer.pack, packer.unpack_from, packer.size
    flags = [struct.calcsize("<" + "".join(c.fmt for c in codecs[:i])) for i, c in enumerate(codecs) if c is _FLAG]
    fetch = attrgetter(*names)

    def encode(frame: Any) -> bytes:
        values = fetch(frame) if len(codecs) > 1 else (fetch(frame),)
        try:
            return pack(*values)
        except struct.error:
            return b"".join(codec.encode(value) for codec, value in zip(codecs, values, strict=True))

    def decode(view: memoryview, at: int, values: list[Any]) -> int:
        end = at + size
        if end > len(view) or (flags and any(view[at + flag] > 1 for flag in flags)):
            for codec in codecs:
                _, at = codec.decode(view, at)  # one of them says what is wrong
        values += unpack_from(view, at)
        return end

    return _Step(encode, decode)


def _single(name: str, codec: _Codec) -> _Step:
    """One field of variable size."""
    encode_value, decode_value = codec.encode, codec.decode
    fetch = attrgetter(name)

    def encode(frame: Any) -> bytes:
        return encode_value(fetch(frame))

    def decode(view: memoryview, at: int, values: list[Any]) -> int:
        value, at = decode_value(view, at)
        values.append(value)
        return at

    return _Step(encode, decode)


class _Layout(NamedTuple):
    """How a frame is written and read."""

    encode: Encoder
    decode: Callable[[memoryview, int], tuple[Any, int]]


_LAYOUTS: dict[type[Any], _Layout] = {}


def _layout(cls: type[Any]) -> _Layout:
    found = _LAYOUTS.get(cls)
    return _LAYOUTS.setdefault(cls, _new_layout(cls)) if found is None else found


def _new_layout(cls: type[Any]) -> _Layout:
    steps: list[_Step] = []
    named = [(f.name, f.metadata[_KEY]) for f in dataclasses.fields(cls)]
    for fixed, group in groupby(named, key=lambda item: bool(item[1].fmt)):
        fields = list(group)
        if fixed:
            steps.append(_run(*zip(*fields, strict=True)))
        else:
            steps += [_single(name, codec) for name, codec in fields]
    encoders = [step.encode for step in steps]
    decoders = [step.decode for step in steps]

    def encode(frame: Any) -> bytes:
        return b"".join([part(frame) for part in encoders])

    def decode(view: memoryview, at: int) -> tuple[Any, int]:
        values: list[Any] = []
        for part in decoders:
            at = part(view, at, values)
        return cls(*values), at

    return _Layout(encoders[0] if len(encoders) == 1 else encode, decode)


def encode_body(frame: object) -> bytes:
    """Encode ``frame``'s fields in order. Raises WireError for a value beyond its field's limit."""
    return _layout(type(frame)).encode(frame)


def decode_body(cls: type[F], body: bytes | bytearray | memoryview) -> F:
    """Decode ``body`` as one ``cls``. Raises WireError for anything short, long or out of range."""
    view = memoryview(body)
    frame: F
    frame, end = _layout(cls).decode(view, 0)
    if end != len(view):
        raise WireError(f"{cls.__name__}: {len(view) - end} bytes after the last field; do both sides run one version?")
    return frame
