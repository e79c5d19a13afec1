"""An endpoint's mappings go when it ends: at once, not when the garbage collector happens to run."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import proxyd_client
from proxyd.wire import client as wire
from proxyd.wire.envelope import ErrorCode
from proxyd_client import AgentUnavailable, ClosedError, Endpoint, Handle, ProxydError
from proxyd_client.arena import Mapping
from tests.fakes.fake_agent import FakeAgent

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def areas(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """The memory of every arena that is mapped from now on: what keeps it mapped, not what describes it."""
    seen: list[weakref.ref[Any]] = []

    class Watched(Mapping):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen.append(weakref.ref(self._area))

    monkeypatch.setattr("proxyd_client.session.Mapping", Watched)
    return seen


def join(prefix: str) -> None:
    """Wait for the end of the library's threads of that name."""
    for thread in threading.enumerate():
        if thread.name.startswith(prefix):
            thread.join(20)
            assert not thread.is_alive()


def mapped_now(areas: list[weakref.ref[Any]]) -> int:
    return sum(area() is not None for area in areas)


def mapped(areas: list[weakref.ref[Any]]) -> int:
    """How many are still mapped once the session's threads have ended."""
    join("proxyd-")
    return mapped_now(areas)


def close(endpoint: Endpoint, agent: FakeAgent) -> None:
    endpoint.close(linger_s=0)


def kill(endpoint: Endpoint, agent: FakeAgent) -> None:
    agent.kill()
    _told(endpoint, AgentUnavailable)


def kill_and_close(endpoint: Endpoint, agent: FakeAgent) -> None:
    kill(endpoint, agent)
    endpoint.close()


def replace(endpoint: Endpoint, agent: FakeAgent) -> None:
    agent.tell(0, wire.Bye(code=ErrorCode.CLOSED, message="a newer process"))
    _told(endpoint, ClosedError)


def break_the_protocol(endpoint: Endpoint, agent: FakeAgent) -> None:
    agent.tell(0, wire.ArenaWanted(5))
    _told(endpoint, AgentUnavailable)


def close_at_an_error(endpoint: Endpoint, agent: FakeAgent) -> None:
    with contextlib.suppress(KeyError), endpoint:
        raise KeyError


WAYS = [close, kill, kill_and_close, replace, break_the_protocol, close_at_an_error]


def _told(endpoint: Endpoint, kind: type[ProxydError]) -> None:
    with contextlib.suppress(kind):
        endpoint.recv(5, timeout_s=20)
        raise AssertionError("it goes on")


def connect(agent: FakeAgent) -> Endpoint:
    endpoint = proxyd_client.connect("job", 0, socket=agent.path)
    endpoint.send(b"itself", 0, timeout_s=20)
    assert bytes(endpoint.recv(0, timeout_s=20).data) == b"itself"
    return endpoint


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_an_endpoint_that_ended(
    agent: FakeAgent, areas: list[weakref.ref[Any]], way: Callable[[Endpoint, FakeAgent], None]
) -> None:
    endpoint = connect(agent)
    gone = weakref.ref(endpoint._session)
    assert mapped_now(areas) == 2
    way(endpoint, agent)
    del endpoint
    assert mapped(areas) == 0
    assert gone() is None


def _pending(endpoint: Endpoint, agent: FakeAgent, out: np.ndarray) -> list[Handle[Any]]:
    """Sends and receives that can't end by themselves: in the middle of a message, before one, without one."""
    agent.change(stall_at_bytes=MIB)
    landing = endpoint.irecv_into(out, 0, 1)
    sends = [endpoint.isend(np.ones(4 * MIB, np.uint8), 0, tag=tag) for tag in (1, 2, 3)]
    while not landing._operation.copied_bytes:  # type: ignore[attr-defined]
        landing.done()
    return [landing, *sends, endpoint.irecv(0, 2), endpoint.irecv(0, 9), endpoint.irecv_into(out, None, 8)]


@pytest.mark.parametrize("way", WAYS)
def test_operations_that_failed_with_it_hold_neither_arenas_nor_buffers(
    agent: FakeAgent, areas: list[weakref.ref[Any]], way: Callable[[Endpoint, FakeAgent], None]
) -> None:
    endpoint = connect(agent)
    out = np.zeros(4 * MIB, np.uint8)
    buffer = weakref.ref(out)
    _pending(endpoint, agent, out)
    gone = weakref.ref(endpoint._session)
    way(endpoint, agent)
    del endpoint, out
    assert mapped(areas) == 0
    assert buffer() is None
    assert gone() is None


@pytest.mark.parametrize("way", WAYS)
def test_arenas_go_though_endpoint_and_handles_are_kept(
    agent: FakeAgent, areas: list[weakref.ref[Any]], way: Callable[[Endpoint, FakeAgent], None]
) -> None:
    endpoint = connect(agent)
    handles = _pending(endpoint, agent, np.zeros(4 * MIB, np.uint8))
    way(endpoint, agent)
    assert mapped(areas) == 0
    for handle in handles:
        assert handle.done()
        assert "ended" in repr(handle)
        with pytest.raises((AgentUnavailable, ClosedError)):
            handle.wait(0)
    for call in (lambda: endpoint.isend(bytes(MIB), 0), lambda: endpoint.recv(0)):
        with pytest.raises((AgentUnavailable, ClosedError)):
            call()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hand_over", [False, True])
def test_a_view_keeps_the_one_arena_that_it_lies_in(
    start_agent: Callable[..., FakeAgent],
    areas: list[weakref.ref[Any]],
    way: Callable[[Endpoint, FakeAgent], None],
    hand_over: bool,
) -> None:
    agent = start_agent(hand_over=hand_over)
    endpoint = connect(agent)
    data = np.random.default_rng(1).integers(0, 256, 2 * MIB, np.uint8)
    endpoint.isend(data, 0)
    view = endpoint.recv(0, timeout_s=20).array[1000:]
    way(endpoint, agent)
    assert mapped(areas) == 1
    assert np.array_equal(view, data[1000:])
    del view
    assert mapped(areas) == 0


def test_a_copy_that_runs_while_the_session_ends_keeps_its_arena_for_as_long(
    agent: FakeAgent, areas: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a message so large that its pages are taken out of the resident set behind the copy."""
    monkeypatch.setattr("proxyd_client.receiving.LARGE_BYTES", MIB)
    monkeypatch.setattr("proxyd_client.sending.LARGE_BYTES", MIB)
    original = np.copyto
    copying, ended = threading.Event(), threading.Event()

    def slow_copy(target: np.ndarray, source: np.ndarray) -> None:
        if threading.current_thread().name == "proxyd-client":
            copying.set()
            assert ended.wait(20)
        original(target, source)

    monkeypatch.setattr("proxyd_client.receiving.np.copyto", slow_copy)
    endpoint = connect(agent)
    out = np.zeros(4 * MIB, np.uint8)
    handle = endpoint.irecv_into(out, 0, 1)
    endpoint.isend(np.full(4 * MIB, 7, np.uint8), 0, tag=1)
    assert copying.wait(20)
    endpoint.close(linger_s=0)
    join("proxyd-prefault")
    during = mapped_now(areas)
    ended.set()
    with pytest.raises(ClosedError):
        handle.wait(20)
    assert during == 1
    assert mapped(areas) == 0
    assert out[0] == 7


def test_a_send_that_is_being_copied_while_the_session_ends(
    agent: FakeAgent, areas: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = np.copyto
    endpoint = connect(agent)

    def close_and_copy(target: np.ndarray, source: np.ndarray) -> None:
        monkeypatch.setattr("proxyd_client.sending.np.copyto", original)
        endpoint.close(linger_s=0)
        original(target, source)

    monkeypatch.setattr("proxyd_client.sending.np.copyto", close_and_copy)
    with pytest.raises(ClosedError):
        endpoint.isend(bytes(3 * MIB), 0).wait(20)
    assert mapped(areas) == 0
