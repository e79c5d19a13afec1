"""Shared memory at the trainer's side: where send blocks lie, and the mappings of arenas.

:class:`BlockAllocator` is pure: first fit over free ranges sorted by address, which coalesce when they meet. First fit
keeps reusing the lowest addresses, and that is the point: the first touch of a memfd page costs about 1 ns per byte,
six times a warm one.

A mapping is never closed by hand: views of messages may outlive the endpoint, and unmapping under a view crashes the
process. Each view holds the mapping; the last one to die unmaps it. A session lets go of its mappings when it ends, and
nothing that holds one is part of a reference cycle: an arena is too large to wait for the garbage collector.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from proxyd.wire.arena import (
    PAGE_BYTES,
    block_prefix_bytes,
    chunk_count,
    chunk_is_marked,
    page_round_up,
    read_block_prefix,
    read_header,
)
from proxyd.wire.client import ArenaKind
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import TransferId
from proxyd_client.buffers import Bytes, view_of

_MADV_POPULATE_WRITE = 23
_PREFAULT_STEP_BYTES = 8 << 20
LARGE_BYTES = 64 << 20
"""Messages above it are taken out of the resident set piece by piece, as they are copied."""
PREFAULT_LIMIT_BYTES = 64 << 20
"""How much of the first send arena is touched ahead: what a burst needs, not what a long run might."""


class BlockAllocator:
    """Hands out page-aligned ranges of ``[start, end)``. Not thread-safe."""

    def __init__(self, start: int, end: int) -> None:
        if start % PAGE_BYTES or end < start:
            raise ValueError(f"range {start}..{end} must start at a page and not end before it")
        end -= end % PAGE_BYTES
        self._starts: list[int] = [start] if end > start else []
        self._ends: list[int] = [end] if end > start else []
        self._used: dict[int, int] = {}
        self.capacity_bytes = max(0, end - start)

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out, in however many pieces."""
        return sum(self._ends) - sum(self._starts)

    @property
    def used_bytes(self) -> int:
        """Bytes handed out, rounded up to pages."""
        return sum(self._used.values())

    def allocate(self, nbytes: int) -> int | None:
        """Lowest offset with room for ``nbytes`` (> 0), or None."""
        if nbytes <= 0:
            raise ValueError(f"a block of {nbytes} bytes can't be allocated")
        size = page_round_up(nbytes)
        for index, start in enumerate(self._starts):
            if self._ends[index] - start < size:
                continue
            if self._ends[index] - start == size:
                del self._starts[index], self._ends[index]
            else:
                self._starts[index] = start + size
            self._used[start] = size
            return start
        return None

    def free(self, offset: int) -> None:
        """Give a block back. Raises ValueError for an offset that isn't handed out."""
        size = self._used.pop(offset, None)
        if size is None:
            raise ValueError(f"no block is handed out at offset {offset}")
        end = offset + size
        index = bisect.bisect_left(self._starts, offset)
        joins_next = index < len(self._starts) and self._starts[index] == end
        joins_previous = index > 0 and self._ends[index - 1] == offset
        if joins_previous and joins_next:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_previous:
            self._ends[index - 1] = end
        elif joins_next:
            self._starts[index] = offset
        else:
            self._starts.insert(index, offset)
            self._ends.insert(index, end)


class Mapping:
    """One mapped arena."""

    def __init__(self, fd: int, arena: int, kind: ArenaKind, size_bytes: int) -> None:
        """Map ``fd`` (and leave it open). Raises WireError when it isn't what the agent says it is."""
        actual_bytes = os.fstat(fd).st_size
        if size_bytes < PAGE_BYTES or actual_bytes < size_bytes:
            raise WireError(f"arena {arena} of {size_bytes} bytes is backed by {actual_bytes}")
        self.arena = arena
        self.kind = kind
        self.size_bytes = size_bytes
        # What the trainer only reads is mapped so: a stray write through a view must not reach the agent's memory.
        writable = kind is ArenaKind.SEND
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._area = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection)
        self.bytes: Bytes = np.frombuffer(self._area, np.uint8)
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)
        header = read_header(view_of(self.bytes), size_bytes)
        # A PEER arena is another client's SEND arena, and says so.
        if header.kind not in (kind, ArenaKind.SEND if kind is ArenaKind.PEER else kind):
            raise WireError(f"arena {arena} was granted as {kind.name} but its header says kind {header.kind}")

    def block(self, offset: int, nbytes: int) -> Bytes:
        """A new array over one block: an object of its own, whose death tells that the last view is gone.

        Raises WireError when the block lies outside the arena.
        """
        if offset < PAGE_BYTES or nbytes < 0 or offset + nbytes > self.size_bytes:
            raise WireError(f"block {offset}+{nbytes} lies outside arena {self.arena} of {self.size_bytes} bytes")
        return self.bytes[offset : offset + nbytes]

    def private_block(self, offset: int, nbytes: int) -> Bytes:
        """A block in a mapping of its own, copy on write: what is written to it nobody else sees.

        Its pages are shared until they are written to, so nothing is copied ahead. The mapping goes with its last view,
        and the written pages with it: the block's next message isn't touched. Raises OSError when it can't be mapped.
        """
        self.block(offset, nbytes)  # validates
        area = mmap.mmap(
            self._fd,
            nbytes,
            mmap.MAP_PRIVATE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset,
        )
        return np.frombuffer(area, np.uint8)

    def holds_all(self, transfer: TransferId, nbytes: int, offset: int) -> bool:
        """Whether the block at ``offset`` says of itself that it is this message's and all of it is in place."""
        most = block_prefix_bytes(nbytes, PAGE_BYTES)  # no chunk is smaller
        for size in range(PAGE_BYTES, most + 1, PAGE_BYTES):
            if offset - size < PAGE_BYTES:
                break
            prefix = view_of(self.bytes[offset - size : offset])
            try:
                named = read_block_prefix(prefix)
            except WireError:
                continue
            if named[:2] == (transfer, nbytes) and block_prefix_bytes(nbytes, named.chunk_bytes) == size:
                return all(chunk_is_marked(prefix, index) for index in range(chunk_count(nbytes, named.chunk_bytes)))
        return False

    def forget_pages(self, offset: int, nbytes: int) -> None:
        """Take whole pages within a range out of this process's resident set; their contents stay where they are.

        A process that copies a message out of shared memory would otherwise be counted twice its size.
        """
        start = page_round_up(offset)
        length = offset + nbytes - start
        if length >= PAGE_BYTES:
            self._area.madvise(mmap.MADV_DONTNEED, start, length - length % PAGE_BYTES)

    def prefault(self, stop_requested: Callable[[], bool]) -> None:
        """Touch the first pages ahead of use, in steps, without the GIL. Best effort: an old kernel just refuses."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = self.bytes.ctypes.data
        end = min(self.size_bytes, PREFAULT_LIMIT_BYTES)
        for at in range(0, end, _PREFAULT_STEP_BYTES):
            step_bytes = min(_PREFAULT_STEP_BYTES, end - at)
            pointer, length = ctypes.c_void_p(address + at), ctypes.c_size_t(step_bytes)
            if stop_requested() or libc.madvise(pointer, length, _MADV_POPULATE_WRITE) != 0:
                return


class SendBlock(NamedTuple):
    """A block of a send arena, held by the trainer or lent to the agent."""

    mapping: Mapping
    offset: int
    data: Bytes


class SendArenas:
    """All arenas that this endpoint may send from. Not thread-safe: the session's lock guards it."""

    def __init__(self) -> None:
        self._arenas: dict[int, tuple[Mapping, BlockAllocator]] = {}

    def __len__(self) -> int:
        return len(self._arenas)

    def add(self, mapping: Mapping) -> None:
        """Take an arena into use."""
        self._arenas[mapping.arena] = mapping, BlockAllocator(PAGE_BYTES, mapping.size_bytes)

    def allocate(self, nbytes: int) -> SendBlock | None:
        """A block for ``nbytes`` in the oldest arena that has room, or None."""
        for mapping, allocator in self._arenas.values():
            offset = allocator.allocate(nbytes)
            if offset is not None:
                return SendBlock(mapping, offset, mapping.block(offset, nbytes))
        return None

    def free(self, block: SendBlock) -> None:
        """Give a block back; nothing happens to one of an arena that is no longer in use."""
        mapping, allocator = self._arenas.get(block.mapping.arena, (None, None))
        if allocator is not None and mapping is block.mapping:  # numbers begin anew with each life of the agent
            allocator.free(block.offset)

    def holds(self, block: SendBlock) -> bool:
        """Whether a block lies in one of these arenas."""
        return self._arenas.get(block.mapping.arena, (None,))[0] is block.mapping

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that are lent out."""
        return sum(allocator.used_bytes for _, allocator in self._arenas.values())

    @property
    def capacity_bytes(self) -> int:
        """Room of all arenas together."""
        return sum(allocator.capacity_bytes for _, allocator in self._arenas.values())
