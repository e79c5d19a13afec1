"""One forwarded connection: a socket here, one there, and messages between.

Theory
------
Two stations (one endpoint of the client library each) carry a connection in a *group* of messages of its own: tag
:data:`DATA` has its bytes, tag :data:`CREDIT` says how many of them the other socket has taken. Messages of one group
and tag arrive in order and once, so nothing needs numbers.

The first byte of a data message tells what it is: ``MORE`` (bytes follow), ``END`` (this direction is over, as a FIN)
or ``RESET`` (the connection is broken). Each direction ends by itself, so half-closed connections work.

*Flow control.* A station sends no more than a window beyond what was credited. A socket that isn't read from so holds
back its own connection; without that its bytes would fill the agents' memory, which others need too.

*Errors.* Whatever breaks (the peer's process, the line for longer than ``peer_timeout``, the socket) ends both sockets
with RST, never with FIN: a program must not take half a file for a whole one. So a socket is made to end with RST from
its first byte on, and may end otherwise only when both directions are over: a station that is killed resets it, too.
When a stream ends, its group is closed at both ends, which drops what is still under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable

from proxyd_client import ClosedError, Endpoint, Handle, Message, ProxydError, TransferTimeout

log = logging.getLogger("proxyd.forward")

DATA, CREDIT = 0, 1
MORE, END, RESET = 0, 1, 2
CHUNK_BYTES = 1 << 20
"""Of a message: large enough that asking for it costs nothing, small enough that the first bytes don't wait for it."""
FULL_BYTES = 256 << 10
"""Less than that waits for company for :data:`GATHER_S` while earlier messages are under way (RFC 896's idea): small
messages ask for no grant, and a file should go out under grants."""
GATHER_S = 0.003
WINDOW_BYTES = 32 << 20
"""Of one stream: the BDP of 4 Gbit/s at 60 ms."""
SHARED_BYTES = 48 << 20
"""Of all streams of a station: below an agent's `eager` (64 MiB), so that no stream waits behind another's bytes."""
LEAST_WINDOW_BYTES = 256 << 10
ROOM_S = 0.005
RESET_S = 5.0
"""So long a stream that broke tries to say so to its peer."""
_RESET_AT_CLOSE, _FIN_AT_CLOSE = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
_CREDIT = struct.Struct("!Q")


def reset_at_close(sock: socket.socket) -> None:
    """However it ends from now on, whoever is at the other end hears of a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)


async def result(handle: Handle[Message]) -> Message:
    """Await a receive; it is taken back when the waiting is cancelled."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell() -> None:
        if not done.done():
            done.set_result(None)

    def in_its_thread() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell)

    handle.call_when_done(in_its_thread)
    try:
        await done
    except asyncio.CancelledError:
        handle.cancel()
        raise
    return handle.wait(0)


class Stream:
    """See the module's text.

    :param sock: connected and non-blocking; it is closed at the end.
    :param peer: rank of the other station.
    :param share: how many streams the station has: they share its window.
    :param hello: what the client hears before the peer's bytes.
    :param first: what the client has sent already.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        sock: socket.socket,
        peer: int,
        group: str,
        *,
        traffic: str,
        share: Callable[[], int],
        hello: bytes = b"",
        first: bytes = b"",
    ) -> None:
        self._endpoint = endpoint
        self._sock = sock
        self._peer = peer
        self._group = group
        self._traffic = traffic
        self._share = share
        self._hello = hello
        self._first = first
        reset_at_close(sock)
        self._credited = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way = 0
        self.sent_bytes = self.taken_bytes = self._credit_bytes = 0
        """Sent to the peer; given to the socket; what the peer's socket has taken of ours."""

    async def run(self) -> str:
        """Carry until both directions are over; answers why it ended otherwise, empty: it is complete."""
        directions: list[asyncio.Future[None]] = []
        credits = asyncio.ensure_future(self._credits())
        try:
            if self._hello:
                await asyncio.get_running_loop().sock_sendall(self._sock, self._hello)
            directions += [asyncio.ensure_future(one) for one in (self._outwards(), self._inwards())]
            while not all(one.done() for one in directions):
                waiting = [one for one in (*directions, credits, self._failed) if not one.done()]
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _FIN_AT_CLOSE)
        except (OSError, ProxydError) as error:
            self._sock.close()
            with contextlib.suppress(ProxydError, TimeoutError):
                async with asyncio.timeout(RESET_S):
                    await self._post(bytes([RESET]), DATA, self._traffic)
            return str(error) or type(error).__name__
        finally:
            for task in (*directions, credits, self._failed):
                task.cancel()
            await asyncio.gather(*directions, credits, self._failed, return_exceptions=True)
            self._sock.close()
        return ""

    # -- out of the socket -------------------------------------------------------------------------------------------

    async def _outwards(self) -> None:
        loop = asyncio.get_running_loop()
        buffer = bytearray(1 + CHUNK_BYTES)
        view = memoryview(buffer)
        have, over = len(self._first), False
        view[1 : 1 + have] = self._first
        while not over:
            if not have:
                have = await loop.sock_recv_into(self._sock, view[1:])
                over = not have
            if not over:
                have, over = self._gather(view, have)
                if have < FULL_BYTES and self._under_way and not over:
                    await asyncio.sleep(GATHER_S)
                    have, over = self._gather(view, have)
            if have:
                while self.sent_bytes - self._credit_bytes >= self._window():
                    self._credited.clear()
                    await self._credited.wait()
                buffer[0] = MORE
                await self._send(view[: 1 + have])
                self.sent_bytes += have
                have = 0
        await self._send(memoryview(bytes([END])))
        while self._under_way:
            self._credited.clear()
            await self._credited.wait()

    def _gather(self, view: memoryview, have: int) -> tuple[int, bool]:
        """What more is there already; and whether the client has ended."""
        while have < CHUNK_BYTES:
            try:
                got = self._sock.recv_into(view[1 + have :])
            except BlockingIOError:
                return have, False
            if not got:
                return have, True
            have += got
        return have, False

    def _window(self) -> int:
        return max(LEAST_WINDOW_BYTES, min(WINDOW_BYTES, SHARED_BYTES // max(1, self._share())))

    async def _post(self, data: bytes | memoryview, tag: int, traffic: str) -> Handle[None]:
        """Without a wait in the library, which all streams would share."""
        while True:
            try:
                return self._endpoint.isend(
                    data, dst=self._peer, tag=tag, group=self._group, traffic=traffic, timeout_s=0
                )
            except TransferTimeout:  # no room in shared memory for the moment
                await asyncio.sleep(ROOM_S)

    async def _send(self, data: memoryview) -> None:
        handle = await self._post(data, DATA, self._traffic)
        loop = asyncio.get_running_loop()
        self._under_way += 1

        def ended() -> None:
            self._under_way -= 1
            self._credited.set()
            try:
                handle.wait(0)
            except ProxydError as error:
                if not self._failed.done():
                    self._failed.set_exception(error)

        def in_its_thread() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ended)

        handle.call_when_done(in_its_thread)

    async def _credits(self) -> None:
        while True:
            message = await result(self._endpoint.irecv(src=self._peer, tag=CREDIT, group=self._group))
            if message.nbytes != _CREDIT.size:
                raise ClosedError("the other side speaks of credits as nobody does")
            self._credit_bytes = _CREDIT.unpack(bytes(message.data))[0]
            self._credited.set()

    # -- into the socket ---------------------------------------------------------------------------------------------

    async def _inwards(self) -> None:
        loop = asyncio.get_running_loop()
        told_bytes = 0
        following = self._endpoint.irecv(src=self._peer, tag=DATA, group=self._group)
        while True:
            handle, following = following, self._endpoint.irecv(src=self._peer, tag=DATA, group=self._group)
            try:
                message = await result(handle)
            except BaseException:
                following.cancel()
                raise
            data = memoryview(message.data)
            kind = data[0] if len(data) else RESET
            if kind == MORE:
                await loop.sock_sendall(self._sock, data[1:])
                self.taken_bytes += len(data) - 1
                if self.taken_bytes - told_bytes >= LEAST_WINDOW_BYTES // 2:
                    told_bytes = self.taken_bytes
                    await self._post(_CREDIT.pack(told_bytes), CREDIT, "pipeline")
                continue
            following.cancel()
            if kind == END:
                with contextlib.suppress(OSError):  # the client has gone already
                    self._sock.shutdown(socket.SHUT_WR)
                return
            raise ClosedError("the other side broke the connection off")
