"""Senders as fluids: they obey their grants exactly, and nothing is between them and the far end but delay.

The cheapest thing that closes the control loop. The benchmark drives the coordinator with it, and tests use
it to look at the policy alone: gaps and overlaps at hand-overs are then the policy's, not TCP's. It is also what makes
thousands of agents and hours affordable (:mod:`proxyd.sim.scale`): a report, a request and a grant are one event each,
and a byte costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from proxyd.core.coordinator import CoordinatorMachine
from proxyd.core.effects import CloseSession, CoordinatorEffect, ToAgent
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import (
    AgentHello,
    AgentMessage,
    Beat,
    CancelRequest,
    Echo,
    Grant,
    Pace,
    Report,
    Request,
    TransferDone,
)
from proxyd.wire.envelope import TrafficClass

NANOS = 1_000_000_000


@dataclasses.dataclass(slots=True)
class _Held:
    transfer: TransferId
    left_bytes: int
    rate_bytes_per_s: int
    start_ns: int
    expires_ns: int
    lead_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """A stretch of sending at one rate: what tests look at."""

    sender: str
    start_ns: int
    end_ns: int
    rate_bytes_per_s: int


class FluidSender:
    """One agent's sending on one link."""

    def __init__(self, name: AgentName, link: LinkName, rtt_ns: int, limit_bytes_per_s: int = 0) -> None:
        self.name = name
        self.link = link
        self.rtt_ns = rtt_ns
        self.limit_bytes_per_s = limit_bytes_per_s
        """What its host can send; 0: anything."""
        self.grants: deque[_Held] = deque()
        self.wanted_bytes: dict[TransferId, int] = {}
        self.granted_bytes = 0
        self.returned_bytes = 0
        self.left_bytes = 0
        self.history: deque[tuple[int, int]] = deque([(0, 0)])
        """(time, left bytes): straight lines between."""
        self.sent: list[Sent] = []
        self.keeps_sent = True
        """Write ``sent`` down; off for long runs."""
        self.unsent_bytes: dict[TransferId, int] = {}
        """What has to leave of each transfer until it is over."""
        self.over: list[tuple[TransferId, int]] = []
        """Transfers of which the last byte has left, and when; whoever reads it clears it."""
        self.frozen = False
        """A stopped process: neither sends nor reports."""
        self.lead_said = True
        self.reported: Report | None = None
        self.expired: dict[TransferId, None] = {}
        """Transfers whose grants ran out of time: to be asked for anew."""
        self._now_ns = 0

    def grant(self, grant: Grant, now_ns: int) -> None:
        """Take a grant; one for a transfer that is over goes back."""
        self.advance(now_ns)
        self.granted_bytes += grant.nbytes
        if grant.transfer not in self.wanted_bytes:
            self.returned_bytes += grant.nbytes
            return
        start_ns = now_ns + grant.start_in_ns
        self.grants.append(
            _Held(
                grant.transfer,
                grant.nbytes,
                grant.rate_bytes_per_s,
                start_ns,
                start_ns + grant.ttl_ns,
                grant.lead_ns,
            )
        )
        self.lead_said = False

    def pace(self, rate_bytes_per_s: int, now_ns: int) -> None:
        """The bottleneck changed: everything held goes at this rate."""
        self.advance(now_ns)
        for held in self.grants:
            held.rate_bytes_per_s = rate_bytes_per_s

    def cancel(self, transfer: TransferId, now_ns: int) -> None:
        """Give a transfer up: unspent bytes go back."""
        self.advance(now_ns)
        self.wanted_bytes.pop(transfer, None)
        self.unsent_bytes.pop(transfer, None)
        self.returned_bytes += sum(held.left_bytes for held in self.grants if held.transfer == transfer)
        self.grants = deque(held for held in self.grants if held.transfer != transfer)

    def advance(self, now_ns: int) -> None:
        """Send up to now."""
        at_ns, self._now_ns = self._now_ns, now_ns
        if self.frozen:
            return
        while self.grants and at_ns < now_ns:
            held = self.grants[0]
            at_ns = max(at_ns, held.start_ns)
            if at_ns >= held.expires_ns and held.expires_ns <= now_ns:
                self.grants.popleft()
                self.returned_bytes += held.left_bytes
                self.wanted_bytes[held.transfer] += held.left_bytes
                self.expired[held.transfer] = None
                continue
            if at_ns >= now_ns:
                break
            rate = min(held.rate_bytes_per_s, self.limit_bytes_per_s or held.rate_bytes_per_s)
            nbytes = min(held.left_bytes, rate * (now_ns - at_ns) // NANOS)
            end_ns = now_ns if nbytes < held.left_bytes else min(now_ns, at_ns + -(-nbytes * NANOS // rate))
            if self.history[-1] != (at_ns, self.left_bytes):
                self.history.append((at_ns, self.left_bytes))
            self.left_bytes += nbytes
            self.history.append((end_ns, self.left_bytes))
            if self.keeps_sent:
                self.sent.append(Sent(str(self.name), at_ns, end_ns, rate))
            held.left_bytes -= nbytes
            unsent = self.unsent_bytes.get(held.transfer)
            if unsent is not None:
                if unsent > nbytes:
                    self.unsent_bytes[held.transfer] = unsent - nbytes
                else:
                    del self.unsent_bytes[held.transfer]
                    self.over.append((held.transfer, end_ns))
            if not held.left_bytes:
                self.grants.popleft()
            at_ns = end_ns

    def delivered_bytes(self, now_ns: int) -> int:
        """What had left one round trip ago."""
        at_ns = now_ns - self.rtt_ns
        history = self.history
        while len(history) > 1 and history[1][0] <= at_ns:
            history.popleft()
        start_ns, start = history[0]
        if at_ns <= start_ns:
            return start if at_ns == start_ns else min(start, self.left_bytes)
        if len(history) == 1:
            return start
        end_ns, end = history[1]
        return start + (end - start) * (at_ns - start_ns) // (end_ns - start_ns)

    def quiet_until_ns(self, now_ns: int) -> int:
        """Until then its reports would all say the same: everything has left, and is on its way."""
        history = self.history
        if self.grants or self.expired or len(history) < 2:
            return now_ns
        flat = history[0][1] == history[1][1] or now_ns - self.rtt_ns < history[0][0]
        return history[1 if history[0][1] == history[1][1] else 0][0] + self.rtt_ns if flat else now_ns

    @property
    def backlog_bytes(self) -> int:
        """Granted and not left."""
        return sum(held.left_bytes for held in self.grants)

    def leaves_ns(self, now_ns: int) -> int:
        """When the backlog will have left."""
        at_ns = now_ns
        for held in self.grants:
            rate = min(held.rate_bytes_per_s, self.limit_bytes_per_s or held.rate_bytes_per_s)
            at_ns = max(at_ns, held.start_ns) + held.left_bytes * NANOS // rate
        return at_ns

    def report(self, now_ns: int) -> Report:
        """What it says of itself."""
        backlog = self.backlog_bytes
        return Report(
            link=self.link,
            left_bytes=self.left_bytes,
            delivered_bytes=self.delivered_bytes(now_ns),
            returned_bytes=self.returned_bytes,
            unscheduled_bytes=0,
            fallback_bytes=0,
            backlog_bytes=backlog,
            leaves_in_ns=self.leaves_ns(now_ns) - now_ns if backlog else 0,
            srtt_ns=self.rtt_ns,
            min_rtt_ns=self.rtt_ns,
            retransmits=0,
            delivery_rate_bytes_per_s=0,
            limited=True,
        )

    def active(self, now_ns: int) -> bool:
        """It has something to report."""
        return bool(self.grants or self.expired) or self.delivered_bytes(now_ns) < self.left_bytes


class FluidWorld:
    """A coordinator machine and fluid senders, with control messages that take time.

    :param finishes: called with (session, transfer) when a transfer's last byte is acknowledged; the coordinator has
        been told then. None: transfers end only by :meth:`done`.
    :param echoes: senders answer beats, so that the coordinator measures their control round trip.
    :param keeps_history: write grants and stretches of sending down; off for long runs.
    """

    def __init__(
        self,
        machine: CoordinatorMachine,
        senders: list[FluidSender],
        *,
        control_ns: int = 500_000,
        report_ns: int = 5_000_000,
        handle: Callable[[CoordinatorEvent, int], list[CoordinatorEffect]] | None = None,
        check: Callable[[int], None] | None = None,
        finishes: Callable[[int, TransferId], None] | None = None,
        echoes: bool = False,
        keeps_history: bool = True,
    ) -> None:
        self.machine = machine
        self.senders = dict(enumerate(senders, 1))
        """By session."""
        self.control_ns = control_ns
        self.report_ns = report_ns
        self.now_ns = 0
        self.grants: list[tuple[int, int, Grant]] = []
        """(issue time, session, grant)."""
        self.events = 0
        """Handled by the machine."""
        self.granted = 0
        """Grants issued."""
        self._handle = handle or machine.handle
        self._check = check
        self._finishes = finishes
        self._echoes = echoes
        self._keeps_history = keeps_history
        self._heap: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0
        self._forth: deque[tuple[int, int, SessionMessage]] = deque()
        """Messages on their way to the coordinator: all take as long, so they arrive in order."""
        self._back: deque[tuple[int, int, int, Grant | Pace | Beat]] = deque()
        self._traffic: dict[TransferId, tuple[str, TrafficClass]] = {}
        self._ticking: set[int] = set()
        self._sequences = dict.fromkeys(self.senders, 0)
        for session, sender in self.senders.items():
            sender.keeps_sent = keeps_history
            self._deliver(SessionOpened(session, AgentHello(sender.name, session, f"10.0.0.{session}:7500")))

    def at(self, time_ns: int, do: Callable[..., object], *args: Any) -> None:
        """Do something at a time."""
        self._order += 1
        heappush(self._heap, (time_ns, self._order, do, args))

    def send(
        self, session: int, nbytes: int, traffic: TrafficClass = TrafficClass.PIPELINE, job: str = "job"
    ) -> TransferId:
        """A sender asks for a new transfer, now."""
        self._sequences[session] += 1
        transfer = TransferId(session, self._sequences[session])
        sender = self.senders[session]
        sender.wanted_bytes[transfer] = nbytes
        if self._finishes is not None:
            sender.unsent_bytes[transfer] = nbytes
        self._traffic[transfer] = (job, traffic)
        destination = AgentName(sender.link.dst_site, "gw")
        self._post(session, Request(transfer, sender.link, destination, job, traffic, nbytes))
        return transfer

    def cancel(self, session: int, transfer: TransferId, reason: str = "test") -> None:
        """A sender gives a transfer up, now."""
        self.senders[session].cancel(transfer, self.now_ns)
        self._traffic.pop(transfer, None)
        self._post(session, CancelRequest(transfer, reason))
        self._post(session, self.senders[session].report(self.now_ns))

    def done(self, session: int, transfer: TransferId, nbytes: int, traffic: TrafficClass) -> None:
        """A transfer was acknowledged."""
        sender = self.senders[session]
        sender.wanted_bytes.pop(transfer, None)
        self._traffic.pop(transfer, None)
        self._post(session, TransferDone(transfer, sender.link, traffic, nbytes, True, 0))

    def close(self, session: int) -> None:
        """A sender's session ends, now."""
        self.senders[session].frozen = True
        self._deliver(SessionClosed(session, "test"))

    def run(self, until_ns: int) -> None:
        """Let time pass."""
        heap, forth, back, machine = self._heap, self._forth, self._back, self.machine
        never_ns = until_ns + 1
        while True:
            # Whatever is due first; of what is due at once messages, in the order in which they were sent.
            going_ns = forth[0][0] if forth else never_ns
            coming_ns = back[0][0] if back else never_ns
            due_ns = heap[0][0] if heap else never_ns
            if coming_ns < due_ns:
                due_ns = coming_ns
            if going_ns < due_ns:
                due_ns = going_ns
            deadline_ns = machine.next_deadline_ns()
            if deadline_ns is not None and deadline_ns < due_ns and deadline_ns < until_ns:
                self.now_ns = max(self.now_ns, deadline_ns)
                self._deliver(TimePassed())
                continue
            if due_ns > until_ns:
                self.now_ns = until_ns
                return
            if going_ns == due_ns and (coming_ns > due_ns or forth[0][1] < back[0][1]):
                self.now_ns, _, event = forth.popleft()
                self._deliver(event)
            elif coming_ns == due_ns:
                self.now_ns, _, session, message = back.popleft()
                self._said(session, message)
            else:
                self.now_ns, _, do, args = heappop(heap)
                do(*args)

    def _post(self, session: int, message: AgentMessage) -> None:
        self._order += 1
        self._forth.append((self.now_ns + self.control_ns, self._order, SessionMessage(session, message)))

    def _deliver(self, event: CoordinatorEvent) -> None:
        self.events += 1
        effects = self._handle(event, self.now_ns)
        if self._check is not None:
            self._check(self.now_ns)
        for effect in effects:
            match effect:
                case ToAgent(session, message):
                    if isinstance(message, Grant):
                        self.granted += 1
                        if self._keeps_history:
                            self.grants.append((self.now_ns, session, message))
                    elif not isinstance(message, Pace) and not (isinstance(message, Beat) and self._echoes):
                        continue
                    self._order += 1
                    self._back.append((self.now_ns + self.control_ns, self._order, session, message))
                case CloseSession(session, _):
                    self.senders[session].frozen = True

    def _said(self, session: int, message: Grant | Pace | Beat) -> None:
        sender = self.senders[session]
        match message:
            case Grant():
                sender.grant(message, self.now_ns)
            case Pace(_, rate, _):
                sender.pace(rate, self.now_ns)
            case _:
                if message.number and not sender.frozen:
                    self._post(session, Echo(message.number, 0))
                return
        self._look(session, sender)
        self._plan_lead(session)
        if session not in self._ticking:
            self._ticking.add(session)
            self._tick(session)

    def _tick(self, session: int) -> None:
        sender = self.senders[session]
        if not self._report(session):
            self._ticking.discard(session)
            return
        if sender.active(self.now_ns):
            self.at(max(self.now_ns + self.report_ns, sender.quiet_until_ns(self.now_ns)), self._tick, session)
        else:
            self._ticking.discard(session)

    def _report(self, session: int) -> bool:
        sender = self.senders[session]
        sender.advance(self.now_ns)
        if sender.frozen:
            return False
        self._look(session, sender)
        for transfer in sender.expired:
            wanted = sender.wanted_bytes.get(transfer, 0)
            destination = AgentName(sender.link.dst_site, "gw")
            job, traffic = self._traffic.get(transfer, ("job", TrafficClass.PIPELINE))
            self._post(session, Request(transfer, sender.link, destination, job, traffic, wanted))
        sender.expired.clear()
        report = sender.report(self.now_ns)
        if report != sender.reported:  # as the agent: what hasn't changed isn't said again
            sender.reported = report
            self._post(session, report)
        return True

    def _plan_lead(self, session: int) -> None:
        sender = self.senders[session]
        if not sender.grants:
            return
        due_ns = max(self.now_ns, sender.leaves_ns(self.now_ns) - sender.grants[-1].lead_ns)
        self.at(due_ns, self._lead, session)

    def _look(self, session: int, sender: FluidSender) -> None:
        """Transfers whose last byte has left are acknowledged a round trip later."""
        if sender.over:
            for transfer, left_ns in sender.over:
                self.at(left_ns + sender.rtt_ns, self._acknowledged, session, transfer)
            sender.over.clear()

    def _acknowledged(self, session: int, transfer: TransferId) -> None:
        sender = self.senders[session]
        nbytes = sender.wanted_bytes.get(transfer)
        if nbytes is None or sender.frozen or self._finishes is None:
            return
        self.done(session, transfer, nbytes, self._traffic[transfer][1])
        self._finishes(session, transfer)

    def _lead(self, session: int) -> None:
        sender = self.senders[session]
        sender.advance(self.now_ns)
        if sender.lead_said or sender.frozen or not sender.grants:
            return
        if sender.leaves_ns(self.now_ns) - self.now_ns <= sender.grants[-1].lead_ns + 1000:  # rounding
            sender.lead_said = True
            self._report(session)
