"""The coordinator's directory: which endpoint lives at which agent, and who has to be told of it.

The newest life of an endpoint wins, wherever and whenever it registers: each registration says how old that life is. An
agent that comes back registers all its trainers again, also one that hangs and whose rank lives elsewhere by now; in
the place of the present life it would end that, and with its own end nobody would be there. After a restart of the
coordinator, too, the order in which lives register means nothing.

An agent that lost its session keeps its endpoints while others see it, and for some time beyond: it usually comes back
within seconds, and a trainer that is alive must not be called gone. Once it is back, what it doesn't name again in a
lease is gone. Changes are collected and broadcast in batches.
"""

from __future__ import annotations

import dataclasses

from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import AgentHello, Directory, DirectoryEntry

MAX_ENDPOINTS_PER_SESSION = 100_000


@dataclasses.dataclass(slots=True)
class _Registered:
    entry: DirectoryEntry
    session: int
    begun_ns: int
    """When this life attached to its agent, on our clock. Any moment of another life's coming is later by a process
    start, far more than a message takes."""


@dataclasses.dataclass(slots=True)
class _Lost:
    agent: AgentName
    since_ns: int
    until_ns: int


class Registry:
    """Endpoints of all agents. Methods note changes; :meth:`take_changes` hands them out."""

    def __init__(self) -> None:
        self._known: dict[EndpointName, _Registered] = {}
        self._of_session: dict[int, set[EndpointName]] = {}
        self._came: dict[EndpointName, DirectoryEntry] = {}
        self._gone: dict[tuple[EndpointName, int], str] = {}
        self._unsure: set[EndpointName] = set()
        """Those of the gone ones that were only lost sight of."""
        self._lost: dict[int, _Lost] = {}
        """By session, of those with endpoints left."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def entries(self) -> tuple[DirectoryEntry, ...]:
        """All that are known, by name."""
        return tuple(self._known[name].entry for name in sorted(self._known, key=lambda e: (e.job, e.rank)))

    def whole(self, now_ns: int, *, full: bool) -> Directory:
        """All that are known, to be told.

        :param full: nothing else is there.
        """
        names = sorted(self._known, key=lambda e: (e.job, e.rank))
        return Directory(tuple(self._aged(name, now_ns) for name in names), (), full=full)

    def _aged(self, name: EndpointName, now_ns: int) -> DirectoryEntry:
        known = self._known[name]
        return dataclasses.replace(known.entry, age_ns=max(0, now_ns - known.begun_ns))

    def count(self, session: int) -> int:
        """Endpoints of one session."""
        return len(self._of_session.get(session, ()))

    @property
    def changed(self) -> bool:
        """There is something to broadcast."""
        return bool(self._came or self._gone)

    def up(self, session: int, hello: AgentHello, endpoint: EndpointName, incarnation: int, begun_ns: int) -> bool:
        """An endpoint registered, for the first time or again; False: its session has too many.

        :param begun_ns: when this life attached to its agent.
        """
        mine = self._of_session.setdefault(session, set())
        if endpoint not in mine and len(mine) >= MAX_ENDPOINTS_PER_SESSION:
            return False
        entry = DirectoryEntry(endpoint, incarnation, hello.agent, hello.incarnation, hello.data_address)
        before = self._known.get(endpoint)
        if before is not None and before.entry.incarnation != incarnation:
            # What an agent says of its own trainers needs no order.
            if begun_ns < before.begun_ns and before.entry.agent != hello.agent:
                return True
            self._note_gone(before.entry, f"replaced by a new process at {hello.agent}")
        elif before is not None:
            begun_ns = min(begun_ns, before.begun_ns)  # late messages make a life younger than it is, never older
        if before is not None:
            self._of_session[before.session].discard(endpoint)
        self._known[endpoint] = _Registered(entry, session, begun_ns)
        mine.add(endpoint)
        if before is None or before.entry != entry:
            self._came[endpoint] = entry
        return True

    def down(self, session: int, endpoint: EndpointName, incarnation: int, reason: str) -> None:
        """An endpoint ended. Word of an earlier life, or from an agent where it no longer lives, changes nothing."""
        known = self._known.get(endpoint)
        if known is not None and known.session == session and known.entry.incarnation == incarnation:
            self._remove(endpoint, reason)

    def session_lost(self, session: int, agent: AgentName, now_ns: int, until_ns: int) -> None:
        """An agent's session ended: its endpoints stay until then."""
        if self._of_session.get(session):
            self._lost[session] = _Lost(agent, now_ns, until_ns)
        else:
            self._of_session.pop(session, None)

    def agent_seen(self, agent: AgentName, until_ns: int) -> None:
        """Others are connected with an agent that has no session: its endpoints stay until then at least."""
        for lost in self._lost.values():
            if lost.agent == agent:
                lost.until_ns = max(lost.until_ns, until_ns)

    def agent_returned(self, agent: AgentName, until_ns: int) -> None:
        """An agent has a session again, also in a new life to which its trainers come back by themselves: what it
        doesn't name until then is gone."""
        for lost in self._lost.values():
            if lost.agent == agent:
                lost.until_ns = min(lost.until_ns, until_ns)

    def expire(self, now_ns: int) -> None:
        """Drop endpoints whose agent stayed away for too long."""
        for session, lost in sorted(self._lost.items()):
            if lost.until_ns <= now_ns:
                away_s = (now_ns - lost.since_ns) / 1e9
                self._drop(
                    session, f"its agent {lost.agent} has not been heard of (or not named it again) for {away_s:.1f} s"
                )

    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire` has something to do."""
        return min((lost.until_ns for lost in self._lost.values()), default=None)

    def take_changes(self, now_ns: int) -> Directory:
        """What came and went since the last call."""
        came = tuple(self._aged(name, now_ns) for name in sorted(self._came, key=lambda e: (e.job, e.rank)))
        gone = tuple((name, incarnation, reason) for (name, incarnation), reason in self._gone.items())
        unsure = tuple(sorted(self._unsure, key=lambda e: (e.job, e.rank)))
        self._came.clear()
        self._gone.clear()
        self._unsure.clear()
        return Directory(came, gone, False, unsure)

    def _drop(self, session: int, reason: str) -> None:
        for endpoint in sorted(self._of_session.get(session, ()), key=lambda e: (e.job, e.rank)):
            self._remove(endpoint, reason)
            self._unsure.add(endpoint)
        self._of_session.pop(session, None)
        self._lost.pop(session, None)

    def _remove(self, endpoint: EndpointName, reason: str) -> None:
        known = self._known.pop(endpoint)
        self._of_session[known.session].discard(endpoint)
        self._note_gone(known.entry, reason)

    def _note_gone(self, entry: DirectoryEntry, reason: str) -> None:
        self._came.pop(entry.endpoint, None)
        self._unsure.discard(entry.endpoint)
        self._gone[entry.endpoint, entry.incarnation] = reason
