"""Agents: their hosts, whose clocks are their own, and each life of the process with its machine.

This is the daemon's edge once more (:mod:`proxyd.agent`), on :mod:`~proxyd.sim.faults.network` instead of sockets:
what it does with each effect, and when it emits which event, follows the daemon.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxyd.core import effects as ef
from proxyd.core import events as ev
from proxyd.core.agent import AgentConfig, AgentMachine
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.core.messages import AgentHello
from proxyd.sim.clock import Alarm
from proxyd.sim.faults import invariants
from proxyd.sim.faults.peers import WELCOME, PeerConnection, PeerLink
from proxyd.sim.faults.plan import MS, SECOND
from proxyd.sim.faults.sessions import ControlSession, Dialling
from proxyd.sim.faults.trainers import Broken, Message, Trainer, check_code

if TYPE_CHECKING:
    from proxyd.sim.faults.world import World

PEER_TIMEOUT_NS = 2500 * MS
RESOLVE_TIMEOUT_NS = 2 * SECOND
LINGER_NS = 500 * MS


class Process:
    """Something that runs on a host: it can be stopped, and reads what came meanwhile when it goes on."""

    def __init__(self, world: World, offset_ns: int) -> None:
        self.world = world
        self._ahead_ns = offset_ns
        self._stands_ns: int | None = None
        self._stops = 0
        self.unread: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.on_resume: Callable[[], None] = lambda: None

    @property
    def now_ns(self) -> int:
        """Of its own monotonic clock."""
        clock_ns = self.world.clock.now_ns if self._stands_ns is None else self._stands_ns
        return clock_ns + self._ahead_ns

    def world_ns(self, own_ns: int) -> int:
        """When its clock will show ``own_ns``, should it go on running."""
        return own_ns - self._ahead_ns

    @property
    def stopped(self) -> bool:
        """It doesn't get to run."""
        return self._stops > 0

    @property
    def suspended(self) -> bool:
        """Its whole host stands still."""
        return self._stands_ns is not None

    def stop(self, for_ns: int, *, with_clock: bool) -> None:
        """It runs no more until then; ``with_clock``: nor does its clock."""
        self._stops += 1
        clock = with_clock and self._stands_ns is None
        if clock:
            self._stands_ns = self.world.clock.now_ns
        self.world.clock.after(for_ns, self._go_on, clock)

    def _go_on(self, clock: bool) -> None:
        self._stops -= 1
        if clock and self._stands_ns is not None:
            self._ahead_ns -= self.world.clock.now_ns - self._stands_ns
            self._stands_ns = None
        if self._stops:
            return
        # Which of the things that are ready a loop looks at first is anybody's guess.
        resume_first = self.world.rng.random() < 0.5
        if resume_first:
            self.on_resume()
        while self.unread and not self._stops:
            do, args = self.unread.popleft()
            do(*args)
        if not resume_first:
            self.on_resume()


class AgentHost(Process):
    """One agent's host: its lives, and the trainers on it."""

    def __init__(self, world: World, name: AgentName) -> None:
        super().__init__(world, world.rng.randrange(1, 1000) * SECOND)
        self.name = name
        self.life: AgentLife | None = None
        self.lives = 0
        self.trainers: dict[EndpointName, Trainer] = {}
        self.on_resume = self._resume
        self.epochs: dict[str, int] = {}

    def start(self) -> None:
        """A new life of the agent; the trainers that are there attach."""
        if self.life is not None:
            return
        self.lives += 1
        self.epochs = {}
        self.life = AgentLife(self.world, self, self.lives)
        self.world.note(self.name, "starts", self.lives)
        for address in self.world.addresses:
            self.life.dialling[address].soon()
        for trainer in list(self.trainers.values()):
            self.attach(trainer)

    def attach(self, trainer: Trainer) -> None:
        """A trainer says hello to the agent, should that be there."""
        life = self.life
        if life is not None and trainer.alive and trainer.agent is None:
            trainer.agent = life
            life.process(life.attached, trainer)

    def end(self, *, dark: bool) -> None:
        """The agent's process ends; ``dark``: the host does, with all on it, and nobody hears a word."""
        life, self.life = self.life, None
        if life is None:
            return
        self.world.note(self.name, "goes dark" if dark else "crashes")
        life.end(tell=not dark)
        for endpoint, trainer in list(self.trainers.items()):
            trainer.agent_lost()
            # A trainer without its agent begins anew: its library can't go on with another life of it.
            trainer.ended()
            self.world.new_life(self, endpoint)

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


class AgentLife:
    """One life of an agent's process."""

    def __init__(self, world: World, host: AgentHost, number: int) -> None:
        self.world = world
        self.host = host
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
        self.alive = True
        self.links: dict[AgentName, PeerLink] = {}
        self.inbound: dict[AgentName, PeerConnection] = {}
        self.sessions: dict[str, ControlSession] = {}
        self.dialling = {address: Dialling(self, address) for address in world.addresses}
        self.blocks: dict[TransferId, Block] = {}
        self.used_bytes = 0
        self.short: set[EndpointName] = set()
        self.attached_trainers: dict[EndpointName, Trainer] = {}
        self._events: deque[ev.AgentEvent] = deque()
        self._busy = False
        self._alarm = Alarm(world.clock, self._ring)

    # -- running -------------------------------------------------------------------------------------------------

    def process(self, do: Callable[..., object], *args: Any) -> None:
        """Do something in this process, when it runs."""
        if not self.alive:
            return
        if self.host.stopped:
            self.host.unread.append((self.process, (do, *args)))
        else:
            do(*args)

    def _ring(self) -> None:
        if self.alive and not self.host.stopped:
            deadline_ns = self.machine.next_deadline_ns()
            if deadline_ns is not None and deadline_ns <= self.host.now_ns:
                self.emit(ev.TimePassed())
            else:
                self.set_alarm()

    def set_alarm(self) -> None:
        """As the driver does after each event."""
        deadline_ns = self.machine.next_deadline_ns()
        self._alarm.set(None if deadline_ns is None else self.host.world_ns(deadline_ns))

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
        self.alive = False
        self._alarm.set(None)
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
            self.emit(ev.InboundOpened(peer.sender.name, peer.sender.incarnation))
            peer.connection.back.send(WELCOME)

    def block_of(self, peer: AgentName, transfer: TransferId) -> Block | None:
        """Memory for a chunk of that peer; None: it isn't expected (any more)."""
        return self.blocks.get(transfer) if self.machine.expects_chunks(peer, transfer) else None

    # -- trainers ------------------------------------------------------------------------------------------------

    def attached(self, trainer: Trainer) -> None:
        """A trainer's hello is read."""
        if trainer.alive:
            self.attached_trainers[trainer.endpoint] = trainer
            self.emit(ev.ClientAttached(trainer.endpoint, trainer.incarnation))

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
            case _:
                pass  # predictions, phases and who is there: these trainers act on none of them

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
