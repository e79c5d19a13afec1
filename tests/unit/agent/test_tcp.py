"""Socket options and counters, on real loopback sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from proxyd.agent import tcp
from proxyd.core.errors import ConfigError


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    with one, two:
        yield one, two


@pytest.mark.parametrize(
    ("configured", "slow_start", "available", "chosen"),
    [
        ("auto", "0", "reno bbr cubic", "cubic"),
        ("auto", "1", "reno bbr cubic", "bbr"),
        ("auto", "1", "reno cubic", "cubic"),
        ("auto", "1", "reno", ""),
        ("auto", "0", "reno bbr", ""),
        ("reno", "1", "reno bbr cubic", "reno"),
    ],
)
def test_congestion_control_follows_what_idleness_does(
    configured: str, slow_start: str, available: str, chosen: str
) -> None:
    assert tcp.choose_congestion_control(configured, slow_start, available) == chosen


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), ("", True)])
def test_a_kernel_that_forgets_windows_is_noticed(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setattr(tcp, "read_sysctl", lambda name, default="": value)
    assert tcp.slow_start_after_idle() is on


@pytest.mark.parametrize(
    ("slow_start", "configured", "keeps"),
    [("0", "auto", True), ("0", "cubic", True), ("1", "cubic", False), ("1", "auto", True), ("1", "bbr", True)],
)
def test_which_connections_stay_warm(
    monkeypatch: pytest.MonkeyPatch, slow_start: str, configured: str, keeps: bool
) -> None:
    values = {"tcp_slow_start_after_idle": slow_start, "tcp_available_congestion_control": "reno cubic bbr"}
    monkeypatch.setattr(tcp, "read_sysctl", lambda name, default="": values[name])
    assert tcp.keeps_windows(configured) is keeps


def test_unsent_bytes_are_bounded_by_some_milliseconds() -> None:
    assert tcp.notsent_limit_bytes(0) == 4 << 20
    assert tcp.notsent_limit_bytes(1000) == 16 << 10
    assert tcp.notsent_limit_bytes(50_000_000) == 400_000
    assert tcp.notsent_limit_bytes(50_000_000, yields=True) == 150_000
    assert tcp.notsent_limit_bytes(10**11) == 4 << 20


def test_a_new_stream_has_a_small_window_that_grows(pair: tuple[socket.socket, socket.socket]) -> None:
    state = tcp.read_tcp_state(pair[0])
    assert state.window_grows, "slow start"
    segment = pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    assert state.window_bytes == pytest.approx(state.window_packets * segment, rel=0.05)


def _fill(sock: socket.socket) -> int:
    """Write until the kernel takes no more."""
    sent = 0
    try:
        while sent < 50_000_000:
            sent += sock.send(bytes(200_000))
    except BlockingIOError:
        pass
    return sent


def test_counters_of_a_paced_stream(pair: tuple[socket.socket, socket.socket]) -> None:
    one, two = pair
    tcp.prepare(one, peer_timeout_ns=30_000_000_000, congestion_control="reno")
    tcp.set_pace(one, 1_000_000)
    one.setblocking(False)
    sent = _fill(one)
    state = tcp.read_tcp_state(one)
    assert 0 < state.unsent_bytes <= state.unacked_bytes <= sent
    assert sent < 1_000_000, "the unsent limit held"
    assert state.srtt_ns > 0
    two.recv(10)
    tcp.set_pace(one, 0)
    one.setblocking(True)
    got = 10
    while got < sent:
        got += len(two.recv(1 << 20))
    assert tcp.read_tcp_state(one).unsent_bytes == 0


@pytest.mark.parametrize(
    ("unsent", "in_flight", "window", "pacing", "limited"),
    [
        (100_000, 50, 50, 60_000_000, True),
        (100_000, 30, 50, 60_000_000, False),
        (100_000, 30, 50, 40_000_000, True),
        (0, 50, 50, 40_000_000, False),
    ],
    ids=["window full", "held by our ceiling", "tcp's own pacing is slower", "nothing to send"],
)
def test_what_limits_a_stream(unsent: int, in_flight: int, window: int, pacing: int, limited: bool) -> None:
    state = tcp.TcpState(200_000, unsent, 0, 0, 0, 0, in_flight, window, window * 1448, False, 0, 0, pacing, False)
    assert state.path_limited(50_000_000) is limited


def test_a_window_is_reopened_under_the_same_algorithm(pair: tuple[socket.socket, socket.socket]) -> None:
    """That slow start goes on is shown on a real link: tests/wan/test_kernel_pacing.py."""
    sock = pair[0]
    for name in tcp.read_sysctl("tcp_allowed_congestion_control").split():
        tcp.prepare(sock, peer_timeout_ns=10**10, congestion_control=name)
        able = tcp.reopen_window(sock)
        assert able is (name != "bbr" and "bbr" in tcp.read_sysctl("tcp_available_congestion_control").split())
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode() == name


@pytest.mark.parametrize("refused", [b"bbr", b"cubic"])
def test_an_algorithm_that_is_not_for_us_is_no_error(refused: bytes) -> None:
    """Neither the one that reopens, nor (another process may have set the socket up) the way back."""

    class Strict:
        name = b"cubic"

        def getsockopt(self, *_: object) -> bytes:
            return self.name.ljust(16, b"\0")

        def setsockopt(self, level: int, option: int, name: bytes) -> None:
            if name == refused:
                raise PermissionError(1, "Operation not permitted")
            self.name = name

    assert tcp.reopen_window(Strict()) is False  # type: ignore[arg-type]


def test_an_unknown_congestion_control_is_a_clear_error(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ConfigError, match="congestion control 'nosuch'"):
        tcp.prepare(pair[0], peer_timeout_ns=1, congestion_control="nosuch")


def test_stream_capacity_comes_from_the_kernel() -> None:
    assert tcp.stream_capacity_bytes() >= 64 << 10
    assert tcp.read_sysctl("no_such_thing", "7") == "7"


@pytest.mark.parametrize(
    ("pace", "pacing", "window", "expected_ns"),
    [
        (500_000, 0, 10, 17_896_000),  # 8,948 bytes at 4 Mbit/s: 18 ms that are no queue
        (0, 500_000, 10, 17_896_000),
        (500_000, 250_000, 10, 35_792_000),
        (25_000_000, 0, 10, 357_920),  # at 200 Mbit/s it is next to nothing
        (1_000, 0, 10, tcp.DELAYED_ACK_NS),  # the kernel waits no longer
        (0, 0, 10, 0),
        (500_000, 0, 0, 0),
    ],
)
def test_what_a_delayed_acknowledgement_takes_is_no_queue(
    pace: int, pacing: int, window: int, expected_ns: int
) -> None:
    state = tcp.TcpState(0, 0, 0, 0, 0, 0, 0, window, window * 8948, False, 0, 0, pacing, False)
    assert state.acknowledged_in_pairs_ns(pace) == expected_ns
