"""Draining an agent: what its trainers post from now on waits, and what is under way is finished.

Theory. The gate stands between the trainers' sessions and the machine, so the machine knows nothing of what is held: no
time-out runs, nothing is offered to a peer or asked of a coordinator. What was posted before goes on as if nothing was.
When the draining ends, what was held is posted in the order in which it came, so that order towards each destination is
kept. An agent that is stopped while it drains loses nothing either: its trainers post again to its next life
(:mod:`proxyd_client.resuming`), and nothing of theirs was half sent.

A trainer that leaves takes its messages along, as always: what is held of it is posted just before, and then has the
time that an orderly end gives to what was posted (``linger``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from proxyd.core.effects import TellSendState
from proxyd.core.events import AgentEvent, ClientDetached, SendAnnounced, SendCancelled, SendFilled, SendPosted
from proxyd.core.ids import TransferId
from proxyd.wire.phase import SendPhase


class DrainGate:
    """Passes trainers' events on, or holds what would begin something new.

    :param feed: the machine.
    :param tell: says to a trainer where its message stands.
    """

    def __init__(self, feed: Callable[[AgentEvent], None], tell: Callable[[TellSendState], None]) -> None:
        self._feed = feed
        self._tell = tell
        self._held: dict[TransferId, SendPosted] = {}
        self.draining = False

    @property
    def held(self) -> int:
        """Messages that wait for the end of the draining."""
        return len(self._held)

    def emit(self, event: AgentEvent) -> None:
        """What trainers' sessions say."""
        if not self.draining:
            self._feed(event)
            return
        match event:
            case SendPosted():
                self._held[event.transfer] = event
                phase = TellSendState(event.envelope.source, event.transfer, SendPhase.DRAINING, 0, 0)
                self._tell(phase)
            case SendFilled(transfer, filled_bytes) if transfer in self._held:
                self._held[transfer] = dataclasses.replace(self._held[transfer], filled_bytes=filled_bytes)
            case SendAnnounced():
                pass  # it only lets the agent ask ahead, and it is not to ask
            case SendCancelled(transfer) if transfer in self._held:
                self._feed(self._held.pop(transfer))
                self._feed(event)
            case ClientDetached():
                for transfer in [one for one in self._held if one.incarnation == event.incarnation]:
                    self._feed(self._held.pop(transfer))
                self._feed(event)
            case _:
                self._feed(event)

    def drain(self, wanted: bool) -> None:
        """Begin, or end and post what was held."""
        self.draining = wanted
        if not wanted:
            # Feeding may lead to more of the trainers' events, which pass by now.
            while self._held:
                self._feed(self._held.pop(next(iter(self._held))))
