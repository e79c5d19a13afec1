"""A tiny world for agent machines: several machines, instant memory, frames and chunks in order, a coordinator by hand.

Not a model of a network (that is proxyd.sim): just enough to drive both halves of the real machine through each other.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.agent import AgentConfig, AgentMachine
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import AgentMessage, Beat, Directory, DirectoryEntry, Grant, LinkInfo, Welcome
from proxyd.wire.envelope import Envelope, TrafficClass

MS = 1_000_000
COORDINATOR = "127.0.0.1:7600"
LINK = LinkName("a", "b")
INFO = LinkInfo(LINK, 50_000_000, 60 * MS, 300_000, 0, 1 << 20, 256 << 10, 0, 0, "configured")


class World:
    """Machines by name; ``run()`` carries effects out until nothing is left to do."""

    def __init__(
        self, *agents: str, eager_bytes: int = 64 << 20, coordinators: tuple[str, ...] = (COORDINATOR,)
    ) -> None:
        self.now_ns = 1_000 * MS
        self.eager_bytes = eager_bytes
        self.machines: dict[AgentName, AgentMachine] = {}
        self.asked: list[tuple[AgentName, AgentMessage]] = []
        self.asked_of: list[tuple[str, AgentMessage]] = []
        self.told: list[tuple[AgentName, Any]] = []
        self.deny: set[TransferId] = set()
        self.allocated: set[TransferId] = set()
        self.corrupt: set[tuple[TransferId, int]] = set()
        self.lose_chunks = False
        self.chunks: list[tuple[AgentName, fx.Chunk]] = []
        self._queue: deque[tuple[AgentName, Any]] = deque()
        self._pumps: deque[tuple[AgentName, AgentName]] = deque()
        self._taken: dict[tuple[AgentName, AgentName], int] = {}
        self.endpoints: list[DirectoryEntry] = []
        self.down: set[tuple[AgentName, AgentName]] = set()
        """(sender, receiver) whose connections are broken."""
        self.arrivals: list[tuple[TransferId, int]] = []
        self.break_at = 0
        """Cut everything between all agents before this step (they are counted from 1)."""
        self.steps = 0
        for index, name in enumerate(agents):
            agent = AgentName.parse(name)
            config = AgentConfig(agent, index + 1, f"{name}:1", coordinators)
            self.machines[agent] = AgentMachine(config)

    def agent(self, name: str) -> AgentMachine:
        return self.machines[AgentName.parse(name)]

    def put(self, name: str | AgentName, event: ev.AgentEvent) -> None:
        self._queue.append((AgentName.parse(name) if isinstance(name, str) else name, event))
        self.run()

    def connect(
        self,
        epoch: int = 1,
        owns: tuple[str, ...] = ("*->*",),
        *,
        coordinator: str = COORDINATOR,
        infos: tuple[LinkInfo, ...] = (INFO,),
    ) -> None:
        """Every agent gets a session, and the directory."""
        welcome = Welcome("c", epoch, owns, 150 * MS, 2000 * MS, infos)
        for name in self.machines:
            self.put(name, ev.CoordinatorConnected(coordinator, welcome))
        self.publish(coordinator)

    def publish(self, coordinator: str = COORDINATOR) -> None:
        for name in self.machines:
            self.put(name, ev.CoordinatorSaid(coordinator, Directory(tuple(self.endpoints), (), full=True)))

    def attach(self, name: str, rank: int, incarnation: int = 0, *, past: tuple[ev.Past, ...] | None = None) -> None:
        agent = AgentName.parse(name)
        endpoint = EndpointName("job", rank)
        self.endpoints = [e for e in self.endpoints if e.endpoint != endpoint]
        self.endpoints.append(
            DirectoryEntry(
                endpoint, incarnation or 100 + rank, agent, self.machines[agent].config.incarnation, f"{name}:1"
            )
        )
        self.put(name, ev.ClientAttached(endpoint, incarnation or 100 + rank, past))

    def post(
        self,
        name: str,
        sequence: int,
        src: int,
        dst: int,
        nbytes: int,
        *,
        filled: int = -1,
        tag: int = 0,
        traffic: TrafficClass = TrafficClass.PIPELINE,
    ) -> TransferId:
        transfer = TransferId(100 + src, sequence)
        envelope = Envelope("job", src, dst, "", tag, traffic, nbytes, "uint8", (nbytes,))
        self.put(name, ev.SendPosted(transfer, envelope, nbytes if filled < 0 else filled))
        return transfer

    def grant(
        self,
        name: str,
        transfer: TransferId,
        nbytes: int,
        *,
        epoch: int = 1,
        start_ms: int = 0,
        coordinator: str = COORDINATOR,
        **kw: int,
    ) -> None:
        message = Grant(
            1,
            transfer,
            LINK,
            nbytes,
            kw.get("rate", 48_000_000),
            start_ms * MS,
            kw.get("ttl_ms", 2000) * MS,
            epoch,
            5 * MS,
            "turn",
        )
        self.put(name, ev.CoordinatorSaid(coordinator, message))

    def beat(self, name: str, fallback: int, *, coordinator: str = COORDINATOR) -> None:
        self.put(name, ev.CoordinatorSaid(coordinator, Beat(1, ((LINK, fallback),), (INFO,))))

    def advance(self, ms: int, name: str | None = None) -> None:
        """Let time pass, handling each machine's deadlines on the way."""
        end_ns = self.now_ns + ms * MS
        while True:
            due = [(m.next_deadline_ns(), n) for n, m in self.machines.items()]
            times = sorted((t, n) for t, n in due if t is not None and t <= end_ns)
            if not times:
                break
            self.now_ns = max(self.now_ns, times[0][0] or 0)
            self.put(times[0][1], ev.TimePassed())
        self.now_ns = end_ns
        self.run()

    def delivered(self, name: str, peer: str, unsent: int = 0) -> None:
        """The kernel reports all that was taken for a peer as delivered."""
        key = (AgentName.parse(name), AgentName.parse(peer))
        taken = self._taken.get(key, 0)
        self.put(name, ev.SendProgress(key[1], taken - unsent, taken - unsent, unsent, 60 * MS, 60 * MS, 0, 48_000_000))

    def cut(self, sender: str, receiver: str, *, silent_ms: int = 0) -> None:
        """The connections from one agent to another break; what is under way on them is lost, both ends hear of it."""
        link = (AgentName.parse(sender), AgentName.parse(receiver))
        if link in self.down:
            return
        self.down.add(link)
        self._queue = deque(item for item in self._queue if not self._is_on(link, *item))
        self._pumps = deque(item for item in self._pumps if item != link)
        self._taken.pop(link, None)
        self._queue.append((link[0], ev.PeerDisconnected(link[1], "cut", silent_ms * MS)))
        incarnation = self.machines[link[0]].config.incarnation
        self._queue.append((link[1], ev.InboundClosed(link[0], incarnation, "cut", silent_ms * MS)))

    @staticmethod
    def _is_on(link: tuple[AgentName, AgentName], name: AgentName, event: ev.AgentEvent) -> bool:
        match event:
            case ev.PeerFrame(peer, inbound):
                return link == ((peer, name) if inbound else (name, peer))
            case ev.ChunkArrived(peer):
                return link == (peer, name)
            case _:
                return False

    def heal(self, sender: str, receiver: str) -> None:
        """They stand again."""
        link = (AgentName.parse(sender), AgentName.parse(receiver))
        self.down.discard(link)
        self._queue.append((link[1], ev.InboundOpened(link[0], self.machines[link[0]].config.incarnation)))
        incarnation = self.machines[link[1]].config.incarnation
        self._queue.append((link[0], ev.PeerConnected(link[1], incarnation, self.eager_bytes)))
        self.run()

    def restart(self, name: str) -> None:
        """An agent's process is killed and started again; nothing of it is left."""
        agent = AgentName.parse(name)
        for other in self.machines:
            if other != agent:
                self.cut(name, str(other))
                self.cut(str(other), name)
        old = self.machines[agent].config
        self._queue = deque(item for item in self._queue if item[0] != agent)
        config = AgentConfig(agent, old.incarnation + 100, old.data_address, old.coordinators)
        self.machines[agent] = AgentMachine(config)
        self.endpoints = [e for e in self.endpoints if e.agent != agent]
        self.run()

    def run(self) -> None:
        for _ in range(100_000):
            self.steps += 1
            if self.steps == self.break_at:
                for sender in self.machines:
                    for receiver in self.machines:
                        if sender != receiver:
                            self.cut(str(sender), str(receiver))
            if self._queue:
                name, event = self._queue.popleft()
                if isinstance(event, ev.ChunkArrived) and event.good:
                    self.arrivals.append((event.transfer, event.offset))
                for effect in self.machines[name].handle(event, self.now_ns):
                    self._perform(name, effect)
            elif self._pumps:
                self._pump(*self._pumps.popleft())
            else:
                return
        raise AssertionError("the machines keep each other busy for ever")

    def _pump(self, name: AgentName, peer: AgentName) -> None:
        machine = self.machines[name]
        while (chunk := machine.next_chunk(peer, self.now_ns)) is not None:
            self.chunks.append((name, chunk))
            if chunk.granted:
                self._taken[name, peer] = self._taken.get((name, peer), 0) + chunk.length
            if not self.lose_chunks and (name, peer) not in self.down:
                good = (chunk.transfer, chunk.offset) not in self.corrupt
                self.corrupt.discard((chunk.transfer, chunk.offset))
                arrived = ev.ChunkArrived(name, chunk.transfer, chunk.offset, chunk.length, good)
                self._queue.append((peer, arrived))
        self._queue.append((name, ev.TimePassed()))

    def _perform(self, name: AgentName, effect: fx.AgentEffect) -> None:
        match effect:
            case fx.ToCoordinator():
                self.asked.append((name, effect.message))
                self.asked_of.append((effect.address, effect.message))
            case fx.ToPeer() if ((effect.peer, name) if effect.inbound else (name, effect.peer)) in self.down:
                pass
            case fx.ToPeer():
                self._queue.append((effect.peer, ev.PeerFrame(name, not effect.inbound, effect.transfer, effect.frame)))
            case fx.WantPeer():
                incarnation = self.machines[effect.peer].config.incarnation
                known = self.machines[name].sender.peers.get(effect.peer)
                stands = known is not None and known.connected and known.incarnation == incarnation
                if stands or (name, effect.peer) in self.down:
                    return
                self._queue.append((effect.peer, ev.InboundOpened(name, self.machines[name].config.incarnation)))
                self._queue.append((name, ev.PeerConnected(effect.peer, incarnation, self.eager_bytes)))
            case fx.Pump():
                self._pumps.append((name, effect.peer))
            case fx.AllocateBlock():
                if effect.transfer in self.deny:
                    self._queue.append((name, ev.BlockDenied(effect.transfer, "full", False)))
                else:
                    self.allocated.add(effect.transfer)
                    self._queue.append((name, ev.BlockAllocated(effect.transfer, 1, 4096)))
            case _:
                self.told.append((name, effect))

    def tells(self, kind: type[Any]) -> list[Any]:
        """Effects of one kind that were carried out for trainers, in order."""
        return [effect for _, effect in self.told if isinstance(effect, kind)]

    def asks(self, kind: type[Any]) -> list[Any]:
        """Messages of one kind that went to the coordinator, in order."""
        return [message for _, message in self.asked if isinstance(message, kind)]
