"""Who is there changes under way: names with many lives, a leave and a join in one wait, agents that come late.

Field cases 23, and of the rarer ones "membership" and "startup". ``FAULTS_LONG=1`` waits as long as in the field.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import proxyd_client
from proxyd.cli.cluster import LinkFigures
from proxyd_client import AgentUnavailable, Endpoint, Handle, Message, PeerLost, ProxydError
from tests.e2e.rig import KIB, MIB, CountedEndpoint, Net, Trainer, pattern, until

LONG = os.environ.get("FAULTS_LONG") == "1"
pytestmark = [pytest.mark.faults, pytest.mark.timeout(120 if LONG else 60)]

LIVES = 20
CONNECT_S = 10.0
"""What a relaunched trainer may take to be in."""
FIGURES = LinkFigures("160Mbit", "10ms", "1bdp", estimate="fixed")
SLOW = {("a", "b"): FIGURES, ("b", "a"): FIGURES}
LATE_S = 25.0 if LONG else 2.5


def first_of_this_life(sender: CountedEndpoint, receiver: CountedEndpoint, life: int) -> None:
    """The first message that gets through, until when sends are refused as meant for the life before. It is of now."""

    def delivered() -> bool:
        try:
            sender.isend(pattern(200 * KIB, life, 1), dst=1, tag=1).wait(10)
        except PeerLost:
            return False
        got = receiver.recv(src=0, tag=1, timeout_s=5)
        assert np.array_equal(got.array, pattern(200 * KIB, life, 1)), f"life {life} was given what is not its own"
        return True

    until(delivered, f"life {life} gets a message", 20)


def test_twenty_lives_of_the_same_names_share_nothing(start: Callable[..., Net]) -> None:
    """Case 23: connect, send half of a message, close, connect again; what is left of a life is in no later one."""
    net = start(links=SLOW)
    slowest_s = 0.0
    for life in range(LIVES):
        begun_s = time.monotonic()
        sender, receiver = net.pair()
        slowest_s = max(slowest_s, time.monotonic() - begun_s)
        first_of_this_life(sender, receiver, life)
        moved = net.moved().received
        half = sender.isend(pattern(16 * MIB, life, 2), dst=1, tag=1)
        for number in range(3, 6):  # small ones may well be delivered, to nobody
            sender.isend(pattern(100, life, number), dst=1, tag=1)
        until(lambda moved=moved: net.moved().received > moved + 300 * KIB, "half of it is there", 20)
        for one in (sender, receiver) if life % 2 else (receiver, sender):
            one.close(0)
        with pytest.raises(ProxydError):
            half.wait(5)
    print(f"the slowest of {LIVES} lives was connected after {slowest_s:.3f} s")
    assert slowest_s < CONNECT_S


def test_a_trainer_that_is_killed_in_the_middle_and_relaunched_is_in_soon(start: Callable[..., Net]) -> None:
    """Case 23, its second half: nothing of what was under way is delivered to who receives afterwards."""
    net = start(links=SLOW)
    receiver = net.connect(1, "b")
    body = "hear(); handle = ep.isend(pattern(24 * MIB, {0}), dst=1, tag=1)\n"
    first = Trainer(net, 0, "a", body.format(7) + "hear()\n")
    first.say()
    receive = receiver.irecv(src=0, tag=1)
    until(lambda: net.moved().received > MIB, "it is under way", 20)
    first.kill()
    begun_s = time.monotonic()
    second = Trainer(net, 0, "a", body.format(8) + "say('sent'); hear()\n")
    in_after_s = time.monotonic() - begun_s
    print(f"relaunched and in after {in_after_s:.2f} s, the start of its interpreter included")
    assert in_after_s < CONNECT_S
    with pytest.raises(PeerLost):
        receive.wait(10)
    receiver.knows(0)
    second.say()
    assert second.hear() == "sent"
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(24 * MIB, 8))
    net.also_sent("a->b", 24 * MIB)


@pytest.mark.parametrize("moves", [False, True], ids=["the same host", "another host"])
def test_a_leave_and_a_join_inside_one_wait_leave_both_sides_agreed(start: Callable[..., Net], moves: bool) -> None:
    """A waits while B is killed and B' starts: A's wait ends with a message of B', or with an error, and then the
    next one gets it; what A sent to B is in error or was B's, and never reaches B'."""
    net = start({"a": 1, "b": 2}, links=SLOW)
    net.injects_fault("a trainer is killed and started again")
    body = (
        "hear()\n"
        "ep.send(pattern(300_000, {0}), dst=0, tag=1, timeout_s=20)\n"
        "got = ep.recv(src=0, tag=3, timeout_s=20)\n"
        "assert np.array_equal(got.array, pattern(1000, 5, {0})), 'what A said is not what B heard'\n"
        "try:\n"
        "    ep.recv(src=0, tag=2, timeout_s=0.2)\n"
        "    say('something for the one before')\n"
        "except proxyd_client.TransferTimeout:\n"
        "    say('agreed')\n"
        "hear()\n"
    )
    waiting = net.connect(0, "a")
    trainer = Trainer(net, 1, "b", body.format(0))
    waiting.knows(1)
    ends: list[str] = []

    def next_from_b() -> Message | None:
        try:
            return waiting.recv(src=1, tag=1, timeout_s=20)
        except PeerLost:
            return None

    def answered(life: int) -> bool:
        try:
            waiting.send(pattern(1000, 5, life), dst=1, tag=3, timeout_s=20)
        except PeerLost:
            return False  # A's agent hasn't heard of B' yet, and B' got nothing
        return True

    for life in range(1, 5):
        receive: Handle[Message] = waiting.irecv(src=1, tag=1)
        # More than it takes in before it receives; and a small one, which may be delivered to who is killed.
        large, _ = (waiting.isend(pattern(nbytes, 3, life), dst=1, tag=2) for nbytes in (80 * MIB, 500))
        trainer.kill()
        trainer = Trainer(net, 1, "b", body.format(life), number=life % 2 if moves else 0)
        trainer.say()
        try:
            got = receive.wait(20)
            ends.append("its message")
        except PeerLost:
            ends.append("PeerLost")
            # Until A's agent has heard of B', rank 1 is gone, and each receive says so at once.
            got = until(next_from_b, "A receives from B'", 20)
        assert np.array_equal(got.array, pattern(300_000, life)), "not of this life"
        with pytest.raises(PeerLost):
            large.wait(20)
        until(lambda life=life: answered(life), "A and B' talk to each other")  # type: ignore[misc]
        assert trainer.hear() == "agreed"
    print(f"A's wait over the change of life ended with {', '.join(ends)}")


def test_an_agent_that_comes_late_is_waited_for_and_said_so(
    start: Callable[..., Net], caplog: pytest.LogCaptureFixture
) -> None:
    """ "startup": no fixed 15 s, but what the caller says; and words about what is being waited for."""
    net = start()
    net.injects_fault("agent a comes late")
    agent = net.agent("a")
    net.cluster.kill(agent)
    with pytest.raises(AgentUnavailable, match=rf"no agent answered at {agent.socket} within 0\.5 s"):
        proxyd_client.connect(net.job, 0, socket=agent.socket, timeout_s=0.5)
    found: list[tuple[float, Endpoint]] = []
    begun_s = time.monotonic()

    def connect() -> None:
        endpoint = proxyd_client.connect(net.job, 0, socket=agent.socket, timeout_s=LATE_S + 20)
        found.append((time.monotonic() - begun_s, endpoint))

    with caplog.at_level(logging.WARNING, "proxyd_client"):
        thread = threading.Thread(target=connect)
        thread.start()
        time.sleep(LATE_S)
        assert not found
        net.cluster.restart_agent("a")
        ready_s = time.monotonic() - begun_s
        thread.join(20)
    [(took_s, sender)] = found
    assert f"waiting for the agent at {agent.socket}" in caplog.text
    assert took_s - ready_s < 2, "it tries again often enough"
    receiver = net.connect(1, "b")
    # The receiver may be known here only a moment later: the message waits for that, too.
    handle = sender.isend(pattern(MIB), dst=1, tag=1)
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(MIB))
    handle.wait(10)
    sender.close(0)
