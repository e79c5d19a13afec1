"""What happened to each recent transfer, for "why did this tensor wait": bounded, oldest forgotten first.

A story is told by the messages that went to and fro, each with the state of the transfer's clock
(:class:`~proxyd.core.reasons.Waits`) at that moment. The running coordinator collects stories as it goes; ``proxyd why
--log`` collects one from a replayed grant log. Words are made when somebody asks.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from proxyd.core.coordinator import CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, TransferId
from proxyd.core.messages import CancelRequest, Denied, Grant, Queued, Request, TransferDone
from proxyd.core.reasons import BY_SOMEBODY, CAUSES, Cause
from proxyd.core.units import format_duration, format_rate, format_size
from proxyd.runtime.translate_admin import Decision, Told, WaitTold

MAX_TRANSFERS = 4096
MAX_FIRST = 12
MAX_LAST = 20
"""Per transfer: how it began, and how it stands. What is between them in a long one says nothing new."""

_Message = Request | Queued | Grant | Denied | TransferDone | CancelRequest
_Waits = tuple[int, ...]
_NO_WAITS: _Waits = (0,) * len(CAUSES)


@dataclasses.dataclass(slots=True)
class _Step:
    """A message, or a run of grants that say the same."""

    at_ns: int
    message: _Message
    waits: _Waits
    """The transfer's clock at that moment (at the first one of a run)."""
    who: AgentName | None = None
    """Which agent had been in the way."""
    count: int = 1
    nbytes: int = 0
    until_ns: int = 0
    least_rate: int = 0
    most_rate: int = 0

    def extend(self, at_ns: int, message: _Message) -> bool:
        """Take one more grant of a run; False when it is something else."""
        if not isinstance(message, Grant) or not isinstance(self.message, Grant):
            return False
        if message.reason != self.message.reason:
            return False
        rate = message.rate_bytes_per_s
        self.count += 1
        self.nbytes += message.nbytes
        self.until_ns = at_ns
        self.least_rate, self.most_rate = min(self.least_rate, rate), max(self.most_rate, rate)
        return True


_FROM_AGENTS = (Request, TransferDone, CancelRequest)
_TO_AGENTS = (Queued, Grant, Denied)


@dataclasses.dataclass(slots=True)
class _Story:
    session: int
    agent: AgentName | None
    request: Request | None = None
    asked_ns: int = 0
    granted_bytes: int = 0
    over_ns: int | None = None
    waits: _Waits = _NO_WAITS
    who: AgentName | None = None
    first: list[_Step] = dataclasses.field(default_factory=list)
    last: deque[_Step] | None = None
    """Once there are more than ``MAX_FIRST``."""

    def add(self, at_ns: int, message: _Message) -> None:
        steps = self.last or self.first
        if steps and steps[-1].extend(at_ns, message):
            return
        step = _Step(at_ns, message, self.waits, self.who)
        if isinstance(message, Grant):
            step.nbytes, step.until_ns = message.nbytes, at_ns
            step.least_rate = step.most_rate = message.rate_bytes_per_s
        if len(self.first) < MAX_FIRST:
            self.first.append(step)
            return
        if self.last is None:
            self.last = deque(maxlen=MAX_LAST)
        self.last.append(step)

    def steps(self) -> list[_Step]:
        return [*self.first, *(self.last or ())]


class Stories:
    """See the module's text.

    :param machine: whose clocks are read; None: of each call's own (a replay changes machines at a checkpoint).
    :param only: keep this transfer's story alone.
    :param most: transfers whose stories are kept; None: MAX_TRANSFERS.
    """

    def __init__(
        self, machine: CoordinatorMachine | None = None, only: TransferId | None = None, most: int | None = None
    ) -> None:
        self._machine = machine
        self._most = MAX_TRANSFERS if most is None else most
        self._only = only
        self._agents: dict[int, AgentName] = {}
        self._stories: OrderedDict[TransferId, _Story] = OrderedDict()

    def watch(self, machine: CoordinatorMachine) -> None:
        """Read this machine's clocks from now on."""
        self._machine = machine

    def saw(self, now_ns: int, event: CoordinatorEvent | TimePassed) -> None:
        """An event, before the machine has it."""
        if isinstance(event, SessionMessage):
            message = event.message
            if isinstance(message, _FROM_AGENTS):
                self._note(now_ns, event.session, message)
        elif isinstance(event, SessionOpened):
            agent = getattr(event.message, "agent", None)
            if agent is not None:
                self._agents[event.session] = agent
        elif isinstance(event, SessionClosed):
            self._agents.pop(event.session, None)

    def performed(self, now_ns: int, effects: Iterable[CoordinatorEffect]) -> None:
        """Effects of the machine."""
        for effect in effects:
            if isinstance(effect, ToAgent):
                message = effect.message
                if isinstance(message, _TO_AGENTS):
                    self._note(now_ns, effect.session, message)

    def _note(self, now_ns: int, session: int, message: _Message) -> None:
        transfer = message.transfer
        if (self._only is not None and transfer != self._only) or not transfer.sequence:
            return  # a grant to an announcement names no transfer yet
        story = self._stories.get(transfer)
        if story is None:
            if isinstance(message, TransferDone):
                return  # a small one that was sent without asking has no story
            story = self._stories[transfer] = _Story(session, self._agents.get(session))
            if len(self._stories) > self._most:
                self._stories.popitem(last=False)
        waits = None if self._machine is None else self._machine.waits(session, transfer)
        if waits is not None:
            story.waits, story.who = waits.at(now_ns), waits.who
        if isinstance(message, Grant):
            story.granted_bytes += message.nbytes
        elif isinstance(message, Request):
            if story.request is None:
                story.asked_ns = now_ns
            story.request = message
            story.session, story.over_ns = session, None
        elif not isinstance(message, Queued):
            story.over_ns = now_ns
        story.add(now_ns, message)

    def transfers(self) -> list[TransferId]:
        """Those that have a story, oldest first."""
        return list(self._stories)

    def of(self, transfer: TransferId, now_ns: int) -> Told | None:
        """One transfer's story; None when nothing is known."""
        story = self._stories.get(transfer)
        if story is None:
            return None
        if story.over_ns is None and self._machine is not None:
            waits = self._machine.waits(story.session, transfer)
            if waits is not None:
                story.waits = waits.at(now_ns)
        request = story.request
        return Told(
            transfer=transfer,
            link=None if request is None else request.link,
            agent=story.agent,
            destination=None if request is None else request.destination,
            job="" if request is None else request.job,
            traffic=None if request is None else request.traffic,
            wanted_bytes=0 if request is None else request.wanted_bytes,
            granted_bytes=story.granted_bytes,
            requested_ago_ns=now_ns - (story.asked_ns if request is not None else story.first[0].at_ns),
            over_ago_ns=None if story.over_ns is None else now_ns - story.over_ns,
            waits=_told(story.waits, _NO_WAITS),
            decisions=_decisions(story.steps(), now_ns),
        )


def _decisions(steps: Sequence[_Step], now_ns: int) -> tuple[Decision, ...]:
    told = []
    before = _NO_WAITS
    for step in steps:
        told.append(Decision(now_ns - step.at_ns, *_words(step), _told(step.waits, before, step.who)))
        before = step.waits
    return tuple(told)


def _told(waits: _Waits, before: _Waits, who: AgentName | None = None) -> tuple[WaitTold, ...]:
    """What came on the clock since ``before``, longest first."""

    def words(cause: Cause) -> str:
        return f"{cause.words} ({who})" if who is not None and cause in BY_SOMEBODY else cause.words

    found = [(now - then, cause) for now, then, cause in zip(waits, before, CAUSES, strict=True) if now > then]
    return tuple(WaitTold(cause.label, words(cause), ns) for ns, cause in sorted(found, key=lambda one: -one[0]))


def _words(step: _Step) -> tuple[str, str]:
    message = step.message
    match message:
        case Request():
            return "requested", f"{format_size(message.wanted_bytes)} over {message.link}, {message.traffic.label}"
        case Queued():
            start, finish = format_duration(message.starts_in_ns), format_duration(message.finishes_in_ns)
            return "queued", f"place {message.position}, start in {start}, end in {finish}: {message.reason}"
        case Grant():
            return "granted", _granted(step, message)
        case Denied():
            return "denied", message.reason
        case CancelRequest():
            return "cancelled", message.reason
        case TransferDone():
            return "done" if message.ok else "failed", f"{format_size(message.nbytes)} over {message.link}"


def _granted(step: _Step, grant: Grant) -> str:
    size, rate = format_size(step.nbytes), format_rate(step.least_rate)
    if step.most_rate > step.least_rate:
        rate = f"{rate} to {format_rate(step.most_rate)}"
    start = f", start in {format_duration(grant.start_in_ns)}" if grant.start_in_ns or step.count == 1 else ""
    many = f" in {step.count} grants over {format_duration(step.until_ns - step.at_ns)}" if step.count > 1 else ""
    return f"{size}{many} at {rate}{start}: {grant.reason}"
