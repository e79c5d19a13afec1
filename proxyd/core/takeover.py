"""What an earlier life of this coordinator left behind, as far as agents tell.

Theory of operation
-------------------
A coordinator that begins (restarted, or a standby that got the lock) knows nothing, and agents may be anywhere between
three states: they spend the last grants of the life before, they go on at the fallback rates which that one handed out,
or they are back. All fallback rates together are at most 0.8 of the link, so from the beginning a sixth of the pace can
be granted whatever the others do.

An agent that comes back says what it was allowed to send by itself, and what all agents together were
(:class:`~proxyd.core.messages.Carried`). It sends under grants from there on, so its part of the link is free: what may
still be sent by agents that are not back is the total less the parts of those that are. When all are back the link is
whole again, which takes a round trip after the last one's return, not a lease. What is missing after a lease belongs to
agents that will not come: it is let go, as that of an agent whose session was lost is.

The returned ones keep their fallback rates, so that a coordinator that dies again right then leaves no more behind than
the link carries.
"""

from __future__ import annotations

from proxyd.core.ids import AgentName, LinkName
from proxyd.core.messages import Carried

RETURN_NS = 5_000_000_000
"""After a restart all living agents are back by then: they dial at least every 2.4 s (2 s and jitter)."""
ALL = (15, 16)
"""Rates follow the estimate in steps of a sixteenth (:meth:`~proxyd.core.fallback.FallbackRates.rebase`): so much of
the total is all of it."""


class Takeover:
    """The beginning of one life.

    :param succeeds: another one was there before (a standby can't know better). Else the first agent that has seen an
        earlier epoch tells.
    """

    def __init__(self, lease_ns: int, *, succeeds: bool) -> None:
        self._lease_ns = lease_ns
        self.succeeds = succeeds
        self.begun_ns: int | None = None
        self._left: dict[LinkName, dict[AgentName, int]] = {}
        """Fallback rates of those that are back."""
        self._totals: dict[LinkName, int] = {}

    def begin(self, now_ns: int) -> None:
        """The first event; others change nothing."""
        if self.begun_ns is None:
            self.begun_ns = now_ns

    def settles(self, now_ns: int) -> bool:
        """Whether agents may still send by themselves as an earlier life let them."""
        return self.succeeds and now_ns < self.settled_ns

    @property
    def settled_ns(self) -> int:
        """A lease after the beginning."""
        return (self.begun_ns or 0) + self._lease_ns

    @property
    def complete_ns(self) -> int:
        """Who isn't here by then is gone: agents come back one by one."""
        return (self.begun_ns or 0) + max(RETURN_NS, self._lease_ns)

    def returned(self, agent: AgentName, message: Carried, total_bytes_per_s: int) -> int:
        """An agent is back on a link; what those that aren't may send there, 0 when all are.

        :param total_bytes_per_s: what all agents may send by themselves as this life reckons it.
        """
        link = message.link
        rates = self._left.setdefault(link, {})
        rates[agent] = message.fallback_bytes_per_s
        told = max(self._totals.get(link, 0), message.fallback_total_bytes_per_s)
        self._totals[link] = told
        total = told or total_bytes_per_s
        back = sum(rates.values())
        return 0 if back * ALL[1] >= total * ALL[0] else total - back
