"""Places for strangers, and descriptors: who is sent away when there are no more."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from proxyd.runtime import limits
from proxyd.runtime.limits import Descriptors, Dismiss, Door, Visitor, WaitingRoom, fair_address


def enter(room: WaitingRoom, address: str, gone: list[Visitor]) -> Visitor:
    visitor = room.enter(address)
    visitor.dismiss = lambda reason: gone.append(visitor)
    return visitor


def test_a_full_room_sends_the_oldest_of_the_largest_crowd_away() -> None:
    room, gone = WaitingRoom(4), list[Visitor]()
    alone = enter(room, "peer", gone)
    crowd = [enter(room, "crowd", gone) for _ in range(3)]
    newcomer = enter(room, "another", gone)
    assert gone == [crowd[0]]
    enter(room, "crowd", gone)
    assert gone == crowd[:2], "a crowd pushes out its own"
    assert len(room) == 4
    alone.leave()
    alone.leave()
    newcomer.leave()
    assert len(room) == 2
    enter(room, "crowd", gone)
    assert gone == crowd[:2], "there is room again"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=200))
def test_no_address_loses_a_place_to_one_that_has_more(steps: list[tuple[str, bool]]) -> None:
    room, gone, here = WaitingRoom(5), list[Visitor](), list[Visitor]()
    for address, leaves in steps:
        if leaves and here:
            here.pop(0).leave()
        held = Counter(visitor.address for visitor in here)
        before = len(gone)
        here.append(enter(room, address, gone))
        for visitor in gone[before:]:
            assert held[visitor.address] == max(held.values())
            here.remove(visitor)
        assert len(room) == len(here) <= 5


def test_addresses_of_one_ipv6_network_count_together() -> None:
    assert fair_address(("10.1.2.3", 5)) == "10.1.2.3"
    assert fair_address(("2001:db8:1:2:3:4:5:6", 5, 0, 0)) == fair_address(("2001:db8:1:2:9:9:9:9", 6, 0, 0))
    assert fair_address(("2001:db8:1:2:3:4:5:6", 5, 0, 0)) != fair_address(("2001:db8:1:3:3:4:5:6", 5, 0, 0))
    assert fair_address(("::1", 5, 0, 0)) == "::1"


def test_the_last_descriptors_are_kept_back() -> None:
    few = Descriptors(64, 8)
    assert not few.scarce(55)
    assert few.scarce(56)
    here = Descriptors.here()
    assert 0 < here.reserved <= max(limits.LEAST_RESERVED, here.limit // 8)


def test_all_descriptors_that_there_may_be_are_taken() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        assert limits.raise_descriptor_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Hall:
    """A door whose strangers say nothing, and who was sent away."""

    def __init__(self, *, places: int = 4, descriptors: Descriptors | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.listener.setblocking(False)
        self.inside: dict[socket.socket, Callable[[], None]] = {}
        self.news = asyncio.Event()
        self.door = Door(
            self.listener, "hall", self._arrived, logging.getLogger("hall"), places=places, descriptors=descriptors
        )

    def _arrived(self, sock: socket.socket, address: object, leave: Callable[[], None]) -> Dismiss:
        self.inside[sock] = leave
        self.news.set()

        def dismiss(reason: str) -> None:
            del self.inside[sock]
            sock.close()

        return dismiss

    def call(self) -> socket.socket:
        sock = socket.create_connection(self.listener.getsockname())
        sock.setblocking(False)
        return sock

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.news.clear()
                await self.news.wait()


def play(body: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())  # type: ignore[arg-type] # a coroutine, as written below


def test_a_door_closes_the_oldest_when_all_places_are_taken() -> None:
    async def body() -> None:
        hall = Hall(places=3)
        callers = [hall.call() for _ in range(5)]
        ports = {caller.getsockname()[1] for caller in callers[2:]}
        await hall.until(lambda: {sock.getpeername()[1] for sock in hall.inside} == ports)
        for caller in callers[:2]:
            assert await asyncio.get_running_loop().sock_recv(caller, 1) == b""
        assert dict(hall.door.refusals()) == {
            "crowded": 2,
            "descriptors": 0,
            "hello": 0,
            "limit": 0,
            "silent": 0,
            "worker": 0,
        }
        for leave in list(hall.inside.values()):
            leave()
        assert len(hall.door.room) == 0
        hall.door.close()

    play(body)


def test_scarce_descriptors_go_to_the_newest_stranger() -> None:
    async def body() -> None:
        hall = Hall(places=10)
        first = hall.call()
        await hall.until(lambda: len(hall.inside) == 1)
        hall.door._descriptors = Descriptors(0, 0)  # whatever number comes next is one of the last
        second = hall.call()
        await hall.until(lambda: second.getsockname() in [sock.getpeername() for sock in hall.inside])
        assert await asyncio.get_running_loop().sock_recv(first, 1) == b""
        assert dict(hall.door.refusals())["descriptors"] == 1
        # The one who is known is not sent away; then it is the newcomer who has to go.
        for leave in list(hall.inside.values()):
            leave()
        third = hall.call()
        assert await asyncio.get_running_loop().sock_recv(third, 1) == b""
        assert len(hall.inside) == 1
        hall.door.close()

    play(body)


def test_out_of_descriptors_it_says_so_once_and_accepts_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "PAUSE_S", 0.01)

    class Short:
        """A listening socket whose process has no descriptor left, for some calls."""

        def __init__(self, sock: socket.socket, times: int) -> None:
            self.sock, self.times = sock, times
            self.fileno = sock.fileno

        def accept(self) -> tuple[socket.socket, object]:
            if self.times:
                self.times -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return self.sock.accept()

    async def body() -> None:
        hall = Hall()
        hall.door._sock = Short(hall.listener, 5)  # type: ignore[assignment]
        hall.call()
        await hall.until(lambda: bool(hall.inside))
        hall.door._sock = hall.listener
        hall.door.close()

    play(body)
    assert sum("cannot accept" in record.message for record in caplog.records) == 1
