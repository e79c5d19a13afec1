"""What happened to each recent transfer, for "why did this tensor wait": bounded, oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.events import CoordinatorEvent, SessionMessage, TimePassed
from proxyd.core.ids import TransferId
from proxyd.core.messages import CancelRequest, Denied, Grant, Queued, Request, TransferDone
from proxyd.core.units import format_duration, format_rate, format_size
from proxyd.runtime.translate_admin import Decision

MAX_TRANSFERS = 4096
MAX_DECISIONS = 32
"""Per transfer; of a long one the last ones, which hold the answer."""

_Raw = tuple[int, Request | Queued | Grant | Denied | TransferDone | CancelRequest]


class Stories:
    """Keeps the messages themselves; words are made when somebody asks."""

    def __init__(self) -> None:
        self._stories: OrderedDict[TransferId, deque[_Raw]] = OrderedDict()

    def saw(self, now_ns: int, event: CoordinatorEvent | TimePassed) -> None:
        """An event, before the machine has it."""
        if isinstance(event, SessionMessage) and isinstance(event.message, Request | TransferDone | CancelRequest):
            self._note((now_ns, event.message))

    def performed(self, now_ns: int, effects: Iterable[CoordinatorEffect]) -> None:
        """Effects of the machine."""
        for effect in effects:
            if isinstance(effect, ToAgent) and isinstance(effect.message, Queued | Grant | Denied):
                self._note((now_ns, effect.message))

    def _note(self, entry: _Raw) -> None:
        transfer = entry[1].transfer
        story = self._stories.get(transfer)
        if story is None:
            story = self._stories[transfer] = deque(maxlen=MAX_DECISIONS)
            if len(self._stories) > MAX_TRANSFERS:
                self._stories.popitem(last=False)
        story.append(entry)

    def of(self, transfer: TransferId, now_ns: int) -> list[Decision]:
        """Oldest first; empty when nothing is known."""
        return [Decision(now_ns - at_ns, *_words(message)) for at_ns, message in self._stories.get(transfer, ())]


def _words(message: Request | Queued | Grant | Denied | TransferDone | CancelRequest) -> tuple[str, str]:
    match message:
        case Request():
            return "requested", f"{format_size(message.wanted_bytes)} over {message.link}, {message.traffic.label}"
        case Queued():
            start, finish = format_duration(message.starts_in_ns), format_duration(message.finishes_in_ns)
            return "queued", f"place {message.position}, start in {start}, end in {finish}: {message.reason}"
        case Grant():
            size, rate = format_size(message.nbytes), format_rate(message.rate_bytes_per_s)
            start = format_duration(message.start_in_ns)
            return "granted", f"{size} at {rate}, start in {start}: {message.reason}"
        case Denied():
            return "denied", message.reason
        case CancelRequest():
            return "cancelled", message.reason
        case TransferDone():
            return "done" if message.ok else "failed", f"{format_size(message.nbytes)} over {message.link}"
