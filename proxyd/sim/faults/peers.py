"""Connections between agents: one for control frames and some for chunks, which one agent dials to another.

Frames and chunk headers go through the real codec, so a flipped bit is met where the daemons meet it. A stream takes a
chunk at a time from the machine, holds it to the pace and to the link's rate, and counts as the kernel would.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from proxyd.core import effects as ef
from proxyd.core import events as ev
from proxyd.core.ids import AgentName, TransferId
from proxyd.core.striping import least_pace, stream_paces
from proxyd.sim.faults.network import Connection, Pipe
from proxyd.sim.faults.plan import MS, SECOND
from proxyd.wire import peer as wire
from proxyd.wire.codec import WireError

if TYPE_CHECKING:
    from proxyd.sim.faults.agents import AgentLife

POLL_NS = 5 * MS
WELCOME = "welcome"
PACKET_BYTES = 1448
UNPACED_BYTES_PER_S = 1_000_000_000


def flip(data: bytes, at: int) -> bytes:
    """With one bit flipped."""
    damaged = bytearray(data)
    damaged[at // 8] ^= 1 << at % 8
    return bytes(damaged)


class Stream:
    """One data connection, as far as bytes go."""

    def __init__(self, peer: PeerConnection) -> None:
        net, sender, receiver = peer.world.net, peer.sender.name, peer.receiver.name
        self._peer = peer
        self.data = Pipe(net, sender, receiver, self._arrived)
        self.acks = Pipe(net, receiver, sender, self._acked)
        self._free_ns = 0
        self._highest_bytes_per_s = 0
        self._unsent = 0
        self.early: deque[tuple[bytes, int]] = deque()
        """At the receiver: a chunk that has overtaken its OFFER, and what is behind it."""

    def pump(self, pace_bytes_per_s: int) -> None:
        """Take a chunk if the last one has left."""
        peer, world = self._peer, self._peer.world
        while not self._unsent:
            taken = peer.sender.next_chunk(peer.receiver.name)
            if taken is None:
                return
            chunk, content = taken
            now_ns = world.clock.now_ns
            self._highest_bytes_per_s = max(self._highest_bytes_per_s, pace_bytes_per_s)
            floor = least_pace(PACKET_BYTES, self._highest_bytes_per_s)
            rate = max(pace_bytes_per_s, floor) if pace_bytes_per_s else UNPACED_BYTES_PER_S
            self._free_ns = max(now_ns, self._free_ns) + chunk.length * SECOND // rate
            out_ns = world.carry(peer.sender.name.site, peer.receiver.name.site, self._free_ns, chunk.length)
            if chunk.padding:
                head = wire.encode_padding_header(chunk.length)
            else:
                head = wire.encode_data_header(chunk.transfer, chunk.offset, chunk.length, content)
            if world.hits("flip_header"):
                head = flip(head, world.rng.randrange(8 * len(head)))
            if world.hits("flip_payload") and not chunk.padding:
                content ^= 1 << world.rng.randrange(64)
            self._unsent += chunk.length
            peer.took(chunk.length)
            world.clock.at(self._free_ns, self._left, chunk.length, chunk.granted)
            self.data.send((head, content, chunk.length, chunk.granted), out_ns)

    def _left(self, nbytes: int, granted: bool) -> None:
        self._unsent -= nbytes
        self._peer.left(nbytes, granted)

    def _arrived(self, item: tuple[bytes, int, int, bool]) -> None:
        """At the receiving kernel, which acknowledges it whether its process runs or not."""
        head, content, nbytes, granted = item
        if self._peer.connection.acceptor_open:
            self.acks.send((nbytes, granted))
            self._peer.receiver.process(self._peer.chunk_read, self, head, content)

    def _acked(self, item: tuple[int, bool]) -> None:
        self._peer.acked(*item)

    def close(self) -> None:
        self.data.close()
        self.acks.close()


class PeerConnection:
    """All connections of one dialling."""

    def __init__(self, link: PeerLink, receiver: AgentLife, streams: int) -> None:
        self.link = link
        self.world = link.owner.world
        self.sender, self.receiver = link.owner, receiver
        self.connection = Connection(
            self.world.net,
            self.sender.name,
            receiver.name,
            lambda data: receiver.process(self._receiver_reads, data),
            lambda item: self.sender.process(self._sender_reads, item),
            self._ended,
        )
        self.streams = [Stream(self) for _ in range(streams)]
        self._to_receiver, self._to_sender = wire.ControlDecoder(), wire.ControlDecoder()
        self._offered: set[TransferId] = set()
        self._granted_left = self._granted_delivered = self._unsent = 0
        self._polling = False

    # -- control -------------------------------------------------------------------------------------------------

    def _damaged(self, data: bytes) -> bytes:
        world = self.world
        return flip(data, world.rng.randrange(8 * len(data))) if world.hits("flip_frame") else data

    def offer(self, transfer: TransferId, frame: wire.Frame) -> None:
        """A frame of the sender."""
        if self.connection.dialler_open:
            self.connection.forth.send(self._damaged(wire.encode(frame, transfer)))

    def answer(self, transfer: TransferId, frame: wire.Frame) -> None:
        """A frame of the receiver."""
        if self.connection.acceptor_open:
            self.connection.back.send(self._damaged(wire.encode(frame, transfer)))

    def _receiver_reads(self, data: bytes) -> None:
        if not self.connection.acceptor_open:
            return
        try:
            transfer, frame = _only_frame(self._to_receiver, data)
        except WireError as error:
            self._receiver_ends(str(error))
            return
        self.receiver.emit(ev.PeerFrame(self.sender.name, True, transfer, frame))
        if isinstance(frame, wire.Offer):
            self._offered.add(transfer)
            for stream in self.streams:
                self._read_on(stream)

    def _sender_reads(self, item: Any) -> None:
        if not self.connection.dialler_open or self.link.peer_connection is not self:
            return
        if item is WELCOME:
            self.link.up(self)
            return
        try:
            transfer, frame = _only_frame(self._to_sender, item)
        except WireError as error:
            self.connection.close(True, str(error))
            self.link.down(self, str(error))
            return
        self.sender.emit(ev.PeerFrame(self.receiver.name, False, transfer, frame))

    # -- chunks --------------------------------------------------------------------------------------------------

    def took(self, nbytes: int) -> None:
        """A stream holds so much more."""
        self._unsent += nbytes

    def left(self, nbytes: int, granted: bool) -> None:
        """It is on its way."""
        self._unsent -= nbytes
        self._granted_left += nbytes if granted else 0
        self._poll_soon()
        if self.link.peer_connection is self:
            self.link.pump()

    def acked(self, nbytes: int, granted: bool) -> None:
        """The receiving kernel has it."""
        self._granted_delivered += nbytes if granted else 0
        self._poll_soon()

    def _poll_soon(self) -> None:
        if not self._polling:
            self._polling = True
            self.world.clock.after(POLL_NS, self._poll)

    def _poll(self) -> None:
        self._polling = False
        self.sender.process(self.progress)

    def progress(self) -> None:
        """Tell the machine the kernel's counts."""
        if self.link.peer_connection is not self or not self.link.connected:
            return
        shape = self.world.shape
        window_bytes = 2 * shape.rate_bytes_per_s * shape.rtt_ns // SECOND + (1 << 18) if shape.windows else 0
        self.sender.emit(
            ev.SendProgress(
                peer=self.receiver.name,
                granted_left_bytes=self._granted_left,
                granted_delivered_bytes=self._granted_delivered,
                unsent_bytes=self._unsent,
                srtt_ns=shape.rtt_ns + MS,
                min_rtt_ns=shape.rtt_ns,
                retransmits=0,
                delivery_rate_bytes_per_s=self.link.pace_bytes_per_s,
                path_limited=False,
                window_bytes=window_bytes,
            )
        )

    def chunk_read(self, stream: Stream, head: bytes, content: int) -> None:
        """The receiver comes to a chunk."""
        stream.early.append((head, content))
        if len(stream.early) == 1:
            self._read_on(stream)

    def _read_on(self, stream: Stream) -> None:
        while stream.early and self.connection.acceptor_open:
            head, content = stream.early[0]
            try:
                header = wire.decode_header(head)
                if header.type == wire.DATA_TYPE:
                    block = self.receiver.block_of(self.sender.name, header.transfer)
                    if block is None and header.transfer not in self._offered:
                        return
                    stream.early.popleft()
                    if block is not None:
                        self._chunk(block, header, content)
                elif header.type == wire.PADDING_TYPE:
                    stream.early.popleft()
                else:
                    raise WireError(f"control frame type {header.type} came on a data connection")
            except WireError as error:
                self._receiver_ends(str(error))

    def _chunk(self, block: Any, header: wire.Header, content: int) -> None:
        chunk = block.chunk_bytes
        if header.offset % chunk or header.length != min(chunk, block.nbytes - header.offset):
            raise WireError(f"{header.length} bytes at {header.offset} are no chunk of transfer {header.transfer}")
        if header.offset in block.chunks:
            return
        good = content == header.checksum
        if good:
            block.chunks[header.offset] = content
        arrived = ev.ChunkArrived(self.sender.name, header.transfer, header.offset, header.length, good)
        self.receiver.emit(arrived)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _receiver_ends(self, reason: str) -> None:
        self.connection.close(False, reason)
        self._tell_receiver(reason)

    def _tell_receiver(self, reason: str) -> None:
        receiver, name = self.receiver, self.sender.name
        if receiver.inbound.get(name) is self:
            del receiver.inbound[name]
            receiver.left_ns[name] = receiver.host.now_ns
        receiver.emit(ev.InboundClosed(name, self.sender.incarnation, reason))
        self._close_if_over()

    def _ended(self, dialler: bool, reason: str) -> None:
        """One end has learnt of the end."""
        if dialler:
            self.sender.process(self.link.down, self, reason)
        else:
            self.receiver.process(self._tell_receiver, reason)

    def replaced(self) -> None:
        """The same agent has dialled again."""
        if self.connection.acceptor_open:
            self._receiver_ends("another connection of it took over")

    def _close_if_over(self) -> None:
        if not self.connection.dialler_open and not self.connection.acceptor_open:
            for stream in self.streams:
                stream.close()


class PeerLink:
    """One peer that an agent wants: dialled for as long as it does."""

    def __init__(self, owner: AgentLife, peer: AgentName) -> None:
        self.owner = owner
        self.peer = peer
        self.pace_bytes_per_s = 0
        self.connected = False
        self.peer_connection: PeerConnection | None = None
        """The one that is being made or stands."""
        self._incarnation = 0
        self._wanted: ef.WantPeer | None = None
        self._dropped = False
        self._tries = 0

    def want(self, effect: ef.WantPeer) -> None:
        """Where it is, and in which life."""
        before, self._wanted = self._wanted, effect
        if before is None:
            self._dial_after(0)
        elif self.connected and self.peer_connection is not None:
            if (before.incarnation, before.address) != (effect.incarnation, effect.address) and (
                effect.incarnation != self._incarnation
            ):
                reason = "its agent was restarted"
                self.peer_connection.connection.close(True, reason)
                self.down(self.peer_connection, reason)
            else:
                while len(self.peer_connection.streams) < effect.streams:
                    self.peer_connection.streams.append(Stream(self.peer_connection))

    def _dial_after(self, delay_ns: int) -> None:
        world = self.owner.world
        trip_ns = world.net.delay_ns(self.owner.name, self.peer) + world.net.delay_ns(self.peer, self.owner.name)
        world.clock.after(delay_ns + trip_ns, self.owner.process, self._dialled)

    def _dialled(self) -> None:
        owner, world, wanted = self.owner, self.owner.world, self._wanted
        if self._dropped or self.peer_connection is not None or wanted is None:
            return
        there = world.hosts[self.peer]
        receiver = there.life
        if receiver is None or there.stopped or not world.net.reaches(owner.name, self.peer):
            self._tries += 1
            owner.emit(ev.PeerUnreachable(self.peer, "cannot reach it: no answer in time"))
            self._dial_after(min(500, 50 << min(self._tries, 4)) * MS)
            return
        self.peer_connection = connection = PeerConnection(self, receiver, wanted.streams)
        receiver.process(receiver.adopt, connection)

    def up(self, connection: PeerConnection) -> None:
        """Its welcome is here."""
        owner, receiver = self.owner, connection.receiver
        self.connected = True
        self._tries = 0
        self._incarnation = receiver.incarnation
        owner.emit(ev.PeerConnected(self.peer, receiver.incarnation, owner.world.shape.eager_bytes))
        connection.progress()
        wanted = self._wanted
        if self.peer_connection is connection and wanted is not None and wanted.incarnation > receiver.incarnation:
            # It was said to be restarted while we dialled; whoever answered is not whom the machine means.
            connection.connection.close(True, "its agent was restarted")
            self.down(connection, "its agent was restarted")

    def down(self, connection: PeerConnection, reason: str) -> None:
        """Its connections are gone."""
        if self.peer_connection is not connection:
            return
        self.peer_connection = None
        was_connected, self.connected = self.connected, False
        connection._close_if_over()
        if was_connected:
            self.owner.emit(ev.PeerDisconnected(self.peer, f"the connection to agent {self.peer} ended: {reason}"))
        if not self._dropped and self.owner.links.get(self.peer) is self:
            self._dial_after(self.owner.world.rng.randrange(10, 100) * MS)

    def hang_up(self, reason: str, *, tell: bool = True) -> None:
        """Close, without a word to the machine."""
        connection, self.peer_connection = self.peer_connection, None
        self.connected = False
        if connection is not None:
            connection.connection.close(True, reason, tell=tell)

    def drop(self, reason: str) -> None:
        """The machine wants it no longer."""
        self._dropped = True
        self.hang_up(reason)

    def send(self, transfer: TransferId, frame: wire.Frame) -> None:
        """A control frame; dropped while nothing stands."""
        if self.connected and self.peer_connection is not None:
            self.peer_connection.offer(transfer, frame)

    def pump(self) -> None:
        """Offer what there is to the streams."""
        connection = self.peer_connection
        if not self.connected or connection is None or self.owner.host.stopped:
            return
        streams = connection.streams
        windows = [1 << 20] * len(streams)
        paces = stream_paces(self.pace_bytes_per_s, windows, self.owner.world.shape.rtt_ns)
        for stream, pace in zip(list(streams), paces, strict=True):
            stream.pump(pace if self.pace_bytes_per_s else 0)


def _only_frame(decoder: wire.ControlDecoder, data: bytes) -> tuple[TransferId, wire.Frame]:
    decoder.feed(data)
    found = decoder.next_frame()
    if found is None:
        raise WireError("a frame is shorter than it says")
    return found
