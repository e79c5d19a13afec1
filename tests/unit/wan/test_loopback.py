from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from proxyd.wan import LinkSpec, WanError
from proxyd.wan.loopback import LoopbackWan

RATE = 10_000_000
DELAY_NS = 20_000_000
SPEC = LinkSpec(RATE, None, DELAY_NS, 100_000)


class Echo:
    """Notes what arrives, and says its length back once the sender has finished."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.received: list[bytes] = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while True:
            try:
                peer, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self.one, args=(peer,), daemon=True).start()

    def one(self, peer: socket.socket) -> None:
        data = bytearray()
        with peer:
            while piece := peer.recv(65536):
                data += piece
            self.received.append(bytes(data))
            peer.sendall(str(len(data)).encode())


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.server.close()


def exchange(address: tuple[str, int], data: bytes) -> tuple[str, float]:
    start = time.monotonic()
    with socket.create_connection(address, timeout=20) as peer:
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := peer.recv(100):
            answer += piece
    return answer.decode(), time.monotonic() - start


def test_rate_delay_and_bytes(echo: Echo) -> None:
    data = bytes(range(256)) * 8_000
    with LoopbackWan({("a", "b"): SPEC, ("b", "a"): SPEC}) as wan:
        answer, took = exchange(wan.front("a", "b", echo.server.getsockname()), data)
        counters = wan.counters()
    assert answer == str(len(data))
    assert echo.received == [data]
    # One way out with the data, one way back with the answer; no faster than the link.
    assert took >= len(data) / RATE + 2 * DELAY_NS / 1e9
    assert counters["a->b"].passed_bytes == len(data)
    assert counters["b->a"].passed_bytes == len(answer)
    assert counters["a->b"].queue_peak_bytes <= 100_000


def test_connections_share_the_link(echo: Echo) -> None:
    with LoopbackWan({("a", "b"): SPEC, ("b", "a"): SPEC}) as wan:
        fronts = [wan.front("a", "b", echo.server.getsockname()) for _ in range(3)]
        start = time.monotonic()
        threads = [threading.Thread(target=exchange, args=(front, bytes(500_000))) for front in fronts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - start >= 1_500_000 / RATE
        assert wan.counters()["a->b"].passed_bytes == 1_500_000


def test_a_destination_that_does_not_read_holds_the_sender_back() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        LoopbackWan({("a", "b"): LinkSpec(1_000_000_000, None, 0, 100_000)}) as wan,
        socket.create_connection(wan.front("a", "b", server.getsockname()), timeout=1.0) as peer,
    ):
        held, _ = server.accept()
        # Far more than all socket buffers on the way together; what the proxy held would grow with it.
        with held, pytest.raises(TimeoutError):
            peer.sendall(bytes(256 << 20))
        assert wan.counters()["a->b"].passed_bytes < 64 << 20


def test_a_dead_target_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        target = gone.getsockname()
    with (
        LoopbackWan({("a", "b"): SPEC}) as wan,
        socket.create_connection(wan.front("a", "b", target), timeout=10) as peer,
    ):
        assert peer.recv(1) == b""


def test_close_ends_open_connections_and_is_idempotent(echo: Echo) -> None:
    wan = LoopbackWan({("a", "b"): SPEC, ("b", "a"): SPEC})
    peer = socket.create_connection(wan.front("a", "b", echo.server.getsockname()), timeout=10)
    peer.sendall(b"x")
    wan.close()
    wan.close()
    with peer:
        try:
            assert peer.recv(1) == b""
        except ConnectionResetError:
            pass  # the byte was not read yet when the proxy closed: an end all the same


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(WanError, match="can't lose packets"):
        LoopbackWan({("a", "b"): LinkSpec(RATE, None, 0, 1000, loss=0.1)})
    with LoopbackWan({("a", "b"): SPEC}) as wan, pytest.raises(WanError, match="no link b->a"):
        wan.front("b", "a", ("127.0.0.1", 1))
