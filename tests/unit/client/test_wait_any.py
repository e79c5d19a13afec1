"""Waiting for the first of several receives."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from proxyd_client import ArgumentError, ClosedError, Endpoint
from tests.fakes.fake_agent import FakeAgent

from .conftest import Connect

COUNT = 2 << 20
"""Elements: too large to be copied on the side."""


@pytest.fixture(params=[False, True], ids=["shared", "tcp"])
def pair(agent: FakeAgent, connect: Connect, request: pytest.FixtureRequest) -> tuple[Endpoint, Endpoint]:
    return connect(agent, 0, tcp=request.param), connect(agent, 1, tcp=request.param)


def test_whichever_comes_first_ends_the_wait_and_is_whole(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    buffers = [np.zeros(COUNT, np.float32) for _ in range(2)]
    handles = [receiver.irecv_into(buffer, 0, tag) for tag, buffer in enumerate(buffers)]
    for tag in (1, 0):
        sending = threading.Thread(target=sender.send, args=(np.full(COUNT, tag + 1, np.float32), 1, tag))
        sending.start()
        receiver.wait_any(handles if tag else handles[:1], 30)
        assert handles[tag].done()
        assert (buffers[tag] == tag + 1).all()
        sending.join()
    assert all(handle.done() for handle in handles)
    receiver.wait_any(handles)


def test_a_wait_ends_with_its_time_by_a_call_and_by_a_failure(pair: tuple[Endpoint, Endpoint]) -> None:
    _, receiver = pair
    handle = receiver.irecv_into(np.zeros(3), 0)
    receiver.wait_any([handle], 0)
    receiver.wait_any([handle], 0.01)
    receiver.wait_any([], 0.01)
    assert not handle.done()

    calls: list[float] = []
    rung = threading.Event()

    def ring() -> None:
        rung.set()
        receiver.wake()

    threading.Timer(0.05, ring).start()
    receiver.wait_any([handle], 60, interrupted=lambda: bool(calls.append(time.monotonic()) or rung.is_set()))
    assert len(calls) < 20, "it sleeps in between"
    assert not handle.done()

    threading.Timer(0.05, handle.cancel).start()
    receiver.wait_any([handle], 60)
    assert handle.done()

    last = receiver.irecv_into(np.zeros(3), 0)
    closing = threading.Timer(0.05, receiver.close)
    closing.start()
    receiver.wait_any([last], 60)
    closing.join()
    with pytest.raises(ClosedError):
        last.wait(0)


def test_only_receives_can_be_waited_for_together(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    handle = sender.isend(b"x", 1)
    with pytest.raises(ArgumentError, match="receives"):
        sender.wait_any([handle])
    receiver.recv(0)
