"""Peers that are not connected to this agent: what their trainers send can't come, and ours must not wait without end.

Theory of operation
-------------------
An agent dials every agent that has trainers of a job that it has trainers of itself, and does so for as long as both
are there. So whoever may send to our trainers is connected, or tries to be; connections that stand carry pings, and end
after some seconds of silence, whether anything is under way or not. When nothing has come from a peer for
``peer_timeout``, our trainers are told that its ranks are out of reach: receives that wait for them fail, as messages
under way do. That takes no coordinator, which may see both sides well; and one that lost sight of the peer is no matter
either, its word counts by itself.

Such ranks have not ended. They are listed as before, in the same life, and what our trainers send to them goes its own
way, over connections that we dial. When the peer is connected again our trainers are told that its ranks are here.

Time runs from the latest of three moments: the peer's last word to us, the one from which on its rank was listed, and
the one from which on our trainer was attached: before these there was nothing to connect for. Each pair of them has its
own moment, so that a trainer that is started again and again takes no other one's end away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from proxyd.core.directory import AgentDirectory
from proxyd.core.effects import AgentEffect, TellPeerGone, TellPeerHere
from proxyd.core.events import InboundClosed
from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.linkbook import NANOS
from proxyd.core.messages import DirectoryEntry


@dataclasses.dataclass(slots=True)
class _Silence:
    """A peer that is not connected to us."""

    agent_incarnation: int
    """Its life, as it was connected or as its trainers were listed, whichever came last."""
    since_ns: int
    reason: str
    listed_ns: dict[EndpointName, int] = dataclasses.field(default_factory=dict)
    """Of those of its trainers that were listed since."""
    told_ns: int = -1
    """Until when all that was due has been said."""


class Away:
    """See the module's text. ``clients`` and ``directory`` are the machine's own; methods append to ``effects``."""

    def __init__(
        self,
        clients: Mapping[EndpointName, int],
        directory: AgentDirectory,
        effects: list[AgentEffect],
        peer_timeout_ns: int,
    ) -> None:
        self._clients = clients
        self._directory = directory
        self._effects = effects
        self._peer_timeout_ns = peer_timeout_ns
        self.connected: set[AgentName] = set()
        """Peers that are connected to this agent."""
        self._silences: dict[AgentName, _Silence] = {}
        self._joined_ns: dict[EndpointName, int] = {}
        self._due_ns: int | None = None

    def opened(self, peer: AgentName) -> None:
        """A peer is connected: those of its trainers that were out of reach are here."""
        self.connected.add(peer)
        silence = self._silences.pop(peer, None)
        if silence is None:
            return
        for client, entry, due_ns in self._pairs(peer, silence):
            if due_ns <= silence.told_ns:
                here = TellPeerHere(client, entry.endpoint.rank, entry.incarnation, peer.site)
                self._effects.append(here)

    def closed(self, event: InboundClosed, now_ns: int) -> None:
        """A peer is not connected any more."""
        if event.peer in self.connected:
            self.connected.discard(event.peer)
            since_ns = now_ns - min(event.silent_ns, self._peer_timeout_ns)
            self._silences[event.peer] = _Silence(event.incarnation, since_ns, event.reason)
            self._due_by(since_ns + self._peer_timeout_ns)

    def listed(self, entry: DirectoryEntry, now_ns: int) -> None:
        """Another agent's trainer is listed, in a life or at a place that wasn't known until now."""
        peer = entry.agent
        if peer in self.connected:
            return
        silence = self._silences.get(peer)
        if silence is None or silence.agent_incarnation != entry.agent_incarnation:
            reason = "it has not connected to this agent"
            silence = self._silences[peer] = _Silence(entry.agent_incarnation, now_ns, reason)
        silence.listed_ns[entry.endpoint] = now_ns
        self._due_by(now_ns + self._peer_timeout_ns)

    def joined(self, client: EndpointName, now_ns: int) -> None:
        """A trainer is attached here."""
        self._joined_ns[client] = now_ns
        if self._silences:
            self._due_by(now_ns + self._peer_timeout_ns)

    def left(self, client: EndpointName) -> None:
        """It is no longer."""
        self._joined_ns.pop(client, None)

    def next_deadline_ns(self) -> int | None:
        """When :meth:`tick` has something to do, at the earliest."""
        return self._due_ns

    def tick(self, now_ns: int) -> None:
        """Tell trainers which ranks have been out of reach for too long."""
        if self._due_ns is None or now_ns < self._due_ns:
            return
        for peer in sorted(self._silences):
            silence = self._silences[peer]
            if not self._directory.of_agent(peer):
                del self._silences[peer]  # whoever is listed there later has to connect from then on
                continue
            away_s = (now_ns - silence.since_ns) / NANOS
            why = f"agent {peer} has not been heard of for {away_s:.1f} s: {silence.reason}"
            for client, entry, due_ns in self._pairs(peer, silence):
                if silence.told_ns < due_ns <= now_ns:
                    gone = TellPeerGone(client, entry.endpoint.rank, entry.incarnation, why, returns=True)
                    self._effects.append(gone)
            silence.told_ns = now_ns
        self._due_ns = None
        for silence in self._silences.values():
            for begun_ns in (silence.since_ns, *silence.listed_ns.values(), *self._joined_ns.values()):
                if begun_ns + self._peer_timeout_ns > silence.told_ns:
                    self._due_by(begun_ns + self._peer_timeout_ns)

    def _due_by(self, due_ns: int) -> None:
        self._due_ns = due_ns if self._due_ns is None else min(self._due_ns, due_ns)

    def _pairs(self, peer: AgentName, silence: _Silence) -> Iterator[tuple[EndpointName, DirectoryEntry, int]]:
        """Our trainers, the peer's of the same job, and when the first has waited long enough for the second."""
        for client in sorted(self._clients, key=lambda e: (e.job, e.rank)):
            for entry in self._directory.of_agent(peer):
                if entry.endpoint.job == client.job and entry.endpoint != client:
                    begun_ns = max(
                        silence.since_ns, silence.listed_ns.get(entry.endpoint, 0), self._joined_ns.get(client, 0)
                    )
                    yield client, entry, begun_ns + self._peer_timeout_ns
