"""Boxes between hosts that swallow packets and tell nobody: a narrower tunnel, a NAT that forgets (cases 45 and 32).

``FAULTS_LONG=1`` adds idle data connections, whose bounds can't be shortened: the kernel's keepalive comes every 15 s.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from proxyd.cli.cluster import LinkFigures
from proxyd.cli.main import main
from proxyd.wan import LinkFaults, LinkSpec, Wan
from proxyd_client import PeerLost
from tests.e2e.rig import MIB, CountedEndpoint, Counters, Health, Net, pattern

LONG = os.environ.get("FAULTS_LONG") == "1"
pytestmark = [pytest.mark.netns, pytest.mark.timeout(120 if LONG else 60)]

SPEC = LinkSpec(12_500_000, None, 10_000_000, 250_000)
PAIRS = [("a", "b"), ("b", "a")]
TOLD = dict.fromkeys(PAIRS, LinkFigures("100Mbit", "20ms", "1bdp", estimate="fixed"))
SIZE = 4 * MIB
PEER_TIMEOUT_S = 3.0
DEAD_PATH_S = 7.0
"""Data that nobody acknowledges ends its connection after this, or after ``peer_timeout`` if that is shorter."""
SLACK_S = 4.0
"""What a host that does other things too may add."""


@pytest.fixture
def wan() -> Iterator[Wan]:
    """Interfaces of 1500 bytes. Ask for it before ``start``: it outlives that."""
    with Wan({"a": 1, "b": 1}, dict.fromkeys(PAIRS, SPEC), mtu=1500, slow_start_after_idle=False) as one:
        yield one


def exchange(sender: CountedEndpoint, receiver: CountedEndpoint, number: int, nbytes: int = SIZE) -> float:
    """One message, byte by byte; how long it took."""
    begun_s = time.monotonic()
    handle = sender.isend(pattern(nbytes, 0, number), dst=1, tag=1)
    got = receiver.recv(src=0, tag=1, timeout_s=40)
    took_s = time.monotonic() - begun_s
    assert np.array_equal(got.array, pattern(nbytes, 0, number))
    handle.wait(10)
    return took_s


def test_a_path_narrower_than_its_interfaces_is_named(wan: Wan, start: Callable[..., Net]) -> None:
    """1400 bytes pass behind interfaces of 1500, and no ICMP says so: handshakes work, payload vanishes."""
    wan.set_sysctl("net.ipv4.tcp_mtu_probing", "0")
    wan.tamper("both", LinkFaults(mtu_bytes=1400))
    net = start(links=TOLD, wan=wan, agent={"peer_timeout": f"{PEER_TIMEOUT_S:g}s"})
    net.injects_fault("large packets vanish")
    sender, receiver = net.pair()
    exchange(sender, receiver, 0, 1000)
    begun_s = time.monotonic()
    handle = sender.isend(pattern(SIZE, 0, 1), dst=1, tag=1)
    receive = receiver.irecv(src=0, tag=1)
    with pytest.raises(PeerLost) as caught:
        handle.wait(30)
    print(f"after {time.monotonic() - begun_s:.1f} s: {caught.value}")
    assert time.monotonic() - begun_s < 2 * PEER_TIMEOUT_S + SLACK_S
    text = str(caught.value)
    for words in ("no progress for", f"after {caught.value.bytes_done} of {SIZE} bytes", "(MTU?"):
        assert words in text
    for address in (net.agent("a").data_address, net.agent("b").data_address):
        assert address in text
    with pytest.raises(PeerLost, match=f"of {SIZE} bytes"):
        receive.wait(10)
    assert wan.counters()["a->b"].oversized_packets > 0
    wan.heal()
    Health(net)


def test_ping_and_doctor_name_it_ahead(wan: Wan, start: Callable[..., Net], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is sent: small messages pass, full packets don't, and what to do about it."""
    wan.set_sysctl("net.ipv4.tcp_mtu_probing", "0")
    net = start(links=TOLD, wan=wan)
    where = net.cluster.coordinator_socket
    agent, peer = net.cluster.agent("a"), "b/b-0"
    ping = ["ping", peer, "--agent", agent.socket, "--coordinator", where, "--count", "1", "--json"]
    assert main(ping) == 0
    assert json.loads(capsys.readouterr().out)["large_rtt_ns"] > 0
    wan.tamper("both", LinkFaults(mtu_bytes=1400))
    assert main(ping) == 3
    told = json.loads(capsys.readouterr().out)
    assert (len(told["rtt_ns"]), told["large_rtt_ns"], told["path_mtu"]) == (1, 0, 1500)
    configs = [str(net.cluster.directory / f"{name}.toml") for name in ("a-0", "coordinator")]
    assert main(["doctor", "--config", configs[0], "--config", configs[1], "--timeout-s", "3", "--json"]) == 1
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}[f"reach peer {peer}"]
    assert found["status"] == "fail"
    assert "drops large packets" in found["detail"]
    assert "tcp_mtu_probing = 1" in found["fix"]


def test_a_path_narrower_than_its_interfaces_is_found_where_the_kernel_may_probe(
    wan: Wan, start: Callable[..., Net]
) -> None:
    """With ``net.ipv4.tcp_mtu_probing`` on, it costs the time of some retransmissions and no error."""
    wan.set_sysctl("net.ipv4.tcp_mtu_probing", "1")
    wan.tamper("both", LinkFaults(mtu_bytes=1400))
    net = start(links=TOLD, wan=wan)
    sender, receiver = net.pair()
    print(f"with probing: {exchange(sender, receiver, 0):.1f} s")
    assert wan.counters()["a->b"].oversized_packets > 0
    wan.heal()


@pytest.mark.skipif(not LONG, reason="takes 15 s: FAULTS_LONG=1")
def test_a_connection_that_the_way_has_forgotten_costs_seconds_and_nothing_else(
    wan: Wan, start: Callable[..., Net]
) -> None:
    """The entry of an idle data connection is dropped after 2 s, sooner than any keepalive comes; the control
    connection's pings keep that one alive. Also when nobody sends for long, the next message arrives, once."""
    net = start(links=TOLD, wan=wan)
    sender, receiver = net.pair()
    wan.tamper("both", LinkFaults(forget_ns=2_000_000_000))
    exchange(sender, receiver, 0)
    before = Counters.of(net.cluster)
    time.sleep(3.0)
    took_s = exchange(sender, receiver, 1)
    print(f"the first message over forgotten connections: {took_s:.1f} s")
    assert wan.counters()["a->b"].lost_packets > 0, "it was forgotten"
    assert took_s < DEAD_PATH_S + SLACK_S
    assert Counters.of(net.cluster).received - before.received == SIZE, "every byte once"
    assert exchange(sender, receiver, 2) < SLACK_S
    wan.heal()


@pytest.mark.skipif(not LONG, reason="takes 45 s: FAULTS_LONG=1")
def test_idle_connections_are_kept_alive_where_entries_live_for_twenty_seconds(
    wan: Wan, start: Callable[..., Net]
) -> None:
    """Strict firewalls forget after 30 s: 40 s without a message, and the next one goes over the same connections."""
    net = start(links=TOLD, wan=wan)
    sender, receiver = net.pair()
    wan.tamper("both", LinkFaults(forget_ns=20_000_000_000))
    exchange(sender, receiver, 0)
    time.sleep(40.0)
    took_s = exchange(sender, receiver, 1)
    print(f"after 40 s of silence: {took_s:.2f} s")
    assert took_s < SLACK_S
    assert wan.counters()["a->b"].lost_packets == 0
    assert "peer is down" not in net.agent("a").log_path.read_text()
