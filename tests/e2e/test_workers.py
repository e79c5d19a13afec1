"""An agent with two worker processes behind one address of each kind ([agent] workers)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import proxyd_client
from proxyd.cli.agent_status import fetch
from proxyd.cli.cluster import AgentMember, Cluster, ClusterError
from proxyd.cli.main import main
from proxyd.cli.scrape import Scrape, scrape
from proxyd.wire import routing
from tests.e2e.rig import MIB, CountedEndpoint, Net, Trainer, end_well, pattern, until
from tests.e2e.test_faults import SLOW, fixed_ports

pytestmark = pytest.mark.timeout(60)

WORKERS = {"workers": 2, "arena": "16MiB", "gateway_listen": "127.0.0.1:0"}
ECHO = (
    "while (line := hear().strip()):\n"
    "    nbytes, peer = map(int, line.split())\n"
    "    sent = ep.isend(pattern(nbytes, ep.rank), dst=peer, tag=1)\n"
    "    got = ep.recv(src=peer, tag=1, timeout_s=20)\n"
    "    assert np.array_equal(got.array, pattern(nbytes, peer)), 'bytes differ'\n"
    "    sent.wait(20)\n"
    "    del got\n"
    "    say('done')\n"
)
"""Swaps a message of so many bytes with a rank, again and again."""


def workers_of(agent: AgentMember) -> list[int]:
    """The pids of its worker processes, by number."""
    return [one.pid for one in fetch(agent.socket).workers]


def clients_of(agent: AgentMember) -> list[float]:
    page = scrape(agent.metrics)
    return [page.total("proxyd_clients", worker=str(number)) for number in (0, 1)]


def is_there(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def of_each(page: Scrape, name: str) -> list[float]:
    return [page.total(name, worker=str(number)) for number in (0, 1)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster({"a": 1, "b": 1}, each_agent={("a", 0): WORKERS}) as one:
        yield one
        pids = workers_of(one.agent("a"))
        end_well(one)
        assert not any(map(is_there, pids)), "a worker is left"


@pytest.fixture
def net(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Net]:
    one = Net(cluster, request.node.name[:60])
    try:
        yield one
        one.prove()
    finally:
        one.close()


def test_trainers_are_spread_and_each_reaches_each_through_one_address(net: Net) -> None:
    agent = net.agent("a")
    before = scrape(agent.metrics)
    trainers = [Trainer(net, rank, "a", ECHO) for rank in (0, 1)]
    until(lambda: clients_of(agent) == [1, 1], "each worker has one")
    log = agent.log_path.read_text()
    for trainer in trainers:
        [line] = [line for line in log.splitlines() if f"pid={trainer.process.pid}" in line]
        assert "client attached" in line, "a worker takes the trainer, not the front, for its client"
        assert re.search(r"worker=[01]\b", line)
    far = net.connect(8, "b")
    nbytes = 3 * MIB + 17
    for trainer, rank in zip(trainers, (0, 1), strict=True):
        trainer.say(f"{nbytes} 8")
        handle = far.isend(pattern(nbytes, 8), dst=rank, tag=1)
        got = far.recv(src=rank, tag=1, timeout_s=20)
        assert np.array_equal(got.array, pattern(nbytes, rank))
        handle.wait(20)
        del got
        assert trainer.hear() == "done"
        net.also_sent("a->b", nbytes)
    # The two are at different workers, and so are two agents of one site to each other.
    for trainer, other in zip(trainers, (1, 0), strict=True):
        trainer.say(f"{nbytes} {other}")
    assert [trainer.hear() for trainer in trainers] == ["done", "done"]
    page = scrape(agent.metrics)
    for name in ("proxyd_granted_bytes_total", "proxyd_received_bytes_total", "process_cpu_seconds_total"):
        grown = [now - then for now, then in zip(of_each(page, name), of_each(before, name), strict=True)]
        assert min(grown) > 0, f"{name}: both workers have a part in it, {grown}"
    assert page.total("proxyd_worker_up") == 2
    assert page.total("proxyd_worker_restarts_total") == 0


def test_a_trainer_over_the_gateway_port(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(net.cluster.token_file))
    near = net.connect(0, "a", socket=f"tcp://{net.agent('a').facts['gateway_address']}")
    far = net.connect(1, "b")
    handle = near.isend(pattern(MIB), dst=1, tag=1)
    assert np.array_equal(far.recv(src=0, tag=1, timeout_s=20).array, pattern(MIB))
    handle.wait(10)


def test_who_asks_the_agent_hears_of_the_whole(net: Net, capsys: pytest.CaptureFixture[str]) -> None:
    agent = net.agent("a")
    near, far = net.pair()
    near.isend(pattern(1000), dst=1, tag=1).wait(10)
    assert far.recv(src=0, tag=1, timeout_s=10).nbytes == 1000
    status = fetch(agent.socket)
    assert (status.agent.name, status.pid, status.data_address) == ("a-0", agent.pid, agent.data_address)
    assert [one.agent.name for one in status.workers] == ["a-0#0", "a-0#1"]
    assert status.coordinators[0].connected
    assert len(status.trainers) == sum(len(one.trainers) for one in status.workers) == 1
    assert main(["status", "--agent", agent.socket]) == 0
    said = capsys.readouterr().out
    assert "#0" in said
    assert "#1" in said
    assert main(["health", "--agent", agent.socket]) == 0
    assert main(["ping", "b/b-0", "--agent", agent.socket, "--count", "1"]) == 0
    from_b = ["--agent", net.agent("b").socket, "--address", agent.data_address, "--count", "1"]
    for name in ("a-0#0", "a-0#1"):
        # From the other side, to either worker, over the address of both.
        assert main(["ping", f"a/{name}", *from_b]) == 0


def test_draining_holds_what_all_workers_get(net: Net) -> None:
    agent = net.agent("a")
    near, far = net.pair()
    near.knows(1)
    assert main(["drain", "--agent", agent.socket]) == 0
    try:
        assert [one.draining for one in fetch(agent.socket).workers] == [True, True]
        handle = near.isend(pattern(1000), dst=1, tag=1)
        until(lambda: fetch(agent.socket).held_transfers == 1, "it is held")
    finally:
        assert main(["undrain", "--agent", agent.socket]) == 0
    assert far.recv(src=0, tag=1, timeout_s=10).nbytes == 1000
    handle.wait(10)


def test_a_file_that_is_read_again_is_read_by_all(net: Net) -> None:
    agent = net.agent("a")
    name = "proxyd_config_reloads_total"

    def reloads(outcome: str) -> list[float]:
        page = scrape(agent.metrics)
        return [page.total(name, worker=worker, outcome=outcome) for worker in ("0", "1", "front")]

    file = net.cluster.directory / "a-0.toml"
    good = file.read_text()
    before = reloads("used")
    agent.process.send_signal(signal.SIGHUP)
    until(lambda: reloads("used") == [count + 1 for count in before], "all have read it")
    try:
        file.write_text(good + "nonsense\n")
        agent.process.send_signal(signal.SIGHUP)
        until(lambda: reloads("refused")[2] == 1, "it is refused")
    finally:
        file.write_text(good)
    assert reloads("refused") == [0, 0, 1], "and no worker sees a file that is not good"
    log = agent.log_path
    log.write_text(log.read_text().replace(" ERROR proxyd.agent: the file was not read again", ""))


def test_what_no_worker_could_start_with_is_said_once(tmp_path: Path) -> None:
    tls = {f"tls_{name}": str(tmp_path / name) for name in ("certificate", "key", "ca")}
    with pytest.raises(ClusterError, match="exit code 2") as caught:
        Cluster({"a": 1}, each_agent={("a", 0): {**WORKERS, **tls}}).start()
    assert str(caught.value).count("proxyd: ") == 1


def test_an_end_that_is_asked_for_before_all_workers_serve(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    settings = {"site": "a", "name": "a", "socket": str(tmp_path / "s"), "metrics": "off", "data_listen": "127.0.0.1:0"}
    lines = [f'{key} = "{value}"' for key, value in settings.items()]
    file.write_text("\n".join(["[agent]", "workers = 2", *lines]))
    with subprocess.Popen([sys.executable, "-m", "proxyd.cli.main", "agent", "--config", str(file)]) as front:
        children = Path(f"/proc/{front.pid}/task/{front.pid}/children")
        try:
            until(lambda: len(children.read_text().split()) == 2, "both are started")
            pids = list(map(int, children.read_text().split()))
            os.kill(pids[0], signal.SIGSTOP)
            front.send_signal(signal.SIGTERM)
            assert front.wait(10) == 0
        finally:
            front.kill()
    assert not any(map(is_there, pids)), "a worker is left"


def said_to(agent: AgentMember, words: bytes) -> bytes:
    """What the data port answers, until it hangs up."""
    host, _, port = agent.data_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=15) as sock:
        sock.sendall(words)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while len(answer) < 20_000 and (piece := sock.recv(4096)):
                answer += piece
                if words == routing.preamble(1):
                    break  # it waits for our hello
        return answer


def test_strangers_at_the_data_port(net: Net) -> None:
    agent = net.agent("a")
    before = scrape(agent.metrics)
    assert said_to(agent, routing.preamble(1)), "a worker that is there says its challenge"
    assert said_to(agent, routing.preamble(7)) == b"", "one that is not there says nothing"
    said_to(agent, b"\x16\x03\x01\x02\x00 no preamble" + bytes(100))  # worker 0 hangs up on it
    host, _, port = agent.data_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=15) as sock:
        sock.sendall(routing.preamble(0)[:9])
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(10) == b"", "half a preamble"

    # An agent without workers is never meant by one: it is no hello there.
    other = net.agent("b")
    was = scrape(other.metrics).total("proxyd_refused_connections_total", door="data", reason="hello")
    said_to(other, routing.preamble(0) + bytes(100))
    until(
        lambda: scrape(other.metrics).total("proxyd_refused_connections_total", door="data", reason="hello") > was,
        "it is refused, and counted",
    )

    def refused(reason: str, worker: str) -> float:
        name = "proxyd_refused_connections_total"
        labels = {"door": "data", "reason": reason, "worker": worker}
        return scrape(agent.metrics).total(name, **labels) - before.total(name, **labels)

    assert refused("worker", "front") == 1
    assert refused("hello", "front") == 1
    until(lambda: refused("hello", "0") >= 1, "worker 0 has counted what was no hello")


def test_a_worker_and_then_the_front_are_killed_in_the_middle(start: Callable[..., Net]) -> None:
    """What the dead worker had under way goes on with its next life, byte by byte and once; the other's trainers don't
    notice. With the front all workers end; then each trainer goes on with the worker that it had."""
    ports = fixed_ports()
    ports["a", 0] |= {"workers": 2, "arena": "16MiB"}
    net = start(links=SLOW, each_agent=ports)
    net.injects_fault("a worker, and the front, are killed")
    agent = net.agent("a")
    trainers = [Trainer(net, 0, "a", ECHO), Trainer(net, 1, "a", ECHO)]
    until(lambda: clients_of(agent) == [1, 1], "each worker has one")
    first = [0, 1] if "a-0#0" in str(where(agent, net.job, 0)) else [1, 0]
    far = [net.connect(8, "b"), net.connect(9, "b")]
    swap(trainers, far)
    pids = workers_of(agent)
    killed = trainers[first.index(0)]
    until(lambda: net.moved().received > MIB, "payload is under way")
    os.kill(pids[0], signal.SIGKILL)
    swapped(trainers, far)
    assert killed.process.poll() is None
    page = scrape(agent.metrics)
    assert of_each(page, "proxyd_worker_restarts_total") == [1, 0]
    assert of_each(page, "proxyd_client_reconnects_total") == [1, 0]
    assert workers_of(agent)[1] == pids[1] != pids[0]
    assert where(agent, net.job, 0) == f"a-0#{first[0]}"

    swap(trainers, far)
    pids = workers_of(agent)
    received = net.moved().received
    until(lambda: net.moved().received > received + MIB, "payload is under way")
    net.cluster.kill(agent)
    until(lambda: not any(map(is_there, pids)), "no worker is left", 5)
    agent = net.cluster.restart_agent("a")
    swapped(trainers, far)
    assert [where(agent, net.job, rank) for rank in (0, 1)] == [f"a-0#{number}" for number in first]
    assert of_each(scrape(agent.metrics), "proxyd_client_reconnects_total") == [1, 1]
    until(lambda: "started again" in agent.log_path.read_text(), "the log says so")
    began_s = time.monotonic()
    pids = workers_of(agent)
    assert net.cluster.kill(agent, signal.SIGTERM) == 0
    assert time.monotonic() - began_s < 5
    assert not any(map(is_there, pids)), "a worker is left"


def where(agent: AgentMember, job: str, rank: int) -> str:
    """The worker that a trainer is at."""
    for one in fetch(agent.socket).workers:
        if any((trainer.job, trainer.rank) == (job, rank) for trainer in one.trainers):
            return one.agent.name
    return ""


SWAPPED = 4 * MIB


def swap(trainers: list[Trainer], far: list[CountedEndpoint]) -> None:
    for trainer, end, rank in zip(trainers, far, (0, 1), strict=True):
        trainer.say(f"{SWAPPED} {end.rank}")
        end.isend(pattern(SWAPPED, end.rank), dst=rank, tag=1)


def swapped(trainers: list[Trainer], far: list[CountedEndpoint]) -> None:
    for trainer, end, rank in zip(trainers, far, (0, 1), strict=True):
        got = end.recv(src=rank, tag=1, timeout_s=30)
        assert np.array_equal(got.array, pattern(SWAPPED, rank))
        del got
        assert trainer.hear() == "done"
        with pytest.raises(proxyd_client.ProxydError):
            end.recv(src=rank, tag=1, timeout_s=0.1)  # once
