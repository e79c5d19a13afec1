"""Blocks and mappings."""

from __future__ import annotations

import os

import pytest

from proxyd.wire import arena as layout
from proxyd.wire.client import ArenaKind
from proxyd.wire.codec import WireError
from proxyd_client.arena import BlockAllocator, Mapping, SendArenas

PAGE = layout.PAGE_BYTES


def memfd(kind: ArenaKind, size_bytes: int, header_size_bytes: int | None = None) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size_bytes)
    page = memoryview(bytearray(PAGE))
    layout.write_header(page, layout.ArenaHeader(kind, 1, header_size_bytes or size_bytes, 0, 0))
    os.pwrite(fd, page[: min(PAGE, size_bytes)], 0)
    return fd


def test_first_fit_reuses_the_lowest_block() -> None:
    allocator = BlockAllocator(PAGE, 9 * PAGE)
    blocks = [allocator.allocate(2 * PAGE - 5) for _ in range(4)]
    assert blocks == [PAGE, 3 * PAGE, 5 * PAGE, 7 * PAGE]
    assert allocator.allocate(1) is None
    allocator.free(5 * PAGE)
    allocator.free(PAGE)
    assert allocator.allocate(1) == PAGE
    assert allocator.free_bytes == 3 * PAGE
    assert allocator.used_bytes == 5 * PAGE
    assert allocator.allocate(3 * PAGE) is None  # 1 + 2 pages, apart


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_grow_together_in_any_order(order: tuple[int, ...]) -> None:
    allocator = BlockAllocator(0, 3 * PAGE)
    blocks = [allocator.allocate(PAGE) for _ in range(3)]
    for index in order:
        allocator.free(blocks[index] or 0)
    assert allocator.allocate(3 * PAGE) == 0


def test_misuse_is_refused() -> None:
    allocator = BlockAllocator(0, PAGE + 100)
    assert allocator.capacity_bytes == PAGE
    with pytest.raises(ValueError, match="can't be allocated"):
        allocator.allocate(0)
    with pytest.raises(ValueError, match="no block"):
        allocator.free(0)
    with pytest.raises(ValueError, match="must start at a page"):
        BlockAllocator(5, PAGE)


def test_a_mapping_is_what_the_agent_says_or_refused() -> None:
    for fd, kind, size_bytes in (
        (memfd(ArenaKind.SEND, PAGE), ArenaKind.SEND, 2 * PAGE),  # shorter than said
        (memfd(ArenaKind.SEND, 2 * PAGE, 3 * PAGE), ArenaKind.SEND, 2 * PAGE),  # header says otherwise
        (memfd(ArenaKind.RECEIVE, 2 * PAGE), ArenaKind.SEND, 2 * PAGE),  # another kind
        (memfd(ArenaKind.SEND, 2 * PAGE), ArenaKind.SEND, 100),
    ):
        with pytest.raises(WireError):
            Mapping(fd, 1, kind, size_bytes)
        os.close(fd)


def test_only_send_arenas_can_be_written() -> None:
    for kind, header, writable in (
        (ArenaKind.SEND, ArenaKind.SEND, True),
        (ArenaKind.RECEIVE, ArenaKind.RECEIVE, False),
        (ArenaKind.PEER, ArenaKind.SEND, False),
    ):
        fd = memfd(header, 4 * PAGE)
        mapping = Mapping(fd, 1, kind, 4 * PAGE)
        os.close(fd)
        assert mapping.block(PAGE, 5).flags.writeable is writable
        assert mapping.block(PAGE, 5) is not mapping.block(PAGE, 5)
        for offset, nbytes in ((0, 1), (PAGE, 3 * PAGE + 1), (1 << 60, 1)):
            with pytest.raises(WireError, match="outside"):
                mapping.block(offset, nbytes)


def test_blocks_come_from_the_oldest_arena_with_room() -> None:
    arenas = SendArenas()
    for number, pages in ((1, 3), (2, 9)):
        fd = memfd(ArenaKind.SEND, pages * PAGE)
        mapping = Mapping(fd, 1, ArenaKind.SEND, pages * PAGE)
        mapping.arena = number
        arenas.add(mapping)
        os.close(fd)
    assert len(arenas) == 2
    assert arenas.capacity_bytes == 10 * PAGE
    large, small = arenas.allocate(5 * PAGE), arenas.allocate(2 * PAGE)
    assert large is not None
    assert small is not None
    assert (large.mapping.arena, small.mapping.arena) == (2, 1)
    small.data[:] = 7
    assert (small.mapping.bytes[PAGE : 3 * PAGE] == 7).all()
    assert arenas.used_bytes == 7 * PAGE
    arenas.free(small)
    arenas.free(large)
    assert arenas.used_bytes == 0


def test_prefault_touches_or_gives_up_quietly() -> None:
    fd = memfd(ArenaKind.SEND, 64 * PAGE)
    mapping = Mapping(fd, 1, ArenaKind.SEND, 64 * PAGE)
    mapping.prefault(lambda: True)
    before = os.fstat(fd).st_blocks
    mapping.prefault(lambda: False)
    assert os.fstat(fd).st_blocks >= before
    os.close(fd)


def test_a_private_block_shares_until_it_is_written_to_and_takes_its_pages_along() -> None:
    fd = memfd(ArenaKind.RECEIVE, 8 * PAGE)
    os.pwrite(fd, b"x" * 3 * PAGE, 2 * PAGE)
    before = len(os.listdir("/proc/self/fd"))
    mapping = Mapping(fd, 1, ArenaKind.RECEIVE, 8 * PAGE)
    block = mapping.private_block(2 * PAGE, 2 * PAGE + 5)
    assert bytes(block) == b"x" * (2 * PAGE + 5)
    block[:] = 7
    assert bytes(mapping.block(2 * PAGE, 3 * PAGE)) == b"x" * 3 * PAGE
    os.pwrite(fd, b"y" * 3 * PAGE, 2 * PAGE)
    again = mapping.private_block(2 * PAGE, 10)
    assert bytes(again) == b"y" * 10
    assert (block == 7).all()
    with pytest.raises(WireError, match="outside"):
        mapping.private_block(7 * PAGE, 2 * PAGE)
    del mapping
    assert bytes(again) == b"y" * 10
    del block, again
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)
