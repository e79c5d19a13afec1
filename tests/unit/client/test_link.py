"""Frames that nobody waits for: they leave with others, and never later than the next look at the socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from proxyd.wire.client import Accept, Decoder, Release, SendDone, encode
from proxyd_client.link import _MOST_LATE, Link


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket]]:
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    theirs.setblocking(False)
    link = Link(mine, Decoder(allow_payload=False), [], shared_memory=True)
    yield link, theirs
    link.close()
    theirs.close()


def nothing(theirs: socket.socket) -> bool:
    try:
        return not theirs.recv(10_000)
    except BlockingIOError:
        return True


def test_it_leaves_behind_the_next_frame_in_one_write(ends: tuple[Link, socket.socket]) -> None:
    link, theirs = ends
    link.send_with_next(encode(Release(1, 1)))
    assert nothing(theirs)
    link.send(Accept(1, 2))
    assert theirs.recv(10_000) == encode(Accept(1, 2)) + encode(Release(1, 1))


def test_it_leaves_when_the_socket_is_looked_at(ends: tuple[Link, socket.socket]) -> None:
    link, theirs = ends
    link.send_with_next(encode(Release(1, 1)))
    theirs.send(encode(SendDone(1)))
    assert link.poll(10)
    assert theirs.recv(10_000) == encode(Release(1, 1))


def test_not_many_of_them_wait(ends: tuple[Link, socket.socket]) -> None:
    link, theirs = ends
    frames = [encode(Release(1, number)) for number in range(_MOST_LATE)]
    for frame in frames[:-1]:
        link.send_with_next(frame)
    assert nothing(theirs)
    link.send_with_next(frames[-1])
    assert theirs.recv(10_000) == b"".join(frames)
