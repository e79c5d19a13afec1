"""Which messages a peer has offered: what tells a chunk that came too early from one that came too late.

A sender numbers its messages from one up, so a bit for each number does, where a list of them would grow by some 350
bytes with every message until it is full. The numbers of one sender come nearly in order, with gaps (what it sends
elsewhere) and with stragglers (what waited for its receiver), so the bits lie in pages, and the page that was written
longest ago is forgotten first. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

from proxyd.core.ids import TransferId

PAGE_BITS = 9
"""512 messages of one sender to a page: 64 bytes, and some 280 around them. A sender's next life begins another one."""
PAGES = 2048
"""0.7 MiB for a peer: 16 trainers there with 65,536 numbers each. A chunk of a message that is forgotten is held for an
offer that came long ago: a delay, and the chunk is asked for again where it is wanted."""


class OfferMemory:
    """The messages that one peer has offered over the connections that stand, the latest of them at least.

    :param pages: how many pages are kept.
    """

    __slots__ = ("_pages", "_room")

    def __init__(self, pages: int = PAGES) -> None:
        self._room = pages
        self._pages: OrderedDict[tuple[int, int], bytearray] = OrderedDict()

    def add(self, transfer: TransferId) -> None:
        """It was offered."""
        key, byte, bit = _place(transfer)
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = bytearray(1 << PAGE_BITS >> 3)
            if len(self._pages) > self._room:
                self._pages.popitem(last=False)
        else:
            self._pages.move_to_end(key)
        page[byte] |= bit

    def __contains__(self, transfer: TransferId) -> bool:
        key, byte, bit = _place(transfer)
        page = self._pages.get(key)
        return page is not None and bool(page[byte] & bit)


def _place(transfer: TransferId) -> tuple[tuple[int, int], int, int]:
    sequence = transfer.sequence
    within = sequence & ((1 << PAGE_BITS) - 1)
    return (transfer.incarnation, sequence >> PAGE_BITS), within >> 3, 1 << (within & 7)
