"""One attached trainer: its frames become events, the machine's answers become frames.

Nothing that comes from a client is trusted: every arena, offset, length and name is checked before it is used, and a
client that breaks the protocol loses its session and nothing else. Two kinds share this class: over a Unix socket
memory is passed, over TCP (a trainer on another host of the site) the agent keeps private arenas and payload travels
along.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxyd.agent.arenas import Arena, Block, prefault_all
from proxyd.agent.memory import EndpointMemory, MemoryLimitError
from proxyd.agent.outbox import Outbox
from proxyd.core.events import (
    Past,
    RecvAccepted,
    RecvReleased,
    SendAnnounced,
    SendCancelled,
    SendFilled,
    SendPosted,
)
from proxyd.core.ids import EndpointName, TransferId
from proxyd.core.units import MAX_DURATION_NS
from proxyd.runtime.logs import fields
from proxyd.wire import client as wire
from proxyd.wire.auth import NONCE_BYTES
from proxyd.wire.client import ArenaKind
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import MAX_TRANSFER_BYTES, Envelope, ErrorCode, TrafficClass

if TYPE_CHECKING:
    from proxyd.agent.clients import ClientHub

HELLO_S = 10.0
MAX_PAST_FRAMES = 8192
MAX_PAST_SEQUENCES = 1 << 18
"""What a trainer may say of earlier lives of the agent: far more than its library does."""
DEATH_GRACE_S = 0.1
READ_BYTES = 256 << 10
PAYLOAD_PIECE_BYTES = 1 << 20
_TRAFFIC = frozenset(TrafficClass)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """Who is on the other end. ``uid`` -1: over TCP, where the token speaks instead."""

    uid: int
    pid: int
    pidfd: int
    address: str


@dataclasses.dataclass(slots=True)
class Incoming:
    """A message on its way to this client."""

    session: ClientSession
    nbytes: int
    block: Block | None = None
    source_arena: Arena | None = None
    """Set for a message from another local trainer: the arena that is handed over."""
    landed_bytes: int = 0
    offered_bytes: int = 0
    accepted: bool = False
    forwarded_bytes: int = 0
    """TCP clients: what was queued to it."""


class ClientSession:
    """See the module's text. ``endpoint`` and ``incarnation`` are set by its hello."""

    def __init__(
        self,
        hub: ClientHub,
        sock: socket.socket,
        who: Credentials,
        *,
        shared_memory: bool,
        left: Callable[[], None] = lambda: None,
        refuse: Callable[[str, str], None] = lambda reason, text: None,
    ) -> None:
        """``left``: called once it is no stranger any more; ``refuse``: counts (and says) why one was sent away."""
        self._loop = asyncio.get_running_loop()
        self._hub = hub
        self._left = left
        self._refuse = refuse
        self._sock = sock
        self.who = who
        self.shared_memory = shared_memory
        self.endpoint = EndpointName("", 0)
        self.incarnation = 0
        self.memory: EndpointMemory | None = None
        self.live_blocks = 0
        """Blocks that the machine still counts on; the arenas stay until there are none."""
        self.sends = 0
        """Sends that have not ended."""
        self.peer_arenas: dict[int, int] = {}
        """Other trainers' arenas that were handed over: their number, and the one it has here."""
        self.attached = False
        self.past: list[Past] | None = None
        """It comes from an earlier life of this agent, and is saying what it knows. The machine doesn't know it yet."""
        self.age_ns = 0
        self._open = True
        self._last_sequence = 0
        self._filled_bytes: dict[int, int] = {}
        self._payload: tuple[int, Block | None, int] | None = None
        self._past_sequences = 0
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._token = b""
        """What the hello has proven, and the welcome proves."""
        self._decoder = wire.Decoder(allow_payload=not shared_memory)
        self._outbox = Outbox(sock, self._on_broken, hub.turn)
        self._hello_timer: asyncio.TimerHandle | None = self._loop.call_later(HELLO_S, self._on_silent)
        self._end_timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._on_readable)
        if who.pidfd >= 0:
            self._loop.add_reader(who.pidfd, self._on_death)
        self.tell(wire.Challenge(wire.PROTOCOL_VERSION, self._challenge))

    @property
    def is_open(self) -> bool:
        """Frames can be sent."""
        return self._open

    @property
    def name(self) -> str:
        """For log lines."""
        return f"{self.endpoint} ({self.who.address})" if self.endpoint.job else self.who.address

    # -- towards the client ------------------------------------------------------------------------------------------

    def tell(self, frame: wire.Frame) -> None:
        """Queue a frame."""
        if self._open:
            self._outbox.frame(wire.encode(frame))

    def tell_unhurried(self, frame: wire.Frame) -> None:
        """Queue a frame that it doesn't wait for."""
        if self._open:
            self._outbox.unhurried(wire.encode(frame))

    def advise(self, frame: wire.Frame) -> None:
        """Queue a frame that only matters now."""
        if self._open:
            self._outbox.advice(wire.encode(frame))

    def once_told(self, call: Callable[[], None]) -> None:
        """Call when the client has all that was told so far, whatever becomes of this process."""
        self._outbox.then(call)

    def grant_arena(self, arena: Arena) -> None:
        """Pass an arena of its own."""
        if self._open and self.shared_memory:
            self._outbox.frame(wire.encode(wire.ArenaGranted(arena.number, arena.kind, arena.size_bytes)), arena.fd)

    def hand_over_arena(self, arena: Arena, number: int) -> None:
        """Pass another trainer's SEND arena, read-only, under a number of this session."""
        if self._open and self.shared_memory:
            fd = arena.read_only_fd()
            try:
                self._outbox.frame(wire.encode(wire.ArenaGranted(number, ArenaKind.PEER, arena.size_bytes)), fd)
            finally:
                os.close(fd)
        self.peer_arenas[arena.number] = number

    def forward(self, transfer: TransferId, incoming: Incoming) -> None:
        """TCP clients: queue what has landed and wasn't queued yet, once the client wants it."""
        block = incoming.block
        if self.shared_memory or not self._open or not incoming.accepted or block is None:
            return
        while incoming.forwarded_bytes < incoming.landed_bytes:
            at = incoming.forwarded_bytes
            size = min(PAYLOAD_PIECE_BYTES, incoming.landed_bytes - at)
            self._outbox.frame(wire.encode(wire.RecvData(*transfer, at), size))
            self._outbox.payload(block.payload[at : at + size])
            incoming.forwarded_bytes += size

    # -- reading -----------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        self._hub.turn.run(self._read)

    def _read(self) -> bool:
        """One read; False when there is nothing more."""
        try:
            if self._payload is not None and self._payload[1] is not None:
                return self._read_payload(self._payload)
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._gone(f"its connection broke: {error.strerror or error}")
            return False
        if not data:
            self._on_end()
            return False
        self._decoder.feed(data)
        self._take_frames()
        return self._open

    def _take_frames(self) -> None:
        try:
            while self._open:
                if self._payload is not None and not self._take_payload(self._payload):
                    return
                item = self._decoder.next_frame()
                if item is None:
                    return
                self._on_frame(item[0], item[1])
        except WireError as error:
            self._misbehaved(str(error))

    def _take_payload(self, payload: tuple[int, Block | None, int]) -> bool:
        """Move buffered payload of a SEND_DATA into its block; True when all of it is there."""
        sequence, block, at = payload
        while piece := self._decoder.take_payload(PAYLOAD_PIECE_BYTES):
            if block is not None and block.live:
                block.payload[at : at + len(piece)] = piece
            at += len(piece)
        return self._payload_advanced(sequence, block, at)

    def _read_payload(self, payload: tuple[int, Block | None, int]) -> bool:
        """Read payload straight into its block."""
        sequence, block, at = payload
        left = self._decoder.payload_left_bytes
        area = block.payload[at : at + left] if block is not None and block.live else memoryview(bytearray(left))
        got = self._sock.recv_into(area)
        if got == 0:
            self._gone("it closed its connection in the middle of a message")
            return False
        self._decoder.payload_received(got)
        self._payload_advanced(sequence, block, at + got)
        return got == len(area)

    def _payload_advanced(self, sequence: int, block: Block | None, at: int) -> bool:
        if self._decoder.payload_left_bytes:
            self._payload = sequence, block, at
            return False
        self._payload = None
        if block is not None and block.live:
            self._filled_bytes[sequence] = at
            self._hub.emit(SendFilled(TransferId(self.incarnation, sequence), at))
        return True

    # -- frames ------------------------------------------------------------------------------------------------------

    def _on_frame(self, frame: wire.Frame, payload_bytes: int) -> None:
        if not self.attached:
            if not isinstance(frame, wire.Hello):
                raise WireError(f"{type(frame).__name__} came before Hello")
            self._on_hello(frame)
            return
        if self.past is not None and not isinstance(frame, wire.Bye):
            self._on_past(self.past, frame)
            return
        match frame:
            case wire.PostSend():
                self._on_post(frame)
            case wire.SendFilled():
                self._on_filled(frame)
            case wire.SendData():
                self._on_data(frame, payload_bytes)
            case wire.Accept():
                self._on_accept(TransferId(frame.incarnation, frame.sequence))
            case wire.Release():
                self._hub.turn.write()
                transfer = TransferId(frame.incarnation, frame.sequence)
                if self._hub.incoming_of(self, transfer) is not None:
                    self._hub.emit(RecvReleased(transfer))
            case wire.CancelSend():
                self._hub.emit(SendCancelled(TransferId(self.incarnation, frame.sequence)))
            case wire.AnnounceSend():
                self._on_announce(frame)
            case wire.Waited():
                self._hub.job_waits.waited(self.endpoint.job, self.incarnation, frame.waited_ns)
            case wire.ArenaWanted():
                self._on_arena_wanted(frame)
            case wire.LinkStateWanted():
                self._on_link_state_wanted(frame)
            case wire.Bye():
                self._detach(frame.message or "it closed", orderly=True)
            case _:
                raise WireError(f"{type(frame).__name__} is not for a client to send")

    def _on_hello(self, hello: wire.Hello) -> None:
        refusal = self._judge(hello)
        if refusal is None and hello.resumes and self._hub.lives_elsewhere(self.who.pid, hello.resumes):
            self._close()
            return
        if refusal is None:
            refusal = self._hub.admit(self, hello)
        if refusal is not None:
            code, message = refusal
            reason = "limit" if code is ErrorCode.RESOURCE else "hello"
            self._refuse(reason, f"client {self.who.address} refused: {message}")
            self.tell(wire.Refused(code, message[:1000]))
            self._close()

    def _judge(self, hello: wire.Hello) -> tuple[ErrorCode, str] | None:
        if hello.version != wire.PROTOCOL_VERSION:
            return ErrorCode.PROTOCOL, (
                f"the agent speaks protocol version {wire.PROTOCOL_VERSION}, this client {hello.version};"
                " install one version of proxyd for both"
            )
        if hello.shared_memory != self.shared_memory:
            way = "passes memory over this Unix socket" if self.shared_memory else "can't pass memory over TCP"
            return ErrorCode.PROTOCOL, f"the agent {way}, and the client asked for the other way"
        if not hello.job or hello.incarnation == 0:
            return ErrorCode.PROTOCOL, "the hello names no job or no incarnation"
        verdict = self._hub.proofs.judge(hello, self._challenge, local=self.shared_memory)
        if verdict.refusal:
            self._hub.count_failed_proof(verdict.proof)
            return ErrorCode.REFUSED, verdict.refusal
        self._token = verdict.token
        return None

    def _on_past(self, past: list[Past], frame: wire.Frame) -> None:
        """What it knows from an earlier life of the agent, one sender after the other."""
        match frame:
            case wire.Resume():
                past.append(Past(frame.rank, frame.incarnation, frame.highest, frame.delivered, frame.awaited))
                sequences = sum(len(one.delivered) + len(one.awaited) for one in past[-1:])
                self._past_sequences += sequences
                if len(past) > MAX_PAST_FRAMES or self._past_sequences > MAX_PAST_SEQUENCES:
                    raise WireError(f"it claims to know {self._past_sequences} messages of {len(past)} senders")
            case wire.Resumed():
                self.past = None
                self._is_known()
                self._hub.resumed(self, tuple(past))
            case _:
                raise WireError(f"{type(frame).__name__} came before Resumed")

    def welcome(
        self,
        hello: wire.Hello,
        *,
        site: str,
        agent: str,
        agent_incarnation: int,
        linger_ns: int,
        reconnect_ns: int,
    ) -> None:
        """The hub took the session in: say so. Raises MemoryLimitError before anything was sent."""
        memory = self._hub.new_memory(self, hello.incarnation)
        self.memory = memory
        self.endpoint = EndpointName(hello.job, hello.rank)
        self.incarnation = hello.incarnation
        mac = wire.welcome_mac(self._token, self._challenge, hello.nonce, site, agent)
        frame = wire.Welcome(
            site=site,
            agent_name=agent,
            agent_incarnation=agent_incarnation,
            memory_limit_bytes=self._hub.memory_limit_bytes,
            linger_ns=linger_ns,
            mac=mac,
            reconnect_ns=reconnect_ns if self.shared_memory else 0,
        )
        arenas: list[Arena] = []
        memory.granted = arenas.append
        first = memory.open()
        memory.granted = self.grant_arena
        self.tell(frame)
        for arena in arenas:
            self.grant_arena(arena)
        self._loop.run_in_executor(self._hub.prefault_executor, prefault_all, first, self._hub.prefault_bytes)
        self.attached = True
        self.age_ns = min(hello.age_ns, MAX_DURATION_NS)
        self._left()
        if hello.resumes:
            self.past = []
        else:
            self._is_known()

    def _is_known(self) -> None:
        """It has said all that it has to say before anything is told to it."""
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None

    def _on_post(self, post: wire.PostSend) -> None:
        envelope = post.envelope
        self._check(envelope)
        if post.sequence <= self._last_sequence:
            raise WireError(f"sequence {post.sequence} came after {self._last_sequence}")
        if post.filled_bytes > envelope.nbytes:
            raise WireError(f"{post.filled_bytes} bytes filled of a message of {envelope.nbytes}")
        self._last_sequence = post.sequence
        if self.sends >= self._hub.max_sends:
            self._hub.refused_sends += 1
            text = (
                f"{self.sends} sends of this trainer are under way already, and each costs the agent memory of its own;"
                " wait for some of them, or raise [agent] sends"
            )
            self.tell(wire.SendFailed(post.sequence, ErrorCode.RESOURCE, text, 0))
            return
        transfer = TransferId(self.incarnation, post.sequence)
        if self.memory is None:
            raise WireError("no arenas")
        filled_bytes = post.filled_bytes
        if self.shared_memory:
            block = self.memory.send_block(transfer, post.arena, post.offset, envelope.nbytes)
        else:
            filled_bytes = 0
            try:
                block = self.memory.allocate_send_block(transfer, envelope.nbytes)
            except MemoryLimitError as error:
                self.tell(wire.SendFailed(post.sequence, ErrorCode.RESOURCE, str(error), 0))
                return
            self._filled_bytes[post.sequence] = 0
        self._hub.posted(self, transfer, block)
        self._hub.emit(
            SendPosted(
                transfer,
                envelope,
                filled_bytes,
                min(post.deadline_in_ns, MAX_DURATION_NS),
                again=post.again,
                dst_incarnation=post.dst_incarnation,
                handed_over=self.shared_memory and self._hub.hand_over_ahead(transfer, envelope, filled_bytes),
            )
        )

    def _check(self, envelope: Envelope) -> None:
        if envelope.source != self.endpoint:
            raise WireError(f"a message in the name of {envelope.source} from {self.endpoint}")
        if envelope.nbytes > MAX_TRANSFER_BYTES or envelope.traffic not in _TRAFFIC:
            raise WireError(f"a message of {envelope.nbytes} bytes in class {envelope.traffic} is outside the limits")

    def _on_filled(self, frame: wire.SendFilled) -> None:
        if not self.shared_memory:
            raise WireError("SEND_FILLED over TCP; SEND_DATA is due")
        transfer = TransferId(self.incarnation, frame.sequence)
        block = self._hub.outgoing_of(transfer)
        if block is None:
            return  # it ended meanwhile
        if frame.filled_bytes > block.nbytes:
            raise WireError(f"{frame.filled_bytes} bytes filled of a message of {block.nbytes}")
        self._hub.emit(SendFilled(transfer, frame.filled_bytes))

    def _on_data(self, frame: wire.SendData, payload_bytes: int) -> None:
        block = self._hub.outgoing_of(TransferId(self.incarnation, frame.sequence))
        if block is not None:
            due = self._filled_bytes.get(frame.sequence, 0)
            if frame.offset != due or due + payload_bytes > block.nbytes:
                raise WireError(f"{payload_bytes} bytes at {frame.offset} where byte {due} of {block.nbytes} is due")
        if payload_bytes:
            self._payload = frame.sequence, block, frame.offset

    def send_ended(self, transfer: TransferId) -> None:
        """Forget how far a TCP client had got with it."""
        self._filled_bytes.pop(transfer.sequence, None)

    def _on_accept(self, transfer: TransferId) -> None:
        incoming = self._hub.incoming_of(self, transfer)
        if incoming is None or incoming.accepted:
            return
        incoming.accepted = True
        if incoming.block is None:
            self._hub.emit(RecvAccepted(transfer))
        else:
            self.forward(transfer, incoming)

    def _on_announce(self, frame: wire.AnnounceSend) -> None:
        envelope = Envelope(
            job=self.endpoint.job,
            src_rank=self.endpoint.rank,
            dst_rank=frame.dst_rank,
            group=frame.group,
            tag=frame.tag,
            traffic=frame.traffic,
            nbytes=frame.nbytes,
            dtype="",
            shape=(),
        )
        self._check(envelope)
        # What the control protocol can't carry would end the agent's session there.
        self._hub.emit(SendAnnounced(envelope, min(frame.ready_in_ns, MAX_DURATION_NS)))

    def _on_arena_wanted(self, frame: wire.ArenaWanted) -> None:
        if self.memory is None or not self.shared_memory:
            raise WireError("ARENA_WANTED over TCP")
        if frame.nbytes > MAX_TRANSFER_BYTES:
            raise WireError(f"an arena for {frame.nbytes} bytes is outside the limits")
        try:
            self.memory.want_send_arena(frame.nbytes)
        except MemoryLimitError as error:
            self.tell(wire.ArenaRefused(frame.nbytes, str(error)))

    def _on_link_state_wanted(self, frame: wire.LinkStateWanted) -> None:
        state = self._hub.link_state(self.endpoint, frame.dst_rank)
        self.tell(
            wire.LinkState(
                request=frame.request,
                link=state.link,
                source=state.source,
                rate_bytes_per_s=state.rate_bytes_per_s,
                rtt_ns=state.rtt_ns,
                queue_ns=state.queue_ns,
                waiting_bytes=state.waiting_bytes,
                age_ns=state.age_ns,
                confidence_ppm=round(min(1.0, max(0.0, state.confidence)) * 1_000_000),
                error=state.error[:1000],
            )
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def _on_silent(self) -> None:
        self._hello_timer = None
        if self.attached:
            self._gone(f"it has not said all that it knows within {HELLO_S:g} s")
            return
        self._refuse("silent", f"closed a connection that said no hello within {HELLO_S:g} s")
        self._close()

    def turn_away(self, reason: str) -> None:
        """Its place is needed for somebody else. Only before its hello."""
        if not self.attached and self._open:
            self.tell(wire.Refused(ErrorCode.RESOURCE, reason))
            self._close()

    def _on_broken(self, reason: str) -> None:
        self._gone(f"its connection broke: {reason}")

    def _on_end(self) -> None:
        """The connection ended without a good-bye: most likely the process did, which the pidfd tells in a moment."""
        self._loop.remove_reader(self._sock)
        if self._end_timer is None:
            text = "it closed its connection without saying good-bye"
            self._end_timer = self._loop.call_later(DEATH_GRACE_S if self.who.pidfd >= 0 else 0, self._gone, text)

    def _on_death(self) -> None:
        """The process ended. What it still said counts: a last message, or an orderly good-bye."""
        self._loop.remove_reader(self.who.pidfd)
        while self._open and self._read():
            pass
        self._gone(f"process {self.who.pid} ended")

    def _gone(self, reason: str) -> None:
        self._detach(reason, orderly=False)

    def _misbehaved(self, reason: str) -> None:
        if self.attached:
            _log.warning("client broke the protocol", extra=fields(client=self.name, pid=self.who.pid, reason=reason))
        else:
            self._refuse("hello", f"{self.who.address} doesn't speak the protocol: {reason}")
        self.tell(wire.Bye(ErrorCode.PROTOCOL, f"the agent can't follow this client any more: {reason}"[:1000]))
        self._detach(f"it broke the protocol: {reason}", orderly=False)

    def _detach(self, reason: str, *, orderly: bool) -> None:
        if self._open:
            attached = self.attached
            self._close()
            if attached:
                self._hub.detached(self, reason, orderly=orderly)

    def dismiss(self, code: ErrorCode, message: str) -> None:
        """The machine ended this session: say why. It knows, so no event follows."""
        if self._open:
            self.tell(wire.Bye(code, message[:1000]))
            self._close(lives_on=code is ErrorCode.AGENT_STOPS)

    def _close(self, *, lives_on: bool = False) -> None:
        if not self._open:
            return
        self._outbox.close(lives_on=lives_on)
        self._open = False
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._loop.remove_reader(self._sock)
        if self.who.pidfd >= 0:
            self._loop.remove_reader(self.who.pidfd)
            os.close(self.who.pidfd)
        self._payload = None
        self._sock.close()
        self._left()
        self._hub.closed(self)
        # What refers back to the session would keep it, with all that was read, until the garbage collector runs.
        self._left = _nothing
        self._decoder = wire.Decoder(allow_payload=False)


def _nothing() -> None:
    pass
