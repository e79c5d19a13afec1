"""TLS on a connection between agents: bytes, counting, closing. A socket pair stands for the network."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest

from proxyd.agent.tls_socket import SEAL_BYTES, TlsSocket, held_bytes, payload_rate, wire_rate
from proxyd.cli.certificates import Authority
from proxyd.runtime.tls import RECORD_BYTES, RECORD_OVERHEAD_BYTES, TlsIdentity, load_identity


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> TlsIdentity:
    directory = tmp_path_factory.mktemp("tls")
    return load_identity(Authority(directory / "ca.pem").agent(directory, "a"), dials=True)


async def pair(identity: TlsIdentity) -> tuple[TlsSocket, TlsSocket]:
    """A dialler and an acceptor after their handshake, with small buffers between them."""
    left, right = socket.socketpair()
    for sock in (left, right):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
    dialler = TlsSocket(left, identity.client, server_side=False)
    acceptor = TlsSocket(right, identity.server, server_side=True)
    await asyncio.gather(dialler.shake_hands(), acceptor.shake_hands())
    return dialler, acceptor


def wire_bytes(plain: int) -> int:
    """On the wire for one buffer of that size."""
    return plain + RECORD_OVERHEAD_BYTES * -(-plain // RECORD_BYTES)


def transfer(dialler: TlsSocket, acceptor: TlsSocket, head: bytes, payload: bytes) -> bytearray:
    """As a stream does it: what is left is offered again until all is taken, while the other side reads."""
    rest = [memoryview(head), memoryview(payload)]
    got = bytearray()
    buffer = bytearray(50_000)
    while any(len(part) for part in rest):
        try:
            sent = dialler.sendmsg(rest)
        except BlockingIOError:
            sent = 0
        for index, part in enumerate(rest):
            of_part = min(sent, len(part))
            rest[index] = part[of_part:]
            sent -= of_part
        try:
            got += buffer[: acceptor.recv_into(memoryview(buffer))]
        except BlockingIOError:
            pass
    while len(got) < len(head) + len(payload):
        got += buffer[: acceptor.recv_into(memoryview(buffer))]
    return got


@pytest.mark.parametrize("nbytes", [0, 1, RECORD_BYTES, RECORD_BYTES + 1, SEAL_BYTES + 5, 3_000_000])
def test_bytes_arrive_whole_and_in_order_through_a_socket_that_takes_little(identity: TlsIdentity, nbytes: int) -> None:
    async def check() -> None:
        dialler, acceptor = await pair(identity)
        head, payload = bytes(range(48)), bytes(index * 31 % 251 for index in range(nbytes))
        assert transfer(dialler, acceptor, head, payload) == head + payload
        assert held_bytes(acceptor) == 0
        dialler.close()
        assert acceptor.recv(10) == b""
        acceptor.close()

    asyncio.run(check())


def test_what_was_taken_is_payload_of_whole_records_and_the_rest_goes_on_from_a_copy(identity: TlsIdentity) -> None:
    """A stream whose trainer takes its block back writes on from a copy: the same bytes at another place."""

    async def check() -> None:
        dialler, acceptor = await pair(identity)
        payload = bytearray(index % 256 for index in range(1_000_000))
        sent = dialler.send(payload)
        assert 0 < sent < len(payload)
        assert sent % RECORD_BYTES == 0
        with pytest.raises(BlockingIOError):
            dialler.send(memoryview(payload)[sent:])
        rest = bytes(payload[sent:])
        whole = bytes(payload)
        payload[:] = bytes(len(payload))
        buffer = bytearray(sent)
        view, got = memoryview(buffer), 0
        while got < sent:
            got += acceptor.recv_into(view[got:])
        assert buffer == whole[:sent]
        assert transfer(dialler, acceptor, b"", rest) == rest
        dialler.close()
        acceptor.close()

    asyncio.run(check())


def test_the_kernels_positions_become_payload_and_are_never_overstated(identity: TlsIdentity) -> None:
    async def check() -> None:
        dialler, acceptor = await pair(identity)
        payload = bytes(3 * RECORD_BYTES + 100)
        done = 0
        while done < len(payload):
            try:
                done += dialler.send(memoryview(payload)[done:])
            except BlockingIOError:
                acceptor.recv(100_000)
        total = wire_bytes(len(payload))
        assert dialler.plain_bytes_behind(total, total) == (len(payload), len(payload))
        first = wire_bytes(RECORD_BYTES)
        assert dialler.plain_bytes_behind(total - first + 1, total - first + 1) == (len(payload), len(payload))
        assert dialler.plain_bytes_behind(total - first, total - 2 * first) == (
            len(payload) - RECORD_BYTES,
            len(payload) - 2 * RECORD_BYTES,
        )
        # A reading that goes back (two of the kernel's are no snapshot) takes nothing back.
        assert dialler.plain_bytes_behind(total, total)[0] == len(payload) - RECORD_BYTES
        assert dialler.plain_bytes_behind(0, 0) == (0, 0)
        dialler.close()
        acceptor.close()

    asyncio.run(check())


def test_what_came_with_the_last_frame_of_a_handshake_is_held_and_told(identity: TlsIdentity) -> None:
    async def check() -> None:
        dialler, acceptor = await pair(identity)
        await dialler.greet(b"hello")
        await dialler.greet(b"and more")
        assert await acceptor.hear(5) == b"hello"
        assert held_bytes(acceptor) > 0
        assert acceptor.recvmsg(1000, 64)[0] == b"and more"
        assert held_bytes(acceptor) == 0
        with pytest.raises(BlockingIOError):
            acceptor.recvmsg(1000, 64)
        dialler.close()
        assert acceptor.recvmsg(1000, 64)[0] == b""
        acceptor.close()

    asyncio.run(check())


def test_a_changed_bit_ends_the_connection(identity: TlsIdentity) -> None:
    async def check() -> None:
        dialler, acceptor = await pair(identity)
        dialler.send(bytes(100))
        data = bytearray(acceptor.raw.recv(1000))
        data[50] ^= 1
        dialler.raw.send(data)
        with pytest.raises(OSError, match=r"(?i)mac|decrypt"):
            acceptor.recv(1000)
        dialler.close()
        acceptor.close()

    asyncio.run(check())


def test_a_stranger_that_says_nothing_right_is_told_off(identity: TlsIdentity) -> None:
    async def check() -> None:
        left, right = socket.socketpair()
        for sock in (left, right):
            sock.setblocking(False)
        acceptor = TlsSocket(right, identity.server, server_side=True)
        left.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with pytest.raises(ssl.SSLError):
            await acceptor.shake_hands()
        left.close()
        acceptor.close()

    asyncio.run(check())


def test_rates_on_the_wire_carry_the_payload(identity: TlsIdentity) -> None:
    left, right = socket.socketpair()
    with left, right:
        assert wire_rate(left, 1_000_000) == 1_000_000
        secured = TlsSocket(left, identity.client, server_side=False)
        assert wire_rate(secured, RECORD_BYTES * 1000) == (RECORD_BYTES + RECORD_OVERHEAD_BYTES) * 1000
        assert payload_rate(secured, wire_rate(secured, 123_456_789)) == pytest.approx(123_456_789, abs=2)
        assert wire_rate(secured, 0) == 0
