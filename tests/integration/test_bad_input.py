"""Bad input from a person: wrong configuration, places that are taken, agents that aren't there (cases 10, 42).

Each ends soon, with the exit code or the typed error that its documentation names, and in words: what, why, what next.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import proxyd_client
from proxyd.cli.cluster import Cluster
from proxyd_client import AgentUnavailable, ConfigError, PeerLost

pytestmark = pytest.mark.timeout(60)

SOON_S = 3.0
START_S = 7.0
"""What the start of an interpreter may add where all processors are busy with others."""
SLACK_S = 2.0
"""What such a machine may add to a call."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster({"a": 1, "b": 1}, agent={"resolve_timeout": "1s"}) as one:
        yield one
        assert not one.deaths()


def daemon(role: str, config: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a daemon that is expected to refuse."""
    begun_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "proxyd.cli.main", role, "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        env={**os.environ, **environment},
    )
    assert time.monotonic() - begun_s < SOON_S + START_S
    assert "Traceback" not in done.stderr
    assert not done.stdout
    return done


def agent_config(tmp_path: Path, **keys: str) -> Path:
    """A working configuration with some keys changed; values are written as they are."""
    lines = {
        "site": '"a"',
        "name": '"second"',
        "socket": f'"{tmp_path}/agent.sock"',
        "data_listen": '"127.0.0.1:0"',
        "metrics": '"off"',
        "coordinators": '["127.0.0.1:1"]',
    } | keys
    path = tmp_path / "agent.toml"
    path.write_text("[agent]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items()))
    return path


def exchange(cluster: Cluster, job: str) -> None:
    """A message from a to b, byte by byte: the daemons are as well as before."""
    with (
        proxyd_client.connect(job, 0, socket=cluster.agent("a").socket) as sender,
        proxyd_client.connect(job, 1, socket=cluster.agent("b").socket) as receiver,
    ):
        data = np.arange(300_000, dtype=np.uint32)
        handle = sender.isend(data, dst=1, tag=1)
        assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=10).array, data)
        handle.wait(10)


# -- configuration --------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "misspelt key": ({"memroy": '"1GiB"'}, ("agent.toml:8", "memroy", "memory")),
    "rate without unit": ({"eager": '"lots"'}, ("eager", "lots")),
    "negative": ({"linger": '"-1s"'}, ("linger", "-1s")),
    "wrong type": ({"site": "7"}, ("agent.toml:2", "site")),
    "arena beyond memory": ({"memory": '"64MiB"', "arena": '"64MiB"'}, ("memory", "64MiB")),
    "open to the world": ({"data_listen": '"0.0.0.0:0"'}, ("data_listen", "token_file", "openssl rand")),
    "no port": ({"data_listen": '"127.0.0.1"'}, ("data_listen", "127.0.0.1")),
    "no such token": ({"token_file": '"/nonexistent/token"'}, ("/nonexistent/token", "openssl rand")),
    "long socket path": ({"socket": f'"/tmp/{"x" * 115}"'}, ("socket", "107")),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_configuration_is_refused_with_exit_code_2(which: str, tmp_path: Path) -> None:
    keys, words = WRONG[which]
    path = agent_config(tmp_path, **keys)
    done = daemon("agent", path)
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    if "token" not in which:
        # The same verdict without starting.
        checked = _check(path)
        assert checked.returncode == 2
        assert words[0] in checked.stderr + checked.stdout


def _check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proxyd.cli.main", "check", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


@pytest.mark.parametrize("content", ["site =", "\x00\x01", "[agent]\nsite = 'a'\nsite = 'b'\n", "", "[coordinator]\n"])
def test_a_file_that_is_no_agents_configuration(content: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(content)
    done = daemon("agent", path)
    assert done.returncode == 2
    assert str(path) in done.stderr


def test_no_file_and_an_unknown_variable(tmp_path: Path) -> None:
    done = daemon("agent", tmp_path / "missing.toml")
    assert done.returncode == 2
    assert "missing.toml" in done.stderr
    done = daemon("agent", agent_config(tmp_path), PROXYD_SOKCET="/tmp/x")
    assert done.returncode == 2
    assert "PROXYD_SOKCET" in done.stderr
    assert "PROXYD_SOCKET" in done.stderr


# -- places that are taken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["socket", "data_listen", "metrics", "gateway_listen"])
def test_a_second_agent_on_a_taken_place(place: str, cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.agent("a")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        keys = {
            "socket": f'"{first.socket}"',
            "data_listen": f'"{first.data_address}"',
            "metrics": f'"{first.metrics.split("/")[2]}"',
            "gateway_listen": f'"127.0.0.1:{taken.getsockname()[1]}"',
        }
        done = daemon("agent", agent_config(tmp_path, **{place: keys[place]}))
    assert done.returncode == 1
    assert "in use" in done.stderr, done.stderr
    assert place.split("_")[0] in done.stderr or keys[place].strip('"') in done.stderr
    # The first one still has its place, and nothing was left behind.
    assert stat.S_ISSOCK(os.stat(first.socket).st_mode)
    assert not (tmp_path / "agent.sock").exists()
    exchange(cluster, f"after-{place}")


@pytest.mark.parametrize("listen", ["address", "socket"])
def test_a_second_coordinator_on_a_taken_place(listen: str, cluster: Cluster, tmp_path: Path) -> None:
    taken = cluster.coordinator.address if listen == "address" else cluster.coordinator_socket
    path = tmp_path / "coordinator.toml"
    path.write_text(f'[coordinator]\nlisten = ["{taken}"]\nmetrics = "off"\n')
    done = daemon("coordinator", path)
    assert done.returncode == 1
    assert "in use" in done.stderr, done.stderr
    exchange(cluster, f"coordinator-{listen}")


def test_a_stale_socket_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    config = agent_config(tmp_path)
    running = subprocess.Popen(
        [sys.executable, "-m", "proxyd.cli.main", "agent", "--config", str(config)], stderr=subprocess.PIPE, text=True
    )
    try:
        with proxyd_client.connect("job", 0, socket=str(path), timeout_s=10) as endpoint:
            assert endpoint.agent_name == "second"
    finally:
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=10)
    assert running.returncode == 0
    assert not path.exists()
    path.write_text("precious")
    done = daemon("agent", config)
    assert done.returncode == 1
    assert str(path) in done.stderr
    assert path.read_text() == "precious"


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    done = daemon("agent", agent_config(tmp_path, socket=f'"{tmp_path}/no/such/agent.sock"'))
    assert done.returncode == 1
    assert "/no/such" in done.stderr


# -- a trainer that looks for its agent --------------------------------------------------------------------------------


def test_no_agent_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "agent.sock")
    begun_s = time.monotonic()
    with pytest.raises(AgentUnavailable, match=r"no agent answered at .* within 0.5 s: there is no such socket"):
        proxyd_client.connect("job", 0, socket=path, timeout_s=0.5)
    assert 0.3 < time.monotonic() - begun_s < 0.5 + SLACK_S
    monkeypatch.setenv("PROXYD_SOCKET", path)
    with pytest.raises(AgentUnavailable, match="PROXYD_SOCKET"):
        proxyd_client.connect("job", 0, timeout_s=0)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(AgentUnavailable, match="nobody listens there"):
        proxyd_client.connect("job", 0, timeout_s=0.2)


def test_an_address_that_can_never_work_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for address, words in (
        ("/tmp/" + "x" * 115, "120 bytes"),
        (str(file), "is not a socket"),
        ("tcp://nowhere", "no TCP address"),
        ("tcp://127.0.0.1:99999", "no TCP address"),
        ("", "is empty"),
    ):
        begun_s = time.monotonic()
        with pytest.raises(ConfigError, match=words):
            proxyd_client.connect("job", 0, socket=address, timeout_s=10)
        assert time.monotonic() - begun_s < SLACK_S


def test_somebody_else_listens_there(tmp_path: Path) -> None:
    path = str(tmp_path / "other.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()

        def answer() -> None:
            client, _ = other.accept()
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            client.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="is no proxyd agent"):
            proxyd_client.connect("job", 0, socket=path, timeout_s=5)
        thread.join()
        # One that accepts and says nothing: no hang.
        begun_s = time.monotonic()
        with pytest.raises(AgentUnavailable):
            proxyd_client.connect("job", 0, socket=path, timeout_s=0.5)
        assert time.monotonic() - begun_s < 0.5 + SLACK_S


def test_an_unknown_destination(cluster: Cluster) -> None:
    with (
        proxyd_client.connect("unknown", 0, socket=cluster.agent("a").socket) as sender,
        proxyd_client.connect("unknown", 1, socket=cluster.agent("b").socket),
        proxyd_client.connect("another", 7, socket=cluster.agent("b").socket),
    ):
        begun_s = time.monotonic()
        with pytest.raises(PeerLost, match=r"unknown/7.*known ranks of job 'unknown': \[0, 1\].*[Cc]heck the rank"):
            sender.send(b"x", dst=7, timeout_s=20)
        assert 1 <= time.monotonic() - begun_s < 1 + SLACK_S
        with pytest.raises(PeerLost, match=r"rank 7 is not registered \(known: \[0, 1\]\)"):
            sender.link_state(7)
    exchange(cluster, "unknown-after")


def test_a_message_that_can_never_fit(tmp_path: Path) -> None:
    with Cluster({"a": 1, "b": 1}, agent={"memory": "16MiB", "arena": "4MiB"}) as small:
        with proxyd_client.connect("job", 0, socket=small.agent("a").socket) as sender:
            with pytest.raises(ConfigError, match=r"can never fit.*16777216.*Raise the agent's memory limit"):
                sender.isend(np.zeros(17 << 20, np.uint8), dst=1)
            with pytest.raises(ConfigError, match=r"no memory for a message of 10485760 bytes.*Raise"):
                sender.isend(np.zeros(10 << 20, np.uint8), dst=1, timeout_s=5)
        exchange(small, "fits")
