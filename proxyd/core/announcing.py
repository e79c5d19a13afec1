"""Announcements of one agent: which posted message fulfils which, and what the coordinator granted ahead to each.

A trainer announces a message before its bytes exist, and the coordinator may grant to the announcement, so that the
ask is hidden behind the computation. Theory of one announcement's life::

    announced --posted--> taken --asked for (it holds credit)--> bound: later grants to it are the transfer's
        |                   |
        +------- forgotten -+   its trainer is gone, or the message needs no grants: what is held goes back

Until it is bound its grants are held without a transfer; they spend nothing and hold up nobody. What expires unbound
goes back like any unspent grant. The counts that this leaves behind (granted, returned) become the transfer's when it
is bound, so that the cumulative ``wanted_bytes`` of its request means to the coordinator what it means to us.

Announcements are matched in order within a *channel*: the messages of one source, destination, group and tag. A plan
that turns out otherwise (a shorter last one, other sizes, fewer or more than announced) costs no more than a slot.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from proxyd.core.ids import EndpointName, LinkName, TransferId
from proxyd.wire.envelope import Envelope

ANNOUNCEMENTS_PER_CHANNEL = 4096
"""Announcements kept for messages that were never posted (a shorter last batch, say); the oldest go first."""

Channel = tuple[str, int, int, str, int]
"""(job, source rank, destination rank, group, tag)."""


@dataclasses.dataclass(slots=True)
class Ahead:
    """One announcement, until its message ends."""

    link: LinkName
    granted_bytes: int = 0
    """Granted to it in the present session, while it was not bound."""
    returned_bytes: int = 0
    """The part of them that went back unspent."""
    transfer: TransferId | None = None
    """The message that it is bound to."""


def channel_of(envelope: Envelope) -> Channel:
    """What announcements are matched by."""
    return (envelope.job, envelope.src_rank, envelope.dst_rank, envelope.group, envelope.tag)


class Announcements:
    """The bookkeeping alone: what is said to whom is :class:`~proxyd.core.asking.Asking`'s business."""

    def __init__(self) -> None:
        self._waiting: dict[Channel, deque[tuple[int, int]]] = {}
        """(number, announced bytes), in order."""
        self.fulfilled = self.resized = self.unposted = 0
        """How plans turned out: as announced, of another size, not at all."""
        self._ahead: dict[int, Ahead] = {}
        self._next = 1

    def __len__(self) -> int:
        """Announcements that are not over."""
        return len(self._ahead)

    def add(self, envelope: Envelope, link: LinkName | None) -> tuple[int, list[int]]:
        """A new one: its number, and numbers that had to be forgotten for it.

        :param link: None: it needs no grant; its number is 0 then, and keeps the order of its channel.
        """
        waiting = self._waiting.setdefault(channel_of(envelope), deque())
        forgotten = []
        if len(waiting) >= ANNOUNCEMENTS_PER_CHANNEL:
            self.unposted += 1
            forgotten += [oldest for oldest, _ in (waiting.popleft(),) if oldest]
        number = 0
        if link is not None:
            number = self._next
            self._next += 1
            self._ahead[number] = Ahead(link)
        waiting.append((number, envelope.nbytes))
        return number, forgotten

    def take(self, envelope: Envelope) -> int:
        """The announcement that a posted message fulfils; 0: none."""
        channel = channel_of(envelope)
        waiting = self._waiting.get(channel)
        if not waiting:
            return 0
        number, nbytes = waiting.popleft()
        if not waiting:
            del self._waiting[channel]
        if nbytes == envelope.nbytes:
            self.fulfilled += 1
        else:
            self.resized += 1
        return number

    def forget_source(self, source: EndpointName) -> list[int]:
        """A trainer is gone: numbers of what it had announced and not posted."""
        numbers: list[int] = []
        for channel in [channel for channel in self._waiting if channel[:2] == (source.job, source.rank)]:
            waiting = self._waiting.pop(channel)
            self.unposted += len(waiting)
            numbers += [number for number, _ in waiting if number]
        return numbers

    def get(self, number: int) -> Ahead | None:
        """What is known of one; None: it is over, or never was."""
        return self._ahead.get(number)

    def end(self, number: int) -> Ahead | None:
        """It is over."""
        return self._ahead.pop(number, None)

    def session_began(self, link: LinkName) -> None:
        """A new session's accounts begin at zero. The new coordinator knows nothing of announcements made before."""
        for ahead in self._ahead.values():
            if ahead.link == link:
                ahead.granted_bytes = ahead.returned_bytes = 0
