"""systemd's view of both daemons, with a socket in its place (case 41): ready when it is true, alive while the loop is.

The watchdog's limit is 1.2 s here instead of 30 s; the daemons take a third of whatever it is.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

import proxyd_client
from proxyd.cli.agent_status import fetch
from proxyd.cli.cluster import LinkFigures
from proxyd.cli.scrape import scrape
from tests.e2e.rig import MIB, Net, pattern, until

LONG = os.environ.get("FAULTS_LONG") == "1"
pytestmark = pytest.mark.timeout(700 if LONG else 60)

LIMIT_S = 1.2
SATURATED_S, SATURATED_LIMIT_S = (600.0, 10.0) if LONG else (5.0, LIMIT_S)
_CREDENTIALS = struct.Struct("=iII")
# A handler in Python runs on the main thread between two steps of the loop, and holds both up.
_STUCK_AT_SIGUSR1 = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGUSR1, lambda *_: time.sleep(4))\n"
    "from proxyd.cli.main import main\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


class Systemd:
    """The socket, and what came in: time, pid, text; and whether the daemon accepted when it said that it was ready."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))
        self.heard: list[tuple[float, int, str]] = []
        self.on_ready: Callable[[], object] = lambda: None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            if not select.select([self._socket], [], [], 0.1)[0]:
                continue
            data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
            pid = _CREDENTIALS.unpack(ancillary[0][2])[0]
            if data.startswith(b"READY=1"):
                self.on_ready()
            self.heard.append((time.monotonic(), pid, data.decode()))

    def pings(self, pid: int) -> list[float]:
        """When this process pinged."""
        return [at_s for at_s, source, text in self.heard if source == pid and text == "WATCHDOG=1"]

    def said(self, pid: int, state: str) -> bool:
        return any(source == pid and text.startswith(state) for _, source, text in self.heard)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    one = Systemd(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(one.path))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(LIMIT_S * 1e6)))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    yield one
    one.close()


def test_a_saturated_daemon_pings_in_time_and_not_too_often(
    systemd: Systemd, start: Callable[..., Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While both agents do what they can: at most half the limit apart, at most ten a second."""
    monkeypatch.setenv("WATCHDOG_USEC", str(int(SATURATED_LIMIT_S * 1e6)))
    net = start(links={("a", "b"): LinkFigures("20Gbit", "1ms", "1bdp", estimate="fixed")})
    sender, receiver = net.pair()
    members = net.cluster.members
    for member in members:
        assert systemd.said(member.pid, "READY=1"), member.label
    begun_s = time.monotonic()
    data, out = pattern(32 * MIB), np.empty(32 * MIB, np.uint8)
    while time.monotonic() < begun_s + SATURATED_S:
        handle = sender.isend(data, dst=1)
        receiver.recv_into(out, src=0, timeout_s=20)
        handle.wait(20)
    end_s = time.monotonic()
    for member in members:
        pings = [at_s for at_s in systemd.pings(member.pid) if begun_s <= at_s <= end_s]
        gaps = np.diff([begun_s, *pings, end_s])
        print(f"{member.label}: {len(pings)} pings, {max(gaps):.2f} s apart at most")
        assert max(gaps) <= SATURATED_LIMIT_S / 2, f"{member.label}: {max(gaps):.2f} s without a ping"
        assert len(pings) <= 10 * (end_s - begun_s)
    for member in members:
        net.cluster.kill(member, signal.SIGTERM)
        until(lambda member=member: systemd.said(member.pid, "STOPPING=1"), f"{member.label} says that it stops")
    net.injects_fault("all daemons were stopped")


def test_the_front_speaks_for_its_workers_and_watches_them(systemd: Systemd, start: Callable[..., Net]) -> None:
    """systemd hears the main process alone. A worker whose loop hangs for the limit is killed, and started again."""
    net = start({"a": 1}, each_agent={("a", 0): {"workers": 2, "arena": "16MiB"}})
    net.injects_fault("a worker stands still")
    agent = net.agent("a")
    assert systemd.said(agent.pid, "READY=1")
    first, second = (one.pid for one in fetch(agent.socket).workers)
    os.kill(first, signal.SIGSTOP)
    until(lambda: scrape(agent.metrics).total("proxyd_worker_restarts_total", worker="0") == 1, "it is killed", 20)
    until(lambda: scrape(agent.metrics).total("proxyd_worker_up") == 2, "its next life serves", 20)
    now = [one.pid for one in fetch(agent.socket).workers]
    assert now[1] == second, "the other one is as it was"
    assert first not in now
    assert not [pid for _, pid, _ in systemd.heard if pid in (first, *now)], "a worker says nothing to systemd"
    assert systemd.pings(agent.pid), "and the main process goes on pinging"


def config_of(role: str, directory: Path) -> Path:
    path = directory / f"{role}.toml"
    if role == "agent":
        text = f'[agent]\nsite = "a"\nsocket = "{directory}/a.sock"\ndata_listen = "127.0.0.1:0"\n'
        text += f'coordinators = ["unix:{directory}/c.sock"]\nmetrics = "off"\n'
    else:
        text = f'[coordinator]\nlisten = ["unix:{directory}/c.sock"]\nmetrics = "off"\n'
    path.write_text(text)
    return path


@contextlib.contextmanager
def daemon(role: str, directory: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A daemon whose loop is held up for 4 s by SIGUSR1."""
    command = [sys.executable, "-c", _STUCK_AT_SIGUSR1, role, "--config", str(config_of(role, directory))]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PROXYD_")} | environment
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=kept)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        _, words = process.communicate(timeout=20)
    assert process.returncode == 0, words


@pytest.mark.parametrize("role", ["agent", "coordinator"])
def test_ready_is_said_when_it_is_so_and_a_stuck_loop_pings_no_more(
    role: str, systemd: Systemd, tmp_path: Path
) -> None:
    accepts: list[str] = []

    def try_it() -> None:
        """From the very moment of READY=1: somebody is served, not only put into the kernel's queue."""
        if role == "agent":
            with proxyd_client.connect("job", 0, socket=f"{tmp_path}/a.sock", timeout_s=0.9) as endpoint:
                accepts.append(endpoint.agent_name)
        else:
            with grpc.insecure_channel(f"unix:{tmp_path}/c.sock") as channel:
                stub = HealthStub(channel)
                accepts.append(str(stub.Check(HealthCheckRequest(), timeout=0.9).status))

    systemd.on_ready = try_it
    with daemon(role, tmp_path) as process:
        until(lambda: len(accepts) == 1 and systemd.said(process.pid, "READY=1"), "it is ready", 15)
        until(lambda: len(systemd.pings(process.pid)) >= 2, "it pings")
        process.send_signal(signal.SIGUSR1)
        stuck_s = time.monotonic()
        until(lambda: time.monotonic() - stuck_s > 3.5, "it is stuck for a while", 5)
        late = [at_s - stuck_s for at_s in systemd.pings(process.pid) if stuck_s + 0.3 < at_s < stuck_s + 3.5]
        assert not late, f"pings {late} s after the loop got stuck"
        until(lambda: systemd.pings(process.pid)[-1] > stuck_s + 3.5, "it goes on when the loop does")


@pytest.mark.parametrize("role", ["agent", "coordinator"])
def test_without_systemd_nothing_is_said_and_nothing_is_missing(role: str, tmp_path: Path) -> None:
    where = tmp_path / ("a.sock" if role == "agent" else "c.sock")
    with daemon(role, tmp_path, NOTIFY_SOCKET="", WATCHDOG_USEC="100000") as process:
        until(where.exists, "it listens", 15)
        time.sleep(0.3)
        assert process.poll() is None
