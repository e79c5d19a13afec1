"""The shared pages: headers, delivered table, chunk maps."""

from __future__ import annotations

import pytest

from proxyd.wire import arena
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import TransferId


@pytest.fixture
def page() -> memoryview:
    view = memoryview(bytearray(arena.PAGE_BYTES))
    arena.write_header(view, arena.ArenaHeader(2, 7, 1 << 20, 11, 12))
    return view


def test_a_header_round_trips_and_is_checked(page: memoryview) -> None:
    assert arena.read_header(page, 1 << 20) == arena.ArenaHeader(2, 7, 1 << 20, 11, 12)
    with pytest.raises(WireError, match="claims 1048576 bytes, 4096 are mapped"):
        arena.read_header(page, 4096)
    page[0] = 0
    with pytest.raises(WireError, match="not a version 1 arena"):
        arena.read_header(page, 1 << 20)


def test_the_oldest_sender_makes_room(page: memoryview) -> None:
    count = arena.DELIVERED_ENTRIES
    for incarnation in range(1, count + 3):
        arena.record_delivered(page, incarnation, incarnation * 10)
    arena.record_delivered(page, 5, 51)
    delivered = arena.last_delivered(page)
    assert len(delivered) == count
    assert delivered[5] == 51
    assert delivered[count + 2] == 10 * (count + 2)
    assert 2 not in delivered
    assert arena.read_header(page, 1 << 20).arena == 7


def test_a_count_of_garbage_does_no_harm(page: memoryview) -> None:
    page[20:24] = b"\xff\xff\xff\xff"
    assert len(arena.last_delivered(page)) <= arena.DELIVERED_ENTRIES
    arena.record_delivered(page, 1, 1)
    assert len(arena.last_delivered(page)) <= arena.DELIVERED_ENTRIES


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 1), (1, 1), (1 << 30, 1), (32 << 30, 2)])
def test_prefixes_are_whole_pages(nbytes: int, pages: int) -> None:
    assert arena.block_prefix_bytes(nbytes, 1 << 20) == pages * arena.PAGE_BYTES


def test_a_block_prefix_round_trips_and_is_checked() -> None:
    prefix = arena.BlockPrefix(TransferId(1, 2), 10 << 20, 1 << 20)
    view = memoryview(bytearray(b"\xff" * arena.PAGE_BYTES))
    with pytest.raises(WireError):
        arena.read_block_prefix(view)
    arena.write_block_prefix(view, prefix)
    assert arena.read_block_prefix(view) == prefix
    assert not any(arena.chunk_is_marked(view, index) for index in range(10))
    arena.mark_chunk(view, 9)
    assert arena.chunk_is_marked(view, 9)
    huge = arena.BlockPrefix(TransferId(1, 2), 1 << 40, 1 << 20)
    large = memoryview(bytearray(arena.block_prefix_bytes(1 << 40, 1 << 20)))
    arena.write_block_prefix(large, huge)
    with pytest.raises(WireError, match="needs a prefix larger"):
        arena.read_block_prefix(large[: arena.PAGE_BYTES])
