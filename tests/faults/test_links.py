"""The way between two agents breaks under load: cut, one-sided, reset, corrupted, a pulled cable, small packets only.

Every test looks at the health before and after, and ends with an error in words or with every byte right.
``FAULTS_LONG=1`` cuts the link for a minute, as in the table of docs/reliability.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from proxyd.cli.cluster import LinkFigures
from proxyd.cli.scrape import scrape
from proxyd.wan import LinkFaults, LinkSpec, Wan
from proxyd_client import PeerLost, ProxydError
from tests.e2e.rig import MIB, CountedEndpoint, Counters, Health, Net, pattern, until

LONG = os.environ.get("FAULTS_LONG") == "1"
pytestmark = [pytest.mark.netns, pytest.mark.timeout(180 if LONG else 90)]

SPEC = LinkSpec(12_500_000, None, 10_000_000, 250_000)
PAIRS = [("a", "b"), ("b", "a")]
TOLD = dict.fromkeys(PAIRS, LinkFigures("100Mbit", "20ms", "1bdp", mtu=9000, estimate="fixed"))
SIZE = 24 * MIB
PEER_TIMEOUT_S = 3.0
"""A tenth of the default: what is tested is that it is kept, not how long it is."""
CUT_S = 60.0 if LONG else 1.5
NOTICED_S = 8.0
RESUMES_S = 3.0
SLACK_S = 3.0
"""What a host that does other things too may add."""


@pytest.fixture
def wan() -> Iterator[Wan]:
    """Ask for it before ``start``: it outlives that."""
    with Wan({"a": 1, "b": 1}, dict.fromkeys(PAIRS, SPEC), slow_start_after_idle=False) as one:
        yield one


@pytest.fixture
def wider_wan() -> Iterator[Wan]:
    """With a host for the coordinator at b."""
    with Wan({"a": 1, "b": 2}, dict.fromkeys(PAIRS, SPEC), slow_start_after_idle=False) as one:
        yield one


def settled(net: Net) -> tuple[CountedEndpoint, CountedEndpoint, Health]:
    """A pair, and its health before."""
    sender, receiver = net.pair()
    return sender, receiver, Health(net)


def under_way(net: Net) -> None:
    until(lambda: net.moved().received > 4 * MIB, "payload is under way")


@pytest.mark.parametrize("direction", ["both", "b->a"])
def test_a_cut_shorter_than_the_timeout_costs_time_and_nothing_else(
    wan: Wan, start: Callable[..., Net], direction: str
) -> None:
    """A blackhole without a reset, also of one direction only: what was sent goes on, no byte arrives twice."""
    net = start(links=TOLD, wan=wan, agent={"peer_timeout": "120s"})
    sender, receiver, health = settled(net)
    before = Counters.of(net.cluster)
    handle = sender.isend(pattern(SIZE), dst=1, tag=1)
    receive = receiver.irecv(src=0, tag=1)
    until(lambda: Counters.of(net.cluster).received - before.received > 4 * MIB, "payload is under way")
    wan.cut(direction)
    time.sleep(CUT_S)
    assert not receive.done()
    wan.heal()
    healed_s = time.monotonic()
    at_heal = Counters.of(net.cluster).received
    until(lambda: Counters.of(net.cluster).received > at_heal, "payload moves again", RESUMES_S + SLACK_S)
    print(f"moved again {time.monotonic() - healed_s:.2f} s after the heal")
    got = receive.wait(30)
    assert np.array_equal(got.array, pattern(SIZE))
    handle.wait(10)
    del got
    assert Counters.of(net.cluster).received - before.received == SIZE, "a byte was delivered twice"
    assert wan.counters()["a->b" if direction != "b->a" else direction].lost_packets > 0
    health.recovered()


@pytest.mark.parametrize("direction", ["both", "a->b"])
def test_a_cut_longer_than_the_timeout_is_said_on_both_sides_and_heals(
    wan: Wan, start: Callable[..., Net], direction: str
) -> None:
    net = start(links=TOLD, wan=wan, agent={"peer_timeout": f"{PEER_TIMEOUT_S:g}s"})
    net.injects_fault(f"the link is cut: {direction}")
    sender, receiver, health = settled(net)
    handle = sender.isend(pattern(SIZE), dst=1, tag=1)
    receive = receiver.irecv(src=0, tag=1)
    under_way(net)
    wan.cut(direction)
    cut_s = time.monotonic()
    for wait, peer in ((handle.wait, "1"), (receive.wait, "0")):
        with pytest.raises(PeerLost) as caught:
            wait(20)
        assert f"{net.job}/{peer}" in str(caught.value)
        assert "tag 1" in str(caught.value)
        assert f"of {SIZE} bytes" in str(caught.value)
    took_s = time.monotonic() - cut_s
    print(f"PeerLost on both sides {took_s:.2f} s after the cut")
    assert took_s < PEER_TIMEOUT_S + NOTICED_S
    wan.heal()
    health.recovered()


def test_an_idle_receive_from_a_host_that_vanished_ends(wider_wan: Wan, start: Callable[..., Net]) -> None:
    """Nothing is under way, nothing was reset, and nobody says good-bye."""
    net = start(
        links=TOLD,
        wan=wider_wan,
        agent={"peer_timeout": f"{PEER_TIMEOUT_S:g}s"},
        coordinator={"peer_timeout": f"{PEER_TIMEOUT_S:g}s"},
        coordinator_hosts={"coordinator": ("b", 1)},
    )
    net.injects_fault("host a is cut off")
    sender, receiver = net.pair()
    handle = sender.isend(pattern(1000), dst=1, tag=1)
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(1000))
    handle.wait(10)
    idle = receiver.irecv(src=0, tag=2)
    wider_wan.cut()
    cut_s = time.monotonic()
    with pytest.raises(PeerLost, match=rf"{net.job}/0 .*agent a/a-0 has not been heard of"):
        idle.wait(40)
    took_s = time.monotonic() - cut_s
    print(f"an idle receive ended {took_s:.2f} s after its sender's host vanished")
    assert took_s < PEER_TIMEOUT_S + NOTICED_S + SLACK_S


@pytest.mark.parametrize("direction", ["both", "a->b"])
def test_idle_receives_end_when_the_path_is_dead_though_the_coordinator_sees_both_ends(
    wan: Wan, start: Callable[..., Net], direction: str
) -> None:
    """Case 18 once more: agents reach the coordinator by another way, and nothing is under way between them. After the
    heal the same two processes go on."""
    net = start(links=TOLD, wan=wan, agent={"peer_timeout": f"{PEER_TIMEOUT_S:g}s"})
    net.injects_fault(f"the link is cut: {direction}")
    sender, receiver, health = settled(net)
    handle = sender.isend(pattern(1000), dst=1, tag=1)
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(1000))
    handle.wait(10)
    idle = [(receiver.irecv(src=0, tag=2), "0", "a/a-0"), (sender.irecv(src=1, tag=2), "1", "b/b-0")]
    wan.cut(direction)
    cut_s = time.monotonic()
    for receive, peer, agent in idle:
        with pytest.raises(PeerLost, match=rf"{net.job}/{peer} .*agent {agent} has not been heard of for"):
            receive.wait(30)
    took_s = time.monotonic() - cut_s
    print(f"idle receives ended {took_s:.2f} s after the cut ({direction})")
    # The last word was a ping, up to half a second before the cut.
    assert 0.8 * PEER_TIMEOUT_S - 0.5 < took_s < 1.2 * PEER_TIMEOUT_S + SLACK_S
    assert scrape(net.cluster.coordinator.metrics).total("proxyd_agent_sessions") == 2, "the coordinator misses nobody"
    wan.heal()
    for source, target, peer in ((sender, receiver, 1), (receiver, sender, 0)):
        again = source.isend(pattern(1000, peer), dst=peer, tag=3)
        again.wait(10)
        assert np.array_equal(target.recv(src=1 - peer, tag=3, timeout_s=10).array, pattern(1000, peer))
    health.recovered()


def test_resets_on_every_connection_are_no_end(wan: Wan, start: Callable[..., Net]) -> None:
    """A firewall that has lost its state: each connection is reset once. Right bytes, or PeerLost in bounded time."""
    net = start(links=TOLD, wan=wan, agent={"peer_timeout": "10s"})
    net.injects_fault("every connection is reset")
    sender, receiver, health = settled(net)
    handle = sender.isend(pattern(SIZE), dst=1, tag=1)
    receive = receiver.irecv(src=0, tag=1)
    under_way(net)
    wan.reset("a->b")
    begun_s = time.monotonic()
    until(lambda: wan.counters()["a->b"].reset_packets > 0, "connections are reset")
    wan.reset("a->b", on=False)
    ends: list[str] = []
    for wait in (lambda: receive.wait(30), lambda: handle.wait(30)):
        try:
            got = wait()
            assert got is None or np.array_equal(got.array, pattern(SIZE))
            ends.append("right")
            del got
        except ProxydError as error:
            assert isinstance(error, PeerLost), error
            ends.append("PeerLost")
    assert len(set(ends)) == 1, f"the two sides disagree: {ends}"
    print(f"{ends[0]} {time.monotonic() - begun_s:.2f} s after the resets")
    assert time.monotonic() - begun_s < 15
    health.recovered()


def test_flipped_bits_that_tcp_lets_through_are_caught(wan: Wan, start: Callable[..., Net]) -> None:
    """In payload and in frames alike, and never a wrong byte: each chunk that fails its checksum is counted and sent
    again, a frame that makes no sense ends its connection."""
    net = start(links=TOLD, wan=wan, agent={"peer_timeout": "10s"})
    net.injects_fault("bits are flipped")
    sender, receiver, health = settled(net)
    wan.tamper("a->b", LinkFaults(corrupt=0.004))
    right = lost = 0
    for number in range(4):
        handle = sender.isend(pattern(8 * MIB, 0, number), dst=1, tag=1)
        try:
            got = receiver.recv(src=0, tag=1, timeout_s=20)
            assert np.array_equal(got.array, pattern(8 * MIB, 0, number)), "a flipped bit got through"
            right += 1
            del got
        except PeerLost:
            lost += 1
        try:
            handle.wait(20)
        except PeerLost:
            receiver.knows(0)
            sender.knows(1)
    flipped = wan.counters()["a->b"].corrupted_packets
    caught = Counters.of(net.cluster).corrupt
    print(f"{flipped} packets had a flipped bit; {caught:g} chunks caught; {right} messages right, {lost} lost")
    assert flipped > 0
    assert right + lost == 4
    wan.heal()
    health.recovered()
    for member in net.cluster.members:
        log = member.log_path.read_text()
        assert "Traceback" not in log, log[-2000:]


def test_a_pulled_cable_for_two_seconds(wan: Wan, start: Callable[..., Net]) -> None:
    net = start(links=TOLD, wan=wan)
    sender, receiver, health = settled(net)
    handle = sender.isend(pattern(SIZE), dst=1, tag=1)
    receive = receiver.irecv(src=0, tag=1)
    under_way(net)
    wan.plug(wan.host("a", 0), False)
    time.sleep(2.0)
    wan.plug(wan.host("a", 0))
    got = receive.wait(30)
    assert np.array_equal(got.array, pattern(SIZE))
    del got
    handle.wait(10)
    health.recovered()


def test_duplicates_and_disorder_are_tcps_business(wan: Wan, start: Callable[..., Net]) -> None:
    net = start(links=TOLD, wan=wan)
    sender, receiver, health = settled(net)
    wan.tamper("both", LinkFaults(duplicate=0.02, reorder=0.02, reorder_ns=3_000_000))
    before = Counters.of(net.cluster)
    handle = sender.isend(pattern(10 * MIB), dst=1, tag=1)
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=30).array, pattern(10 * MIB))
    handle.wait(10)
    assert Counters.of(net.cluster).received - before.received == 10 * MIB
    assert wan.counters()["a->b"].duplicated_packets > 0
    assert wan.counters()["a->b"].reordered_packets > 0
    health.recovered()
