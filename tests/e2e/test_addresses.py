"""Which address an agent tells its peers where a host has several, and links without IPv4 (case 40)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from proxyd.cli.cluster import LinkFigures
from proxyd.wan import LinkSpec, Wan
from tests.e2e.rig import MIB, Net, pattern

pytestmark = pytest.mark.timeout(60)

PAIRS = [("a", "b"), ("b", "a")]
OTHERS = (
    # The same bridge with the same address on every host, as container engines make it.
    "link add docker0 type bridge",
    "addr add 172.17.0.1/16 dev docker0",
    "link set docker0 up",
    # Named like a VLAN of eth0: whoever looks for names that begin with "eth0" finds it.
    "link add eth0.100 type veth peer name other",
    "addr add 192.168.100.7/24 dev eth0.100",
    "link set eth0.100 up",
    "link set other up",
    "addr add 169.254.9.9/16 dev other",
)


@pytest.fixture
def wan() -> Iterator[Wan]:
    """Ask for it before ``start``: it outlives that."""
    spec = LinkSpec(25_000_000, None, 5_000_000, 250_000)
    with Wan({"a": 1, "b": 2}, dict.fromkeys(PAIRS, spec), slow_start_after_idle=False) as one:
        for host in (one.host("a", 0), one.host("b", 0)):
            for line in OTHERS:
                host.run(["ip", *line.split()])
        yield one


@pytest.mark.netns
def test_of_many_interfaces_the_one_that_faces_the_others_is_told(wan: Wan, start: Callable[..., Net]) -> None:
    """One agent listens everywhere and works it out, the other is told an interface by its exact name."""
    figures = LinkFigures("200Mbit", "10ms", "1bdp", mtu=9000, estimate="fixed")
    net = start(
        links=dict.fromkeys(PAIRS, figures),
        wan=wan,
        coordinator_hosts={"coordinator": ("b", 1)},
        each_agent={
            ("a", 0): {"data_listen": "0.0.0.0:7601"},
            ("b", 0): {"data_listen": "0.0.0.0:7601", "data_interface": "eth0"},
        },
    )
    for site in "ab":
        assert net.agent(site).data_address == f"{wan.host(site, 0).address}:7601"
    left, right = net.pair()
    for number, (sender, receiver) in enumerate(((left, right), (right, left))):
        handle = sender.isend(pattern(3 * MIB, number), dst=receiver.rank, tag=1)
        got = receiver.recv(src=sender.rank, tag=1, timeout_s=20)
        assert np.array_equal(got.array, pattern(3 * MIB, number))
        handle.wait(10)
    assert wan.counters()["a->b"].passed_bytes > 3 * MIB
    assert wan.counters()["b->a"].passed_bytes > 3 * MIB


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(
    not has_ipv6() and os.environ.get("CI") != "true",
    reason="no IPv6 on this host's loopback (under CI=true it runs and fails)",
)
def test_agents_that_have_ipv6_only(start: Callable[..., Net]) -> None:
    net = start(agent={"data_listen": "[::1]:0"})
    assert net.agent("a").data_address.startswith("[::1]:")
    sender, receiver = net.pair()
    handle = sender.isend(pattern(3 * MIB), dst=1, tag=1)
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(3 * MIB))
    handle.wait(10)
