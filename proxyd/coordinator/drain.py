"""Draining a coordinator: transfers that it has not heard of yet wait, and those that it knows are granted to the end.

Theory. The gate stands between the sessions and the machine, so neither the machine's queues nor the grant log see what
is held; when the draining ends, the requests go in, in the order in which they came. Their agents hear ``Queued`` with
the reason, and beats go on, so nobody takes the coordinator for silent and sends by itself. Held requests belong to
their session: an agent that comes back asks again. What agents send without asking (small messages) isn't held: see
:mod:`proxyd.agent.drain` for that.
"""

from __future__ import annotations

from collections.abc import Callable

from proxyd.core.coordinator import CoordinatorMachine
from proxyd.core.effects import ToAgent
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage
from proxyd.core.grants import PADDING_JOB
from proxyd.core.ids import TransferId
from proxyd.core.messages import Announce, CancelRequest, Queued, Request, TransferDone

REASON = "the coordinator drains: no new transfer begins until proxyd undrain"


class DrainGate:
    """Holds requests of new transfers while the coordinator drains.

    :param feed: the machine, with everything around it.
    :param tell: carries out an effect.
    """

    def __init__(
        self, machine: CoordinatorMachine, feed: Callable[[CoordinatorEvent], None], tell: Callable[[ToAgent], None]
    ) -> None:
        self._machine = machine
        self._feed = feed
        self._tell = tell
        self._held: dict[tuple[int, TransferId], SessionMessage] = {}
        self._warming: set[tuple[int, TransferId]] = set()
        """Those that only warm connections up: nobody waits for them."""
        self.draining = False

    @property
    def held(self) -> int:
        """Requests that wait for the end of the draining."""
        return len(self._held) - len(self._warming)

    def holds(self, transfer: TransferId) -> bool:
        """Whether a transfer's request is among them."""
        return any(held == transfer for _, held in self._held)

    def take(self, event: CoordinatorEvent) -> bool:
        """Keep an event back; False: it is the machine's."""
        if not self.draining:
            return False
        match event:
            case SessionMessage(session, Request(transfer, job=job)):
                if self._machine.waits(session, transfer) is not None:
                    return False
                self._held[session, transfer] = event
                if job == PADDING_JOB:
                    self._warming.add((session, transfer))
                self._tell(ToAgent(session, Queued(transfer, len(self._held), 0, 0, REASON)))
                return True
            case SessionMessage(_, Announce(nbytes=nbytes)):
                return nbytes > 0  # a withdrawal passes
            case SessionMessage(session, CancelRequest(transfer) | TransferDone(transfer)):
                self._held.pop((session, transfer), None)
                self._warming.discard((session, transfer))
            case SessionClosed(session):
                for key in [key for key in self._held if key[0] == session]:
                    del self._held[key]
                    self._warming.discard(key)
            case _:
                pass
        return False

    def drain(self, wanted: bool) -> None:
        """Begin, or end and let in what was held."""
        self.draining = wanted
        if not wanted:
            self._warming.clear()
            while self._held:
                self._feed(self._held.pop(next(iter(self._held))))
