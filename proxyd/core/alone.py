"""What an agent does on a link whose coordinator is silent: it goes on by itself, slowly.

After half a second without a word it issues slots of its own at the rate that the last beat handed out (the sum of
these rates over all agents stays under the link), the most urgent class first. The operator may let a class have only a
part of that rate, or nothing: such messages wait. An agent that was never handed a rate, or whose link nobody owns,
fails what waits, with the reason.

**Backing off.** The rates were right when they were handed out. A link that has lost capacity since then, or a
coordinator that handed the same bytes out twice before it died, shows in losses, and nobody is there to react. So each
agent does by itself what TCP does: where more than one packet in fifty was lost it takes seven tenths of its rate, and
grows back slowly. Fewer losses are the path's own, and TCP's business.

**The way back** needs nothing: an agent that hears its coordinator asks it from there on, and spends the slot of 20 ms
at most that it still holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from proxyd.core.agent_config import AgentConfig
from proxyd.core.effects import AgentEffect, FallbackBegan, FallbackEnded
from proxyd.core.ids import LinkName, TransferId
from proxyd.core.linkbook import FALLBACK_AFTER_NS, FALLBACK_SLICE_NS, NANOS, LinkBook
from proxyd.core.owners import Owners
from proxyd.core.transfer import Outgoing, SendInput, SendState
from proxyd.wire.envelope import ErrorCode

LOOK_NS = 100_000_000
"""How often losses are looked at: more than a round trip of most paths, so that one event counts once."""
PACKET_BYTES = 1448
LOSS_SHARE = 50
"""Losses count from one packet in so many on: random losses of a long line are fewer, an overfilled buffer's more."""
DOWN = (7, 10)
"""As CUBIC does (RFC 9438, section 4.6)."""
WHOLE = 1 << 10
UP = WHOLE // 32
"""Growth per look: from half to the whole rate takes 2 to 3 s."""
LEAST = WHOLE // 16


@dataclasses.dataclass(slots=True)
class _Alone:
    """One link without its coordinator."""

    since_ns: int
    bytes_before: int
    share: int = WHOLE
    """Part of the rate that losses leave, of ``WHOLE``."""
    looked_ns: int = 0
    sent_bytes: int = 0
    retransmits: int = 0
    """Both as of the last look."""

    def look(self, book: LinkBook, now_ns: int) -> None:
        """Adapt to what was lost since the last time."""
        if now_ns - self.looked_ns < max(LOOK_NS, 2 * book.one_way_ns):
            return
        sent, retransmits = book.fallback_bytes, sum(counts.retransmits for counts in book.peers.values())
        if self.looked_ns and sent > self.sent_bytes:
            lost_bytes = max(0, retransmits - self.retransmits) * PACKET_BYTES
            if lost_bytes * LOSS_SHARE > sent - self.sent_bytes:
                self.share = max(LEAST, self.share * DOWN[0] // DOWN[1])
            else:
                self.share = min(WHOLE, self.share + UP)
        self.looked_ns, self.sent_bytes, self.retransmits = now_ns, sent, retransmits


class Alone:
    """Shares ``transfers`` and ``owners`` with the asking side.

    :param cancel: ends a transfer with an error.
    :param begin: lets the peers of a link's started grants pump.
    """

    def __init__(
        self,
        config: AgentConfig,
        transfers: dict[TransferId, Outgoing],
        owners: Owners,
        effects: list[AgentEffect],
        cancel: Callable[[Outgoing, ErrorCode, str, int], None],
        begin: Callable[[LinkBook, int], None],
    ) -> None:
        self._config = config
        self._transfers = transfers
        self._owners = owners
        self._effects = effects
        self._cancel = cancel
        self._begin = begin
        self._links: dict[LinkName, _Alone] = {}

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
        alone = self._links.get(book.link)
        if alone is None:
            alone = self._links[book.link] = _Alone(now_ns, book.fallback_bytes)
            silent_ns, rate = now_ns - book.last_heard_ns, book.fallback_rate_bytes_per_s
            self._effects.append(FallbackBegan(book.link, book.coordinator, silent_ns, rate))
        alone.look(book, now_ns)
        waiting = sorted(
            (self._transfers[transfer] for transfer in book.asked),
            key=lambda o: (o.envelope.traffic, o.posted_ns, o.transfer),
        )
        for out in waiting:
            if out.state not in (SendState.QUEUED, SendState.SENDING) or out.peer is None or out.padding:
                continue
            percent = self._config.fallback_percent[out.envelope.traffic]
            rate = book.fallback_rate_bytes_per_s * percent // 100 * alone.share // WHOLE
            if not rate:
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

    def heard(self, book: LinkBook, now_ns: int) -> None:
        """The coordinator of a link is heard (again), or another one owns it: messages wait for grants from here on."""
        if self._links and (alone := self._links.pop(book.link, None)) is not None:
            nbytes = book.fallback_bytes - alone.bytes_before
            self._effects.append(FallbackEnded(book.link, now_ns - alone.since_ns, nbytes))

    def _why_no_grants(self, book: LinkBook, now_ns: int) -> str:
        if book.coordinator is None:
            return self._owners.why_nobody(book.link)
        silent_s = (now_ns - book.last_heard_ns) / NANOS
        return (
            f"no word for {silent_s:.0f} s from coordinator {book.coordinator}, which owns {book.link}, and it "
            "never said how fast to go on without it; start it again"
        )
