"""Warm-up of connections: padding, while nobody has anything to send, so that the first slot isn't spent in slow start.

A fresh connection's congestion window holds ten packets. Under grants a sender gets the whole link for a slot, and a
cold window needs seven round trips to fill it (measured over 400 Mbit/s and 60 ms: 8 MiB in 0.57 s instead of 0.25 s).
TCP gives no way to ask for a window: it grows with what is sent while the window is the limit, to about the bytes sent.
So an agent sends *padding*, chunks that the receiver throws away, to each of a few peers once:

* granted like everything else, in the class ``bulk`` and of no job, so it is paced, counted, and behind all traffic;
* one connection at a time, only while nobody waits for the link, and only until this agent has something real to send
  on it: from then on the traffic itself keeps windows warm, and padding would be in its way;
* to the first few peers in the order of their names: a job that talks to everybody warms itself;
* half a BDP at least must be missing: with half a window the first slot takes a tenth longer, with a whole one nothing.

It is of no use where the kernel takes windows back during pauses (``tcp_slow_start_after_idle`` with cubic): the daemon
then switches it off.
"""

from __future__ import annotations

from proxyd.core.agent_config import AgentConfig
from proxyd.core.asking import Asking
from proxyd.core.ids import AgentName, TransferId
from proxyd.core.linkbook import NANOS, LinkBook
from proxyd.core.peering import Peer
from proxyd.core.transfer import Outgoing, SendState
from proxyd.wire.envelope import Envelope, TrafficClass

WARM_PEERS = 8
"""Peers of a link that an agent warms: 64 agents with 64 peers each would fill the link for minutes."""
WARM_UPS = 3
"""Tries for one life of a connection: losses, or a link that turns out larger than it was thought, may need another."""
MAX_PADDING_BYTES = 64 << 20
LEAST_BDP_BYTES = 256 << 10
"""Below that the initial window is good enough."""


class Warmer:
    """Decides whom to warm, and when. ``transfers`` and ``peers`` are the sender's."""

    def __init__(
        self, config: AgentConfig, transfers: dict[TransferId, Outgoing], peers: dict[AgentName, Peer], asking: Asking
    ) -> None:
        self._config = config
        self._transfers = transfers
        self._peers = peers
        self._asking = asking
        self._sequence = 0
        self.under_way: Outgoing | None = None

    def consider(self, now_ns: int) -> None:
        """Begin a warm-up if one is due. Cheap: called with every beat."""
        if not self._config.warm or self.under_way is not None:
            return
        for book in list(self._asking.links.values()):
            if self._is_idle(book, now_ns) and (peer := self._coldest_of(book)) is not None:
                self._begin(book, peer, now_ns)
                return

    def _is_idle(self, book: LinkBook, now_ns: int) -> bool:
        info = book.info
        if book.coordinator is None or info is None or book.observed or book.silent(now_ns) or info.waiting_bytes:
            return False
        # Between the bursts of a job that runs, padding would be in the way of the next one.
        return not book.used

    def _coldest_of(self, book: LinkBook) -> Peer | None:
        """The next peer to warm; None: all that shall be warm are."""
        bdp_bytes = self._bdp_bytes(book)
        if bdp_bytes < LEAST_BDP_BYTES:
            return None
        site = book.link.dst_site
        for name in sorted(name for name in self._peers if name.site == site)[:WARM_PEERS]:
            peer = self._peers[name]
            counts = book.peers.get(peer.name)
            if not peer.connected or counts is None or peer.warm_ups >= WARM_UPS:
                continue
            if 0 < counts.window_bytes < bdp_bytes // 2:
                return peer
        return None

    def _bdp_bytes(self, book: LinkBook) -> int:
        info = book.info
        return min(MAX_PADDING_BYTES, info.rate_bytes_per_s * info.rtt_ns // NANOS) if info is not None else 0

    def _begin(self, book: LinkBook, peer: Peer, now_ns: int) -> None:
        assert book.info is not None
        self._sequence += 1
        peer.warm_ups += 1
        nbytes = self._bdp_bytes(book) - book.peers[peer.name].window_bytes
        out = Outgoing(
            TransferId(self._config.incarnation, self._sequence),
            Envelope("", 0, 0, "", 0, TrafficClass.BULK, nbytes, "", ()),
            now_ns,
            nbytes,
            state=SendState.QUEUED,
            peer=peer.name,
            link=book.link,
            chunk_bytes=book.info.chunk_bytes,
            wanted_bytes=nbytes,
            padding=True,
        )
        self._transfers[out.transfer] = self.under_way = out
        self._asking.request(out, now_ns)

    def ended(self, out: Outgoing) -> None:
        """A warm-up is over, in whichever way."""
        if self.under_way is out:
            self.under_way = None
