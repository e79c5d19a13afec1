"""``proxyd simulate scale``: how many agents, links, transfers and hours the simulator carries.

Two runs, both with fluid senders (:mod:`proxyd.sim.fluid`): one event per request, report and grant, no TCP, no
segments.
The coordinator is the daemon's machine with every timer it has; only the links' rates are fixed.

* **wide**: 1,000 agents at 100 sites, each site with a link of its own to one far site (1 Gbit/s, 60 ms), and 100,000
  transfers of 1 MiB: each agent posts its next one when one of its two is acknowledged.
* **long**: one simulated hour of 64 agents on 4 links (1 Gbit/s, 60 ms). Every 10 to 20 s all 64 post a burst of 8 MiB
  each: training steps whose gradients cross the WAN.

Times are processor time, and wall clock beside it. The figures (transfers, grants, events, completion times) depend on
the seed alone.
"""

from __future__ import annotations

import dataclasses
import random
import time

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.sim.fluid import NANOS, FluidSender, FluidWorld

RATE_BYTES_PER_S = 125_000_000
RTT_NS = 60_000_000
START_NS = 100_000_000
STEP_NS = NANOS


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleResult:
    """One run."""

    name: str
    agents: int
    links: int
    transfers: int
    """Acknowledged."""
    grants: int
    events: int
    """Handled by the coordinator."""
    simulated_s: float
    processor_s: float
    clock_s: float
    fct_mean_s: float
    fct_p99_s: float
    violations: int
    """Of a window, and reports that had to be clamped: 0, or something is wrong."""

    def text(self) -> str:
        """For people."""
        return (
            f"{self.name}: {self.agents:,} agents, {self.links} links, {self.transfers:,} transfers, {self.grants:,} "
            f"grants, {self.events:,} events, {self.simulated_s:,.1f} s simulated in {self.processor_s:.1f} s of "
            f"processor time ({self.clock_s:.1f} s on the clock); completion mean {self.fct_mean_s:.3f} s, p99 "
            f"{self.fct_p99_s:.3f} s; {self.violations} violations"
        )


class _Scale:
    """Agents over links into one far site, and what was posted when."""

    def __init__(self, name: str, agents: int, links: int, seed: int) -> None:
        self.name = name
        self.rng = random.Random(seed)
        names = [LinkName(f"site{index:03}", "far") for index in range(links)]
        settings = tuple(
            LinkSettings(link, RATE_BYTES_PER_S, RTT_NS, RATE_BYTES_PER_S * RTT_NS // NANOS // 10, mtu_bytes=9000)
            for link in names
        )
        self.machine = CoordinatorMachine(CoordinatorConfig(owns=("*->far",), links=settings), epoch=1)
        senders = [
            FluidSender(AgentName(names[index % links].src_site, f"host{index}"), names[index % links], RTT_NS)
            for index in range(agents)
        ]
        self.world = FluidWorld(self.machine, senders, finishes=self.finished, keeps_history=False)
        self.posted: dict[TransferId, int] = {}
        self.fct_ns: list[int] = []

    def post(self, session: int, nbytes: int) -> None:
        """One agent sends something."""
        self.posted[self.world.send(session, nbytes)] = self.world.now_ns

    def finished(self, session: int, transfer: TransferId) -> None:
        """It has arrived, half a round trip before the sender knows."""
        self.fct_ns.append(self.world.now_ns - RTT_NS // 2 - self.posted.pop(transfer))

    def result(self, processor_s: float, clock_s: float) -> ScaleResult:
        """What came out; it began at these two times."""
        status = self.machine.links_status(self.world.now_ns)
        fct_s = sorted(fct / NANOS for fct in self.fct_ns)
        return ScaleResult(
            name=self.name,
            agents=len(self.world.senders),
            links=len(status),
            transfers=len(fct_s),
            grants=self.world.granted,
            events=self.world.events,
            simulated_s=self.world.now_ns / NANOS,
            processor_s=time.process_time() - processor_s,
            clock_s=time.perf_counter() - clock_s,
            fct_mean_s=sum(fct_s) / max(1, len(fct_s)),
            fct_p99_s=fct_s[int(0.99 * (len(fct_s) - 1))] if fct_s else 0.0,
            violations=sum(link.window_violations + link.totals.clamped_reports for link in status),
        )


class _Wide(_Scale):
    """Everybody at once, until all has been sent."""

    def __init__(self, agents: int, links: int, transfers: int, nbytes: int, seed: int) -> None:
        super().__init__("wide", agents, links, seed)
        self.left = transfers
        self.nbytes = nbytes

    def finished(self, session: int, transfer: TransferId) -> None:
        super().finished(session, transfer)
        self.next(session)

    def next(self, session: int) -> None:
        """One more, if there is one."""
        if self.left:
            self.left -= 1
            self.post(session, self.nbytes)


def wide(
    agents: int = 1000, links: int = 100, transfers: int = 100_000, nbytes: int = 1 << 20, seed: int = 1
) -> ScaleResult:
    """Many agents, links and transfers at once."""
    begin = time.process_time(), time.perf_counter()
    scale = _Wide(agents, links, transfers, nbytes, seed)
    world = scale.world
    for session in world.senders:
        for _ in range(2):
            world.at(START_NS + scale.rng.randrange(NANOS), scale.next, session)
    world.run(START_NS + NANOS)
    while scale.posted:
        world.run(world.now_ns + STEP_NS)
    return scale.result(*begin)


def long(agents: int = 64, links: int = 4, seconds: int = 3600, nbytes: int = 8 << 20, seed: int = 1) -> ScaleResult:
    """Much time."""
    begin = time.process_time(), time.perf_counter()
    scale = _Scale("long", agents, links, seed)
    world = scale.world

    def burst() -> None:
        for session in world.senders:
            scale.post(session, nbytes)
        world.at(world.now_ns + scale.rng.randrange(10 * NANOS, 20 * NANOS), burst)

    world.at(START_NS, burst)
    world.run(seconds * NANOS)
    return scale.result(*begin)
