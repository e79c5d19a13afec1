"""What an agent knows of a peer agent that it sends to: connections, budgets, and how long it has been away."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque

from proxyd.core.effects import WantPeer
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.core.linkbook import NANOS
from proxyd.core.messages import LinkInfo
from proxyd.wire.arena import page_round_up
from proxyd.wire.peer import Cancel

FOUND_STREAMS = 2
MAX_STREAMS = 64
MAX_CANCELS = 1024
"""Cancellations that are said again after a break. OFFERED_ALL tells those that fall off, without their reason."""
SAID_NS = 60_000_000_000
"""What was said so long ago over connections that still stand has arrived: they end after some seconds in which nothing
gets through."""


@dataclasses.dataclass(slots=True)
class Peer:
    """A peer agent as a destination."""

    name: AgentName
    wanted: WantPeer | None = None
    connected: bool = False
    incarnation: int = 0
    """Its life that is (or was last) connected."""
    returning: dict[EndpointName, list[TransferId]] = dataclasses.field(default_factory=dict)
    """It was started again: BROKEN messages, by receivers that are not known to be back yet."""
    eager_bytes: int = 0
    eager_used_bytes: dict[tuple[EndpointName, EndpointName], int] = dataclasses.field(default_factory=dict)
    """Of each pair of endpoints, over the connection that stands."""
    last_error: str = "not connected yet"
    warm_ups: int = 0
    """Over the connections that stand."""
    free: deque[TransferId] = dataclasses.field(default_factory=deque)
    """Transfers with chunks to send that need no grant."""
    pace_bytes_per_s: int = -1
    yields: bool = False
    """What goes to it is of the least urgent class."""
    connected_ns: int = 0
    """When the connections that stand were made."""
    broke: bool = False
    """Connections to it have broken before: what is under way is to be offered again."""
    proven: bool = False
    """Data got through over the connections that stand."""
    away_since_ns: int | None = None
    """Since when nothing has got through; None: it is well. It ends with progress, not with a handshake."""
    cancels: OrderedDict[TransferId, tuple[int, Cancel]] = dataclasses.field(default_factory=OrderedDict)
    """Said (or to be said) of what it was offered, and when; repeated after a break, which may have swallowed them."""

    def cancelled(self, transfer: TransferId, frame: Cancel, now_ns: int) -> None:
        """Keep what is said of a message, for as long as it may have to be said again."""
        self.cancels[transfer] = now_ns, frame
        while len(self.cancels) > MAX_CANCELS or (self.connected and self._first_cancel_ns < now_ns - SAID_NS):
            self.cancels.popitem(last=False)

    @property
    def _first_cancel_ns(self) -> int:
        return next(iter(self.cancels.values()))[0]


def streams_for(info: LinkInfo, capacity_bytes: int) -> int:
    """As many streams as it takes to hold a link's BDP in their buffers: derived, not tuned.

    A link whose rate is being found has a few from the start: one that is added later is cold when it is needed.

    :param capacity_bytes: what one stream can have in flight.
    """
    bdp_bytes = page_round_up(info.rate_bytes_per_s * info.rtt_ns // NANOS)
    least = 1 if info.source == "configured" else FOUND_STREAMS
    return max(least, min(MAX_STREAMS, -(-bdp_bytes // capacity_bytes)))
