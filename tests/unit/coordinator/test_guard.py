"""Handshakes that came to nothing: each counted once and by its host, and no good one ever."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest

from proxyd.coordinator import guard as guards
from proxyd.coordinator.guard import Guard


class Call:
    """What a call shows of its connection."""

    def __init__(self, port: int) -> None:
        self.port = port

    def peer(self) -> str:
        return f"ipv4:127.0.0.1:{self.port}"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"transport_security_type": [b"ssl"]}


class Door:
    """A port, and connections to it."""

    def __init__(self, guard: Guard, closing: ExitStack) -> None:
        self.guard = guard
        self.closing = closing
        self.server = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512))
        guard.listens_at(self.server.getsockname()[1])

    def shake(self) -> Call:
        client = self.closing.enter_context(socket.create_connection(self.server.getsockname()))
        self.guard.handshake_begins()
        return Call(client.getsockname()[1])

    def serve(self, call: Call) -> None:
        self.guard.saw_call(cast("Any", call))

    def refused(self) -> int:
        return self.guard.refusals.count("control", "tls")


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(guards, "LOOK_S", -1.0)
    monkeypatch.setattr(guards, "LOOK_SHARE", float("inf"))
    with ExitStack() as closing:
        yield Door(Guard(cast("Any", object())), closing)


def test_good_ones_never_count_wherever_a_window_ends(door: Door) -> None:
    for ends in itertools.product(("nowhere", "between", "before the calls"), repeat=3):
        for end in ends:
            one = door.shake()
            if end == "between":
                door.guard.settle()
            two = door.shake()
            if end == "before the calls":
                door.guard.settle()
            for call in (one, two, one):
                door.serve(call)
    for _ in range(3):
        door.guard.settle()
    assert door.refused() == 0


def test_one_that_came_to_nothing_counts_once_and_by_its_host(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    good = door.shake()
    door.shake()
    door.serve(good)
    door.guard.settle()
    assert door.refused() == 0  # it may be under way
    with caplog.at_level(logging.WARNING):
        door.guard.settle()
    assert door.refused() == 1
    assert "1 TLS handshakes at the control port came to nothing, from 127.0.0.1:" in caplog.text
    for _ in range(3):
        door.serve(door.shake())
        door.guard.settle()
    assert door.refused() == 1
    door.shake()
    door.guard.settle()
    door.guard.settle()
    assert door.refused() == 2


def test_whoever_was_served_is_not_named(door: Door) -> None:
    good, bad = door.shake(), door.shake()
    door.serve(good)
    assert door.guard._seen == {guards.remote_of(call.peer()) for call in (good, bad)}
    assert door.guard._strangers([guards.Remote("127.0.0.1", good.port)]) == ""
    many = [guards.Remote(f"10.0.0.{number}", 1) for number in range(10)]
    assert door.guard._strangers(many).endswith("10.0.0.7 and 2 more")


def test_a_port_that_is_used_again_is_another_connection(door: Door) -> None:
    """It was taken for the one that had been served, and its handshake for one that came to nothing."""
    stays, goes = door.shake(), door.shake()
    for call in (stays, goes):
        door.serve(call)
    connected = {cast("guards.Remote", guards.remote_of(stays.peer()))}
    door.guard.forget([stays.peer(), goes.peer()], connected)
    assert set(door.guard._peers) == {stays.peer(), goes.peer()}, "seen a moment ago: somebody may be named yet"
    for _ in range(2):
        door.guard.settle()
    door.guard.forget([stays.peer(), goes.peer()], connected)
    door.guard.handshake_begins()
    door.serve(goes)
    door.serve(stays)
    for _ in range(3):
        door.guard.settle()
    assert door.refused() == 0
    door.shake()
    door.guard.settle()
    door.guard.settle()
    assert door.refused() == 1


def test_looks_take_a_bounded_share_of_a_processor(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "LOOK_SHARE", 1e-9)
    first, _ = door.shake(), door.shake()
    assert door.guard._seen == {guards.remote_of(first.peer())}


def test_a_first_call_that_comes_late_is_made_up_for(door: Door) -> None:
    """It was given up and counted; the next that comes to nothing isn't lost for that."""
    late = door.shake()
    door.guard.settle()
    door.guard.settle()
    assert door.refused() == 1
    door.serve(late)
    door.guard.settle()
    door.shake()
    door.guard.settle()
    door.guard.settle()
    assert door.refused() == 2
