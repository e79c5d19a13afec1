"""Who reads the socket: hand-over between threads, no lost wake-ups, no busy loop."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from proxyd_client import Endpoint
from proxyd_client.receive import Receive
from tests.fakes.fake_agent import FakeAgent

from .conftest import Connect

MIB = 1 << 20


@pytest.fixture
def pair(agent: FakeAgent, connect: Connect) -> tuple[Endpoint, Endpoint]:
    return connect(agent, 0), connect(agent, 1)


def test_sixteen_threads_do_not_mix_their_messages(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    rounds = 25

    def payload(tag: int, index: int) -> np.ndarray:
        rng = random.Random(tag * 1000 + index)
        size = int(2 ** rng.uniform(0, 18)) if index % 8 else int(2 ** rng.uniform(18, 22))
        return np.random.default_rng(tag * 1000 + index).integers(0, 256, size, dtype=np.uint8)

    def send(tag: int) -> None:
        handles = [sender.isend(payload(tag, index), 1, tag=tag) for index in range(rounds)]
        for handle in handles:
            handle.wait(60)

    def receive(tag: int) -> None:
        for index in range(rounds):
            expected = payload(tag, index)
            if index % 2:
                assert np.array_equal(receiver.recv(0, tag, timeout_s=60).array, expected)
            else:
                out = np.zeros(expected.size, np.uint8)
                receiver.recv_into(out, 0, tag, timeout_s=60)
                assert np.array_equal(out, expected)

    with ThreadPoolExecutor(32) as pool:
        for future in [pool.submit(work, tag) for tag in range(16) for work in (send, receive)]:
            future.result(90)


def test_a_waiter_that_drives_is_woken_when_another_thread_ends_its_copy(
    pair: tuple[Endpoint, Endpoint], agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a posted receive runs in the background thread while its waiter already sleeps in poll()."""
    sender, receiver = pair
    copying, waiting = threading.Event(), threading.Event()
    original = np.copyto

    def slow_copy(target: np.ndarray, source: np.ndarray) -> None:
        if threading.current_thread().name == "proxyd-client":
            copying.set()
            assert waiting.wait(20)
        original(target, source)

    out = np.zeros(3 * MIB, np.uint8)
    handle = receiver.irecv_into(out, 0, 1)
    monkeypatch.setattr("proxyd_client.receiving.np.copyto", slow_copy)
    sent = sender.isend(np.full(3 * MIB, 5, np.uint8), 1, tag=1)
    assert copying.wait(20)
    progress = receiver._session.core.progress
    poll = progress._link.poll

    def tell_and_poll(timeout_s: float | None) -> bool:
        waiting.set()
        return poll(timeout_s)

    monkeypatch.setattr(progress._link, "poll", tell_and_poll)
    started = time.monotonic()
    handle.wait(20)
    assert time.monotonic() - started < 10
    assert (out == 5).all()
    sent.wait(20)


def test_a_waiter_that_comes_as_the_background_turns_idle_is_not_forgotten(
    pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    idle, called = threading.Event(), threading.Event()
    link = receiver._session.core.progress._link
    poll, wake = link.poll, link.wake

    def late_poll(timeout_s: float | None) -> bool:
        happened = poll(timeout_s)
        if not happened and threading.current_thread().name == "proxyd-client":
            idle.set()
            assert called.wait(20)
        return happened

    def tell_and_wake() -> None:
        wake()
        called.set()

    monkeypatch.setattr(link, "poll", late_poll)
    monkeypatch.setattr(link, "wake", tell_and_wake)
    sender.isend(b"x", 1, tag=1)
    receiver.recv(0, 1, timeout_s=10)
    called.clear()
    idle.clear()
    assert idle.wait(20)
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.recv, 0, 2, timeout_s=15)
        assert called.wait(20)
        sender.isend(b"y", 1, tag=2)
        assert bytes(waiting.result(20).data) == b"y"
    assert time.monotonic() - started < 10


def test_waiters_hand_the_wheel_on(pair: tuple[Endpoint, Endpoint]) -> None:
    """Several threads wait on one endpoint; whoever drives gets its message first, the others must still get theirs."""
    sender, receiver = pair
    for _ in range(20):
        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(receiver.recv, 0, tag, timeout_s=30) for tag in range(6)]
            for tag in random.Random(7).sample(range(6), 6):
                sender.isend(bytes([tag]), 1, tag=tag)
            assert [bytes(future.result(30).data)[0] for future in futures] == list(range(6))


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def test_idle_endpoints_and_long_waits_use_no_cpu(pair: tuple[Endpoint, Endpoint]) -> None:
    _, receiver = pair
    with ThreadPoolExecutor(3) as pool:
        waits: list[Callable[[], object]] = [
            lambda: receiver.recv(0, 1, timeout_s=0.6),
            lambda: receiver.recv(0, 2, timeout_s=0.6),
        ]
        before = _cpu_seconds()
        for future in [pool.submit(wait) for wait in waits]:
            assert isinstance(future.exception(20), TimeoutError)
        used = _cpu_seconds() - before
    assert used < 0.2


def test_a_receive_that_nobody_waits_for_is_work_for_the_background(pair: tuple[Endpoint, Endpoint]) -> None:
    _, receiver = pair
    handle = receiver.irecv_into(bytearray(5), 0, 1)
    operation = handle._operation
    assert isinstance(operation, Receive)
    assert not operation.copy_is_due
    assert operation.phase == "waiting for a message"
    assert "waiting for a message" in repr(handle)
