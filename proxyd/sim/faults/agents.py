"""Agents: their hosts, whose clocks are their own, and each life of the process with its machine.

This is the daemon's edge once more (:mod:`proxyd.agent`), on :mod:`~proxyd.sim.faults.network` instead of sockets:
what it does with each effect, and when it emits which event, follows the daemon.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

from proxyd.core import effects as ef
from proxyd.core import events as ev
from proxyd.core.agent import AgentConfig, AgentMachine
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.core.messages import AgentHello
from proxyd.core.receiving import LOCAL_CHUNK_BYTES
from proxyd.sim.faults import invariants
from proxyd.sim.faults.peers import WELCOME, PeerConnection, PeerLink
from proxyd.sim.faults.plan import MS, SECOND
from proxyd.sim.faults.process import Life, Process
from proxyd.sim.faults.sessions import ControlSession, Dialling
from proxyd.sim.faults.trainers import Broken, Message, Trainer, check_code
from proxyd.wire.arena import chunk_count

if TYPE_CHECKING:
    from proxyd.sim.faults.world import World

PEER_TIMEOUT_NS = 2500 * MS
RESOLVE_TIMEOUT_NS = 2 * SECOND
LINGER_NS = 500 * MS


class AgentHost(Process):
    """One agent's host: its lives, and the trainers on it."""

    def __init__(self, world: World, name: AgentName) -> None:
        super().__init__(world, world.rng.randrange(1, 1000) * SECOND)
        self.name = name
        self.life: AgentLife | None = None
        self.lives = 0
        self.trainers: dict[EndpointName, Trainer] = {}
        self.leaving = False
        """Its agent was told to stop."""
        self.on_resume = self._resume
        self.epochs: dict[str, int] = {}

    def start(self) -> None:
        """A new life of the agent; the trainers that are there attach."""
        if self.life is not None:
            if self.leaving:
                self.world.clock.after(50 * MS, self.start)
            return
        self.lives += 1
        self.epochs = {}
        self.life = AgentLife(self.world, self, self.lives)
        self.world.note(self.name, "starts", self.lives)
        for address in self.world.addresses:
            self.life.dialling[address].soon()
        for trainer in list(self.trainers.values()):
            if trainer.attached_before:
                self.world.clock.after(self.world.rng.randrange(10, 1000) * MS, self.attach, trainer)
            else:
                self.attach(trainer)

    def attach(self, trainer: Trainer) -> None:
        """A trainer says hello to the agent, should that be there."""
        life = self.life
        if life is not None and not self.leaving and trainer.alive and trainer.agent is None:
            trainer.agent = life
            life.process(life.attached, trainer)

    def end(self, *, dark: bool) -> None:
        """The agent's process ends; ``dark``: the host does, with all on it, and nobody hears a word."""
        life, self.life = self.life, None
        self.leaving = False
        if life is None:
            return
        self.world.note(self.name, "goes dark" if dark else "ends")
        life.end(tell=not dark)
        for trainer in list(self.trainers.values()):
            if dark:
                self.abandon(trainer)
            else:
                trainer.agent_gone(life)

    def leave(self) -> None:
        """The agent is told to stop: it tells its trainers, and ends a little later."""
        life = self.life
        if life is not None and not self.leaving and not self.stopped:
            self.leaving = True
            life.emit(ev.Stopping("SIGTERM"))
            for trainer in list(self.trainers.values()):
                trainer.agent_gone(life)
            self.world.clock.after(self.world.rng.randrange(200) * MS, self._left, life)

    def _left(self, life: AgentLife) -> None:
        if self.life is life:
            self.end(dark=False)

    def abandon(self, trainer: Trainer) -> None:
        """A trainer ends, for its agent is gone, or with its host; another process of its rank begins."""
        if self.trainers.get(trainer.endpoint) is trainer and trainer.alive:
            trainer.agent_lost()
            trainer.ended()
            self.world.new_life(self, trainer.endpoint)

    def _resume(self) -> None:
        if self.life is not None:
            self.life.resumed()


@dataclasses.dataclass(slots=True)
class Block:
    """A receive block; ``chunks``: content by offset, of those that are in place and verified."""

    endpoint: EndpointName
    nbytes: int
    chunk_bytes: int
    local: bool
    chunks: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Every chunk is in place."""
        return len(self.chunks) == chunk_count(self.nbytes, self.chunk_bytes)


class AgentLife(Life):
    """One life of an agent's process."""

    host: AgentHost
    machine: AgentMachine

    def __init__(self, world: World, host: AgentHost, number: int) -> None:
        super().__init__(world, host)
        self.name = host.name
        self.incarnation = (hash_name(host.name) << 16) + number
        self.data_address = f"{host.name.site}-{host.name.name}:7500"
        shape = world.shape
        self.machine = AgentMachine(
            AgentConfig(
                host.name,
                self.incarnation,
                self.data_address,
                world.addresses,
                stream_capacity_bytes=1 << 20,
                streams=shape.streams,
                resolve_timeout_ns=RESOLVE_TIMEOUT_NS,
                peer_timeout_ns=PEER_TIMEOUT_NS,
                linger_ns=LINGER_NS,
                warm=shape.windows,
            )
        )
        self.links: dict[AgentName, PeerLink] = {}
        self.inbound: dict[AgentName, PeerConnection] = {}
        self.left_ns: dict[AgentName, int] = {}
        """Peers that were connected to it and are no longer, and since when."""
        self.sessions: dict[str, ControlSession] = {}
        self.dialling = {address: Dialling(self, address) for address in world.addresses}
        self.blocks: dict[TransferId, Block] = {}
        self.used_bytes = 0
        self.short: set[EndpointName] = set()
        self.attached_trainers: dict[EndpointName, Trainer] = {}
        self._events: deque[ev.AgentEvent] = deque()
        self._busy = False

    # -- running -------------------------------------------------------------------------------------------------

    def pass_time(self) -> None:
        self.emit(ev.TimePassed())

    def resumed(self) -> None:
        """The process goes on."""
        self.set_alarm()
        for link in list(self.links.values()):
            link.pump()

    def emit(self, event: ev.AgentEvent) -> None:
        """An event for the machine: handled at once, or after those that wait already."""
        if not self.alive:
            return
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        while self._events and self.alive:
            event = self._events.popleft()
            if isinstance(event, ev.SendPosted):
                event = self._handed_over_ahead(event)
            self.world.note(self.name, event)
            for effect in self.machine.handle(event, self.host.now_ns):
                self.world.note(self.name, effect)
                self._perform(effect)
        self._busy = False
        self.set_alarm()
        invariants.check_agent(self)

    def next_chunk(self, peer: AgentName) -> tuple[ef.Chunk, int] | None:
        """For a stream with room: what to send next, and its content."""
        if not self.alive or self.host.stopped:
            return None
        chunk = self.machine.next_chunk(peer, self.host.now_ns)
        if not self._busy:
            self.set_alarm()
        if chunk is None:
            return None
        self.world.note(self.name, chunk)
        if chunk.padding:
            return chunk, 0
        message = self.world.messages[chunk.transfer]
        if not message.block_with_agent:
            raise Broken(f"{message}: bytes are taken from its block, which its trainer has back")
        if chunk.offset + chunk.length > message.filled_bytes:
            raise Broken(f"{message}: {chunk} is taken, and {message.filled_bytes} bytes are filled")
        return chunk, message.content(chunk.offset)

    def end(self, *, tell: bool) -> None:
        """The process is gone."""
        self.die()
        for link in self.links.values():
            link.hang_up("the process ended", tell=tell)
        for peer in list(self.inbound.values()):
            peer.connection.close(False, "the process ended", tell=tell)
        for session in list(self.sessions.values()):
            session.connection.close(True, "the process ended", tell=tell)

    def adopt(self, peer: PeerConnection) -> None:
        """Another agent's connections are accepted."""
        before = self.inbound.get(peer.sender.name)
        if before is not None:
            before.replaced()
        if peer.connection.acceptor_open:
            self.inbound[peer.sender.name] = peer
            self.left_ns.pop(peer.sender.name, None)
            self.emit(ev.InboundOpened(peer.sender.name, peer.sender.incarnation))
            peer.connection.back.send(WELCOME)

    def block_of(self, peer: AgentName, transfer: TransferId) -> Block | None:
        """Memory for a chunk of that peer; None: it isn't expected (any more)."""
        return self.blocks.get(transfer) if self.machine.expects_chunks(peer, transfer) else None

    # -- trainers ------------------------------------------------------------------------------------------------

    def attached(self, trainer: Trainer) -> None:
        """A trainer's hello is read, should it have ended meanwhile or not: what it posted comes behind it."""
        if trainer.alive and trainer.agent is not self:
            return
        self.attached_trainers[trainer.endpoint] = trainer
        trainer.here_ns.clear()
        trainer.out_of_reach.clear()
        age_ns = self.world.clock.now_ns - trainer.begun_ns if trainer.attached_before else 0
        self.emit(ev.ClientAttached(trainer.endpoint, trainer.incarnation, trainer.past(), age_ns))
        if trainer.alive:
            trainer.go_on()

    def detached(self, trainer: Trainer, reason: str, orderly: bool) -> None:
        """A trainer's end is noticed."""
        if self.attached_trainers.get(trainer.endpoint) is trainer:
            del self.attached_trainers[trainer.endpoint]
        self.emit(ev.ClientDetached(trainer.endpoint, trainer.incarnation, reason, orderly))

    def _trainer(self, endpoint: EndpointName) -> Trainer | None:
        trainer = self.attached_trainers.get(endpoint)
        return trainer if trainer is not None and trainer.alive else None

    def check_content(self, message: Message, start: int, end: int) -> None:
        """Raises Broken unless the bytes between are there, and are those that were posted."""
        block = self.blocks.get(message.transfer)
        if end == start:
            return
        if block is None:
            raise Broken(f"{message}: {end} bytes are told of, and it has no block")
        if block.local:
            if not message.block_with_agent:
                raise Broken(f"{message}: is read from a block that its sender has back")
            if end > message.filled_bytes:
                raise Broken(f"{message}: {end} bytes are told of, {message.filled_bytes} are filled")
            return
        for offset in range(start // block.chunk_bytes * block.chunk_bytes, end, block.chunk_bytes):
            if block.chunks.get(offset) != message.content(offset):
                raise Broken(f"{message}: at {offset} lies {block.chunks.get(offset)}, not what was posted")

    # -- effects -------------------------------------------------------------------------------------------------

    def _perform(self, effect: ef.AgentEffect) -> None:
        match effect:
            case ef.Pump(peer):
                if (link := self.links.get(peer)) is not None:
                    link.pump()
            case ef.SetPace(peer, rate):
                if (link := self.links.get(peer)) is not None:
                    link.pace_bytes_per_s = rate
            case ef.ToCoordinator(address, message):
                if (session := self.sessions.get(address)) is not None:
                    session.say(message)
            case ef.ToPeer(peer, inbound, transfer, frame):
                if not inbound:
                    if (link := self.links.get(peer)) is not None:
                        link.send(transfer, frame)
                elif (came := self.inbound.get(peer)) is not None:
                    came.answer(transfer, frame)
            case ef.WantPeer():
                link = self.links.get(effect.peer)
                if link is None:
                    link = self.links[effect.peer] = PeerLink(self, effect.peer)
                link.want(effect)
            case ef.DropPeer(peer, reason):
                if (link := self.links.pop(peer, None)) is not None:
                    link.drop(reason)
            case ef.AllocateBlock():
                self._allocate(effect)
            case ef.FreeBlock():
                self._free(effect)
            case _:
                self._tell(effect)

    def _tell(self, effect: ef.AgentEffect) -> None:
        messages = self.world.messages
        match effect:
            case ef.TellOffered():
                if (trainer := self._trainer(effect.endpoint)) is not None:
                    trainer.offered(effect)
            case ef.TellLanded():
                message = messages[effect.transfer]
                message.whole = message.whole or effect.nbytes == message.envelope.nbytes
                if (trainer := self._trainer(effect.endpoint)) is not None:
                    trainer.landed(effect, self)
            case ef.TellRecvFailed():
                if (trainer := self._trainer(effect.endpoint)) is not None:
                    trainer.receive_failed(effect)
            case ef.TellSendDelivered() | ef.TellSendDone():
                self._sent(messages[effect.transfer], "done", "", isinstance(effect, ef.TellSendDone))
            case ef.TellSendFailed():
                check_code(messages[effect.transfer], effect.code, effect.message)
                self._sent(messages[effect.transfer], effect.code.name, effect.message, True)
            case ef.CloseClient():
                trainer = self.attached_trainers.get(effect.endpoint)
                if trainer is not None and trainer.incarnation == effect.incarnation:
                    del self.attached_trainers[effect.endpoint]
            case ef.TellPeerHere():
                if (trainer := self._trainer(effect.endpoint)) is not None:
                    trainer.is_here(effect, self.host.now_ns)
            case ef.TellPeerGone():
                if effect.returns:
                    invariants.check_out_of_reach(self, effect)
                if (trainer := self._trainer(effect.endpoint)) is not None:
                    trainer.is_gone(effect)
            case _:
                pass  # predictions and phases: these trainers act on none of them

    def _sent(self, message: Message, outcome: str, why: str, block_back: bool) -> None:
        if outcome == "done" and not message.whole:
            raise Broken(f"{message}: done, and its receiver has {message.landed_bytes} bytes")
        sender = message.sender
        if sender.alive and sender.agent is self:
            sender.send_ended(message, outcome, why, block_back=block_back)
        elif block_back:
            message.block_with_agent = False

    def _allocate(self, effect: ef.AllocateBlock) -> None:
        transfer = effect.transfer
        if transfer in self.blocks:
            raise Broken(f"{self.world.messages[transfer]}: a second block for it at {self.name}")
        limit_bytes = self.world.shape.memory_bytes
        nbytes = 0 if effect.local_source else effect.nbytes
        if effect.endpoint not in self.attached_trainers:
            self.emit(ev.BlockDenied(transfer, "its trainer is gone", True))
        elif nbytes > limit_bytes:
            self.emit(ev.BlockDenied(transfer, f"{nbytes} bytes exceed the agent's memory", True))
        elif self.used_bytes + nbytes > limit_bytes:
            self.short.add(effect.endpoint)
            self.emit(ev.BlockDenied(transfer, "no memory now", False))
        else:
            self.blocks[transfer] = Block(effect.endpoint, nbytes, effect.chunk_bytes, effect.local_source)
            self.used_bytes += nbytes
            self.emit(ev.BlockAllocated(transfer, 1, 4096))

    def _handed_over_ahead(self, event: ev.SendPosted) -> ev.SendPosted:
        """Every other message between trainers of this agent; the rest is handed over when the machine asks."""
        transfer, receiver = event.transfer, event.envelope.destination
        if not event.envelope.nbytes or transfer.sequence % 2 or transfer in self.blocks:
            return event
        if receiver not in self.attached_trainers:
            return event
        self.blocks[transfer] = Block(receiver, 0, LOCAL_CHUNK_BYTES, True)
        return dataclasses.replace(event, handed_over=True)

    def _free(self, effect: ef.FreeBlock) -> None:
        block = self.blocks.pop(effect.transfer, None)
        if block is None:
            raise Broken(f"{self.world.messages[effect.transfer]}: its block at {self.name} is freed, and it has none")
        self.used_bytes -= block.nbytes
        short, self.short = self.short, set()
        for endpoint in sorted(short, key=lambda e: (e.job, e.rank)):
            self.emit(ev.MemoryFreed(endpoint))

    # -- coordinators --------------------------------------------------------------------------------------------

    def hello(self, address: str) -> AgentHello:
        """The first message of a session."""
        return AgentHello(self.name, self.incarnation, self.data_address, self.host.epochs.get(address, 0))


def hash_name(name: AgentName) -> int:
    """The same in every run."""
    return sum(ord(letter) * 31**index for index, letter in enumerate(str(name)))
