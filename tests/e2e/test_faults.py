"""Somebody dies, stops or is restarted in the middle: an error that says so in bounded time, or, where nothing is lost,
none; and afterwards the next message is right."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable

import numpy as np
import pytest

from proxyd.cli.cluster import LinkFigures
from proxyd.cli.scrape import scrape
from proxyd_client import PeerLost, ProxydError, TransferTimeout
from tests.e2e.rig import MIB, Counters, Net, Trainer, pattern, until

pytestmark = pytest.mark.timeout(60)

# 10 MB/s: a message of 20 MiB takes two seconds, enough to be in the middle of it.
FIGURES = LinkFigures("80Mbit", "10ms", "1bdp", estimate="fixed")
SLOW = {("a", "b"): FIGURES, ("b", "a"): FIGURES}
SIZE = 20 * MIB


def fixed_ports() -> dict[tuple[str, int], dict[str, object]]:
    """Each agent's data port is the same after a restart, as it is in production."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [sock.getsockname()[1] for sock in (one, other)]
    return {(site, 0): {"data_listen": f"127.0.0.1:{port}"} for site, port in zip("ab", ports, strict=True)}


def under_way(net: Net) -> None:
    """Wait until some payload has arrived over there."""
    until(lambda: net.moved().received > MIB, "payload is under way")


def ends_with(kind: type[ProxydError], call: Callable[[], object], within_s: float, *words: str) -> ProxydError:
    """The call raises within the time, and the text holds the words."""
    begun_s = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - begun_s < within_s, str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


def next_one_is_right(net: Net, rank: int = 0, other: int = 1) -> None:
    """New endpoints, a new message, byte by byte."""
    sender, receiver = net.connect(rank, "a"), net.connect(other, "b")
    handle = sender.isend(pattern(2 * MIB, 8, 8), dst=other, tag=8)
    assert np.array_equal(receiver.recv(src=rank, tag=8, timeout_s=20).array, pattern(2 * MIB, 8, 8))
    handle.wait(10)


def test_the_sending_trainer_is_killed_in_the_middle(start: Callable[..., Net]) -> None:
    net = start(links=SLOW)
    receiver = net.connect(1, "b")
    other = Trainer(net, 0, "a", f"h = ep.isend(pattern({SIZE}), dst=1, tag=3)\nsay('posted')\nhear()")
    assert other.hear() == "posted"
    receive = receiver.irecv(src=0, tag=3)
    under_way(net)
    other.kill()
    error = ends_with(PeerLost, lambda: receive.wait(20), 3, f"{net.job}/0", "tag 3", f"of {SIZE} bytes")
    assert 0 < error.bytes_done < SIZE
    # Nothing of that life is delivered to this one's receives, and the link is free for others.
    again = net.connect(0, "a")
    receiver.knows(0)
    handle = again.isend(pattern(2 * MIB, 1, 1), dst=1, tag=3)
    assert np.array_equal(receiver.recv(src=0, tag=3, timeout_s=20).array, pattern(2 * MIB, 1, 1))
    handle.wait(10)
    until(lambda: Counters.of(net.cluster).violations == 0, "no violation")


def test_the_receiving_trainer_is_killed_in_the_middle(start: Callable[..., Net]) -> None:
    net = start(links=SLOW)
    sender = net.connect(0, "a")
    other = Trainer(net, 1, "b", "h = ep.irecv(src=0, tag=3)\nsay('posted')\nhear()")
    assert other.hear() == "posted"
    handle = sender.isend(pattern(SIZE), dst=1, tag=3)
    waiting = sender.isend(pattern(SIZE), dst=1, tag=4)
    under_way(net)
    other.kill()
    error = ends_with(
        PeerLost, lambda: handle.wait(20), 3, f"{net.job}/1", "tag 3", f"of {SIZE} bytes", "receiver gone"
    )
    assert 0 < error.bytes_done < SIZE
    ends_with(PeerLost, lambda: waiting.wait(20), 3, "tag 4")
    again = net.connect(1, "b")
    handle = sender.isend(pattern(2 * MIB, 1, 1), dst=1, tag=3)
    assert np.array_equal(again.recv(src=0, tag=3, timeout_s=20).array, pattern(2 * MIB, 1, 1))
    handle.wait(10)


def test_transfers_outlive_their_coordinator_and_its_return(start: Callable[..., Net]) -> None:
    """Killed under load: what is under way goes on at the fallback rate, which is counted; back again, it grants."""
    net = start(links=SLOW)
    net.injects_fault("the coordinator is killed and started again")
    sender, receiver = net.pair()
    handles = [sender.isend(pattern(SIZE, 0, number), dst=1, tag=number) for number in range(2)]
    under_way(net)
    before = Counters.of(net.cluster)
    net.cluster.kill(net.cluster.coordinator)
    assert np.array_equal(receiver.recv(src=0, tag=0, timeout_s=20).array, pattern(SIZE, 0, 0))
    handles[0].wait(5)
    net.cluster.start_coordinator()
    net.cluster.await_sessions()
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(SIZE, 0, 1))
    handles[1].wait(5)
    after = Counters.of(net.cluster)
    assert after.fallback > before.fallback == 0
    assert after.transferred["a->b"] == 2 * SIZE
    assert after.taken["a->b"] + after.fallback >= 2 * SIZE
    # From here on everything is under grants again.
    next_one_is_right(net, 2, 3)
    last = Counters.of(net.cluster)
    assert last.fallback == after.fallback
    assert last.taken["a->b"] - after.taken["a->b"] == 2 * MIB
    assert last.granted["a->b"] >= 2 * MIB


def test_a_coordinator_that_comes_back_at_once_harms_no_transfer(start: Callable[..., Net]) -> None:
    net = start(links=SLOW)
    net.injects_fault("the coordinator is restarted three times")
    sender, receiver = net.pair()
    handle = sender.isend(pattern(2 * SIZE), dst=1, tag=1)
    under_way(net)
    for _ in range(2):
        net.cluster.kill(net.cluster.coordinator, signal.SIGTERM)
        net.cluster.start_coordinator()
        net.cluster.await_sessions()
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(2 * SIZE))
    handle.wait(10)
    assert Counters.of(net.cluster).transferred["a->b"] == 2 * SIZE


def test_a_stopped_agent_holds_its_transfers_up_and_goes_on(start: Callable[..., Net]) -> None:
    net = start(links=SLOW)
    net.injects_fault("agent b stands still for two seconds")
    sender, receiver = net.pair()
    handle = sender.isend(pattern(SIZE), dst=1, tag=3)
    under_way(net)
    net.agent("b").process.send_signal(signal.SIGSTOP)
    with pytest.raises(TransferTimeout):
        handle.wait(2)
    net.agent("b").process.send_signal(signal.SIGCONT)
    assert np.array_equal(receiver.recv(src=0, tag=3, timeout_s=20).array, pattern(SIZE))
    handle.wait(10)


def test_an_agent_that_stood_still_takes_its_coordinator_for_no_silent_one(start: Callable[..., Net]) -> None:
    """It is proven like any test without a fault: everything goes under grants, nothing at the fallback rate."""
    net = start(links=SLOW)
    sender, receiver = net.pair()
    handle = sender.isend(pattern(SIZE), dst=1, tag=3)
    under_way(net)
    net.agent("a").process.send_signal(signal.SIGSTOP)
    with pytest.raises(TransferTimeout):
        handle.wait(1)
    net.agent("a").process.send_signal(signal.SIGCONT)
    assert np.array_equal(receiver.recv(src=0, tag=3, timeout_s=20).array, pattern(SIZE))
    handle.wait(10)


def test_a_slow_reader_holds_nobody_else_up(start: Callable[..., Net]) -> None:
    """Rank 1 never reads; its messages stop at their eager budget, and rank 2's go on at full rate."""
    net = start(agent={"eager": "8MiB", "memory": "512MiB", "arena": "64MiB"})
    sender, receiver = net.connect(0, "a"), net.connect(2, "b")
    net.connect(1, "b")
    stuck = [sender.isend(pattern(4 * MIB, 0, number), dst=1, tag=number) for number in range(6)]
    for number in range(10):
        sender.isend(pattern(4 * MIB, 2, number), dst=2, tag=1)
        assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=10).array, pattern(4 * MIB, 2, number))
    assert sum(handle.done() for handle in stuck) == 2
    for handle in stuck:
        handle.cancel()


def test_a_receiver_that_is_the_last_to_find_the_new_coordinator_is_not_taken_for_lost(
    start: Callable[..., Net],
) -> None:
    """The sender's agent is back first and hears of a world in which its receiver is not registered (yet)."""
    net = start(links=SLOW)
    net.injects_fault("the coordinator is restarted while agent b stands still")
    sender, receiver = net.pair()
    handle = sender.isend(pattern(SIZE), dst=1, tag=3)
    receive = receiver.irecv(src=0, tag=3)
    under_way(net)
    net.agent("b").process.send_signal(signal.SIGSTOP)
    net.cluster.kill(net.cluster.coordinator)
    net.cluster.start_coordinator()
    until(
        lambda: scrape(net.cluster.coordinator.metrics).total("proxyd_agent_sessions") == 1, "agent a has a session", 15
    )
    with pytest.raises(TransferTimeout):
        handle.wait(0.5)
    net.agent("b").process.send_signal(signal.SIGCONT)
    assert np.array_equal(receive.wait(20).array, pattern(SIZE))
    handle.wait(10)
