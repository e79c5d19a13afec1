"""The commands of whoever operates it, on real daemons: drain, ping, health, status of an agent, doctor."""

from __future__ import annotations

import json
import os
import signal
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxyd.cli.cluster import AgentMember, Cluster
from proxyd.cli.main import main
from proxyd.cli.scrape import scrape
from tests.integration.relay_rig import content, endpoints, exchange, until

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster({"a": 1, "b": 1}) as running:
        yield running


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command with --json; answers (exit code, what it said)."""

    def run(*argv: str) -> tuple[int, Any]:
        capsys.readouterr()
        code = main([*argv, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(autouse=True)
def undrained(cluster: Cluster) -> Iterator[None]:
    yield
    main(["undrain", "--coordinator", cluster.coordinator_socket])
    for agent in cluster.agents:
        main(["undrain", "--agent", agent.socket])


def a(cluster: Cluster) -> AgentMember:
    return cluster.agent("a")


def gauge(url: str, name: str) -> float:
    return scrape(url).total(name)


@pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
def test_an_agent_that_drains_holds_what_is_posted_and_sends_it_afterwards(
    cluster: Cluster, ask: Any, nbytes: int
) -> None:
    agent = a(cluster)
    with endpoints((agent, 0), (cluster.agent("b"), 1)) as (one, two):
        exchange(one, two, content(nbytes, 1), src=0, dst=1, tag=1)
        code, told = ask("drain", "--agent", agent.socket, "--wait", "10s")
        assert (code, told["draining"], told["under_way_transfers"]) == (0, True, 0)
        first, second = content(nbytes, 2), content(nbytes, 3)
        handles = [one.isend(first, dst=1, tag=2), one.isend(second, dst=1, tag=2)]
        until(lambda: gauge(agent.metrics, "proxyd_held_transfers") == 2)
        assert gauge(agent.metrics, "proxyd_draining") == 1
        code, health = ask("health", "--agent", agent.socket)
        assert (code, health[0]["state"]) == (3, "draining")
        code, status = ask("status", "--agent", agent.socket)
        assert (code, status["held_transfers"], status["outgoing_transfers"]) == (3, 2, 0)
        # The other direction isn't drained.
        exchange(two, one, content(nbytes, 4), src=1, dst=0, tag=3)
        assert not any(handle.done() for handle in handles)
        assert ask("undrain", "--agent", agent.socket)[1]["draining"] is False
        for data in (first, second):
            message = two.recv(src=0, tag=2, timeout_s=30)
            assert bytes(message.array) == bytes(data)
            del message
        for handle in handles:
            handle.wait(timeout_s=30)


def test_a_trainer_hears_why_its_message_waits(cluster: Cluster) -> None:
    from proxyd_client import TransferTimeout

    agent = a(cluster)
    with endpoints((agent, 0), (cluster.agent("b"), 1)) as (one, _):
        assert main(["drain", "--agent", agent.socket]) == 0
        handle = one.isend(content(MIB, 1), dst=1, tag=1)
        with pytest.raises(TransferTimeout, match="agent drains"):
            handle.wait(timeout_s=0.3)


def test_an_agent_may_be_stopped_while_it_drains(cluster: Cluster, ask: Any) -> None:
    """What it held is posted again to its next life, once."""
    agent = a(cluster)
    with endpoints((agent, 0), (cluster.agent("b"), 1)) as (one, two):
        exchange(one, two, content(MIB, 1), src=0, dst=1, tag=1)
        assert ask("drain", "--agent", agent.socket, "--wait", "10s")[0] == 0
        data = [content(MIB, 2), content(1000, 3)]
        handles = [one.isend(some, dst=1, tag=2) for some in data]
        until(lambda: gauge(agent.metrics, "proxyd_held_transfers") == 2)
        assert cluster.kill(agent, signal.SIGTERM) == 0
        cluster.restart_agent("a")
        for some in data:
            message = two.recv(src=0, tag=2, timeout_s=30)
            assert bytes(message.array) == bytes(some)
            del message
        for handle in handles:
            handle.wait(timeout_s=30)
        assert gauge(a(cluster).metrics, "proxyd_draining") == 0, "it is kept nowhere"


def test_a_coordinator_that_drains_grants_nothing_new(cluster: Cluster, ask: Any) -> None:
    where = cluster.coordinator_socket
    with endpoints((a(cluster), 0), (cluster.agent("b"), 1)) as (one, two):
        exchange(one, two, content(3 * MIB, 1), src=0, dst=1, tag=1)
        assert ask("drain", "--coordinator", where, "--wait", "10s")[0] == 0
        data = content(3 * MIB, 2)
        handle = one.isend(data, dst=1, tag=2)
        until(lambda: gauge(cluster.coordinator.metrics, "proxyd_held_transfers") >= 1)
        code, health = ask("health", "--coordinator", where)
        assert (code, health[0]["state"]) == (3, "draining")
        code, status = ask("status", "--coordinator", where)
        assert status["draining"]
        assert not handle.done()
        # Small ones ask for nothing.
        exchange(two, one, content(8 * KIB, 4), src=1, dst=0, tag=3)
        assert not ask("undrain", "--coordinator", where)[1]["draining"]
        assert bytes(two.recv(src=0, tag=2, timeout_s=30).array) == bytes(data)
        handle.wait(timeout_s=30)
        assert ask("health", "--coordinator", where)[1][0]["state"] == "serving"


def test_ping_dials_a_peer_and_uses_its_link_when_there_is_one(cluster: Cluster, ask: Any) -> None:
    agent = a(cluster)
    ping = ("ping", "b/b-0", "--agent", agent.socket, "--count", "3", "--interval-ms", "0")
    code, told = ask(*ping, "--coordinator", cluster.coordinator_socket)
    assert (code, len(told["rtt_ns"]), told["error"], told["dialled"]) == (0, 3, "", True)
    assert told["large_rtt_ns"]
    assert told["path_mtu"] > told["segment_bytes"] > 0
    with endpoints((agent, 0), (cluster.agent("b"), 1)) as (one, two):
        exchange(one, two, content(MIB, 1), src=0, dst=1, tag=1)
        code, told = ask(*ping)
        assert (code, told["dialled"], len(told["rtt_ns"])) == (0, False, 3)
        assert told["link"]["rate_bytes_per_s"] > 0
        exchange(one, two, content(MIB, 2), src=0, dst=1, tag=1)  # the link has taken no harm


def test_ping_says_why_there_is_no_answer(cluster: Cluster, ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--agent", a(cluster).socket)
    code, told = ask("ping", "b/b-0", *where, "--address", "127.0.0.1:9")
    assert code == 1
    assert "refused" in told["error"].lower()
    assert main(["ping", "b/nobody", *where]) == 1
    assert "--address" in capsys.readouterr().err
    # Somebody else answers there than was meant: names are part of the proof.
    code, told = ask("ping", "b/other", *where, "--address", cluster.agent("b").data_address)
    assert code == 1
    assert "b/b-0" in told["error"]


def test_only_the_agents_own_user_may_ask_it(cluster: Cluster) -> None:
    for agent in cluster.agents:
        admin = agent.facts["admin"]
        assert admin == agent.socket + ".admin"
        assert stat.S_IMODE(os.stat(admin).st_mode) == 0o600


def test_top_shows_links_and_an_agent(cluster: Cluster, ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    once = ("top", "--once", "--interval-s", "0.1")
    code, told = ask(*once, "--coordinator", cluster.coordinator_socket)
    assert (code, set(told["delivered_bytes_per_s"])) == (0, {"a->b", "b->a"})
    assert main([*once, "--agent", a(cluster).socket]) == 0
    assert "agent a/a-0" in capsys.readouterr().out


def test_bugreport_of_running_daemons(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "report.tar.gz"
    configs = [str(cluster.directory / f"{name}.toml") for name in ("a-0", "coordinator")]
    log = str(cluster.directory / "a-0.log")
    assert main(["bugreport", "--config", configs[0], "--config", configs[1], "--log", log, "--output", str(out)]) == 0
    with tarfile.open(out) as archive:
        names = {Path(one.name).name for one in archive.getmembers()}
        content = b"".join(archive.extractfile(one).read() for one in archive.getmembers())  # type: ignore[union-attr]
    assert {"status-agent.json", "status-coordinator.json", "log-a-0.log.txt"} <= names
    assert cluster.token_file.read_bytes().strip() not in content


def test_doctor_finds_the_daemons_that_run(cluster: Cluster, ask: Any) -> None:
    files = [str(cluster.directory / f"{name}.toml") for name in ("a-0", "coordinator")]
    _, told = ask("doctor", "--config", files[0], "--config", files[1])
    found = {one["name"]: one for one in told["checks"]}
    # A small machine can't hold the arenas that this cluster may grow; nothing else is wrong with any.
    assert [name for name, one in found.items() if one["status"] == "fail" and name != "memory"] == []
    for name in (
        "agent",
        "agent socket",
        f"reach coordinator {cluster.coordinator_socket}",
        "coordinator",
        "reach peer b/b-0",
    ):
        assert found[name]["status"] == "ok", found[name]
    assert {name for name in found if name.startswith("link ")} == {"link a->b", "link b->a"}
    assert "in full packets" in found["reach peer b/b-0"]["detail"]
    assert main(["drain", "--agent", a(cluster).socket]) == 0
    told = ask("doctor", "--config", files[0])[1]
    found = {one["name"]: one for one in told["checks"]}
    assert found["agent"]["status"] == "warn"
    assert "proxyd undrain" in found["agent"]["fix"]
