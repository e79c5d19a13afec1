"""The faults that can be switched on while the emulated WAN runs, each seen by real sockets."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from proxyd.wan import Host, LinkFaults, LinkSpec, Wan, WanError, available

REASON = available()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.faults,
    pytest.mark.skipif(REASON is not None and os.environ.get("CI") != "true", reason=f"no emulated WAN: {REASON}"),
]

SPEC = LinkSpec(25_000_000, None, 5_000_000, 400_000)
SERVER = """
import hashlib, json, socket, threading
def serve(peer):
    digest, count, error = hashlib.sha256(), 0, ""
    try:
        while data := peer.recv(1 << 16):
            digest.update(data)
            count += len(data)
        peer.sendall(b"k")
    except OSError as failure:
        error = failure.strerror
    print(json.dumps([count, digest.hexdigest(), error]) + "\\n", end="", flush=True)
server = socket.create_server(("0.0.0.0", 5001))
print("up", flush=True)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
CLIENT = """
import socket, sys, time
try:
    peer = socket.create_connection((sys.argv[1], 5001), float(sys.argv[3]))
except OSError:
    sys.exit("no connection")
data = bytes(range(251)) * 4096
left = int(sys.argv[2])
try:
    while left:
        piece = data[:left]
        peer.sendall(piece)
        left -= len(piece)
    peer.shutdown(socket.SHUT_WR)
    print("end" if peer.recv(1) else "closed")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Wan]:
    with Wan({"a": 2, "b": 2}, {("a", "b"): SPEC, ("b", "a"): SPEC}) as wan:
        yield wan


@pytest.fixture
def wan(shared: Wan) -> Iterator[Wan]:
    yield shared
    shared.heal()


@pytest.fixture
def server(wan: Wan) -> Iterator[subprocess.Popen[str]]:
    process = wan.host("b", 0).popen([sys.executable, "-u", "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def send(wan: Wan, nbytes: int, timeout_s: float = 10.0, host: Host | None = None) -> subprocess.Popen[str]:
    source = host or wan.host("a", 0)
    arguments = [wan.host("b", 0).address, str(nbytes), str(timeout_s)]
    return source.popen(
        [sys.executable, "-c", CLIENT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=30)[0].strip()


def heard(server: subprocess.Popen[str]) -> tuple[int, str, str]:
    assert server.stdout is not None
    count, digest, error = json.loads(server.stdout.readline())
    return count, digest, error


def digest_of(nbytes: int) -> str:
    data = bytes(range(251)) * 4096
    whole, rest = divmod(nbytes, len(data))
    return hashlib.sha256(data * whole + data[:rest]).hexdigest()


def test_a_bit_that_tcp_does_not_notice(wan: Wan, server: subprocess.Popen[str]) -> None:
    before = wan.counters()["a->b"]
    wan.tamper("a->b", LinkFaults(corrupt=0.02))
    assert ended(send(wan, 4_000_000)) == "end"
    count, digest, _ = heard(server)
    assert count == 4_000_000
    assert digest != digest_of(4_000_000)
    assert wan.counters()["a->b"].since(before).corrupted_packets > 0


def test_repeated_and_reordered_packets_are_tcps_business(wan: Wan, server: subprocess.Popen[str]) -> None:
    before = wan.counters()["a->b"]
    wan.tamper("both", LinkFaults(duplicate=0.05, reorder=0.05, reorder_ns=2_000_000))
    assert ended(send(wan, 4_000_000)) == "end"
    assert heard(server)[:2] == (4_000_000, digest_of(4_000_000))
    since = wan.counters()["a->b"].since(before)
    assert since.duplicated_packets > 0
    assert since.reordered_packets > 0


def test_a_reset_ends_both_sides_and_a_new_connection_works(wan: Wan, server: subprocess.Popen[str]) -> None:
    client = send(wan, 1 << 30)
    time.sleep(0.5)
    wan.reset("a->b")
    assert ended(client) in ("ConnectionResetError", "BrokenPipeError")
    assert heard(server)[2] == "Connection reset by peer"
    assert wan.counters()["a->b"].reset_packets == 1
    wan.heal()
    assert ended(send(wan, 1000)) == "end"
    assert heard(server)[0] == 1000


def test_large_packets_that_vanish(wan: Wan, server: subprocess.Popen[str]) -> None:
    wan.tamper("a->b", LinkFaults(mtu_bytes=1400))
    assert ended(send(wan, 200, 2.0)) == "end", "small ones pass"
    assert heard(server)[0] == 200
    assert ended(send(wan, 100_000, 2.0)) == "TimeoutError"
    assert wan.counters()["a->b"].oversized_packets > 0


@pytest.mark.parametrize("direction", ["both", "a->b", "b->a", "a-0<->b-0"])
def test_a_cut_is_silent_and_what_was_under_way_goes_on(
    direction: str, wan: Wan, server: subprocess.Popen[str]
) -> None:
    client = send(wan, 20_000_000)
    time.sleep(0.3)
    wan.cut(direction)
    time.sleep(0.1)
    passed_bytes = wan.counters()["a->b"].passed_bytes
    time.sleep(0.4)
    assert wan.counters()["a->b"].passed_bytes - passed_bytes < 20_000 or direction == "b->a"
    assert client.poll() is None
    assert ended(send(wan, 1000, 0.5, wan.host("a", 1))) == ("end" if direction == "a-0<->b-0" else "no connection")
    wan.heal(direction)
    assert ended(client) == "end"
    heard_of = [heard(server)[:2] for _ in range(2 if direction == "a-0<->b-0" else 1)]
    assert heard_of[-1] == (20_000_000, digest_of(20_000_000))


def test_a_cable_that_is_pulled(wan: Wan, server: subprocess.Popen[str]) -> None:
    host = wan.host("a", 0)
    wan.plug(host, False)
    assert "NO-CARRIER" in host.run(["ip", "link", "show", "eth0"]).stdout
    assert ended(send(wan, 1000, 0.5)) == "no connection"
    wan.plug(host)
    assert ended(send(wan, 1000)) == "end"
    assert heard(server)[0] == 1000


def test_directions_that_there_are_not(wan: Wan) -> None:
    for wrong in ("a->c", "a-0->b", "a-0->b-9", "b", "a-0<->"):
        with pytest.raises(WanError, match="is no direction; say 'both', a link"):
            wan.cut(wrong)
    with pytest.raises(WanError, match="no link a-0->b-0"):
        wan.tamper("a-0->b-0", LinkFaults())
