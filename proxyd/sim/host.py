"""An agent's host: carries out the agent machine's effects on modelled connections and memory."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from proxyd.core import effects as ef
from proxyd.core import events as ev
from proxyd.core.agent import AgentConfig, AgentMachine
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.core.messages import AgentHello, AgentMessage, CoordinatorMessage, Welcome
from proxyd.core.oneway import NOISE_NS
from proxyd.core.striping import stream_paces
from proxyd.sim.clock import Alarm, Clock
from proxyd.sim.link import Link
from proxyd.sim.path import Path
from proxyd.sim.tcp import Stream
from proxyd.sim.trainer import Trainer
from proxyd.wire import peer as wire

MIN_POLL_NS = 5_000_000
RETRY_NS = 200_000_000


class Network(Protocol):
    """What a host needs of the world around it."""

    clock: Clock
    rng: random.Random
    eager_bytes: int
    slow_start_after_idle: bool
    congestion_control: str
    reopen_windows: bool

    def host(self, name: AgentName) -> AgentHost | None:
        """A living agent's host."""

    def link(self, src_site: str, dst_site: str) -> Link:
        """The way from site to site."""

    def path(self, src_site: str, dst_site: str) -> Link | Path:
        """What a stream from site to site crosses."""

    def to_coordinator(self, host: AgentHost, address: str, message: AgentMessage) -> None:
        """Send on a control session."""


class Ordered:
    """A connection for small messages: each takes its delay, none overtakes another."""

    def __init__(self, clock: Clock, delay_ns: Callable[[], int], least_ns: int = 0) -> None:
        self._clock = clock
        self._delay_ns = delay_ns
        self.least_ns = least_ns
        self._last_ns = 0

    def send(self, deliver: Callable[[], None]) -> None:
        """Deliver after the delay."""
        self._last_ns = max(self._last_ns, self._clock.now_ns + self._delay_ns())
        self._clock.at(self._last_ns, deliver)

    def follow(self, deliver: Callable[[], None]) -> None:
        """Deliver right behind what was sent before: no chance is drawn, so that it changes nobody else's."""
        self._last_ns = max(self._last_ns, self._clock.now_ns + self.least_ns)
        self._clock.at(self._last_ns, deliver)


class PeerLink:
    """Connections from one host to one peer."""

    def __init__(self, owner: AgentHost, want: ef.WantPeer) -> None:
        self.owner = owner
        self.want = want
        self.connected = False
        self.closed = False
        self.streams: list[Stream] = []
        self.pace_bytes_per_s = 0
        self.yields = False
        world = owner.world
        there = world.link(owner.name.site, want.peer.site)
        back = world.link(want.peer.site, owner.name.site)
        self.rtt_ns = there.model.one_way_ns + back.model.one_way_ns
        jitter = world.rng.randrange
        self.forth = Ordered(
            world.clock, lambda: there.model.one_way_ns + jitter(20_000, 200_000), there.model.one_way_ns
        )
        self.back = Ordered(world.clock, lambda: back.model.one_way_ns + jitter(20_000, 200_000), back.model.one_way_ns)
        self._polling = False

    def dial(self) -> None:
        """Connect: three half round trips, again and again until the peer is there."""
        self.owner.world.clock.after(self.rtt_ns * 3 // 2 + 500_000, self._dialled)

    def _dialled(self) -> None:
        owner, want = self.owner, self.want
        if self.closed or self.connected or not owner.alive:
            return
        peer = owner.world.host(want.peer)
        if peer is None or peer.incarnation != want.incarnation:
            owner.emit(ev.PeerUnreachable(want.peer, "connection refused"))
            owner.world.clock.after(RETRY_NS, self._dialled)
            return
        self.connected = True
        peer.inbound[owner.name] = self
        peer.emit(ev.InboundOpened(owner.name, owner.incarnation))
        self._add_streams()
        owner.emit(ev.PeerConnected(want.peer, want.incarnation, owner.world.eager_bytes))
        owner.emit(self._progress())

    def update(self, want: ef.WantPeer) -> None:
        """More streams are wanted."""
        self.want = want
        if self.connected:
            self._add_streams()

    def _add_streams(self) -> None:
        world, name = self.owner.world, self.want.peer
        path = world.path(self.owner.name.site, name.site)
        while len(self.streams) < self.want.streams:
            stream = Stream(
                world.clock,
                path,
                self.rtt_ns - path.model.one_way_ns,
                back_wait_ns=world.link(name.site, self.owner.name.site).wait_ns,
                slow_start_after_idle=world.slow_start_after_idle,
                congestion_control=world.congestion_control,
                ask=lambda: self.owner.next_chunk(name),
                begins=self._share_pace,
                arrived=self._arrived,
            )
            self.streams.append(stream)
        self.set_pace(self.pace_bytes_per_s)

    def _arrived(self, chunk: object) -> None:
        assert isinstance(chunk, ef.Chunk)
        peer = self.owner.world.host(self.want.peer)
        if peer is not None and self.connected:
            peer.chunk_arrived(self.owner.name, chunk)

    def set_pace(self, rate_bytes_per_s: int) -> None:
        """Ceiling of all streams together; 0: none."""
        self.pace_bytes_per_s = rate_bytes_per_s
        self._share_pace()

    def _share_pace(self) -> None:
        if not self.streams:
            return
        windows = [stream.window for stream in self.streams]
        paces = stream_paces(
            self.pace_bytes_per_s,
            [window.bytes for window in windows],
            self.rtt_ns,
            [window.bytes < window.threshold_bytes for window in windows],
            [stream.has_to_send for stream in self.streams],
        )
        for stream, pace in zip(self.streams, paces, strict=True):
            stream.yields = self.yields
            stream.set_pace(pace if self.pace_bytes_per_s else 0)

    def pump(self) -> None:
        """Offer what there is to every stream."""
        for stream in self.streams:
            stream.pump()
        if not self._polling and any(not stream.settled for stream in self.streams):
            self._polling = True
            self.owner.world.clock.after(MIN_POLL_NS, self._poll)

    def _poll(self) -> None:
        if self.owner.paused:
            self.owner.world.clock.after(1_000_000, self._poll)
            return
        self._polling = False
        if not self.connected or not self.owner.alive:
            return
        progress = self._progress()
        self._share_pace()
        if any(not stream.settled for stream in self.streams):
            self._polling = True
            self.owner.world.clock.after(max(MIN_POLL_NS, progress.min_rtt_ns // 16), self._poll)
        self.owner.emit(progress)

    def _progress(self) -> ev.SendProgress:
        """The streams' counters now. The handshakes have measured a first round trip."""
        streams = self.streams
        if self.owner.world.reopen_windows:
            for stream in streams:
                stream.look()
        return ev.SendProgress(
            peer=self.want.peer,
            granted_left_bytes=sum(s.granted_left_bytes for s in streams),
            granted_delivered_bytes=sum(s.granted_delivered_bytes for s in streams),
            unsent_bytes=sum(s.unsent_bytes for s in streams),
            srtt_ns=sum(s.srtt_ns or self.rtt_ns for s in streams) // len(streams),
            min_rtt_ns=min((s.min_rtt_ns for s in streams if s.min_rtt_ns), default=self.rtt_ns),
            retransmits=sum(s.retransmits for s in streams),
            delivery_rate_bytes_per_s=sum(s.delivery_rate_bytes_per_s for s in streams),
            path_limited=any(s.path_limited for s in streams),
            window_bytes=sum(s.window.bytes for s in streams),
            window_grows=any(s.window.bytes < s.window.threshold_bytes for s in streams),
            sacked_bytes=sum(s.granted_sacked_bytes - s.granted_delivered_bytes for s in streams),
            lost_bytes=sum(s.lost_bytes for s in streams),
            back_queue_ns=back_queue_ns(streams),
        )

    def close(self, reason: str, *, tell_owner: bool) -> None:
        """End the connections; both ends hear it after the delay."""
        if self.closed:
            return
        self.closed = True
        was_connected, self.connected = self.connected, False
        for stream in self.streams:
            stream.close()
        owner, name = self.owner, self.want.peer
        if was_connected:
            self.forth.send(lambda: _tell_closed(owner, name, reason))
        if tell_owner:
            owner.peer_lost(name, self, reason)


def back_queue_ns(streams: Sequence[Stream]) -> int:
    """The other direction's queue, as the agents' pings would find it (:mod:`proxyd.core.oneway`). What a stream that
    sends nothing has seen is of long ago."""
    return max(0, max(streams, key=lambda stream: stream.acked_ns).ack_wait_ns - NOISE_NS)


def _tell_closed(owner: AgentHost, name: AgentName, reason: str) -> None:
    peer = owner.world.host(name)
    if peer is not None and peer.inbound.pop(owner.name, None) is not None:
        peer.emit(ev.InboundClosed(owner.name, owner.incarnation, reason))


class AgentHost:
    """One life of an agent."""

    def __init__(self, world: Network, config: AgentConfig, memory_bytes: int) -> None:
        self.world = world
        self.name = config.agent
        self.incarnation = config.incarnation
        self.config = config
        self.machine = AgentMachine(config)
        self.alive = True
        self.trainers: dict[EndpointName, Trainer] = {}
        self.peers: dict[AgentName, PeerLink] = {}
        self.inbound: dict[AgentName, PeerLink] = {}
        self.memory_bytes = memory_bytes
        self.blocks: dict[TransferId, int] = {}
        """Receive blocks in use, with their sizes."""
        self.epochs: dict[str, int] = {}
        self._offered: set[TransferId] = set()
        self._early: dict[TransferId, list[tuple[AgentName, ef.Chunk]]] = {}
        self._events: deque[ev.AgentEvent] = deque()
        self._busy = False
        self._alarm = Alarm(world.clock, lambda: self.emit(ev.TimePassed()))
        self.paused = False
        """The scheduler keeps the process waiting: the kernel goes on with what it has, the machine hears later."""
        self._unread: list[Callable[[], None]] = []
        """What has come for it meanwhile."""

    def pause(self, for_ns: int) -> None:
        """Keep the process waiting for a while."""
        if not self.paused:
            self.paused = True
            self.world.clock.after(for_ns, self._resume)

    def _resume(self) -> None:
        self.paused = False
        self.emit(ev.TimePassed())
        unread, self._unread = self._unread, []
        for read in unread:
            read()
        for link in list(self.peers.values()):
            if link.connected:
                link.pump()

    def emit(self, event: ev.AgentEvent) -> None:
        """An event for the machine: handled at once, or after those that wait already."""
        if not self.alive:
            return
        self._events.append(event)
        if self._busy or self.paused:
            return
        self._busy = True
        while self._events:
            event = self._events.popleft()
            for effect in self.machine.handle(event, self.world.clock.now_ns):
                self._perform(effect)
        self._busy = False
        self._alarm.set(self.machine.next_deadline_ns())

    def next_chunk(self, peer: AgentName) -> tuple[object, int, bool] | None:
        """For a stream with room."""
        if not self.alive or self.paused:
            return None
        chunk = self.machine.next_chunk(peer, self.world.clock.now_ns)
        if not self._busy:
            self._alarm.set(self.machine.next_deadline_ns())
        return None if chunk is None else (chunk, chunk.length, chunk.granted)

    def hello(self, address: str) -> AgentHello:
        """Its first message to a coordinator."""
        return AgentHello(self.name, self.incarnation, self.config.data_address, self.epochs.get(address, 0))

    def said(self, address: str, message: CoordinatorMessage) -> None:
        """A coordinator's message came."""
        if isinstance(message, Welcome):
            self.epochs[address] = message.epoch
            self.emit(ev.CoordinatorConnected(address, message))
        else:
            self.emit(ev.CoordinatorSaid(address, message))

    def attach(self, trainer: Trainer) -> None:
        """A trainer connects."""
        self.trainers[trainer.endpoint] = trainer
        self.emit(ev.ClientAttached(trainer.endpoint, trainer.incarnation))

    def kill_trainer(self, endpoint: EndpointName, reason: str) -> None:
        """A trainer's process ends."""
        trainer = self.trainers.pop(endpoint)
        trainer.alive = False
        self.emit(ev.ClientDetached(endpoint, trainer.incarnation, reason, orderly=False))

    def kill(self, reason: str) -> None:
        """The host vanishes."""
        self.alive = False
        for trainer in self.trainers.values():
            trainer.alive = False
        for link in list(self.peers.values()):
            link.close(reason, tell_owner=False)
        for link in list(self.inbound.values()):
            link.close(reason, tell_owner=True)

    # ------------------------------------------------------------------------------------- effects

    def _perform(self, effect: ef.AgentEffect) -> None:
        match effect:
            case ef.Pump(peer):
                if (link := self.peers.get(peer)) is not None and link.connected:
                    link.pump()
            case ef.SetPace(peer, rate, _, yields):
                if (link := self.peers.get(peer)) is not None:
                    link.yields = yields
                    link.set_pace(rate)
            case ef.ToCoordinator(address, message):
                self.world.to_coordinator(self, address, message)
            case ef.ToPeer(peer, inbound, transfer, frame):
                self._to_peer(peer, inbound, transfer, frame)
            case ef.WantPeer():
                self._want_peer(effect)
            case ef.DropPeer(peer, reason):
                if (link := self.peers.pop(peer, None)) is not None:
                    link.close(reason, tell_owner=False)
            case ef.AllocateBlock():
                self._allocate(effect)
            case ef.FreeBlock(transfer, endpoint):
                self.blocks.pop(transfer, None)
                self.emit(ev.MemoryFreed(endpoint))
            case _:
                self._tell(effect)

    def _tell(self, effect: ef.AgentEffect) -> None:
        match effect:
            case ef.TellOffered(endpoint, transfer, _, has_memory):
                self._trainer(endpoint, lambda t: t.offered(transfer, has_memory))
            case ef.TellLanded(endpoint, transfer, nbytes):
                self._trainer(endpoint, lambda t: t.landed(transfer, nbytes))
            case ef.TellSendDone(endpoint, transfer):
                self._trainer(endpoint, lambda t: t.send_done(transfer))
            case ef.TellSendFailed(endpoint, transfer, code, message, _):
                self._trainer(endpoint, lambda t: t.send_failed(transfer, code, message))
            case ef.TellRecvFailed(endpoint, transfer, code, _, _):
                self._trainer(endpoint, lambda t: t.receive_failed(transfer, code))
            case _:
                pass  # predictions, phases and blocks: this trainer acts on none of them

    def _trainer(self, endpoint: EndpointName, do: Callable[[Trainer], None]) -> None:
        trainer = self.trainers.get(endpoint)
        if trainer is not None and trainer.alive:
            do(trainer)

    def _allocate(self, effect: ef.AllocateBlock) -> None:
        transfer = effect.transfer
        if effect.local_source:
            self.emit(ev.BlockAllocated(transfer, 1, 4096))
        elif effect.nbytes > self.memory_bytes:
            self.emit(ev.BlockDenied(transfer, f"{effect.nbytes} bytes exceed the agent's memory", permanent=True))
        elif sum(self.blocks.values()) + effect.nbytes > self.memory_bytes:
            self.emit(ev.BlockDenied(transfer, "no memory now", permanent=False))
        else:
            self.blocks[transfer] = effect.nbytes
            self.emit(ev.BlockAllocated(transfer, 1, 4096))

    # --------------------------------------------------------------------------------------- peers

    def _want_peer(self, want: ef.WantPeer) -> None:
        link = self.peers.get(want.peer)
        if link is not None and link.want.incarnation == want.incarnation and not link.closed:
            link.update(want)
            return
        if link is not None:
            link.close("the peer was restarted", tell_owner=True)
        self.peers[want.peer] = link = PeerLink(self, want)
        link.dial()

    def peer_lost(self, name: AgentName, link: PeerLink, reason: str) -> None:
        """The connections to a peer broke: hear of it after the delay, and dial again."""

        def heard() -> None:
            if self.peers.get(name) is link and self.alive:
                self.peers[name] = again = PeerLink(self, link.want)
                self.emit(ev.PeerDisconnected(name, reason))
                if self.peers.get(name) is again:
                    again.dial()

        link.back.send(heard)

    def _to_peer(self, name: AgentName, inbound: bool, transfer: TransferId, frame: wire.Frame) -> None:
        link = self.inbound.get(name) if inbound else self.peers.get(name)
        if link is None or not link.connected:
            return  # it broke; both ends hear of that
        world, me = self.world, self.name

        def deliver() -> None:
            peer = world.host(name)
            if peer is None or not link.connected:
                return
            peer.frame(me, not inbound, transfer, frame)

        line = link.back if inbound else link.forth
        # How often predictions are told must not change whose packets are late and who is paused.
        (line.follow if isinstance(frame, (wire.Expect, wire.Foretell)) else line.send)(deliver)

    def frame(self, peer: AgentName, inbound: bool, transfer: TransferId, frame: wire.Frame) -> None:
        """A control frame came."""
        if self.paused:
            self._unread.append(lambda: self.frame(peer, inbound, transfer, frame))
            return
        self.emit(ev.PeerFrame(peer, inbound, transfer, frame))
        if isinstance(frame, wire.Offer):
            self._offered.add(transfer)
            for source, chunk in self._early.pop(transfer, ()):
                self.chunk_arrived(source, chunk)

    def chunk_arrived(self, peer: AgentName, chunk: ef.Chunk) -> None:
        """A chunk is here whole; one that has overtaken its offer waits."""
        if chunk.padding:
            return
        if self.paused:
            self._unread.append(lambda: self.chunk_arrived(peer, chunk))
            return
        if chunk.transfer not in self._offered:
            self._early.setdefault(chunk.transfer, []).append((peer, chunk))
        elif chunk.transfer in self.blocks:
            self.emit(ev.ChunkArrived(peer, chunk.transfer, chunk.offset, chunk.length, good=True))
