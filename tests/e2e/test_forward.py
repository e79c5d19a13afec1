"""Ordinary programs across two sites: a plain port, SOCKS5 and HTTP CONNECT, through real stations and agents."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from proxyd.cli.cluster import LinkFigures
from tests.e2e.rig import MIB, Net, fd_count, pattern, until

PROXYD = Path(sys.executable).with_name("proxyd")
NARROW = LinkFigures("400Mbit", "2ms", "1bdp", estimate="fixed")


class Station:
    """A running ``proxyd forward``."""

    def __init__(self, socket_path: str, *options: str, log: Path) -> None:
        reading, writing = os.pipe()
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [PROXYD, "forward", "--socket", socket_path, "--ready-fd", str(writing), *options],
                pass_fds=[writing],
                stderr=file,
            )
        os.close(writing)
        with os.fdopen(reading, "rb") as ready:
            line = ready.readline()
        assert line.startswith(b"READY "), log.read_text()
        self.doors = [one.rpartition(":") for one in json.loads(line[6:])["doors"]]

    @property
    def door(self) -> tuple[str, int]:
        host, _, port = self.doors[0]
        return host, int(port)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(20) == 0, self.log.read_text()
        assert "Traceback" not in self.log.read_text(), self.log.read_text()


class Server:
    """Answers each connection by what it is given: a function of the connected socket, in a thread."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._serve = serve
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        with contextlib.closing(sock), contextlib.suppress(OSError):
            self._serve(sock)


def received(sock: socket.socket) -> bytes:
    """Until the end of the stream."""
    parts = []
    while part := sock.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def echo_digest(sock: socket.socket) -> None:
    """Takes everything until the client's FIN, then says its digest and sends it all back."""
    got = received(sock)
    sock.sendall(hashlib.sha256(got).digest() + got)


@pytest.fixture
def start_station(start: Callable[..., Net], tmp_path: Path) -> Iterator[Callable[..., Station]]:
    links = {("a", "b"): NARROW, ("b", "a"): NARROW}
    net = start({"a": 1, "b": 1}, links=links, agent={"resolve_timeout": "2s"})
    with ExitStack() as stack:

        def begin(site: str, *options: str) -> Station:
            log = tmp_path / f"{site}-{len(list(tmp_path.glob('*.log')))}.log"
            station = Station(net.agent(site).socket, *options, log=log)
            stack.callback(station.close)
            return station

        begin.net = net  # type: ignore[attr-defined]
        yield begin


def taken(net: Net, link: str) -> float:
    return net.moved().taken[link]


def test_a_plain_port_carries_both_ways_half_closes_and_goes_under_grants(
    start_station: Callable[..., Station],
) -> None:
    server = Server(echo_digest)
    start_station("b", "--allow", f"127.0.0.1/32:{server.port}")
    door = start_station("a", "--listen", "127.0.0.1:0", "--to", "b", "--target", f"127.0.0.1:{server.port}").door
    for size in (0, 1, 70_000, 24 * MIB + 3):
        data = pattern(size).tobytes()
        with socket.create_connection(door, timeout=60) as client:
            sender = threading.Thread(target=lambda c=client, d=data: (c.sendall(d), c.shutdown(socket.SHUT_WR)))
            sender.start()
            got = received(client)
            sender.join()
        assert got[:32] == hashlib.sha256(data).digest(), size
        assert got[32:] == data, size
    net: Net = start_station.net  # type: ignore[attr-defined]
    for link in ("a->b", "b->a"):
        moved = net.moved()
        assert moved.taken[link] >= 0.9 * 24 * MIB  # what is large asks first
        assert moved.unscheduled[link] <= 0.1 * 24 * MIB


def test_curl_through_socks_and_http(start_station: Callable[..., Station], tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        assert os.environ.get("CI") != "true", "tools/prepare.sh tests did not bring curl"
        pytest.skip("curl is not installed")
    content = pattern(8 * MIB).tobytes()

    def serve(sock: socket.socket) -> None:
        while b"\r\n\r\n" not in sock.recv(65536):
            pass
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(content) + content)

    server = Server(serve)
    start_station("b", "--allow", f"127.0.0.1/32:{server.port}")
    socks = start_station("a", "--listen", "127.0.0.1:0", "--to", "b", "--socks5").door
    http = start_station("a", "--listen", "127.0.0.1:0", "--to", "b", "--http").door

    def fetch(*options: str, port: int = server.port, host: str = "127.0.0.1") -> tuple[int, str, bytes]:
        into = tmp_path / "got"
        into.unlink(missing_ok=True)
        command = [
            curl,
            "-sS",
            "--noproxy",
            "",
            "--max-time",
            "60",
            *options,
            "-o",
            str(into),
            f"http://{host}:{port}/",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
        return done.returncode, done.stderr, into.read_bytes() if into.exists() else b""

    for options in (
        ("--socks5", f"{socks[0]}:{socks[1]}"),
        ("--socks5-hostname", f"{socks[0]}:{socks[1]}"),
        ("--proxytunnel", "--proxy", f"http://{http[0]}:{http[1]}"),
    ):
        code, why, got = fetch(*options)
        assert (code, hashlib.sha256(got).digest()) == (0, hashlib.sha256(content).digest()), (options, why)
    # What the exit doesn't allow, and what isn't there.
    code, why, _ = fetch("--proxytunnel", "--proxy", f"http://{http[0]}:{http[1]}", port=server.port + 1)
    assert code != 0
    assert "403" in why
    code, why, _ = fetch("--socks5-hostname", f"{socks[0]}:{socks[1]}", host="no-such-name.invalid")
    assert code != 0
    code, why, _ = fetch("--socks5", f"{socks[0]}:{socks[1]}", port=server.port + 1)
    assert code == 97, why  # refused by the proxy


def test_nothing_listens_and_nobody_is_the_exit(start_station: Callable[..., Station]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    door = start_station("a", "--listen", "127.0.0.1:0", "--to", "b", "--http").door

    def asked() -> str:
        with socket.create_connection(door, timeout=40) as client:
            client.sendall(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
            return received(client).decode().partition("\r\n")[0]

    assert asked() == "HTTP/1.1 502 Bad Gateway"  # no station at site b
    start_station("b", "--allow", "127.0.0.1/32:*")
    assert asked() == "HTTP/1.1 502 Bad Gateway"  # refused there


def test_what_breaks_is_a_reset_on_both_sides_and_never_a_short_success(start_station: Callable[..., Station]) -> None:
    seen: list[str] = []

    def serve(sock: socket.socket) -> None:
        try:
            while sock.recv(1 << 16):
                pass
            seen.append("a whole one")
        except ConnectionResetError:
            seen.append("reset")

    server = Server(serve)
    exit_ = start_station("b", "--allow", "127.0.0.1/32:*")
    entry = start_station("a", "--listen", "127.0.0.1:0", "--to", "b", "--target", f"127.0.0.1:{server.port}")
    net: Net = start_station.net  # type: ignore[attr-defined]
    net.injects_fault("stations are killed")

    # A client that breaks off.
    client = socket.create_connection(entry.door, timeout=20)
    client.sendall(bytes(3 * MIB))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    until(lambda: seen == ["reset"], "the server hears of it", 20)

    # A station that dies in the middle.
    client = socket.create_connection(entry.door, timeout=20)
    client.sendall(bytes(MIB))
    time.sleep(0.2)
    exit_.process.kill()
    exit_.process.wait()
    with pytest.raises(ConnectionResetError):
        received(client)
    client.close()
    until(lambda: seen == ["reset", "reset"], "the server hears of a reset, too", 20)

    # And the next one works.
    start_station("b", "--allow", "127.0.0.1/32:*")
    with socket.create_connection(entry.door, timeout=20) as client:
        client.sendall(b"x")
        client.shutdown(socket.SHUT_WR)
        assert received(client) == b""
    assert seen[2:] == ["a whole one"]


def test_a_server_that_reads_nothing_holds_back_its_own_connection_only(start_station: Callable[..., Station]) -> None:
    go = threading.Event()

    def serve(sock: socket.socket) -> None:
        if sock.recv(1) == b"s":  # stuck
            go.wait(60)
        echo_digest(sock)

    server = Server(serve)
    start_station("b", "--allow", "127.0.0.1/32:*")
    entry = start_station("a", "--listen", "127.0.0.1:0", "--to", "b", "--target", f"127.0.0.1:{server.port}")
    descriptors = fd_count(entry.process.pid)
    with socket.create_connection(entry.door, timeout=60) as stuck:
        stuck.setblocking(False)
        stuck.send(b"s")
        pushed, quiet_s = 1, time.monotonic()
        while time.monotonic() - quiet_s < 1.0 and pushed < 256 * MIB:
            with contextlib.suppress(BlockingIOError):
                pushed += stuck.send(bytes(MIB))
                quiet_s = time.monotonic()
            time.sleep(0.001)
        assert pushed < 96 * MIB  # windows and socket buffers, and no more
        data = pattern(4 * MIB).tobytes()
        with socket.create_connection(entry.door, timeout=60) as other:
            other.sendall(b"o" + data)
            other.shutdown(socket.SHUT_WR)
            assert received(other)[32:] == data
        go.set()
        stuck.setblocking(True)
        stuck.settimeout(60)
        stuck.shutdown(socket.SHUT_WR)
        assert len(received(stuck)) == 32 + pushed - 1
    until(lambda: fd_count(entry.process.pid) <= descriptors, "descriptors are given back", 10)


def test_a_missing_agent_is_a_clear_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [PROXYD, "forward", "--socket", str(tmp_path / "none.sock"), "--allow", "127.0.0.1/32:*"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "no agent to forward through" in done.stderr
    assert "Traceback" not in done.stderr
