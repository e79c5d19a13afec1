"""What the agent machine is told at start: values only; the daemon takes them from its configuration and the kernel."""

from __future__ import annotations

import dataclasses

from proxyd.core.ids import AgentName

NANOS_PER_S = 1_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class AgentConfig:
    """Limits and names of one agent."""

    agent: AgentName
    incarnation: int
    data_address: str
    coordinators: tuple[str, ...] = ()
    """Addresses as configured; the first that owns a link wins."""
    unscheduled_bytes: int = 64 << 10
    """Messages up to this size go at once: a slot would cost them more than they cost the link."""
    stream_capacity_bytes: int = 4 << 20
    """Bytes that one stream can have in flight: the host's ``tcp_wmem`` maximum."""
    streams: int = 0
    """Data connections per peer; 0: derived from the link's BDP."""
    resolve_timeout_ns: int = 10 * NANOS_PER_S
    peer_timeout_ns: int = 30 * NANOS_PER_S
    linger_ns: int = 5 * NANOS_PER_S
    fallback_percent: tuple[int, int, int] = (100, 100, 100)
    """What each traffic class may have of this agent's fallback rate while a coordinator is silent; 0: it waits."""
    warm: bool = False
    """Warm connections up by padding (see :mod:`proxyd.core.warming`)."""
