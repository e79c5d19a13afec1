"""Where endpoints live, as the coordinators say: an agent's union of what each of them reported.

Coordinators never talk to each other, and agents register with all of them, so the same endpoint arrives several times.
The latest word wins; an endpoint is gone only when its very incarnation is reported gone (a late "gone" of an earlier
life must not remove the present one).
"""

from __future__ import annotations

import dataclasses

from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import Directory, DirectoryEntry


@dataclasses.dataclass(frozen=True, slots=True)
class Gone:
    """An endpoint that has ended."""

    entry: DirectoryEntry
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What one Directory message changed."""

    came: tuple[DirectoryEntry, ...]
    gone: tuple[Gone, ...]


class AgentDirectory:
    """Endpoints by name."""

    def __init__(self) -> None:
        self._entries: dict[EndpointName, DirectoryEntry] = {}
        self._sources: dict[EndpointName, set[str]] = {}

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

    def update(self, coordinator: str, message: Directory) -> Changes:
        """Take in one coordinator's message."""
        came: list[DirectoryEntry] = []
        gone: list[Gone] = []
        if message.full:
            listed = {entry.endpoint for entry in message.entries}
            for endpoint in sorted(self._entries, key=lambda e: (e.job, e.rank)):
                sources = self._sources[endpoint]
                if endpoint not in listed and coordinator in sources:
                    sources.discard(coordinator)
                    if not sources:
                        gone.append(self._remove(endpoint, "its agent is no longer registered with the coordinator"))
        for endpoint, incarnation, reason in message.gone:
            known = self._entries.get(endpoint)
            if known is not None and known.incarnation == incarnation:
                gone.append(self._remove(endpoint, reason))
        for entry in message.entries:
            known = self._entries.get(entry.endpoint)
            if known != entry:
                if known is not None and known.incarnation != entry.incarnation:
                    gone.append(Gone(known, f"replaced by a new process at {entry.agent}"))
                self._entries[entry.endpoint] = entry
                came.append(entry)
            self._sources.setdefault(entry.endpoint, set()).add(coordinator)
        return Changes(tuple(came), tuple(gone))

    def _remove(self, endpoint: EndpointName, reason: str) -> Gone:
        self._sources.pop(endpoint, None)
        return Gone(self._entries.pop(endpoint), reason)
