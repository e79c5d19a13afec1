"""Set-up of a connection between two agents: TLS where it is configured, then challenge, hello, welcome; each side
proves that it holds the token, and that its certificate names the agent that it says it is.

Nothing beyond the handshake's own frames is read, so that what follows is left in the socket (under TLS: in the
:class:`~proxyd.agent.tls_socket.TlsSocket`) for whoever takes it over.
A stranger costs at most one frame body (16 KiB) and :data:`HANDSHAKE_S`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import socket
import ssl
from typing import TypeVar

from proxyd.agent.tls_socket import Connection, TlsSocket
from proxyd.core.errors import RemoteError
from proxyd.core.ids import AgentName
from proxyd.runtime.refusals import Refusals
from proxyd.runtime.tls import TlsKeeper, agent_uri, names_agent, peer_uris, tls_reason, tls_words
from proxyd.wire import peer as wire
from proxyd.wire import routing
from proxyd.wire.auth import NONCE_BYTES, mac_is_right, token_mac
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import ErrorCode

HANDSHAKE_S = 10.0
CONNECT_S = 2.0
"""A first packet and its repetition after a second. Longer ones would be late when a path heals: the kernel repeats
after 1, 3, 7 s."""

F = TypeVar("F")


class HandshakeError(RemoteError):
    """The connection doesn't stand; the message says which side refused and why.

    ``reason`` is one of :data:`proxyd.runtime.refusals.PROOFS`, or "protocol".
    """

    code = "handshake"
    reason = "protocol"


def _refusal(reason: str, what: str, *, why: str = "", next_step: str = "") -> HandshakeError:
    error = HandshakeError(what, why=why, next_step=next_step)
    error.reason = reason
    return error


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who this agent is towards others."""

    agent: AgentName
    incarnation: int
    token: bytes = dataclasses.field(repr=False)
    tls: TlsKeeper | None = None
    """None: the connections between agents are not encrypted."""
    refusals: Refusals = dataclasses.field(default_factory=Refusals)


def _claim(hello: wire.Hello) -> str:
    """What the dialler's MAC covers: everything that the hello says."""
    purpose = f"{hello.purpose}.{hello.stream}"
    return f"peer {purpose} {hello.site}/{hello.name} {hello.incarnation:016x} to {hello.to_site}/{hello.to_name}"


def _answer_claim(agent: AgentName, welcome: wire.Welcome) -> str:
    return f"peer {agent} {welcome.incarnation:016x} {welcome.eager_bytes} {welcome.max_chunk_bytes}"


async def _secure(sock: socket.socket, tls: TlsKeeper, *, server_side: bool) -> TlsSocket:
    """The TLS handshake. Raises HandshakeError, OSError."""
    identity = tls.current()
    secured = TlsSocket(sock, identity.server if server_side else identity.client, server_side=server_side)
    try:
        await secured.shake_hands()
    except ssl.SSLError as error:
        raise _refusal(tls_reason(error), tls_words(error)) from error
    return secured


def _named(connection: Connection, agent: AgentName) -> str:
    """What is wrong with the other side's certificate for that agent; "" when it names it, or without TLS."""
    if not isinstance(connection, TlsSocket):
        return ""
    uris = peer_uris(connection.certificate())
    if names_agent(uris, agent.site, agent.name):
        return ""
    return f"its certificate is of {', '.join(uris) or 'nobody'} and not of {agent_uri(agent.site, agent.name)}"


async def _send(connection: Connection, data: bytes) -> None:
    if isinstance(connection, TlsSocket):
        await connection.greet(data)
    else:
        await asyncio.get_running_loop().sock_sendall(connection, data)


async def _read_some(connection: Connection, nbytes: int) -> bytes:
    if not isinstance(connection, TlsSocket):
        return await asyncio.get_running_loop().sock_recv(connection, nbytes)
    try:
        return await connection.hear(nbytes)
    except ssl.SSLError as error:
        # A dialler is done with its part of the handshake before the other side has looked at its certificate.
        raise _refusal(tls_reason(error), tls_words(error)) from error


async def _read_exactly(connection: Connection, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = await _read_some(connection, nbytes - len(data))
        if not piece:
            raise HandshakeError(f"the other side closed the connection after {len(data)} of {nbytes} bytes")
        data += piece
    return data


async def _read_frame(connection: Connection) -> wire.Frame:
    header = wire.decode_header(await _read_exactly(connection, wire.HEADER_BYTES))
    if header.type in wire.DATA_TYPES:
        raise WireError("a chunk came before the handshake")
    return wire.decode_control(header, await _read_exactly(connection, header.length))


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
) -> tuple[Connection, wire.Welcome]:
    """The dialler's side on a connected non-blocking socket; answers what the connection runs over from now on.

    Raises HandshakeError, WireError, OSError, TimeoutError.
    """
    async with asyncio.timeout(HANDSHAKE_S):
        if (worker := routing.worker_of(to.name)) is not None:
            await asyncio.get_running_loop().sock_sendall(sock, routing.preamble(worker))
        connection: Connection = sock
        if me.tls is not None:
            try:
                connection = await _secure(sock, me.tls, server_side=False)
                if wrong := _named(connection, to):
                    raise _refusal("certificate_name", f"whoever answers there is not {to}", why=wrong)
            except HandshakeError as error:
                me.refusals.add("data", error.reason)
                raise
        challenge = _expect(await _read_frame(connection), wire.Challenge)
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
        await _send(connection, wire.encode(dataclasses.replace(hello, mac=mac)))
        welcome = _expect(await _read_frame(connection), wire.Welcome)
        if not mac_is_right(me.token, "accept", challenge.nonce, nonce, _answer_claim(to, welcome), welcome.mac):
            me.refusals.add("data", "token")
            raise _refusal("token", f"{to} did not prove that it holds the token", next_step="Compare the token files")
        return connection, welcome


async def receive_hello(sock: socket.socket, me: Identity) -> tuple[Connection, wire.Hello, bytes]:
    """The acceptor's first half: what the connection runs over, a proven hello that is meant for us, and the challenge
    that it answered.

    Raises HandshakeError (after having told the other side), WireError, OSError, TimeoutError.
    """
    challenge = secrets.token_bytes(NONCE_BYTES)
    async with asyncio.timeout(HANDSHAKE_S):
        connection: Connection = sock if me.tls is None else await _secure(sock, me.tls, server_side=True)
        await _send(connection, wire.encode(wire.Challenge(wire.PROTOCOL_VERSION, challenge)))
        hello = _expect(await _read_frame(connection), wire.Hello)
    refusal, code, reason = "", ErrorCode.REFUSED, "protocol"
    if hello.version != wire.PROTOCOL_VERSION:
        code = ErrorCode.PROTOCOL
        refusal = f"{me.agent} speaks protocol version {wire.PROTOCOL_VERSION}, you {hello.version}: upgrade the older"
    elif not mac_is_right(me.token, "dial", challenge, hello.nonce, _claim(hello), hello.mac):
        reason = "token"
        refusal = f"{me.agent} needs a token, and yours is missing or another: compare the token files"
    elif wrong := _named(connection, AgentName(hello.site, hello.name)):
        reason = "certificate_name"
        refusal = f"you say that you are {hello.site}/{hello.name}, but {wrong.replace('its', 'your', 1)}"
    elif (hello.to_site, hello.to_name) != me.agent:
        refusal = f"this is {me.agent}, not {hello.to_site}/{hello.to_name}: check data_address and names"
    elif not hello.site or not hello.name or hello.purpose not in tuple(wire.StreamPurpose):
        code = ErrorCode.PROTOCOL
        refusal = "the hello names no agent or no purpose"
    if refusal:
        await refuse(connection, code, refusal)
        raise _refusal(reason, f"refused {hello.site}/{hello.name}: {refusal}")
    return connection, hello, challenge


async def refuse(connection: Connection, code: ErrorCode, message: str) -> None:
    """Say why before the connection is closed."""
    await _send(connection, wire.encode(wire.Refused(code, message[:1000])))


async def send_welcome(
    connection: Connection, me: Identity, hello: wire.Hello, challenge: bytes, eager_bytes: int
) -> None:
    """The acceptor's second half."""
    welcome = wire.Welcome(
        incarnation=me.incarnation, eager_bytes=eager_bytes, max_chunk_bytes=wire.MAX_CHUNK_BYTES, mac=b""
    )
    mac = token_mac(me.token, "accept", challenge, hello.nonce, _answer_claim(me.agent, welcome))
    await _send(connection, wire.encode(dataclasses.replace(welcome, mac=mac)))
