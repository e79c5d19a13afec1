"""The sending half of an agent: from a posted message to its acknowledgement.

For each destination endpoint messages are offered strictly in the order in which they were posted (that order is what
the receiving client matches by); from there on they overlap. Memory at the receiver comes first (credit), then the link
(grants): a transfer asks for slots only when it holds credit, so a receiver that is full stops its own senders' grants
and nobody else's.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Container

from proxyd.core import lending
from proxyd.core import sending_words as words
from proxyd.core.agent_config import AgentConfig
from proxyd.core.asking import Asking
from proxyd.core.directory import AgentDirectory
from proxyd.core.effects import (
    AgentEffect,
    Chunk,
    Pump,
    TellSendDone,
    TellSendFailed,
    ToPeer,
    WantPeer,
)
from proxyd.core.ended import EndedMessages
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import (
    DirectoryEntry,
    Welcome,
)
from proxyd.core.peering import Peer, streams_for
from proxyd.core.transfer import MAX_RESENDS, Outgoing, SendInput, SendState
from proxyd.core.units import MAX_DURATION_NS
from proxyd.core.warming import Warmer
from proxyd.wire import peer as wire
from proxyd.wire.envelope import Envelope, ErrorCode

LOCAL_CHUNK_BYTES = 1 << 20
"""Chunk of a path within the site: large enough for full loopback speed, small enough to stay in a cache."""
UNKNOWN_CHUNK_BYTES = 64 << 10
"""Chunk for a link of which nothing is known yet: no coordinator grants less at a time."""
UNPROVEN_NS = 20_000_000_000
"""Connections that broke sooner, and before any data got through, count with the break before them: TCP gives data that
nobody acknowledges up after some seconds (:data:`proxyd.agent.tcp.DEAD_PATH_NS`), on a path that takes small frames
only."""


class Sender:
    """Outgoing transfers of one agent. Methods append to ``effects``; the machine hands those to the driver."""

    def __init__(self, config: AgentConfig, directory: AgentDirectory, effects: list[AgentEffect]) -> None:
        self.config = config
        self.directory = directory
        self.effects = effects
        self.transfers: dict[TransferId, Outgoing] = {}
        self.peers: dict[AgentName, Peer] = {}
        self.asking = Asking(config, self.transfers, self.peers, effects, self.cancel, self._padded)
        self.warmer = Warmer(config, self.transfers, self.peers, self.asking)
        self._unoffered: dict[EndpointName, deque[TransferId]] = {}
        self.awaited: Container[EndpointName] = ()
        """Destinations that nobody lists any more, and that may come back: waited for like known ones."""
        self.ended = EndedMessages()
        self.resent_chunks = 0
        self.resumed_transfers = 0
        """Messages that went on over another connection, and ..."""
        self.kept_bytes = 0
        """... what of them was not sent again."""

    # -------------------------------------------------------------------------------- from clients

    def post(
        self,
        transfer: TransferId,
        envelope: Envelope,
        filled_bytes: int,
        now_ns: int,
        deadline_in_ns: int = 0,
        *,
        again: bool = False,
        dst_incarnation: int = 0,
    ) -> Outgoing:
        """A trainer posted a message to a remote endpoint, or to one that isn't known yet. ``again``: it did so before,
        to an earlier life of this agent; ``dst_incarnation``: for this life of the endpoint only."""
        out = Outgoing(transfer, envelope, now_ns, filled_bytes, again=again, dst_incarnation=dst_incarnation)
        if deadline_in_ns:
            out.due_ns = now_ns + deadline_in_ns
        self.transfers[transfer] = out
        out.announcement = self.asking.announcer.take(envelope)
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
            self.asking.pace(out.peer, now_ns)

    def cancel(self, out: Outgoing, code: ErrorCode, message: str, now_ns: int) -> None:
        """Give a transfer up from this side: tell the peer (again after a break), the coordinator and the trainer."""
        if out.finished:
            return
        if out.peer is not None and out.state is not SendState.RESOLVING and not out.padding:
            # That this side is closed or stops is, to the other one, the loss of its peer.
            ours = code in (ErrorCode.CLOSED, ErrorCode.AGENT_UNAVAILABLE)
            frame = wire.Cancel(ErrorCode.PEER_LOST if ours else code, message[:1024])
            self.effects.append(ToPeer(out.peer, False, out.transfer, frame))
            if (peer := self.peers.get(out.peer)) is not None:
                peer.cancelled(out.transfer, frame, now_ns)
        self.fail(out, code, message, now_ns)

    def fail(self, out: Outgoing, code: ErrorCode, message: str, now_ns: int) -> None:
        """End a transfer without success. The trainer gets ``message``."""
        if out.finished:
            return
        if out.state is SendState.RESOLVING:
            waiting = self._unoffered.get(out.envelope.destination)
            if waiting and out.transfer in waiting:
                waiting.remove(out.transfer)
        # The receiver gives the budget of every eager offer back itself (EagerReturned), once; without a receiver the
        # whole pair starts over when the peer connects again.
        bytes_done = min(out.nbytes, out.taken_bytes)
        out.step(SendInput.FAILED)
        self._close(out, False, 0, now_ns)
        if not out.padding:
            self.effects.append(TellSendFailed(out.envelope.source, out.transfer, code, message, bytes_done))

    def _close(self, out: Outgoing, ok: bool, arrival_span_ns: int, now_ns: int) -> None:
        del self.transfers[out.transfer]
        if out.padding:
            self.warmer.ended(out)
            self.asking.close(out, ok, 0, now_ns)
            return
        self.ended.add(self._link_of(out), out.envelope.traffic, ok, out.nbytes, now_ns - out.posted_ns)
        self.asking.close(out, ok, arrival_span_ns, now_ns)

    def _padded(self, out: Outgoing, now_ns: int) -> None:
        """The last chunk of a warm-up was handed over: nobody acknowledges it."""
        out.step(SendInput.ACKED)
        self._close(out, True, 0, now_ns)

    def _link_of(self, out: Outgoing) -> LinkName:
        site = self.config.agent.site
        return LinkName(site, out.peer.site if out.peer is not None else site)

    def forget(self, out: Outgoing) -> None:
        """Drop a handed-over message whose end was told elsewhere."""
        del self.transfers[out.transfer]
        link = LinkName(self.config.agent.site, self.config.agent.site)
        self.ended.add(link, out.envelope.traffic, True, out.nbytes, None)

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

    # ---------------------------------------------------------------------------- offering, credit

    def offer_waiting(self, destination: EndpointName, now_ns: int) -> None:
        """Offer what waits for ``destination``, in order, as far as it can be reached."""
        waiting = self._unoffered.get(destination)
        if not waiting:
            return
        entry = self.directory.get(destination)
        if entry is None:
            return
        peer = self.want_peer(entry)
        if not peer.connected or peer.incarnation != entry.agent_incarnation or self._returns(peer, destination):
            return
        while waiting:
            self._offer(self.transfers[waiting.popleft()], entry, peer, now_ns)
        del self._unoffered[destination]

    def _offer(self, out: Outgoing, entry: DirectoryEntry, peer: Peer, now_ns: int) -> None:
        envelope = out.envelope
        if out.dst_incarnation not in (0, entry.incarnation):
            text = f"{envelope.describe()}: {envelope.destination} was restarted: the life that it was for is over"
            self.fail(out, ErrorCode.PEER_LOST, text, now_ns)
            return
        out.peer = peer.name
        out.peer_incarnation = peer.incarnation
        remote = entry.agent.site != self.config.agent.site
        out.link = LinkName(self.config.agent.site, entry.agent.site) if remote else None
        book = self.asking.book(out.link) if out.link is not None else None
        if out.link is not None and (why := self.asking.denial(envelope.job, out.link, envelope.traffic_class)):
            self.asking.announcer.withdraw(out.announcement, now_ns)
            self.cancel(out, ErrorCode.REFUSED, f"{envelope.describe()}: refused: {why}", now_ns)
            return
        info = book.info if book is not None else None
        chunk_bytes = LOCAL_CHUNK_BYTES if not remote else UNKNOWN_CHUNK_BYTES
        chunk_bytes = chunk_bytes if info is None else lending.chunk_bytes(info, envelope.traffic_class)
        out.chunk_bytes = max(wire.MIN_CHUNK_BYTES, min(wire.MAX_CHUNK_BYTES, chunk_bytes))
        small_bytes = self.config.unscheduled_bytes
        out.free = book is None or (
            out.nbytes <= small_bytes and book.may_go_unscheduled(out.nbytes, small_bytes, now_ns)
        )
        out.wanted_bytes = out.nbytes
        if out.free:
            self.asking.announcer.withdraw(out.announcement, now_ns)
        elif book is not None and not book.used:
            book.used = True
            if (padding := self.warmer.under_way) is not None and padding.link == out.link:
                self.cancel(padding, ErrorCode.CANCELLED, "something real is to be sent", now_ns)
        out.eager = self._take_budget(peer, out)
        out.dst_incarnation = entry.incarnation
        offer = wire.Offer(envelope, entry.incarnation, out.chunk_bytes, out.eager, out.again)
        self.effects.append(ToPeer(peer.name, False, out.transfer, offer))
        if not out.eager or out.again:
            out.step(SendInput.OFFERED)
        elif out.free:
            out.step(SendInput.OFFERED_FREE)
            self._send_free(out, peer)
        else:
            out.step(SendInput.OFFERED_EAGER)
            self.asking.request(out, now_ns)
        self.asking.telling.state(out, 0)

    @staticmethod
    def _take_budget(peer: Peer, out: Outgoing) -> bool:
        """Whether a message fits its pair's eager budget; it is counted then."""
        pair = (out.envelope.source, out.envelope.destination)
        used = peer.eager_used_bytes.get(pair, 0)
        if used + out.nbytes > peer.eager_bytes:
            return False
        if out.nbytes:
            peer.eager_used_bytes[pair] = used + out.nbytes
        return True

    def _offer_again(self, peer: Peer) -> None:
        """The connections stand again: offer all that was under way, in order, before anything new. If it is another
        life of the agent, only what is for trainers that are known to be back; the others' waits for them."""
        peer.returning.clear()
        for out in [o for o in self.transfers.values() if o.peer == peer.name and o.state is SendState.BROKEN]:
            destination = out.envelope.destination
            if destination in peer.returning or not self._is_back(out, peer):
                peer.returning.setdefault(destination, []).append(out.transfer)
            else:
                self._offer_once_more(out, peer)
        for transfer, (_, frame) in peer.cancels.items():
            self.effects.append(ToPeer(peer.name, False, transfer, frame))
        peer.cancels.clear()
        self.effects.append(ToPeer(peer.name, False, wire.NO_TRANSFER, wire.OfferedAll()))

    def _is_back(self, out: Outgoing, peer: Peer) -> bool:
        """Whether the receiver of a BROKEN message is at the peer's present life."""
        if out.peer_incarnation == peer.incarnation:
            return True
        entry = self.directory.get(out.envelope.destination)
        wanted = (peer.name, peer.incarnation, out.dst_incarnation)
        return entry is not None and (entry.agent, entry.agent_incarnation, entry.incarnation) == wanted

    def _offer_once_more(self, out: Outgoing, peer: Peer) -> None:
        out.again = True
        out.peer_incarnation = peer.incarnation
        out.eager = out.eager and self._take_budget(peer, out)
        offer = wire.Offer(out.envelope, out.dst_incarnation, out.chunk_bytes, out.eager, again=True)
        self.effects.append(ToPeer(peer.name, False, out.transfer, offer))
        out.step(SendInput.OFFERED_AGAIN)
        self.asking.telling.state(out, 0)

    def _returns(self, peer: Peer, destination: EndpointName) -> bool:
        """Whether messages of earlier connections still wait for a receiver to be back at its agent's next life."""
        if destination in peer.returning:
            left = [one for one in peer.returning[destination] if one in self.transfers]
            if left:
                peer.returning[destination] = left
                return True
            del peer.returning[destination]
        return False

    def returned(self, entry: DirectoryEntry) -> None:
        """An endpoint is listed (again): what waited for it to be back at its agent's next life is offered."""
        peer = self.peers.get(entry.agent)
        if peer is None or not peer.connected or not self._returns(peer, entry.endpoint):
            return
        outs = [self.transfers[transfer] for transfer in peer.returning[entry.endpoint]]
        if all(self._is_back(out, peer) for out in outs):
            del peer.returning[entry.endpoint]
            for out in outs:
                self._offer_once_more(out, peer)

    def held(self, out: Outgoing, frame: wire.Held, now_ns: int) -> None:
        """The receiver says what it has of a message that was offered again: send the rest."""
        if out.state is not SendState.CREDIT or not out.again or out.peer is None:
            return
        sound = wire.MIN_CHUNK_BYTES <= frame.chunk_bytes <= wire.MAX_CHUNK_BYTES
        if not sound or not out.resume(frame.chunk_bytes, frame.ranges):
            text = f"{out.envelope.describe()}: agent {out.peer} claims to hold parts of it that can't be"
            self.cancel(out, ErrorCode.PROTOCOL, text, now_ns)
            return
        self.resumed_transfers += 1
        self.kept_bytes += out.held_before_bytes
        self._go_on(out, SendInput.HELD, now_ns)

    def credited(self, out: Outgoing, now_ns: int) -> None:
        """The receiver holds memory for it now."""
        if out.state is not SendState.CREDIT or out.peer is None:
            return  # a repeated CREDIT, or one that crossed our cancel
        if out.again:
            out.start_over()  # what an earlier life of its agent had, this one hasn't
        self._go_on(out, SendInput.CREDITED, now_ns)

    def _go_on(self, out: Outgoing, given: SendInput, now_ns: int) -> None:
        assert out.peer is not None
        out.step(given)
        if not out.requested:
            self.asking.resumed(out)
        if out.free:
            out.step(SendInput.GRANTED)
            self._send_free(out, self.peers[out.peer])
        else:
            self.asking.request(out, now_ns)
        self.asking.telling.state(out, 0)

    def turned_down(self, out: Outgoing, now_ns: int) -> None:
        """The receiver had no memory for an eager offer: it throws the data away; keep it whole for CREDIT."""
        if out.state is SendState.CREDIT:
            out.eager = False  # offered again, and there was no memory
        if not out.eager or out.state not in (SendState.QUEUED, SendState.SENDING, SendState.UNACKED):
            return
        out.eager = False
        out.step(SendInput.TURNED_DOWN)
        self.asking.turned_down(out, now_ns)
        out.start_over()
        self.asking.telling.state(out, 0)

    def eager_returned(self, name: AgentName, pair: tuple[EndpointName, EndpointName], nbytes: int) -> None:
        """A part of the eager budget of an endpoint pair is free again."""
        peer = self.peers.get(name)
        if peer is None:
            return
        left = peer.eager_used_bytes.get(pair, 0) - nbytes
        if left > 0:
            peer.eager_used_bytes[pair] = left
        else:
            peer.eager_used_bytes.pop(pair, None)

    def _send_free(self, out: Outgoing, peer: Peer) -> None:
        if out.nbytes == 0:
            out.step(SendInput.ALL_SENT)
            return
        peer.free.append(out.transfer)
        self.effects.append(Pump(peer.name))

    def session_began(self, address: str, welcome: Welcome, now_ns: int) -> None:
        """A control session stands: ask again for all that waits on its links."""
        self.asking.session_began(address, welcome, now_ns)
        for peer in self.peers.values():
            self._update_streams(peer)
        for destination in list(self._unoffered):
            self.offer_waiting(destination, now_ns)

    # -------------------------------------------------------------------------------------- chunks

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
            chunk = self.asking.take(out, piece, granted=out.observed)
            if out.link is not None and out.observed:
                self.asking.links[out.link].observe(name, chunk.length)
            elif out.link is not None:
                self.asking.links[out.link].unscheduled(chunk.length, now_ns)
            return chunk
        if name.site == self.config.agent.site:
            return None
        return self.asking.next_chunk(peer, now_ns)

    def _unfilled(self, transfer: TransferId) -> bool:
        out = self.transfers.get(transfer)
        return out is not None and out.state is SendState.SENDING and out.next_chunk() is None

    # -------------------------------------------------------------------------------- answers from
    # peers

    def acked(self, out: Outgoing, frame: wire.Ack, now_ns: int) -> None:
        """Whole, verified, told to the receiving client."""
        states = (SendState.UNACKED, SendState.SENDING, SendState.QUEUED)
        late = out.again and out.state is SendState.CREDIT  # acknowledged before the break, and again now
        if not (out.state in states or late) or frame.nbytes != out.nbytes:
            return
        if out.peer is not None and (peer := self.peers.get(out.peer)) is not None and out.nbytes and not late:
            peer.proven, peer.away_since_ns = True, None
        out.step(SendInput.ACKED)
        self._close(out, True, min(frame.arrival_span_ns, MAX_DURATION_NS), now_ns)
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
                f"{out.envelope.describe()}: {out.resends} chunks failed their checksum at {out.peer}; check the "
                "memory of both hosts, and that the sending process does not write into buffers it has given to isend",
                now_ns,
            )
            return
        out.step(SendInput.NACKED)
        if out.free:
            if out.state is SendState.QUEUED:
                out.step(SendInput.GRANTED)
            self._send_free(out, self.peers[out.peer])
        else:
            self.asking.request(out, now_ns)

    # --------------------------------------------------------------------------------------- peers

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
        if self.config.streams:
            return self.config.streams
        if name.site == self.config.agent.site:
            return 1
        info = self.asking.book(LinkName(self.config.agent.site, name.site)).info
        return 1 if info is None else streams_for(info, self.config.stream_capacity_bytes)

    def peer_connected(self, name: AgentName, incarnation: int, eager_bytes: int, now_ns: int) -> None:
        """A peer can be offered messages now; its budgets are fresh."""
        peer = self.peers.get(name)
        if peer is None:
            return
        peer.connected, peer.connected_ns, peer.proven = True, now_ns, False
        peer.incarnation = incarnation
        peer.eager_bytes = eager_bytes
        peer.pace_bytes_per_s = -1
        peer.warm_ups = 0
        peer.free.clear()
        peer.eager_used_bytes.clear()
        if peer.broke:
            self._offer_again(peer)
        at_peer = {entry.endpoint for entry in self.directory.of_agent(name)}
        if name.site == self.config.agent.site:
            self.asking.pace(name, now_ns)
        for destination in list(self._unoffered):
            if destination in at_peer:
                self.offer_waiting(destination, now_ns)

    def peer_dropped(self, name: AgentName, now_ns: int) -> None:
        """Nobody needs a peer's connections: forget it. Connections that are made later count from zero."""
        del self.peers[name]
        for book in self.asking.links.values():
            book.peer_gone(name, now_ns)

    def peer_lost(self, name: AgentName, reason: str, now_ns: int, silent_ns: int = 0) -> None:
        """The connections to a peer are gone: what is under way there waits for them, for ``peer_timeout``.

        :param silent_ns: how long nothing had been heard of it by then.
        """
        peer = self.peers.get(name)
        if peer is None:
            return
        stood_ns = now_ns - peer.connected_ns
        peer.connected, peer.broke = False, True
        peer.last_error = reason
        if peer.away_since_ns is None or peer.proven or stood_ns > UNPROVEN_NS:
            peer.away_since_ns = now_ns - min(silent_ns, stood_ns)
        peer.returning.clear()
        for book in self.asking.links.values():
            book.peer_gone(name, now_ns)
        for out in [o for o in self.transfers.values() if o.peer == name and o.state is not SendState.RESOLVING]:
            if out.padding:
                self.fail(out, ErrorCode.PEER_LOST, reason, now_ns)
                continue
            self.asking.interrupted(out, now_ns)
            if out.state is not SendState.BROKEN:
                out.broken_ns = peer.away_since_ns
            out.step(SendInput.LINK_LOST)
            self.asking.telling.state(out, 0)

    def _stays_away(self, peer: Peer, now_ns: int) -> None:
        """A peer has been away for ``peer_timeout``: what waits for it fails."""
        for out in [o for o in self.transfers.values() if o.peer == peer.name and o.state is SendState.BROKEN]:
            text = words.stays_away(out, peer, self.config.data_address, now_ns)
            self.cancel(out, ErrorCode.PEER_LOST, text, now_ns)

    # -------------------------------------------------------------------------------------- timers

    def deadlines_ns(self) -> list[int]:
        """Times at which :meth:`tick` has something to do."""
        times = self.asking.deadlines_ns()
        if self._unoffered:
            times += [self._gives_up_ns(self.transfers[waiting[0]]) for waiting in self._unoffered.values() if waiting]
        for peer in self.peers.values():
            times += [ns for ns in (self._away_too_long_ns(peer), self._returns_by_ns(peer)) if ns is not None]
        return times

    def tick(self, now_ns: int) -> None:
        """Do what is due."""
        if self._unoffered:
            for waiting in list(self._unoffered.values()):
                while waiting and self._gives_up_ns(self.transfers[waiting[0]]) <= now_ns:
                    self._give_up(self.transfers[waiting[0]], now_ns)
            for destination in [d for d, waiting in self._unoffered.items() if not waiting]:
                del self._unoffered[destination]
        for peer in self.peers.values():
            due_ns = self._away_too_long_ns(peer)
            if due_ns is not None and due_ns <= now_ns:
                self._stays_away(peer, now_ns)
            due_ns = self._returns_by_ns(peer)
            if due_ns is not None and due_ns <= now_ns:
                self._has_not_returned(peer, now_ns)
        self.asking.tick(now_ns)

    def _returns_by_ns(self, peer: Peer) -> int | None:
        """When the first of the messages fails whose receivers are not back at their agent's next life."""
        if not peer.returning:
            return None
        waiting = (one for some in peer.returning.values() for one in some if one in self.transfers)
        first_ns = min((self.transfers[one].broken_ns for one in waiting), default=None)
        return None if first_ns is None else first_ns + self.config.peer_timeout_ns

    def _has_not_returned(self, peer: Peer, now_ns: int) -> None:
        for destination in list(peer.returning):
            for transfer in peer.returning[destination]:
                out = self.transfers.get(transfer)
                if out is not None and out.broken_ns + self.config.peer_timeout_ns <= now_ns:
                    text = words.has_not_returned(out, peer, now_ns)
                    self.cancel(out, ErrorCode.PEER_LOST, text, now_ns)
            if not self._returns(peer, destination):
                self.offer_waiting(destination, now_ns)

    def _away_too_long_ns(self, peer: Peer) -> int | None:
        """When what waits for a peer to come back fails; None: nothing does."""
        if peer.connected or peer.away_since_ns is None:
            return None
        waits = any(o.peer == peer.name and o.state is SendState.BROKEN for o in self.transfers.values())
        return peer.away_since_ns + self.config.peer_timeout_ns if waits else None

    def _gives_up_ns(self, out: Outgoing) -> int:
        destination = out.envelope.destination
        # What was posted again comes from an earlier life of this agent; the receiver may be on its way back, too.
        known = self.directory.get(destination) is not None or destination in self.awaited or out.again
        return out.posted_ns + (self.config.peer_timeout_ns if known else self.config.resolve_timeout_ns)

    def _give_up(self, out: Outgoing, now_ns: int) -> None:
        entry = self.directory.get(out.envelope.destination)
        if entry is not None:
            text = words.not_reached(out, entry, self.peers.get(entry.agent), now_ns)
            self.fail(out, ErrorCode.PEER_LOST, text, now_ns)
        elif not self.asking.owners.alive():
            text = words.no_coordinator(out, self.config.coordinators, now_ns)
            self.fail(out, ErrorCode.CONTROL_LOST, text, now_ns)
        else:
            text = words.not_registered(out, self.directory.ranks_of(out.envelope.job), now_ns)
            self.fail(out, ErrorCode.UNKNOWN_DESTINATION, text, now_ns)
