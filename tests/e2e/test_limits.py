"""State that has outgrown what one gRPC message may hold by default still travels (case 43).

``BOUNDS=full`` runs the case's 500 agents; CI has fewer of them with as much state each.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import uvloop

from proxyd.agent.session import CoordinatorSessions
from proxyd.cli.cluster import LinkFigures
from proxyd.core.events import AgentEvent, CoordinatorConnected, CoordinatorLost, CoordinatorSaid
from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import AgentHello, Directory, EndpointUp, Welcome
from proxyd.runtime.grpc_options import channel_options
from proxyd.v1 import admin_pb2
from proxyd.v1.admin_pb2_grpc import AdminStub
from tests.e2e.rig import MIB, Net, pattern

pytestmark = pytest.mark.timeout(100)

FULL = os.environ.get("BOUNDS") == "full"
AGENTS, ENDPOINTS_EACH, LINKS = 4, 7000, 500
CROWD = 500 if FULL else 60
AT_ONCE = 50
"""All of them live in one process here, which has to read 250,000 links."""
JOB = "a-job-with-a-long-name-" + 105 * "x"


class RawAgent:
    """An agent's sessions and nothing else."""

    def __init__(self, net: Net, number: int) -> None:
        self.address = net.cluster.coordinator_socket
        self.events: list[AgentEvent] = []
        hello = AgentHello(AgentName("a", f"raw-{number}"), 1000 + number, f"127.0.0.1:{20_000 + number}")
        token = net.cluster.token_file.read_bytes()
        log = logging.getLogger("test")
        self.sessions = CoordinatorSessions([self.address], lambda: hello, token, self.events.append, logger=log)
        self.sessions.start()

    async def heard(self, wanted: Callable[[AgentEvent], bool]) -> AgentEvent:
        """The first event that fits."""
        async with asyncio.timeout(60):
            while True:
                found = next((event for event in self.events if wanted(event)), None)
                if found is not None:
                    return found
                await asyncio.sleep(0.1)

    def directories(self) -> list[Directory]:
        """All that it was told."""
        said = [event.message for event in self.events if isinstance(event, CoordinatorSaid)]
        return [message for message in said if isinstance(message, Directory)]


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_thirty_thousand_endpoints_and_five_hundred_links(start: Callable[..., Net]) -> None:
    figures = LinkFigures("400Mbit", "60ms", "0.1bdp")
    links = {("a", f"site-{number}"): figures for number in range(LINKS)}
    net = start(links={**links, ("a", "b"): LinkFigures(), ("b", "a"): LinkFigures()})

    async def main() -> None:
        raw = [RawAgent(net, number) for number in range(AGENTS)]
        for number, agent in enumerate(raw):
            connected = await agent.heard(lambda event: isinstance(event, CoordinatorConnected))
            assert isinstance(connected, CoordinatorConnected)
            assert isinstance(connected.message, Welcome)
            assert len(connected.message.links) == LINKS + 1
            for rank in range(ENDPOINTS_EACH):
                endpoint = EndpointName(JOB, number * ENDPOINTS_EACH + rank)
                agent.sessions.send(agent.address, EndpointUp(endpoint, 1 + rank))
        await raw[0].heard(lambda _: sum(len(d.entries) for d in raw[0].directories()) >= AGENTS * ENDPOINTS_EACH)
        # Whoever comes now gets all of it in one message, larger than gRPC takes by itself.
        late = RawAgent(net, AGENTS)
        await late.heard(lambda event: isinstance(event, CoordinatorSaid) and isinstance(event.message, Directory))
        [whole] = [one for one in late.directories() if one.full]
        assert len(whole.entries) >= AGENTS * ENDPOINTS_EACH
        texts = (f"{e.endpoint.job}{e.agent}{e.data_address}" for e in whole.entries)
        assert sum(map(len, texts)) + 16 * len(whole.entries) > 4 * MIB
        # A real agent that starts now, too; and messages go as ever.
        restart_and_exchange()
        for agent in (*raw, late):
            await agent.sessions.close()

    def restart_and_exchange() -> None:
        net.injects_fault("agent b is restarted")
        net.cluster.kill(net.agent("b"))
        net.cluster.restart_agent("b")
        net.cluster.await_sessions()
        sender, receiver = net.pair()
        handle = sender.isend(pattern(3 * MIB), dst=1)
        assert np.array_equal(receiver.recv(src=0, timeout_s=20).array, pattern(3 * MIB))
        handle.wait(10)
        moved = net.moved()
        assert moved.granted["a->b"] == 3 * MIB
        assert moved.fallback == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_hundreds_of_agents_of_five_hundred_links_each(start: Callable[..., Net]) -> None:
    """Every agent is told of all links and knows all others; what an operator asks for holds all of it, too."""
    figures = LinkFigures("400Mbit", "60ms", "0.1bdp")
    links = {("a", f"site-{number}"): figures for number in range(LINKS)}
    net = start(
        links={**links, ("a", "b"): LinkFigures(), ("b", "a"): LinkFigures()},
        # Not how fast, but how much: 500 agents' beats every 150 ms are more than this process can read.
        coordinator={"beat": "1s", "lease": "5s"},
    )

    async def main() -> None:
        begun_s, busy_s = time.monotonic(), cpu_s(net.cluster.coordinator.pid)
        raw: list[RawAgent] = []
        while len(raw) < CROWD:
            raw += [RawAgent(net, number) for number in range(len(raw), min(CROWD, len(raw) + AT_ONCE))]
            for agent in raw[-AT_ONCE:]:
                connected = await agent.heard(lambda event: isinstance(event, CoordinatorConnected))
                assert isinstance(connected, CoordinatorConnected)
                assert isinstance(connected.message, Welcome)
                assert len(connected.message.links) == LINKS + 1
        each_s = (cpu_s(net.cluster.coordinator.pid) - busy_s) / CROWD
        print(
            f"{CROWD} agents with {LINKS} links each are in after {time.monotonic() - begun_s:.1f} s; "
            f"the coordinator worked {each_s * 1e3:.1f} ms for each"
        )
        for number, agent in enumerate(raw):
            agent.sessions.send(agent.address, EndpointUp(EndpointName(JOB, number), 1))
        await raw[0].heard(lambda _: sum(len(d.entries) for d in raw[0].directories()) >= CROWD)
        begun_s = time.monotonic()
        async with grpc.aio.insecure_channel(net.cluster.coordinator.address, options=channel_options()) as channel:
            status = await AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=20)
        assert (len(status.agents), len(status.links)) == (CROWD + 2, LINKS + 2)
        print(f"status: {status.ByteSize() / MIB:.1f} MiB in {time.monotonic() - begun_s:.2f} s")
        await asyncio.to_thread(exchange)
        lost = sum(isinstance(event, CoordinatorLost) for agent in raw for event in agent.events)
        assert lost == 0, "sessions stand, whatever the number"
        await asyncio.gather(*(agent.sessions.close() for agent in raw))

    def exchange() -> None:
        sender, receiver = net.pair()
        begun_s = time.monotonic()
        handle = sender.isend(pattern(3 * MIB), dst=1)
        assert np.array_equal(receiver.recv(src=0, timeout_s=30).array, pattern(3 * MIB))
        handle.wait(10)
        print(f"a message among them: {time.monotonic() - begun_s:.2f} s")
        assert net.moved().granted["a->b"] == 3 * MIB

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_ten_thousand_announcements_in_one_go(net: Net) -> None:
    """More than fit into any queue: messages that were announced and come are right, the others leave no trace."""
    sender, receiver = net.pair()
    sender.send(b"x", dst=1, tag=30_000, timeout_s=10)
    for tag in range(10_000):
        sender.announce(dst=1, tag=tag, nbytes=MIB, ready_in_s=30)
    begun_s = time.monotonic()
    for tag in (9_999, 0, 20_000):
        sender.isend(pattern(MIB, 0, tag), dst=1, tag=tag)
        assert np.array_equal(receiver.recv(src=0, tag=tag, timeout_s=20).array, pattern(MIB, 0, tag))
    assert time.monotonic() - begun_s < 10
    assert json.dumps(sender.link_state(1)._asdict())
