"""The proxy that the fault tests trust."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.faults.proxy import FlakyProxy

TIMEOUT_S = 5.0


@pytest.fixture
def echo(proxy: FlakyProxy) -> Iterator[FlakyProxy]:
    """In front of a server that sends everything back."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(peer: socket.socket) -> None:
        with peer:
            try:
                while data := peer.recv(1 << 16):
                    peer.sendall(data)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(peer,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    proxy.target = server.getsockname()
    yield proxy
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def dial(proxy: FlakyProxy) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S)
    sock.settimeout(TIMEOUT_S)
    return sock


def exchange(sock: socket.socket, data: bytes) -> bytes:
    """Send from a thread, read as much back."""
    sender = threading.Thread(target=sock.sendall, args=(data,), daemon=True)
    sender.start()
    got = bytearray()
    while len(got) < len(data) and (piece := sock.recv(1 << 16)):
        got += piece
    sender.join(TIMEOUT_S)
    return bytes(got)


def read_to_the_end(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        pass


def test_everything_passes_and_the_end_does_too(echo: FlakyProxy) -> None:
    data = os.urandom(8 << 20)
    with dial(echo) as sock:
        assert hashlib.sha256(exchange(sock, data)).digest() == hashlib.sha256(data).digest()
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(10) == b""
    assert echo.passed == {"up": len(data), "down": len(data)}
    assert (echo.accepted, echo.flipped) == (1, 0)


def test_the_byte_that_was_named_is_flipped_and_no_other(echo: FlakyProxy) -> None:
    data = os.urandom(1 << 20)
    with dial(echo) as sock:
        exchange(sock, b"before")
        echo.flip(0, "up")
        echo.flip(777_777, "down")
        got = exchange(sock, data)
    assert [(at, a ^ b) for at, (a, b) in enumerate(zip(got, data, strict=True)) if a != b] == [(0, 16), (777_777, 16)]
    assert echo.flipped == 2


@pytest.mark.parametrize("ways", ["both", "up", "down"])
def test_a_stall_holds_and_heals(echo: FlakyProxy, ways: str) -> None:
    with dial(echo) as sock:
        assert exchange(sock, b"a") == b"a"
        echo.stall(ways)  # type: ignore[arg-type]
        sock.settimeout(0.2)
        sock.sendall(b"b")
        with pytest.raises(TimeoutError):
            sock.recv(1)
        with dial(echo):
            pass
        echo.heal()
        sock.settimeout(TIMEOUT_S)
        assert sock.recv(1) == b"b"


def test_a_reset_is_one_on_both_sides_also_while_data_is_stuck(echo: FlakyProxy) -> None:
    with dial(echo) as idle, dial(echo) as busy:
        exchange(idle, b"a")
        busy.settimeout(0.2)
        with pytest.raises(TimeoutError):
            busy.sendall(bytes(64 << 20))  # nobody reads the echo
        echo.reset()
        for sock in (idle, busy):
            sock.settimeout(TIMEOUT_S)
            with pytest.raises(ConnectionResetError):
                read_to_the_end(sock)
        assert echo.connections == 0
    with dial(echo) as sock:
        assert exchange(sock, b"again") == b"again"


def test_a_cut_ends_and_refuses_until_it_is_healed(echo: FlakyProxy) -> None:
    with dial(echo) as sock:
        exchange(sock, b"a")
        echo.cut()
        assert sock.recv(1) == b""
    with pytest.raises(ConnectionError), dial(echo) as sock:
        sock.recv(1)
    echo.heal()
    with dial(echo) as sock:
        assert exchange(sock, b"b") == b"b"


def test_one_connection_is_slow_and_the_others_are_not(echo: FlakyProxy) -> None:
    with dial(echo) as slow, dial(echo) as other:
        for sock in (slow, other):
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
        echo.slow(0, 400_000)
        begun_s = time.monotonic()
        threading.Thread(target=slow.sendall, args=(bytes(200_000),), daemon=True).start()
        other.sendall(bytes(100_000))
        assert len(received(other, 100_000)) == 100_000
        assert time.monotonic() - begun_s < 0.4
        assert len(received(slow, 200_000)) == 200_000
        assert 0.4 < time.monotonic() - begun_s < 2
        echo.heal()
        begun_s = time.monotonic()
        slow.sendall(bytes(400_000))
        assert len(received(slow, 400_000)) == 400_000
        assert time.monotonic() - begun_s < 0.7


def received(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes and (piece := sock.recv(1 << 16)):
        data += piece
    return data
