"""Senders as fluids: they obey their grants exactly, and nothing is between them and the far end but delay.

The cheapest thing that closes the control loop. The benchmark drives the coordinator with it, and tests use
it to look at the policy alone: gaps and overlaps at hand-overs are then the policy's, not TCP's.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from proxyd.core.coordinator import CoordinatorMachine
from proxyd.core.effects import CloseSession, CoordinatorEffect, ToAgent
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, AgentMessage, CancelRequest, Grant, Report, Request, TransferDone
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
        self.frozen = False
        """A stopped process: neither sends nor reports."""
        self.lead_said = True
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

    def cancel(self, transfer: TransferId, now_ns: int) -> None:
        """Give a transfer up: unspent bytes go back."""
        self.advance(now_ns)
        self.wanted_bytes.pop(transfer, None)
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
            self.sent.append(Sent(str(self.name), at_ns, end_ns, rate))
            held.left_bytes -= nbytes
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
    """A coordinator machine and fluid senders, with control messages that take time."""

    def __init__(
        self,
        machine: CoordinatorMachine,
        senders: list[FluidSender],
        *,
        control_ns: int = 500_000,
        report_ns: int = 5_000_000,
        handle: Callable[[CoordinatorEvent, int], list[CoordinatorEffect]] | None = None,
        check: Callable[[int], None] | None = None,
    ) -> None:
        self.machine = machine
        self.senders = dict(enumerate(senders, 1))
        """By session."""
        self.control_ns = control_ns
        self.report_ns = report_ns
        self.now_ns = 0
        self.grants: list[tuple[int, int, Grant]] = []
        """(issue time, session, grant)."""
        self._handle = handle or machine.handle
        self._check = check
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._ticking: set[int] = set()
        self._sequences = dict.fromkeys(self.senders, 0)
        for session, sender in self.senders.items():
            self._deliver(SessionOpened(session, AgentHello(sender.name, session, f"10.0.0.{session}:7500")))

    def at(self, time_ns: int, do: Callable[[], None]) -> None:
        """Do something at a time."""
        self._order += 1
        heappush(self._heap, (time_ns, self._order, do))

    def send(
        self, session: int, nbytes: int, traffic: TrafficClass = TrafficClass.PIPELINE, job: str = "job"
    ) -> TransferId:
        """A sender asks for a new transfer, now."""
        self._sequences[session] += 1
        transfer = TransferId(session, self._sequences[session])
        sender = self.senders[session]
        sender.wanted_bytes[transfer] = nbytes
        destination = AgentName(sender.link.dst_site, "gw")
        self._post(session, Request(transfer, sender.link, destination, job, traffic, nbytes))
        return transfer

    def cancel(self, session: int, transfer: TransferId, reason: str = "test") -> None:
        """A sender gives a transfer up, now."""
        self.senders[session].cancel(transfer, self.now_ns)
        self._post(session, CancelRequest(transfer, reason))
        self._post(session, self.senders[session].report(self.now_ns))

    def done(self, session: int, transfer: TransferId, nbytes: int, traffic: TrafficClass) -> None:
        """A transfer was acknowledged."""
        sender = self.senders[session]
        sender.wanted_bytes.pop(transfer, None)
        self._post(session, TransferDone(transfer, sender.link, traffic, nbytes, True, 0))

    def close(self, session: int) -> None:
        """A sender's session ends, now."""
        self.senders[session].frozen = True
        self._deliver(SessionClosed(session, "test"))

    def run(self, until_ns: int) -> None:
        """Let time pass."""
        while True:
            deadline_ns = self.machine.next_deadline_ns()
            next_ns = min(self._heap[0][0] if self._heap else until_ns, until_ns)
            if deadline_ns is not None and deadline_ns < next_ns:
                self.now_ns = max(self.now_ns, deadline_ns)
                self._deliver(TimePassed())
                continue
            if not self._heap or self._heap[0][0] > until_ns:
                self.now_ns = until_ns
                return
            self.now_ns, _, do = heappop(self._heap)
            do()

    def _post(self, session: int, message: AgentMessage) -> None:
        self.at(self.now_ns + self.control_ns, lambda: self._deliver(SessionMessage(session, message)))

    def _deliver(self, event: CoordinatorEvent) -> None:
        effects = self._handle(event, self.now_ns)
        if self._check is not None:
            self._check(self.now_ns)
        for effect in effects:
            match effect:
                case ToAgent(session, Grant() as grant):
                    self.grants.append((self.now_ns, session, grant))
                    self.at(self.now_ns + self.control_ns, partial(self._granted, session, grant))
                case CloseSession(session, _):
                    self.senders[session].frozen = True
                case _:
                    pass

    def _granted(self, session: int, grant: Grant) -> None:
        sender = self.senders[session]
        sender.grant(grant, self.now_ns)
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
            self.at(self.now_ns + self.report_ns, lambda: self._tick(session))
        else:
            self._ticking.discard(session)

    def _report(self, session: int) -> bool:
        sender = self.senders[session]
        sender.advance(self.now_ns)
        if sender.frozen:
            return False
        for transfer in sender.expired:
            wanted = sender.wanted_bytes.get(transfer, 0)
            destination = AgentName(sender.link.dst_site, "gw")
            self._post(session, Request(transfer, sender.link, destination, "job", TrafficClass.PIPELINE, wanted))
        sender.expired.clear()
        self._post(session, sender.report(self.now_ns))
        return True

    def _plan_lead(self, session: int) -> None:
        sender = self.senders[session]
        if not sender.grants:
            return
        due_ns = max(self.now_ns, sender.leaves_ns(self.now_ns) - sender.grants[-1].lead_ns)
        self.at(due_ns, lambda: self._lead(session))

    def _lead(self, session: int) -> None:
        sender = self.senders[session]
        sender.advance(self.now_ns)
        if sender.lead_said or sender.frozen or not sender.grants:
            return
        if sender.leaves_ns(self.now_ns) - self.now_ns <= sender.grants[-1].lead_ns + 1000:  # rounding
            sender.lead_said = True
            self._report(session)
