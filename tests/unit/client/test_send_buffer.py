"""Buffers in shared memory: sent where they lie, and given back when nobody needs them any more."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from proxyd.wire import client as wire
from proxyd_client import AgentUnavailable, ArgumentError, ConfigError, Endpoint, TransferTimeout
from tests.fakes.fake_agent import FakeAgent
from tests.unit.client.conftest import Connect
from tests.unit.client.test_resuming import Lives, content, life, until

__all__ = ["life"]
BIG = 5 << 20


def room(endpoint: Endpoint) -> int:
    """What is taken of its arenas."""
    with endpoint._session.core.lock:
        endpoint._session.sender.loans.collect()
        return endpoint._session.sender._arenas.used_bytes


@pytest.mark.parametrize("nbytes", [1000, BIG])
def test_it_is_sent_where_it_lies(agent: FakeAgent, connect: Connect, nbytes: int) -> None:
    sender, receiver = connect(agent, 0), connect(agent, 1)
    buffer = sender.send_buffer(nbytes)
    buffer.array[:] = content(nbytes)
    taken = room(sender)
    handles = [sender.isend(buffer, dst=1), sender.isend(buffer, dst=1, dtype="bfloat16", shape=(nbytes // 2,))]
    assert room(sender) == taken
    first, second = receiver.recv(0, timeout_s=5), receiver.recv(0, timeout_s=5)
    assert np.array_equal(first.array, content(nbytes))
    assert (second.dtype, bytes(second.data)) == ("bfloat16", bytes(first.data))
    for handle in handles:
        handle.wait(5)
    buffer.wait(5)
    assert not buffer.is_read
    assert len({(post.arena, post.offset) for post in agent.posts}) == 1
    assert [post.filled_bytes for post in agent.posts] == [nbytes, nbytes]
    assert agent.count(wire.SendFilled) == 0
    del buffer
    assert room(sender) == 0


def test_its_shape_and_dtype_travel(agent: FakeAgent, connect: Connect) -> None:
    sender, receiver = connect(agent, 0), connect(agent, 1)
    buffer = sender.send_buffer((3, 4), np.float32)
    buffer.array[:] = 1.5
    assert (repr(buffer), len(buffer), buffer.nbytes) == ("<SendBuffer float32[3, 4], 48 bytes>", 48, 48)
    sender.send(buffer, dst=1, timeout_s=5)
    got = receiver.recv(0, timeout_s=5)
    assert (got.dtype, got.shape, got.array.sum()) == ("float32", (3, 4), 18.0)
    sender.send(sender.send_buffer((0, 4), "float32"), dst=1, timeout_s=5)
    assert receiver.recv(0, timeout_s=5).shape == (0, 4)
    with pytest.raises(ArgumentError, match="numpy knows no dtype"):
        _ = sender.send_buffer(8, "bfloat16").array
    with pytest.raises(ArgumentError, match="is unknown here"):
        sender.send_buffer(8, "int3")
    with pytest.raises(ArgumentError, match="negative"):
        sender.send_buffer((2, -1))


def test_what_is_still_sent_keeps_its_memory(agent: FakeAgent, connect: Connect) -> None:
    sender, receiver = connect(agent, 0), connect(agent, 1)
    agent.change(hold=True)
    buffer = sender.send_buffer(BIG)
    buffer.array[:] = content(BIG)
    handle = sender.isend(buffer, dst=1)
    with pytest.raises(TransferTimeout, match="1 messages are still being sent"):
        buffer.wait(0.01)
    assert buffer.is_read
    part = buffer.data[10:20]
    del buffer
    gc.collect()
    assert room(sender) >= BIG
    agent.change(hold=False)
    assert np.array_equal(receiver.recv(0, timeout_s=5).array, content(BIG))
    handle.wait(5)
    assert room(sender) >= BIG, "a view of it is left"
    assert bytes(part) == bytes(content(BIG)[10:20])
    del part
    assert room(sender) == 0


def test_a_neighbour_that_holds_it_is_waited_for(start_agent: Callable[..., FakeAgent], connect: Connect) -> None:
    agent = start_agent(hand_over=True)
    sender, receiver = connect(agent, 0), connect(agent, 1)
    buffer = sender.send_buffer(1000)
    buffer.array[:] = content(1000)
    handle = sender.isend(buffer, dst=1)
    got = receiver.recv(0, timeout_s=5)
    handle.wait(5)
    with pytest.raises(TransferTimeout):
        buffer.wait(0.01)
    assert np.array_equal(got.array, content(1000))
    del got
    buffer.wait(5)


def test_without_shared_memory_it_is_copied(agent: FakeAgent, connect: Connect) -> None:
    sender, receiver = connect(agent, 0, tcp=True), connect(agent, 1)
    other = connect(agent, 2)
    buffer, theirs = sender.send_buffer(BIG), other.send_buffer(1000)
    buffer.array[:], theirs.array[:] = content(BIG), content(1000)
    coming = receiver.irecv(0)
    sender.isend(buffer, dst=1).wait(5)
    buffer.wait(0)
    assert np.array_equal(coming.wait(5).array, content(BIG))
    receiver.send(theirs, dst=1, timeout_s=5)  # another endpoint's: its agent can't read it
    assert not theirs.is_read
    assert np.array_equal(receiver.recv(1, timeout_s=5).array, content(1000))


def test_idle_buffers_make_no_room(start_agent: Callable[..., FakeAgent], connect: Connect) -> None:
    agent = start_agent(send_arena_bytes=1 << 20, memory_limit_bytes=2 << 20)
    endpoint = connect(agent, 0)
    buffer = endpoint.send_buffer(700 << 10)
    with pytest.raises(ConfigError, match="716800 of them in send buffers"):
        endpoint.isend(content(1900 << 10), dst=1, timeout_s=5)
    with pytest.raises(ConfigError, match="send buffer: a message of 16777216 bytes can never fit"):
        endpoint.send_buffer(16 << 20)
    del buffer


@pytest.mark.parametrize("nbytes", [1000, BIG])
def test_the_agents_next_life_gets_a_copy(life: Lives, connect: Connect, nbytes: int) -> None:
    old = life(hold=True)
    sender, receiver = connect(old, 0), connect(old, 1)
    buffer = sender.send_buffer(nbytes)
    buffer.array[:] = content(nbytes)
    handle = sender.isend(buffer, dst=1)
    until(lambda: old.posts)
    new = life()
    assert np.array_equal(receiver.recv(0, timeout_s=5).array, content(nbytes))
    handle.wait(5)
    buffer.wait(5)
    handle = sender.isend(buffer, dst=1)
    assert np.array_equal(receiver.recv(0, timeout_s=5).array, content(nbytes))
    handle.wait(5)
    assert [post.again for post in new.posts] == [True, False]
    assert room(sender) == 0, "it lies in an arena that is given up"


def test_a_neighbours_hold_is_forgotten_with_the_agent(life: Lives, connect: Connect) -> None:
    old = life(hand_over=True)
    sender, receiver = connect(old, 0), connect(old, 1)
    buffer = sender.send_buffer(1000)
    sender.isend(buffer, dst=1).wait(5)
    got = receiver.recv(0, timeout_s=5)
    old.kill()
    until(lambda: sender._session.core.away)
    with pytest.raises(AgentUnavailable, match="let go"):
        buffer.wait(5)
    assert len(got.data) == 1000
