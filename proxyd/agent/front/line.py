"""What the front and a worker say to each other: questions, their answers, and news, over a pair of Unix sockets.

A frame is two lengths, a JSON object, and bytes that belong to it. Both ends are processes of one daemon and of one
version, so nothing here is negotiated; a frame that makes no sense is a bug, and ends the line.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from proxyd.core.errors import RemoteError

_LENGTHS = struct.Struct("!II")
MAX_BYTES = 64 << 20
"""Of a frame: a scrape of a worker with as many series as there may be has some megabytes."""

Serve = Callable[[bytes], Awaitable[bytes]]


class LineError(RemoteError):
    """The other end refused a question, doesn't answer in time, or is gone. ``status``: gRPC's word for the refusal."""

    code = "worker-answer"

    def __init__(self, what: str, *, status: str = "") -> None:
        super().__init__(what)
        self.status = status


def encode(head: Mapping[str, Any], body: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(head).encode()
    return _LENGTHS.pack(len(text), len(body)) + text + body


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes]:
    """One frame, before there is a loop. Raises LineError."""
    size, body_size = _LENGTHS.unpack(_exactly(sock, _LENGTHS.size))
    return json.loads(_exactly(sock, size)), _exactly(sock, body_size)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise LineError("the other process is gone")
        data += piece
    return bytes(data)


class Line:
    """One end.

    :param served: what may be asked here. A function answers, or raises LineError.
    :param heard: takes the other end's news.
    """

    def __init__(
        self, served: Mapping[str, Serve], heard: Callable[[dict[str, Any]], None] = lambda news: None
    ) -> None:
        self._served = served
        self._heard = heard
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, sock: socket.socket) -> asyncio.StreamReader:
        """News can be told from now on. Takes ``sock`` over; answers what :meth:`run` reads from."""
        sock.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_BYTES)
        return reader

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until the other end is gone, or this is cancelled."""
        assert self._writer is not None
        try:
            while True:
                size, body_size = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
                if size + body_size > MAX_BYTES:
                    raise LineError(f"a frame of {size + body_size} bytes came; {MAX_BYTES} are possible")
                head = json.loads(await reader.readexactly(size))
                self._take(head, await reader.readexactly(body_size))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer, self._writer = self._writer, None
            writer.close()
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(LineError("the other process is gone"))
            for task in list(self._answers):
                task.cancel()

    def _take(self, head: dict[str, Any], body: bytes) -> None:
        if "ask" in head:
            task = asyncio.get_running_loop().create_task(self._answer(head, body))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
        elif "answer" in head:
            future = self._asked.get(head["answer"])
            if future is not None and not future.done():
                if "error" in head:
                    future.set_exception(LineError(head["error"], status=head["status"]))
                else:
                    future.set_result(body)
        else:
            self._heard(head)

    async def _answer(self, head: dict[str, Any], body: bytes) -> None:
        number = head["number"]
        try:
            answer = await self._served[head["ask"]](body)
        except LineError as error:
            self._send({"answer": number, "error": error.what, "status": error.status})
        else:
            self._send({"answer": number}, answer)

    def _send(self, head: Mapping[str, Any], body: bytes = b"") -> None:
        if self._writer is not None:
            self._writer.write(encode(head, body))

    def tell(self, **news: Any) -> None:
        """News, to be heard there; lost when nobody is there."""
        self._send(news)

    async def ask(self, what: str, body: bytes = b"", *, timeout_s: float) -> bytes:
        """Raises LineError."""
        if self._writer is None:
            raise LineError("the other process is not there")
        number = next(self._numbers)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._send({"ask": what, "number": number}, body)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise LineError(f"it has not answered within {timeout_s:g} s") from None
        finally:
            del self._asked[number]
