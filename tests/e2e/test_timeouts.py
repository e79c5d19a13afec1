"""A timeout is kept in every phase, and says who waited for whom, where, and how far it had got (case 19)."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest

from proxyd.cli.cluster import LinkFigures
from proxyd_client import PeerLost, ProxydError, TransferTimeout
from tests.e2e.rig import KIB, MIB, Net, Trainer, pattern, until

pytestmark = pytest.mark.timeout(60)

_SLOW = LinkFigures("8Mbit", "20ms", "1bdp", estimate="fixed")
SLOW = {("a", "b"): _SLOW, ("b", "a"): _SLOW}


@contextmanager
def _raises_after(seconds: float, kind: type[ProxydError], *words: str) -> Any:
    """The block raises ``kind`` after so many seconds, no earlier, and at most half a second (of a busy machine)
    later; the text holds ``words``."""
    begun_s = time.monotonic()
    with pytest.raises(kind) as caught:
        yield caught
    took_s = time.monotonic() - begun_s
    assert seconds <= took_s < seconds + 1.0, f"raised after {took_s:.2f} s: {caught.value}"
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in: {caught.value}"


raises_after: Callable[..., AbstractContextManager[Any]] = _raises_after


def test_a_send_to_a_peer_that_never_connects(net: Net) -> None:
    sender = net.connect(0, "a")
    handle = sender.isend(pattern(MIB), dst=9, tag=4)
    words = (f"{net.job}/9", "tag 4", "here rank 0", "looking for the destination", f"0 of {MIB} bytes")
    with raises_after(2, TransferTimeout, *words) as caught:
        handle.wait(timeout_s=2)
    error = caught.value
    assert (error.peer, error.tag, error.phase, error.bytes_done) == (9, 4, "looking for the destination", 0)
    # A timeout cancels nothing. It ends when the agent gives up looking (4 s in this cluster), with the known ranks.
    with pytest.raises(PeerLost, match=r"known ranks.*\[0\]"):
        handle.wait(timeout_s=10)


def test_a_receive_from_a_peer_that_never_connects(net: Net) -> None:
    receiver = net.connect(1, "b")
    words = (f"{net.job}/9", "tag 4", "here rank 1", f"no process is registered as {net.job}/9")
    with raises_after(2, TransferTimeout, *words) as caught:
        receiver.recv(src=9, tag=4, timeout_s=2)
    assert (caught.value.peer, caught.value.tag, caught.value.phase) == (9, 4, "waiting for a message")


def test_a_receive_on_another_tag_names_what_waits_elsewhere(net: Net) -> None:
    sender, receiver = net.pair()
    sender.isend(pattern(100), dst=1, tag=3)
    receiver.recv(src=0, tag=3, timeout_s=5)
    sender.isend(pattern(100), dst=1, tag=3)
    until(lambda: receiver.eta(src=0, tag=3) == 0.0, "the message has come")
    with raises_after(2, TransferTimeout, "tag 4", "1 wait on others", "tag 3"):
        receiver.recv(src=0, tag=4, timeout_s=2)


def test_without_a_coordinator_the_destination_cannot_be_looked_up(start: Callable[..., Net]) -> None:
    net = start()
    net.injects_fault("the coordinator is killed before the peer connects")
    sender = net.connect(0, "a")
    net.cluster.kill(net.cluster.coordinator)
    receiver = net.connect(1, "b")
    handle = sender.isend(pattern(MIB), dst=1, tag=4)
    words = (f"{net.job}/1", "tag 4", "here rank 0", "looking for the destination", f"0 of {MIB} bytes")
    with raises_after(2, TransferTimeout, *words):
        handle.wait(timeout_s=2)
    with raises_after(2, TransferTimeout, f"{net.job}/0", "here rank 1", "no process is registered|no message was off"):
        receiver.recv(src=0, tag=4, timeout_s=2)
    # Nothing is lost by either: with the coordinator back it arrives.
    net.cluster.start_coordinator()
    assert np.array_equal(receiver.recv(src=0, tag=4, timeout_s=10).array, pattern(MIB))
    handle.wait(timeout_s=10)


def test_queued_behind_the_grants_of_others(start: Callable[..., Net]) -> None:
    net = start(links=SLOW)
    sender, receiver = net.pair()
    first = sender.isend(pattern(4 * MIB, 0, 1), dst=1, tag=1)
    second = sender.isend(pattern(MIB, 0, 2), dst=1, tag=2)
    with raises_after(2, TransferTimeout, "tag 2", "here rank 0", "queued at the coordinator", f"0 of {MIB} bytes"):
        second.wait(timeout_s=2)
    with raises_after(0.5, TransferTimeout, "tag 1", rf"[1-9]\d* of {4 * MIB} bytes done") as caught:
        first.wait(timeout_s=0.5)
    assert 0 < caught.value.bytes_done < 4 * MIB
    with raises_after(0.5, TransferTimeout, "tag 1", rf"[1-9]\d* of {4 * MIB} bytes have landed") as caught:
        receiver.recv(src=0, tag=1, timeout_s=0.5)
    assert 0 < caught.value.bytes_done < 4 * MIB
    assert first.cancel()
    assert np.array_equal(receiver.recv(src=0, tag=2, timeout_s=20).array, pattern(MIB, 0, 2))


def test_no_room_at_the_receiver(net: Net) -> None:
    sender, receiver = net.pair()
    handles = [sender.isend(pattern(40 * MIB, 0, number), dst=1, tag=number) for number in range(2)]
    with raises_after(2, TransferTimeout, "tag 1", "waiting for room at the receiver", f"0 of {40 * MIB} bytes"):
        handles[1].wait(timeout_s=2)
    for number in (1, 0):
        assert np.array_equal(receiver.recv(src=0, tag=number, timeout_s=20).array, pattern(40 * MIB, 0, number))


def test_no_room_in_shared_memory(start: Callable[..., Net]) -> None:
    net = start(agent={"memory": "64MiB", "arena": "16MiB", "eager": "4MiB"})
    sender, receiver = net.pair()
    sent = 0
    words = ("no room for a message", "tag 9", r"ranks \[1\] have not acknowledged", "Receive what they sent")
    with raises_after(2, TransferTimeout, *words) as caught:
        while sent < 20:
            sender.isend(pattern(5 * MIB, 0, sent), dst=1, tag=9, timeout_s=2)
            sent += 1
    assert caught.value.phase == "waiting for room in shared memory"
    # Messages to one rank hold at most three quarters of the room for sending.
    assert 4 <= sent <= 8
    # Nothing of the one that had no room was sent; the others arrive, and then there is room.
    for number in range(sent):
        assert np.array_equal(receiver.recv(src=0, tag=9, timeout_s=20).array, pattern(5 * MIB, 0, number))
    sender.send(pattern(10 * KIB), dst=1, tag=5, timeout_s=10)


def test_a_peer_that_died_before_the_first_message(net: Net) -> None:
    receiver = net.connect(1, "b")
    posted = receiver.irecv(src=0, tag=4)
    other = Trainer(net, 0, "a", "hear()")
    with raises_after(0.5, TransferTimeout, "no message was offered"):
        posted.wait(0.5)
    other.kill()
    begun_s = time.monotonic()
    with pytest.raises(PeerLost, match=rf"{re.escape(net.job)}/0.*tag 4") as caught:
        posted.wait(timeout_s=5)
    assert time.monotonic() - begun_s < 2
    assert caught.value.peer == 0
    with raises_after(0, PeerLost, "tag 5"):
        receiver.recv(src=0, tag=5, timeout_s=5)
    # Sent to, it is looked for: another life of it may come.
    handle = receiver.isend(pattern(10), dst=0, tag=6)
    with raises_after(2, TransferTimeout, "looking for the destination", "0 of 10 bytes"):
        handle.wait(timeout_s=2)
    again = net.connect(0, "a")
    assert np.array_equal(again.recv(src=1, tag=6, timeout_s=5).array, pattern(10))
    handle.wait(5)


def test_a_peer_that_stands_still(net: Net) -> None:
    """A stopped process is no dead one: what it posted before arrives, what it should send next times out."""
    receiver = net.connect(1, "b")
    other = Trainer(net, 0, "a", "ep.send(pattern(MIB), dst=1, tag=4)\nsay('sent')\nhear()")
    assert np.array_equal(receiver.recv(src=0, tag=4, timeout_s=10).array, pattern(MIB))
    net.also_sent("a->b", MIB)
    assert other.hear() == "sent"
    other.signal(signal.SIGSTOP)
    with raises_after(2, TransferTimeout, "tag 4", "no message was offered"):
        receiver.recv(src=0, tag=4, timeout_s=2)
    # Its arena takes messages in all the same.
    receiver.send(pattern(3 * MIB), dst=0, tag=4, timeout_s=10)
