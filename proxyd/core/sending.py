"""The sending half of an agent: from a posted message to its acknowledgement.

For each destination endpoint messages are offered strictly in the order in which they were posted (that order is what the
receiving client matches by); from there on they overlap. Memory at the receiver comes first (credit), then the link
(grants): a transfer asks for slots only when it holds credit, so a receiver that is full stops its own senders' grants and
nobody else's.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque

from proxyd.core.agent_config import AgentConfig
from proxyd.core.directory import AgentDirectory
from proxyd.core.effects import (
    AgentEffect,
    Chunk,
    Pump,
    SetPace,
    TellSendDone,
    TellSendFailed,
    TellSendState,
    ToCoordinator,
    ToPeer,
    WantPeer,
)
from proxyd.core.events import SendProgress
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId, owns_link
from proxyd.core.linkbook import FALLBACK_AFTER_NS, FALLBACK_SLICE_NS, NANOS, HeldGrant, LinkBook, PeerCounts
from proxyd.core.messages import (
    Announce,
    CancelRequest,
    DirectoryEntry,
    Grant,
    LinkInfo,
    Queued,
    Request,
    TransferDone,
    Welcome,
)
from proxyd.core.transfer import MAX_RESENDS, PHASES, Outgoing, SendInput, SendState
from proxyd.wire import peer as wire
from proxyd.wire.arena import page_round_up
from proxyd.wire.client import SendPhase
from proxyd.wire.envelope import Envelope, ErrorCode

LOCAL_CHUNK_BYTES = 1 << 20
"""Chunk of a path within the site: large enough for full loopback speed, small enough to stay in a cache."""
MAX_STREAMS = 64
ANNOUNCEMENTS_PER_CHANNEL = 4096
"""Announcements kept for messages that were never posted (a shorter last batch, say); the oldest go first."""


@dataclasses.dataclass(slots=True)
class Peer:
    """A peer agent as a destination."""

    name: AgentName
    wanted: WantPeer | None = None
    connected: bool = False
    eager_bytes: int = 0
    last_error: str = "not connected yet"
    free: deque[TransferId] = dataclasses.field(default_factory=deque)
    """Transfers with chunks to send that need no grant."""
    pace_bytes_per_s: int = -1


@dataclasses.dataclass(slots=True)
class Session:
    """A control session with a coordinator."""

    address: str
    welcome: Welcome
    alive: bool
    reason: str = ""


class Sender:
    """Outgoing transfers of one agent. Methods append to ``effects``; the machine hands those to the driver."""

    def __init__(self, config: AgentConfig, directory: AgentDirectory, effects: list[AgentEffect]) -> None:
        self.config = config
        self.directory = directory
        self.effects = effects
        self.transfers: dict[TransferId, Outgoing] = {}
        self.links: dict[LinkName, LinkBook] = {}
        self.peers: dict[AgentName, Peer] = {}
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self._unoffered: dict[EndpointName, deque[TransferId]] = {}
        self._eager_used_bytes: dict[tuple[EndpointName, EndpointName], int] = {}
        self._announced: dict[tuple[str, int, int, str, int], deque[int]] = {}
        self._next_announcement = 1
        self.done_bytes: dict[tuple[LinkName, int, bool], int] = {}
        self.done_count: dict[tuple[LinkName, int, bool], int] = {}
        self.resent_chunks = 0

    # ---------------------------------------------------------------------------------------------------- from clients

    def post(self, transfer: TransferId, envelope: Envelope, filled_bytes: int, now_ns: int) -> Outgoing:
        """A trainer posted a message to a remote endpoint, or to one that isn't known yet."""
        out = Outgoing(transfer, envelope, now_ns, filled_bytes)
        self.transfers[transfer] = out
        channel = (envelope.job, envelope.src_rank, envelope.dst_rank, envelope.group, envelope.tag)
        announced = self._announced.get(channel)
        if announced:
            out.announcement = announced.popleft()
            if not announced:
                del self._announced[channel]
        self._unoffered.setdefault(envelope.destination, deque()).append(transfer)
        self.offer_waiting(envelope.destination, now_ns)
        return out

    def filled(self, out: Outgoing, filled_bytes: int, now_ns: int) -> None:
        """More of a message's block holds its bytes."""
        if not out.filled_bytes <= filled_bytes <= out.nbytes:
            return
        out.filled_bytes = filled_bytes
        if out.state is SendState.SENDING and out.peer is not None:
            self.effects.append(Pump(out.peer))
            self._pace(out.peer, now_ns)

    def announce(self, envelope: Envelope, ready_in_ns: int) -> None:
        """A trainer will post this message in ``ready_in_ns``: keep its place in the queue."""
        entry = self.directory.get(envelope.destination)
        if entry is None or entry.agent.site == self.config.agent.site:
            return
        book = self._book(LinkName(self.config.agent.site, entry.agent.site))
        if book.coordinator is None:
            return
        channel = (envelope.job, envelope.src_rank, envelope.dst_rank, envelope.group, envelope.tag)
        waiting = self._announced.setdefault(channel, deque())
        if len(waiting) >= ANNOUNCEMENTS_PER_CHANNEL:
            waiting.popleft()
        number = self._next_announcement
        self._next_announcement += 1
        waiting.append(number)
        message = Announce(number, book.link, envelope.job, envelope.traffic_class, envelope.nbytes, ready_in_ns)
        self.effects.append(ToCoordinator(book.coordinator, message))

    def cancel(self, out: Outgoing, code: ErrorCode, message: str, now_ns: int) -> None:
        """Give a transfer up from this side: tell the peer, the coordinator and the trainer."""
        if out.finished:
            return
        if out.peer is not None and out.state is not SendState.RESOLVING:
            frame = wire.Cancel(code, message[:1024])
            self.effects.append(ToPeer(out.peer, False, out.transfer, frame))
        self.fail(out, code, message, now_ns)

    def fail(self, out: Outgoing, code: ErrorCode, message: str, now_ns: int) -> None:
        """End a transfer without success. The trainer gets ``message``."""
        if out.finished:
            return
        if out.state is SendState.RESOLVING:
            waiting = self._unoffered.get(out.envelope.destination)
            if waiting and out.transfer in waiting:
                waiting.remove(out.transfer)
        # The receiver gives the budget of a failed transfer back itself (EagerReturned); without a receiver the whole
        # pair starts over when the peer connects again.
        bytes_done = min(out.nbytes, out.taken_bytes)
        out.step(SendInput.FAILED)
        self._close(out, False, 0, now_ns)
        self.effects.append(TellSendFailed(out.envelope.source, out.transfer, code, message, bytes_done))

    def _close(self, out: Outgoing, ok: bool, arrival_span_ns: int, now_ns: int) -> None:
        del self.transfers[out.transfer]
        key = (self._link_of(out), out.envelope.traffic, ok)
        self.done_count[key] = self.done_count.get(key, 0) + 1
        self.done_bytes[key] = self.done_bytes.get(key, 0) + (out.nbytes if ok else 0)
        if out.link is None:
            return
        book = self.links[out.link]
        book.drop_transfer(out.transfer, now_ns)
        book.asked.pop(out.transfer, None)
        if book.coordinator is not None and not (out.free and not out.requested):
            if not ok:
                self.effects.append(ToCoordinator(book.coordinator, CancelRequest(out.transfer, "transfer failed")))
            done = TransferDone(out.transfer, out.link, out.envelope.traffic_class, out.nbytes, ok, arrival_span_ns)
            self.effects.append(ToCoordinator(book.coordinator, done))

    def _link_of(self, out: Outgoing) -> LinkName:
        site = self.config.agent.site
        return LinkName(site, out.peer.site if out.peer is not None else site)

    def forget(self, out: Outgoing) -> None:
        """Drop a handed-over message whose end was told elsewhere."""
        del self.transfers[out.transfer]
        link = LinkName(self.config.agent.site, self.config.agent.site)
        key = (link, out.envelope.traffic, True)
        self.done_count[key] = self.done_count.get(key, 0) + 1
        self.done_bytes[key] = self.done_bytes.get(key, 0) + out.nbytes

    def waits_for(self, destination: EndpointName) -> bool:
        """Whether messages wait for a destination that can't be reached yet."""
        return bool(self._unoffered.get(destination))

    def take_waiting(self, destination: EndpointName) -> list[Outgoing]:
        """Take out what waits for a destination, in order."""
        return [self.transfers[transfer] for transfer in self._unoffered.pop(destination, ())]

    def destination_gone(self, endpoint: EndpointName, agent: AgentName, reason: str, now_ns: int) -> None:
        """A destination's process ended: what was offered to that life of it will never be received."""
        for out in [o for o in self.transfers.values() if o.envelope.destination == endpoint and o.peer == agent]:
            if out.state not in (SendState.RESOLVING, SendState.HANDED_OVER):
                self.cancel(out, ErrorCode.PEER_LOST, f"{out.envelope.describe()}: receiver gone: {reason}", now_ns)

    # ------------------------------------------------------------------------------------------------- offering, credit

    def offer_waiting(self, destination: EndpointName, now_ns: int) -> None:
        """Offer what waits for ``destination``, in order, as far as it can be reached."""
        waiting = self._unoffered.get(destination)
        if not waiting:
            return
        entry = self.directory.get(destination)
        if entry is None:
            return
        peer = self.want_peer(entry)
        if not peer.connected:
            return
        while waiting:
            self._offer(self.transfers[waiting.popleft()], entry, peer, now_ns)
        del self._unoffered[destination]

    def _offer(self, out: Outgoing, entry: DirectoryEntry, peer: Peer, now_ns: int) -> None:
        envelope = out.envelope
        out.peer = peer.name
        remote = entry.agent.site != self.config.agent.site
        out.link = LinkName(self.config.agent.site, entry.agent.site) if remote else None
        book = self._book(out.link) if out.link is not None else None
        info = book.info if book is not None else None
        chunk_bytes = info.chunk_bytes if info is not None else LOCAL_CHUNK_BYTES
        out.chunk_bytes = max(wire.MIN_CHUNK_BYTES, min(wire.MAX_CHUNK_BYTES, chunk_bytes))
        out.free = out.link is None or out.nbytes <= self.config.unscheduled_bytes
        out.wanted_bytes = out.nbytes
        pair = (envelope.source, envelope.destination)
        used = self._eager_used_bytes.get(pair, 0)
        out.eager = used + out.nbytes <= peer.eager_bytes
        if out.eager:
            self._eager_used_bytes[pair] = used + out.nbytes
        offer = wire.Offer(envelope, entry.incarnation, out.chunk_bytes, out.eager)
        self.effects.append(ToPeer(peer.name, False, out.transfer, offer))
        if not out.eager:
            out.step(SendInput.OFFERED)
        elif out.free:
            out.step(SendInput.OFFERED_FREE)
            self._send_free(out, peer)
        else:
            out.step(SendInput.OFFERED_EAGER)
            self._request(out)
        self._tell_state(out, 0)

    def credited(self, out: Outgoing, now_ns: int) -> None:
        """The receiver holds memory for it now."""
        if out.state is not SendState.CREDIT or out.peer is None:
            return  # a repeated CREDIT, or one that crossed our cancel
        out.step(SendInput.CREDITED)
        if out.free:
            out.step(SendInput.GRANTED)
            self._send_free(out, self.peers[out.peer])
        else:
            self._request(out)
        self._tell_state(out, 0)

    def turned_down(self, out: Outgoing, now_ns: int) -> None:
        """The receiver had no memory for an eager offer: it throws the data away; keep it whole for CREDIT."""
        if not out.eager or out.state not in (SendState.QUEUED, SendState.SENDING, SendState.UNACKED):
            return
        out.eager = False
        pair = (out.envelope.source, out.envelope.destination)
        self.eager_returned(pair, out.nbytes)
        out.step(SendInput.TURNED_DOWN)
        if out.link is not None:
            self.links[out.link].drop_transfer(out.transfer, now_ns)
        out.start_over()
        self._tell_state(out, 0)

    def eager_returned(self, pair: tuple[EndpointName, EndpointName], nbytes: int) -> None:
        """A part of the eager budget of an endpoint pair is free again."""
        left = self._eager_used_bytes.get(pair, 0) - nbytes
        if left > 0:
            self._eager_used_bytes[pair] = left
        else:
            self._eager_used_bytes.pop(pair, None)

    def _send_free(self, out: Outgoing, peer: Peer) -> None:
        if out.nbytes == 0:
            out.step(SendInput.ALL_SENT)
            return
        peer.free.append(out.transfer)
        self.effects.append(Pump(peer.name))

    # ----------------------------------------------------------------------------------------------- coordinators, grants

    def _book(self, link: LinkName) -> LinkBook:
        book = self.links.get(link)
        if book is None:
            book = self.links[link] = LinkBook(link)
            session = self._owner(link)
            if session is not None:
                # Not heard yet, in the sense of its beats: a link that nobody used has no silence to count from.
                info = next((i for i in session.welcome.links if i.link == link), None)
                book.begin_session(session.address, session.welcome.epoch, info, 0)
        return book

    def _owner(self, link: LinkName) -> Session | None:
        for session in self.sessions.values():
            if session.alive and owns_link(session.welcome.owns, link):
                return session
        return None

    def session_began(self, address: str, welcome: Welcome, now_ns: int) -> None:
        """A control session stands: take its links over, ask again for all that waits on them."""
        self.sessions[address] = Session(address, welcome, alive=True)
        infos = {info.link: info for info in welcome.links}
        for link in infos:
            self._book(link)
        for book in self.links.values():
            owner = self._owner(book.link)
            if owner is None or owner.address != address:
                continue
            for held in book.begin_session(address, welcome.epoch, infos.get(book.link), now_ns):
                if (out := self.transfers.get(held.transfer)) is not None:
                    self._returned(out, held)
            for out in self.transfers.values():
                if out.link == book.link and not out.free:
                    out.session_base_bytes = out.granted_bytes
                    if out.state in (SendState.QUEUED, SendState.SENDING):
                        self._request(out)
        for peer in self.peers.values():
            self._update_streams(peer)
        for destination in list(self._unoffered):
            self.offer_waiting(destination, now_ns)

    def session_lost(self, address: str, reason: str) -> None:
        """A control session ended; silence starts to count for its links."""
        session = self.sessions.get(address)
        if session is not None:
            session.alive = False
            session.reason = reason

    def heard(self, address: str, now_ns: int) -> None:
        """Any word of a coordinator is a sign of life for its links."""
        for book in self.links.values():
            if book.coordinator == address:
                book.last_heard_ns = now_ns

    def update_link(self, info: LinkInfo) -> None:
        """Fresh figures of a link."""
        self._book(info.link).info = info

    def set_fallback(self, address: str, link: LinkName, rate_bytes_per_s: int) -> None:
        """What this agent may send by itself on a link when its coordinator falls silent."""
        book = self._book(link)
        if book.coordinator == address:
            book.fallback_rate_bytes_per_s = rate_bytes_per_s

    def _request(self, out: Outgoing) -> None:
        assert out.link is not None and out.peer is not None
        book = self._book(out.link)
        if out.need_bytes == 0:
            return
        book.asked[out.transfer] = None
        if book.coordinator is None:
            return
        out.requested = True
        request = Request(
            out.transfer,
            out.link,
            out.peer,
            out.envelope.job,
            out.envelope.traffic_class,
            out.wanted_bytes - out.session_base_bytes,
            out.announcement,
        )
        self.effects.append(ToCoordinator(book.coordinator, request))

    def queued(self, message: Queued, now_ns: int) -> None:
        """The coordinator has it in its queue, and predicts when it is done."""
        out = self.transfers.get(message.transfer)
        if out is None or out.link is None:
            return
        if message.finishes_in_ns:
            self._expect(out, message.finishes_in_ns + self._book(out.link).one_way_ns, now_ns)
        self._tell_state(out, max(0, out.expected_finish_ns - now_ns))

    def granted(self, grant: Grant, now_ns: int) -> None:
        """A slot. What the transfer can't use goes back at once."""
        book = self._book(grant.link)
        out = self.transfers.get(grant.transfer)
        if grant.epoch != book.epoch:
            return  # a grant of an earlier life of the coordinator: that account is closed
        if out is None or out.link != grant.link or out.state not in (SendState.QUEUED, SendState.SENDING):
            book.refuse(grant, now_ns)
            return
        usable = min(grant.nbytes, out.need_bytes)
        extends = bool(book.grants) and book.grants[0].transfer == grant.transfer
        book.add(grant, usable, now_ns)
        if not usable or out.peer is None:
            return
        if extends and book.grants[0].begun:
            self._pace(out.peer, now_ns)
            self.effects.append(Pump(out.peer))
        out.granted_bytes += usable
        out.held_bytes += usable
        if out.need_bytes == 0:
            book.asked.pop(out.transfer, None)
        out.step(SendInput.GRANTED)
        left = out.nbytes - out.next_offset
        finish_in_ns = grant.start_in_ns + left * NANOS // max(1, grant.rate_bytes_per_s) + book.one_way_ns
        self._expect(out, finish_in_ns, now_ns)
        self._tell_state(out, finish_in_ns)
        self._begin_head(book, now_ns)

    def _begin_head(self, book: LinkBook, now_ns: int) -> None:
        """Let the first grant's peer pump once its start time has come."""
        if not book.grants or book.grants[0].begun or book.grants[0].start_ns > now_ns:
            return
        head = book.grants[0]
        head.begun = True
        out = self.transfers.get(head.transfer)
        if out is not None and out.peer is not None:
            self._pace(out.peer, now_ns)
            self.effects.append(Pump(out.peer))

    def _returned(self, out: Outgoing, held: HeldGrant) -> None:
        """Unspent bytes of a grant went back: need them again."""
        out.returned(held.left_bytes)
        if out.held_bytes == 0 and out.state is SendState.SENDING:
            out.step(SendInput.STARVED)

    def _expect(self, out: Outgoing, finish_in_ns: int, now_ns: int) -> None:
        """Predict the arrival in-band, when the prediction moved by more than a quarter of what is left (or 20 ms)."""
        finish_ns = now_ns + finish_in_ns
        moved_ns = abs(finish_ns - out.expected_finish_ns)
        if out.peer is None or (out.expected_finish_ns and moved_ns < max(20_000_000, finish_in_ns // 4)):
            return
        out.expected_finish_ns = finish_ns
        frame = wire.Expect(out.nbytes, finish_in_ns, max(5_000_000, finish_in_ns // 4))
        self.effects.append(ToPeer(out.peer, False, out.transfer, frame))

    # ------------------------------------------------------------------------------------------------------------ chunks

    def next_chunk(self, name: AgentName, now_ns: int) -> Chunk | None:
        """The chunk to send next to a peer, or None when nothing may go now."""
        peer = self.peers.get(name)
        if peer is None or not peer.connected:
            return None
        while peer.free:
            out = self.transfers.get(peer.free[0])
            if out is None or out.state is not SendState.SENDING or out.everything_taken:
                peer.free.popleft()
                continue
            piece = out.next_chunk()
            if piece is None:
                # Not filled yet: let others of this peer go first, once around.
                if len(peer.free) == 1 or all(self._unfilled(t) for t in peer.free):
                    break
                peer.free.rotate(-1)
                continue
            chunk = self._take(out, piece, granted=False)
            if out.link is not None:
                self.links[out.link].unscheduled_bytes += chunk.length
            return chunk
        if name.site == self.config.agent.site:
            return None
        return self._granted_chunk(peer, now_ns)

    def _unfilled(self, transfer: TransferId) -> bool:
        out = self.transfers.get(transfer)
        return out is not None and out.state is SendState.SENDING and out.next_chunk() is None

    def _granted_chunk(self, peer: Peer, now_ns: int) -> Chunk | None:
        book = self.links.get(LinkName(self.config.agent.site, peer.name.site))
        if book is None:
            return None
        for held in book.grants:
            if held.start_ns > now_ns:
                return None  # in order: a later grant doesn't overtake one that waits for its start
            out = self.transfers.get(held.transfer)
            piece = out.next_chunk() if out is not None else None
            if out is None or piece is None or piece[1] > held.left_bytes:
                continue
            if out.peer != peer.name:
                return None  # another peer's turn: its streams will ask
            chunk = self._take(out, piece, granted=True)
            book.spend(held, peer.name, chunk.length)
            out.held_bytes -= chunk.length
            if out.held_bytes == 0 and out.state is SendState.SENDING:
                out.step(SendInput.STARVED)
            self._begin_head(book, now_ns)
            return chunk
        return None

    def _take(self, out: Outgoing, piece: tuple[int, int], *, granted: bool) -> Chunk:
        offset, length = piece
        out.take(offset, length)
        if out.everything_taken:
            out.step(SendInput.ALL_SENT)
            self._tell_state(out, 0)
        return Chunk(out.transfer, offset, length, granted)

    def _pace(self, name: AgentName, now_ns: int) -> None:
        """Set a peer's ceiling to the rate of the first of its grants that has started."""
        peer = self.peers[name]
        if name.site == self.config.agent.site:
            rate = 0
        else:
            book = self.links[LinkName(self.config.agent.site, name.site)]
            rate = next(
                (
                    held.rate_bytes_per_s
                    for held in book.grants
                    if held.start_ns <= now_ns
                    and (out := self.transfers.get(held.transfer)) is not None
                    and out.peer == name
                ),
                peer.pace_bytes_per_s,
            )
        if rate != peer.pace_bytes_per_s and rate >= 0:
            peer.pace_bytes_per_s = rate
            self.effects.append(SetPace(name, rate))

    # ------------------------------------------------------------------------------------------------- answers from peers

    def acked(self, out: Outgoing, frame: wire.Ack, now_ns: int) -> None:
        """Whole, verified, told to the receiving client."""
        if out.state not in (SendState.UNACKED, SendState.SENDING, SendState.QUEUED) or frame.nbytes != out.nbytes:
            return
        out.step(SendInput.ACKED)
        self._close(out, True, frame.arrival_span_ns, now_ns)
        self.effects.append(TellSendDone(out.envelope.source, out.transfer))

    def nacked(self, out: Outgoing, frame: wire.Nack, now_ns: int) -> None:
        """A chunk failed its checksum there: send it again, under a grant of its own."""
        if out.state not in (SendState.UNACKED, SendState.SENDING, SendState.QUEUED) or out.peer is None:
            return
        if not out.send_again(frame.offset):
            return
        self.resent_chunks += 1
        if out.resends > MAX_RESENDS:
            self.cancel(
                out,
                ErrorCode.CORRUPT,
                f"{out.envelope.describe()}: {out.resends} chunks failed their checksum at {out.peer}; check the memory "
                "of both hosts, and that the sending process does not write into buffers it has given to isend",
                now_ns,
            )
            return
        out.step(SendInput.NACKED)
        if out.free:
            if out.state is SendState.QUEUED:
                out.step(SendInput.GRANTED)
            self._send_free(out, self.peers[out.peer])
        else:
            self._request(out)

    def progress(self, event: SendProgress, now_ns: int) -> None:
        """The kernel's counts for one peer's streams."""
        if event.peer.site == self.config.agent.site:
            return
        book = self.links.get(LinkName(self.config.agent.site, event.peer.site))
        if book is not None:
            counts = PeerCounts(
                0,
                event.granted_left_bytes,
                event.granted_delivered_bytes,
                event.unsent_bytes,
                event.srtt_ns,
                event.min_rtt_ns,
                event.retransmits,
                event.delivery_rate_bytes_per_s,
            )
            book.progress(event.peer, counts, now_ns)

    # ------------------------------------------------------------------------------------------------------------- peers

    def want_peer(self, entry: DirectoryEntry) -> Peer:
        """Have connections to an endpoint's agent."""
        peer = self.peers.get(entry.agent)
        if peer is None:
            peer = self.peers[entry.agent] = Peer(entry.agent)
        wanted = WantPeer(entry.agent, entry.data_address, entry.agent_incarnation, self._streams_to(entry.agent))
        if wanted != peer.wanted:
            peer.wanted = wanted
            self.effects.append(wanted)
        return peer

    def _update_streams(self, peer: Peer) -> None:
        if peer.wanted is None:
            return
        wanted = dataclasses.replace(peer.wanted, streams=max(peer.wanted.streams, self._streams_to(peer.name)))
        if wanted != peer.wanted:
            peer.wanted = wanted
            self.effects.append(wanted)

    def _streams_to(self, name: AgentName) -> int:
        """As many streams as it takes to hold the link's BDP in their buffers: derived, not tuned."""
        if self.config.streams:
            return self.config.streams
        if name.site == self.config.agent.site:
            return 1
        info = self._book(LinkName(self.config.agent.site, name.site)).info
        if info is None:
            return 1
        bdp_bytes = page_round_up(info.rate_bytes_per_s * info.rtt_ns // NANOS)
        return max(1, min(MAX_STREAMS, -(-bdp_bytes // self.config.stream_capacity_bytes)))

    def peer_connected(self, name: AgentName, eager_bytes: int, now_ns: int) -> None:
        """A peer can be offered messages now; its budgets are fresh."""
        peer = self.peers.get(name)
        if peer is None:
            return
        peer.connected = True
        peer.eager_bytes = eager_bytes
        peer.pace_bytes_per_s = -1
        peer.free.clear()
        at_peer = {entry.endpoint for entry in self.directory.of_agent(name)}
        for pair in [pair for pair in self._eager_used_bytes if pair[1] in at_peer]:
            del self._eager_used_bytes[pair]
        if name.site == self.config.agent.site:
            self._pace(name, now_ns)
        for destination in list(self._unoffered):
            if destination in at_peer:
                self.offer_waiting(destination, now_ns)

    def peer_lost(self, name: AgentName, reason: str, now_ns: int) -> None:
        """The connections to a peer are gone: what was under way there can't be completed (not resumed yet)."""
        peer = self.peers.get(name)
        if peer is None:
            return
        peer.connected = False
        peer.last_error = reason
        for book in self.links.values():
            book.peer_gone(name, now_ns)
        for out in [o for o in self.transfers.values() if o.peer == name and o.state is not SendState.RESOLVING]:
            message = (
                f"{out.envelope.describe()}: the connection to agent {name} broke while {PHASES[out.state].label} "
                f"({min(out.nbytes, out.taken_bytes)} of {out.nbytes} bytes handed to it): {reason}. "
                "Send it again once the agent is back"
            )
            self.fail(out, ErrorCode.PEER_LOST, message, now_ns)

    # ------------------------------------------------------------------------------------------------------------- timers

    def next_deadline_ns(self) -> int | None:
        """Earliest time at which :meth:`tick` has something to do."""
        times = [self._gives_up_ns(self.transfers[waiting[0]]) for waiting in self._unoffered.values() if waiting]
        for book in self.links.values():
            if book.report_due_ns is not None:
                times.append(book.report_due_ns)
            if book.grants:
                times.append(min(held.expires_ns for held in book.grants))
                if not book.grants[0].begun:
                    times.append(book.grants[0].start_ns)
                if book.lead_due_ns is not None:
                    times.append(book.lead_due_ns)
            if book.asked:
                times.append(self._fallback_due_ns(book))
        return min(times, default=None)

    def tick(self, now_ns: int) -> None:
        """Do what is due."""
        for waiting in list(self._unoffered.values()):
            while waiting and self._gives_up_ns(self.transfers[waiting[0]]) <= now_ns:
                self._give_up(self.transfers[waiting[0]], now_ns)
        for destination in [d for d, waiting in self._unoffered.items() if not waiting]:
            del self._unoffered[destination]
        for book in list(self.links.values()):
            for held in book.expire(now_ns):
                if (out := self.transfers.get(held.transfer)) is not None:
                    self._returned(out, held)
                    self._request(out)
            self._begin_head(book, now_ns)
            if book.asked and self._fallback_due_ns(book) <= now_ns:
                self._fall_back(book, now_ns)
            if book.lead_due_ns is not None and book.lead_due_ns <= now_ns:
                book.say_lead(now_ns)
            if book.report_due_ns is not None and book.report_due_ns <= now_ns:
                report = book.report(now_ns)
                if report is not None and book.coordinator is not None:
                    self.effects.append(ToCoordinator(book.coordinator, report))

    def _gives_up_ns(self, out: Outgoing) -> int:
        known = self.directory.get(out.envelope.destination) is not None
        return out.posted_ns + (self.config.peer_timeout_ns if known else self.config.resolve_timeout_ns)

    def _give_up(self, out: Outgoing, now_ns: int) -> None:
        entry = self.directory.get(out.envelope.destination)
        waited_s = (now_ns - out.posted_ns) / NANOS
        if entry is not None:
            why = self.peers[entry.agent].last_error if entry.agent in self.peers else "not tried yet"
            text = (
                f"{out.envelope.describe()}: agent {entry.agent} at {entry.data_address} could not be reached for "
                f"{waited_s:.1f} s ({why}); check that it runs and that its data port is open"
            )
            self.fail(out, ErrorCode.PEER_LOST, text, now_ns)
            return
        alive = [session.address for session in self.sessions.values() if session.alive]
        if not alive:
            text = (
                f"{out.envelope.describe()}: no coordinator reached for {waited_s:.1f} s, so the destination can't be "
                f"looked up (configured: {', '.join(self.config.coordinators) or 'none'}); start one, or check [agent] "
                "coordinators"
            )
            self.fail(out, ErrorCode.CONTROL_LOST, text, now_ns)
            return
        ranks = self.directory.ranks_of(out.envelope.job)
        text = (
            f"{out.envelope.describe()}: no endpoint {out.envelope.destination} has registered within {waited_s:.1f} s "
            f"(known ranks of job {out.envelope.job!r}: {ranks}); check the rank and that its trainer is connected"
        )
        self.fail(out, ErrorCode.UNKNOWN_DESTINATION, text, now_ns)

    # ------------------------------------------------------------------------------------------ silence of the coordinator

    def _fallback_due_ns(self, book: LinkBook) -> int:
        if book.coordinator is None or book.fallback_rate_bytes_per_s == 0:
            oldest = min(self.transfers[transfer].posted_ns for transfer in book.asked)
            return max(oldest, book.last_heard_ns) + self.config.peer_timeout_ns
        return max(book.last_heard_ns + FALLBACK_AFTER_NS, book.fallback_next_ns)

    def _fall_back(self, book: LinkBook, now_ns: int) -> None:
        """Go on without the coordinator: a slot of our own at the fallback rate, or an error where there is none."""
        if book.coordinator is None or book.fallback_rate_bytes_per_s == 0:
            silent_s = self.config.peer_timeout_ns / NANOS
            for out in [self.transfers[transfer] for transfer in book.asked]:
                text = (
                    f"{out.envelope.describe()}: no word from a coordinator that owns {book.link} for {silent_s:.0f} s and "
                    f"no fallback rate known (configured: {', '.join(self.config.coordinators) or 'none'}); start it, "
                    "or check its `owns`"
                )
                self.cancel(out, ErrorCode.CONTROL_LOST, text, now_ns)
            return
        waiting = sorted(
            (self.transfers[transfer] for transfer in book.asked),
            key=lambda o: (o.envelope.traffic, o.posted_ns, o.transfer),
        )
        rate = book.fallback_rate_bytes_per_s
        for out in waiting:
            if out.state not in (SendState.QUEUED, SendState.SENDING) or out.peer is None:
                continue
            slot_bytes = max(out.chunk_bytes, rate * FALLBACK_SLICE_NS // NANOS // out.chunk_bytes * out.chunk_bytes)
            nbytes = min(slot_bytes, out.need_bytes)
            book.add_fallback(out.transfer, nbytes, rate, now_ns)
            book.fallback_next_ns = now_ns + nbytes * NANOS // rate
            out.granted_bytes += nbytes
            out.held_bytes += nbytes
            if out.need_bytes == 0:
                book.asked.pop(out.transfer, None)
            out.step(SendInput.GRANTED)
            self._begin_head(book, now_ns)
            return
        book.fallback_next_ns = now_ns + FALLBACK_SLICE_NS

    # ----------------------------------------------------------------------------------------------------------- telling

    def _tell_state(self, out: Outgoing, finish_in_ns: int) -> None:
        """Tell the trainer when its message enters another phase (a timeout names it), or has a prediction."""
        phase = PHASES[out.state]
        if phase is SendPhase.SENDING and out.taken_bytes == 0 and not out.free:
            phase = SendPhase.GRANTED
        if phase is out.told_phase and not finish_in_ns:
            return
        if out.orphaned_until_ns:
            return
        out.told_phase = phase
        bytes_done = min(out.nbytes, out.taken_bytes)
        self.effects.append(TellSendState(out.envelope.source, out.transfer, phase, bytes_done, finish_in_ns))
