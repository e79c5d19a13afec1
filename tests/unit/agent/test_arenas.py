"""Sealed arenas and the allocator of blocks."""

from __future__ import annotations

import gc
import mmap
import os
import random

import pytest

from proxyd.agent.arenas import Arena, BlockAllocator, make_receive_block, receive_block_bytes
from proxyd.wire.arena import PAGE_BYTES, chunk_is_marked, last_delivered, read_block_prefix, read_header
from proxyd.wire.client import ArenaKind
from proxyd.wire.envelope import TransferId

TRANSFER = TransferId(11, 1)


def arena(size_bytes: int = 1 << 20, kind: ArenaKind = ArenaKind.RECEIVE) -> Arena:
    return Arena(3, kind, size_bytes, endpoint_incarnation=5, agent_incarnation=9)


def test_nobody_can_truncate_or_grow_it() -> None:
    made = arena()
    for size in (0, 4096, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, size)
    header = read_header(made.view, 1 << 20)
    assert (header.kind, header.arena, header.endpoint_incarnation) == (ArenaKind.RECEIVE, 3, 5)
    made.close()


def test_a_handed_over_descriptor_cannot_be_written() -> None:
    made = arena(kind=ArenaKind.SEND)
    made.view[PAGE_BYTES : PAGE_BYTES + 3] = b"abc"
    fd = made.read_only_fd()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 1 << 20)
    with mmap.mmap(fd, 1 << 20, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
        assert seen[PAGE_BYTES : PAGE_BYTES + 3] == b"abc"
    os.close(fd)
    made.close()


def test_closing_waits_for_the_last_view() -> None:
    made = arena()
    view = made.view[PAGE_BYTES : PAGE_BYTES + 4]
    made.close()
    gc.collect()
    view[:] = b"live"
    assert bytes(view) == b"live"


def test_dropped_pages_read_zero_and_the_header_stays() -> None:
    made = arena()
    made.view[PAGE_BYTES : PAGE_BYTES + 3] = b"abc"
    made.record_delivered(TransferId(7, 42))
    made.drop_pages()
    assert bytes(made.view[PAGE_BYTES : PAGE_BYTES + 3]) == b"\0\0\0"
    assert last_delivered(made.view) == {7: 42}
    made.prefault(1 << 30)
    made.close()
    made.prefault(1 << 20)


def test_a_block_names_itself_and_maps_its_chunks() -> None:
    made = arena()
    allocator = BlockAllocator(PAGE_BYTES, made.size_bytes)
    block = make_receive_block(TRANSFER, made, allocator, 200_000, 65536)
    assert block is not None
    assert block.offset % PAGE_BYTES == 0
    assert len(block.payload) == 200_000
    prefix = read_block_prefix(block.prefix)
    assert (prefix.transfer, prefix.nbytes, prefix.chunk_bytes) == (TRANSFER, 200_000, 65536)
    block.mark(131072)
    assert [chunk_is_marked(block.prefix, index) for index in range(4)] == [False, False, True, False]
    block.release()
    assert not block.live
    assert len(block.payload) == 0
    block.mark(0)


def test_first_fit_uses_low_addresses_again() -> None:
    allocator = BlockAllocator(PAGE_BYTES, 10 * PAGE_BYTES)
    first, second, third = (allocator.allocate(2 * PAGE_BYTES) for _ in range(3))
    assert (first, second, third) == (4096, 3 * 4096, 5 * 4096)
    assert allocator.allocate(4 * PAGE_BYTES) is None
    allocator.free(first or 0)
    assert allocator.allocate(1) == 4096
    with pytest.raises(KeyError):
        allocator.free(2 * 4096)


def test_everything_freed_is_one_gap_again() -> None:
    rng = random.Random(4)
    end = 256 * PAGE_BYTES
    allocator = BlockAllocator(PAGE_BYTES, end)
    taken: dict[int, int] = {}
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            at = rng.choice(sorted(taken))
            del taken[at]
            allocator.free(at)
            continue
        size = rng.randint(1, 20 * PAGE_BYTES)
        found = allocator.allocate(size)
        if found is None:
            continue
        whole = -(-size // PAGE_BYTES) * PAGE_BYTES
        assert found + whole <= end
        assert all(found + whole <= at or at + length <= found for at, length in taken.items())
        taken[found] = whole
        assert allocator.taken_bytes == sum(taken.values())
    for at in list(taken):
        allocator.free(at)
    assert allocator.is_empty
    assert allocator.allocate(end - PAGE_BYTES) == PAGE_BYTES


def test_a_receive_block_takes_its_prefix_too() -> None:
    assert receive_block_bytes(1, 65536) == 2 * PAGE_BYTES
    assert receive_block_bytes(1 << 32, 65536) == (1 << 32) + 3 * PAGE_BYTES
