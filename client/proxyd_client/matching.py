"""Which message goes to which receive. Pure: no lock, socket or clock.

Theory. Messages of one channel (source, group, tag) are taken in the order in which they were offered, receives of one
channel in the order in which they were posted; a receive from any source takes the earliest offered message of its
group and tag. So each side is a queue, and at any moment at most one of them is non-empty per pair that could match:
whatever arrives looks into the other queue first.

Two numbers keep the order when something comes *back*: a message whose receive was withdrawn (timed out, cancelled)
and a receive whose message was taken back by its sender return to their old places, not to the end.

A message that doesn't fit the receive whose turn it is fails that receive and stays where it is: the caller still has
it, and can take it with ``recv``. A receive that *drops* takes such a message along: the two were meant for each other
(MPI and torch count so), and what is posted next on both sides belongs together again.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from proxyd.wire.envelope import Envelope, TransferId

if TYPE_CHECKING:
    from proxyd_client.arena import Mapping
    from proxyd_client.link import Link

_by_number = attrgetter("number")
MOST_CLOSED_GROUPS = 4096
"""Names are remembered for messages that are still on their way when a group is closed."""


@dataclasses.dataclass(eq=False, slots=True)
class Incoming:
    """A message that was offered to this endpoint."""

    transfer: TransferId
    envelope: Envelope
    arena: int = 0
    offset: int = 0
    landed_bytes: int = 0
    accepted: bool = False
    """Memory was asked for (or came with the offer)."""
    failed: tuple[int, str, int] | None = None
    """(code, message, bytes done) of a message that will not come."""
    finish_at_ns: int = 0
    """Predicted arrival of the last byte on the local monotonic clock; 0: unknown."""
    number: int = 0
    receive: Posted | None = None
    mapping: Mapping | None = None
    """The arena that it lies in."""
    link: Link | None = None
    """The connection over which it was offered; what is said of it over a later one would mean nothing there."""
    awaited: bool = False
    """It was under way when the agent ended: it is to be offered again, or to fail. It keeps its place and its receive,
    and has neither memory nor bytes."""
    offers: int = 1
    """How often it was offered: a copy that began before the last one counts for nothing."""

    @property
    def complete(self) -> bool:
        """All of it is in place and verified."""
        return self.failed is None and self.landed_bytes == self.envelope.nbytes


@dataclasses.dataclass(eq=False, slots=True)
class Posted:
    """A receive; ``src`` None takes from any source."""

    src: int | None
    group: str
    tag: int
    misfit: Callable[[Envelope], str]
    """Why a message can't be taken, in words; empty when it can."""
    drops: bool = False
    """A message that can't be taken is dropped with this receive: the next one is for the next receive."""
    number: int = 0
    incoming: Incoming | None = None

    def wants(self, envelope: Envelope) -> bool:
        """Whether a message's channel is one that this receive takes from."""
        return envelope.tag == self.tag and envelope.group == self.group and self.src in (None, envelope.src_rank)


@dataclasses.dataclass(slots=True)
class Outcome:
    """What one step of the matcher led to."""

    matched: list[tuple[Posted, Incoming]] = dataclasses.field(default_factory=list)
    misfits: list[tuple[Posted, Incoming, str]] = dataclasses.field(default_factory=list)


class Matcher:
    """The two queues, per (group, tag). Each is short or empty in practice; both are sorted by number."""

    def __init__(self) -> None:
        self._closed: dict[str, None] = {}
        self._offers = 0
        self._posts = 0
        self._messages: dict[tuple[str, int], list[Incoming]] = {}
        self._receives: dict[tuple[str, int], list[Posted]] = {}

    def offer(self, message: Incoming) -> Outcome:
        """A message was offered."""
        self._offers += 1
        message.number = self._offers
        return self._place_message(message)

    def post(self, receive: Posted) -> Outcome:
        """A receive was posted."""
        self._posts += 1
        receive.number = self._posts
        return self._place_receive(receive)

    def withdraw(self, receive: Posted) -> Outcome:
        """A receive is no longer wanted; a message that it held goes back to its place, or to the next receive."""
        message = receive.incoming
        if message is None:
            _discard(self._receives, receive)
            return Outcome()
        receive.incoming = message.receive = None
        return self._place_message(message)

    def retract(self, message: Incoming) -> Outcome:
        """The sender took a message back; a receive that held it waits for the next one."""
        receive = message.receive
        if receive is None:
            _discard(self._messages, message)
            return Outcome()
        receive.incoming = message.receive = None
        return self._place_receive(receive)

    def finished(self, message: Incoming) -> None:
        """A matched message was handed over, or its failure was."""
        if message.receive is not None:
            message.receive.incoming = None
            message.receive = None

    def waiting_for(self, src: int) -> list[Posted]:
        """Receives from exactly ``src`` that hold no message, in order."""
        waiting = [receive for queue in self._receives.values() for receive in queue if receive.src == src]
        return sorted(waiting, key=_by_number)

    def close_group(self, group: str) -> list[Posted]:
        """Nothing more of a group is wanted; its receives that hold no message."""
        self._closed[group] = None
        if len(self._closed) > MOST_CLOSED_GROUPS:
            del self._closed[next(iter(self._closed))]
        return [receive for queue in self._receives.values() for receive in queue if receive.group == group]

    def is_closed(self, group: str) -> bool:
        """Whether :meth:`close_group` was called for it."""
        return group in self._closed

    def of_group(self, group: str) -> list[Incoming]:
        """Messages of a group that no receive holds."""
        return [one for queue in self._messages.values() for one in queue if one.envelope.group == group]

    def all_waiting(self) -> list[Posted]:
        """Receives that hold no message, in order."""
        return sorted((receive for queue in self._receives.values() for receive in queue), key=_by_number)

    def queued(self, src: int | None, group: str, tag: int) -> Iterator[Incoming]:
        """Messages that a receive would take, in order."""
        for message in self._messages.get((group, tag), ()):
            if src in (None, message.envelope.src_rank):
                yield message

    def queued_elsewhere(self, src: int | None, group: str, tag: int) -> list[Envelope]:
        """Messages of other channels from ``src``: what a wrong tag or group looks like."""
        return [
            message.envelope
            for queue in self._messages.values()
            for message in queue
            if src in (None, message.envelope.src_rank)
            and (message.envelope.group, message.envelope.tag) != (group, tag)
        ]

    def _place_message(self, message: Incoming) -> Outcome:
        """Give ``message`` to the first receive that takes it, else queue it; those it doesn't fit are misfits.

        An earlier message of the channel can still be queued (it fits nobody so far): then the turn is not this
        one's. That can only be so when no receive of the channel waits, because each receive meets the head first.
        """
        outcome = Outcome()
        key = message.envelope.group, message.envelope.tag
        for receive in [r for r in self._receives.get(key, ()) if r.wants(message.envelope)]:
            _discard(self._receives, receive)
            if self._pair(receive, message, outcome):
                return outcome
        bisect.insort(self._messages.setdefault(key, []), message, key=_by_number)
        return outcome

    def _place_receive(self, receive: Posted) -> Outcome:
        outcome = Outcome()
        key = receive.group, receive.tag
        head = next(self.queued(receive.src, receive.group, receive.tag), None)
        if head is None:
            bisect.insort(self._receives.setdefault(key, []), receive, key=_by_number)
        elif self._pair(receive, head, outcome):
            _discard(self._messages, head)
        return outcome

    @staticmethod
    def _pair(receive: Posted, message: Incoming, outcome: Outcome) -> bool:
        # A message that failed is taken by whoever has the turn: its error is theirs, whatever the buffer.
        reason = "" if message.failed is not None else receive.misfit(message.envelope)
        if reason:
            outcome.misfits.append((receive, message, reason))
            return receive.drops
        receive.incoming = message
        message.receive = receive
        outcome.matched.append((receive, message))
        return True


def _discard(queues: dict[tuple[str, int], list[Incoming]] | dict[tuple[str, int], list[Posted]], item: object) -> None:
    """Take ``item`` out of its queue, if it is in one; an empty queue leaves nothing behind (tags may be endless)."""
    if isinstance(item, Incoming):
        key = item.envelope.group, item.envelope.tag
    elif isinstance(item, Posted):
        key = item.group, item.tag
    else:
        raise TypeError(f"{type(item).__name__} is in no queue")
    queue = queues.get(key)
    if queue is None:
        return
    index = bisect.bisect_left(queue, item.number, key=_by_number)
    if index < len(queue) and queue[index] is item:
        del queue[index]
        if not queue:
            del queues[key]
