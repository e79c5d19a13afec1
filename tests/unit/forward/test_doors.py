"""What clients say at a door, from real sockets: SOCKS5 (RFC 1928) and HTTP CONNECT."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.forward.doors import DoorError, Kind, Reader, Target, Why, ask, said


def asked(kind: Kind, heard: bytes, *, hangs_up: bool = True) -> tuple[Target, bytes, bytes]:
    """The target, what the client was told meanwhile, and what it had sent beyond."""

    async def run() -> tuple[Target, bytes, bytes]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(heard)
            if hangs_up:
                theirs.shutdown(socket.SHUT_WR)
            reader = Reader(ours)
            target = await ask(kind, reader, ours)
            ours.shutdown(socket.SHUT_WR)
            return target, theirs.recv(1000), reader.rest

    return asyncio.run(run())


def connect_to(kind: int, host: bytes, port: int) -> bytes:
    return b"\x05\x01\x00" + bytes([5, 1, 0, kind]) + host + struct.pack("!H", port)


def test_socks_takes_addresses_and_names() -> None:
    for kind, host, text in (
        (1, bytes([10, 2, 0, 9]), "10.2.0.9"),
        (4, bytes(15) + b"\x01", "::1"),
        (3, bytes([11]) + b"example.com", "example.com"),
    ):
        assert asked("socks5", connect_to(kind, host, 873) + b"rest") == (Target(text, 873), b"\x05\x00", b"rest")


def test_http_takes_connect_and_keeps_what_follows() -> None:
    head = b"CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic eA==\r\n\r\n"
    assert asked("http", head + b"\x16\x03") == (Target("2001:db8::1", 443), b"", b"\x16\x03")
    assert asked("http", b"CONNECT store.example:80 HTTP/1.0\r\n\r\n")[0] == Target("store.example", 80)


@pytest.mark.parametrize(
    ("kind", "heard", "why", "reply"),
    [
        ("socks5", b"\x04\x01", "SOCKS 4", b""),
        ("socks5", b"\x05\x01\x02", "authenticate", b"\x05\xff"),
        ("socks5", b"\x05\x01\x00\x05\x02\x00\x01", "command 2", b"\x05\x07"),
        ("socks5", b"\x05\x01\x00\x05\x01\x00\x07", "address type 7", b"\x05\x08"),
        ("socks5", connect_to(3, b"\x03a b", 1), "name is none", b""),
        ("socks5", b"\x05\x01\x00\x05", "hung up", b""),
        ("http", b"GET http://x/ HTTP/1.1\r\n\r\n", "not CONNECT", b"HTTP/1.1 405"),
        ("http", b"CONNECT nowhere HTTP/1.1\r\n\r\n", "HOST:PORT", b"HTTP/1.1 400"),
        ("http", b"CONNECT x:70000 HTTP/1.1\r\n\r\n", "HOST:PORT", b"HTTP/1.1 400"),
        ("http", b"CONNECT x:1 HTTP/1.1\r\n" + b"a" * 20_000, "longer", b"HTTP/1.1 431"),
        ("http", b"", "hung up", b""),
    ],
)
def test_what_can_not_be_answered_is_refused(kind: Kind, heard: bytes, why: str, reply: bytes) -> None:
    with pytest.raises(DoorError, match=why) as refused:
        asked(kind, heard)
    assert refused.value.reply.startswith(reply)
    assert bool(refused.value.reply) == bool(reply)


@given(st.sampled_from(["socks5", "http"]), st.binary(max_size=300))
def test_no_bytes_make_a_door_fail_otherwise(kind: Kind, heard: bytes) -> None:
    try:
        target, _, _ = asked(kind, heard)
    except DoorError:
        return
    assert 0 <= target.port < 65536


def test_every_reason_has_an_answer_for_every_kind() -> None:
    assert said("socks5", None)[:2] == b"\x05\x00"
    assert said("http", None).startswith(b"HTTP/1.1 200")
    for why in Why:
        assert len(said("socks5", why)) == 10
        assert said("socks5", why)[1] != 0
        assert said("http", why)[9] in b"45"
        assert said("tcp", why) == b""
