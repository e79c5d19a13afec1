"""What a station makes of broken sockets, late answers and words that nobody understands; the agent is a fake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest

from proxyd.forward.doors import Target
from proxyd.forward.station import WORDS, Station, exit_rank
from proxyd.forward.stream import CREDIT, DATA, MORE, RESET, Stream
from proxyd.runtime.networks import Rule
from proxyd_client import Endpoint, Message, TransferTimeout

GROUP = "7.00c0ffee.1"
RULES = [Rule.parse("127.0.0.1/32:*")]


class Told(NamedTuple):
    """A message that somebody sent or receives."""

    data: bytes
    nbytes: int
    src: int


def message(data: bytes, src: int = 7) -> Message:
    return cast("Message", Told(data, len(data), src))


class FakeHandle:
    """Done when :meth:`end` says so."""

    def __init__(self) -> None:
        self.told: Message | None = None
        self._done = False
        self._then: list[Callable[[], None]] = []

    def end(self, told: Message | None = None) -> None:
        self.told, self._done = told, True
        for then in self._then:
            then()

    def call_when_done(self, then: Callable[[], None]) -> None:
        if self._done:
            then()
        else:
            self._then.append(then)

    def wait(self, timeout_s: float) -> Message | None:
        assert timeout_s == 0, "no wait on the loop"
        return self.told

    def cancel(self) -> None:
        pass


class FakeEndpoint:
    """Everything that is sent is delivered at once; what is received is up to the test."""

    rank, site = 7, "a"

    def __init__(self, no_room_times: int = 0) -> None:
        self.sent: list[tuple[int, int, str, bytes]] = []
        self.receives: list[tuple[str, int, FakeHandle]] = []
        self.closed: list[str] = []
        self._no_room_times = no_room_times

    def isend(self, data: Any, *, dst: int, tag: int = 0, group: str, timeout_s: float | None, **_: Any) -> FakeHandle:
        assert timeout_s == 0, "whoever waits for room on the loop holds all connections up"
        if self._no_room_times:
            self._no_room_times -= 1
            raise TransferTimeout("no room")
        self.sent.append((dst, tag, group, bytes(data)))
        handle = FakeHandle()
        handle.end()
        return handle

    def irecv(self, *, src: int | None, tag: int = 0, group: str) -> FakeHandle:
        handle = FakeHandle()
        self.receives.append((group, tag, handle))
        return handle

    def close_group(self, group: str) -> None:
        self.closed.append(group)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Ours, which doesn't block, and the client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=20)
        ours, _ = listener.accept()
    ours.setblocking(False)
    return ours, client


def station_of(fake: FakeEndpoint, rules: list[Rule] | None = None) -> Station:
    return Station(cast("Endpoint", fake), rules)


def stream_of(fake: FakeEndpoint, sock: socket.socket, hello: bytes = b"") -> Stream:
    return Stream(cast("Endpoint", fake), sock, 9, GROUP, traffic="bulk", share=lambda: 1, hello=hello)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_connection_that_is_cut_off_ends_with_a_reset() -> None:
    async def run() -> None:
        ours, client = tcp_pair()
        with client:
            carrying = asyncio.ensure_future(stream_of(FakeEndpoint(), ours).run())
            await turns()
            carrying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await carrying
            with pytest.raises(ConnectionResetError):
                client.recv(1)

    asyncio.run(run())


def test_a_client_that_is_gone_before_it_is_answered_is_told_to_the_other_side() -> None:
    fake = FakeEndpoint()

    async def run() -> str:
        ours, client = tcp_pair()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        return await stream_of(fake, ours, b"HTTP/1.1 200 Connection established\r\n\r\n").run()

    assert asyncio.run(run())
    assert fake.sent == [(9, DATA, GROUP, bytes([RESET]))]


def test_a_credit_waits_for_room_without_the_loop() -> None:
    fake = FakeEndpoint(no_room_times=2)
    data = bytes(200 << 10)

    async def run() -> None:
        ours, client = tcp_pair()
        with client:
            carrying = asyncio.ensure_future(stream_of(fake, ours).run())
            await turns()
            first = next(handle for _, tag, handle in fake.receives if tag == DATA)
            first.end(message(bytes([MORE]) + data))
            await asyncio.get_running_loop().run_in_executor(None, client.recv, len(data), socket.MSG_WAITALL)
            while not fake.sent:
                await turns()
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)

    asyncio.run(run())
    assert fake.sent == [(9, CREDIT, GROUP, struct.pack("!Q", len(data)))]


@pytest.mark.parametrize(
    "changed",
    [
        {"port": float("inf")},
        {"port": 10**400},
        {"port": -1},
        {"port": "22"},
        {"port": None},
        {"group": WORDS},
        {"group": ""},
        {"group": "8.00c0ffee.1"},
        {"group": 7},
        {"traffic": "urgent"},
        {"op": ["open"]},
    ],
)
def test_a_word_that_makes_no_sense_opens_nothing_and_ends_nothing(changed: dict[str, object]) -> None:
    word = {"op": "open", "group": GROUP, "host": "127.0.0.1", "port": 22, "traffic": "bulk", **changed}
    fake = FakeEndpoint()

    async def run() -> None:
        station = station_of(fake, RULES)
        station._heard(message(json.dumps(word).encode()))
        assert not station._tasks

    asyncio.run(run())
    assert not fake.sent
    assert not fake.closed


def test_whoever_opens_too_late_hears_that_nobody_waits() -> None:
    fake = FakeEndpoint()

    async def run() -> None:
        station_of(fake)._heard(message(json.dumps({"op": "opened", "group": GROUP}).encode(), src=9))

    asyncio.run(run())
    assert fake.sent == [(9, DATA, GROUP, bytes([RESET]))]


def test_a_connection_on_its_way_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        station = station_of(FakeEndpoint(), RULES)
        never = asyncio.Event()
        monkeypatch.setattr(station, "_connect", lambda target: never.wait())
        word = {"op": "open", "group": GROUP, "host": "127.0.0.1", "port": 22, "traffic": "bulk"}
        station._heard(message(json.dumps(word).encode()))
        await turns()
        assert station.streams == 1
        for task in list(station._tasks):
            task.cancel()
        await turns()
        assert station.streams == 0

    asyncio.run(run())


def test_a_closed_door_lets_nobody_in() -> None:
    async def run() -> None:
        station = station_of(FakeEndpoint())
        place = await station.listen("127.0.0.1", 0, "http", "b", None, "bulk", ())
        await turns()
        await station.close_doors()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place, timeout=20)

    asyncio.run(run())


def test_silent_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens connections to a door and says nothing takes some places, and gives them back when it goes."""
    monkeypatch.setattr("proxyd.forward.station.MAX_ASKED", 2)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        station = station_of(FakeEndpoint())
        place = await station.listen("127.0.0.1", 0, "socks5", "b", None, "bulk", ())
        silent = [socket.create_connection(place, timeout=20) for _ in range(3)]
        for sock in silent:
            sock.setblocking(False)
        async with asyncio.timeout(20):
            assert await loop.sock_recv(silent[2], 1) == b"", "there is no place for a third"
            assert station.refused == 1
            silent.pop().close()
            silent.pop().close()
            await turns(100)
            assert station.refused == 2, "who goes without a word is counted, too"
            silent.append(socket.create_connection(place, timeout=20))
            silent[-1].setblocking(False)
            await loop.sock_sendall(silent[-1], b"\x05\x01\x00")
            assert await loop.sock_recv(silent[-1], 2) == b"\x05\x00", "its place is another's"
        for sock in silent:
            sock.close()
        await station.close_doors()
        for task in list(station._tasks):
            task.cancel()

    asyncio.run(run())


def test_a_plain_port_that_leads_nowhere_is_a_reset() -> None:
    fake = FakeEndpoint()

    async def run() -> None:
        station = station_of(fake)
        ours, client = tcp_pair()
        with client:
            serving = asyncio.ensure_future(
                station._serve(ours, "tcp", exit_rank("b"), Target("127.0.0.1", 22), "bulk", "b")
            )
            while not fake.sent:
                await turns()
            group = json.loads(fake.sent[0][3])["group"]
            refused = {"op": "refused", "group": group, "why": "forbidden"}
            station._heard(message(json.dumps(refused).encode(), src=exit_rank("b")))
            await serving
            with pytest.raises(ConnectionResetError):
                client.recv(1)

    asyncio.run(run())
