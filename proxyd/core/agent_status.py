"""What an agent says of itself and of its paths: values for metrics, status pages and trainers."""

from __future__ import annotations

import dataclasses

from proxyd.core.ended import Ended
from proxyd.core.ids import AgentName, EndpointName, LinkName


@dataclasses.dataclass(frozen=True, slots=True)
class PathState:
    """What an agent knows of the way to an endpoint; ``error`` is set where that is nothing."""

    link: str
    source: str
    rate_bytes_per_s: int
    rtt_ns: int
    queue_ns: int
    waiting_bytes: int
    age_ns: int
    error: str
    confidence: float = 0.0
    """How far to trust the rate, from 0 (a guess) to 1 (measured or configured, and fresh)."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSending:
    """One link as this agent sends on it; cumulative counts since start."""

    link: LinkName
    coordinator: str
    fallback: bool
    granted_taken_bytes: int
    unscheduled_bytes: int
    fallback_bytes: int
    observed_bytes: int
    padding_bytes: int
    backlog_bytes: int
    waiting_transfers: int


@dataclasses.dataclass(frozen=True, slots=True)
class AgentStatus:
    """What the agent's metrics and status page show."""

    agent: AgentName
    endpoints: tuple[tuple[EndpointName, int], ...]
    peers: tuple[tuple[AgentName, bool], ...]
    links: tuple[LinkSending, ...]
    outgoing: int
    incoming: int
    received_bytes: int
    corrupt_chunks: int
    resent_chunks: int
    resumed_transfers: int
    resumed_bytes: int
    resumed_clients: int
    announced: tuple[tuple[str, int], ...]
    """How announcements turned out: (outcome, number of them), cumulative."""
    ended: tuple[tuple[LinkName, int, Ended], ...]
    """(link, traffic class, figures), cumulative."""
