"""Grants change hands within an agent: what is held for a less urgent message goes to a more urgent one.

A link is kept busy by granting ahead, and what an agent holds ahead takes ten milliseconds and more to leave. A tensor
that comes while its own agent holds grants for a copy would wait behind all of that, though on the link it makes no
difference which message of an agent spends them. So the tensor *takes over* what is held for less urgent messages and
was not handed to a stream yet, before anything is granted to itself.

What it took it *owes*. It asks for as much as it would have asked anyway, so the coordinator charges each job what it
sends; grants that the tensor then can't use any more go to those whose it spent. No word of this crosses the network.
To a coordinator a transfer was granted ``granted_bytes + lent_bytes - owed_bytes``.

**Nobody starves.** What was paid back isn't lent again, so the part of the link that is kept for the longest waiter
reaches it, one tensor later. A lender asks for what it lent by itself when it can't be sure of it any more: its
borrower ended, or has not paid for half a second (it may wait for a cap of its job). Who didn't pay in time borrows no
more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from proxyd.core.ids import TransferId
from proxyd.core.linkbook import NANOS, HeldGrant, LinkBook
from proxyd.core.messages import Grant, LinkInfo
from proxyd.core.transfer import Outgoing, SendInput, SendState
from proxyd.wire.envelope import TrafficClass

LENT_NS = 500_000_000
"""So long a lender waits for what it lent."""
YIELDING_CHUNK_NS = 4_000_000
"""A chunk that a stream has taken can't be taken over: those of the least urgent class take no longer on the link than
this. Elsewhere they may be as long as a slot."""
LEAST_CHUNK_BYTES = 64 << 10
CAN_SEND = (SendState.QUEUED, SendState.SENDING)


def chunk_bytes(info: LinkInfo, traffic: TrafficClass) -> int:
    """The chunks of a message on a link."""
    if traffic != TrafficClass.BULK:
        return info.chunk_bytes
    short_bytes = 1 << (max(1, info.rate_bytes_per_s * YIELDING_CHUNK_NS // NANOS).bit_length() - 1)
    return min(info.chunk_bytes, max(LEAST_CHUNK_BYTES, short_bytes))


class Lending:
    """Shares ``transfers`` with the asking side.

    :param request: asks a coordinator for what a transfer needs.
    :param has_slot: told of a transfer that holds grants from now on.
    """

    def __init__(
        self,
        transfers: dict[TransferId, Outgoing],
        request: Callable[[Outgoing, int], None],
        has_slot: Callable[[Outgoing, LinkBook, int], None],
    ) -> None:
        self._transfers = transfers
        self._request = request
        self._has_slot = has_slot

    def take_over(self, out: Outgoing, book: LinkBook, now_ns: int) -> None:
        """A message wants grants: it gets those that are held for less urgent ones."""
        traffic = out.envelope.traffic
        if traffic == TrafficClass.BULK or out.in_arrears or out.state not in CAN_SEND:
            return
        before = out.need_bytes
        for held in list(book.grants):
            lender = self._transfers.get(held.transfer)
            if lender is None or lender.envelope.traffic <= traffic or lender.padding or lender.peer != out.peer:
                continue  # of another peer: what its streams have still leaves at the whole rate
            if held.fallback or held.announcement or held.repaid:
                continue
            if nbytes := min(held.left_bytes, out.need_bytes):
                _hand_over(book, held, nbytes, out.transfer)
                self._lend(lender, nbytes)
                book.asked[lender.transfer] = None
                out.held_bytes += nbytes
                out.granted_bytes += nbytes
                out.owed_bytes += nbytes
        book.urgent = out.transfer if out.need_bytes else None
        if out.need_bytes == before:
            return
        out.step(SendInput.GRANTED)
        if book.lent_due_ns is None:
            book.lent_due_ns = now_ns + LENT_NS
        self._has_slot(out, book, now_ns)

    @staticmethod
    def _lend(lender: Outgoing, nbytes: int) -> None:
        lender.held_bytes -= nbytes
        lender.granted_bytes -= nbytes
        lender.lent_bytes += nbytes
        if not lender.held_bytes and lender.state is SendState.SENDING:
            lender.step(SendInput.STARVED)

    def granted(self, out: Outgoing, book: LinkBook, now_ns: int) -> None:
        """Something was granted to ``out``: a more urgent message that waits gets it. The coordinator may not have
        known of that one yet."""
        urgent = self._transfers.get(book.urgent) if book.urgent is not None else None
        if urgent is None or not urgent.need_bytes:
            book.urgent = None
        elif urgent.envelope.traffic < out.envelope.traffic:
            self.take_over(urgent, book, now_ns)

    def pay_back(self, out: Outgoing, grant: Grant, spare_bytes: int) -> list[tuple[Outgoing, Grant]]:
        """``out`` can't use so many bytes of a grant: what it owes of them goes to its lenders. Answers these, each
        with its part."""
        parts: list[tuple[Outgoing, Grant]] = []
        spare_bytes = min(spare_bytes, out.owed_bytes)
        for lender in self._lenders(out) if spare_bytes else ():
            nbytes = min(spare_bytes, lender.lent_bytes, lender.need_bytes)
            if nbytes and lender.state in CAN_SEND:
                parts.append((lender, dataclasses.replace(grant, transfer=lender.transfer, nbytes=nbytes)))
                lender.lent_bytes -= nbytes
                lender.granted_bytes += nbytes
                out.owed_bytes -= nbytes
                spare_bytes -= nbytes
        return parts

    def ended(self, out: Outgoing, now_ns: int) -> None:
        """Nothing more will be granted to ``out``: who lent to it asks by itself."""
        owed, out.owed_bytes, out.lent_bytes = out.owed_bytes, 0, 0
        for lender in self._lenders(out) if owed else ():
            nbytes = min(owed, lender.lent_bytes)
            owed -= nbytes
            self._ask(lender, nbytes, now_ns)

    def due(self, book: LinkBook, now_ns: int) -> None:
        """It takes too long: all who lent something on a link ask by themselves."""
        book.lent_due_ns = None
        for out in [one for one in self._transfers.values() if one.link == book.link]:
            if out.owed_bytes:
                out.owed_bytes, out.in_arrears = 0, True
            if out.lent_bytes:
                self._ask(out, out.lent_bytes, now_ns)

    def _lenders(self, borrower: Outgoing) -> list[Outgoing]:
        return [one for one in self._transfers.values() if one.lent_bytes and one.link == borrower.link]

    def _ask(self, lender: Outgoing, nbytes: int, now_ns: int) -> None:
        """To the coordinator it was granted so much, and it wants as much again."""
        lender.lent_bytes -= nbytes
        lender.granted_bytes += nbytes
        lender.wanted_bytes += nbytes
        if nbytes and lender.requested and lender.state in CAN_SEND:
            self._request(lender, now_ns)


def _hand_over(book: LinkBook, held: HeldGrant, nbytes: int, transfer: TransferId) -> None:
    """The first ``nbytes`` of what is held are another transfer's."""
    if nbytes == held.left_bytes:
        held.transfer = transfer
        return
    send_ns = held.send_ns * nbytes // held.left_bytes
    part = dataclasses.replace(held, transfer=transfer, left_bytes=nbytes, send_ns=send_ns)
    held.left_bytes -= nbytes
    held.send_ns -= send_ns
    book.grants.insert(book.grants.index(held), part)
