"""What this endpoint was told of messages that have not been offered: announced ones, and early predictions. Pure.

Predictions of one channel (source, group, tag) are kept in the order of their announcements, which is the order in
which their messages will be offered: the channel's next offer ends the first of them. One that is long past ends by
itself, for word of a withdrawal may be lost: predictions are the first thing that a busy agent leaves out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from proxyd.wire.client import Foretold
from proxyd.wire.envelope import Envelope, TransferId

MOST_FORETOLD = 10_000
"""Predictions of one endpoint: an agent that foretells without end must not fill its memory."""
MOST_EARLY = 1024
"""Predictions that come before the offer that they are about."""
PAST_NS = 30_000_000_000
"""So long after the predicted time a prediction says nothing any more."""

Channel = tuple[int, str, int]
"""(source rank, group, tag)."""


class Prediction(NamedTuple):
    """One message that will come, at ``finish_at_ns`` of the local monotonic clock."""

    number: int
    nbytes: int
    finish_at_ns: int
    uncertainty_ns: int


class Forecast:
    """Predictions of one endpoint."""

    def __init__(self) -> None:
        self._channels: dict[Channel, deque[Prediction]] = {}
        self._count = 0
        self._early: OrderedDict[TransferId, int] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def on_foretold(self, frame: Foretold, now_ns: int) -> None:
        """A prediction of a message that is announced only, or word that it will not come. Past :data:`MOST_FORETOLD`
        of them none is kept."""
        channel = (frame.src_rank, frame.group, frame.tag)
        if not frame.finish_in_ns:
            waiting = self._channels.get(channel, ())
            self._keep(channel, [prediction for prediction in waiting if prediction.number != frame.number])
        elif self._count < MOST_FORETOLD:
            said = Prediction(frame.number, frame.nbytes, now_ns + frame.finish_in_ns, frame.uncertainty_ns)
            self._channels.setdefault(channel, deque()).append(said)
            self._count += 1

    def expected(self, transfer: TransferId, finish_at_ns: int) -> None:
        """A prediction of a message that is posted, and not offered here yet."""
        self._early[transfer] = finish_at_ns
        if len(self._early) > MOST_EARLY:
            self._early.popitem(last=False)

    def offered(self, transfer: TransferId, envelope: Envelope) -> int:
        """The channel's next message is under way: what was foretold of it is over. Answers when it is predicted to be
        here, as far as that was said before; 0: it was not."""
        self._over((envelope.src_rank, envelope.group, envelope.tag))
        return self._early.pop(transfer, 0)

    def lost(self, rank: int) -> None:
        """A source has ended."""
        for channel in [channel for channel in self._channels if channel[0] == rank]:
            self._keep(channel, [])

    def clear(self) -> None:
        """The agent is gone, and whatever it said."""
        self._channels.clear()
        self._early.clear()
        self._count = 0

    def next(self, src: int | None, group: str, tag: int, now_ns: int) -> Prediction | None:
        """The channel's next message, or, from any source, the one that is predicted to be here first."""
        found: list[Prediction] = []
        for channel in [(src, group, tag)] if src is not None else [c for c in self._channels if c[1:] == (group, tag)]:
            waiting = self._channels.get(channel)
            while waiting and waiting[0].finish_at_ns + PAST_NS < now_ns:
                self._over(channel)
                waiting = self._channels.get(channel)
            if waiting:
                found.append(waiting[0])
        return min(found, key=lambda prediction: prediction.finish_at_ns, default=None)

    def eta_s(self, src: int | None, group: str, tag: int, now_ns: int) -> float | None:
        """Seconds until the predicted arrival of :meth:`next`."""
        foretold = self.next(src, group, tag, now_ns)
        return None if foretold is None else max(0.0, (foretold.finish_at_ns - now_ns) / 1e9)

    def _over(self, channel: Channel) -> None:
        waiting = self._channels.get(channel)
        if waiting:
            waiting.popleft()
            self._count -= 1
            if not waiting:
                del self._channels[channel]

    def _keep(self, channel: Channel, kept: list[Prediction]) -> None:
        self._count -= len(self._channels.pop(channel, ())) - len(kept)
        if kept:
            self._channels[channel] = deque(kept)
