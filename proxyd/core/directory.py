"""Where endpoints live, as the coordinators say: an agent's union of what each of them reported.

Coordinators never talk to each other, and agents register with all of them, so the same endpoint arrives several times.
An endpoint is there as long as one of those whose session stands lists it: a coordinator that lost sight of an agent
(its session broke, its lease ran out) says "gone" of endpoints that are well, and the others know better. One whose own
session is lost can't take back what it said, so it keeps nothing alive against the word of another; but while nobody
else speaks, what it said stands.

What a coordinator only lost sight of (its agent's session broke, the agent was started again) is *unsure*: a trainer
may live behind a cut, and come back with its agent. Whether it is taken for gone, and when, is the machine's business.

The latest life wins: entries say how old a life is. A late "gone" of an earlier life must not remove the present one,
nor may a coordinator that still believes in an earlier one bring it back.

Ages decide between two coordinators only. They are wrong by as long as a message was held up on its way, or as our own
host stood still (its clock stands too), and an endpoint whose present life passed for an earlier one would never be
reached again. So no coordinator's later word is judged by age against what it said itself: when it has taken the other
life back, or when both are at one agent and nobody else lists the other one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set

from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import Directory, DirectoryEntry

MAX_REMEMBERED = 10_000
"""Endpoints that are gone, and of which it is known how old their latest life was."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gone:
    """An endpoint that has ended."""

    entry: DirectoryEntry
    reason: str
    unsure: bool = False
    """A coordinator lost sight of it; whether it lives, nobody has said."""


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What one Directory message changed."""

    came: tuple[DirectoryEntry, ...]
    gone: tuple[Gone, ...]


class AgentDirectory:
    """Endpoints by name. The source "" is the agent itself, and what it says of its own trainers is final."""

    def __init__(self) -> None:
        self._entries: dict[EndpointName, DirectoryEntry] = {}
        self._sources: dict[EndpointName, set[str]] = {}
        self._doubts: dict[EndpointName, tuple[str, bool]] = {}
        """Gone, says one coordinator (with the reason, and whether it is unsure); another one still lists it."""
        self._begun_ns: dict[EndpointName, int] = {}
        """When the present life attached, on our clock."""
        self._past: dict[EndpointName, tuple[int, int, str]] = {}
        """Latest life of those that are gone, when it attached, and who said that it is gone; the one that went last
        stands last."""

    def get(self, endpoint: EndpointName) -> DirectoryEntry | None:
        """The endpoint's present life, or None."""
        return self._entries.get(endpoint)

    def ranks_of(self, job: str) -> list[int]:
        """Known ranks of a job, sorted: for error messages."""
        return sorted(endpoint.rank for endpoint in self._entries if endpoint.job == job)

    def of_job(self, job: str) -> list[DirectoryEntry]:
        """Known endpoints of a job, by rank."""
        return sorted((e for e in self._entries.values() if e.endpoint.job == job), key=lambda e: e.endpoint.rank)

    def of_agent(self, agent: AgentName) -> list[DirectoryEntry]:
        """Known endpoints at an agent, by name."""
        entries = (e for e in self._entries.values() if e.agent == agent)
        return sorted(entries, key=lambda e: (e.endpoint.job, e.endpoint.rank))

    def agents(self) -> list[AgentName]:
        """Agents that have endpoints, sorted."""
        return sorted({entry.agent for entry in self._entries.values()})

    def update(self, coordinator: str, message: Directory, alive: Set[str], now_ns: int) -> Changes:
        """Take in one coordinator's message, or "": this agent's own.

        :param alive: coordinators whose session stands.
        """
        came: list[DirectoryEntry] = []
        gone: list[Gone] = []
        if message.full:
            listed = {entry.endpoint: entry for entry in message.entries}
            for endpoint in sorted(self._entries, key=lambda e: (e.job, e.rank)):
                now = listed.get(endpoint)
                life = self._entries[endpoint].incarnation
                if (now is None or now.incarnation != life) and coordinator in self._sources[endpoint]:
                    reason = "its agent is no longer registered with the coordinator"
                    if now is not None:
                        reason = f"replaced by a new process at {now.agent}"
                    gone += self._unlist(coordinator, endpoint, reason, now is None, alive)
        for endpoint, incarnation, reason in message.gone:
            known = self._entries.get(endpoint)
            if known is not None and known.incarnation == incarnation:
                gone += self._unlist(coordinator, endpoint, reason, endpoint in message.unsure, alive)
        for entry in message.entries:
            endpoint = entry.endpoint
            known = self._entries.get(endpoint)
            begun_ns = now_ns - entry.age_ns
            latest = self._past.get(endpoint)
            if known is not None:
                latest = (known.incarnation, self._begun_ns[endpoint], "")
            if latest is not None and latest[0] == entry.incarnation:
                begun_ns = min(begun_ns, latest[1])  # late messages make a life younger than it is, never older
            elif latest is not None and begun_ns < latest[1] and coordinator:
                own = latest[2] == coordinator
                if known is not None and known.agent == entry.agent:
                    self._sources[endpoint].discard(coordinator)
                    own = not self._listed(endpoint, alive)
                if not own:
                    continue  # an earlier life, which somebody still believes in
            if known is not None and known.incarnation != entry.incarnation:
                gone.append(self._remove(endpoint, f"replaced by a new process at {entry.agent}", coordinator))
            self._past.pop(endpoint, None)
            self._begun_ns[endpoint] = begun_ns
            if known != entry:
                self._entries[endpoint] = entry
                came.append(entry)
            sources = self._sources.setdefault(endpoint, set())
            if coordinator not in sources:
                sources.add(coordinator)
                self._doubts.pop(endpoint, None)
        return Changes(tuple(came), tuple(gone))

    def session_lost(self, alive: Set[str]) -> Changes:
        """A coordinator's session ended: endpoints that only it still listed, against the word of another, are gone."""
        gone: list[Gone] = []
        for endpoint, (reason, unsure) in list(self._doubts.items()):
            if not self._listed(endpoint, alive):
                gone.append(self._remove(endpoint, reason, "", unsure=unsure))
        return Changes((), tuple(gone))

    def _unlist(
        self, coordinator: str, endpoint: EndpointName, reason: str, unsure: bool, alive: Set[str]
    ) -> Iterable[Gone]:
        """One source no longer lists an endpoint."""
        self._sources[endpoint].discard(coordinator)
        if coordinator and self._listed(endpoint, alive):
            self._doubts[endpoint] = (reason, unsure)
            return ()
        return (self._remove(endpoint, reason, coordinator, unsure=unsure),)

    def _listed(self, endpoint: EndpointName, alive: Set[str]) -> bool:
        return any(source in alive or not source for source in self._sources[endpoint])

    def _remove(self, endpoint: EndpointName, reason: str, coordinator: str, *, unsure: bool = False) -> Gone:
        del self._sources[endpoint]
        self._doubts.pop(endpoint, None)
        self._past[endpoint] = (self._entries[endpoint].incarnation, self._begun_ns.pop(endpoint), coordinator)
        if len(self._past) > MAX_REMEMBERED:
            del self._past[next(iter(self._past))]
        return Gone(self._entries.pop(endpoint), reason, unsure)
