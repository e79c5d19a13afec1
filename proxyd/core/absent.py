"""Agents whose session was lost: who of them is gone, and who is only cut off from here?

A coordinator alone can't know. But agents are connected with each other, and notice within seconds when a peer is gone
(its host says so, or its pings are not answered). So beats name the missing ones, and whoever is connected with one of
them says that it is seen (:class:`~proxyd.core.messages.Seen`).

What follows: an agent that is cut off from its coordinator goes on at its fallback rate for as long as it takes,
so that rate has to be kept free as long, and its trainers are there. One that is gone holds a fifth of a
link of four agents back for no longer than a lease.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxyd.core.ids import AgentName

MAX_ABSENT = 256
"""Named in one beat; what is said of more than these isn't asked for."""
FORGET_LEASES = 4
"""Nobody has seen it for so long: it is gone. Longer than a lease, because those who see it may be cut off themselves
for a moment."""


class Absent:
    """Missing agents, and when each was last known to live."""

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._alive_ns: dict[AgentName, int] = {}
        self._incarnations: dict[AgentName, int] = {}
        """Of the same ones."""

    def lost(self, agent: AgentName, incarnation: int, now_ns: int) -> None:
        """Its session ended, and not because of what it said."""
        self._alive_ns[agent] = now_ns
        self._incarnations[agent] = incarnation

    def returned(self, agent: AgentName, incarnation: int) -> bool:
        """It has a session again. Answers whether it was missing, and is in the same life as before."""
        self._alive_ns.pop(agent, None)
        return self._incarnations.pop(agent, None) == incarnation

    def seen(self, agents: Iterable[AgentName], now_ns: int) -> list[AgentName]:
        """Somebody is connected with these; those of them that are missing, sorted."""
        known = sorted(agent for agent in set(agents) if agent in self._alive_ns)
        for agent in known:
            self._alive_ns[agent] = now_ns
        return known

    def names(self, now_ns: int) -> tuple[AgentName, ...]:
        """Who is missing now, sorted; those that nobody sees are forgotten after a while."""
        for agent in [a for a, at_ns in self._alive_ns.items() if now_ns - at_ns >= FORGET_LEASES * self._lease_ns]:
            del self._alive_ns[agent], self._incarnations[agent]
        return tuple(sorted(self._alive_ns)[:MAX_ABSENT])
