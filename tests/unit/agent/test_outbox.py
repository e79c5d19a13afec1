"""What waits for a client that reads slowly, or not at all."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from proxyd.agent import outbox
from proxyd.agent.outbox import MOST_UNHURRIED, Outbox, Turn


def play(body: Callable[[Outbox, socket.socket, list[str]], Awaitable[None]]) -> None:
    async def run() -> None:
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        theirs.setblocking(False)
        failures: list[str] = []
        box = Outbox(mine, failures.append)
        async with asyncio.timeout(10):
            await body(box, theirs, failures)
        box.close()
        mine.close()
        theirs.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def read(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += await asyncio.get_running_loop().sock_recv(sock, nbytes - len(data))
    return data


def test_frames_and_payload_leave_in_order_whatever_the_socket_takes() -> None:
    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        payload = os.urandom(3 << 20)
        box.frame(b"first")
        box.payload(memoryview(payload))
        box.frame(b"second")
        assert await read(theirs, 5 + len(payload) + 6) == b"first" + payload + b"second"
        assert failures == []

    play(body)


def test_a_descriptor_rides_with_the_first_byte_of_its_frame() -> None:
    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        fds = [os.memfd_create(name) for name in ("one", "two")]
        box.frame(b"plain")
        for number, fd in enumerate(fds):
            box.frame(b"with%d" % number, fd)
            os.close(fd)
        box.frame(b"end")
        await asyncio.sleep(0)  # frames of one turn of the loop leave at its end
        got: list[tuple[bytes, int]] = []
        for _ in range(2):
            data, ancillary, _, _ = theirs.recvmsg(100, socket.CMSG_SPACE(64))
            passed = array.array("i")
            for _, _, raw in ancillary:
                passed.frombytes(raw)
            got.append((data, len(passed)))
            for fd in passed:
                os.close(fd)
        # The kernel ends a read behind a descriptor, so that nobody can mistake whose it is.
        assert got == [(b"plainwith0", 1), (b"with1end", 1)]
        assert failures == []

    play(body)


def test_advice_is_left_out_for_a_client_that_lags() -> None:
    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        for _ in range(20):
            box.frame(bytes(100_000))
            await asyncio.sleep(0)
        box.advice(b"old news")
        box.frame(b"last")
        assert (await read(theirs, 2_000_004))[-4:] == b"last"
        assert failures == []

    play(body)


def test_a_client_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_FRAME_BYTES", 1 << 20)

    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        box.payload(memoryview(bytes(8 << 20)))
        await asyncio.sleep(0)
        assert failures == [], "payload is kept as views and doesn't count"
        for _ in range(30):
            box.frame(bytes(100_000))
            await asyncio.sleep(0)
        assert len(failures) == 1
        assert "has not read" in failures[0]

    play(body)


def test_a_stopped_client_is_kept_over_many_small_frames_and_reads_all_of_them_in_the_end() -> None:
    """What a trainer that stands still is told of 100,000 small messages; in pieces of their own this took 40 MiB."""
    frame = bytes(range(100))

    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        tracemalloc.start()
        for number in range(100_000):
            box.frame(frame)
            if number % 1000 == 0:
                await asyncio.sleep(0)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert failures == []
        assert kept < 1.5 * 100_000 * len(frame)
        assert await read(theirs, 100_000 * len(frame)) == frame * 100_000

    play(body)


def test_what_is_said_when_others_have_left_leaves_too() -> None:
    """Whoever waited for the frames before it may say more at that moment, while the last flush is still at it."""

    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        big = bytes(2 << 20)
        box.frame(big)
        await asyncio.sleep(0.01)  # the socket is full
        box.then(lambda: box.frame(b"more"))
        box.frame(b"behind")
        got = await read(theirs, len(big) + 10)
        assert got[len(big) :] == b"behindmore"
        box.then(lambda: box.frame(b"at once"))
        assert await read(theirs, 7) == b"at once"
        assert failures == []

    play(body)


def test_what_nobody_waits_for_leaves_with_the_next_frame() -> None:
    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        box.unhurried(b"done")
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            theirs.recv(100)
        box.frame(b"offered")
        await asyncio.sleep(0)
        assert theirs.recv(100) == b"doneoffered"

    play(body)


def test_what_nobody_waits_for_leaves_by_itself_in_the_end() -> None:
    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        box.unhurried(b"done")
        box.unhurried(b"too")
        assert await read(theirs, 7) == b"donetoo"
        for number in range(MOST_UNHURRIED):
            box.unhurried(b"%02d" % number)
        await asyncio.sleep(0)
        assert theirs.recv(100) == b"".join(b"%02d" % number for number in range(MOST_UNHURRIED))
        box.unhurried(b"last")
        box.close()
        assert theirs.recv(100) == b"last"

    play(body)


def test_who_waits_for_what_nobody_else_does_need_not_wait_long() -> None:
    async def body(box: Outbox, theirs: socket.socket, failures: list[str]) -> None:
        called: list[bool] = []
        box.unhurried(b"done")
        box.then(lambda: called.append(True))
        await asyncio.sleep(0)
        assert called == [True]
        assert theirs.recv(100) == b"done"

    play(body)


def test_all_that_a_turn_led_to_has_left_at_its_end_in_one_piece_each() -> None:
    async def run() -> None:
        turn = Turn()
        pairs = [socket.socketpair() for _ in range(2)]
        for ends in pairs:
            for end in ends:
                end.setblocking(False)
        receiver, sender = (Outbox(mine, lambda reason: None, turn) for mine, _ in pairs)
        seen_meanwhile: list[bytes] = []

        def work() -> None:
            receiver.frame(b"offered")
            receiver.frame(b"landed")
            receiver.then(lambda: sender.frame(b"delivered"))
            turn.write()
            seen_meanwhile.extend(theirs.recv(100) for _, theirs in pairs)
            receiver.frame(b"more")

        turn.run(work)
        assert seen_meanwhile == [b"offeredlanded", b"delivered"]
        assert pairs[0][1].recv(100) == b"more"
        receiver.frame(b"later")  # outside of a turn: at the end of the loop's round, as ever
        await asyncio.sleep(0)
        assert pairs[0][1].recv(100) == b"later"
        for box in (receiver, sender):
            box.close()
        for ends in pairs:
            for end in ends:
                end.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
