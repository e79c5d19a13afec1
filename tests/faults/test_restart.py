"""Agents that are killed, or stopped and started again, while their trainers live on: nobody notices but by the time it
takes. Each message arrives once, whole and in order, or both sides get a typed error in bounded time."""

from __future__ import annotations

import collections
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from proxyd.cli.scrape import scrape
from proxyd_client import AgentUnavailable, Handle, Message, PeerLost, ProxydError, TransferTimeout
from tests.e2e.rig import MIB, Net, Trainer, pattern, threads, until
from tests.e2e.test_faults import SIZE, SLOW, ends_with, fixed_ports, under_way

pytestmark = pytest.mark.timeout(90)

Start = Callable[..., Net]
FINISH_S = 5.0
"""From the return of an agent to the end of what it had under way, beyond what the link needs for the bytes ..."""
BUSY = 2
"""... on a host that does other things, too."""


def restartable(start: Start, **options: Any) -> Net:
    net = start(links=SLOW, each_agent=fixed_ports(), **options)
    net.injects_fault("agents are killed and started again")
    return net


def reconnects(net: Net, site: str) -> float:
    return scrape(net.agent(site).metrics).total("proxyd_client_reconnects_total")


@pytest.mark.parametrize("killed", ["a", "b", "ab"])
def test_agents_are_killed_in_the_middle_and_all_goes_on(start: Start, killed: str) -> None:
    net = restartable(start)
    sender, receiver = net.pair()
    out = np.zeros(SIZE, np.uint8)
    into = receiver.irecv_into(out, src=0, tag=3)
    sent: list[Handle[None]] = [sender.isend(pattern(SIZE), dst=1, tag=3)]
    sent += [sender.isend(pattern(2 * MIB, 0, number), dst=1, tag=4) for number in range(1, 4)]
    sent += [sender.isend(pattern(1000 * number, 0, number), dst=1, tag=5) for number in range(6)]
    got: list[Message] = [receiver.recv(src=0, tag=5, timeout_s=20) for _ in range(3)]
    under_way(net)
    for site in killed:
        net.cluster.kill(net.agent(site))
    later = receiver.irecv(src=0, tag=6)
    for site in killed:
        net.cluster.restart_agent(site)
    back_s = time.monotonic()
    sent.append(sender.isend(pattern(3 * MIB, 0, 9), dst=1, tag=6))
    assert into.wait(30) == SIZE
    got += [receiver.recv(src=0, tag=5, timeout_s=10) for _ in range(3)]
    large = [receiver.recv(src=0, tag=4, timeout_s=20) for _ in range(3)]
    last = later.wait(20)
    for handle in sent:
        handle.wait(10)
    took_s = time.monotonic() - back_s
    assert np.array_equal(out, pattern(SIZE))
    assert [np.array_equal(one.array, pattern(1000 * number, 0, number)) for number, one in enumerate(got)] == [
        True
    ] * 6
    assert [np.array_equal(one.array, pattern(2 * MIB, 0, i)) for i, one in enumerate(large, 1)] == [True] * 3
    assert np.array_equal(last.array, pattern(3 * MIB, 0, 9))
    for site in killed:
        assert reconnects(net, site) == 1
    wire_s = (SIZE + 9 * MIB) / 10e6
    print(
        f"killed {killed}: all was there {took_s:.1f} s after the return; the link needs {wire_s:.1f} s for all of it"
    )
    assert took_s < wire_s + FINISH_S * BUSY
    # And nothing else is there.
    with pytest.raises(ProxydError):
        receiver.recv(src=0, tag=5, timeout_s=0.2)
    got.clear()
    large.clear()
    del last
    handle = sender.isend(pattern(2 * MIB, 8, 8), dst=1, tag=8)
    assert np.array_equal(receiver.recv(src=0, tag=8, timeout_s=10).array, pattern(2 * MIB, 8, 8))
    handle.wait(5)


@pytest.mark.parametrize("ranks_at", ["ab", "aa"])
def test_a_stream_of_small_messages_over_agents_that_are_killed_again_and_again(start: Start, ranks_at: str) -> None:
    """Each of them once, in order, none lost, nobody gets an error: hundreds are under way when an agent dies."""
    net = restartable(start)
    sender, receiver = net.connect(0, ranks_at[0]), net.connect(1, ranks_at[1])
    stop = threading.Event()
    sent = 0

    def send() -> None:
        nonlocal sent
        handles: collections.deque[Handle[None]] = collections.deque()
        while not stop.is_set():
            content = np.full(8 * (1 + sent % 300), sent, np.int64)
            handles.append(sender.isend(content, dst=1, tag=1))
            sent += 1
            if len(handles) > 200:
                handles.popleft().wait(30)
        for handle in handles:
            handle.wait(30)

    def receive() -> None:
        got = 0
        while not stop.is_set() or got < sent:
            try:
                message = receiver.recv(src=0, tag=1, timeout_s=0.5)
            except TransferTimeout:
                continue
            assert message.array[0] == message.array[-1] == got
            assert message.nbytes == 64 * (1 + got % 300)
            got += 1
            del message

    with threads(send, receive):
        try:
            for site in (ranks_at * 2)[:4]:
                before = sent
                until(lambda before=before: sent > before + 500, "messages flow", 20)
                net.cluster.kill(net.agent(site))
                net.cluster.restart_agent(site)
        finally:
            stop.set()
    print(f"{sent} messages over 4 restarts")
    assert sent > 2000


def test_a_receiver_that_stood_still_when_its_agent_died(start: Start) -> None:
    """All has landed, and the kernel holds a part of what its agent said of it; the rest died with the agent. No
    message whose sender is done may be among that, and none that it heard of may come twice."""
    net = restartable(start)
    sender = net.connect(0, "a")
    body = (
        "say('ready'); hear()\n"
        "for number in range(4000):\n"
        "    got = ep.recv(src=0, tag=1, timeout_s=30).array\n"
        "    assert got[0] == got[-1] == number, (number, got[0])\n"
        "say('all')\n"
    )
    other = Trainer(net, 1, "b", body)
    assert other.hear() == "ready"
    sender.knows(1)
    other.process.send_signal(signal.SIGSTOP)
    handles = [sender.isend(np.full(125, number, np.int64), dst=1, tag=1) for number in range(4000)]
    until(lambda: net.moved().received == 4000 * 1000, "all has landed", 20)
    done = sum(handle.done() for handle in handles)
    print(f"{done} of 4000 are acknowledged")
    assert 0 < done < 4000, "else the test sees nothing"
    net.cluster.kill(net.agent("b"))
    net.cluster.restart_agent("b")
    other.process.send_signal(signal.SIGCONT)
    other.say()
    for handle in handles:
        handle.wait(20)
    assert other.hear() == "all"


def test_trainers_of_one_host_whose_agent_is_killed(start: Start) -> None:
    net = restartable(start)
    sender, receiver = net.connect(0, "a"), net.connect(1, "a")
    kept = []
    for number in range(4):
        sender.isend(pattern(MIB, 0, number), dst=1, tag=1).wait(5)
        kept.append(receiver.recv(src=0, tag=1, timeout_s=5))
    waiting = [sender.isend(pattern(MIB, 1, number), dst=1, tag=2) for number in range(4)]
    net.cluster.kill(net.agent("a"))
    while_away = receiver.irecv(src=0, tag=3)
    net.cluster.restart_agent("a")
    sender.isend(pattern(MIB, 2, 2), dst=1, tag=3).wait(10)
    assert np.array_equal(while_away.wait(10).array, pattern(MIB, 2, 2))
    for number, handle in enumerate(waiting):
        assert np.array_equal(receiver.recv(src=0, tag=2, timeout_s=10).array, pattern(MIB, 1, number))
        handle.wait(5)
    for number, message in enumerate(kept):
        assert np.array_equal(message.array, pattern(MIB, 0, number)), "what was received before stays readable"
    assert reconnects(net, "a") == 2


@pytest.mark.parametrize("side", ["a", "b"])
def test_an_agent_that_does_not_come_back_is_an_error_on_both_sides_in_time(start: Start, side: str) -> None:
    net = restartable(start, agent={"peer_timeout": "4s"})
    sender, receiver = net.pair()
    handle = sender.isend(pattern(SIZE), dst=1, tag=3)
    receive = receiver.irecv(src=0, tag=3)
    under_way(net)
    begun_s = time.monotonic()
    net.cluster.kill(net.agent(side))
    waits: dict[str, Callable[[], object]] = {"a": lambda: handle.wait(20), "b": lambda: receive.wait(20)}
    away = ends_with(AgentUnavailable, waits[side], 8, "tag 3", net.agent(side).socket, "has not come back within 4.")
    assert time.monotonic() - begun_s > 3.5
    ends_with(PeerLost, waits["b" if side == "a" else "a"], 8, "tag 3", f"of {SIZE} bytes")
    own = sender if side == "a" else receiver
    ends_with(AgentUnavailable, lambda: own.send(b"x", dst=2), 1)
    assert "waiting for" in away.phase or "landing" in away.phase


def test_a_trainer_that_ended_while_its_agent_was_away_is_lost_in_time(start: Start) -> None:
    net = restartable(start, agent={"peer_timeout": "5s"})
    sender, receiver = net.pair()
    handle = sender.isend(pattern(SIZE), dst=1, tag=3)
    under_way(net)
    net.cluster.kill(net.agent("b"))
    receiver.close(0)
    net.cluster.restart_agent("b")
    ends_with(PeerLost, lambda: handle.wait(20), 10, f"{net.job}/1", "tag 3", "has not come back to it")


def test_a_newer_process_of_the_rank_wins_over_the_one_that_comes_back(start: Start) -> None:
    net = restartable(start)
    sender, receiver = net.pair()
    sender.isend(pattern(MIB), dst=1, tag=1).wait(10)
    net.cluster.kill(net.agent("b"))
    net.cluster.restart_agent("b")
    newer = net.connect(1, "b")
    until(lambda: receiver_has_ended(receiver), "one of the two has ended", 10)
    handle = sender.isend(pattern(MIB, 3, 3), dst=1, tag=3)
    sender.knows(1)
    try:
        handle.wait(10)
    except PeerLost:  # it was for the earlier life
        sender.isend(pattern(MIB, 3, 3), dst=1, tag=3).wait(10)
    assert np.array_equal(newer.recv(src=0, tag=3, timeout_s=10).array, pattern(MIB, 3, 3))


def receiver_has_ended(endpoint: Any) -> bool:
    return bool(endpoint._session.core.has_ended())


@pytest.mark.parametrize("side", ["a", "b"])
def test_an_agent_that_is_stopped_and_started_again_loses_nothing(start: Start, side: str) -> None:
    """As ``systemctl restart`` does it, under load."""
    net = restartable(start)
    sender, receiver = net.pair()
    sent = [sender.isend(pattern(8 * MIB, 0, number), dst=1, tag=1) for number in range(3)]
    under_way(net)
    assert net.cluster.kill(net.agent(side), signal.SIGTERM) == 0
    net.cluster.restart_agent(side)
    for number, handle in enumerate(sent):
        assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(8 * MIB, 0, number))
        handle.wait(5)
    assert reconnects(net, side) == 1
