"""What an agent does with announcements: it keeps their places in the queue, and foretells their arrival.

The coordinator hears of each message that will need grants (:mod:`proxyd.core.announced` grants ahead). The receiving
agent hears when to expect it, before there is a transfer that could be named: FORETELL.

Theory of the prediction. A link under grants serves one message after the other, so when one ends is known once three
things are: when it will be there to send, when the link is free for it, and the link's rate::

    starts = max(ready, the link is free)      free: what the coordinator says waits, or, if that takes longer, what
    leaves = starts + bytes / rate                   this agent still has to send, or when what it announced
                                                     with the time before this one's has left

The last byte arrives one way after it has left, and the word of it one way after it was said: the receiver counts what
it is told, ``leaves``, from when it hears it.

It is told once, and again by EXPECT when the message has been posted and has its place in the queue. What others will
announce is not in it: of all predictions it is the least certain, and says so (``uncertainty_ns``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import attrgetter

from proxyd.core.agent_config import AgentConfig
from proxyd.core.announcing import Announcements, Plan
from proxyd.core.effects import AgentEffect, ToCoordinator, ToPeer
from proxyd.core.ids import AgentName, EndpointName, LinkName
from proxyd.core.linkbook import NANOS, LinkBook
from proxyd.core.messages import Announce, DirectoryEntry
from proxyd.core.peering import Peer
from proxyd.wire import peer as wire
from proxyd.wire.envelope import Envelope, TrafficClass

_by_time = attrgetter("ready_ns")


class Announcer:
    """Appends to ``effects``. ``unsent_bytes`` answers what this agent still has to send on a link."""

    def __init__(
        self,
        config: AgentConfig,
        book: Callable[[LinkName], LinkBook],
        unsent_bytes: Callable[[LinkName], int],
        peers: dict[AgentName, Peer],
        effects: list[AgentEffect],
    ) -> None:
        self._config = config
        self._book = book
        self._unsent_bytes = unsent_bytes
        self._peers = peers
        self._effects = effects
        self.announced = Announcements()
        self._due: dict[LinkName, list[Plan]] = {}
        """What is announced and not posted, by the time for which it was."""

    def announce(self, envelope: Envelope, entry: DirectoryEntry | None, ready_in_ns: int, now_ns: int) -> None:
        """A trainer will post this message in ``ready_in_ns``: keep its place in the queue, and grant ahead."""
        if entry is None or entry.agent.site == self._config.agent.site:
            return
        book = self._book(LinkName(self._config.agent.site, entry.agent.site))
        asks = book.coordinator is not None and envelope.nbytes > self._config.unscheduled_bytes
        ready_ns = now_ns + ready_in_ns
        plan, forgotten = self.announced.add(envelope, book.link, entry.agent, ready_ns, asks=asks)
        for old in forgotten:
            self._dismiss(old, now_ns)
        if asks and book.coordinator is not None:
            said = Announce(plan.number, book.link, envelope.job, envelope.traffic_class, envelope.nbytes, ready_in_ns)
            self._effects.append(ToCoordinator(book.coordinator, said))
        due = self._due.setdefault(book.link, [])
        place = bisect_right(due, ready_ns, key=_by_time)
        due.insert(place, plan)
        self._foretell(plan, due[place - 1] if place else None, book, now_ns)

    def take(self, envelope: Envelope) -> int:
        """A message is posted: the number under which it may have been granted ahead; 0: it was not."""
        plan = self.announced.take(envelope)
        if plan is None:
            return 0
        self._due[plan.link].remove(plan)
        return plan.number if self.announced.get(plan.number) is not None else 0

    def forget_source(self, source: EndpointName, now_ns: int) -> None:
        """A trainer is gone: it posts nothing more of what it announced."""
        for plan in self.announced.forget_source(source):
            self._dismiss(plan, now_ns)

    def tick(self, now_ns: int) -> None:
        """Forget what is long overdue."""
        for plan in self.announced.forget_overdue(now_ns):
            self._dismiss(plan, now_ns)

    def withdraw(self, number: int, now_ns: int) -> None:
        """An announced message will not come, or needs no grants: what was granted ahead to it goes back."""
        ahead = self.announced.end(number)
        if ahead is None or ahead.transfer is not None:
            return
        book = self._book(ahead.link)
        book.drop_announcement(number, now_ns)
        if book.coordinator is not None:
            gone = Announce(number, ahead.link, "", TrafficClass.BULK, 0, 0)
            self._effects.append(ToCoordinator(book.coordinator, gone))

    def _dismiss(self, plan: Plan, now_ns: int) -> None:
        self._due[plan.link].remove(plan)
        self.withdraw(plan.number, now_ns)
        if plan.foretold:
            self._tell(plan, 0)

    def _foretell(self, plan: Plan, before: Plan | None, book: LinkBook, now_ns: int) -> None:
        info = book.info
        if info is None or info.rate_bytes_per_s <= 0:
            return
        rate = info.rate_bytes_per_s
        waits_ns = info.waiting_bytes * NANOS // rate - max(0, now_ns - book.last_heard_ns)
        free_ns = now_ns + max(0, waits_ns, self._unsent_bytes(book.link) * NANOS // rate)
        starts_ns = max(free_ns, plan.ready_ns, before.leaves_ns if before is not None else 0)
        plan.leaves_ns = starts_ns + book.lasts_ns(plan.peer, plan.nbytes, rate)
        self._tell(plan, max(1, plan.leaves_ns - now_ns))

    def _tell(self, plan: Plan, finish_in_ns: int) -> None:
        peer = self._peers.get(plan.peer)
        if peer is None or not peer.connected:
            return  # it forgets what it was told when the connection breaks, too
        plan.foretold = True
        job, src_rank, dst_rank, group, tag = plan.channel
        uncertainty_ns = max(5_000_000, finish_in_ns // 4)
        frame = wire.Foretell(
            plan.number, job, src_rank, dst_rank, group, tag, plan.nbytes, finish_in_ns, uncertainty_ns
        )
        self._effects.append(ToPeer(plan.peer, False, wire.NO_TRANSFER, frame))
