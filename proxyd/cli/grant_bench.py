"""Grants through gRPC on loopback: a real coordinator process, and the sessions of 64 agents as the agents have them.

Each of :data:`SENDERS` sessions stands for an agent that sends one transfer after another over a link of its own (eight
sites to eight others): request, wait for the grant, report it as delivered, done, next. So each cycle holds everything
that a grant costs (two batches to the coordinator, one back, translation both ways, the machine, and the beats of all
links) and nothing that the policy would make it wait for.

The sessions are the agents' own (:class:`~proxyd.agent.session.CoordinatorSessions`), each with a connection of its
own, all in this process. Leaner streams that send prepared bytes would take a third off this process' time, but none
off the coordinator's, and what an agent's session costs is part of how long an agent waits.

Two phases. *Saturated*: the next request follows at once; the rate is what two processes can do on this machine, and
the latency is its queue. *Paced*: :data:`PACED_PER_S` requests per second in all; rate and latency together say whether
that load is carried well, and these are the headline figures. On a busy machine rates and latencies are those of the
machine; the processor time per grant, of the coordinator and of this process, says more about the code.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

import uvloop

from proxyd.agent.session import CoordinatorSessions
from proxyd.cli.cluster import Cluster, LinkFigures
from proxyd.core.events import AgentEvent, CoordinatorConnected, CoordinatorLost, CoordinatorSaid
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Grant, Report, Request, TransferDone
from proxyd.core.units import NS_PER_S
from proxyd.runtime.lifecycle import calm_collector
from proxyd.wire.envelope import TrafficClass

SITES = 8
SENDERS = SITES * SITES
PACED_PER_S = 3000
WARM_UP_S = 0.5
START_TIMEOUT_S = 10.0
NBYTES = 256 << 10
RATE_BYTES_PER_S = 10_000_000_000 // 8
TIMER_NS = 1_000_000
"""The loop's timers are rounded to it, down too."""

log = logging.getLogger("proxyd.bench")


def _link(number: int) -> LinkName:
    return LinkName(f"from{number // SITES}", f"to{number % SITES}")


class _Sender:
    """One agent that has at most one transfer open."""

    def __init__(self, number: int, address: str, token: bytes) -> None:
        self._number = number
        self._address = address
        self._link = _link(number)
        self._destination = AgentName(self._link.dst_site, "sink")
        self._incarnation = number + 1
        self._sequence = itertools.count(1)
        self._transfer = TransferId(0, 0)
        self._asked_ns = 0
        self._granted_bytes = 0
        self._sent_bytes = 0
        self.interval_ns = 0
        """Time between two requests; 0: the next follows at once."""
        self.waits_ns: list[int] = []
        self.running = asyncio.Event()
        hello = AgentHello(AgentName(self._link.src_site, f"sender{number}"), number + 1, "127.0.0.1:7601")
        self.sessions = CoordinatorSessions([address], lambda: hello, token, self._on_event, logger=log)

    def _on_event(self, event: AgentEvent) -> None:
        if isinstance(event, CoordinatorConnected):
            self.running.set()
            self._ask()
        elif isinstance(event, CoordinatorLost):
            log.warning("the coordinator was lost: %s", event.reason)
        elif isinstance(event, CoordinatorSaid) and isinstance(event.message, Grant):
            self._on_grant(event.message)

    def _ask(self) -> None:
        self._transfer = TransferId(self._incarnation, next(self._sequence))
        self._granted_bytes = 0
        self._asked_ns = time.monotonic_ns()
        self.sessions.send(
            self._address,
            Request(self._transfer, self._link, self._destination, "bench", TrafficClass.PIPELINE, NBYTES),
        )

    def _on_grant(self, grant: Grant) -> None:
        if grant.transfer != self._transfer:
            return
        if not self._granted_bytes:
            self.waits_ns.append(time.monotonic_ns() - self._asked_ns)
        self._granted_bytes += grant.nbytes
        self._sent_bytes += grant.nbytes
        if self._granted_bytes < NBYTES:
            return
        sent = self._sent_bytes
        self.sessions.send(
            self._address, Report(self._link, sent, sent, 0, 0, 0, 0, 0, 100_000, 100_000, 0, RATE_BYTES_PER_S, True)
        )
        self.sessions.send(
            self._address, TransferDone(self._transfer, self._link, TrafficClass.PIPELINE, NBYTES, True, 0)
        )
        if self.interval_ns == 0:
            self._ask()
            return
        # Each keeps to turns of its own, and one that is late leaves some out. Were the next turn counted from now,
        # those that were late together would ask together from then on.
        now_ns = time.monotonic_ns()
        phase_ns = self._number * self.interval_ns // SENDERS
        turn = (now_ns + TIMER_NS - phase_ns) // self.interval_ns + 1
        wait_ns = phase_ns + turn * self.interval_ns - now_ns
        asyncio.get_running_loop().call_later(wait_ns / 1e9, self._ask)


class GrantFigures(NamedTuple):
    """What :func:`grpc_grants` measured."""

    grants_per_s: float
    p50_ms: float
    """Request until grant, at that rate."""
    p99_ms: float
    coordinator_us: float
    """Processor time of the coordinator for each grant, at that rate."""
    agents_us: float
    """The same of this process, for all agents."""
    saturated_grants_per_s: float


def grpc_grants(seconds: float) -> GrantFigures:
    """Measure both phases, each for half of ``seconds``."""
    names = [_link(number) for number in range(SENDERS)]
    figures = LinkFigures(capacity="100Gbit", rtt="1ms", buffer="1bdp")
    with Cluster(
        {site: 0 for name in names for site in name},
        links={(name.src_site, name.dst_site): figures for name in names},
        coordinators={"coordinator": ["from*->to*"]},
        log_level="warning",
    ) as cluster:
        coordinator, token = cluster.coordinator, cluster.token_file.read_bytes()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_measure(coordinator.address, coordinator.pid, token, seconds))


async def _measure(address: str, coordinator_pid: int, token: bytes, seconds: float) -> GrantFigures:
    calm_collector()
    senders = [_Sender(number, address, token) for number in range(SENDERS)]
    for sender in senders:
        sender.sessions.start()
    async with asyncio.timeout(START_TIMEOUT_S):
        for sender in senders:
            await sender.running.wait()
    saturated = await _phase(senders, coordinator_pid, 0, seconds / 2)
    paced = await _phase(senders, coordinator_pid, SENDERS * NS_PER_S // PACED_PER_S, seconds / 2)
    await asyncio.gather(*(sender.sessions.close() for sender in senders))
    return paced._replace(saturated_grants_per_s=saturated.grants_per_s)


async def _phase(senders: list[_Sender], coordinator_pid: int, interval_ns: int, seconds: float) -> GrantFigures:
    for sender in senders:
        sender.interval_ns = interval_ns
    await asyncio.sleep(WARM_UP_S)
    for sender in senders:
        sender.waits_ns.clear()
    begun_s, coordinator_s, own_s = time.monotonic(), _processor_s(coordinator_pid), time.process_time()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - begun_s
    coordinator_s, own_s = _processor_s(coordinator_pid) - coordinator_s, time.process_time() - own_s
    waits_ns = sorted(wait for sender in senders for wait in sender.waits_ns)
    if not waits_ns:
        never = float("inf")
        return GrantFigures(0.0, never, never, never, never, 0.0)
    count = len(waits_ns)
    return GrantFigures(
        count / took_s,
        waits_ns[count // 2] / 1e6,
        waits_ns[count * 99 // 100] / 1e6,
        coordinator_s * 1e6 / count,
        own_s * 1e6 / count,
        0.0,
    )


def _processor_s(pid: int) -> float:
    """User and system time of a process so far."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
