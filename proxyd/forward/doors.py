"""What a client says before its bytes flow: nothing (a plain port), SOCKS5 (RFC 1928), or HTTP CONNECT (RFC 9110,
9.3.6).

SOCKS5: the command CONNECT, without authentication. HTTP: the method CONNECT; nothing else is a proxy's business here.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import socket
import struct
from typing import Literal, NamedTuple

Kind = Literal["tcp", "socks5", "http"]

MAX_HEAD_BYTES = 8 << 10
MAX_HOST_BYTES = 255
HEAD_TIMEOUT_S = 10.0


class Target(NamedTuple):
    """Where a client wants to be connected to."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Why(enum.Enum):
    """Why there is no connection."""

    FORBIDDEN = "forbidden"
    UNKNOWN_NAME = "unknown name"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    FULL = "full"
    FAILED = "failed"


SOCKS_REPLIES = {
    Why.FORBIDDEN: 2,
    Why.UNKNOWN_NAME: 4,
    Why.UNREACHABLE: 4,
    Why.REFUSED: 5,
    Why.TIMEOUT: 4,
    Why.FULL: 1,
    Why.FAILED: 1,
}
HTTP_REPLIES = {
    Why.FORBIDDEN: "403 Forbidden",
    Why.UNKNOWN_NAME: "502 Bad Gateway",
    Why.UNREACHABLE: "502 Bad Gateway",
    Why.REFUSED: "502 Bad Gateway",
    Why.TIMEOUT: "504 Gateway Timeout",
    Why.FULL: "503 Service Unavailable",
    Why.FAILED: "502 Bad Gateway",
}


class DoorError(Exception):
    """The client said what can't be answered; ``reply`` is what it is told."""

    def __init__(self, why: str, reply: bytes = b"") -> None:
        super().__init__(why)
        self.reply = reply


class Reader:
    """Bytes of a non-blocking socket, as far as the door needs them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.rest = b""
        """Read, and not the door's."""

    async def _more(self) -> None:
        got = await asyncio.get_running_loop().sock_recv(self._sock, 4096)
        if not got:
            raise DoorError("it hung up before it had said where to")
        self.rest += got

    async def exactly(self, nbytes: int) -> bytes:
        """So many bytes."""
        while len(self.rest) < nbytes:
            await self._more()
        taken, self.rest = self.rest[:nbytes], self.rest[nbytes:]
        return taken

    async def until(self, mark: bytes, most: int) -> bytes:
        """Up to and without ``mark``."""
        while mark not in self.rest:
            if len(self.rest) > most:
                raise DoorError(f"its head is longer than {most} bytes", b"HTTP/1.1 431 Too Large\r\n\r\n")
            await self._more()
        taken, _, self.rest = self.rest.partition(mark)
        return taken


async def ask(kind: Kind, reader: Reader, sock: socket.socket) -> Target:
    """Where a client of SOCKS5 or HTTP wants to go. Raises DoorError, TimeoutError and OSError."""
    async with asyncio.timeout(HEAD_TIMEOUT_S):
        return await (_socks(reader, sock) if kind == "socks5" else _http(reader))


def said(kind: Kind, why: Why | None) -> bytes:
    """What the client hears; None: it is connected. A plain port says nothing."""
    if kind == "socks5":
        # The bound address is none of the client's business: zeros, as most servers say.
        return struct.pack("!BBBB4sH", 5, 0 if why is None else SOCKS_REPLIES[why], 0, 1, bytes(4), 0)
    if kind == "http":
        if why is None:
            return b"HTTP/1.1 200 Connection established\r\n\r\n"
        return f"HTTP/1.1 {HTTP_REPLIES[why]}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    return b""


async def _socks(reader: Reader, sock: socket.socket) -> Target:
    version, count = await reader.exactly(2)
    if version != 5:
        raise DoorError(f"it speaks SOCKS {version}, not 5")
    methods = await reader.exactly(count)
    loop = asyncio.get_running_loop()
    if 0 not in methods:
        raise DoorError("it wants to authenticate, and this door asks for nothing", b"\x05\xff")
    await loop.sock_sendall(sock, b"\x05\x00")
    version, command, _, kind = await reader.exactly(4)
    if version != 5 or command != 1:
        raise DoorError(f"it asks for command {command}, not CONNECT", struct.pack("!BBBB6x", 5, 7, 0, 1))
    if kind == 1:
        host = str(ipaddress.IPv4Address(await reader.exactly(4)))
    elif kind == 4:
        host = str(ipaddress.IPv6Address(await reader.exactly(16)))
    elif kind == 3:
        host = _host((await reader.exactly((await reader.exactly(1))[0])).decode("latin-1"))
    else:
        raise DoorError(f"address type {kind} is unknown", struct.pack("!BBBB6x", 5, 8, 0, 1))
    (port,) = struct.unpack("!H", await reader.exactly(2))
    return Target(host, port)


async def _http(reader: Reader) -> Target:
    head = (await reader.until(b"\r\n\r\n", MAX_HEAD_BYTES)).decode("latin-1")
    method, _, rest = head.partition("\r\n")[0].partition(" ")
    if method != "CONNECT":
        reply = b"HTTP/1.1 405 Method Not Allowed\r\nAllow: CONNECT\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        raise DoorError(f"its method is {method[:20]!r}, not CONNECT", reply)
    host, colon, port = rest.partition(" ")[0].rpartition(":")
    if not colon or not port.isdecimal() or not port.isascii() or not 0 < int(port) < 65536:
        raise DoorError("its target is no HOST:PORT", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    return Target(_host(host.removeprefix("[").removesuffix("]")), int(port))


def _host(text: str) -> str:
    if not text or len(text) > MAX_HOST_BYTES or not text.isascii() or not text.isprintable() or " " in text:
        raise DoorError("its target's name is none", b"")
    return text
