"""Coordinators, the agents' sessions with them, and how agents come to those."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from proxyd.core import events as ev
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CloseSession, ToAgent
from proxyd.core.messages import AgentMessage, Beat, Grant, Pace, Report, Welcome
from proxyd.runtime import translate
from proxyd.sim.faults import invariants
from proxyd.sim.faults.network import Connection
from proxyd.sim.faults.plan import MS, SECOND
from proxyd.sim.faults.process import Life, Process

if TYPE_CHECKING:
    from proxyd.sim.faults.agents import AgentLife
    from proxyd.sim.faults.world import World

HELLO_TIMEOUT_NS = 3 * SECOND
WORDS_KEPT = 20
LAST_WORDS_NS = 300 * MS
"""So long after a new life's first word the old one's last grants and paces may still come."""


class CoordinatorLife(Life):
    """One life of a coordinator's process."""

    machine: CoordinatorMachine

    def __init__(
        self, world: World, host: Process, address: str, config: CoordinatorConfig, epoch: int, number: int
    ) -> None:
        super().__init__(world, host)
        self.address = address
        self.name = f"{address}#{number}"
        self.machine = CoordinatorMachine(config, epoch)
        self.sessions: dict[int, ControlSession] = {}
        host.on_resume = self.set_alarm

    def pass_time(self) -> None:
        self.emit(ev.TimePassed())

    def emit(self, event: ev.CoordinatorEvent) -> None:
        """An event for the machine."""
        if not self.alive:
            return
        self.world.note(self.name, event)
        for effect in self.machine.handle(event, self.host.now_ns):
            self.world.note(self.name, effect)
            match effect:
                case ToAgent(number, message):
                    if (session := self.sessions.get(number)) is not None and session.connection.acceptor_open:
                        session.connection.back.send(session.coded_back(message))
                case CloseSession(number, reason):
                    if (session := self.sessions.pop(number, None)) is not None:
                        session.connection.close(False, reason)
        self.set_alarm()
        invariants.check_coordinator(self)

    def opened(self, session: ControlSession) -> None:
        """An agent's stream with its hello."""
        self.sessions[session.number] = session
        self.emit(ev.SessionOpened(session.number, session.agent.hello(self.address)))

    def lost(self, session: ControlSession, reason: str) -> None:
        """An agent's stream ended."""
        if self.sessions.pop(session.number, None) is not None:
            self.emit(ev.SessionClosed(session.number, reason))

    def end(self, *, tell: bool = True) -> None:
        """The process is gone."""
        self.die()
        invariants.check_reports(self)
        for session in list(self.sessions.values()):
            session.connection.close(False, "the coordinator ended", tell=tell)


class ControlSession:
    """One stream between an agent's life and a coordinator's."""

    def __init__(self, dialling: Dialling, coordinator: CoordinatorLife, number: int) -> None:
        self.dialling = dialling
        self.agent = dialling.agent
        self.coordinator = coordinator
        self.number = number
        self.welcomed = False
        self.welcome: Welcome | None = None
        world = self.world = coordinator.world
        self._coded = world.coded_control
        self.connection = Connection(
            world.net,
            self.agent.name,
            coordinator.address,
            lambda item: coordinator.process(self._coordinator_reads, item),
            lambda item: self.agent.process(self._agent_reads, item),
            self._ended,
        )
        coordinator.process(coordinator.opened, self)
        world.clock.after(HELLO_TIMEOUT_NS, self.agent.process, self._no_welcome)

    def say(self, message: AgentMessage) -> None:
        """The agent says something; dropped until the session stands."""
        if self.welcomed and self.connection.dialler_open:
            if isinstance(message, Report) and self.world.hits("lose_report"):
                return
            self.connection.forth.send(translate.agent_batch([message]) if self._coded else message)

    def coded_back(self, message: Any) -> Any:
        """As it goes over the wire (the Welcome has a form of its own, and goes as it is)."""
        if not self._coded or isinstance(message, Welcome):
            return message
        return translate.coordinator_batch([message])

    def _coordinator_reads(self, item: Any) -> None:
        if not self.connection.acceptor_open:
            return
        for message in translate.agent_messages(item) if self._coded else (item,):
            again = 2 if isinstance(message, Report) and self.world.hits("repeat_report") else 1
            for _ in range(again):
                self.coordinator.emit(ev.SessionMessage(self.number, message))

    def _agent_reads(self, item: Any) -> None:
        agent, address = self.agent, self.coordinator.address
        if not self.connection.dialler_open or agent.sessions.get(address) is not self:
            return
        if isinstance(item, Welcome):
            self.welcomed, self.welcome = True, item
            self.dialling.tries = 0
            agent.host.epochs[address] = item.epoch
            agent.emit(ev.CoordinatorConnected(address, item))
            self.dialling.late_words(self)
            return
        for message in translate.coordinator_messages(item) if self._coded else (item,):
            rates = invariants.fallback_rates(agent)
            agent.emit(ev.CoordinatorSaid(address, message))
            if isinstance(message, Beat):
                if message.number:
                    self.dialling.listens_to = self.coordinator
                invariants.check_raised(agent, self.coordinator, message, rates)
            if isinstance(message, Grant | Pace):
                self.dialling.words.append(message)
            if (stale := self.dialling.stale(self)) is not None and self.world.hits("stale_grant"):
                agent.emit(ev.CoordinatorSaid(address, stale))

    def hear(self, message: Grant | Pace) -> None:
        """A late word, as if it came by this session."""
        if self.connection.dialler_open and self.agent.sessions.get(self.coordinator.address) is self:
            self.agent.emit(ev.CoordinatorSaid(self.coordinator.address, message))

    def _no_welcome(self) -> None:
        if not self.welcomed and self.connection.dialler_open:
            self.connection.close(True, "no answer to the hello")
            self._agent_lost("no answer to the hello")

    def _ended(self, dialler: bool, reason: str) -> None:
        if dialler:
            self.agent.process(self._agent_lost, reason)
        else:
            self.coordinator.process(self.coordinator.lost, self, reason)

    def _agent_lost(self, reason: str) -> None:
        self.dialling.lost(self, reason)


class Dialling:
    """An agent's way to one coordinator's address."""

    def __init__(self, agent: AgentLife, address: str) -> None:
        self.agent = agent
        self.address = address
        self.tries = 0
        self.listens_to: CoordinatorLife | None = None
        """Whose beat came last, of those that are for all."""
        self._told = False
        self.words: deque[Grant | Pace] = deque(maxlen=WORDS_KEPT)
        """The latest that were heard."""

    def soon(self) -> None:
        """Dial after the next pause."""
        world = self.agent.world
        pause_ns = world.rng.randrange(20, min(1000, 100 << min(self.tries, 4))) * MS
        world.clock.after(pause_ns, self.agent.process, self._dial)

    def _dial(self) -> None:
        agent, world = self.agent, self.agent.world
        if self.address in agent.sessions:
            return
        self.tries += 1
        coordinator = world.coordinators.get(self.address)
        if coordinator is None or not coordinator.alive or not world.net.reaches(agent.name, self.address):
            self._tell("unavailable")
            self.soon()
            return
        agent.sessions[self.address] = ControlSession(self, coordinator, world.next_session())

    def lost(self, session: ControlSession, reason: str) -> None:
        """A session ended, or never stood."""
        if self.agent.sessions.get(self.address) is session:
            del self.agent.sessions[self.address]
            if session.welcomed:
                self._told = False
            self._tell(reason)
            self.soon()

    def _tell(self, reason: str) -> None:
        """Once per outage."""
        if not self._told:
            self._told = True
            self.agent.emit(ev.CoordinatorLost(self.address, reason))

    def late_words(self, session: ControlSession) -> None:
        """A session begins: what an earlier life of its coordinator said last comes after it."""
        world = self.agent.world
        if session.welcome is None or world.calm or not world.plan.rate("stale_grant"):
            return
        for word in self.words:
            if word.epoch != session.welcome.epoch:
                world.clock.after(world.rng.randrange(LAST_WORDS_NS), self.agent.process, session.hear, word)

    def stale(self, session: ControlSession) -> Grant | Pace | None:
        """A word of an earlier life; None: there is none, or its epoch is this session's."""
        if not self.words or session.welcome is None:
            return None
        word = self.words[self.agent.world.rng.randrange(len(self.words))]
        return word if word.epoch != session.welcome.epoch else None
