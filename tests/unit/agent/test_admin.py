"""The agent's admin service on a real socket: who may open it, and what it refuses."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from pathlib import Path

import grpc
import grpc.aio
import pytest

from proxyd.agent.admin import AdminServer, AgentAdmin, admin_server
from proxyd.core.ids import AgentName, EndpointName, LinkName
from proxyd.runtime.translate_agent import AgentTold, LinkTold, PeerTold, PingTold, PingWanted
from proxyd.v1 import admin_pb2, coordination_pb2
from proxyd.v1.admin_pb2_grpc import AgentAdminStub

PEER = AgentName("b", "1")


class Agent:
    """What the service is given."""

    def __init__(self) -> None:
        self.draining = False
        self.drained: list[bool] = []

    def told(self) -> AgentTold:
        return AgentTold(
            agent=AgentName("a", "0"),
            version="1",
            incarnation=7,
            uptime_ns=8,
            pid=9,
            socket="/s",
            data_address="10.0.0.1:1",
            draining=self.draining,
            held_transfers=2,
            outgoing_transfers=3,
            arriving_transfers=4,
            trainers=[EndpointName("job", 5)],
            coordinators=[("c:1", True), ("d:1", False)],
            peers=[PeerTold(PEER, "10.0.0.2:1", True, 6, 60_000_000, 50_000_000, 9000)],
            links=[LinkTold(LinkName("a", "b"), "c", True, 10, 11, "estimated", 12, 13, 14, 15)],
            certificate="valid",
            congestion_control="bbr",
        )

    def drain(self, wanted: bool) -> None:
        self.drained.append(wanted)
        self.draining = wanted

    async def ping(self, wanted: PingWanted) -> PingTold:
        if wanted.peer != PEER:
            raise LookupError(f"it is not known where {wanted.peer} is")
        return PingTold(wanted.peer, wanted.address or "10.0.0.2:1", rtts_ns=[60] * wanted.pings, sent=wanted.pings)


@pytest.fixture
def agent() -> Agent:
    return Agent()


def asked(path: Path, agent: Agent, method: str, request: object) -> object:
    """One question to a server at ``path``; its answer, or the status code of its refusal."""

    async def scenario() -> object:
        server = AdminServer(str(path))
        await server.start(AgentAdmin(agent.told, agent.drain, agent.ping))
        try:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                return await getattr(AgentAdminStub(channel), method)(request, timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            await server.close()

    answer = asyncio.run(scenario())
    assert not path.exists(), "the socket goes with the server"
    return answer


def test_all_of_a_status_crosses(tmp_path: Path, agent: Agent) -> None:
    status = asked(tmp_path / "a.admin", agent, "AgentStatus", admin_pb2.AgentStatusRequest())
    assert isinstance(status, admin_pb2.AgentStatusResponse)
    for message in (status, status.peers[0], status.links[0], status.coordinators[0], status.trainers[0]):
        unset = {field.name for field in message.DESCRIPTOR.fields} - {field.name for field, _ in message.ListFields()}
        assert unset <= {"draining", "workers"}, unset


def test_draining_begins_and_ends_once(tmp_path: Path, agent: Agent) -> None:
    for wanted, drained in ((True, [True]), (True, [True]), (False, [True, False])):
        answer = asked(tmp_path / "a.admin", agent, "Drain", admin_pb2.DrainRequest(drain=wanted))
        assert isinstance(answer, admin_pb2.DrainResponse)
        assert (answer.draining, answer.under_way_transfers, answer.held_transfers) == (wanted, 3, 2)
        assert agent.drained == drained


@pytest.mark.parametrize(
    ("site", "count", "interval_ms", "verdict"),
    [
        ("", 1, 0, grpc.StatusCode.INVALID_ARGUMENT),
        ("b", 0, 0, grpc.StatusCode.INVALID_ARGUMENT),
        ("b", 101, 0, grpc.StatusCode.INVALID_ARGUMENT),
        ("b", 1, 10_001, grpc.StatusCode.INVALID_ARGUMENT),
        ("c", 1, 0, grpc.StatusCode.NOT_FOUND),
        ("b", 3, 0, 3),
    ],
)
def test_pings_are_bounded(
    tmp_path: Path, agent: Agent, site: str, count: int, interval_ms: int, verdict: object
) -> None:
    peer = coordination_pb2.AgentName(site=site, name="1")
    request = admin_pb2.PingRequest(peer=peer, count=count, interval_ms=interval_ms)
    answer = asked(tmp_path / "a.admin", agent, "Ping", request)
    assert (len(answer.rtt_ns) if isinstance(answer, admin_pb2.PingResponse) else answer) == verdict


def test_off_and_without_room(caplog: pytest.LogCaptureFixture) -> None:
    assert admin_server(None) is None
    with caplog.at_level(logging.WARNING):
        assert admin_server("/tmp/" + "x" * 100 + ".admin") is None
    assert "longer than the 107 bytes" in caplog.text
