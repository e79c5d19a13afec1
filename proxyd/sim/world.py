"""Sites, agents, coordinators and the lines between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from proxyd.core.agent import AgentConfig
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CloseSession, ToAgent
from proxyd.core.events import (
    CoordinatorEvent,
    CoordinatorLost,
    SessionClosed,
    SessionMessage,
    SessionOpened,
    TimePassed,
)
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import AgentMessage, CoordinatorMessage
from proxyd.sim.clock import Alarm, Clock
from proxyd.sim.host import AgentHost, Ordered
from proxyd.sim.link import Link, LinkModel
from proxyd.sim.path import Path
from proxyd.sim.trainer import Fate, Trainer

LOCAL = LinkModel(1_250_000_000, 50_000, 1 << 30)
"""Within a site."""

PEER_TIMEOUT_NS = 10_000_000_000
"""A third of the daemon's: within the time that a run gets to settle (``scenario.SETTLE_NS``)."""


class CoordinatorHost:
    """One life of a coordinator, and its sessions."""

    def __init__(self, world: World, address: str, config: CoordinatorConfig, epoch: int) -> None:
        self.address = address
        self.machine = CoordinatorMachine(config, epoch)
        self.alive = True
        self.agents: dict[int, AgentHost] = {}
        """By session."""
        self._world = world
        self._waiting: list[CoordinatorEvent] | None = None
        """What came while the process was kept waiting."""
        self._lines: dict[int, tuple[Ordered, Ordered]] = {}
        self._alarm = Alarm(world.clock, lambda: self.handle(TimePassed()))

    @property
    def now_ns(self) -> int:
        """The time."""
        return self._world.clock.now_ns

    def pause(self, for_ns: int) -> None:
        """The scheduler keeps the process waiting for a while."""
        if self._waiting is None:
            self._waiting = []
            self._world.clock.after(for_ns, self._resume)

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for event in waiting:
            self.handle(event)

    def handle(self, event: CoordinatorEvent) -> None:
        """An event for the machine."""
        if not self.alive:
            return
        if self._waiting is not None:
            self._waiting.append(event)
            return
        world = self._world
        effects = self.machine.handle(event, world.clock.now_ns)
        if world.check_coordinator is not None:
            world.check_coordinator(self)
        for effect in effects:
            match effect:
                case ToAgent(session, message):
                    host = self.agents.get(session)
                    if host is not None:
                        self._lines[session][1].send(partial(world.said, host, self.address, session, message))
                case CloseSession(session, reason):
                    self._end(session, reason)
        self._alarm.set(self.machine.next_deadline_ns())

    def open(self, session: int, host: AgentHost, forth: Ordered, back: Ordered) -> None:
        """An agent's stream stands."""
        self.agents[session] = host
        self._lines[session] = (forth, back)
        self.handle(SessionOpened(session, host.hello(self.address)))

    def message(self, session: int, message: AgentMessage) -> None:
        """An agent's message came."""
        if session in self.agents:
            self.handle(SessionMessage(session, message))

    def lost(self, session: int, reason: str) -> None:
        """An agent's stream ended from its side."""
        if self.agents.pop(session, None) is not None:
            self.handle(SessionClosed(session, reason))

    def _end(self, session: int, reason: str) -> None:
        host = self.agents.pop(session, None)
        if host is not None:
            self._world.session_lost(host, self.address, session, reason)

    def kill(self, reason: str) -> None:
        """The process ends."""
        self.alive = False
        for session in list(self.agents):
            self._end(session, reason)


class World:
    """Everything of one run. Times are the clock's; chance comes from ``rng`` alone."""

    def __init__(
        self,
        seed: int,
        links: dict[LinkName, LinkModel],
        *,
        control_ns: int = 300_000,
        control_jitter_ns: int = 200_000,
        eager_bytes: int = 64 << 20,
        slow_start_after_idle: bool = False,
        congestion_control: str = "cubic",
        reopen_windows: bool = False,
        stream_capacity_bytes: int = 4 << 20,
        lines: dict[tuple[str, bool], LinkModel] | None = None,
    ) -> None:
        self.clock = Clock()
        self.rng = random.Random(seed)
        self.eager_bytes = eager_bytes
        self.slow_start_after_idle = slow_start_after_idle
        self.congestion_control = congestion_control
        self.reopen_windows = reopen_windows
        """As agents do (:class:`~proxyd.core.striping.WindowKeeper`), on links whose rate is found from live
        transfers."""
        self.stream_capacity_bytes = stream_capacity_bytes
        """What one stream can have in flight, by its hosts' buffers: more streams where that is less than a BDP."""
        self.hosts: dict[AgentName, AgentHost] = {}
        self.coordinators: dict[str, CoordinatorHost] = {}
        self.trainers: dict[EndpointName, Trainer] = {}
        self.fates: dict[TransferId, Fate] = {}
        self.check_coordinator: Callable[[CoordinatorHost], None] | None = None
        self._links = {
            (name.src_site, name.dst_site): Link(self.clock, model, self.rng) for name, model in links.items()
        }
        self.access = {key: Link(self.clock, model, self.rng) for key, model in (lines or {}).items()}
        """Access lines by (site, egress): shared by all links out of a site, or into it."""
        self._control_ns = control_ns
        self._control_jitter_ns = control_jitter_ns
        self._sessions: dict[tuple[AgentName, int, str], int] = {}
        self._lines: dict[int, tuple[Ordered, Ordered]] = {}
        self._welcomed: set[int] = set()
        self._numbers = 0

    # ----------------------------------------------------------------------------------- building

    def link(self, src_site: str, dst_site: str) -> Link:
        """The way from site to site; within a site it is fast."""
        key = (src_site, dst_site)
        if key not in self._links:
            if src_site != dst_site:
                raise KeyError(f"the scenario has no link {src_site}->{dst_site}")
            self._links[key] = Link(self.clock, LOCAL, self.rng)
        return self._links[key]

    def path(self, src_site: str, dst_site: str) -> Link | Path:
        """What a stream from site to site crosses: the link, and the sites' access lines where they have any."""
        link = self.link(src_site, dst_site)
        if src_site == dst_site:
            return link
        hops = [self.access.get((src_site, True)), link, self.access.get((dst_site, False))]
        present = [hop for hop in hops if hop is not None]
        return link if len(present) == 1 else Path(link.model, present)

    def host(self, name: AgentName) -> AgentHost | None:
        """A living agent's host."""
        host = self.hosts.get(name)
        return host if host is not None and host.alive else None

    def start_coordinator(self, address: str, config: CoordinatorConfig, epoch: int) -> CoordinatorHost:
        """Start one (again, with a higher epoch)."""
        host = self.coordinators[address] = CoordinatorHost(self, address, config, epoch)
        return host

    def start_agent(self, name: AgentName, coordinators: tuple[str, ...], memory_bytes: int) -> AgentHost:
        """Start an agent; it connects to its coordinators."""
        incarnation = self.rng.getrandbits(63)
        address = f"10.{len(self.hosts)}.0.1:7500"
        config = AgentConfig(
            name,
            incarnation,
            address,
            coordinators,
            stream_capacity_bytes=self.stream_capacity_bytes,
            peer_timeout_ns=PEER_TIMEOUT_NS,
        )
        host = AgentHost(self, config, memory_bytes)
        self.hosts[name] = host
        for coordinator in coordinators:
            self._connect(host, coordinator, self.rng.randrange(1_000_000))
        return host

    def start_trainer(self, host: AgentHost, endpoint: EndpointName) -> Trainer:
        """A trainer connects to its agent."""
        trainer = Trainer(self.clock, self.rng, endpoint, self.rng.getrandbits(63), host.emit, self.fates)
        self.trainers[endpoint] = trainer
        host.attach(trainer)
        return trainer

    # ----------------------------------------------------------------------------------- sessions

    def _delay_ns(self) -> int:
        return self._control_ns + self.rng.randrange(self._control_jitter_ns + 1)

    def _connect(self, host: AgentHost, address: str, delay_ns: int) -> None:
        def connect() -> None:
            coordinator = self.coordinators.get(address)
            if not host.alive:
                return
            if coordinator is None or not coordinator.alive:
                self._connect(host, address, self.rng.randrange(100_000_000, 1_000_000_000))
                return
            self._numbers += 1
            session = self._numbers
            self._sessions[host.name, host.incarnation, address] = session
            forth, back = Ordered(self.clock, self._delay_ns), Ordered(self.clock, self._delay_ns)
            self._lines[session] = (forth, back)
            coordinator.open(session, host, forth, back)

        self.clock.after(delay_ns, connect)

    def said(self, host: AgentHost, address: str, session: int, message: CoordinatorMessage) -> None:
        """A coordinator's message reaches an agent; the first one makes the session usable."""
        if self._sessions.get((host.name, host.incarnation, address)) == session:
            self._welcomed.add(session)
            host.said(address, message)

    def to_coordinator(self, host: AgentHost, address: str, message: AgentMessage) -> None:
        """Send on a control session; what is sent without one, or on a broken one, is lost."""
        session = self._sessions.get((host.name, host.incarnation, address))
        coordinator = self.coordinators.get(address)
        if session is not None and session in self._welcomed and coordinator is not None:
            self._lines[session][0].send(lambda: coordinator.message(session, message))

    def session_lost(self, host: AgentHost, address: str, session: int, reason: str) -> None:
        """The coordinator's end of a session is gone: the agent hears of it and connects again."""
        key = (host.name, host.incarnation, address)

        def heard() -> None:
            if self._sessions.get(key) == session:
                del self._sessions[key]
                host.emit(CoordinatorLost(address, reason))
                self._connect(host, address, self.rng.randrange(100_000_000, 1_000_000_000))

        self._lines[session][1].send(heard)

    # --------------------------------------------------------------------------------------- fate

    def kill_agent(self, name: AgentName, reason: str = "killed") -> None:
        """A host vanishes; its connections break."""
        host = self.hosts[name]
        if not host.alive:
            return
        host.kill(reason)
        for address, coordinator in self.coordinators.items():
            session = self._sessions.pop((name, host.incarnation, address), None)
            if session is not None:
                self._lines[session][0].send(partial(coordinator.lost, session, reason))
