"""What an agent does on a link whose coordinator is silent: it goes on by itself, slowly.

After half a second without a word it issues slots of its own at the rate that the last beat handed out (the sum of
these rates over all agents stays under the link), the most urgent class first. An agent that was never handed a rate,
or whose link nobody owns, fails what waits, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from proxyd.core.agent_config import AgentConfig
from proxyd.core.ids import TransferId
from proxyd.core.linkbook import FALLBACK_AFTER_NS, FALLBACK_SLICE_NS, NANOS, LinkBook
from proxyd.core.messages import Welcome
from proxyd.core.transfer import Outgoing, SendInput, SendState
from proxyd.wire.envelope import ErrorCode


@dataclasses.dataclass(slots=True)
class Session:
    """A control session with a coordinator."""

    address: str
    welcome: Welcome
    alive: bool
    heard_ns: int


class Alone:
    """Shares ``transfers`` and ``sessions`` with the asking side.

    :param cancel: ends a transfer with an error.
    :param begin: lets the peers of a link's started grants pump.
    """

    def __init__(
        self,
        config: AgentConfig,
        transfers: dict[TransferId, Outgoing],
        sessions: dict[str, Session],
        cancel: Callable[[Outgoing, ErrorCode, str, int], None],
        begin: Callable[[LinkBook, int], None],
    ) -> None:
        self._config = config
        self._transfers = transfers
        self._sessions = sessions
        self._cancel = cancel
        self._begin = begin
        self.lost: dict[str, str] = {}
        """Why a coordinator's session ended, or never stood."""

    def due_ns(self, book: LinkBook) -> int:
        """When :meth:`go_on` has something to do, while the coordinator stays silent."""
        if book.coordinator is None or book.fallback_rate_bytes_per_s == 0:
            # Of the one that asked first, not the least of all: this is reckoned at every event.
            oldest = self._transfers[next(iter(book.asked))].posted_ns
            if book.coordinator is None:
                return oldest + self._config.resolve_timeout_ns
            return max(oldest, book.last_heard_ns) + self._config.peer_timeout_ns
        return max(book.last_heard_ns + FALLBACK_AFTER_NS, book.fallback_next_ns, book.look_again_ns)

    def go_on(self, book: LinkBook, now_ns: int) -> None:
        """Go on without the coordinator: a slot of our own at the fallback rate, or an error where there is none."""
        if book.coordinator is None or book.fallback_rate_bytes_per_s == 0:
            why = self._why_no_grants(book, now_ns)
            for out in [self._transfers[transfer] for transfer in book.asked]:
                self._cancel(out, ErrorCode.CONTROL_LOST, f"{out.envelope.describe()}: {why}", now_ns)
            return
        waiting = sorted(
            (self._transfers[transfer] for transfer in book.asked),
            key=lambda o: (o.envelope.traffic, o.posted_ns, o.transfer),
        )
        rate = book.fallback_rate_bytes_per_s
        for out in waiting:
            if out.state not in (SendState.QUEUED, SendState.SENDING) or out.peer is None or out.padding:
                continue
            slot_bytes = max(out.chunk_bytes, rate * FALLBACK_SLICE_NS // NANOS // out.chunk_bytes * out.chunk_bytes)
            nbytes = min(slot_bytes, out.need_bytes)
            book.add_fallback(out.transfer, nbytes, rate, now_ns)
            book.fallback_next_ns = now_ns + nbytes * NANOS // rate
            out.granted_bytes += nbytes
            out.held_bytes += nbytes
            if out.need_bytes == 0:
                book.asked.pop(out.transfer, None)
            out.step(SendInput.GRANTED)
            self._begin(book, now_ns)
            return
        book.fallback_next_ns = now_ns + FALLBACK_SLICE_NS

    def _why_no_grants(self, book: LinkBook, now_ns: int) -> str:
        if book.coordinator is not None:
            silent_s = (now_ns - book.last_heard_ns) / NANOS
            return (
                f"no word for {silent_s:.0f} s from coordinator {book.coordinator}, which owns {book.link}, and it "
                "never said how fast to go on without it; start it again"
            )
        known = []
        for address in self._config.coordinators:
            session = self._sessions.get(address)
            if session is None:
                known.append(f"{address} was not reached: {self.lost.get(address, 'no answer yet')}")
            else:
                known.append(f"{address} owns {', '.join(session.welcome.owns)}")
        return (
            f"no coordinator owns {book.link} ({'; '.join(known) or 'none is configured'}); start the one that does, "
            f"or add {str(book.link)!r} to the `owns` of one"
        )
