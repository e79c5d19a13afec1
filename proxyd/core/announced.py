"""Announcements at the coordinator: the place that each keeps in the queue, and when it is granted ahead.

A message that is announced keeps the place of its announcement. Where the agent is *far* (its control round trip is
longer than :data:`FAR_NS`) asking when the data exists would idle the link for a round trip, so the announcement itself
joins the queue early enough that the first grant arrives with the data. It asks for what goes out until the request
can be answered: a slot and a round trip's worth, never more than the message.

Plans are hints. What is granted ahead and not used comes back after a slot's time, no announcement is granted ahead
twice, and a session may have :data:`MOST_AHEAD` of them unproven in a second: a plan that turns out otherwise costs a
slot now and then, not the link.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from proxyd.core.allocation import CLASSES, Waiting
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import Announce, Request
from proxyd.wire.envelope import MAX_TRANSFER_BYTES, TrafficClass

if TYPE_CHECKING:
    from proxyd.core.grants import LinkGranter

FAR_NS = 2_000_000
"""A shorter control round trip is lost in hand-overs anyway: there an announcement only keeps its place."""
EARLY_NS = 1_000_000
"""A grant arrives so long before its data: agents and coordinator wait for their hosts now and then."""
TTL_NS = 20_000_000
"""How long an unbound slot waits for its message: a slot's time."""
MOST_AHEAD = 2
FORGET_NS = 1_000_000_000
NO_TRANSFER = TransferId(0, 0)
MOST_PLACES = 10_000
"""Announcements of one session; the oldest go first."""


@dataclasses.dataclass(slots=True)
class Place:
    """One announcement whose message hasn't been asked for."""

    order: int
    waiting: Waiting | None = None
    """What joins the queue when its time has come; None: it only keeps its place."""
    ahead_bytes: int = 0


class Places:
    """Announcements of one session."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._due: list[tuple[int, int]] = []
        """(when it may join the queue, number)."""
        self._unproven: dict[int, int] = {}
        """Granted ahead and not asked for: number -> until when that counts."""

    def __len__(self) -> int:
        return len(self._places)

    def add(self, number: int, place: Place, joins_ns: int) -> Waiting | None:
        """Keep a place. Answers what has to leave the queue because there were too many, or the number came twice."""
        gone = self.drop(number)
        if gone is None and len(self._places) >= MOST_PLACES:
            gone = self.drop(next(iter(self._places)))
        self._places[number] = place
        if place.waiting is not None:
            heappush(self._due, (joins_ns, number))
        return gone.waiting if gone is not None else None

    def take(self, number: int) -> Place | None:
        """Its message is asked for: what was granted ahead has proven right."""
        self._unproven.pop(number, None)
        return self._places.pop(number, None)

    def drop(self, number: int) -> Place | None:
        """It was withdrawn, or is forgotten."""
        return self._places.pop(number, None)

    def next_ns(self, now_ns: int) -> int | None:
        """When :meth:`join` has something to do."""
        while self._due and self._due[0][1] not in self._places:
            heappop(self._due)
        if not self._due:
            return None
        if len(self._unproven) < MOST_AHEAD:
            return self._due[0][0]
        return max(self._due[0][0], min(self._unproven.values()))

    def join(self, now_ns: int) -> list[Place]:
        """Those that join the queue now."""
        for number in [number for number, until_ns in self._unproven.items() if until_ns <= now_ns]:
            del self._unproven[number]
        joined: list[Place] = []
        while self._due and self._due[0][0] <= now_ns and len(self._unproven) < MOST_AHEAD:
            _, number = heappop(self._due)
            place = self._places.get(number)
            if place is not None:
                self._unproven[number] = now_ns + FORGET_NS
                joined.append(place)
        return joined

    def waiting(self) -> list[Waiting]:
        """All that may be in the queue."""
        return [place.waiting for place in self._places.values() if place.waiting is not None]


def joins_ns(now_ns: int, ready_in_ns: int, control_rtt_ns: int) -> int:
    """When an announcement that came just now joins the queue: its grant then arrives a little before its data.

    ``ready_in_ns`` counted from when it was said, half a round trip ago; the grant takes the other half.
    """
    return now_ns + max(0, ready_in_ns - control_rtt_ns - EARLY_NS)


def ahead_bytes(nbytes: int, rate_bytes_per_s: int, control_rtt_ns: int, slot_bytes: int, chunk_bytes: int) -> int:
    """What is granted ahead: what leaves until the message's own request can be answered, in whole chunks."""
    wanted = slot_bytes + rate_bytes_per_s * control_rtt_ns // 1_000_000_000
    return min(nbytes, max(chunk_bytes, wanted // chunk_bytes * chunk_bytes))


class Announced:
    """Announcements of all sessions.

    :param granter_of: the granter of a link that sessions may be granted on; None: there is none, or it only observes.
    :param lane_of: makes sure that a session has a lane on a link.
    :param decide: told after the queue of a link changed.
    :param next_order: a place at the end of the line.
    :param wake: told when :meth:`tick` has something to do.
    """

    def __init__(
        self,
        granter_of: Callable[[LinkName], LinkGranter | None],
        lane_of: Callable[[LinkName, int], object],
        decide: Callable[[LinkName, int], None],
        next_order: Callable[[], int],
        wake: Callable[[int], None],
    ) -> None:
        self._granter_of = granter_of
        self._lane_of = lane_of
        self._decide = decide
        self._next_order = next_order
        self._wake = wake
        self._places: dict[int, Places] = {}
        """By session."""
        self.joins_ns: dict[int, int] = {}
        """When announcements of a session may join the queue."""

    def announce(self, session: int, agent: AgentName, control_rtt_ns: int, message: Announce, now_ns: int) -> None:
        """A message will come: keep its place. With 0 bytes: it will not."""
        places = self._places.setdefault(session, Places())
        if not message.nbytes:
            dropped = places.drop(message.announcement)
            self._leave(dropped.waiting if dropped is not None else None, "withdrawn", now_ns)
            return
        place = Place(self._next_order())
        granter = self._granter_of(message.link) if control_rtt_ns >= FAR_NS else None
        if granter is not None and message.link.src_site == agent.site and message.traffic in CLASSES:
            self._lane_of(message.link, session)
            place.waiting = Waiting(
                NO_TRANSFER,
                session,
                message.link,
                agent,
                message.job,
                TrafficClass(message.traffic),
                place.order,
                now_ns,
                announcement=message.announcement,
            )
            sizes, pace = granter.sizes, granter.pace_bytes_per_s(now_ns)
            nbytes = min(message.nbytes, MAX_TRANSFER_BYTES)
            place.ahead_bytes = ahead_bytes(nbytes, pace, control_rtt_ns, sizes.slot_bytes, sizes.chunk_bytes)
        joins_at_ns = joins_ns(now_ns, max(0, message.ready_in_ns), control_rtt_ns)
        self._leave(places.add(message.announcement, place, joins_at_ns), "too many announcements", now_ns)
        self._join(session, now_ns)

    def asked_for(self, session: int, message: Request, now_ns: int) -> Waiting:
        """A new transfer, in the place of its announcement if it had one; what was granted ahead to that is its own."""
        places = self._places.get(session)
        place = places.take(message.announcement) if places is not None else None
        ahead = place.waiting if place is not None else None
        if ahead is not None and session in self.joins_ns:
            # It has proven right: the next one may join, after this.
            self.joins_ns[session] = now_ns
            self._wake(now_ns)
        traffic = TrafficClass(message.traffic)
        if ahead is not None and (ahead.link, ahead.job, ahead.traffic) == (message.link, message.job, traffic):
            ahead.transfer, ahead.announcement, ahead.destination = message.transfer, 0, message.destination
            ahead.since_ns = now_ns
            return ahead
        order = place.order if place is not None and ahead is None else self._next_order()
        waiting = Waiting(
            message.transfer, session, message.link, message.destination, message.job, traffic, order, now_ns
        )
        if ahead is not None:
            self._leave(ahead, "its message is of another kind than announced", now_ns)
            # The agent books what came for the announcement to the message, if it goes over the same link.
            waiting.granted_bytes = waiting.wanted_bytes = ahead.granted_bytes if ahead.link == message.link else 0
        return waiting

    def session_ended(self, session: int) -> list[Waiting]:
        """Forget a session. Answers what of it may be in a queue."""
        self.joins_ns.pop(session, None)
        places = self._places.pop(session, None)
        return places.waiting() if places is not None else []

    def tick(self, now_ns: int) -> None:
        """Do what is due."""
        for session in [session for session, due_ns in self.joins_ns.items() if due_ns <= now_ns]:
            self._join(session, now_ns)

    def _join(self, session: int, now_ns: int) -> None:
        """Announcements whose data is about to exist join the queue."""
        places = self._places[session]
        for place in places.join(now_ns):
            waiting = place.waiting
            granter = self._granter_of(waiting.link) if waiting is not None else None
            if waiting is not None and granter is not None:
                waiting.reason = "announced: granted ahead"
                if granter.queue.want(waiting, place.ahead_bytes):
                    waiting.waits.begin(now_ns)
                    self._decide(waiting.link, now_ns)
        due_ns = places.next_ns(now_ns)
        if due_ns is None:
            self.joins_ns.pop(session, None)
        else:
            self.joins_ns[session] = due_ns = max(due_ns, now_ns + 1)
            self._wake(due_ns)

    def _leave(self, waiting: Waiting | None, reason: str, now_ns: int) -> None:
        """An announcement needs no place any more."""
        granter = self._granter_of(waiting.link) if waiting is not None else None
        if waiting is not None and granter is not None:
            queued = waiting.queued
            granter.queue.end(waiting, reason)
            if queued:
                self._decide(waiting.link, now_ns)
