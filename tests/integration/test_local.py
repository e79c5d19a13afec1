"""One agent and its local trainers: memory handed over, misbehaving clients, second instances."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import proxyd_client
from proxyd.cli.cluster import AgentMember, Cluster
from proxyd.cli.scrape import scrape
from proxyd.wire import client as wire
from proxyd.wire.envelope import ErrorCode
from tests.integration.relay_rig import ROOT, RawClient, alive, content, endpoints, exchange, script, until

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster({"a": 1}) as running:
        yield running


@pytest.fixture(scope="module")
def agent(cluster: Cluster) -> AgentMember:
    return cluster.agent("a")


def gauge(agent: AgentMember, name: str) -> float:
    return scrape(agent.metrics).total(name)


def test_between_trainers_of_one_host_memory_is_handed_over(cluster: Cluster, agent: AgentMember) -> None:
    before = scrape(agent.metrics).total("proxyd_received_bytes_total")
    with endpoints((agent, 0), (agent, 1)) as (one, two):
        for seed, nbytes in enumerate([0, 1, 64 << 10, (64 << 10) + 1, 3 * MIB, 300 * MIB]):
            exchange(one, two, content(nbytes, seed), src=0, dst=1, tag=7)
            exchange(two, one, content(nbytes, seed + 9), src=1, dst=0, tag=7)
        exchange(one, one, content(1000, 5), src=0, dst=0, tag=1)
    assert scrape(agent.metrics).total("proxyd_received_bytes_total") == before, "nothing crossed TCP"
    assert alive(cluster)


def test_a_message_outlives_the_sender_that_completed_it(agent: AgentMember) -> None:
    with endpoints((agent, 1)) as (two,):
        data = content(5 * MIB, 3)
        with endpoints((agent, 0)) as (one,):
            one.isend(data, dst=1, tag=4)
            message = two.recv(src=0, tag=4, timeout_s=10)
        until(lambda: gauge(agent, "proxyd_clients") == 1)
        assert np.array_equal(message.array, data)


def test_the_block_of_a_small_message_comes_back_though_nobody_is_in_a_hurry(agent: AgentMember) -> None:
    """Neither side writes a frame only for it: it leaves with the next one, or after a moment."""
    with endpoints((agent, 0), (agent, 1)) as (one, two):
        arenas = one._session.sender._arenas
        for number in range(300):
            data = content(4096, number)
            exchange(one, two, data, src=0, dst=1, tag=number)
            exchange(two, one, data, src=1, dst=0, tag=number)
        posted = [one.isend(content(4096, number), dst=1, tag=1) for number in range(40)]
        out = np.zeros(4096, np.uint8)
        for number in range(40):
            two.recv_into(out, 0, 1, timeout_s=10)
            assert np.array_equal(out, content(4096, number))
        for handle in posted:
            handle.wait(10)
        until(lambda: arenas.used_bytes == 0)


def test_memory_of_a_killed_trainer_comes_back(agent: AgentMember) -> None:
    used = gauge(agent, "proxyd_arena_bytes")
    text = """
import os, sys, time, proxyd_client
ep = proxyd_client.connect("job", 8, socket=sys.argv[1])
if os.fork() == 0:  # a child that inherits the connection must not keep its parent alive
    time.sleep(30)
print("there", flush=True)
time.sleep(30)
"""
    with script(text, agent.socket) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert gauge(agent, "proxyd_arena_bytes") > used
        child.kill()
        began_s = time.monotonic()
        until(lambda: gauge(agent, "proxyd_arena_bytes") == used)
        assert time.monotonic() - began_s < 4  # 2 s, and what a busy machine adds
        child.stdout.close()


def test_an_arena_cannot_be_truncated_by_its_client(cluster: Cluster, agent: AgentMember) -> None:
    client = RawClient(agent, 0)
    for fd in client.fds:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 1 << 40)
    client.close()
    assert alive(cluster)


def test_garbage_in_its_own_arenas_hurts_nobody(cluster: Cluster, agent: AgentMember) -> None:
    client = RawClient(agent, 0)
    for granted, fd in zip(client.arenas, client.fds, strict=True):
        with mmap.mmap(fd, granted.size_bytes) as mapped:
            mapped[: 1 << 20] = b"\xa5" * (1 << 20)
    with endpoints((agent, 1), (agent, 2)) as (two, three):
        exchange(two, three, content(MIB, 1), src=1, dst=2, tag=0)
        two.isend(content(MIB, 2), dst=0, tag=7)
        offered = client.expect(wire.Offered)
        assert offered.envelope.nbytes == MIB
        client.send(wire.Release(offered.incarnation, offered.sequence))
    client.close()
    assert alive(cluster)


def post(client: RawClient, **changes: object) -> wire.PostSend:
    fields = {
        "sequence": 1,
        "envelope": client.envelope(1, 100),
        "arena": client.arenas[0].arena,
        "offset": 4096,
        "filled_bytes": 100,
        **changes,
    }
    return wire.PostSend(**fields)  # type: ignore[arg-type]


def bad_frames(client: RawClient) -> dict[str, list[wire.Frame]]:
    size = client.arenas[0].size_bytes
    return {
        "offset beyond the end": [post(client, offset=size)],
        "length beyond the end": [post(client, envelope=client.envelope(1, size), filled_bytes=0)],
        "inside the header page": [post(client, offset=64)],
        "an arena of nobody": [post(client, arena=12345)],
        "its receive arena": [post(client, arena=client.arenas[1].arena)],
        "another name": [post(client, envelope=client.envelope(1, 100, src=5))],
        "filled beyond the message": [post(client, filled_bytes=101)],
        "16 EiB": [post(client, envelope=client.envelope(1, (1 << 64) - 1), filled_bytes=0)],
        "sequence twice": [post(client), post(client)],
        "filled further than long": [post(client, filled_bytes=0), wire.SendFilled(1, 1000)],
        "a frame of the agent's": [wire.SendDone(1)],
        "hello twice": [wire.Hello(wire.PROTOCOL_VERSION, "job", 0, 1, 1, bytes(32), b"", True)],
    }


KINDS = [
    "offset beyond the end",
    "length beyond the end",
    "inside the header page",
    "an arena of nobody",
    "its receive arena",
    "another name",
    "filled beyond the message",
    "16 EiB",
    "sequence twice",
    "filled further than long",
    "a frame of the agent's",
    "hello twice",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_breaks_the_protocol_loses_its_session_only(
    cluster: Cluster, agent: AgentMember, kind: str
) -> None:
    with endpoints((agent, 1), (agent, 2)) as (two, three):
        client = RawClient(agent, 0)
        client.send(*bad_frames(client)[kind])
        bye = client.last_words()
        assert bye is not None
        assert bye.code == ErrorCode.PROTOCOL
        client.close()
        exchange(two, three, content(70_000, 1), src=1, dst=2, tag=0)
    assert alive(cluster)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 64, os.urandom(4096), b"GET / HTTP/1.0\r\n\r\n", b"\x80\x04\x95a pickle of something"]
)
def test_strangers_on_the_socket_are_closed(cluster: Cluster, agent: AgentMember, garbage: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(agent.socket)
        sock.sendall(garbage)
        try:
            while sock.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert alive(cluster)


def test_the_newest_process_of_a_rank_wins(agent: AgentMember) -> None:
    with endpoints((agent, 0), (agent, 1)) as (old, other), endpoints((agent, 0)) as (new,):
        until(lambda: gauge(agent, "proxyd_clients") == 2)
        with pytest.raises(proxyd_client.ClosedError, match="newest"):
            old.recv(src=1, tag=0, timeout_s=5)
        exchange(other, new, content(1000, 2), src=1, dst=0, tag=0)


def test_an_incarnation_attaches_once(agent: AgentMember) -> None:
    client = RawClient(agent, 0, incarnation=77)
    with pytest.raises(AssertionError, match="before a Welcome"):
        RawClient(agent, 0, incarnation=77)
    client.send(wire.LinkStateWanted(1, 1))
    assert "not registered" in client.expect(wire.LinkState).error
    client.close()


def test_a_cancelled_send_leaves_the_next_one_right(agent: AgentMember) -> None:
    with endpoints((agent, 1)) as (two,):
        client = RawClient(agent, 0)
        client.send(post(client, filled_bytes=10), wire.CancelSend(1))
        assert client.expect(wire.SendFailed).code == ErrorCode.CANCELLED
        client.send(post(client, sequence=2))
        assert two.recv(src=0, tag=7, timeout_s=5).nbytes == 100
        client.close()


def test_memory_beyond_the_cap_is_refused_with_numbers(agent: AgentMember) -> None:
    client = RawClient(agent, 0)
    client.send(wire.ArenaWanted(1 << 40))
    refused = client.expect(wire.ArenaRefused)
    assert refused.wanted_bytes == 1 << 40
    assert str(8 << 30) in refused.message
    client.send(wire.ArenaWanted(600 << 20))
    assert client.expect(wire.ArenaGranted).size_bytes >= 600 << 20
    client.close()


def run_agent(tmp_path: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    """A second agent, to its end."""
    config = {
        "site": "a",
        "name": "second",
        "socket": str(tmp_path / "second.sock"),
        "data_listen": "127.0.0.1:0",
        "metrics": "off",
        **settings,
    }
    path = tmp_path / "second.toml"
    path.write_text("[agent]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items()))
    return subprocess.run(
        [sys.executable, "-m", "proxyd.cli.main", "agent", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=ROOT,
        check=False,
    )


def test_a_second_agent_on_a_live_socket_says_so(cluster: Cluster, agent: AgentMember, tmp_path: Path) -> None:
    done = run_agent(tmp_path, socket=agent.socket)
    assert done.returncode == 1
    assert "in use" in done.stderr
    assert agent.socket in done.stderr
    assert "Traceback" not in done.stderr
    with endpoints((agent, 0), (agent, 1)) as (one, two):
        exchange(one, two, content(1000, 2), src=0, dst=1, tag=0)


def test_a_busy_data_port_says_so(cluster: Cluster, agent: AgentMember, tmp_path: Path) -> None:
    done = run_agent(tmp_path, data_listen=agent.data_address)
    assert done.returncode == 1
    assert "address already in use" in done.stderr.lower()
    assert agent.data_address in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "second.sock").exists(), "nothing is left behind"


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with Cluster({"a": 1}, directory=tmp_path / "run") as cluster:
        cluster.kill(cluster.agent("a"))
        assert Path(cluster.agent("a").socket).exists()
        cluster.restart_agent("a")
        with endpoints((cluster.agent("a"), 0)) as (one,):
            assert one.site == "a"
        assert os.stat(cluster.agent("a").socket).st_mode & 0o777 == 0o660
