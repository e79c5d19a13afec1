"""All local trainers of this agent: who is attached, which block is whose, and the machine's effects that concern them.

A block outlives its trainer as long as the machine counts on it (a send that lingers after ``close``, a message that
was handed over to another trainer); an endpoint's arenas go when its session has ended and its last such block has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from proxyd.agent.arenas import Arena, Block
from proxyd.agent.client_session import ClientSession, Incoming
from proxyd.agent.handshake import Identity
from proxyd.agent.job_waits import JobWaits
from proxyd.agent.memory import EndpointMemory, MemoryBudget, MemoryLimitError
from proxyd.agent.outbox import Turn
from proxyd.agent.trainer_proofs import TrainerProofs
from proxyd.core.effects import (
    AllocateBlock,
    CloseClient,
    FreeBlock,
    TellBlock,
    TellExpect,
    TellForetold,
    TellLanded,
    TellOffered,
    TellPeerGone,
    TellPeerHere,
    TellRecvFailed,
    TellSendDelivered,
    TellSendDone,
    TellSendFailed,
    TellSendState,
)
from proxyd.core.events import (
    AgentEvent,
    BlockAllocated,
    BlockDenied,
    ClientAttached,
    ClientDetached,
    MemoryFreed,
    Past,
)
from proxyd.core.ids import EndpointName, TransferId
from proxyd.runtime.logs import fields
from proxyd.wire import client as wire
from proxyd.wire.envelope import Envelope, ErrorCode

PREFAULT_BYTES = 64 << 20
"""How much of a new arena is made present ahead of use: a burst's worth, not the whole address space."""

MAX_CLIENTS = 2500
MAX_SENDS = 16384
SMALL_BYTES = 64 << 10
"""Up to here the return of a block that was handed over is in no hurry."""

_log = logging.getLogger(__name__)


class PathState(Protocol):
    """What the machine says of a path; see :class:`proxyd.core.agent.PathState`."""

    @property
    def link(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def rate_bytes_per_s(self) -> int: ...
    @property
    def rtt_ns(self) -> int: ...
    @property
    def queue_ns(self) -> int: ...
    @property
    def waiting_bytes(self) -> int: ...
    @property
    def age_ns(self) -> int: ...
    @property
    def error(self) -> str: ...
    @property
    def confidence(self) -> float: ...


class _Outgoing:
    """A posted message's block, and whose it is."""

    __slots__ = ("block", "delivered", "session")

    def __init__(self, block: Block, session: ClientSession) -> None:
        self.block = block
        self.session = session
        self.delivered = False
        """Handed over, and its trainer was told: what is left to be said is that its block is free."""


class ClientHub:
    """Registry of local trainers.

    :param emit: takes events; may be called at any time.
    :param link_state: what the machine knows of the way from an endpoint to a rank.
    :param reconnect_ns: how long trainers shall look for the next life of this agent.
    :param clock: monotonic nanoseconds.
    """

    def __init__(
        self,
        me: Identity,
        *,
        memory_bytes: int,
        arena_bytes: int,
        linger_ns: int,
        reconnect_ns: int = 0,
        emit: Callable[[AgentEvent], None],
        link_state: Callable[[EndpointName, int], PathState],
        clock: Callable[[], int] = time.monotonic_ns,
        prefault_bytes: int = PREFAULT_BYTES,
        max_clients: int = MAX_CLIENTS,
        max_sends: int = MAX_SENDS,
    ) -> None:
        self._me = me
        self.proofs = TrainerProofs(me.token)
        """What a hello must prove."""
        self._arena_bytes = arena_bytes
        self._linger_ns = linger_ns
        self._reconnect_ns = reconnect_ns
        self.emit = emit
        self.link_state = link_state
        self._clock = clock
        self.hands_over = True
        """False while the agent drains: what it holds must not be overtaken by what needs no machine."""
        self.prefault_bytes = prefault_bytes
        self.prefault_executor = ThreadPoolExecutor(1, thread_name_prefix="prefault")
        self._max_clients = max_clients
        self.max_sends = max_sends
        """Sends under way that one trainer may have."""
        self.refused_sends = 0
        self.job_waits = JobWaits(clock)
        self.budget = MemoryBudget(memory_bytes)
        self.turn = Turn()
        """What a trainer's frames lead to leaves when they are all read."""
        self._current: dict[EndpointName, ClientSession] = {}
        self._by_life: dict[tuple[EndpointName, int], ClientSession] = {}
        self._strangers: set[ClientSession] = set()
        self._outgoing: dict[TransferId, _Outgoing] = {}
        self._incoming: dict[TransferId, Incoming] = {}
        self._empty: dict[TransferId, ClientSession] = {}
        """Messages without a byte, from the moment their trainer is told until the kernel has that."""
        self.changed: Callable[[], None] = lambda: None
        """Called when a trainer is attached, and when any connection has ended."""
        self.lives_elsewhere: Callable[[int, int], bool] = lambda pid, life: False
        """Whether the trainer of that process, coming back from that life of its agent, has to come to another process
        of this daemon."""
        self._short: set[EndpointName] = set()
        """Endpoints that were denied a block: told when memory becomes free."""

    def count_failed_proof(self, proof: str) -> None:
        """A trainer could not prove who it is."""
        self._me.refusals.add("client", proof)

    @property
    def memory_limit_bytes(self) -> int:
        """The cap over all arenas."""
        return self.budget.limit_bytes

    def message_bytes(self) -> dict[str, int]:
        """Payload in shared memory, by direction. What is handed over counts as being sent."""
        received = (i.block.nbytes for i in self._incoming.values() if i.block is not None and i.source_arena is None)
        return {"out": sum(entry.block.nbytes for entry in self._outgoing.values()), "in": sum(received)}

    @property
    def client_count(self) -> int:
        """Attached trainers."""
        return len(self._by_life)

    @property
    def stranger_count(self) -> int:
        """Connections that have yet to say who they are."""
        return len(self._strangers)

    # -- coming and going --------------------------------------------------------------------------------------------

    def greet(self, session: ClientSession) -> None:
        """A connection that has yet to say who it is."""
        self._strangers.add(session)

    def admit(self, session: ClientSession, hello: wire.Hello) -> tuple[ErrorCode, str] | None:
        """Take a proven hello in; a refusal otherwise. The newest life of the same user wins."""
        endpoint = EndpointName(hello.job, hello.rank)
        before = self._current.get(endpoint)
        if before is not None and before.incarnation == hello.incarnation and before.past is not None:
            # It had no patience with its first attempt, and the end of that has not been read yet.
            before.dismiss(ErrorCode.CLOSED, "it has come once more")
            before = None
        if hello.resumes:
            if hello.resumes == self._me.incarnation:
                return ErrorCode.AGENT_UNAVAILABLE, "this life of the agent has ended the session of this very process"
            if before is not None:
                return ErrorCode.CLOSED, f"a newer process has connected as {endpoint} meanwhile"
        if before is not None:
            if before.who.uid != session.who.uid:
                return ErrorCode.REFUSED, f"{endpoint} is attached already, by another user"
            if before.incarnation == hello.incarnation:
                return ErrorCode.REFUSED, f"{endpoint} is attached already, in this very life; draw a new incarnation"
        if before is None and len(self._by_life) >= self._max_clients:
            return ErrorCode.RESOURCE, (
                f"{len(self._by_life)} trainers are attached already, and the agent takes {self._max_clients}; raise"
                " its limit of open files (systemd: LimitNOFILE) to 8 for each trainer and more, or [agent] clients"
            )
        if self._is_taken(hello.incarnation):
            return ErrorCode.REFUSED, (
                f"messages of incarnation {hello.incarnation:016x} are under way already, and {endpoint} would use"
                " their names; draw a new incarnation"
            )
        try:
            session.welcome(
                hello,
                site=self._me.agent.site,
                agent=self._me.agent.name,
                agent_incarnation=self._me.incarnation,
                linger_ns=self._linger_ns,
                reconnect_ns=self._reconnect_ns,
            )
        except MemoryLimitError as error:
            return ErrorCode.RESOURCE, str(error)
        except OSError as error:
            return ErrorCode.RESOURCE, f"the agent can't pass memory to another client: {error.strerror or error}"
        if before is not None and before.past is not None:
            # It has yet to be attached, so the machine can't end it.
            before.dismiss(ErrorCode.CLOSED, f"another process has connected as {endpoint}; the newest one wins")
        self._strangers.discard(session)
        self._current[endpoint] = session
        self._by_life[endpoint, hello.incarnation] = session
        self.job_waits.joined(endpoint.job, hello.incarnation, session.age_ns)
        _log.info(
            "client attached",
            extra=fields(endpoint=endpoint, incarnation=f"{hello.incarnation:016x}", pid=session.who.pid),
        )
        if session.past is None:
            self.emit(ClientAttached(endpoint, hello.incarnation, None, session.age_ns))
        self.changed()
        return None

    def resumed(self, session: ClientSession, past: tuple[Past, ...]) -> None:
        """A session that comes from an earlier life of this agent has said what it knows."""
        _log.info("client goes on", extra=fields(endpoint=session.endpoint, pid=session.who.pid, senders=len(past)))
        self.emit(ClientAttached(session.endpoint, session.incarnation, past, session.age_ns))

    def _is_taken(self, incarnation: int) -> bool:
        """Whether another trainer, or what lingers of one, names its messages by this incarnation."""
        attached = any(session.incarnation == incarnation for session in self._by_life.values())
        return attached or any(transfer.incarnation == incarnation for transfer in self._outgoing)

    def new_memory(self, session: ClientSession, incarnation: int) -> EndpointMemory:
        """Arenas for a session."""
        return EndpointMemory(
            self.budget,
            arena_bytes=self._arena_bytes,
            endpoint_incarnation=incarnation,
            agent_incarnation=self._me.incarnation,
            granted=session.grant_arena,
            clock=self._clock,
        )

    def detached(self, session: ClientSession, reason: str, *, orderly: bool) -> None:
        """A session ended by itself."""
        _log.info("client detached", extra=fields(endpoint=session.endpoint, pid=session.who.pid, reason=reason))
        self.emit(ClientDetached(session.endpoint, session.incarnation, reason, orderly))

    def closed(self, session: ClientSession) -> None:
        """A session's socket is closed, for whatever reason."""
        self._strangers.discard(session)
        if self._current.get(session.endpoint) is session:
            del self._current[session.endpoint]
        if self._by_life.get((session.endpoint, session.incarnation)) is session:
            del self._by_life[session.endpoint, session.incarnation]
            self.job_waits.left(session.endpoint.job, session.incarnation)
        for transfer in [t for t, i in self._incoming.items() if i.session is session and i.block is None]:
            del self._incoming[transfer]
        self._release_memory(session)
        self.changed()

    def close_client(self, effect: CloseClient) -> None:
        """The machine ends a session."""
        session = self._by_life.get((effect.endpoint, effect.incarnation))
        if session is not None:
            session.dismiss(effect.code, effect.message)

    def reclaim(self, idle_ns: int) -> None:
        """Give the pages of receive arenas back that have been empty for ``idle_ns``."""
        self.budget.reclaim(self._clock() - idle_ns)

    def close(self, reason: str) -> None:
        """End every session that is left."""
        for session in [*self._by_life.values(), *self._strangers]:
            session.dismiss(ErrorCode.AGENT_STOPS, reason)
        self.prefault_executor.shutdown(wait=True, cancel_futures=True)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def posted(self, session: ClientSession, transfer: TransferId, block: Block) -> None:
        """A message's block is the agent's now."""
        session.live_blocks += 1
        session.sends += 1
        self._outgoing[transfer] = _Outgoing(block, session)

    def outgoing_of(self, transfer: TransferId) -> Block | None:
        """The block of a message that is being sent."""
        entry = self._outgoing.get(transfer)
        return None if entry is None else entry.block

    def incoming_of(self, session: ClientSession, transfer: TransferId) -> Incoming | None:
        """A message on its way to ``session``; None for anybody else's."""
        incoming = self._incoming.get(transfer)
        return incoming if incoming is not None and incoming.session is session else None

    def block_of(self, transfer: TransferId) -> Block | None:
        """Where a remote message's chunks go; None: nowhere."""
        incoming = self._incoming.get(transfer)
        if incoming is None or incoming.source_arena is not None:
            return None
        return incoming.block

    def allocate(self, effect: AllocateBlock) -> None:
        """Find memory and answer; a local sender's block is handed over as it is."""
        transfer = effect.transfer
        incoming = self._incoming.get(transfer)
        session = incoming.session if incoming is not None else self._current.get(effect.endpoint)
        if session is None or session.memory is None or not session.is_open:
            self.emit(BlockDenied(transfer, f"{effect.endpoint} is no longer attached", permanent=True))
            return
        if incoming is None:
            incoming = Incoming(session, effect.nbytes)
        if effect.local_source:
            refusal = self._hand_over(effect, incoming)
            if refusal:
                self.emit(BlockDenied(transfer, refusal, permanent=True))
                return
        else:
            block = session.memory.allocate(transfer, effect.nbytes, effect.chunk_bytes)
            if block is None:
                self._deny(effect, session.memory)
                return
            incoming.block = block
        session.live_blocks += 1
        self._incoming[transfer] = incoming
        block_now = incoming.block
        if block_now is not None:
            self.emit(BlockAllocated(transfer, block_now.arena_number, block_now.offset))

    def hand_over_ahead(self, transfer: TransferId, envelope: Envelope, filled_bytes: int) -> bool:
        """Let another local trainer see a sender's block before the machine asks for it, which saves it a step; False:
        it is to ask. Only where that trainer has seen the arena before, so that nothing can stand against it."""
        if not self.hands_over:
            return False
        session, source = self._current.get(envelope.destination), self._outgoing[transfer]
        arena = source.block.arena
        if session is None or session.past is not None or not session.is_open or not session.shared_memory:
            return False
        if arena is None or arena.number not in session.peer_arenas or transfer in self._incoming:
            return False
        block = Block(transfer, arena, 0, source.block.offset, source.block.nbytes, 1)
        self._incoming[transfer] = Incoming(session, envelope.nbytes, block, arena, filled_bytes)
        session.live_blocks += 1
        return True

    def _deny(self, effect: AllocateBlock, memory: EndpointMemory) -> None:
        used, limit = self.budget.used_bytes, self.budget.limit_bytes
        if memory.can_ever_hold(effect.nbytes, effect.chunk_bytes):
            self._short.add(effect.endpoint)
            text = f"no memory for {effect.nbytes} bytes at {effect.endpoint} now ({used} of {limit} bytes taken)"
            self.emit(BlockDenied(effect.transfer, text, permanent=False))
        else:
            text = f"{effect.nbytes} bytes do not fit the receiving agent's memory cap of {limit}; raise [agent] memory"
            self.emit(BlockDenied(effect.transfer, text, permanent=True))

    def _hand_over(self, effect: AllocateBlock, incoming: Incoming) -> str:
        """Let the receiver see the sender's block. Answers why not, or nothing."""
        source = self._outgoing.get(effect.transfer)
        if source is None or source.block.arena is None:
            return "the sender's block is gone"
        receiver = incoming.session
        if -1 not in (source.session.who.uid, receiver.who.uid) and source.session.who.uid != receiver.who.uid:
            return (
                f"sender and receiver run as different users ({source.session.who.uid} and {receiver.who.uid});"
                " on one host memory is handed over between processes of one user only"
            )
        arena = source.block.arena
        if receiver.shared_memory and arena.number not in receiver.peer_arenas:
            try:
                receiver.hand_over_arena(arena, self.budget.next_number())
            except OSError as error:
                return f"the sender's memory can't be passed to the receiver: {error.strerror or error}"
        block = source.block
        incoming.block = Block(effect.transfer, arena, 0, block.offset, block.nbytes, effect.chunk_bytes)
        incoming.source_arena = arena
        return ""

    def free(self, effect: FreeBlock) -> None:
        """A received message's block is free again."""
        incoming = self._incoming.pop(effect.transfer, None)
        if incoming is None or incoming.block is None:
            return
        session = incoming.session
        if session.memory is not None:
            session.memory.free(incoming.block)
        session.live_blocks -= 1
        if incoming.source_arena is not None:
            source = self._outgoing.get(effect.transfer)
            # Its sender ended before the message was complete: nobody will say SendDone of it.
            if source is not None and not source.session.is_open:
                self._end_outgoing(effect.transfer)
        self._release_memory(session)
        self._say_freed()

    def _say_freed(self) -> None:
        short, self._short = self._short, set()
        for endpoint in sorted(short, key=str):
            self.emit(MemoryFreed(endpoint))

    def _end_outgoing(self, transfer: TransferId) -> ClientSession | None:
        entry = self._outgoing.pop(transfer, None)
        if entry is None:
            return None
        session = entry.session
        if session.memory is not None:
            session.memory.free(entry.block)
        session.send_ended(transfer)
        session.live_blocks -= 1
        session.sends -= 1
        self._release_memory(session)
        return session if session.is_open else None

    def _release_memory(self, session: ClientSession) -> None:
        if not session.is_open and session.live_blocks == 0 and session.memory is not None:
            session.memory.close()
            session.memory = None
            self._say_freed()

    # -- towards the clients -----------------------------------------------------------------------------------------

    def tell_offered(self, effect: TellOffered) -> None:
        """A message for a trainer, with or without memory."""
        transfer = effect.transfer
        incoming = self._incoming.get(transfer)
        session = incoming.session if incoming is not None else self._current.get(effect.endpoint)
        if session is None:
            return
        if incoming is None and effect.envelope.nbytes:
            self._incoming[transfer] = Incoming(session, effect.envelope.nbytes)
        arena, offset = self._place_for(session, incoming)
        landed_bytes = 0
        if incoming is not None and incoming.source_arena is not None and arena:
            landed_bytes = incoming.offered_bytes = incoming.landed_bytes
        session.tell(wire.Offered(*transfer, effect.envelope, arena, offset, landed_bytes))
        if not effect.envelope.nbytes:
            self._empty[transfer] = session
            session.once_told(partial(self._forget_empty, transfer))

    def _forget_empty(self, transfer: TransferId) -> None:
        self._empty.pop(transfer, None)

    def once_told(self, transfer: TransferId, call: Callable[[], None]) -> None:
        """Before anybody hears that a message was delivered: its trainer has what it was told of it, for good.

        Else an acknowledgement could survive this process, and what it acknowledges could not: the sender would be
        done, and the receiver, which goes on with the next life of this agent, would never hear of the message.
        """
        incoming = self._incoming.get(transfer)
        session = incoming.session if incoming is not None else self._empty.get(transfer)
        if session is None:
            call()
        else:
            session.once_told(call)

    def _place_for(self, session: ClientSession, incoming: Incoming | None) -> tuple[int, int]:
        """Arena and offset as this client knows them; zeros where it has none (yet, or at all over TCP)."""
        if incoming is None or incoming.block is None or not session.shared_memory:
            return 0, 0
        if incoming.source_arena is not None:
            return session.peer_arenas[incoming.source_arena.number], incoming.block.offset
        return incoming.block.arena_number, incoming.block.offset

    def tell_block(self, effect: TellBlock) -> None:
        """Memory for an accepted message."""
        incoming = self._incoming.get(effect.transfer)
        if incoming is not None and incoming.session.shared_memory:
            incoming.session.tell(wire.Block(*effect.transfer, *self._place_for(incoming.session, incoming)))

    def tell_landed(self, effect: TellLanded) -> None:
        """More of a message is in place."""
        incoming = self._incoming.get(effect.transfer)
        if incoming is None:
            return  # an empty message: offered is delivered
        if effect.nbytes <= incoming.offered_bytes:
            return  # the offer has said so
        incoming.landed_bytes = effect.nbytes
        if effect.nbytes == incoming.nbytes and incoming.source_arena is None:
            self._note_delivered(effect.transfer, incoming.block)
        if incoming.session.shared_memory:
            incoming.session.tell(wire.Landed(*effect.transfer, effect.nbytes))
        else:
            incoming.session.forward(effect.transfer, incoming)

    @staticmethod
    def _note_delivered(transfer: TransferId, block: Block | None) -> None:
        arena: Arena | None = None if block is None else block.arena
        if arena is not None:
            arena.record_delivered(transfer)

    def tell_recv_failed(self, effect: TellRecvFailed) -> None:
        """A message will not come. Its block, if any, is freed by an effect of its own."""
        incoming = self._incoming.get(effect.transfer)
        session = incoming.session if incoming is not None else self._current.get(effect.endpoint)
        if incoming is not None and incoming.block is None:
            del self._incoming[effect.transfer]
        if session is not None:
            frame = wire.RecvFailed(*effect.transfer, effect.code, effect.message[:2000], effect.bytes_done)
            session.tell(frame)

    def tell_expect(self, effect: TellExpect) -> None:
        """A prediction."""
        incoming = self._incoming.get(effect.transfer)
        if incoming is not None:
            incoming.session.advise(wire.Expect(*effect.transfer, effect.finish_in_ns, effect.uncertainty_ns))

    def tell_foretold(self, effect: TellForetold) -> None:
        """A prediction of a message that has not been posted."""
        session = self._current.get(effect.endpoint)
        if session is not None:
            said = effect.frame
            session.advise(
                wire.Foretold(
                    number=said.number,
                    src_rank=said.src_rank,
                    group=said.group,
                    tag=said.tag,
                    nbytes=said.nbytes,
                    finish_in_ns=said.finish_in_ns,
                    uncertainty_ns=said.uncertainty_ns,
                )
            )

    def tell_send_state(self, effect: TellSendState) -> None:
        """Where a send stands."""
        entry = self._outgoing.get(effect.transfer)
        if entry is not None:
            sequence = effect.transfer.sequence
            frame = wire.SendState(sequence, effect.phase, effect.bytes_done, effect.finish_in_ns)
            entry.session.advise(frame)

    def tell_send_delivered(self, effect: TellSendDelivered) -> None:
        """Handed over: done, while the block is still its receiver's."""
        entry = self._outgoing.get(effect.transfer)
        if entry is not None:
            entry.delivered = True
            entry.session.tell(wire.SendDelivered(effect.transfer.sequence))

    def tell_send_done(self, effect: TellSendDone) -> None:
        """Delivered; the block is the trainer's again."""
        entry = self._outgoing.get(effect.transfer)
        unhurried = entry is not None and entry.delivered and entry.block.nbytes <= SMALL_BYTES
        session = self._end_outgoing(effect.transfer)
        if session is not None:
            tell = session.tell_unhurried if unhurried else session.tell
            tell(wire.SendDone(effect.transfer.sequence))

    def tell_send_failed(self, effect: TellSendFailed) -> None:
        """Not delivered; the block is the trainer's again."""
        session = self._end_outgoing(effect.transfer)
        if session is not None:
            frame = wire.SendFailed(effect.transfer.sequence, effect.code, effect.message[:2000], effect.bytes_done)
            session.tell(frame)

    def tell_peer_here(self, effect: TellPeerHere) -> None:
        """An endpoint of the job is registered."""
        session = self._current.get(effect.endpoint)
        if session is not None:
            session.tell(wire.PeerHere(effect.rank, effect.incarnation, effect.site))

    def tell_peer_gone(self, effect: TellPeerGone) -> None:
        """An endpoint of the job has ended, or is out of reach."""
        session = self._current.get(effect.endpoint)
        if session is not None:
            session.tell(wire.PeerGone(effect.rank, effect.incarnation, effect.message[:1000], effect.returns))
