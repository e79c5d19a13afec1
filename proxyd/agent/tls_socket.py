"""TLS on a connection between agents, with the calls of a plain non-blocking socket.

The kernel's own socket stays in reach and plain: pacing, unsent limit, wake-up marks, time stamps and counters are set
and read as without TLS. Records are made and opened in memory (``ssl.MemoryBIO``), not by ``ssl.SSLSocket``: that one
would read each record of 16 KiB by two system calls and write it by one, has no ``recvmsg`` for the time stamps, and
doesn't tell how many bytes of a record the kernel has.

**Counting.** Grants count payload, and the kernel counts what is on the wire. For each record this class notes where it
ends in both; :meth:`TlsSocket.plain_state` turns the kernel's two positions into payload. A record counts once all of
it is there (no byte of it can be read before), so what has left and what was delivered is never overstated, and
understated by less than 16 KiB for each stream. ``send`` answers the payload of records that the kernel has whole, and
whoever calls it again goes on from there; so no ciphertext waits anywhere that a caller doesn't know of.

**Closing.** No ``close_notify`` is sent, and a connection that ends without one is no error: frames have lengths and
messages acknowledgements, so an end that was forged is found out there, as it is without TLS.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from proxyd.runtime.tls import RECORD_BYTES, RECORD_OVERHEAD_BYTES

Buffer: TypeAlias = "bytes | bytearray | memoryview"

SEAL_BYTES = 8 * RECORD_BYTES
"""Payload that is sealed at once: a system call for each record would cost as much as the cipher, and what is sealed
can't be taken back."""
READ_BYTES = 256 << 10
_GREETING_BYTES = 16 << 10


class _Position:
    """The payload of all records that end before a position on the wire."""

    __slots__ = ("_ahead", "plain_bytes")

    def __init__(self) -> None:
        self._ahead: deque[tuple[int, int]] = deque()
        self.plain_bytes = 0

    def add(self, wire_end: int, plain_end: int) -> None:
        self._ahead.append((wire_end, plain_end))

    def move(self, wire: int) -> int:
        ahead = self._ahead
        while ahead and ahead[0][0] <= wire:
            self.plain_bytes = ahead.popleft()[1]
        return self.plain_bytes


class TlsSocket:
    """See the module's text. Made by :func:`secure`; takes ``sock`` over."""

    _scratch = memoryview(bytearray(READ_BYTES))

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self.raw = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._ended = False
        self._sealed = memoryview(b"")
        """What the kernel hasn't taken yet of the records that were sealed last."""
        self._records: deque[tuple[int, int]] = deque()
        """Of these: where each ends on the wire, and its payload."""
        self._sealed_wire_bytes = 0
        self._sealed_plain_bytes = 0
        self._taken_wire_bytes = 0
        self._taken_plain_bytes = 0
        self._left, self._delivered = _Position(), _Position()

    # -- what is the kernel's ----------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Of the plain socket: for the loop, and for ioctl."""
        return self.raw.fileno()

    def getsockopt(self, *args: Any) -> Any:
        """Of the plain socket."""
        return self.raw.getsockopt(*args)

    def setsockopt(self, *args: Any) -> None:
        """Of the plain socket."""
        self.raw.setsockopt(*args)

    def close(self) -> None:
        """Of the plain socket."""
        self.raw.close()

    # -- the handshake -----------------------------------------------------------------------------------------------

    async def shake_hands(self) -> None:
        """Raises ssl.SSLError (the other side was told by an alert), OSError."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush_greeting(loop)
                data = await loop.sock_recv(self.raw, _GREETING_BYTES)
                if not data:
                    raise ConnectionResetError("the other side closed the connection in the TLS handshake") from None
                self._incoming.write(data)
            except ssl.SSLError:
                await self._flush_greeting(loop)
                raise
            else:
                await self._flush_greeting(loop)
                return

    async def _flush_greeting(self, loop: asyncio.AbstractEventLoop) -> None:
        if data := self._outgoing.read():
            await loop.sock_sendall(self.raw, data)

    def certificate(self) -> dict[str, Any] | None:
        """The other side's, verified."""
        return self._tls.getpeercert()

    async def greet(self, data: bytes) -> None:
        """Send all of a small frame, before the connection has its user."""
        loop = asyncio.get_running_loop()
        self._seal((data,), 0)
        sealed, self._sealed = self._sealed, memoryview(b"")
        await loop.sock_sendall(self.raw, sealed)
        self._take(len(sealed))

    async def hear(self, nbytes: int) -> bytes:
        """Up to ``nbytes``, as soon as there are any; nothing at the end."""
        loop = asyncio.get_running_loop()
        buffer = bytearray(nbytes)
        while not (got := self._open_into(memoryview(buffer))) and not self._ended:
            data = await loop.sock_recv(self.raw, _GREETING_BYTES)
            if not data:
                return b""
            self._incoming.write(data)
        return bytes(buffer[:got])

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, data: Buffer) -> int:
        """As :meth:`sendmsg`."""
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Payload bytes whose records the kernel has whole. Call again with what is left of the same bytes: it may be
        sealed already. Raises BlockingIOError when that is none, OSError."""
        total = sum(memoryview(buffer).nbytes for buffer in buffers)
        done = 0
        while True:
            if not self._sealed:
                if done >= total:
                    return done
                self._seal(buffers, done)
            try:
                sent = self.raw.send(self._sealed)
            except BlockingIOError:
                if done:
                    return done
                raise
            self._sealed = self._sealed[sent:]
            done += self._take(sent)
            if self._sealed:
                if done:
                    return done
                raise BlockingIOError

    def _seal(self, buffers: Sequence[Buffer], start: int) -> None:
        """Make records of what begins at ``start`` of all buffers, of :data:`SEAL_BYTES` at most."""
        budget = SEAL_BYTES
        for buffer in buffers:
            with memoryview(buffer) as view:
                if start >= view.nbytes:
                    start -= view.nbytes
                    continue
                while start < view.nbytes and budget > 0:
                    with view[start : start + min(RECORD_BYTES, budget)] as piece:
                        plain = self._tls.write(piece)
                    self._sealed_plain_bytes += plain
                    wire_end = self._sealed_wire_bytes + self._outgoing.pending
                    self._records.append((wire_end, plain))
                    self._left.add(wire_end, self._sealed_plain_bytes)
                    self._delivered.add(wire_end, self._sealed_plain_bytes)
                    start += plain
                    budget -= plain
                start = 0
        self._sealed_wire_bytes += self._outgoing.pending
        self._sealed = memoryview(self._outgoing.read())

    def _take(self, wire_bytes: int) -> int:
        """The kernel took so much of what was sealed; answers the payload of records that are whole now."""
        self._taken_wire_bytes += wire_bytes
        plain = 0
        while self._records and self._records[0][0] <= self._taken_wire_bytes:
            plain += self._records.popleft()[1]
        self._taken_plain_bytes += plain
        return plain

    def plain_bytes_behind(self, unacked_bytes: int, unsent_bytes: int) -> tuple[int, int]:
        """Payload in records that are not wholly acknowledged, and not wholly sent.

        :param unacked_bytes: what the kernel says, on the wire; ``unsent_bytes`` are among them.
        """
        delivered = self._delivered.move(self._taken_wire_bytes - unacked_bytes)
        left = self._left.move(self._taken_wire_bytes - unsent_bytes)
        return self._taken_plain_bytes - delivered, self._taken_plain_bytes - left

    # -- receiving ---------------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """What was read from the kernel and not handed on, but for a record that isn't whole. No readiness tells of
        it."""
        return self._incoming.pending + self._tls.pending()

    def recv(self, nbytes: int) -> bytes:
        """As a socket's."""
        buffer = bytearray(nbytes)
        got = self.recv_into(memoryview(buffer))
        return bytes(buffer[:got])

    def recv_into(self, target: memoryview) -> int:
        """As a socket's, but it goes on until ``target`` is full or nothing is left to read."""
        got = self._open_into(target)
        while got < len(target) and not self._ended:
            try:
                size = self.raw.recv_into(self._scratch)
            except BlockingIOError:
                if got:
                    return got
                raise
            if size == 0:
                self._ended = True
                break
            self._incoming.write(self._scratch[:size])
            got += self._open_into(target[got:])
        return got

    def recvmsg_into(self, targets: Sequence[memoryview]) -> tuple[int, list[Any], int, None]:
        """As a socket's, without ancillary data. The second target gets what is there already."""
        got = self.recv_into(targets[0])
        if got == len(targets[0]) and len(targets) > 1:
            got += self._open_into(targets[1])
        return got, [], 0, None

    def recvmsg(self, nbytes: int, ancillary_bytes: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        """As a socket's; raises BlockingIOError when what came was no whole record."""
        ancillary: list[tuple[int, int, bytes]] = []
        plain = self._open_all()
        if not plain and not self._ended:
            data, ancillary, _, _ = self.raw.recvmsg(min(nbytes, READ_BYTES), ancillary_bytes)
            if not data:
                self._ended = True
            self._incoming.write(data)
            plain = self._open_all()
        if not plain and not self._ended:
            raise BlockingIOError
        return plain, ancillary, 0, None

    def _open_all(self) -> bytes:
        pieces = []
        buffer = bytearray(RECORD_BYTES)
        while got := self._open_into(memoryview(buffer)):
            pieces.append(bytes(buffer[:got]))
        return b"".join(pieces)

    def _open_into(self, target: memoryview) -> int:
        """What can be opened of what was read, as far as it fits."""
        got = 0
        try:
            while got < len(target):
                # With a buffer it answers a count; the type stubs know only the other form.
                size = cast("int", self._tls.read(len(target) - got, target[got:]))
                if not size:
                    break
                got += size
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._ended = True
        return got


Connection: TypeAlias = "socket.socket | TlsSocket"
"""What a connection between agents runs over."""


def held_bytes(connection: Connection) -> int:
    """See :attr:`TlsSocket.held_bytes`; without TLS the kernel holds everything."""
    return connection.held_bytes if isinstance(connection, TlsSocket) else 0


def most_held_bytes(connection: Connection) -> int:
    """The most that this process has of a connection's next bytes, so that the kernel will not bring them (again).

    OpenSSL keeps the part of a record that it has to itself: it is neither pending in memory nor opened.
    """
    if not isinstance(connection, TlsSocket):
        return 0
    return connection.held_bytes + RECORD_BYTES + RECORD_OVERHEAD_BYTES


def wire_rate(connection: Connection, payload_bytes_per_s: int) -> int:
    """What the kernel must carry for that much payload."""
    if not isinstance(connection, TlsSocket):
        return payload_bytes_per_s
    return payload_bytes_per_s + -(-payload_bytes_per_s * RECORD_OVERHEAD_BYTES // RECORD_BYTES)


def payload_rate(connection: Connection, wire_bytes_per_s: int) -> int:
    """The payload in what the kernel carries."""
    if not isinstance(connection, TlsSocket):
        return wire_bytes_per_s
    return wire_bytes_per_s * RECORD_BYTES // (RECORD_BYTES + RECORD_OVERHEAD_BYTES)
