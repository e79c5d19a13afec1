"""Which transfer is next, and which part of the link each sender gets.

Order: traffic class first (pipeline, sync, bulk), first come within it. A transfer keeps the place of its first request
(or of its announcement) for life, so one that needs more bytes later (a chunk was lost, a grant expired) is served
before those that came after it.

Every operation is logarithmic in the number of waiting transfers; nothing scans them. The heaps are lazy: a transfer
that was cancelled or is fully granted stays in its heap until it reaches the top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush

from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.reasons import Waits
from proxyd.wire.envelope import TrafficClass

CLASSES = tuple(TrafficClass)


@dataclasses.dataclass(slots=True, eq=False)
class Waiting:
    """A transfer that asks for grants, or has asked for them."""

    transfer: TransferId
    session: int
    link: LinkName
    destination: AgentName
    job: str
    traffic: TrafficClass
    order: int
    since_ns: int
    wanted_bytes: int = 0
    granted_bytes: int = 0
    ended: bool = False
    queued: bool = False
    """In its session's heap."""
    reason: str = "queued"
    """Why it stands where it stands: the latest decision on it, in words."""
    waits: Waits = dataclasses.field(default_factory=Waits)
    """How long it waited for what."""

    @property
    def need_bytes(self) -> int:
        """Wanted and not granted yet."""
        return self.wanted_bytes - self.granted_bytes


class ClassQueue:
    """Waiting transfers of one class, by arrival, and by arrival within each session."""

    __slots__ = ("_by_session", "_heads", "count", "need_bytes")

    def __init__(self) -> None:
        self._by_session: dict[int, list[tuple[int, int, Waiting]]] = {}
        self._heads: list[tuple[int, int]] = []
        self.count = 0
        self.need_bytes = 0

    def add(self, waiting: Waiting) -> None:
        """Put a transfer with a need in its place."""
        heap = self._by_session.setdefault(waiting.session, [])
        heappush(heap, (waiting.order, waiting.transfer.sequence, waiting))
        if heap[0][2] is waiting:
            heappush(self._heads, (waiting.order, waiting.session))
        waiting.queued = True
        self.count += 1
        self.need_bytes += waiting.need_bytes

    def left(self, waiting: Waiting, need_bytes: int) -> None:
        """A queued transfer ended or needs no more; ``need_bytes``: what it was still counted with."""
        waiting.queued = False
        self.count -= 1
        self.need_bytes -= need_bytes

    def head(self, session: int) -> Waiting | None:
        """First in line of one session."""
        heap = self._by_session.get(session)
        if heap is None:
            return None
        stale = False
        while heap:
            waiting = heap[0][2]
            if waiting.queued:
                if stale:
                    heappush(self._heads, (waiting.order, session))
                return waiting
            heappop(heap)
            stale = True
        del self._by_session[session]
        return None

    def first(self) -> Waiting | None:
        """First in line of all."""
        heads = self._heads
        while heads:
            order, session = heads[0]
            waiting = self.head(session)
            if waiting is not None and waiting.order == order:
                return waiting
            heappop(heads)
        return None

    def in_order(self) -> Iterator[Waiting]:
        """The first in line of each session, in order. Stop early: the cost is per session looked at."""
        seen: list[tuple[int, int]] = []
        sessions: set[int] = set()
        try:
            while (waiting := self.first()) is not None:
                entry = heappop(self._heads)
                if waiting.session not in sessions:
                    seen.append(entry)
                    sessions.add(waiting.session)
                    yield waiting
        finally:
            for entry in seen:
                heappush(self._heads, entry)

    def sessions(self) -> list[int]:
        """Sessions with a waiting transfer, sorted."""
        return sorted(session for session in list(self._by_session) if self.head(session) is not None)

    def __iter__(self) -> Iterator[Waiting]:
        """Every waiting transfer, by arrival: for status, linear in their number."""
        live = {item[0]: item[2] for heap in self._by_session.values() for item in heap if item[2].queued}
        return iter([live[order] for order in sorted(live)])


class LinkQueue:
    """Waiting transfers of one link."""

    __slots__ = ("classes",)

    def __init__(self) -> None:
        self.classes = (ClassQueue(), ClassQueue(), ClassQueue())
        """By :class:`TrafficClass`."""

    @property
    def count(self) -> int:
        """Waiting transfers."""
        pipeline, sync, bulk = self.classes
        return pipeline.count + sync.count + bulk.count

    def waits_below(self, traffic: TrafficClass) -> bool:
        """Someone of a less urgent class waits."""
        _, sync, bulk = self.classes
        return (sync.count > 0 and traffic < TrafficClass.SYNC) or (bulk.count > 0 and traffic < TrafficClass.BULK)

    @property
    def need_bytes(self) -> int:
        """Bytes that wait for a grant."""
        return sum(queue.need_bytes for queue in self.classes)

    def ahead_of(self, traffic: TrafficClass) -> tuple[int, int]:
        """(transfers, bytes) that a newcomer of ``traffic`` waits for."""
        queues = self.classes[: traffic + 1]
        return sum(queue.count for queue in queues), sum(queue.need_bytes for queue in queues)

    def want(self, waiting: Waiting, wanted_bytes: int) -> bool:
        """Raise a transfer's need to a total of ``wanted_bytes``; False when that is no news (a repeated request)."""
        more = wanted_bytes - waiting.wanted_bytes
        if waiting.ended or more <= 0:
            return False
        waiting.wanted_bytes = wanted_bytes
        if waiting.queued:
            self.classes[waiting.traffic].need_bytes += more
        elif waiting.need_bytes > 0:
            self.classes[waiting.traffic].add(waiting)
        return True

    def granted(self, waiting: Waiting, nbytes: int) -> None:
        """Take ``nbytes`` off a transfer's need; at 0 it leaves the queue."""
        queue = self.classes[waiting.traffic]
        waiting.granted_bytes += nbytes
        queue.need_bytes -= nbytes
        if waiting.need_bytes <= 0:
            queue.left(waiting, waiting.need_bytes)

    def end(self, waiting: Waiting, reason: str) -> None:
        """The transfer is done, cancelled or its agent is gone."""
        if waiting.queued:
            self.classes[waiting.traffic].left(waiting, waiting.need_bytes)
        waiting.ended = True
        waiting.reason = reason

    def oldest(self, eligible: Callable[[int], bool]) -> Waiting | None:
        """Who has waited longest, whatever its class, among sessions that are ``eligible``."""
        best: Waiting | None = None
        for queue in self.classes:
            for waiting in queue.in_order():
                if eligible(waiting.session):
                    if best is None or waiting.order < best.order:
                        best = waiting
                    break
        return best

    def __iter__(self) -> Iterator[Waiting]:
        """Every waiting transfer, in the order of their turns."""
        for queue in self.classes:
            yield from queue


def fair_shares(total: int, ceilings: Iterable[int]) -> list[int]:
    """Split ``total`` equally among members, none above its ceiling; what one can't use goes to the others.

    The sum never exceeds ``total`` (integer division only rounds down).
    """
    limits = list(ceilings)
    shares = [0] * len(limits)
    left = total
    for place, index in enumerate(sorted(range(len(limits)), key=lambda i: limits[i])):
        shares[index] = min(limits[index], left // (len(limits) - place))
        left -= shares[index]
    return shares
