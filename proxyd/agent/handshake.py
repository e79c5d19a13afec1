"""Set-up of a connection between two agents: challenge, hello, welcome; each side proves that it holds the token.

Nothing beyond the handshake's own frames is read, so that what follows is left in the socket for whoever takes it over.
A stranger costs at most one frame body (16 KiB) and :data:`HANDSHAKE_S`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import socket
from typing import TypeVar

from proxyd.core.errors import RemoteError
from proxyd.core.ids import AgentName
from proxyd.wire import peer as wire
from proxyd.wire.auth import NONCE_BYTES, mac_is_right, token_mac
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import ErrorCode

HANDSHAKE_S = 10.0
CONNECT_S = 5.0

F = TypeVar("F")


class HandshakeError(RemoteError):
    """The connection doesn't stand; the message says which side refused and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who this agent is towards others."""

    agent: AgentName
    incarnation: int
    token: bytes = dataclasses.field(repr=False)


def _claim(hello: wire.Hello) -> str:
    """What the dialler's MAC covers: everything that the hello says."""
    purpose = f"{hello.purpose}.{hello.stream}"
    return f"peer {purpose} {hello.site}/{hello.name} {hello.incarnation:016x} to {hello.to_site}/{hello.to_name}"


def _answer_claim(agent: AgentName, welcome: wire.Welcome) -> str:
    return f"peer {agent} {welcome.incarnation:016x} {welcome.eager_bytes} {welcome.max_chunk_bytes}"


async def _read_exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = await loop.sock_recv(sock, nbytes - len(data))
        if not piece:
            raise HandshakeError(f"the other side closed the connection after {len(data)} of {nbytes} bytes")
        data += piece
    return data


async def _read_frame(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> wire.Frame:
    header = wire.decode_header(await _read_exactly(loop, sock, wire.HEADER_BYTES))
    if header.type in wire.DATA_TYPES:
        raise WireError("a chunk came before the handshake")
    return wire.decode_control(header, await _read_exactly(loop, sock, header.length))


def _expect(frame: wire.Frame, kind: type[F]) -> F:
    if isinstance(frame, wire.Refused):
        raise HandshakeError(f"the other side refused: {frame.message}")
    if not isinstance(frame, kind):
        raise WireError(f"{type(frame).__name__} came where {kind.__name__} is due")
    return frame


async def dial(
    sock: socket.socket,
    me: Identity,
    to: AgentName,
    purpose: wire.StreamPurpose,
    stream: int,
) -> wire.Welcome:
    """The dialler's side on a connected non-blocking socket.

    Raises HandshakeError, WireError, OSError, TimeoutError.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANDSHAKE_S):
        challenge = _expect(await _read_frame(loop, sock), wire.Challenge)
        if challenge.version != wire.PROTOCOL_VERSION:
            raise HandshakeError(
                f"{to} speaks protocol version {challenge.version}, this agent {wire.PROTOCOL_VERSION}",
                next_step="Upgrade the older one",
            )
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = wire.Hello(
            version=wire.PROTOCOL_VERSION,
            purpose=purpose,
            stream=stream,
            site=me.agent.site,
            name=me.agent.name,
            incarnation=me.incarnation,
            to_site=to.site,
            to_name=to.name,
            nonce=nonce,
            mac=b"",
        )
        mac = token_mac(me.token, "dial", challenge.nonce, nonce, _claim(hello))
        await loop.sock_sendall(sock, wire.encode(dataclasses.replace(hello, mac=mac)))
        welcome = _expect(await _read_frame(loop, sock), wire.Welcome)
        if not mac_is_right(me.token, "accept", challenge.nonce, nonce, _answer_claim(to, welcome), welcome.mac):
            raise HandshakeError(f"{to} did not prove that it holds the token", next_step="Compare the token files")
        return welcome


async def receive_hello(sock: socket.socket, me: Identity) -> tuple[wire.Hello, bytes]:
    """The acceptor's first half: a proven hello that is meant for us, and the challenge it answered.

    Raises HandshakeError (after having told the other side), WireError, OSError, TimeoutError.
    """
    loop = asyncio.get_running_loop()
    challenge = secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(sock, wire.encode(wire.Challenge(wire.PROTOCOL_VERSION, challenge)))
    async with asyncio.timeout(HANDSHAKE_S):
        hello = _expect(await _read_frame(loop, sock), wire.Hello)
    refusal, code = "", ErrorCode.REFUSED
    if hello.version != wire.PROTOCOL_VERSION:
        code = ErrorCode.PROTOCOL
        refusal = f"{me.agent} speaks protocol version {wire.PROTOCOL_VERSION}, you {hello.version}: upgrade the older"
    elif not mac_is_right(me.token, "dial", challenge, hello.nonce, _claim(hello), hello.mac):
        refusal = f"{me.agent} needs a token, and yours is missing or another: compare the token files"
    elif (hello.to_site, hello.to_name) != me.agent:
        refusal = f"this is {me.agent}, not {hello.to_site}/{hello.to_name}: check data_address and names"
    elif not hello.site or not hello.name or hello.purpose not in tuple(wire.StreamPurpose):
        code = ErrorCode.PROTOCOL
        refusal = "the hello names no agent or no purpose"
    if refusal:
        await refuse(sock, code, refusal)
        raise HandshakeError(f"refused {hello.site}/{hello.name}: {refusal}")
    return hello, challenge


async def refuse(sock: socket.socket, code: ErrorCode, message: str) -> None:
    """Say why before the connection is closed."""
    await asyncio.get_running_loop().sock_sendall(sock, wire.encode(wire.Refused(code, message[:1000])))


async def send_welcome(
    sock: socket.socket, me: Identity, hello: wire.Hello, challenge: bytes, eager_bytes: int
) -> None:
    """The acceptor's second half."""
    welcome = wire.Welcome(
        incarnation=me.incarnation, eager_bytes=eager_bytes, max_chunk_bytes=wire.MAX_CHUNK_BYTES, mac=b""
    )
    mac = token_mac(me.token, "accept", challenge, hello.nonce, _answer_claim(me.agent, welcome))
    await asyncio.get_running_loop().sock_sendall(sock, wire.encode(dataclasses.replace(welcome, mac=mac)))
