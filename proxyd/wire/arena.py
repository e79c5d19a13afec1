"""Layout of the shared memory that a trainer and its agent both map.

An arena is a memfd, created by the agent and sealed against shrinking and growing before it is passed on (an unsealed
one lets a client kill the agent with SIGBUS by truncating it)::

    0      header page (4 KiB): magic, version, kind, size, incarnations; last delivered sequence per sender
    4096   blocks

A block of a RECEIVE arena starts with a prefix (a multiple of 4 KiB) that names its transfer and holds its
received-chunk map, so that a trainer whose agent died can tell what is whole; the payload follows, page-aligned.
Offsets that cross the wire always point at the *payload*. Blocks of a SEND arena have no prefix.

Both sides can write here, so whatever is read back is a hint that gets checked: :func:`read_header` and
:func:`read_block_prefix` validate every field, and nothing read from an arena is ever used as a length by itself.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from proxyd.wire.codec import WireError
from proxyd.wire.envelope import TransferId

PAGE_BYTES = 4096
MAGIC = b"PROXYDA1"
VERSION = 1
_HEADER = struct.Struct(
    "<8sIIIIQQQ"
)  # magic, version, kind, arena, delivered entries used, size, endpoint and agent incarnation
_DELIVERED_AT = 1024
_DELIVERED = struct.Struct("<QQ")
DELIVERED_ENTRIES = (PAGE_BYTES - _DELIVERED_AT) // _DELIVERED.size

_BLOCK_MAGIC = 0x4B4C4250  # "PBLK"
_BLOCK = struct.Struct("<IIQQQII")  # magic, reserved, transfer (2 x u64), bytes, chunk bytes, chunk count


class ArenaHeader(NamedTuple):
    """What the first page says."""

    kind: int
    arena: int
    size_bytes: int
    endpoint_incarnation: int
    agent_incarnation: int


class BlockPrefix(NamedTuple):
    """What a receive block says of itself."""

    transfer: TransferId
    nbytes: int
    chunk_bytes: int


def page_round_up(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """Chunks of a message."""
    return -(-nbytes // chunk_bytes)


def block_prefix_bytes(nbytes: int, chunk_bytes: int) -> int:
    """Size of a receive block's prefix: header and one bit per chunk, whole pages."""
    return page_round_up(_BLOCK.size + -(-chunk_count(nbytes, chunk_bytes) // 8))


def write_header(view: memoryview, header: ArenaHeader) -> None:
    """Fill the first page of a new arena."""
    _HEADER.pack_into(
        view,
        0,
        MAGIC,
        VERSION,
        header.kind,
        header.arena,
        0,
        header.size_bytes,
        header.endpoint_incarnation,
        header.agent_incarnation,
    )


def read_header(view: memoryview, mapped_bytes: int) -> ArenaHeader:
    """Validate the first page. Raises WireError when it isn't an arena of ``mapped_bytes``."""
    magic, version, kind, arena, _, size_bytes, endpoint, agent = _HEADER.unpack_from(view, 0)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"not a version {VERSION} arena (magic {magic!r}, version {version})")
    if size_bytes != mapped_bytes:
        raise WireError(f"arena header claims {size_bytes} bytes, {mapped_bytes} are mapped")
    return ArenaHeader(kind, arena, size_bytes, endpoint, agent)


def record_delivered(view: memoryview, incarnation: int, sequence: int) -> None:
    """Note that ``sequence`` of sender ``incarnation`` was delivered.

    The oldest sender makes room when the table is full.
    """
    used = min(int.from_bytes(view[20:24], "little"), DELIVERED_ENTRIES)
    for index in range(used):
        at = _DELIVERED_AT + index * _DELIVERED.size
        if _DELIVERED.unpack_from(view, at)[0] == incarnation:
            _DELIVERED.pack_into(view, at, incarnation, sequence)
            return
    if used == DELIVERED_ENTRIES:
        end = _DELIVERED_AT + used * _DELIVERED.size
        view[_DELIVERED_AT : end - _DELIVERED.size] = bytes(view[_DELIVERED_AT + _DELIVERED.size : end])
        used -= 1
    _DELIVERED.pack_into(view, _DELIVERED_AT + used * _DELIVERED.size, incarnation, sequence)
    view[20:24] = (used + 1).to_bytes(4, "little")


def last_delivered(view: memoryview) -> dict[int, int]:
    """Sender incarnation -> last delivered sequence."""
    used = min(int.from_bytes(view[20:24], "little"), DELIVERED_ENTRIES)
    return dict(_DELIVERED.unpack_from(view, _DELIVERED_AT + i * _DELIVERED.size) for i in range(used))


def write_block_prefix(view: memoryview, prefix: BlockPrefix) -> None:
    """Start a block: name it and clear its map. ``view`` is the prefix's pages."""
    view[:] = bytes(len(view))
    _BLOCK.pack_into(
        view,
        0,
        _BLOCK_MAGIC,
        0,
        *prefix.transfer,
        prefix.nbytes,
        prefix.chunk_bytes,
        chunk_count(prefix.nbytes, prefix.chunk_bytes),
    )


def read_block_prefix(view: memoryview) -> BlockPrefix:
    """Validate a block's prefix. Raises WireError when it isn't one, or its map doesn't fit ``view``."""
    magic, _, incarnation, sequence, nbytes, chunk_bytes, count = _BLOCK.unpack_from(view, 0)
    if magic != _BLOCK_MAGIC or chunk_bytes == 0 or count != chunk_count(nbytes, chunk_bytes):
        raise WireError("no receive block starts here, or its prefix was overwritten")
    if block_prefix_bytes(nbytes, chunk_bytes) > len(view):
        raise WireError(f"block of {nbytes} bytes needs a prefix larger than {len(view)} bytes")
    return BlockPrefix(TransferId(incarnation, sequence), nbytes, chunk_bytes)


def mark_chunk(view: memoryview, index: int) -> None:
    """Set the bit of a verified chunk in a block's prefix."""
    view[_BLOCK.size + index // 8] |= 1 << (index % 8)


def chunk_is_marked(view: memoryview, index: int) -> bool:
    """Whether a chunk's bit is set."""
    return bool(view[_BLOCK.size + index // 8] & (1 << (index % 8)))
