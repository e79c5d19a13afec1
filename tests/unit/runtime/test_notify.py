from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxyd.runtime.notify import Notifier


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "n"))
        server.settimeout(5)
        yield server


def test_states_arrive(systemd: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.getsockname()})
    assert notifier.ready("listening on\n127.0.0.1:7601")
    assert notifier.watchdog()
    assert notifier.status("2 peers")
    assert notifier.stopping()
    received = [systemd.recv(1024) for _ in range(4)]
    assert received == [b"READY=1\nSTATUS=listening on 127.0.0.1:7601", b"WATCHDOG=1", b"STATUS=2 peers", b"STOPPING=1"]
    notifier.close()
    assert not notifier.watchdog()


def test_an_abstract_socket_works_too() -> None:
    name = f"proxyd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(f"\0{name}")
        server.settimeout(5)
        assert Notifier({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert server.recv(64) == b"READY=1"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_without_systemd_nothing_happens(environ: dict[str, str]) -> None:
    notifier = Notifier(environ | {"WATCHDOG_USEC": "1000000"})
    assert not notifier.ready()
    assert notifier.ping_interval_ns is None
    notifier.close()


def test_a_vanished_socket_is_no_error(tmp_path: Path) -> None:
    assert not Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()


@pytest.mark.parametrize(
    ("usec", "pid", "ping_ns"),
    [("30000000", "", 10 * 10**9), ("30000000", "self", 10 * 10**9), ("30000000", "1", None), ("0", "", None)]
    + [("", "", None), ("soon", "", None), ("90000", "", 100_000_000)],
)
def test_watchdog_period(systemd: socket.socket, usec: str, pid: str, ping_ns: int | None) -> None:
    environ = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": usec}
    if pid:
        environ["WATCHDOG_PID"] = str(os.getpid()) if pid == "self" else pid
    assert Notifier(environ).ping_interval_ns == ping_ns
