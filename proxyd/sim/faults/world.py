"""One run: a world as its plan says, its faults, the time to heal, and what must hold then."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.sim.clock import Clock
from proxyd.sim.faults import invariants
from proxyd.sim.faults.agents import PEER_TIMEOUT_NS, AgentHost
from proxyd.sim.faults.network import FOUND_DEAD, Network
from proxyd.sim.faults.plan import KIB, MS, PER_MESSAGE, SECOND, Plan
from proxyd.sim.faults.process import Process
from proxyd.sim.faults.sessions import CoordinatorLife
from proxyd.sim.faults.trainers import Broken, Message, Trainer

REMEMBERED = 60
"""Of what happened, for a failure's report."""
HEAL_NS = max(int(PEER_TIMEOUT_NS * FOUND_DEAD), 5 * SECOND) + 1500 * MS
"""After the faults: silence is noticed, a restarted coordinator's directory counts as complete, all have dialled."""
END_NS = 25 * SECOND
"""And all that was posted has an end."""
CONTROL_NS = 500_000
LONE_BYTES = 300 * KIB


class World:
    """Everything of one run. Chance comes from the plan's seed alone."""

    def __init__(self, plan: Plan, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.shape = shape = plan.shape
        self.clock = Clock()
        self.rng = random.Random(f"world {plan.seed}")
        self.net = Network(self.clock, self.rng, self._delay_ns, PEER_TIMEOUT_NS, plan.rate("late"))
        self.calm = False
        """The time of faults is over."""
        self.messages: dict[TransferId, Message] = {}
        self.coded_control = self.rng.random() < 0.2
        """Messages to and from coordinators go through protobuf (which costs more than the rest)."""
        self.addresses = tuple(f"coordinator{number}:7600" for number in range(shape.coordinators))
        self.coordinators: dict[str, CoordinatorLife] = {}
        self._epoch = 1000
        self._coordinator_lives = 0
        self._sessions = 0
        self._chances = {name: rate for name, rate in plan.faults if name in PER_MESSAGE}
        self._moments = [(name, rate) for name, rate in plan.faults if name not in PER_MESSAGE]
        self._wire_ns: dict[tuple[str, str], int] = {}
        self.last: deque[tuple[int, Hashable, tuple[Any, ...]]] = deque(maxlen=REMEMBERED)
        self._trace = trace
        for address in self.addresses:
            self.start_coordinator(address)
        self.hosts = {AgentName.parse(name): AgentHost(self, AgentName.parse(name)) for name in shape.agents}
        self.ranks = list(range(shape.trainers))
        self._lives = 0
        names = sorted(self.hosts)
        for rank in self.ranks:
            self.new_life(self.hosts[names[rank % len(names)]], EndpointName("job", rank), 0)
        for host in self.hosts.values():
            host.start()

    # -- what everybody needs ------------------------------------------------------------------------------------

    def note(self, where: Hashable, *what: Any) -> None:
        """Keep it for the report of a failure."""
        self.last.append((self.clock.now_ns, where, what))
        if self._trace is not None:
            self._trace(told(self.clock.now_ns, where, what))

    def hits(self, fault: str) -> bool:
        """Whether a fault hits this message."""
        chance = self._chances.get(fault)
        return chance is not None and self.rng.random() < chance

    def next_session(self) -> int:
        """A number for a control session."""
        self._sessions += 1
        return self._sessions

    def _delay_ns(self, src: Hashable, dst: Hashable) -> int:
        if isinstance(src, AgentName) and isinstance(dst, AgentName):
            return 50_000 if src.site == dst.site else self.shape.rtt_ns // 2
        return CONTROL_NS

    def carry(self, src_site: str, dst_site: str, leaves_ns: int, nbytes: int) -> int:
        """When the link between two sites has carried it, behind all that came before."""
        if src_site == dst_site:
            return leaves_ns
        start_ns = max(leaves_ns, self._wire_ns.get((src_site, dst_site), 0))
        self._wire_ns[src_site, dst_site] = end_ns = start_ns + nbytes * SECOND // self.shape.rate_bytes_per_s
        return end_ns

    # -- coming to life ------------------------------------------------------------------------------------------

    def _coordinator_config(self, address: str) -> CoordinatorConfig:
        shape = self.shape
        sites = sorted({AgentName.parse(name).site for name in shape.agents})
        index = self.addresses.index(address)
        owns = ("*->*",) if shape.coordinators == 1 else (f"{sites[index]}->*",)
        links: tuple[LinkSettings, ...] = ()
        if not shape.live:
            links = tuple(
                LinkSettings(LinkName(one, other), shape.rate_bytes_per_s, shape.rtt_ns, 1 << 20)
                for one in sites
                for other in sites
                if one != other and (shape.coordinators == 1 or one == sites[index])
            )
        return CoordinatorConfig(name=f"c{index}", owns=owns, links=links)

    def start_coordinator(self, address: str) -> None:
        """A new life, at an address where there may still be an old one."""
        self._coordinator_lives += 1
        # Epochs are taken from the wall clock, which may have been set back meanwhile. It counts nanoseconds: it shows
        # no time twice, nor one that an earlier life has raised its epoch to.
        self._epoch += self.rng.choice((1, 1, 1, -3))
        epoch = self._epoch * 1000 + self._coordinator_lives * 37 % 1000
        process = Process(self, self.rng.randrange(1, 1000) * SECOND)
        config = self._coordinator_config(address)
        life = CoordinatorLife(self, process, address, config, epoch, self._coordinator_lives)
        self.coordinators[address] = life
        self.note(life.name, "starts, epoch", epoch)

    def new_life(self, host: AgentHost, endpoint: EndpointName, after_ns: int = -1) -> None:
        """An endpoint's next process, a little later."""
        delay_ns = self.rng.randrange(50, 800) * MS if after_ns < 0 else after_ns

        def begin() -> None:
            if endpoint in host.trainers and host.trainers[endpoint].alive:
                return
            self._lives += 1
            trainer = host.trainers[endpoint] = Trainer(self, host, endpoint, 0x1000 + self._lives)
            host.attach(trainer)
            self.clock.after(self.rng.randrange(1, 200) * MS, trainer.post_some)

        self.clock.after(delay_ns, begin)

    # -- faults --------------------------------------------------------------------------------------------------

    def _next_fault(self) -> None:
        total = sum(rate for _, rate in self._moments)
        if not total or self.calm:
            return
        self.clock.after(int(self.rng.expovariate(total) * SECOND), self._strike)

    def _strike(self) -> None:
        if self.calm:
            return
        names, rates = [name for name, _ in self._moments], [rate for _, rate in self._moments]
        name = self.rng.choices(names, rates)[0]
        getattr(self, f"_{name}")()
        self._next_fault()

    def _a_while_ns(self, most_ms: int = 4000) -> int:
        """Mostly short, sometimes longer than any timeout; never beyond the time of faults."""
        length = min(most_ms, int(20 * 1.06 ** self.rng.uniform(0, 91))) * MS
        return max(MS, min(length, self.plan.chaos_ns - self.clock.now_ns))

    def _a_host(self) -> AgentHost:
        return self.hosts[self.rng.choice(sorted(self.hosts))]

    def _a_trainer(self) -> Trainer | None:
        living = [t for h in self.hosts.values() for t in h.trainers.values() if t.alive and t.agent is not None]
        return self.rng.choice(living) if living else None

    def _agent_crash(self, *, dark: bool = False) -> None:
        host = self._a_host()
        if host.life is not None and not host.leaving:
            if not dark and self.rng.random() < 0.3:
                host.leave()
            else:
                host.end(dark=dark)
            self.clock.after(self._a_while_ns(), host.start)

    def _power_loss(self) -> None:
        self._agent_crash(dark=True)

    def _agent_stop(self) -> None:
        host, length_ns = self._a_host(), self._a_while_ns()
        self.note(host.name, "is stopped for", length_ns // MS, "ms")
        host.stop(length_ns, with_clock=False)

    def _host_suspend(self) -> None:
        host, length_ns = self._a_host(), self._a_while_ns()
        self.note(host.name, "stands still for", length_ns // MS, "ms")
        host.stop(length_ns, with_clock=True)
        for other in (*self.hosts, *self.addresses):
            if other != host.name:
                self._block_for(host.name, other, length_ns, both=True)

    def _block_for(self, one: Hashable, other: Hashable, length_ns: int, *, both: bool) -> None:
        for src, dst in ((one, other), (other, one)) if both else ((one, other),):
            self.net.block(src, dst)
            self.clock.after(length_ns, self.net.unblock, src, dst)

    def _partition(self, one: Hashable, other: Hashable) -> None:
        if self.rng.random() < 0.5:
            one, other = other, one
        both, length_ns = self.rng.random() < 0.6, self._a_while_ns()
        self.note(one, "doesn't reach", other, "and back" if both else "one way", length_ns // MS, "ms")
        self._block_for(one, other, length_ns, both=both)

    def _partition_control(self) -> None:
        self._partition(self._a_host().name, self.rng.choice(self.addresses))

    def _partition_peers(self) -> None:
        one, other = self.rng.sample(sorted(self.hosts), 2)
        self._partition(one, other)

    def _coordinator_crash(self) -> None:
        address = self.rng.choice(self.addresses)
        life = self.coordinators[address]
        if life.alive:
            self.note(life.name, "crashes")
            life.end(tell=self.rng.random() < 0.7)
            self.clock.after(self._a_while_ns(), self._restart_coordinator, address)

    def _restart_coordinator(self, address: str) -> None:
        if not self.coordinators[address].alive:
            self.start_coordinator(address)

    def _coordinator_stop(self) -> None:
        life = self.coordinators[self.rng.choice(self.addresses)]
        length_ns = self._a_while_ns()
        self.note(life.name, "is stopped for", length_ns // MS, "ms")
        life.host.stop(length_ns, with_clock=self.rng.random() < 0.2)

    def _coordinator_twice(self) -> None:
        address = self.rng.choice(self.addresses)
        old = self.coordinators[address]
        if old.alive:
            self.start_coordinator(address)
            self.clock.after(self._a_while_ns(), old.end)

    def _cut_session(self) -> None:
        life = self._a_host().life
        if life is not None and life.sessions:
            life.sessions[self.rng.choice(sorted(life.sessions))].connection.cut("connection reset by peer")

    def _cut_peer(self) -> None:
        life = self._a_host().life
        links = [link for link in life.links.values() if link.peer_connection is not None] if life is not None else []
        if links:
            connection = self.rng.choice(links).peer_connection
            assert connection is not None
            self.note(connection.sender.name, "connections cut to", connection.receiver.name)
            connection.connection.cut("connection reset by peer")

    def _client_death(self, *, orderly: bool = False) -> None:
        trainer = self._a_trainer()
        if trainer is not None:
            life, host = trainer.agent, trainer.host
            self.note(host.name, trainer.endpoint, "closes" if orderly else "dies")
            trainer.ended()
            if life is not None:
                life.process(life.detached, trainer, "it ended", orderly)
            self.new_life(host, trainer.endpoint)

    def _client_close(self) -> None:
        self._client_death(orderly=True)

    def _cancel(self) -> None:
        if (trainer := self._a_trainer()) is not None:
            trainer.cancel_one()

    def _full_receiver(self) -> None:
        if (trainer := self._a_trainer()) is not None:
            trainer.lazy_until_ns = self.clock.now_ns + self._a_while_ns()

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Break things, let them heal, look. Raises Broken."""
        self._next_fault()
        self.clock.run(self.plan.chaos_ns)
        self._calm_down()
        self.clock.run(self.clock.now_ns + HEAL_NS)
        self._post_last()
        self._end(3 * SECOND)
        self._post_alone()
        self._end(SECOND)

    def _end(self, within_ns: int) -> None:
        """All that was posted gets its end, and then nobody owes anybody anything."""
        self.clock.run(self.clock.now_ns + END_NS, done=self._over)
        self.clock.run(self.clock.now_ns + within_ns, done=self._settled)
        invariants.check_end(self)

    def _calm_down(self) -> None:
        self.note("world", "no more faults")
        self.calm = True
        self.net.late = 0.0
        self._chances.clear()
        for host in self.hosts.values():
            host.start()
            for trainer in host.trainers.values():
                trainer.lazy_until_ns = 0
        for address in self.addresses:
            self._restart_coordinator(address)

    def _post_last(self) -> None:
        """Everybody to everybody: all must be served."""
        self.note("world", "the last messages")
        for trainer in self._living():
            for rank in self.ranks:
                if rank != trainer.endpoint.rank:
                    trainer.post(rank, self.rng.choice((1000, 100 * KIB, LONE_BYTES)), must_arrive=True)

    def _post_alone(self) -> None:
        """The link is usable by a lone sender."""
        self.note("world", "a lone sender")
        trainer = self._living()[0]
        away = [one for one in self._living() if one.host.name.site != trainer.host.name.site]
        trainer.post(away[0].endpoint.rank, LONE_BYTES, must_arrive=True)

    def _living(self) -> list[Trainer]:
        living = [
            host.trainers[endpoint] for host in self.hosts.values() for endpoint in sorted(host.trainers, key=str)
        ]
        if any(not trainer.alive or trainer.agent is None for trainer in living) or len(living) != len(self.ranks):
            raise Broken("a trainer is not back")
        return living

    def _settled(self) -> bool:
        if self.clock.events % 64:
            return False
        try:
            invariants.check_end(self)
        except Broken:
            return False
        return True

    def _over(self) -> bool:
        return self.clock.events % 16 == 0 and not any(
            trainer.waiting or trainer.open or trainer.keeps
            for host in self.hosts.values()
            for trainer in host.trainers.values()
        )


def told(at_ns: int, where: Hashable, what: tuple[Any, ...]) -> str:
    """One thing that happened, as a line."""
    return f"{at_ns / SECOND:10.6f} {where!s:<18} {' '.join(str(one) for one in what)}"
