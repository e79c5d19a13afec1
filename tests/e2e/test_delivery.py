"""Bytes from trainer to trainer: every size, every way, many at once; compared byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from proxyd_client import Endpoint
from tests.e2e.rig import KIB, MIB, Net, pattern, threads

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, 64 * KIB, 64 * KIB + 1, 2 * MIB, 2 * MIB + 1, 3 * MIB + 5, 33 * MIB])
def test_every_size_arrives_whole(net: Net, nbytes: int) -> None:
    sender, receiver = net.pair()
    sent = pattern(nbytes, 0, nbytes)
    handle = sender.isend(sent, dst=1, tag=7)
    message = receiver.recv(src=0, tag=7, timeout_s=20)
    assert (message.src, message.tag, message.nbytes, message.dtype, message.shape) == (
        0,
        7,
        nbytes,
        "uint8",
        (nbytes,),
    )
    assert np.array_equal(message.array, sent)
    handle.wait(timeout_s=10)
    into = np.full(nbytes, 9, np.uint8)
    sender.isend(sent, dst=1, tag=7)
    assert receiver.recv_into(into, src=0, tag=7, timeout_s=20) == nbytes
    assert np.array_equal(into, sent)


def test_300_mib_is_larger_than_an_arena(net: Net) -> None:
    sender, receiver = net.pair()
    sent = pattern(300 * MIB)
    wanted = xxhash.xxh3_64_intdigest(sent)
    handle = sender.isend(sent, dst=1)
    del sent
    message = receiver.recv(src=0, timeout_s=50)
    assert xxhash.xxh3_64_intdigest(message.data) == wanted
    handle.wait(10)


def test_a_send_is_a_snapshot(net: Net) -> None:
    sender, receiver = net.pair()
    buffer = pattern(8 * MIB).copy()
    handle = sender.isend(buffer, dst=1)
    buffer[:] = 255
    assert np.array_equal(receiver.recv(src=0, timeout_s=20).array, pattern(8 * MIB))
    handle.wait(10)


def test_both_directions_at_once(net: Net) -> None:
    left, right = net.pair()

    def exchange(me: Endpoint, mine: int, other: int) -> None:
        for number in range(12):
            size = (number * 700_001) % (9 * MIB)
            me.isend(pattern(size, mine, number), dst=other, tag=3)
        for number in range(12):
            got = me.recv(src=other, tag=3, timeout_s=30)
            assert np.array_equal(got.array, pattern((number * 700_001) % (9 * MIB), other, number))

    with threads(lambda: exchange(left, 0, 1), lambda: exchange(right, 1, 0)):
        pass


def test_any_source_takes_the_earliest_and_says_whose(net: Net) -> None:
    receiver = net.connect(9, "b")
    senders = {rank: net.connect(rank, "a", rank % 2) for rank in range(4)}
    for rank, sender in senders.items():
        for number in range(3):
            sender.isend(pattern(100_000 + rank, rank, number), dst=9, tag=5)
    seen: dict[int, int] = dict.fromkeys(senders, 0)
    for _ in range(12):
        message = receiver.recv(src=None, tag=5, timeout_s=20)
        assert np.array_equal(message.array, pattern(100_000 + message.src, message.src, seen[message.src]))
        seen[message.src] += 1
    assert set(seen.values()) == {3}


def test_many_threads_on_one_pair_of_endpoints(net: Net) -> None:
    sender, receiver = net.pair()
    count = 60

    def size(thread: int, number: int) -> int:
        return ((thread * 7919 + number * 104_729) % 300_000) if number % 10 else 2 * MIB + thread

    def send(thread: int) -> None:
        for number in range(count):
            sender.isend(pattern(size(thread, number), thread, number), dst=1, tag=thread)

    def receive(thread: int) -> None:
        for number in range(count):
            message = receiver.recv(src=0, tag=thread, timeout_s=40)
            assert np.array_equal(message.array, pattern(size(thread, number), thread, number))

    targets = [lambda t=t: send(t) for t in range(8)] + [lambda t=t: receive(t) for t in range(8)]
    with threads(*targets):
        pass


def test_one_host_hands_memory_over(net: Net) -> None:
    """Two trainers of one agent: no TCP, no copy by the agent; the counters of every link stay where they were."""
    one, two = net.connect(0, "a"), net.connect(1, "a")
    for nbytes in (0, 5, 64 * KIB, 3 * MIB, 40 * MIB):
        handle = one.isend(pattern(nbytes, 1), dst=1, tag=2)
        message = two.recv(src=0, tag=2, timeout_s=10)
        assert np.array_equal(message.array, pattern(nbytes, 1))
        del message
        handle.wait(10)
    out = np.empty(3 * MIB, np.uint8)
    handle = two.isend(pattern(3 * MIB, 2), dst=0, tag=2)
    one.recv_into(out, src=1, tag=2, timeout_s=10)
    assert np.array_equal(out, pattern(3 * MIB, 2))
    handle.wait(10)
    moved = net.moved()
    assert moved.received == 0
    assert sum(moved.taken.values()) + sum(moved.unscheduled.values()) + moved.fallback == 0
    assert moved.transferred["a->a"] == 5 + 64 * KIB + 46 * MIB
    assert sum(moved.granted.values()) == 0


def test_another_host_of_the_site_needs_no_grants(net: Net) -> None:
    one, two = net.connect(0, "a", 0), net.connect(1, "a", 1)
    sizes = (0, 5, 64 * KIB, 3 * MIB, 40 * MIB)
    for nbytes in sizes:
        handle = one.isend(pattern(nbytes, 1), dst=1, tag=2)
        assert np.array_equal(two.recv(src=0, tag=2, timeout_s=10).array, pattern(nbytes, 1))
        handle.wait(10)
    moved = net.moved()
    assert moved.transferred["a->a"] == moved.received == sum(sizes)
    assert sum(moved.taken.values()) == sum(moved.granted.values()) == 0


@pytest.mark.parametrize("traffic", ["pipeline", "sync", "bulk"])
def test_every_traffic_class_is_served(net: Net, traffic: str) -> None:
    sender, receiver = net.pair()
    handle = sender.isend(pattern(5 * MIB), dst=1, traffic=traffic)
    assert np.array_equal(receiver.recv(src=0, timeout_s=20).array, pattern(5 * MIB))
    handle.wait(10)


@pytest.mark.parametrize("remote", ["sender", "receiver", "both"])
def test_a_trainer_on_another_host_uses_the_gateway(net: Net, remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(net.cluster.token_file))

    def place(rank: int, site: str, over_tcp: bool) -> Endpoint:
        gateway = f"tcp://{net.agent(site).facts['gateway_address']}" if over_tcp else None
        return net.connect(rank, site, socket=gateway)

    left = place(0, "a", remote != "receiver")
    right = place(1, "b", remote != "sender")
    for me, other, mine, theirs in ((left, right, 0, 1), (right, left, 1, 0)):
        for number, nbytes in enumerate((0, 9, 100_000, 9 * MIB + 3)):
            handle = me.isend(pattern(nbytes, mine, number), dst=theirs, tag=1)
            got = other.recv(src=mine, tag=1, timeout_s=20)
            assert np.array_equal(got.array, pattern(nbytes, mine, number))
            handle.wait(10)


def test_a_message_of_the_gateway_is_not_held_up_by_an_unread_one(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(net.cluster.token_file))
    sender = net.connect(0, "a")
    receiver = net.connect(1, "b", socket=f"tcp://{net.agent('b').facts['gateway_address']}")
    sender.isend(pattern(20 * MIB, 0, 1), dst=1, tag=1)
    sender.isend(pattern(MIB, 0, 2), dst=1, tag=2)
    assert np.array_equal(receiver.recv(src=0, tag=2, timeout_s=20).array, pattern(MIB, 0, 2))
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(20 * MIB, 0, 1))


def test_announced_messages_and_eta(net: Net) -> None:
    sender, receiver = net.pair()
    sender.announce(dst=1, tag=4, nbytes=4 * MIB, ready_in_s=0.02)
    handle = sender.isend(pattern(4 * MIB), dst=1, tag=4)
    assert np.array_equal(receiver.recv(src=0, tag=4, timeout_s=10).array, pattern(4 * MIB))
    handle.wait(10)
    assert handle.eta_s() == 0.0
    state = sender.link_state(dst=1)
    assert state.link == "a->b"
    assert state.source in ("configured", "estimated"), "four megabytes may be enough to find it out"
    assert state.rate_bytes_per_s > 0
    assert receiver.eta(src=0, tag=4) is None


def test_posted_receives_fill_while_nobody_waits(net: Net) -> None:
    sender, receiver = net.pair()
    outs = [np.zeros(3 * MIB, np.uint8) for _ in range(4)]
    handles = [receiver.irecv_into(out, src=0, tag=1) for out in outs]
    for number in range(4):
        sender.isend(pattern(3 * MIB, 0, number), dst=1, tag=1)
    for number, handle in enumerate(handles):
        assert handle.wait(20) == 3 * MIB
        assert np.array_equal(outs[number], pattern(3 * MIB, 0, number))
