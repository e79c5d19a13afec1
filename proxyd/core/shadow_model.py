"""What would have happened: agents as fluids that obey a shadow's grants, on a link as fast as the real one.

Theory of operation
-------------------
A modelled sender holds the grants that reached it, in order, and its bytes leave at the granted rate. They enter one
first-in first-out queue that is served at the link's rate; a byte is acknowledged one round trip after it was served.
So a queue stands where grants overlap or exceed the rate, and nowhere else. Senders report as agents do: at intervals
while they send, and when their backlog leaves within the lead time. Control messages take half a control round trip.

Not in the model: TCP below the grants (cold windows, its losses) and hosts that are late. The first makes real grants a
little slower after idle times, the second costs what :mod:`proxyd.core.window` keeps in reserve for it.

Time is whatever :meth:`ShadowModel.run` is told; the model runs through its own events at their own times, however
late it is called, and is thus the same in every replay.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from heapq import heappop, heappush

from proxyd.core.allocation import Waiting
from proxyd.core.bandwidth import NANOS, LinkEstimator
from proxyd.core.grants import LinkGranter
from proxyd.core.ids import AgentName, TransferId
from proxyd.core.messages import Grant, Pace, Report

SEGMENT_BYTES = 1448
RATE_SPAN_NS = 100_000_000
"""Agents report at different times, up to 5 ms apart: over this span that is 5 %."""
RATE_STEP_NS = 20_000_000
RATE_WINDOW_NS = 5 * NANOS
RATE_KNOWN_NS = NANOS
"""Time of traffic until which what was configured or estimated counts too: TCP's windows are still opening."""


class _Kind(enum.IntEnum):
    GRANTED = 0
    TICK = 1
    REPORTED = 2
    LEAD = 3
    DONE = 4


@dataclasses.dataclass(slots=True)
class _Held:
    transfer: TransferId
    left_bytes: int
    rate_bytes_per_s: int
    start_ns: int
    lead_ns: int


@dataclasses.dataclass(slots=True)
class ShadowTransfer:
    """One transfer in the shadow."""

    waiting: Waiting
    asked_ns: int
    wanted_bytes: int
    left_bytes: int = 0
    first_left_ns: int = -1
    """When its first byte left; -1: not yet."""


@dataclasses.dataclass(slots=True)
class _Sender:
    session: int
    agent: AgentName
    held: deque[_Held] = dataclasses.field(default_factory=deque)
    at_ns: int = 0
    """Up to when it was followed."""
    left_bytes: int = 0
    returned_bytes: int = 0
    delivered_bytes: int = 0
    acks: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    """(time, bytes that had left): acknowledged at that time."""
    retransmits: int = 0
    ticking: bool = False

    def delivered(self, now_ns: int) -> int:
        acks = self.acks
        while acks and acks[0][0] <= now_ns:
            self.delivered_bytes = acks.popleft()[1]
        return self.delivered_bytes

    @property
    def backlog_bytes(self) -> int:
        return sum(held.left_bytes for held in self.held)

    def leaves_ns(self, now_ns: int) -> int:
        """When its backlog will have left."""
        at_ns = now_ns
        for held in self.held:
            at_ns = max(at_ns, held.start_ns) + held.left_bytes * NANOS // held.rate_bytes_per_s
        return at_ns


class ShadowLine:
    """What is known of the real link: the modelled one has its rate and its round trip.

    Where the capacity is configured and believed, that is its rate. Else it is what arrived within a tenth of a second
    in the best tenth of the time in which anything did, lately. The estimate that grants go by is no help here: under
    unpaced bursts it jumps, up with every repaired hole and down with every loss, which harms nobody as long as nothing
    is granted. Nor is the most that ever arrived: after a stall it is what had been held up as well.
    """

    __slots__ = ("_active_ns", "_arrived", "_arrived_bytes", "_estimator", "_last_ns", "_live", "_rate", "_samples")

    def __init__(self, estimator: LinkEstimator, *, live: bool) -> None:
        self._estimator = estimator
        self._live = live
        self._arrived: deque[tuple[int, int]] = deque()
        """(time, bytes that had arrived by then), over a little more than one span."""
        self._arrived_bytes = 0
        self._samples: deque[tuple[int, int]] = deque()
        """(active time, rate over the span before)."""
        self._rate = 0
        self._active_ns = self._last_ns = 0
        """A clock that stands while nothing arrives: a pause makes no line slower."""

    def arrived(self, nbytes: int, now_ns: int) -> None:
        """More has arrived at the far end, as an agent reports."""
        if not self._live or nbytes <= 0:
            return
        self._arrived_bytes += nbytes
        arrived = self._arrived
        arrived.append((now_ns, self._arrived_bytes))
        span_ns = max(RATE_SPAN_NS, 2 * self._estimator.min_rtt_ns(now_ns))
        while len(arrived) > 1 and arrived[1][0] <= now_ns - span_ns:
            arrived.popleft()
        self._active_ns += min(span_ns, now_ns - self._last_ns)
        self._last_ns = now_ns
        samples = self._samples
        if samples and self._active_ns - samples[-1][0] < RATE_STEP_NS:
            return
        begun_ns, before = arrived[0]
        samples.append((self._active_ns, (self._arrived_bytes - before) * NANOS // max(span_ns, now_ns - begun_ns)))
        while samples[0][0] < self._active_ns - RATE_WINDOW_NS:
            samples.popleft()
        rates = sorted(rate for _, rate in samples)
        self._rate = rates[len(rates) * 9 // 10]

    def rate_bytes_per_s(self, now_ns: int) -> int:
        """Payload that it carries."""
        if self._active_ns < RATE_KNOWN_NS:
            return max(self._rate, self._estimator.rate_bytes_per_s(now_ns))
        return self._rate

    def rtt_ns(self, now_ns: int) -> int:
        """Round trip without a queue."""
        return self._estimator.min_rtt_ns(now_ns)

    def buffer_ns(self, now_ns: int) -> int:
        """The longest that its queue can be; 0: not known."""
        return self._estimator.buffer_bytes * NANOS // self.rate_bytes_per_s(now_ns)


class ShadowModel:
    """Modelled senders and link around a granter of their own.

    :param granter: decides; nobody else may call it.
    """

    def __init__(self, granter: LinkGranter, line: ShadowLine, control_rtt_ns: int) -> None:
        self.granter = granter
        self.finished: list[tuple[ShadowTransfer, int]] = []
        """Transfers that have ended since they were last taken, with the time at which the coordinator would have
        heard of it."""
        self.transfers: dict[TransferId, ShadowTransfer] = {}
        self.queue_samples: list[int] = []
        """Nanoseconds of queue at each report since they were last taken."""
        self._line = line
        self._control_rtt_ns = control_rtt_ns
        self._senders: dict[int, _Sender] = {}
        self._events: list[tuple[int, int, _Kind, int, Grant | Pace | Report | TransferId | None]] = []
        self._order = 0
        self._now_ns = 0
        self._free_ns = 0
        """When the link will have served all that is in its queue."""

    # --------------------------------------------------------------------------------------------------------- inputs

    def request(self, session: int, agent: AgentName, waiting: Waiting, wanted_bytes: int, now_ns: int) -> None:
        """A transfer asks, as it asks in reality."""
        self.run(now_ns)
        if session not in self._senders:
            self._senders[session] = _Sender(session, agent)
        self.granter.lane(session, agent)
        self.transfers[waiting.transfer] = ShadowTransfer(waiting, now_ns, wanted_bytes)
        self.granter.queue.want(waiting, wanted_bytes)
        self._decide(now_ns)

    def drop(self, transfer: TransferId, now_ns: int) -> None:
        """A transfer was given up: it isn't judged, and what it holds goes back."""
        self.run(now_ns)
        known = self.transfers.pop(transfer, None)
        if known is None:
            return
        session = known.waiting.session
        self.granter.queue.end(known.waiting, "given up")
        sender = self._senders.get(session)
        if sender is not None:
            kept = deque(held for held in sender.held if held.transfer != transfer)
            sender.returned_bytes += sender.backlog_bytes - sum(held.left_bytes for held in kept)
            sender.held = kept
            self._say(sender, now_ns)
        self._decide(now_ns)

    def session_ended(self, session: int, now_ns: int) -> None:
        """An agent is gone, with all that it had asked for."""
        self.run(now_ns)
        sender = self._senders.pop(session, None)
        if sender is None:
            return
        for transfer in [t for t, known in self.transfers.items() if known.waiting.session == session]:
            self.granter.queue.end(self.transfers.pop(transfer).waiting, "its agent's session ended")
        self.granter.session_ended(session, sender.agent, 0, now_ns)
        self._decide(now_ns)

    # ----------------------------------------------------------------------------------------------------------- time

    def next_ns(self) -> int | None:
        """The model's next event."""
        due_ns = self._events[0][0] if self._events else None
        if self.transfers or due_ns is not None:
            decided_ns = self.granter.next_deadline_ns(self._now_ns)
            if decided_ns is not None:
                decided_ns = max(decided_ns, self._now_ns + 1)
                due_ns = decided_ns if due_ns is None else min(due_ns, decided_ns)
        return due_ns

    def run(self, until_ns: int) -> None:
        """Live through everything up to a time."""
        while (due_ns := self.next_ns()) is not None and due_ns <= until_ns:
            self._now_ns = max(self._now_ns, due_ns)
            if self._events and self._events[0][0] <= due_ns:
                _, _, kind, session, what = heappop(self._events)
                self._happen(kind, session, what)
            else:
                self._decide(self._now_ns)
        self._now_ns = max(self._now_ns, until_ns)

    def _at(
        self, time_ns: int, kind: _Kind, session: int, what: Grant | Pace | Report | TransferId | None = None
    ) -> None:
        self._order += 1
        heappush(self._events, (time_ns, self._order, kind, session, what))

    def _happen(self, kind: _Kind, session: int, what: Grant | Pace | Report | TransferId | None) -> None:
        now_ns = self._now_ns
        sender = self._senders.get(session)
        if isinstance(what, TransferId):
            if (known := self.transfers.pop(what, None)) is not None:
                self.granter.finished(known.waiting.traffic, known.wanted_bytes)
                self.granter.queue.end(known.waiting, "done")
                self.finished.append((known, now_ns))
        elif sender is None:
            return
        elif isinstance(what, Report):
            self.granter.report(self.granter.lane(session, sender.agent), what, now_ns)
            self._decide(now_ns)
        elif isinstance(what, Grant):
            self._take(sender, what, now_ns)
        elif isinstance(what, Pace):
            self._advance(now_ns)
            for held in sender.held:
                held.rate_bytes_per_s = what.rate_bytes_per_s
            self._plan_lead(sender, now_ns)
        elif kind is _Kind.TICK:
            self._tick(sender, now_ns)
        else:
            self._lead(sender, now_ns)

    def _decide(self, now_ns: int) -> None:
        for session, message in self.granter.decide(now_ns):
            if isinstance(message, Grant | Pace):
                self._at(now_ns + self._control_rtt_ns // 2, _Kind.GRANTED, session, message)

    # -------------------------------------------------------------------------------------------------------- senders

    def _take(self, sender: _Sender, grant: Grant, now_ns: int) -> None:
        self._advance(now_ns)
        if grant.transfer in self.transfers:
            start_ns = now_ns + grant.start_in_ns
            sender.held.append(_Held(grant.transfer, grant.nbytes, grant.rate_bytes_per_s, start_ns, grant.lead_ns))
            self._plan_lead(sender, now_ns)
        else:
            sender.returned_bytes += grant.nbytes
        if not sender.ticking:
            sender.ticking = True
            self._tick(sender, now_ns)

    def _tick(self, sender: _Sender, now_ns: int) -> None:
        self._say(sender, now_ns)
        if sender.held or sender.delivered(now_ns) < sender.left_bytes:
            self._at(now_ns + self.granter.sizes.report_ns, _Kind.TICK, sender.session)
        else:
            sender.ticking = False

    def _plan_lead(self, sender: _Sender, now_ns: int) -> None:
        if sender.held:
            due_ns = max(now_ns, sender.leaves_ns(now_ns) - sender.held[-1].lead_ns)
            self._at(due_ns, _Kind.LEAD, sender.session)

    def _lead(self, sender: _Sender, now_ns: int) -> None:
        """Say that the backlog is about to have left, if it still is (a later grant may have come)."""
        self._advance(now_ns)
        if sender.held and sender.leaves_ns(now_ns) - now_ns <= sender.held[-1].lead_ns + 1000:
            self._say(sender, now_ns)

    def _say(self, sender: _Sender, now_ns: int) -> None:
        self._advance(now_ns)
        rtt_ns = self._line.rtt_ns(now_ns)
        queue_ns = max(0, self._free_ns - now_ns)
        if buffer_ns := self._line.buffer_ns(now_ns):
            queue_ns = min(queue_ns, buffer_ns)
        self.queue_samples.append(queue_ns)
        backlog = sender.backlog_bytes
        report = Report(
            link=self.granter.link,
            left_bytes=sender.left_bytes,
            delivered_bytes=sender.delivered(now_ns),
            returned_bytes=sender.returned_bytes,
            unscheduled_bytes=0,
            fallback_bytes=0,
            backlog_bytes=backlog,
            leaves_in_ns=sender.leaves_ns(now_ns) - now_ns if backlog else 0,
            srtt_ns=rtt_ns + queue_ns,
            min_rtt_ns=rtt_ns,
            retransmits=sender.retransmits,
            delivery_rate_bytes_per_s=0,
            limited=False,
        )
        self._at(now_ns + self._control_rtt_ns // 2, _Kind.REPORTED, sender.session, report)

    def _advance(self, now_ns: int) -> None:
        """Let everything leave that leaves until now, and pass it to the link in the order in which it left."""
        for sender in self._senders.values():
            if sender.held:
                self._send(sender, now_ns)
            else:
                sender.at_ns = now_ns

    def _send(self, sender: _Sender, now_ns: int) -> None:
        held = sender.held
        while held:
            first = held[0]
            begun_ns = max(sender.at_ns, first.start_ns)
            if begun_ns >= now_ns:
                return
            rate = first.rate_bytes_per_s
            nbytes = min(first.left_bytes, rate * (now_ns - begun_ns) // NANOS)
            if nbytes <= 0:
                return
            # Not simply now: the rest of a byte must not get lost at each step.
            ended_ns = begun_ns + -(-nbytes * NANOS // rate)
            sender.at_ns = min(now_ns, ended_ns)
            self._serve(sender, first.transfer, nbytes, begun_ns, sender.at_ns)
            first.left_bytes -= nbytes
            if first.left_bytes:
                return
            held.popleft()

    def _serve(self, sender: _Sender, transfer: TransferId, nbytes: int, begun_ns: int, ended_ns: int) -> None:
        """Bytes that left in this time reach the link, wait their turn and are acknowledged."""
        rate = self._line.rate_bytes_per_s(ended_ns)
        self._free_ns = max(ended_ns, max(self._free_ns, begun_ns) + nbytes * NANOS // rate)
        buffer_ns = self._line.buffer_ns(ended_ns)
        if buffer_ns and (over_ns := self._free_ns - ended_ns - buffer_ns) > 0:
            # It would have been lost and sent again: it takes the link's time all the same.
            sender.retransmits += max(1, min(nbytes, over_ns * rate // NANOS) // SEGMENT_BYTES)
        sender.left_bytes += nbytes
        acked_ns = self._free_ns + self._line.rtt_ns(ended_ns)
        sender.acks.append((acked_ns, sender.left_bytes))
        known = self.transfers.get(transfer)
        if known is None:
            return
        if known.first_left_ns < 0:
            known.first_left_ns = begun_ns
        known.left_bytes += nbytes
        if known.left_bytes >= known.wanted_bytes:
            self._at(acked_ns + self._control_rtt_ns // 2, _Kind.DONE, sender.session, transfer)
