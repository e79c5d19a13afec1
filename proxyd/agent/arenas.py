"""Shared memory: sealed memfd arenas, and the blocks of incoming messages inside them.

An arena is sealed before anybody else gets it: a client that could truncate it would kill the agent by SIGBUS on its
next copy. Mappings are never closed by hand: a stream that is in the middle of a chunk holds a view, and the mapping
goes when the last view does.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterable

from proxyd.wire.arena import (
    PAGE_BYTES,
    ArenaHeader,
    BlockPrefix,
    block_prefix_bytes,
    mark_chunk,
    page_round_up,
    record_delivered,
    write_block_prefix,
    write_header,
)
from proxyd.wire.client import ArenaKind
from proxyd.wire.envelope import TransferId

_MADV_POPULATE_WRITE = 23
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_PREFAULT_STEP_BYTES = 4 << 20

# mmap.madvise keeps the GIL, which would stop the loop for as long as the kernel clears pages; a ctypes call drops it.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Arena:
    """One sealed memfd, mapped here. ``view`` covers all of it, header page included."""

    def __init__(
        self, number: int, kind: ArenaKind, size_bytes: int, *, endpoint_incarnation: int, agent_incarnation: int
    ) -> None:
        """Create, size, seal, map, and write the header page. Raises OSError when the kernel has no memory or fds."""
        self.number = number
        self.kind = kind
        self.size_bytes = page_round_up(size_bytes)
        self.fd = os.memfd_create(f"proxyd-{kind.name.lower()}-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)
        write_header(self.view, ArenaHeader(kind, number, self.size_bytes, endpoint_incarnation, agent_incarnation))

    def read_only_fd(self) -> int:
        """A new descriptor of the same memory that can't be mapped writable; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def prefault(self, nbytes: int) -> None:
        """Make the first ``nbytes`` present, so that no copy waits for the kernel to clear pages. Slow: not on the
        loop.

        A kernel older than 5.14 doesn't know how and leaves it to the first touch.
        """
        view = self.view  # holds the mapping while this runs in another thread
        if not view:
            return  # closed meanwhile
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        for at in range(0, min(nbytes, self.size_bytes), _PREFAULT_STEP_BYTES):
            step = min(_PREFAULT_STEP_BYTES, self.size_bytes - at)
            if _libc.madvise(address + at, step, _MADV_POPULATE_WRITE) != 0:
                return

    def drop_pages(self) -> None:
        """Give the memory behind the header page back to the system; addresses stay valid and read zero."""
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        _libc.fallocate(self.fd, mode, PAGE_BYTES, self.size_bytes - PAGE_BYTES)

    def record_delivered(self, transfer: TransferId) -> None:
        """Note in the header page that a message was delivered whole."""
        record_delivered(self.view, transfer.incarnation, transfer.sequence)

    def close(self) -> None:
        """Let go: the descriptor now, the mapping with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view = memoryview(b"")
            del self._map


class BlockAllocator:
    """First-fit allocation of page-aligned extents; low addresses first, so that warm pages are used again."""

    def __init__(self, start: int, end: int) -> None:
        self._free_at = [start] if end > start else []
        self._free_bytes = {start: end - start} if end > start else {}
        self._taken: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        """Nothing is allocated."""
        return not self._taken

    @property
    def taken_bytes(self) -> int:
        """Bytes in allocated extents."""
        return sum(self._taken.values())

    def allocate(self, nbytes: int) -> int | None:
        """Offset of ``nbytes`` (rounded up to pages), or None when no gap is large enough."""
        need = page_round_up(max(1, nbytes))
        for index, at in enumerate(self._free_at):
            size = self._free_bytes[at]
            if size < need:
                continue
            del self._free_bytes[at]
            if size == need:
                del self._free_at[index]
            else:
                self._free_at[index] = at + need
                self._free_bytes[at + need] = size - need
            self._taken[at] = need
            return at
        return None

    def free(self, at: int) -> None:
        """Give an extent back; it joins its free neighbours. Raises KeyError for one that isn't allocated."""
        size = self._taken.pop(at)
        index = bisect.bisect_left(self._free_at, at)
        if index < len(self._free_at) and self._free_at[index] == at + size:
            size += self._free_bytes.pop(self._free_at[index])
            del self._free_at[index]
        if index > 0:
            before = self._free_at[index - 1]
            if before + self._free_bytes[before] == at:
                self._free_bytes[before] += size
                return
        self._free_at.insert(index, at)
        self._free_bytes[at] = size


class Block:
    """Memory of one message in an arena. ``live`` turns false when it is freed: whoever still writes must stop."""

    __slots__ = (
        "arena",
        "chunk_bytes",
        "extent",
        "landed",
        "live",
        "nbytes",
        "offset",
        "payload",
        "prefix",
        "transfer",
    )

    def __init__(
        self, transfer: TransferId, arena: Arena | None, extent: int, offset: int, nbytes: int, chunk_bytes: int
    ) -> None:
        self.transfer = transfer
        self.arena = arena
        self.extent = extent
        self.offset = offset
        self.nbytes = nbytes
        self.chunk_bytes = chunk_bytes
        self.live = True
        self.landed: set[int] = set()
        """Offsets of the chunks that are in place. Here too, for the map in the arena is the trainer's to write."""
        whole = memoryview(b"") if arena is None else arena.view
        self.payload = whole[offset : offset + nbytes]
        self.prefix = whole[extent:offset]

    @property
    def arena_number(self) -> int:
        """What the wire calls the arena; 0: none (an empty message)."""
        return 0 if self.arena is None else self.arena.number

    def mark(self, offset: int) -> None:
        """Note in the block's map that the chunk at ``offset`` is in place and verified."""
        self.landed.add(offset)
        if len(self.prefix):
            mark_chunk(self.prefix, offset // self.chunk_bytes)

    def release(self) -> None:
        """No longer in use; drops the views, so that the arena's mapping can go."""
        self.live = False
        self.payload = self.prefix = memoryview(b"")
        self.arena = None


def receive_block_bytes(nbytes: int, chunk_bytes: int) -> int:
    """What a receive block takes in its arena."""
    return block_prefix_bytes(nbytes, chunk_bytes) + page_round_up(nbytes)


def make_receive_block(
    transfer: TransferId, arena: Arena, allocator: BlockAllocator, nbytes: int, chunk_bytes: int
) -> Block | None:
    """A block with its prefix written, or None when the arena has no room."""
    extent = allocator.allocate(receive_block_bytes(nbytes, chunk_bytes))
    if extent is None:
        return None
    block = Block(transfer, arena, extent, extent + block_prefix_bytes(nbytes, chunk_bytes), nbytes, chunk_bytes)
    write_block_prefix(block.prefix, BlockPrefix(transfer, nbytes, chunk_bytes))
    return block


def prefault_all(arenas: Iterable[Arena], nbytes: int) -> None:
    """The same for the beginning of each."""
    for arena in arenas:
        arena.prefault(nbytes)
