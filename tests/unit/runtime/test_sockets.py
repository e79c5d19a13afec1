from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from proxyd.runtime.sockets import Remote, connected_to, remote_of

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TCP = HEAD + (
    "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n"
    "   1: 0100000A:1F90 0700000A:D431 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 20 4 30 10 -1\n"
    "   2: 0100000A:1F90 0800000A:D432 06 00000000:00000000 03:00001767 00000000     0        0 0 3 0\n"
    "   3: 0100000A:1F91 0900000A:D433 01 00000000:00000000 00:00000000 00000000     0        0 3 1 0 20 4 30 10 -1\n"
    "   4: 0100000A:D434 0900000A:1F90 01 00000000:00000000 00:00000000 00000000     0        0 4 1 0 20 4 30 10 -1\n"
)
TCP6 = HEAD + (
    "   0: 0000000000000000FFFF00000100000A:1F90 0000000000000000FFFF00000B00000A:D435 01 00000000:00000000\n"
    "   1: B80D0120000000000000000001000000:1F90 B80D0120000000000000000002000000:D436 01 00000000:00000000\n"
)


@pytest.mark.skipif(sys.byteorder != "little", reason="these are lines of a little-endian host")
def test_whoever_is_connected_to_the_port_and_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "tcp").write_text(TCP)
    (tmp_path / "tcp6").write_text(TCP6)
    assert connected_to([8080], [tmp_path / "tcp", tmp_path / "tcp6", tmp_path / "none"]) == {
        Remote("10.0.0.7", 0xD431),
        Remote("10.0.0.11", 0xD435),
        Remote("2001:db8::2", 0xD436),
    }
    assert connected_to([], [tmp_path / "tcp"]) == set()
    (tmp_path / "tcp").write_text("")
    assert connected_to([8080], [tmp_path / "tcp"]) == set()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_tells_of_real_ones(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"this host has no {host}: {error}")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        assert connected_to([server.getsockname()[1]]) == {Remote(host, client.getsockname()[1])}


@pytest.mark.parametrize(
    ("peer", "remote"),
    [
        ("ipv4:10.0.0.7:54321", Remote("10.0.0.7", 54321)),
        ("ipv6:%5B2001:db8::2%5D:5", Remote("2001:db8::2", 5)),
        ("ipv6:[::ffff:10.0.0.7]:5", Remote("10.0.0.7", 5)),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", Remote("fe80::1", 5)),
        ("unix:", None),
        ("unix:/run/proxyd/coordinator.sock", None),
        ("ipv4:", None),
        ("ipv4:nobody:5", None),
        ("", None),
    ],
)
def test_peers_as_grpc_calls_them(peer: str, remote: Remote | None) -> None:
    assert remote_of(peer) == remote
