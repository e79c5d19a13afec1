"""The control connection between two agents: pings tell when they left, arrived and were answered."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
import uvloop

from proxyd.agent import tcp
from proxyd.agent.channel import PROBE_NS, ControlChannel
from proxyd.wire import peer as wire
from proxyd.wire.envelope import TransferId

MS = 1_000_000
TIMEOUT_NS = 60_000 * MS


def pair() -> tuple[socket.socket, socket.socket]:
    """A connection over loopback: only TCP notes when what is received arrived."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for sock in (one, other):
        sock.setblocking(False)
    return one, other


class Side:
    """One end, and what it was told."""

    def __init__(self, sock: socket.socket) -> None:
        self.got: list[wire.Frame] = []
        self.closed: list[str] = []
        self.channel = ControlChannel(sock, self._received, self.closed.append, timeout_ns=TIMEOUT_NS)

    def _received(self, _: TransferId, frame: wire.Frame) -> None:
        self.got.append(frame)


async def turns(sock: socket.socket) -> None:
    """Let the loop run until the socket has something to read, and that was read."""
    await readable(sock)
    for _ in range(3):
        await asyncio.sleep(0)


async def readable(sock: socket.socket) -> None:
    # A duplicate: the channel itself watches the socket, and a loop watches each descriptor once.
    copy = sock.dup()
    came = asyncio.Event()
    asyncio.get_running_loop().add_reader(copy, came.set)
    try:
        async with asyncio.timeout(10):
            await came.wait()
    finally:
        asyncio.get_running_loop().remove_reader(copy)
        copy.close()


def test_a_ping_is_answered_with_the_times_of_its_arrival_and_of_the_answer() -> None:
    async def run() -> wire.Frame:
        mine, theirs = pair()
        side = Side(theirs)
        before_ns = time.monotonic_ns()
        mine.sendall(wire.encode(wire.Ping(12345)))
        decoder = wire.ControlDecoder()
        async with asyncio.timeout(10):
            data = await asyncio.get_running_loop().sock_recv(mine, 4096)
        decoder.feed(data)
        item = decoder.next_frame()
        after_ns = time.monotonic_ns()
        side.channel.close()
        mine.close()
        assert item is not None
        answer = item[1]
        assert isinstance(answer, wire.Pong)
        assert answer.left_ns == 12345
        assert before_ns - MS <= answer.arrived_ns <= answer.answered_ns <= after_ns
        assert not side.got, "pings are the channel's own"
        return answer

    uvloop.run(run())


def test_what_waits_for_a_busy_process_arrived_before() -> None:
    """The kernel notes the arrival: a process that reads 5 ms later answers with a time 5 ms earlier."""

    async def run() -> list[int]:
        mine, theirs = pair()
        side = Side(theirs)
        decoder = wire.ControlDecoder()
        ages_ns = [0]
        # The kernel begins to note arrivals a little after the first socket of the machine has asked for it.
        while ages_ns[-1] < 4 * MS and len(ages_ns) < 100:
            mine.sendall(wire.encode(wire.Ping(1)))
            until_ns = time.monotonic_ns() + 5 * MS
            while time.monotonic_ns() < until_ns:
                pass  # the process is busy: its loop doesn't run
            decoder.feed(await asyncio.get_running_loop().sock_recv(mine, 4096))
            item = decoder.next_frame()
            assert item is not None
            assert isinstance(item[1], wire.Pong)
            ages_ns.append(item[1].answered_ns - item[1].arrived_ns)
        side.channel.close()
        mine.close()
        return ages_ns

    assert uvloop.run(run())[-1] >= 4 * MS


@pytest.mark.parametrize("pace_bytes_per_s", [0, 1_000, 10**9])
def test_probes_are_counted_and_not_sent_in_a_row(pace_bytes_per_s: int) -> None:
    async def run() -> tuple[int, int]:
        mine, theirs = pair()
        side, other = Side(mine), Side(theirs)
        for _ in range(5):
            side.channel.probe(pace_bytes_per_s)
        raw = theirs.recv(4096, socket.MSG_PEEK)
        while not side.channel.delays.samples:
            await turns(mine)
        samples = side.channel.delays.samples
        side.channel.close()
        other.channel.close()
        return len(raw) // len(wire.encode(wire.Ping(1))), samples

    assert uvloop.run(run()) == (1, 1)


def test_probes_take_little_of_a_slow_link() -> None:
    """1 Mbit/s: 5 of them in a second and not 100, which were a twelfth of it."""

    async def run() -> list[int]:
        mine, theirs = pair()
        side = Side(mine)
        sent = []
        for ago_ns in (PROBE_NS, 150 * MS, 250 * MS):
            side.channel._pinged_ns = time.monotonic_ns() - ago_ns
            side.channel.probe(125_000)
            try:
                sent.append(len(theirs.recv(4096)))
            except BlockingIOError:
                sent.append(0)
        side.channel.close()
        theirs.close()
        return sent

    assert uvloop.run(run()) == [0, 0, len(wire.encode(wire.Ping(1)))]


@pytest.mark.parametrize("left_ns", [0, 2**64 - 1])
def test_an_answer_to_a_ping_that_was_not_sent_says_nothing(left_ns: int) -> None:
    async def run() -> int:
        mine, theirs = pair()
        side = Side(theirs)
        mine.sendall(wire.encode(wire.Pong(left_ns, 5, 6)) + wire.encode(wire.Credit()))
        while not side.got:
            await turns(theirs)
        side.channel.close()
        mine.close()
        return side.channel.delays.samples

    assert uvloop.run(run()) == 0


def test_the_age_of_what_was_received() -> None:
    now_ns = time.time_ns()
    note = tcp._TIMESPEC.pack(*divmod(now_ns - 5 * MS, 10**9))
    assert 5 * MS <= tcp.waited_ns([(socket.SOL_SOCKET, tcp._SO_TIMESTAMPNS, note)]) < 1000 * MS
    future = tcp._TIMESPEC.pack(*divmod(now_ns + 10**12, 10**9))
    for nothing in ([], [(socket.SOL_SOCKET, tcp._SO_TIMESTAMPNS, future)], [(socket.SOL_SOCKET, 1, b"")]):
        assert tcp.waited_ns(nothing) == 0


async def answered(answer: asyncio.Future[int]) -> int:
    """The round trip that a ping tells, over real sockets."""
    async with asyncio.timeout(10):
        return await answer


def test_a_ping_that_somebody_asks_for_is_answered_also_in_full_packets() -> None:
    async def scenario() -> None:
        one, other = (Side(sock) for sock in pair())
        assert await answered(one.channel.ask()) > 0
        sizes = one.channel.path_sizes()
        assert sizes.path_mtu > sizes.segment_bytes > 0
        assert await answered(one.channel.ask(20_000)) > 0
        assert not one.channel._asked, "nothing is kept"
        assert (one.got, one.closed) == ([], [])
        for side in (one, other):
            side.channel.close()

    uvloop.run(scenario())


def test_a_ping_ends_with_its_connection() -> None:
    async def scenario() -> None:
        mine, theirs = pair()
        side = Side(mine)
        answer = side.channel.ask()
        theirs.close()
        async with asyncio.timeout(10):
            await asyncio.wait({answer})
        assert answer.cancelled()
        assert side.closed

    uvloop.run(scenario())
