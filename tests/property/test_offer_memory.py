"""The bits in which an agent keeps a peer's offers say the same as a list of them."""

from __future__ import annotations

import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.agent.offers import PAGE_BITS, PAGES, OfferMemory
from proxyd.core.ids import TransferId

LIVES = st.integers(1, 3)
NEAR_EDGES = st.sampled_from([0, 1, 7, 8, (1 << PAGE_BITS) - 1, 1 << PAGE_BITS, 3 << PAGE_BITS, (1 << 64) - 1])
TRANSFERS = st.builds(TransferId, LIVES, st.one_of(st.integers(0, 40), NEAR_EDGES, st.integers(0, (1 << 64) - 1)))


@given(st.lists(TRANSFERS, max_size=200), st.lists(TRANSFERS, max_size=50))
def test_it_knows_what_was_offered_and_nothing_else(offered: list[TransferId], asked: list[TransferId]) -> None:
    memory = OfferMemory()
    for transfer in offered:
        memory.add(transfer)
    assert [one in memory for one in [*offered, *asked]] == [one in set(offered) for one in [*offered, *asked]]


@given(st.lists(TRANSFERS, max_size=200), st.integers(1, 5))
def test_a_full_one_forgets_and_never_invents(offered: list[TransferId], pages: int) -> None:
    memory = OfferMemory(pages)
    for transfer in offered:
        memory.add(transfer)
        assert transfer in memory
    asked = [TransferId(life, sequence) for life in (1, 2, 3) for sequence in range(41)]
    assert {one for one in asked if one in memory} <= set(offered)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 5), st.integers(0, 1 << 20))
def test_the_latest_stay_whatever_else_comes(senders: int, first: int) -> None:
    """Of each sender, as many numbers as its share of the pages has room for, with gaps and out of order."""
    share = 4
    memory = OfferMemory(senders * (share + 1))
    last = first + (share << PAGE_BITS)
    for sequence in [*range(0, first, 1 << PAGE_BITS), *range(first, last, 97)]:
        for sender in range(senders):
            memory.add(TransferId(sender, sequence ^ 1))
    assert all(TransferId(s, n ^ 1) in memory for s in range(senders) for n in range(first, last, 97))


def test_an_hour_of_messages_takes_no_megabyte() -> None:
    memory = OfferMemory()
    for sequence in range(0, 4 << 20, 1 << PAGE_BITS):
        for sender in range(3):
            memory.add(TransferId(sender, sequence))
    pages = memory._pages
    assert len(pages) == PAGES
    assert sum(sys.getsizeof(key) + sys.getsizeof(page) for key, page in pages.items()) < 800 << 10
