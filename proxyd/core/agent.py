"""The agent machine: everything an agent decides, without a socket, a clock or a byte of payload.

The driver (daemon or simulator) turns what happens into events, calls :meth:`AgentMachine.handle`, carries out the
effects in their order and sets a timer to :meth:`AgentMachine.next_deadline_ns`. The two halves are in
:mod:`proxyd.core.sending` and :mod:`proxyd.core.receiving`; this file routes events to them and keeps what both need:
local trainers and the directory.

A stream that can take bytes asks :meth:`AgentMachine.next_chunk`. That may leave effects behind (the next grant's pace,
another peer's turn), so the driver handles a ``TimePassed`` after it has pumped; ``next_deadline_ns()`` says 0 until
then.
"""

from __future__ import annotations

import dataclasses

from proxyd.core import events as ev
from proxyd.core.agent_config import AgentConfig
from proxyd.core.agent_status import AgentStatus, LinkSending, PathState
from proxyd.core.away import Away
from proxyd.core.directory import AgentDirectory, Changes, Gone
from proxyd.core.effects import (
    AgentEffect,
    Chunk,
    CloseClient,
    DropPeer,
    FreeBlock,
    TellForetold,
    TellPeerGone,
    TellPeerHere,
    ToCoordinator,
)
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import (
    Beat,
    Denied,
    Directory,
    DirectoryEntry,
    Echo,
    EndpointDown,
    EndpointUp,
    Grant,
    Pace,
    Queued,
    Seen,
    Welcome,
)
from proxyd.core.permissions import Permissions
from proxyd.core.receiving import Receiver
from proxyd.core.sending import Sender
from proxyd.core.transfer import Outgoing, RecvState, SendInput, SendState
from proxyd.wire import peer as wire
from proxyd.wire.envelope import ErrorCode

__all__ = ["AgentConfig", "AgentMachine", "AgentStatus", "LinkSending", "PathState"]


class AgentMachine:
    """See the module's text."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self._effects: list[AgentEffect] = []
        self._clients: dict[EndpointName, int] = {}
        self._attached_ns: dict[EndpointName, int] = {}
        self._directory = AgentDirectory()
        self._away = Away(self._clients, self._directory, self._effects, config.peer_timeout_ns)
        self.sender = Sender(config, self._directory, self._effects)
        self.receiver = Receiver(self._clients, self._effects, config.peer_timeout_ns)
        self._orphans: dict[TransferId, Outgoing] = {}
        self._elsewhere: dict[EndpointName, tuple[str, DirectoryEntry]] = {}
        """Local trainers whose next life a coordinator (its address) has seen at another agent: it counts when the one
        here has ended."""
        self._unseen: dict[EndpointName, tuple[Gone, int]] = {}
        self.sender.awaited = self._unseen
        """Endpoints that coordinators lost sight of, and when they count as gone: a trainer behind a cut comes back
        with its agent. Until then what was sent to them waits, and nobody is told."""
        self.resumed_clients = 0
        """Trainers that came from an earlier life of this agent."""
        self._stopped = False

    # ------------------------------------------------------------------------------- the interface

    def handle(self, event: ev.AgentEvent, now_ns: int) -> list[AgentEffect]:
        """Take in one event; returns what the driver has to do, in order."""
        if self._stopped:
            return []
        self._dispatch(event, now_ns)
        if self.receiver.ended_local:
            self._forget_handed_over()
        self.sender.tick(now_ns)
        self.receiver.tick(now_ns)
        if self._orphans:
            self._tick_orphans(now_ns)
        if self._unseen:
            self._tick_unseen(now_ns)
        self._away.tick(now_ns)
        effects = self._effects[:]
        self._effects.clear()
        return effects

    def next_deadline_ns(self) -> int | None:
        """When to handle a TimePassed at the latest; None: not before another event."""
        if self._effects:
            return 0
        if self._stopped:
            return None
        times = self.sender.deadlines_ns() + self.receiver.deadlines_ns()
        if self._orphans:
            times += [out.orphaned_until_ns for out in self._orphans.values()]
        if self._unseen:
            times += [due_ns for _, due_ns in self._unseen.values()]
        if (due_ns := self._away.next_deadline_ns()) is not None:
            times.append(due_ns)
        return min(times) if times else None

    def next_chunk(self, peer: AgentName, now_ns: int) -> Chunk | None:
        """The chunk that a writable stream to ``peer`` should send next, or None. Handle a TimePassed after pumping."""
        return None if self._stopped else self.sender.next_chunk(peer, now_ns)

    def expects_chunks(self, peer: AgentName, transfer: TransferId) -> bool:
        """Whether ``peer`` sends this message, and some of it is still missing."""
        incoming = self.receiver.transfers.get(transfer)
        return incoming is not None and incoming.peer == peer and incoming.state is RecvState.LANDING

    def entry_of(self, endpoint: EndpointName) -> DirectoryEntry | None:
        """Where an endpoint is listed, or None."""
        return self._directory.get(endpoint)

    def link_state(self, source: EndpointName, rank: int, now_ns: int) -> PathState:
        """What is known of the way from a local endpoint to another rank of its job."""
        entry = self._directory.get(EndpointName(source.job, rank))
        if entry is None:
            ranks = self._directory.ranks_of(source.job)
            return PathState("", "none", 0, 0, 0, 0, 0, f"rank {rank} is not registered (known: {ranks})")
        link = LinkName(self.config.agent.site, entry.agent.site)
        if link.is_local:
            return PathState(str(link), "local", 0, 0, 0, 0, 0, "")
        book = self.sender.asking.links.get(link)
        info = book.info if book is not None else None
        if book is None or info is None:
            return PathState(str(link), "none", 0, 0, 0, 0, 0, f"no coordinator that owns {link} has been heard")
        age_ns = info.age_ns + max(0, now_ns - book.last_heard_ns)
        return PathState(
            str(link),
            info.source,
            info.rate_bytes_per_s,
            info.rtt_ns,
            info.queue_ns,
            info.waiting_bytes,
            age_ns,
            "",
            info.confidence,
        )

    def status(self, now_ns: int) -> AgentStatus:
        """A snapshot for metrics and status pages."""
        links = tuple(
            LinkSending(
                book.link,
                book.coordinator or "",
                bool(book.asked) and book.coordinator is not None and book.silent(now_ns),
                book.granted_taken_bytes,
                book.unscheduled_bytes,
                book.fallback_bytes,
                book.observed_taken_bytes,
                book.padding_bytes,
                book.backlog_bytes(),
                len(book.asked),
            )
            for _, book in sorted(self.sender.asking.links.items())
        )
        sender = self.sender
        return AgentStatus(
            agent=self.config.agent,
            endpoints=tuple(sorted(self._clients.items(), key=lambda item: (item[0].job, item[0].rank))),
            peers=tuple((name, peer.connected) for name, peer in sorted(sender.peers.items())),
            links=links,
            outgoing=sum(not out.padding for out in sender.transfers.values()),
            incoming=len(self.receiver.transfers),
            received_bytes=self.receiver.received_bytes,
            corrupt_chunks=self.receiver.corrupt_chunks,
            resent_chunks=sender.resent_chunks,
            resumed_transfers=sender.resumed_transfers,
            resumed_bytes=sender.kept_bytes,
            resumed_clients=self.resumed_clients,
            announced=(
                ("fulfilled", sender.asking.announcer.announced.fulfilled),
                ("resized", sender.asking.announcer.announced.resized),
                ("unposted", sender.asking.announcer.announced.unposted),
            ),
            ended=sender.ended.all(),
        )

    # ------------------------------------------------------------------------------------- routing

    def _dispatch(self, event: ev.AgentEvent, now_ns: int) -> None:
        sender, receiver = self.sender, self.receiver
        match event:
            case ev.ChunkArrived():
                receiver.chunk(event.peer, event.transfer, event.offset, event.length, event.good, now_ns)
            case ev.SendProgress():
                sender.asking.progress(event, now_ns)
            case ev.TimePassed():
                pass
            case ev.SendPosted():
                self._posted(event, now_ns)
            case ev.SendFilled():
                out = sender.transfers.get(event.transfer)
                if out is not None and out.state is SendState.HANDED_OVER:
                    out.filled_bytes = max(out.filled_bytes, min(event.filled_bytes, out.nbytes))
                    receiver.local_filled(event.transfer, event.filled_bytes)
                elif out is not None:
                    sender.filled(out, event.filled_bytes, now_ns)
            case ev.SendCancelled():
                self._cancelled(event.transfer, now_ns)
            case ev.SendAnnounced():
                sender.asking.announcer.announce(
                    event.envelope, self._directory.get(event.envelope.destination), event.ready_in_ns, now_ns
                )
            case ev.RecvAccepted():
                receiver.accepted(event.transfer)
            case ev.RecvReleased():
                receiver.released(event.transfer)
            case ev.BlockAllocated():
                self._allocated(event.transfer)
            case ev.BlockDenied():
                receiver.denied(event.transfer, event.reason, event.permanent)
            case ev.MemoryFreed():
                receiver.memory_freed(event.endpoint)
            case ev.PeerFrame():
                self._peer_frame(event, now_ns)
            case ev.PeerConnected():
                receiver.lives(event.peer, event.incarnation, now_ns)
                sender.peer_connected(event.peer, event.incarnation, event.eager_bytes, now_ns)
            case ev.PeerDisconnected():
                sender.peer_lost(event.peer, event.reason, now_ns, event.silent_ns)
            case ev.PeerUnreachable():
                if (peer := sender.peers.get(event.peer)) is not None:
                    peer.last_error = event.reason
            case ev.InboundOpened():
                self._away.opened(event.peer)
                receiver.inbound_opened(event.peer, event.incarnation, now_ns)
            case ev.InboundClosed():
                self._away.closed(event, now_ns)
                receiver.inbound_closed(event.peer, event.reason, now_ns, event.silent_ns)
            case ev.ClientAttached():
                self._attached(event, now_ns)
            case ev.ClientDetached():
                self._detached(event.endpoint, event.incarnation, event.reason, event.orderly, now_ns)
            case ev.CoordinatorConnected():
                self._coordinator_connected(event, now_ns)
            case ev.CoordinatorSaid():
                self._coordinator_said(event, now_ns)
            case ev.CoordinatorLost():
                sender.asking.session_lost(event.address, event.reason)
                self._apply(self._directory.session_lost(sender.asking.owners.alive()), now_ns)
            case ev.Stopping():
                self._stopping(event)

    # ------------------------------------------------------------------------------------ trainers

    def _attached(self, event: ev.ClientAttached, now_ns: int) -> None:
        old = self._clients.get(event.endpoint)
        if old is not None and old != event.incarnation:
            self._effects.append(
                CloseClient(
                    event.endpoint,
                    old,
                    ErrorCode.CLOSED,
                    f"another process has connected as {event.endpoint}; the newest one wins. If both are meant to "
                    "run, give them different ranks or job names",
                )
            )
            self._detached(event.endpoint, old, "replaced by a new process", False, now_ns)
        self._clients[event.endpoint] = event.incarnation
        self._attached_ns[event.endpoint] = now_ns - event.age_ns
        self._away.joined(event.endpoint, now_ns)
        own = DirectoryEntry(
            event.endpoint,
            event.incarnation,
            self.config.agent,
            self.config.incarnation,
            self.config.data_address,
            event.age_ns,
        )
        if event.past is not None:
            self.resumed_clients += 1
            # Before anything is handed over to it.
            self.receiver.past.resumed(event.endpoint, event.incarnation, event.past, now_ns)
        # Known here at once, so that same-host messages need no coordinator.
        self._directory_changed("", Directory((own,), (), full=False), now_ns, tell_coordinators=True)
        for entry in self._directory.of_job(event.endpoint.job):
            if entry.endpoint != event.endpoint:
                here = TellPeerHere(event.endpoint, entry.endpoint.rank, entry.incarnation, entry.agent.site)
                self._effects.append(here)
                if entry.agent != self.config.agent:
                    self.sender.want_peer(entry)

    def _detached(self, endpoint: EndpointName, incarnation: int, reason: str, orderly: bool, now_ns: int) -> None:
        if self._clients.get(endpoint) != incarnation:
            return
        del self._clients[endpoint]
        del self._attached_ns[endpoint]
        self._away.left(endpoint)
        self.receiver.client_gone(endpoint, reason)
        self.receiver.source_gone(endpoint, reason)
        self.sender.asking.announcer.forget_source(endpoint, now_ns)
        mine = [o for o in self.sender.transfers.values() if o.envelope.source == endpoint]
        for out in [o for o in mine if o.transfer.incarnation == incarnation]:
            if out.state is SendState.HANDED_OVER:
                self.sender.forget(out)
            elif orderly and out.filled_bytes == out.nbytes:
                out.orphaned_until_ns = now_ns + self.config.linger_ns
                self._orphans[out.transfer] = out
            else:
                text = f"{out.envelope.describe()}: the sending process is gone: {reason}"
                self.sender.cancel(out, ErrorCode.PEER_LOST, text, now_ns)
        for address in sorted(self.sender.asking.owners.alive()):
            self._effects.append(ToCoordinator(address, EndpointDown(endpoint, incarnation, reason)))
        self._directory_changed("", Directory((), ((endpoint, incarnation, reason),), full=False), now_ns)
        if (moved := self._elsewhere.pop(endpoint, None)) is not None:
            self._directory_changed(moved[0], Directory((moved[1],), (), full=False), now_ns)

    def _tick_orphans(self, now_ns: int) -> None:
        for transfer, out in list(self._orphans.items()):
            if out.finished:
                del self._orphans[transfer]
            elif out.orphaned_until_ns <= now_ns:
                del self._orphans[transfer]
                text = f"{out.envelope.describe()}: not acknowledged within the linger time after close()"
                self.sender.cancel(out, ErrorCode.CLOSED, text, now_ns)

    def _posted(self, event: ev.SendPosted, now_ns: int) -> None:
        envelope = event.envelope
        if envelope.destination in self._clients:
            waiting = self.sender.waits_for(envelope.destination)
            assert not waiting, "messages for a local endpoint never wait"
            out = Outgoing(event.transfer, envelope, now_ns, event.filled_bytes, peer=self.config.agent)
            out.step(SendInput.HANDED_OVER)
            self.sender.transfers[event.transfer] = out
            placed_bytes = event.filled_bytes if event.handed_over else None
            self.receiver.handed_over(event.transfer, envelope, event.dst_incarnation, placed_bytes=placed_bytes)
            return
        if event.handed_over:
            self._effects.append(FreeBlock(event.transfer, envelope.destination))
        self.sender.post(
            event.transfer,
            envelope,
            event.filled_bytes,
            now_ns,
            event.deadline_in_ns,
            again=event.again,
            dst_incarnation=event.dst_incarnation,
        )

    def _allocated(self, transfer: TransferId) -> None:
        self.receiver.allocated(transfer)
        out = self.sender.transfers.get(transfer)
        if out is not None and out.state is SendState.HANDED_OVER and out.filled_bytes:
            self.receiver.local_filled(transfer, out.filled_bytes)

    def _forget_handed_over(self) -> None:
        """Forget the handed-over messages whose receiving end is through with them, in whichever way."""
        ended = self.receiver.ended_local
        while ended:
            out = self.sender.transfers.get(ended.pop())
            if out is not None and out.state is SendState.HANDED_OVER:
                self.sender.forget(out)

    def _cancelled(self, transfer: TransferId, now_ns: int) -> None:
        out = self.sender.transfers.get(transfer)
        if out is None:
            return
        if out.state is SendState.HANDED_OVER:
            self.receiver.cancel_local(transfer)
            return
        self.sender.cancel(out, ErrorCode.CANCELLED, f"{out.envelope.describe()}: cancelled", now_ns)

    # -------------------------------------------------------------------------------- coordinators

    def _coordinator_connected(self, event: ev.CoordinatorConnected, now_ns: int) -> None:
        if not isinstance(event.message, Welcome):
            return
        for endpoint, incarnation in sorted(self._clients.items(), key=lambda item: (item[0].job, item[0].rank)):
            age_ns = now_ns - self._attached_ns[endpoint]
            self._effects.append(ToCoordinator(event.address, EndpointUp(endpoint, incarnation, age_ns)))
        self.sender.session_began(event.address, event.message, now_ns)

    def _coordinator_said(self, event: ev.CoordinatorSaid, now_ns: int) -> None:
        if self.sender.asking.owners.superseded(event.address):
            return  # its place was taken, and it doesn't know yet
        self.sender.asking.heard(event.address, now_ns)
        match event.message:
            case Grant():
                self.sender.asking.granted(event.address, event.message, now_ns)
            case Queued():
                self.sender.asking.queued(event.message, now_ns)
            case Denied():
                out = self.sender.transfers.get(event.message.transfer)
                if out is not None and self.sender.asking.asks(out, event.address):
                    text = f"{out.envelope.describe()}: denied by coordinator {event.address}: {event.message.reason}"
                    self.sender.cancel(out, ErrorCode.REFUSED, text, now_ns)
            case Pace():
                self.sender.asking.paced(event.address, event.message, now_ns)
            case Beat():
                if event.message.missing:
                    self._say_seen(event.address, event.message.missing)
                if event.message.number:
                    self._effects.append(ToCoordinator(event.address, Echo(event.message.number, 0)))
                self._beat(event.address, event.message, now_ns)
            case Permissions():
                self.sender.asking.permitted(event.address, event.message)
            case Directory():
                self._directory_changed(event.address, event.message, now_ns)
            case Welcome():
                self.sender.session_began(event.address, event.message, now_ns)

    def _beat(self, address: str, beat: Beat, now_ns: int) -> None:
        for link, rate_bytes_per_s in beat.fallback:
            self.sender.asking.set_fallback(address, link, rate_bytes_per_s)
        for info in beat.links:
            if info.link.src_site == self.config.agent.site:
                self.sender.asking.update_link(address, info, now_ns)
        self.sender.warmer.consider(now_ns)

    def _say_seen(self, address: str, missing: tuple[AgentName, ...]) -> None:
        """A coordinator hears nothing of these agents; say with which of them this one is connected."""
        peers = self.sender.peers
        seen = tuple(
            a for a in missing if a in self._away.connected or ((peer := peers.get(a)) is not None and peer.connected)
        )
        if seen:
            self._effects.append(ToCoordinator(address, Seen(seen)))

    def _directory_changed(
        self, address: str, message: Directory, now_ns: int, *, tell_coordinators: bool = False
    ) -> None:
        if address:
            # This agent knows its own trainers better than any coordinator does.
            own = [entry for entry in message.entries if entry.agent == self.config.agent]
            gone = tuple(item for item in message.gone if item[0] not in self._clients)
            entries = tuple(e for e in message.entries if e not in own and e.endpoint not in self._clients)
            self._note_elsewhere(address, message)
            message = Directory(entries, gone, message.full, message.unsure)
        alive = self.sender.asking.owners.alive()
        changes = self._directory.update(address, message, alive, now_ns)
        if tell_coordinators:
            ups = (EndpointUp(entry.endpoint, entry.incarnation, entry.age_ns) for entry in changes.came)
            self._effects += [ToCoordinator(name, up) for up in ups for name in sorted(alive)]
        self._apply(changes, now_ns)

    def _note_elsewhere(self, address: str, message: Directory) -> None:
        lives = {(endpoint, incarnation) for endpoint, incarnation, _ in message.gone}
        for endpoint, (source, entry) in list(self._elsewhere.items()):
            if (endpoint, entry.incarnation) in lives or (message.full and source == address):
                del self._elsewhere[endpoint]
        for entry in message.entries:
            if entry.agent != self.config.agent and entry.endpoint in self._clients:
                self._elsewhere[entry.endpoint] = (address, entry)

    def _apply(self, changes: Changes, now_ns: int) -> None:
        """The directory has changed: tell trainers, dial, offer what waited, fail what can't arrive any more."""
        locals_ = sorted(self._clients, key=lambda e: (e.job, e.rank))
        for gone_entry in changes.gone:
            if gone_entry.unsure:
                self._unseen[gone_entry.entry.endpoint] = (gone_entry, self._unseen_until_ns(gone_entry.entry, now_ns))
            else:
                self._unseen.pop(gone_entry.entry.endpoint, None)
                self._gone(gone_entry, now_ns)
        for entry in changes.came:
            unseen = self._unseen.pop(entry.endpoint, None)
            if unseen is not None and unseen[0].entry.incarnation != entry.incarnation:
                self._gone(dataclasses.replace(unseen[0], reason=f"replaced by a new process at {entry.agent}"), now_ns)
            if entry.agent != self.config.agent:
                self._away.listed(entry, now_ns)
            for client in locals_:
                if client.job == entry.endpoint.job and client != entry.endpoint:
                    here = TellPeerHere(client, entry.endpoint.rank, entry.incarnation, entry.agent.site)
                    self._effects.append(here)
                    if entry.agent != self.config.agent:
                        # Dialled as soon as both ends of a job are known: the first message finds warm connections.
                        self.sender.want_peer(entry)
            self.sender.returned(entry)
            self._deliver_waiting(entry, now_ns)
        if changes.gone:
            self._drop_unused_peers(now_ns)

    def _gone(self, gone: Gone, now_ns: int) -> None:
        """An endpoint has ended, for all that is known."""
        endpoint = gone.entry.endpoint
        # First what was sent to it: a trainer that knew of its end alone would post that again to any life.
        self.sender.destination_gone(endpoint, gone.entry.agent, gone.reason, now_ns)
        self.receiver.past.sender_gone(endpoint, gone.entry.incarnation, now_ns)
        for client in sorted(self._clients, key=lambda e: (e.job, e.rank)):
            if client.job == endpoint.job and client != endpoint:
                self._effects.append(TellPeerGone(client, endpoint.rank, gone.entry.incarnation, gone.reason))

    def _unseen_until_ns(self, entry: DirectoryEntry, now_ns: int) -> int:
        """Until when an endpoint that nobody lists may come back: ``peer_timeout`` from its agent's last word to us."""
        peer = self.sender.peers.get(entry.agent)
        if entry.agent in self._away.connected or (peer is not None and peer.connected):
            return now_ns + self.config.peer_timeout_ns
        away_since_ns = peer.away_since_ns if peer is not None else None
        return now_ns if away_since_ns is None else max(now_ns, away_since_ns + self.config.peer_timeout_ns)

    def _tick_unseen(self, now_ns: int) -> None:
        due = [gone for gone, due_ns in self._unseen.values() if due_ns <= now_ns]
        for gone in due:
            del self._unseen[gone.entry.endpoint]
            self._gone(gone, now_ns)
        if due:
            self._drop_unused_peers(now_ns)

    def _deliver_waiting(self, entry: DirectoryEntry, now_ns: int) -> None:
        if entry.agent != self.config.agent:
            self.sender.offer_waiting(entry.endpoint, now_ns)
            return
        for out in self.sender.take_waiting(entry.endpoint):
            out.peer = self.config.agent
            out.step(SendInput.HANDED_OVER)
            # Its trainer may have closed: the message is in the receiver's hands now, and lingers no longer.
            self._orphans.pop(out.transfer, None)
            self.receiver.handed_over(out.transfer, out.envelope, out.dst_incarnation)

    def _drop_unused_peers(self, now_ns: int) -> None:
        used = set(self._directory.agents()) | {out.peer for out in self.sender.transfers.values()}
        used |= {gone.entry.agent for gone, _ in self._unseen.values()}
        for name in [name for name in self.sender.peers if name not in used]:
            self.sender.peer_dropped(name, now_ns)
            self._effects.append(DropPeer(name, "no endpoint lives there any more"))

    # --------------------------------------------------------------------------------------- peers

    def _foretold(self, peer: AgentName, frame: wire.Foretell) -> None:
        """A message for a trainer here will come, says the agent where its source lives."""
        source, destination = EndpointName(frame.job, frame.src_rank), EndpointName(frame.job, frame.dst_rank)
        entry = self._directory.get(source)
        if destination in self._clients and entry is not None and entry.agent == peer:
            self._effects.append(TellForetold(destination, frame))

    def _peer_frame(self, event: ev.PeerFrame, now_ns: int) -> None:
        frame, transfer = event.frame, event.transfer
        if event.inbound:
            match frame:
                case wire.Offer():
                    self.receiver.offered(event.peer, transfer, frame)
                case wire.Expect():
                    self.receiver.expected(event.peer, transfer, frame)
                case wire.Foretell():
                    self._foretold(event.peer, frame)
                case wire.Cancel():
                    self.receiver.cancelled(event.peer, transfer, frame)
                case wire.OfferedAll():
                    self.receiver.offered_all(event.peer)
                case _:
                    pass  # keep-alive frames are the driver's
            return
        if isinstance(frame, wire.EagerReturned):
            pair = (EndpointName(frame.job, frame.src_rank), EndpointName(frame.job, frame.dst_rank))
            self.sender.eager_returned(event.peer, pair, frame.nbytes)
            return
        out = self.sender.transfers.get(transfer)
        if out is None or out.peer != event.peer:
            return  # it ended here while the answer was on its way
        match frame:
            case wire.Credit():
                self.sender.credited(out, now_ns)
            case wire.Held():
                self.sender.held(out, frame, now_ns)
            case wire.TurnedDown():
                self.sender.turned_down(out, now_ns)
            case wire.Ack():
                self.sender.acked(out, frame, now_ns)
            case wire.Nack():
                self.sender.nacked(out, frame, now_ns)
            case wire.Fail():
                code = ErrorCode(frame.code) if frame.code in ErrorCode._value2member_map_ else ErrorCode.INTERNAL
                message = frame.message.removeprefix(f"{out.envelope.describe()}: ")
                text = f"{out.envelope.describe()}: refused by agent {event.peer}: {message}"
                self.sender.fail(out, code, text, now_ns)
            case _:
                pass

    def _stopping(self, event: ev.Stopping) -> None:
        """Let go of everything without a word about any message. Trainers go on with the next life of this agent, and
        what they say of each message counts there: a byte that lands, or an acknowledgement that is given, after they
        were told to go would be one that they don't know of."""
        clients = sorted(self._clients.items(), key=lambda item: (item[0].job, item[0].rank))
        for endpoint, incarnation in clients:
            reason = f"the agent stops: {event.reason}"
            self._effects.append(CloseClient(endpoint, incarnation, ErrorCode.AGENT_STOPS, reason))
        self.receiver.abandon()
        self._stopped = True
