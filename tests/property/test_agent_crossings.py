"""Agent machines with everything under way at once: frames, chunks, answers and ends cross in random order.

Three agents at two sites, trainers that come, post, cancel, close and die, peers whose connections break, memory that
runs out, a coordinator that comes back. Each connection keeps its order, and nothing else does. In the end, when
everything that can go on has gone on: every message has ended once, every block was given back once, the eager budgets
are whole, and of what was granted nothing is outstanding.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from typing import Any

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.agent import AgentConfig, AgentMachine
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import (
    CancelRequest,
    Directory,
    DirectoryEntry,
    Grant,
    LinkInfo,
    Report,
    Request,
    TransferDone,
    Welcome,
)
from proxyd.wire import peer as wire
from proxyd.wire.envelope import Envelope

MS = 1_000_000
KIB = 1 << 10
COORDINATOR = "c:1"
AGENTS = (AgentName("a", "0"), AgentName("b", "0"), AgentName("b", "1"))
HOME = {0: AGENTS[0], 1: AGENTS[0], 2: AGENTS[1], 3: AGENTS[1], 4: AGENTS[2]}
EAGER_BYTES = 400 * KIB
MEMORY_BYTES = 700 * KIB


@dataclasses.dataclass
class Connection:
    """From one agent to another, as both see it. ``chunks`` take any order, the two others keep theirs."""

    out: deque[tuple[TransferId, wire.Frame]] = dataclasses.field(default_factory=deque)
    back: deque[tuple[TransferId, wire.Frame]] = dataclasses.field(default_factory=deque)
    chunks: list[fx.Chunk] = dataclasses.field(default_factory=list)
    offered: set[TransferId] = dataclasses.field(default_factory=set)
    sender_sees_it: bool = True
    receiver_sees_it: bool = True
    granted_bytes: int = 0


@dataclasses.dataclass
class Trainer:
    """One life of an endpoint."""

    endpoint: EndpointName
    incarnation: int
    sequence: int = 0
    unfilled: dict[TransferId, tuple[int, int]] = dataclasses.field(default_factory=dict)
    acceptable: list[TransferId] = dataclasses.field(default_factory=list)
    landed: dict[TransferId, int] = dataclasses.field(default_factory=dict)
    offered: dict[TransferId, Envelope] = dataclasses.field(default_factory=dict)
    told: list[TransferId] = dataclasses.field(default_factory=list)


class Host:
    """One machine and what its daemon would be: memory, connections, an event queue."""

    def __init__(self, world: World, name: AgentName) -> None:
        self.world = world
        self.name = name
        self.machine = AgentMachine(AgentConfig(name, 1, f"{name}:1", (COORDINATOR,), linger_ns=200 * MS))
        self.queue: deque[ev.AgentEvent] = deque()
        self.trainers: dict[EndpointName, Trainer] = {}
        self.blocks: dict[TransferId, tuple[EndpointName, int]] = {}
        self.handed_over: set[TransferId] = set()
        self.short: set[EndpointName] = set()
        self.used: Counter[EndpointName] = Counter()

    def put(self, event: ev.AgentEvent) -> None:
        if isinstance(event, ev.PeerFrame) and isinstance(event.frame, wire.TurnedDown):
            self.world.turned_down.add(event.transfer)
        self.queue.append(event)
        while self.queue:
            for effect in self.machine.handle(self.queue.popleft(), self.world.now_ns):
                self.perform(effect)

    def lives(self, transfer: TransferId) -> bool:
        return any(trainer.incarnation == transfer.incarnation for trainer in self.trainers.values())

    def perform(self, effect: fx.AgentEffect) -> None:
        world = self.world
        match effect:
            case fx.ToPeer() if effect.inbound:
                if (connection := world.connection(effect.peer, self.name)) is not None:
                    connection.back.append((effect.transfer, effect.frame))
            case fx.ToPeer():
                if (connection := world.connection(self.name, effect.peer)) is not None:
                    connection.out.append((effect.transfer, effect.frame))
            case fx.WantPeer():
                world.wanted.add((self.name, effect.peer))
            case fx.DropPeer():
                world.wanted.discard((self.name, effect.peer))
                if (connection := world.connection(self.name, effect.peer)) is not None:
                    connection.sender_sees_it = False
            case fx.Pump():
                self.pump(effect.peer)
            case fx.AllocateBlock():
                self.allocate(effect)
            case fx.FreeBlock():
                endpoint, nbytes = self.blocks.pop(effect.transfer)
                self.used[endpoint] -= nbytes
                if effect.transfer in self.handed_over and not self.lives(effect.transfer):
                    world.ended[effect.transfer] = 1  # nobody is left to be told that it is given back
                short, self.short = self.short, set()
                self.queue.extend(ev.MemoryFreed(one) for one in sorted(short, key=str))
            case fx.ToCoordinator():
                world.hear(self, effect.message)
            case fx.TellSendDone() | fx.TellSendFailed():
                if self.lives(effect.transfer) or not world.ended[effect.transfer]:
                    world.ended[effect.transfer] += 1
                if isinstance(effect, fx.TellSendDone):
                    world.done.add(effect.transfer)
                for trainer in self.trainers.values():
                    trainer.unfilled.pop(effect.transfer, None)
            case fx.TellOffered():
                trainer = self.trainers[effect.endpoint]
                trainer.offered[effect.transfer] = effect.envelope
                trainer.told.append(effect.transfer)
                if not effect.has_memory:
                    trainer.acceptable.append(effect.transfer)
            case fx.TellLanded():
                assert effect.transfer in self.trainers[effect.endpoint].offered, "landed before it was offered"
                if effect.nbytes == self.trainers[effect.endpoint].offered[effect.transfer].nbytes:
                    world.landed.add(effect.transfer)
                    if effect.nbytes:
                        self.trainers[effect.endpoint].landed[effect.transfer] = effect.nbytes
            case fx.TellRecvFailed():
                trainer = self.trainers[effect.endpoint]
                assert effect.transfer in trainer.offered
                assert effect.transfer not in trainer.landed, "a message that is all there doesn't fail"
                if effect.transfer in trainer.acceptable:
                    trainer.acceptable.remove(effect.transfer)
            case fx.CloseClient():
                if (trainer := self.trainers.get(effect.endpoint)) and trainer.incarnation == effect.incarnation:
                    del self.trainers[effect.endpoint]
            case _:
                pass

    def allocate(self, effect: fx.AllocateBlock) -> None:
        assert effect.transfer not in self.blocks, "asked for a block that it has"
        if effect.endpoint not in self.trainers:
            self.queue.append(ev.BlockDenied(effect.transfer, "gone", True))
        elif not effect.local_source and self.used[effect.endpoint] + effect.nbytes > MEMORY_BYTES:
            self.short.add(effect.endpoint)
            self.queue.append(ev.BlockDenied(effect.transfer, "full", False))
        else:
            if effect.local_source:
                self.hand_over(effect.transfer, effect.endpoint)
            else:
                self.blocks[effect.transfer] = (effect.endpoint, effect.nbytes)
                self.used[effect.endpoint] += effect.nbytes
            self.queue.append(ev.BlockAllocated(effect.transfer, 1, 4096))

    def hand_over(self, transfer: TransferId, receiver: EndpointName) -> None:
        """A local sender's block is the receiver's, too; also before the machine asks for it."""
        self.handed_over.add(transfer)
        self.blocks[transfer] = (receiver, 0)

    def pump(self, peer: AgentName) -> None:
        connection = self.world.connection(self.name, peer)
        if connection is None:
            return
        while len(connection.chunks) < 4 and (chunk := self.machine.next_chunk(peer, self.world.now_ns)) is not None:
            assert self.world.ended[chunk.transfer] == 0, "a chunk of a block that was given back"
            connection.chunks.append(chunk)
            connection.granted_bytes += chunk.length if chunk.granted else 0
        self.queue.append(ev.TimePassed())


class World:
    """See the module's text."""

    def __init__(self, seed: int, *, cut_share: float = 0.2, only_breaks: bool = False) -> None:
        self.random = random.Random(seed)
        self.cut_share = cut_share
        self.only_breaks = only_breaks
        self.now_ns = 1000 * MS
        self.wanted: set[tuple[AgentName, AgentName]] = set()
        self.connections: dict[tuple[AgentName, AgentName], Connection] = {}
        self.incarnation = 100
        self.ended: Counter[TransferId] = Counter()
        self.done: set[TransferId] = set()
        self.landed: set[TransferId] = set()
        self.arrivals: Counter[tuple[TransferId, int]] = Counter()
        self.turned_down: set[TransferId] = set()
        self.posted: dict[TransferId, int] = {}
        self.epoch = 1
        self.need: dict[tuple[AgentName, TransferId], tuple[LinkName, int]] = {}
        self.granted: Counter[tuple[AgentName, TransferId]] = Counter()
        self.granted_on: Counter[LinkName] = Counter()
        self.reports: dict[LinkName, Report] = {}
        self.entries: dict[EndpointName, DirectoryEntry] = {}
        self.hosts = {name: Host(self, name) for name in AGENTS}
        for rank in HOME:
            self.attach(rank)
        self.connect_coordinator()

    def connection(self, sender: AgentName, receiver: AgentName) -> Connection | None:
        return self.connections.get((sender, receiver))

    # -- the coordinator -------------------------------------------------------------------------------------------

    def connect_coordinator(self) -> None:
        self.need.clear()
        self.granted.clear()
        self.granted_on.clear()
        self.reports.clear()
        for host in self.hosts.values():
            other = "b" if host.name.site == "a" else "a"
            chunk = self.random.choice([64, 128]) * KIB
            info = LinkInfo(
                LinkName(host.name.site, other), 50_000_000, 60 * MS, 0, 0, chunk, chunk, 0, 0, "configured"
            )
            welcome = Welcome("c", self.epoch, ("*->*",), 150 * MS, 2000 * MS, (info,))
            host.put(ev.CoordinatorConnected(COORDINATOR, welcome))
        self.publish(full=True)

    def publish(self, *, gone: tuple[tuple[EndpointName, int, str], ...] = (), full: bool = False) -> None:
        entries = tuple(self.entries.values())
        for host in self.hosts.values():
            host.put(ev.CoordinatorSaid(COORDINATOR, Directory(entries, gone, full)))

    def hear(self, host: Host, message: Any) -> None:
        key = (host.name, getattr(message, "transfer", TransferId(0, 0)))
        match message:
            case Request():
                self.need[key] = (message.link, message.wanted_bytes)
            case TransferDone():
                self.need.pop(key, None)
            case CancelRequest():
                self.need.pop(key, None)
                self.granted.pop(key, None)
            case Report():
                # Two agents of a site share a link: only the first one of them sends in this world.
                self.reports[message.link] = message
            case _:
                pass

    def grant(self, most_bytes: int = 256 * KIB) -> bool:
        wanting = [(k, link, n - self.granted[k]) for k, (link, n) in sorted(self.need.items()) if n > self.granted[k]]
        if not wanting:
            return False
        (key, link, want) = self.random.choice(wanting)
        nbytes = min(want, most_bytes)
        self.granted[key] += nbytes
        self.granted_on[link] += nbytes
        start_ns, ttl_ns = self.random.choice([0, 0, 3]) * MS, self.random.choice([10, 1000]) * MS
        grant = Grant(1, key[1], link, nbytes, 48_000_000, start_ns, ttl_ns, self.epoch, 5 * MS, "turn")
        self.hosts[key[0]].put(ev.CoordinatorSaid(COORDINATOR, grant))
        return True

    # -- trainers --------------------------------------------------------------------------------------------------

    def attach(self, rank: int) -> None:
        host, endpoint = self.hosts[HOME[rank]], EndpointName("j", rank)
        self.incarnation += 1
        host.trainers[endpoint] = Trainer(endpoint, self.incarnation)
        before = self.entries.get(endpoint)
        self.entries[endpoint] = DirectoryEntry(endpoint, self.incarnation, host.name, 1, f"{host.name}:1")
        host.put(ev.ClientAttached(endpoint, self.incarnation))
        if before is not None:
            self.publish(gone=((endpoint, before.incarnation, "replaced"),))

    def a_trainer(self) -> tuple[Host, Trainer] | None:
        every = [(host, trainer) for host in self.hosts.values() for trainer in host.trainers.values()]
        return self.random.choice(every) if every else None

    def post(self) -> None:
        if (found := self.a_trainer()) is None:
            return
        host, trainer = found
        # Only the first agent sends to the other site; see hear().
        ranks = list(HOME) if host.name == AGENTS[0] else [rank for rank in HOME if HOME[rank].site == host.name.site]
        rank = self.random.choice([rank for rank in ranks if rank != trainer.endpoint.rank] or [trainer.endpoint.rank])
        nbytes = self.random.choice([0, 1, 1000, 64 * KIB, 65 * KIB, 200 * KIB, 300 * KIB])
        trainer.sequence += 1
        transfer = TransferId(trainer.incarnation, trainer.sequence)
        filled = self.random.choice([0, nbytes, nbytes])
        self.posted[transfer] = nbytes
        envelope = Envelope("j", trainer.endpoint.rank, rank, "", 0, self.random.randrange(3), nbytes, "", ())
        if filled < nbytes:
            trainer.unfilled[transfer] = (filled, nbytes)
        ahead = nbytes > 0 and trainer.sequence % 2 == 1 and envelope.destination in host.trainers
        if ahead:
            host.hand_over(transfer, envelope.destination)
        host.put(ev.SendPosted(transfer, envelope, filled, handed_over=ahead))

    def fill(self) -> None:
        if (found := self.a_trainer()) is None or not found[1].unfilled:
            return
        host, trainer = found
        transfer, (filled, nbytes) = self.random.choice(sorted(trainer.unfilled.items()))
        filled = min(nbytes, filled + self.random.choice([1000, 100 * KIB, nbytes]))
        trainer.unfilled[transfer] = (filled, nbytes)
        if filled == nbytes:
            del trainer.unfilled[transfer]
        host.put(ev.SendFilled(transfer, filled))

    def cancel(self) -> None:
        live = sorted(transfer for transfer in self.posted if not self.ended[transfer])
        if live:
            transfer = self.random.choice(live)
            for host in self.hosts.values():
                if any(trainer.incarnation == transfer.incarnation for trainer in host.trainers.values()):
                    host.put(ev.SendCancelled(transfer))
                    return

    def accept(self) -> None:
        if (found := self.a_trainer()) is not None and found[1].acceptable:
            host, trainer = found
            index = self.random.randrange(len(trainer.acceptable))
            host.put(ev.RecvAccepted(trainer.acceptable.pop(index)))

    def release(self) -> None:
        if (found := self.a_trainer()) is not None and found[1].landed:
            host, trainer = found
            transfer = self.random.choice(sorted(trainer.landed))
            del trainer.landed[transfer]
            host.put(ev.RecvReleased(transfer))

    def end(self) -> None:
        if self.random.random() < 0.7 or (found := self.a_trainer()) is None:
            return
        host, trainer = found
        orderly = self.random.random() < 0.5
        del host.trainers[trainer.endpoint]
        del self.entries[trainer.endpoint]
        host.put(ev.ClientDetached(trainer.endpoint, trainer.incarnation, "ended", orderly))
        self.publish(gone=((trainer.endpoint, trainer.incarnation, "ended"),))

    def begin(self) -> None:
        self.attach(self.random.choice(list(HOME)))

    # -- connections -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        for key in sorted(self.wanted - set(self.connections)):
            sender, receiver = key
            self.connections[key] = Connection()
            self.hosts[receiver].put(ev.InboundOpened(sender, 1))
            self.hosts[sender].put(ev.PeerConnected(receiver, 1, EAGER_BYTES))

    def cut(self) -> None:
        """It breaks; both sides find out in their own time."""
        if self.connections and self.random.random() < self.cut_share:
            self.lose(self.random.choice(sorted(self.connections)), told=False)

    def lose(self, key: tuple[AgentName, AgentName], *, told: bool) -> None:
        sender, receiver = key
        connection = self.connections.pop(key)
        events: list[tuple[Host, ev.AgentEvent]] = [
            (self.hosts[receiver], ev.InboundClosed(sender, 1, "cut")),
        ]
        if not told:
            events.append((self.hosts[sender], ev.PeerDisconnected(receiver, "cut")))
        self.random.shuffle(events)
        # What had been read before still counts, on either side.
        for _ in range(self.random.randrange(4)):
            if connection.back and not told:
                transfer, frame = connection.back.popleft()
                self.hosts[sender].put(ev.PeerFrame(receiver, False, transfer, frame))
        for host, event in events:
            host.put(event)

    def move(self) -> bool:
        """One thing that is under way arrives."""
        choices: list[tuple[tuple[AgentName, AgentName], str]] = []
        for key in sorted(self.connections):
            connection = self.connections[key]
            if not connection.sender_sees_it and not connection.out:
                self.lose(key, told=True)
                return True
            choices += [(key, kind) for kind in ("out", "back", "chunks") if getattr(connection, kind)]
        if not choices:
            return False
        (sender, receiver), kind = self.random.choice(choices)
        connection = self.connections[sender, receiver]
        if kind == "out":
            transfer, frame = connection.out.popleft()
            self.hosts[receiver].put(ev.PeerFrame(sender, True, transfer, frame))
            if isinstance(frame, wire.Offer):
                connection.offered.add(transfer)
        elif kind == "back":
            transfer, frame = connection.back.popleft()
            if connection.sender_sees_it:
                self.hosts[sender].put(ev.PeerFrame(receiver, False, transfer, frame))
        else:
            index = self.random.randrange(len(connection.chunks))
            chunk = connection.chunks[index]
            if chunk.transfer not in connection.offered:
                return True  # it waits in the kernel
            del connection.chunks[index]
            if self.hosts[receiver].machine.expects_chunks(sender, chunk.transfer):
                good = self.random.random() > 0.02
                self.arrivals[chunk.transfer, chunk.offset] += good
                arrived = ev.ChunkArrived(sender, chunk.transfer, chunk.offset, chunk.length, good)
                self.hosts[receiver].put(arrived)
            if connection.sender_sees_it:
                self.hosts[sender].pump(receiver)
                self.hosts[sender].put(ev.TimePassed())
        return True

    def progress(self) -> None:
        for (sender, receiver), connection in sorted(self.connections.items()):
            flying = sum(chunk.length for chunk in connection.chunks if chunk.granted)
            there = connection.granted_bytes - flying
            if connection.sender_sees_it:
                self.hosts[sender].put(ev.SendProgress(receiver, there, there, flying, 60 * MS, 60 * MS, 0, 1))

    def wait(self, ms: int = 0) -> None:
        self.now_ns += (ms or self.random.choice([1, 5, 20])) * MS
        for host in self.hosts.values():
            host.put(ev.TimePassed())

    # -- all -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        actions = [
            (self.post, 12), (self.fill, 10), (self.accept, 8), (self.release, 8), (self.cancel, 1), (self.end, 1),
            (self.begin, 1), (self.connect, 3), (self.cut, 1), (self.move, 60), (self.grant, 12), (self.wait, 4),
            (self.progress, 3), (self.restart_coordinator, 1),
        ]  # fmt: skip
        if self.only_breaks:
            ends = (self.cancel, self.end, self.begin, self.restart_coordinator)
            actions = [(action, weight) for action, weight in actions if action not in ends]
        self.random.choices([action for action, _ in actions], [weight for _, weight in actions])[0]()

    def restart_coordinator(self) -> None:
        if self.random.random() < 0.2:
            self.epoch += 1
            self.connect_coordinator()

    def settle(self) -> None:
        """Let everything go on that can."""
        for rank in HOME:
            if EndpointName("j", rank) not in self.entries:
                self.attach(rank)
        self.publish()
        for _ in range(3000):
            self.connect()
            for host in self.hosts.values():
                for trainer in host.trainers.values():
                    for transfer, (_, nbytes) in list(trainer.unfilled.items()):
                        trainer.unfilled.pop(transfer)
                        host.put(ev.SendFilled(transfer, nbytes))
            self.accept()
            self.release()
            moved = self.move()
            granted = self.grant()
            if not moved and not granted:
                self.wait(1)
                busy = any(t.acceptable or t.landed for h in self.hosts.values() for t in h.trainers.values())
                if not busy and all(self.ended[transfer] for transfer in self.posted) and not self.move():
                    break
        self.progress()
        self.wait(1)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_crosses_everything_ends_once_and_nothing_is_lost(seed: int) -> None:
    world = World(seed)
    for _ in range(400):
        world.step()
    world.settle()
    ends = {transfer: world.ended[transfer] for transfer in world.posted}
    assert all(count == 1 for count in ends.values()), {str(t): n for t, n in ends.items() if n != 1}
    assert world.done <= world.landed, "acknowledged means that the receiver has all of it"
    for host in world.hosts.values():
        assert not host.blocks, "every block was given back"
        machine = host.machine
        assert not machine.sender.transfers
        assert not machine.receiver.transfers
        assert not machine.receiver._asked
        assert not any(machine.receiver._denied.values())
        for peer in machine.sender.peers.values():
            assert not peer.eager_used_bytes, "the eager budgets are whole"
        for book in machine.sender.asking.links.values():
            assert not book.asked
            assert book.untaken_bytes == 0
        for trainer in host.trainers.values():
            for source in {transfer.incarnation for transfer in trainer.told}:
                order = [transfer.sequence for transfer in trainer.told if transfer.incarnation == source]
                assert order == sorted(set(order)), "told in the order of posting, once"
    for link, granted_bytes in world.granted_on.items():
        report = world.reports[link]
        assert report.delivered_bytes + report.returned_bytes == granted_bytes, "nothing stays outstanding"


@pytest.mark.parametrize("seed", range(60))
def test_breaks_alone_lose_nothing_and_repeat_nothing(seed: int) -> None:
    """Connections break again and again, at any moment, and nothing else goes wrong: every message is delivered, and no
    chunk of it that was in place is sent again."""
    world = World(seed, cut_share=1.0, only_breaks=True)
    for _ in range(600):
        world.step()
    world.settle()
    assert world.posted.keys() == world.done == {t for t in world.landed if t in world.posted}
    assert all(world.ended[transfer] == 1 for transfer in world.posted)
    # What was on its way of an eager message that is turned down is void: all of it is sent again once there is room.
    resumed = {place: count for place, count in world.arrivals.items() if place[0] not in world.turned_down}
    assert max(resumed.values()) == 1
    assert max(world.arrivals.values()) <= 2
    for host in world.hosts.values():
        assert not host.blocks
        assert not host.machine.sender.transfers
        assert not host.machine.receiver.transfers
        assert not any(peer.eager_used_bytes for peer in host.machine.sender.peers.values())
        for trainer in host.trainers.values():
            for source in {transfer.incarnation for transfer in trainer.told}:
                order = [transfer.sequence for transfer in trainer.told if transfer.incarnation == source]
                assert order == sorted(set(order)), "told in the order of posting, once"
    for link, granted_bytes in world.granted_on.items():
        report = world.reports[link]
        assert report.delivered_bytes + report.returned_bytes == granted_bytes, "nothing stays outstanding"
