"""The coordinator as a process, with real sessions and with real agents."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from proxyd.agent.session import CoordinatorSessions
from proxyd.cli.cluster import Cluster, ClusterError, LinkFigures
from proxyd.cli.scrape import scrape
from proxyd.core.events import AgentEvent, CoordinatorConnected, CoordinatorLost, CoordinatorSaid
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import (
    AgentHello,
    AgentMessage,
    Beat,
    Directory,
    EndpointUp,
    Grant,
    Queued,
    Report,
    Request,
    TransferDone,
    Welcome,
)
from proxyd.v1 import admin_pb2, coordination_pb2
from proxyd.v1.admin_pb2_grpc import AdminStub
from proxyd.wire.envelope import TrafficClass

AB = LinkName("a", "b")
FIGURES = {("a", "b"): LinkFigures("400Mbit", "60ms", "0.1bdp", 9000)}
EventT = TypeVar("EventT", bound=AgentEvent)
log = logging.getLogger("test")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A coordinator without agents."""
    with Cluster({"a": 0, "b": 0}, links=FIGURES) as one:
        yield one


class Agent:
    """An agent's sessions, without the rest of an agent."""

    def __init__(self, cluster: Cluster, site: str, *, token: bytes | None = None) -> None:
        self.address = cluster.coordinator.address if token is not None else cluster.coordinator_socket
        self.events: list[AgentEvent] = []
        self._news = asyncio.Event()
        hello = AgentHello(AgentName(site, "one"), 5, "127.0.0.1:7601")
        secret = cluster.token_file.read_bytes() if token is None else token
        self.sessions = CoordinatorSessions([self.address], lambda: hello, secret, self._on_event, logger=log)
        self.sessions.start()

    def _on_event(self, event: AgentEvent) -> None:
        self.events.append(event)
        self._news.set()

    def say(self, *messages: AgentMessage) -> None:
        for message in messages:
            self.sessions.send(self.address, message)

    async def until(self, wanted: Callable[[AgentEvent], bool], timeout_s: float = 10.0) -> AgentEvent:
        async with asyncio.timeout(timeout_s):
            while not (found := [event for event in self.events if wanted(event)]):
                self._news.clear()
                await self._news.wait()
        return found[-1]

    async def heard(self, kind: type, where: Callable[..., bool] = lambda _: True) -> object:
        """The latest message of a kind that fits."""
        event = await self.until(
            lambda e: isinstance(e, CoordinatorSaid) and isinstance(e.message, kind) and where(e.message)
        )
        assert isinstance(event, CoordinatorSaid)
        return event.message

    async def connected(self) -> Welcome:
        event = await self.until(lambda e: isinstance(e, CoordinatorConnected))
        assert isinstance(event, CoordinatorConnected)
        assert isinstance(event.message, Welcome)
        return event.message


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(40):
            await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


def test_hello_endpoints_and_directory(cluster: Cluster) -> None:
    async def main() -> None:
        here, there = Agent(cluster, "a"), Agent(cluster, "b")
        welcome = await here.connected()
        assert welcome.owns == ("*->*",)
        assert [info.link for info in welcome.links] == [AB]
        await there.connected()
        there.say(EndpointUp(EndpointName("llama", 1), 77))
        directory = await here.heard(Directory, lambda d: d.entries)
        assert isinstance(directory, Directory)
        [entry] = directory.entries
        assert (entry.endpoint, entry.incarnation, entry.agent) == (
            EndpointName("llama", 1),
            77,
            AgentName("b", "one"),
        )
        beat = await here.heard(Beat, lambda b: any(rate for _, rate in b.fallback))
        assert isinstance(beat, Beat)
        assert dict(beat.fallback)[AB] > 0
        await here.sessions.close()
        await there.sessions.close()

    run(main)


def test_a_request_is_queued_at_once_and_granted_until_it_is_done(cluster: Cluster) -> None:
    async def main() -> None:
        here, there = Agent(cluster, "a"), Agent(cluster, "b")
        await here.connected()
        await there.connected()
        transfer, nbytes = TransferId(5, 1), 8 << 20
        here.say(Request(transfer, AB, AgentName("b", "one"), "llama", TrafficClass.PIPELINE, nbytes))
        queued = await here.heard(Queued)
        assert isinstance(queued, Queued)
        assert queued.transfer == transfer
        assert queued.reason
        granted: dict[int, int] = {}
        begun_s = time.monotonic()
        while sum(granted.values()) < nbytes:
            assert time.monotonic() - begun_s < 10
            grants = [e.message for e in here.events if isinstance(e, CoordinatorSaid) and isinstance(e.message, Grant)]
            granted = {grant.grant: grant.nbytes for grant in grants}
            sent = sum(granted.values())
            here.say(Report(AB, sent, sent, 0, 0, 0, 0, 0, 60_000_000, 60_000_000, 0, 48_000_000, True))
            await asyncio.sleep(0.005)
        assert sum(granted.values()) == nbytes
        here.say(TransferDone(transfer, AB, TrafficClass.PIPELINE, nbytes, True, 1))
        await asyncio.sleep(0.1)
        await here.sessions.close()
        await there.sessions.close()

    run(main)
    seen = scrape(cluster.coordinator.metrics)
    assert seen.total("proxyd_granted_bytes_total", link="a->b") == 8 << 20
    assert seen.total("proxyd_transfer_bytes_total", link="a->b", traffic_class="pipeline") == 8 << 20
    assert seen.total("proxyd_transfers_total", link="a->b", outcome="ok") == 1
    assert seen.total("proxyd_grant_wait_seconds_count", traffic_class="pipeline") == 1
    assert seen.total("proxyd_window_violations_total") == 0
    assert seen.total("proxyd_fallback_bytes_total") == 0
    with grpc.insecure_channel(cluster.coordinator.address) as channel:
        wanted = coordination_pb2.TransferId(incarnation=5, sequence=1)
        story = AdminStub(channel).Why(admin_pb2.WhyRequest(transfer=wanted), timeout=5)
    whats = [decision.what for decision in story.decisions]
    assert whats[:2] == ["requested", "queued"]
    assert whats[-1] == "done"
    assert "granted" in whats


def test_a_wrong_token_is_refused_and_logged(cluster: Cluster) -> None:
    async def main() -> None:
        agent = Agent(cluster, "a", token=b"not the token of this cluster")
        lost = await agent.until(lambda e: isinstance(e, CoordinatorLost))
        assert isinstance(lost, CoordinatorLost)
        assert "unauthenticated" in lost.reason
        assert "token_file" in lost.reason
        await agent.sessions.close()

    run(main)
    assert "another token" in cluster.coordinator.last_words()
    assert scrape(cluster.coordinator.metrics).total("proxyd_agent_sessions") == 0


def test_killed_and_restarted_it_has_its_agents_back_within_five_seconds() -> None:
    with Cluster({"a": 1, "b": 1}, links=FIGURES) as cluster:
        before = scrape(cluster.coordinator.metrics).total("proxyd_epoch")
        assert cluster.kill(cluster.coordinator) == -signal.SIGKILL
        assert cluster.deaths() == []
        cluster.start_coordinator()
        begun_s = time.monotonic()
        cluster.await_sessions(timeout_s=5)
        assert time.monotonic() - begun_s < 5
        assert scrape(cluster.coordinator.metrics).total("proxyd_epoch") > before


def test_sigterm_ends_it_at_once_with_success(cluster: Cluster) -> None:
    begun_s = time.monotonic()
    assert cluster.kill(cluster.coordinator, signal.SIGTERM) == 0
    assert time.monotonic() - begun_s < 2
    assert not Path(cluster.coordinator_socket.removeprefix("unix:")).exists()


def _second(tmp_path: Path, listen: str, metrics: str = "off") -> subprocess.CompletedProcess[str]:
    config = tmp_path / "second.toml"
    config.write_text(f'[coordinator]\nlisten = "{listen}"\nmetrics = "{metrics}"\n')
    begun_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "proxyd.cli.main", "coordinator", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert time.monotonic() - begun_s < 5  # 3 s on a machine that does nothing else
    return done


@pytest.mark.parametrize("kind", ["grpc", "socket", "metrics"])
def test_a_second_one_on_the_same_address_fails_and_says_so(kind: str, cluster: Cluster, tmp_path: Path) -> None:
    busy = {
        "grpc": (cluster.coordinator.address, "off"),
        "socket": (cluster.coordinator_socket, "off"),
        "metrics": ("127.0.0.1:0", cluster.coordinator.metrics.split("/")[2]),
    }[kind]
    done = _second(tmp_path, *busy)
    assert done.returncode == 1
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr
    # The first one still has its place.
    assert scrape(cluster.coordinator.metrics).total("proxyd_build_info") == 1
    with grpc.insecure_channel(cluster.coordinator_socket) as channel:
        assert AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=5).coordinator == "coordinator"


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "coordinator.sock"))
    with (
        Cluster({"a": 0, "b": 0}, directory=tmp_path) as cluster,
        grpc.insecure_channel(cluster.coordinator_socket) as channel,
    ):
        assert AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=5).epoch > 0


def test_health_and_reflection(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.coordinator.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "proxyd.v1.Coordination", "proxyd.v1.Admin"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        [listed] = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=5)
        names = {service.name for service in listed.list_services_response.service}
        assert {"proxyd.v1.Coordination", "proxyd.v1.Admin", "grpc.health.v1.Health"} <= names


def test_an_http_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with Cluster({"a": 1, "b": 0}) as cluster:
        assert cluster.agents[0].pid


def test_a_child_that_cannot_start_is_named_with_its_words() -> None:
    with pytest.raises(ClusterError, match=r"agent a-0 ended with exit code 2 at start.*unknown key 'chnk'"):
        Cluster({"a": 1, "b": 0}, agent={"chnk": "1MiB"}).start()


def _dev(tmp_path: Path, *options: str) -> tuple[subprocess.Popen[str], dict]:
    ready = tmp_path / "ready.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "proxyd.cli.main", "dev", "--ready-file", str(ready), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline_s = time.monotonic() + 30
    while not ready.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return process, json.loads(ready.read_text())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has waited for yet is dead.
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def _gone(pids: list[int], timeout_s: float = 5.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_dev_says_where_everything_is_and_takes_all_with_it(ending: signal.Signals, tmp_path: Path) -> None:
    process, facts = _dev(tmp_path, "--site", "x", "--site", "y", "--agents-per-site", "2")
    pids = [facts["coordinator"]["pid"], *(agent["pid"] for agent in facts["agents"])]
    assert [agent["site"] for agent in facts["agents"]] == ["x", "x", "y", "y"]
    assert set(facts["agents"][0]) == {"site", "name", "socket", "data_address", "metrics", "pid"}
    assert scrape(facts["coordinator"]["metrics"]).total("proxyd_agent_sessions") == 4
    for agent in facts["agents"]:
        assert scrape(agent["metrics"]).total("proxyd_build_info", role="agent") == 1
        assert Path(agent["socket"]).is_socket()
    process.send_signal(ending)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == (-9 if ending == signal.SIGKILL else 0), output
    assert _gone(pids)


def test_dev_tells_of_a_death_and_goes_on(tmp_path: Path) -> None:
    process, facts = _dev(tmp_path)
    os.kill(facts["agents"][0]["pid"], signal.SIGKILL)
    time.sleep(0.6)
    assert process.poll() is None
    assert scrape(facts["agents"][1]["metrics"]).total("proxyd_build_info") == 1
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=10)
    assert "agent a-0 was killed by SIGKILL; the others go on" in output
    assert process.returncode == 0


def test_status_for_people_and_programs(cluster: Cluster) -> None:
    def status(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "proxyd.cli.main", "status", *options],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    address = cluster.coordinator.address
    done = status("--coordinator", address, "--json")
    assert done.returncode == 3, done.stderr  # no agents
    link = json.loads(done.stdout)["links"][0]
    assert link["link"] == {"src_site": "a", "dst_site": "b"}
    assert link["rtt_ns"] == 60_000_000
    assert link["source"] == "configured"
    shown = status("--coordinator", cluster.coordinator_socket)
    assert "a->b" in shown.stdout
    assert "no agents" in shown.stdout
    absent = status("--coordinator", "127.0.0.1:1")
    assert absent.returncode == 1
    assert "no coordinator answers at 127.0.0.1:1" in absent.stderr
    unknown = status("--coordinator", address, "--why", "00000000000000ff-1")
    assert unknown.returncode == 1
    assert "not known" in unknown.stderr


@pytest.mark.netns
def test_dev_on_an_emulated_wan_is_reachable_from_here(tmp_path: Path) -> None:
    process, facts = _dev(tmp_path, "--wan", "rate=100Mbit,rtt=20ms,buffer=0.5bdp")
    try:
        for agent in facts["agents"]:
            assert agent["data_address"].startswith("10.")
            assert scrape(agent["metrics"]).total("proxyd_coordinator_up") == 1
            assert Path(agent["socket"]).is_socket()
        with grpc.insecure_channel(facts["coordinator"]["address"]) as channel:
            status = AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=5)
        [link] = [link for link in status.links if link.link.src_site == "a"]
        # What headers leave of 100 Mbit/s in packets of 9,000 bytes: a live estimate begins at what was told.
        assert link.pace_bytes_per_s == 12_500_000 * (9000 - 52) // 9000
        assert link.buffer_bytes == 125_000
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--site", "x"], "two or more different sites"),
        (["--site", "x", "--site", "x"], "two or more different sites"),
        (["--agents-per-site", "0"], "from 1 to 64"),
        (["--wan", "rate=400Mbit,rrt=60ms"], "'rrt=60ms' is not understood"),
        (["--wan", "rate=400"], "'400' is not a rate"),
        (["--link-capacity", "fast"], "'fast' is not a rate"),
    ],
)
def test_dev_refuses_what_it_cannot_do(options: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proxyd.cli.main", "dev", *options],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
