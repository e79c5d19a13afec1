"""What an agent knows of a peer agent that it sends to: connections, budgets, and how long it has been away."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque

from proxyd.core.effects import WantPeer
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.wire.peer import Cancel


@dataclasses.dataclass(slots=True)
class Peer:
    """A peer agent as a destination."""

    name: AgentName
    wanted: WantPeer | None = None
    connected: bool = False
    eager_bytes: int = 0
    eager_used_bytes: dict[tuple[EndpointName, EndpointName], int] = dataclasses.field(default_factory=dict)
    """Of each pair of endpoints, over the connection that stands."""
    last_error: str = "not connected yet"
    warm_ups: int = 0
    """Over the connections that stand."""
    free: deque[TransferId] = dataclasses.field(default_factory=deque)
    """Transfers with chunks to send that need no grant."""
    pace_bytes_per_s: int = -1
    connected_ns: int = 0
    """When the connections that stand were made."""
    broke: bool = False
    """Connections to it have broken before: what is under way is to be offered again."""
    proven: bool = False
    """Data got through over the connections that stand."""
    away_since_ns: int | None = None
    """Since when nothing has got through; None: it is well. It ends with progress, not with a handshake."""
    cancels: OrderedDict[TransferId, Cancel] = dataclasses.field(default_factory=OrderedDict)
    """Said (or to be said) of what it was offered; repeated after a break, which may have swallowed them."""
