"""Grants through gRPC on loopback: a real coordinator process, and agents' sessions as the agents have them.

Each of ``SENDERS`` sessions stands for an agent at a site of its own and sends one transfer after another over its own
link: request, wait for the grant, report it as delivered, done, next. So each cycle holds everything that a grant costs
(two batches through gRPC, translation both ways, the machine) and nothing that the policy would make it wait for.

Two phases. *Saturated*: the next request follows at once; the rate is what two processes can do on this machine, and
the latency is its queue. *Paced*: ``PACED_PER_S`` requests per second in all; rate and latency together say whether
that load is carried well, and these are the headline figures.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import NamedTuple

import uvloop

from proxyd.agent.session import CoordinatorSessions
from proxyd.cli.cluster import Cluster, LinkFigures
from proxyd.core.events import AgentEvent, CoordinatorConnected, CoordinatorLost, CoordinatorSaid
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Grant, Report, Request, TransferDone
from proxyd.core.units import NS_PER_S
from proxyd.wire.envelope import TrafficClass

SENDERS = 4
PACED_PER_S = 1250
WARM_UP_S = 0.5
START_TIMEOUT_S = 10.0
DESTINATION = AgentName("far", "sink")
NBYTES = 256 << 10
RATE_BYTES_PER_S = 10_000_000_000 // 8

log = logging.getLogger("proxyd.bench")


class _Sender:
    """One agent that always has exactly one transfer open."""

    def __init__(self, number: int, address: str, token: bytes) -> None:
        self._address = address
        self._link = LinkName(f"site{number}", DESTINATION.site)
        self._name = AgentName(f"site{number}", "sender")
        self._incarnation = number + 1
        self._sequence = itertools.count(1)
        self._transfer = TransferId(0, 0)
        self._asked_ns = 0
        self._granted_bytes = 0
        self._sent_bytes = 0
        self._next_at_ns = 0
        self.interval_ns = 0
        """Least time between two requests; 0: the next follows at once."""
        self.waits_ns: list[int] = []
        self.running = asyncio.Event()
        hello = AgentHello(self._name, number + 1, "127.0.0.1:7601")
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
            Request(self._transfer, self._link, DESTINATION, "bench", TrafficClass.PIPELINE, NBYTES),
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
        # A late one is not made up for in a burst: that would measure the burst.
        now_ns = time.monotonic_ns()
        self._next_at_ns = max(self._next_at_ns + self.interval_ns, now_ns)
        asyncio.get_running_loop().call_later((self._next_at_ns - now_ns) / 1e9, self._ask)


class GrantFigures(NamedTuple):
    """What :func:`grpc_grants` measured."""

    grants_per_s: float
    p99_ms: float
    """Request until grant, at that rate."""
    saturated_grants_per_s: float


def grpc_grants(seconds: float) -> GrantFigures:
    """Measure both phases, each for half of ``seconds``."""
    sites = {f"site{number}": 0 for number in range(SENDERS)}
    figures = LinkFigures(capacity="100Gbit", rtt="1ms", buffer="1bdp")
    links = {(site, DESTINATION.site): figures for site in sites}
    with Cluster({**sites, DESTINATION.site: 0}, links=links, log_level="warning") as cluster:
        address, token = cluster.coordinator.address, cluster.token_file.read_bytes()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_measure(address, token, seconds))


async def _measure(address: str, token: bytes, seconds: float) -> GrantFigures:
    senders = [_Sender(number, address, token) for number in range(SENDERS)]
    for sender in senders:
        sender.sessions.start()
    async with asyncio.timeout(START_TIMEOUT_S):
        for sender in senders:
            await sender.running.wait()
    saturated, _ = await _phase(senders, 0, seconds / 2)
    paced, p99_ms = await _phase(senders, SENDERS * NS_PER_S // PACED_PER_S, seconds / 2)
    await asyncio.gather(*(sender.sessions.close() for sender in senders))
    return GrantFigures(paced, p99_ms, saturated)


async def _phase(senders: list[_Sender], interval_ns: int, seconds: float) -> tuple[float, float]:
    for sender in senders:
        sender.interval_ns = interval_ns
    await asyncio.sleep(WARM_UP_S)
    for sender in senders:
        sender.waits_ns.clear()
    begun_s = time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - begun_s
    waits_ns = sorted(wait for sender in senders for wait in sender.waits_ns)
    if not waits_ns:
        return 0.0, float("inf")
    return len(waits_ns) / took_s, waits_ns[len(waits_ns) * 99 // 100] / 1e6
