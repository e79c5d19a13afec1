"""The coordinator's directory: which endpoint lives at which agent, and who has to be told of it.

The newest life of an endpoint wins, wherever it registers. An agent that lost its session keeps its endpoints for one
lease: it usually comes back within seconds, and a trainer that is alive must not be called gone. When it comes back it
registers all its trainers again, also one that hangs and whose rank lives elsewhere by now. That one is not the newest:
it would take the place of the present life, and with its end nobody would be there. Changes are collected and broadcast
in batches.
"""

from __future__ import annotations

import dataclasses

from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import AgentHello, Directory, DirectoryEntry

MAX_ENDPOINTS_PER_SESSION = 100_000
MAX_EARLIER = 10_000
"""How many endpoints' earlier lives are kept in mind."""


@dataclasses.dataclass(slots=True)
class _Registered:
    entry: DirectoryEntry
    session: int


class Registry:
    """Endpoints of all agents. Methods note changes; :meth:`take_changes` hands them out."""

    def __init__(self) -> None:
        self._known: dict[EndpointName, _Registered] = {}
        self._of_session: dict[int, set[EndpointName]] = {}
        self._came: dict[EndpointName, DirectoryEntry] = {}
        self._gone: dict[tuple[EndpointName, int], str] = {}
        self._lost_sessions: dict[int, tuple[AgentName, int]] = {}
        """Session -> (agent, when it ended), for those with endpoints left."""
        self._earlier: dict[EndpointName, int] = {}
        """The last life that was replaced or lost sight of, and may still be there."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def entries(self) -> tuple[DirectoryEntry, ...]:
        """All that are known, by name."""
        return tuple(self._known[name].entry for name in sorted(self._known, key=lambda e: (e.job, e.rank)))

    def count(self, session: int) -> int:
        """Endpoints of one session."""
        return len(self._of_session.get(session, ()))

    @property
    def changed(self) -> bool:
        """There is something to broadcast."""
        return bool(self._came or self._gone)

    def up(self, session: int, hello: AgentHello, endpoint: EndpointName, incarnation: int) -> bool:
        """An endpoint registered, for the first time or again; False: its session has too many."""
        mine = self._of_session.setdefault(session, set())
        if endpoint not in mine and len(mine) >= MAX_ENDPOINTS_PER_SESSION:
            return False
        entry = DirectoryEntry(endpoint, incarnation, hello.agent, hello.incarnation, hello.data_address)
        before = self._known.get(endpoint)
        if before is not None and before.entry.incarnation != incarnation == self._earlier.get(endpoint):
            return True
        if before is not None:
            self._of_session[before.session].discard(endpoint)
            if before.entry.incarnation != incarnation:
                self._note_gone(before.entry, f"replaced by a new process at {hello.agent}")
                self._remember(before.entry)
        self._known[endpoint] = _Registered(entry, session)
        mine.add(endpoint)
        if before is None or before.entry != entry:
            self._came[endpoint] = entry
        return True

    def down(self, session: int, endpoint: EndpointName, incarnation: int, reason: str) -> None:
        """An endpoint ended. Word of an earlier life, or from an agent where it no longer lives, changes nothing."""
        known = self._known.get(endpoint)
        if known is not None and known.session == session and known.entry.incarnation == incarnation:
            self._remove(endpoint, reason)
        if self._earlier.get(endpoint) == incarnation:
            del self._earlier[endpoint]

    def session_lost(self, session: int, agent: AgentName, now_ns: int) -> None:
        """An agent's session ended: its endpoints stay for one lease."""
        if self._of_session.get(session):
            self._lost_sessions[session] = (agent, now_ns)
        else:
            self._of_session.pop(session, None)

    def agent_returned(self, agent: AgentName, incarnation: int) -> None:
        """An agent has a session again. If it is a new life, what its old ones had is gone; else its endpoints still
        have the rest of their lease to register anew."""
        for session, (name, _) in sorted(self._lost_sessions.items()):
            if name == agent:
                for endpoint in sorted(self._of_session[session], key=lambda e: (e.job, e.rank)):
                    if self._known[endpoint].entry.agent_incarnation != incarnation:
                        self._remove(endpoint, f"its agent {agent} was restarted")

    def expire(self, now_ns: int, lease_ns: int) -> None:
        """Drop endpoints whose agent stayed away for a lease."""
        for session, (agent, lost_ns) in sorted(self._lost_sessions.items()):
            if now_ns - lost_ns >= lease_ns:
                self._drop(
                    session,
                    f"its agent {agent} has not been heard of (or not named it again) for {lease_ns / 1e9:.1f} s",
                )

    def next_deadline_ns(self, lease_ns: int) -> int | None:
        """When :meth:`expire` has something to do."""
        if not self._lost_sessions:
            return None
        return min(lost_ns for _, lost_ns in self._lost_sessions.values()) + lease_ns

    def take_changes(self) -> Directory:
        """What came and went since the last call."""
        came = tuple(self._came[name] for name in sorted(self._came, key=lambda e: (e.job, e.rank)))
        gone = tuple((name, incarnation, reason) for (name, incarnation), reason in self._gone.items())
        self._came.clear()
        self._gone.clear()
        return Directory(came, gone, full=False)

    def _drop(self, session: int, reason: str) -> None:
        for endpoint in sorted(self._of_session.get(session, ()), key=lambda e: (e.job, e.rank)):
            self._remember(self._known[endpoint].entry)
            self._remove(endpoint, reason)
        self._of_session.pop(session, None)
        self._lost_sessions.pop(session, None)

    def _remove(self, endpoint: EndpointName, reason: str) -> None:
        known = self._known.pop(endpoint)
        self._of_session[known.session].discard(endpoint)
        self._note_gone(known.entry, reason)

    def _remember(self, entry: DirectoryEntry) -> None:
        self._earlier.pop(entry.endpoint, None)
        self._earlier[entry.endpoint] = entry.incarnation
        if len(self._earlier) > MAX_EARLIER:
            del self._earlier[next(iter(self._earlier))]

    def _note_gone(self, entry: DirectoryEntry, reason: str) -> None:
        self._came.pop(entry.endpoint, None)
        self._gone[entry.endpoint, entry.incarnation] = reason
