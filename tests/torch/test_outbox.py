"""Sends that find no room: posted later, in order per destination, and never forgotten."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from proxyd_client import ClosedError, PeerLost, TransferCancelled, TransferTimeout
from proxyd_client.buffers import Payload, payload_of
from proxyd_client.handle import Handle

pytestmark = pytest.mark.needs_torch


class Posted:
    """What a posted send's handle stands for."""

    def __init__(self) -> None:
        self.waited: list[float | None] = []

    def wait(self, timeout_s: float | None) -> None:
        self.waited.append(timeout_s)

    def poll(self) -> bool:
        return True

    def eta_s(self) -> float | None:
        return 1.5

    def cancel(self) -> bool:
        return False

    def call_when_done(self, callback: Any) -> None:
        callback()

    @property
    def source(self) -> int | None:
        return 0

    def describe(self) -> str:
        return "posted"


class Room:
    """An endpoint that has room for the destinations that the test says."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.broken: dict[int, Exception] = {}
        self.posts: list[tuple[int, int]] = []
        self.changed = threading.Condition()

    def isend(self, payload: Payload, dst: int, *, timeout_s: float | None, **arguments: Any) -> Handle[None]:
        with self.changed:
            if dst in self.broken:
                raise self.broken[dst]
            if not self.changed.wait_for(lambda: dst in self.open, timeout_s):
                raise TransferTimeout("no room", phase="waiting for room in shared memory")
            self.posts.append((dst, arguments["tag"]))
            self.changed.notify_all()
        return Handle(Posted())

    def make_room(self, *ranks: int) -> None:
        with self.changed:
            self.open.update(ranks)
            self.changed.notify_all()

    def until(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.posts) >= count, 20), self.posts


@pytest.fixture
def room() -> Room:
    return Room()


@pytest.fixture
def outbox(room: Room) -> Any:
    from proxyd_client.torch.outbox import Outbox

    return Outbox(room)  # type: ignore[arg-type]


def message() -> Payload:
    return payload_of(np.ones(4, np.uint8))


def test_with_room_it_is_posted_at_once(room: Room, outbox: Any) -> None:
    room.make_room(1)
    outbox.send(message(), 1, tag=5).wait(0)
    assert room.posts == [(1, 5)]


def test_without_room_it_waits_and_the_order_of_a_destination_stays(room: Room, outbox: Any) -> None:
    handles = [outbox.send(message(), 1, tag=tag) for tag in range(5)]
    assert not any(handle.done() for handle in handles)
    with pytest.raises(TransferTimeout, match="not posted within"):
        handles[0].wait(0.01)
    room.make_room(1)
    for handle in handles:
        handle.wait(20)
    assert room.posts == [(1, tag) for tag in range(5)]
    assert handles[0].eta_s() == 1.5


def test_one_destination_without_room_does_not_hold_up_another(room: Room, outbox: Any) -> None:
    stuck = [outbox.send(message(), 1, tag=0) for _ in range(3)]
    room.make_room(2)
    outbox.send(message(), 2, tag=7).wait(20)
    late = outbox.send(message(), 3, tag=8)
    room.make_room(3)
    late.wait(20)
    assert room.posts == [(2, 7), (3, 8)]
    room.make_room(1)
    for handle in stuck:
        handle.wait(20)
    assert room.posts[2:] == [(1, 0)] * 3


def test_an_error_is_its_own_sends_only(room: Room, outbox: Any) -> None:
    first = outbox.send(message(), 1, tag=0)
    second = outbox.send(message(), 1, tag=1)
    with room.changed:
        room.broken[1] = PeerLost("gone")
    with pytest.raises(PeerLost, match="gone"):
        first.wait(20)
    with pytest.raises(PeerLost):
        second.wait(20)
    assert first.done()
    with room.changed:
        del room.broken[1]
        room.broken[2] = ValueError("of a device")
    room.make_room(1)
    outbox.send(message(), 1, tag=2).wait(20)


def test_a_stranger_error_of_a_mover_reaches_the_waiter(room: Room, outbox: Any) -> None:
    room.broken[1] = OSError("the device is gone")
    payload = message()._replace(mover=object())  # what has a mover is never posted by the caller's thread
    with pytest.raises(ClosedError, match="the device is gone"):
        outbox.send(payload, 1, tag=0).wait(20)


def test_what_was_not_posted_can_be_cancelled(room: Room, outbox: Any) -> None:
    first, second = outbox.send(message(), 1, tag=0), outbox.send(message(), 1, tag=1)
    called = threading.Event()
    second.call_when_done(called.set)
    assert second.cancel()
    assert not second.cancel()
    with pytest.raises(TransferCancelled):
        second.wait(0)
    assert called.wait(20)
    room.make_room(1)
    first.wait(20)
    third = outbox.send(message(), 1, tag=2)
    third.wait(20)
    assert room.posts == [(1, 0), (1, 2)]


def test_callbacks_come_whenever_they_are_asked_for(room: Room, outbox: Any) -> None:
    handle = outbox.send(message(), 1, tag=0)
    before, after = threading.Event(), threading.Event()
    handle.call_when_done(before.set)
    assert not before.is_set()
    room.make_room(1)
    assert before.wait(20)
    handle.call_when_done(after.set)
    assert after.wait(20)


def test_its_thread_ends_when_idle_and_comes_back(room: Room, outbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxyd_client.torch.outbox._LINGER_S", 0.0)
    for tag in range(30):
        handle = outbox.send(message(), 1, tag=tag)
        room.make_room(1)
        handle.wait(20)
        with room.changed:
            room.open.clear()
    assert room.posts == [(1, tag) for tag in range(30)]


def test_the_end_of_its_endpoint_fails_what_waits_and_leaves_no_thread(room: Room, outbox: Any) -> None:
    handles = [outbox.send(message(), rank, tag=0) for rank in (1, 1, 2)]
    with room.changed:
        room.broken = {1: ClosedError("closed"), 2: ClosedError("closed")}
        room.changed.notify_all()
    outbox.finish()
    assert outbox._thread is None
    for handle in handles:
        with pytest.raises(ClosedError):
            handle.wait(0)
    outbox.finish()
