"""Case 39: what a stranger says is never run, costs next to nothing, and harms nobody. With a token, and with TLS."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxyd.cli.certificates import Authority, settings
from proxyd.cli.cluster import Cluster
from proxyd.wire import peer as wire
from tests.integration.relay_rig import content, endpoints, exchange, until

GROWTH_BYTES = 1 << 20


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


def sayings(bomb: Path) -> list[bytes]:
    agent = {"site": "b", "name": "b-0", "to_site": "a", "to_name": "a-0"}
    hello = wire.Hello(
        version=wire.PROTOCOL_VERSION,
        purpose=wire.StreamPurpose.CONTROL,
        stream=0,
        incarnation=5,
        nonce=bytes(32),
        mac=b"",
        **agent,
    )
    return [
        pickle.dumps(Bomb(bomb)),
        os.urandom(5000),
        struct.pack("<IHHQ", 0xFFFF_FFFF, 2, 0, 1 << 60) + bytes(100),
        (1 << 60).to_bytes(8, "little") * 8,
        (1 << 60).to_bytes(8, "big") * 8,
        wire.encode(hello),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00" * 20,
    ]


@pytest.fixture(scope="module", params=["token", "tls"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("strangers")
    agent: dict[str, object] = {"gateway_listen": "127.0.0.1:0"}
    each, coordinator = {}, {}
    if request.param == "tls":
        authority = Authority(directory / "ca.pem")
        coordinator = settings(authority.coordinator(directory / "c"))
        each = {(site, 0): settings(authority.agent(directory / site, site)) for site in "ab"}
    with Cluster({"a": 1, "b": 1}, agent=agent, each_agent=each, coordinator=dict(coordinator)) as one:
        yield one


def rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def say(address: str, text: bytes) -> None:
    """And listen until hung up on: within ten seconds, or it is an error."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=12) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(text)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass


@pytest.mark.parametrize("door", ["data", "gateway", "control"])
def test_a_stranger_is_closed_on_and_nothing_of_what_it_said_is_run(
    cluster: Cluster, tmp_path: Path, door: str
) -> None:
    agent = cluster.agent("a")
    member = cluster.coordinator if door == "control" else agent
    address = {
        "data": agent.data_address,
        "gateway": str(agent.facts["gateway_address"]),
        "control": cluster.coordinator.address,
    }[door]
    bomb = tmp_path / "bomb"
    for text in sayings(bomb):
        say(address, text)  # what is loaded for the first time is loaded
    before = rss_bytes(member.pid)
    for text in sayings(bomb) * 3:
        say(address, text)
    until(lambda: rss_bytes(member.pid) - before < GROWTH_BYTES, 5)
    assert not bomb.exists()
    with endpoints((cluster.agent("a"), 0), (cluster.agent("b"), 1)) as (one, two):
        exchange(one, two, content(2_000_000, 3), src=0, dst=1, tag=1)
