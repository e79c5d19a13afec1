"""Endpoints' lives: fork, close, replacement, ends of processes; deadlock-free exchanges; memory that is given back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from proxyd.cli.scrape import scrape
from proxyd_client import ClosedError, PeerLost, ProxydError, TransferTimeout
from tests.e2e.rig import KIB, MIB, CountedEndpoint, Net, Trainer, forked, pattern, rss_bytes, threads, until

pytestmark = pytest.mark.timeout(60)


# -- lives ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_is_told_and_the_parent_goes_on(net: Net) -> None:
    sender, receiver = net.pair()
    sender.send(pattern(MIB), dst=1)
    kept = receiver.recv(src=0, timeout_s=10)
    posted = receiver.irecv(src=0, tag=2)

    def child() -> int:
        for call in (
            lambda: sender.isend(b"x", dst=1),
            lambda: receiver.recv(src=0, timeout_s=1),
            lambda: posted.wait(1),
            lambda: sender.link_state(1),
        ):
            try:
                call()
            except ClosedError as error:
                if f"belongs to process {os.getppid()}" not in str(error) or "connect() again" not in str(error):
                    return 1
            else:
                return 2
        sender.close()  # harmless
        return 0 if bytes(kept.data) == pattern(MIB).tobytes() else 3

    assert forked(child) == 0
    sender.send(pattern(2 * MIB, 0, 2), dst=1, tag=2, timeout_s=10)
    assert np.array_equal(posted.wait(10).array, pattern(2 * MIB, 0, 2))


def test_a_forked_child_may_connect_as_a_rank_of_its_own(net: Net) -> None:
    import proxyd_client

    receiver = net.connect(1, "b")
    net.connect(0, "a")

    def child() -> int:
        with proxyd_client.connect(net.job, 7, socket=net.agent("a").socket) as own:
            own.send(pattern(MIB, 7), dst=1, tag=7, timeout_s=10)
        return 0

    assert forked(child) == 0
    assert np.array_equal(receiver.recv(src=7, tag=7, timeout_s=10).array, pattern(MIB, 7))
    net.also_sent("a->b", MIB)


def test_the_end_of_a_process_is_noticed_though_its_children_hold_the_socket(net: Net) -> None:
    receiver = net.connect(1, "b")
    body = (
        "import os, time\n"
        "ep.send(pattern(1000), dst=1)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    sys.stdin.close(); os.close(1); os.close(2); time.sleep(30); os._exit(0)\n"
        "say(pid)\n"
        "hear()\n"
    )
    other = Trainer(net, 0, "a", body)
    child = int(other.hear())
    try:
        receiver.recv(src=0, timeout_s=10)
        other.kill()
        begun_s = time.monotonic()
        with pytest.raises(PeerLost):
            receiver.recv(src=0, timeout_s=10)
        assert time.monotonic() - begun_s < 4  # 2 s, and what a busy machine adds
    finally:
        os.kill(child, 9)
    net.also_sent("a->b", 1000)


def test_leaving_the_context_waits_for_what_was_sent(net: Net) -> None:
    receiver = net.connect(1, "b")
    with net.connect(0, "a") as sender:
        for number in range(5):
            sender.isend(pattern(6 * MIB, 0, number), dst=1, tag=1)
    for number in range(5):
        assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=10).array, pattern(6 * MIB, 0, number))
    with pytest.raises(ClosedError):
        sender.isend(b"x", dst=1)


def test_a_script_that_ends_after_isend_loses_nothing(net: Net) -> None:
    receiver = net.connect(1, "b")
    other = Trainer(net, 0, "a", "ep.isend(pattern(20 * MIB), dst=1, tag=1)")
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=10).array, pattern(20 * MIB))
    assert other.process.wait(10) == 0
    net.also_sent("a->b", 20 * MIB)


def test_close_lingers_no_longer_than_it_is_told(net: Net) -> None:
    sender = net.connect(0, "a")
    net.connect(1, "b")
    stuck = sender.isend(pattern(70 * MIB), dst=1)  # beyond the eager budget: it waits for a receive
    begun_s = time.monotonic()
    sender.close(linger_s=0.5)
    assert 0.5 <= time.monotonic() - begun_s < 2.5
    with pytest.raises(ClosedError):
        stuck.wait(1)


def test_messages_outlive_the_receiving_endpoint(net: Net) -> None:
    sender, receiver = net.pair()
    sender.isend(pattern(3 * MIB), dst=1)
    message = receiver.recv(src=0, timeout_s=10)
    receiver.close(0)
    assert np.array_equal(message.array, pattern(3 * MIB))


def test_the_newest_life_of_a_rank_wins(net: Net) -> None:
    sender, old = net.pair()
    sender.send(pattern(MIB, 0, 1), dst=1, timeout_s=10)
    posted = old.irecv(src=0, tag=5)
    new = net.connect(1, "b")
    with pytest.raises(ClosedError, match="the newest one wins"):
        posted.wait(5)
    with pytest.raises(ClosedError):
        old.recv(src=0, timeout_s=1)
    # What was sent to the old life is not delivered to the new one; what is sent from now on is.
    sender.knows(1)
    until(lambda: _delivered_to(sender, new), "the new life gets messages")


def _delivered_to(sender: CountedEndpoint, new: CountedEndpoint) -> bool:
    handle = sender.isend(pattern(2 * MIB, 0, 2), dst=1, tag=5)
    try:
        message = new.recv(src=0, tag=5, timeout_s=2)
        handle.wait(5)
    except PeerLost:
        return False  # it still went to the old life
    except TransferTimeout:
        with pytest.raises(PeerLost):  # so it did; anything else would be a message that got lost
            handle.wait(5)
        return False
    return bool(np.array_equal(message.array, pattern(2 * MIB, 0, 2)))


def test_a_rank_moves_to_another_site(net: Net) -> None:
    sender, old = net.connect(0, "a"), net.connect(1, "a", 1)
    sender.isend(pattern(MIB), dst=1)
    assert np.array_equal(old.recv(src=0, timeout_s=10).array, pattern(MIB))
    old.close()
    new = net.connect(1, "b")
    sender.knows(1, "a->b")
    handle = sender.isend(pattern(2 * MIB), dst=1)
    assert np.array_equal(new.recv(src=0, timeout_s=10).array, pattern(2 * MIB))
    handle.wait(5)


# -- exchanges that must not lock up (case 25) -----------------------------------------------------------------------

SMALL = {"memory": "192MiB", "arena": "32MiB", "eager": "8MiB"}


def test_both_sides_send_more_than_all_buffers_hold_and_then_receive(start: Callable[..., Net]) -> None:
    """48 MiB each way through 8 MiB of credit: neither send can complete before the receive is posted."""
    net = start(agent=SMALL)
    left, right = net.pair()
    both_wait = threading.Barrier(2, timeout=30)

    def exchange(me: CountedEndpoint, mine: int, other: int) -> None:
        handle = me.isend(pattern(48 * MIB, mine), dst=other, tag=1)
        with pytest.raises(TransferTimeout):
            handle.wait(0.3)
        both_wait.wait()  # else the receive of one may be there before the other has begun to wait
        out = np.empty(48 * MIB, np.uint8)
        me.irecv_into(out, src=other, tag=1).wait(30)
        handle.wait(30)
        assert xxhash.xxh3_64_digest(out) == xxhash.xxh3_64_digest(pattern(48 * MIB, other))

    with threads(lambda: exchange(left, 0, 1), lambda: exchange(right, 1, 0)):
        pass
    for agent in net.cluster.agents:
        limit = 192 * MIB
        assert scrape(agent.metrics).total("proxyd_arena_bytes", kind="used") <= limit
        assert rss_bytes(agent.pid, "VmHWM") < limit + 96 * MIB


def test_two_hosts_do_not_fill_each_other_up(start: Callable[..., Net]) -> None:
    """Sends each way, together far more than the memory: they wait for room, and room is always left to receive."""
    net = start(agent={"memory": "64MiB", "arena": "8MiB", "eager": "4MiB"})
    left, right = net.pair()
    count, size = 16, 7 * MIB

    def send(me: CountedEndpoint, mine: int, other: int) -> None:
        for number in range(count):
            me.isend(pattern(size, mine, number), dst=other, tag=number, timeout_s=30)

    def receive(me: CountedEndpoint, other: int) -> None:
        for number in range(count):
            assert np.array_equal(me.recv(src=other, tag=number, timeout_s=30).array, pattern(size, other, number))

    with threads(
        lambda: send(left, 0, 1), lambda: send(right, 1, 0), lambda: receive(left, 1), lambda: receive(right, 0)
    ):
        pass


def test_four_crossing_operations_in_opposite_orders(start: Callable[..., Net]) -> None:
    net = start(agent=SMALL)
    left, right = net.pair()
    size = 12 * MIB

    def run(me: CountedEndpoint, mine: int, other: int, tags: list[int]) -> None:
        outs = {tag: np.zeros(size, np.uint8) for tag in tags}
        handles = []
        for tag in tags:
            if tag % 2 == mine:
                handles.append(me.isend(pattern(size, mine, tag), dst=other, tag=tag))
            else:
                handles.append(me.irecv_into(outs[tag], src=other, tag=tag))
        for handle in handles:
            handle.wait(30)
        for tag in tags:
            if tag % 2 != mine:
                assert np.array_equal(outs[tag], pattern(size, other, tag))

    with threads(lambda: run(left, 0, 1, [0, 1, 2, 3]), lambda: run(right, 1, 0, [3, 2, 1, 0])):
        pass


def test_an_unmatched_message_does_not_stop_a_matched_one(start: Callable[..., Net]) -> None:
    net = start(agent=SMALL)
    sender, receiver = net.pair()
    unmatched = [sender.isend(pattern(3 * MIB, 0, number), dst=1, tag=99) for number in range(5)]
    for number in range(10):
        sender.isend(pattern(5 * MIB, 1, number), dst=1, tag=1)
        assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=10).array, pattern(5 * MIB, 1, number))
    assert not all(handle.done() for handle in unmatched)
    for number in range(5):
        assert np.array_equal(receiver.recv(src=0, tag=99, timeout_s=10).array, pattern(3 * MIB, 0, number))


# -- memory that is given back (case 37) -----------------------------------------------------------------------------


def test_one_message_kept_of_a_hundred_pins_its_own_memory_only(net: Net) -> None:
    """A kept slice pins its block, not an arena: what the others took serves the next ones."""
    sender, receiver = net.pair()
    agent = net.agent("b")
    kept = None
    for number in range(100):
        sender.isend(pattern(MIB, 0, number), dst=1, tag=1)
        message = receiver.recv(src=0, tag=1, timeout_s=10)
        if number == 50:
            kept = message.array[1000:1010]
    assert kept is not None
    used = scrape(agent.metrics).total("proxyd_arena_bytes", kind="used")
    del message
    before = rss_bytes(agent.pid)
    for number in range(100):
        sender.isend(pattern(MIB, 1, number), dst=1, tag=1)
        assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=10).array, pattern(MIB, 1, number))
    assert rss_bytes(agent.pid) - before < 10 * MIB
    assert scrape(agent.metrics).total("proxyd_arena_bytes", kind="used") == used
    assert np.array_equal(kept, pattern(MIB, 0, 50)[1000:1010])
    until(lambda: scrape(agent.metrics).total("proxyd_incoming_transfers") == 1, "all but one are released")
    del kept
    sender.send(pattern(10), dst=1, tag=2)  # the release travels with whatever comes next
    until(lambda: scrape(agent.metrics).total("proxyd_incoming_transfers") <= 1, "the last one is released")


def test_a_burst_beyond_an_arena_gives_its_memory_back(net: Net) -> None:
    sender, receiver = net.pair()
    agent = net.agent("b")
    posted = [receiver.irecv(src=0, tag=tag) for tag in range(4)]
    idle = scrape(agent.metrics).total("proxyd_arena_bytes", kind="used")
    for tag in range(4):
        sender.isend(pattern(100 * MIB, 0, tag), dst=1, tag=tag)
    messages = [one.wait(30) for one in posted]
    assert scrape(agent.metrics).total("proxyd_arena_bytes", kind="used") > idle
    high = rss_bytes(agent.pid, "RssShmem")
    del messages, posted
    until(
        lambda: scrape(agent.metrics).total("proxyd_arena_bytes", kind="used") == idle,
        "the extra arena goes when it has been idle for a while",
        15,
    )
    assert rss_bytes(agent.pid, "RssShmem") < high - 100 * MIB


def test_small_messages_without_end_leave_no_trace(net: Net) -> None:
    sender, receiver = net.pair()
    agents = [net.agent("a"), net.agent("b")]

    def rounds(count: int) -> None:
        for number in range(count):
            sender.isend(pattern(3 * KIB, 0, number), dst=1, tag=number % 50)
            receiver.recv(src=0, tag=number % 50, timeout_s=10)

    rounds(500)
    series = [scrape(agent.metrics).names() for agent in agents]
    before = [rss_bytes(agent.pid, "RssAnon") for agent in agents]
    rounds(2000)
    for agent, start_bytes in zip(agents, before, strict=True):
        assert rss_bytes(agent.pid, "RssAnon") - start_bytes < 4 * MIB
    assert [scrape(agent.metrics).names() for agent in agents] == series


def test_an_error_crosses_a_process_boundary(net: Net) -> None:
    import pickle

    receiver = net.connect(1, "b")
    with pytest.raises(ProxydError) as caught:
        receiver.recv(src=0, timeout_s=0.01)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert (str(again), again.peer, again.phase) == (str(caught.value), 0, "waiting for a message")
