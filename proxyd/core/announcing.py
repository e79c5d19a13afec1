"""Announcements of one agent: which posted message fulfils which, and what the coordinator granted ahead to each.

A trainer announces a message before its bytes exist, and the coordinator may grant to the announcement, so that the
ask is hidden behind the computation. Theory of one announcement's life::

    announced --posted--> taken --asked for (it holds credit)--> bound: later grants to it are the transfer's
        |                   |
        +------- forgotten -+   its trainer is gone, it is long overdue, or the message needs no grants: what is held
                                goes back

Until it is bound its grants are held without a transfer; they spend nothing and hold up nobody. What expires unbound
goes back like any unspent grant. The counts that this leaves behind (granted, returned) become the transfer's when it
is bound, so that the cumulative ``wanted_bytes`` of its request means to the coordinator what it means to us.

Announcements are matched in order within a *channel*: the messages of one source, destination, group and tag. A plan
that turns out otherwise (a shorter last one, other sizes, fewer or more than announced) costs no more than a slot. One
whose message doesn't come is forgotten a while after its time: it would else be taken for the channel's next message,
and each one after that be off by one, for ever.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from heapq import heappop, heappush

from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.wire.envelope import Envelope

ANNOUNCEMENTS_PER_CHANNEL = 4096
"""Announcements kept for messages that were never posted (a shorter last batch, say); the oldest go first."""
OVERDUE_NS = 10_000_000_000
"""So long after the time for which it was announced a message counts as one that will not come. A stage that hangs for
less (a checkpoint, a compilation) keeps its plan; one that hangs for longer loses only its places in the queue."""

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


@dataclasses.dataclass(slots=True, eq=False)
class Plan:
    """One announcement, until its message is posted."""

    number: int
    channel: Channel
    nbytes: int
    link: LinkName
    peer: AgentName
    ready_ns: int
    leaves_ns: int = 0
    """When its last byte is predicted to leave; 0: unknown."""
    foretold: bool = False
    """The receiver was told when to expect it."""


def channel_of(envelope: Envelope) -> Channel:
    """What announcements are matched by."""
    return (envelope.job, envelope.src_rank, envelope.dst_rank, envelope.group, envelope.tag)


class Announcements:
    """The bookkeeping alone: what is said to whom is :class:`~proxyd.core.announcer.Announcer`'s business."""

    def __init__(self) -> None:
        self._waiting: dict[Channel, deque[Plan]] = {}
        self._plans: dict[int, Plan] = {}
        self._overdue: list[tuple[int, int]] = []
        """(when it is given up, number); those that are over are dropped as they come up."""
        self.fulfilled = self.resized = self.unposted = 0
        """How plans turned out: as announced, of another size, not at all."""
        self._ahead: dict[int, Ahead] = {}
        self._next = 1

    def __len__(self) -> int:
        """Announcements that are not over."""
        return len(self._ahead)

    def add(
        self, envelope: Envelope, link: LinkName, peer: AgentName, ready_ns: int, *, asks: bool
    ) -> tuple[Plan, list[Plan]]:
        """A new one, and those that had to be forgotten for it.

        :param asks: it may be granted ahead. One that needs no grant only keeps the order of its channel.
        """
        channel = channel_of(envelope)
        waiting = self._waiting.setdefault(channel, deque())
        forgotten = []
        if len(waiting) >= ANNOUNCEMENTS_PER_CHANNEL:
            self.unposted += 1
            forgotten.append(waiting.popleft())
            del self._plans[forgotten[0].number]
        plan = Plan(self._next, channel, envelope.nbytes, link, peer, ready_ns)
        self._next += 1
        if asks:
            self._ahead[plan.number] = Ahead(link)
        waiting.append(plan)
        self._plans[plan.number] = plan
        heappush(self._overdue, (ready_ns + OVERDUE_NS, plan.number))
        return plan, forgotten

    def take(self, envelope: Envelope) -> Plan | None:
        """The announcement that a posted message fulfils."""
        channel = channel_of(envelope)
        waiting = self._waiting.get(channel)
        if not waiting:
            return None
        plan = waiting.popleft()
        del self._plans[plan.number]
        if not waiting:
            del self._waiting[channel]
        if plan.nbytes == envelope.nbytes:
            self.fulfilled += 1
        else:
            self.resized += 1
        return plan

    def forget_source(self, source: EndpointName) -> list[Plan]:
        """A trainer is gone: what it had announced and not posted."""
        plans: list[Plan] = []
        for channel in [channel for channel in self._waiting if channel[:2] == (source.job, source.rank)]:
            plans += self._waiting.pop(channel)
        for plan in plans:
            del self._plans[plan.number]
        self.unposted += len(plans)
        return plans

    def overdue_ns(self) -> int | None:
        """When :meth:`forget_overdue` has something to do."""
        while self._overdue and self._overdue[0][1] not in self._plans:
            heappop(self._overdue)
        return self._overdue[0][0] if self._overdue else None

    def forget_overdue(self, now_ns: int) -> list[Plan]:
        """What was announced and is not posted a while after its time."""
        plans: list[Plan] = []
        while (due_ns := self.overdue_ns()) is not None and due_ns <= now_ns:
            plan = self._plans.pop(heappop(self._overdue)[1])
            waiting = self._waiting[plan.channel]
            waiting.remove(plan)
            if not waiting:
                del self._waiting[plan.channel]
            plans.append(plan)
        self.unposted += len(plans)
        return plans

    def get(self, number: int) -> Ahead | None:
        """What is known of one; None: it is over, needs no grants, or never was."""
        return self._ahead.get(number)

    def end(self, number: int) -> Ahead | None:
        """It is over."""
        return self._ahead.pop(number, None)

    def session_began(self, link: LinkName) -> None:
        """A new session's accounts begin at zero. The new coordinator knows nothing of announcements made before."""
        for ahead in self._ahead.values():
            if ahead.link == link:
                ahead.granted_bytes = ahead.returned_bytes = 0
