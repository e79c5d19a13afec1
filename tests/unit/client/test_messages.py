"""Messages from endpoint to endpoint through a local agent: contents, order, matching, dtypes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from proxyd.wire import client as wire
from proxyd_client import ArgumentError, Endpoint, MismatchError, TransferTimeout
from tests.fakes.fake_agent import FakeAgent

from .conftest import Connect

MIB = 1 << 20


def tensor(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def pair(agent: FakeAgent, connect: Connect) -> tuple[Endpoint, Endpoint]:
    return connect(agent, 0), connect(agent, 1)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, MIB, 2 * MIB, 2 * MIB + 1, 9 * MIB + 17])
def test_bytes_arrive_whole_by_recv_and_by_recv_into(pair: tuple[Endpoint, Endpoint], nbytes: int) -> None:
    sender, receiver = pair
    first, second = tensor(nbytes, 1), tensor(nbytes, 2)
    handles = [sender.isend(first, 1, tag=3), sender.isend(second, 1, tag=3)]
    message = receiver.recv(0, 3, timeout_s=20)
    assert np.array_equal(message.array, first)
    out = np.zeros(nbytes, np.uint8)
    assert receiver.recv_into(out, 0, 3, timeout_s=20) == nbytes
    assert np.array_equal(out, second)
    for handle in handles:
        handle.wait(20)
        assert handle.done()
        assert handle.eta_s() == 0.0


def test_a_message_says_what_it_is(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    sender.send(x, 1, tag=-5, group="tp", timeout_s=20)
    m = receiver.recv(0, -5, group="tp", timeout_s=20)
    assert (m.src, m.tag, m.group, m.dtype, m.shape, m.nbytes, len(m)) == (0, -5, "tp", "float32", (3, 4), 48, 48)
    assert m.array.dtype == np.float32
    assert np.array_equal(m.array, x)
    assert m.data.readonly
    assert not m.array.flags.writeable
    assert bytes(m.data) == x.tobytes()


@pytest.mark.parametrize("nbytes", [0, 10, 3 * MIB])
def test_a_deadline_is_told_as_the_time_that_is_left(
    pair: tuple[Endpoint, Endpoint], agent: FakeAgent, nbytes: int
) -> None:
    sender, receiver = pair
    sender.isend(tensor(nbytes, 1), 1, deadline_s=20.0)
    sender.isend(tensor(nbytes, 1), 1)
    for _ in range(2):
        receiver.recv(0, timeout_s=20)
    first, second = agent.posts
    assert 0 < first.deadline_in_ns <= 20_000_000_000
    assert second.deadline_in_ns == 0
    for wrong in (0, -1, float("nan"), float("inf"), "soon"):
        with pytest.raises(ArgumentError, match="deadline_s"):
            sender.isend(tensor(10, 1), 1, deadline_s=wrong)  # type: ignore[arg-type]


def test_a_send_is_a_snapshot(pair: tuple[Endpoint, Endpoint], agent: FakeAgent) -> None:
    sender, receiver = pair
    agent.change(hold=True)
    small, large = np.full(10, 1, np.uint8), np.full(5 * MIB, 1, np.uint8)
    sender.isend(small, 1, tag=1)
    sender.isend(large, 1, tag=2)
    small[:] = large[:] = 9
    agent.change(hold=False)
    assert set(receiver.recv(0, 1, timeout_s=20).data) == {1}
    assert (receiver.recv(0, 2, timeout_s=20).array == 1).all()


def test_values_follow_tags_and_groups_whatever_the_order_of_receives(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    for tag in (1, 2, 3):
        sender.isend(bytes([tag]), 1, tag=tag)
        sender.isend(bytes([tag + 100]), 1, tag=tag, group="g")
    got = [bytes(receiver.recv(0, tag, timeout_s=20).data)[0] for tag in (3, 1, 2)]
    grouped = [bytes(receiver.recv(0, tag, group="g", timeout_s=20).data)[0] for tag in (2, 3, 1)]
    assert got == [3, 1, 2]
    assert grouped == [102, 103, 101]


def test_order_on_one_channel_is_kept_between_large_and_small(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    large = tensor(6 * MIB, 4)
    sender.isend(large, 1, tag=1)
    sender.isend(b"!", 1, tag=1)
    assert np.array_equal(receiver.recv(0, 1, timeout_s=20).array, large)
    assert bytes(receiver.recv(0, 1, timeout_s=20).data) == b"!"


def test_posted_receives_are_filled_in_posted_order_while_nobody_waits(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    outs = [np.zeros(3 * MIB, np.uint8) for _ in range(3)]
    handles = [receiver.irecv_into(out, 0, 1) for out in outs]
    sent = [tensor(3 * MIB, seed) for seed in range(3)]
    # The sends end only when the receiver's background thread has matched, accepted and taken them.
    for handle in [sender.isend(x, 1, tag=1) for x in sent]:
        handle.wait(20)
    for handle, out, x in zip(reversed(handles), reversed(outs), reversed(sent), strict=True):
        assert handle.wait(20) == 3 * MIB
        assert np.array_equal(out, x)


def test_a_polled_receive_finishes_without_wait(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    out = bytearray(5 * MIB)
    handle = receiver.irecv_into(out, 0, 1)
    x = tensor(5 * MIB, 5)
    sender.isend(x, 1, tag=1)
    while not handle.done():
        pass
    assert out == x.tobytes()


def test_any_source_takes_the_earliest_offered(agent: FakeAgent, connect: Connect) -> None:
    receiver, first, second = connect(agent, 0), connect(agent, 1), connect(agent, 2)
    # A reply after each: the agent has taken one before the next is sent.
    second.isend(b"second", 0, tag=1)
    assert second.link_state(0).link == "here"
    first.isend(b"first", 0, tag=1)
    assert first.link_state(0).link == "here"
    got = [receiver.recv(None, 1, timeout_s=20) for _ in range(2)]
    assert [(m.src, bytes(m.data)) for m in got] == [(2, b"second"), (1, b"first")]


@pytest.mark.parametrize(
    ("sent", "into"),
    [
        (np.arange(3, dtype=np.float32), np.full(5, 9, np.float32)),
        (np.arange(5, dtype=np.float32), np.full(3, 9, np.float32)),
        (np.arange(2, dtype=np.int32), np.full(2, 9, np.float32)),
        (np.empty(0, np.float32), np.full(1, 9, np.float32)),
        (np.arange(4 * MIB, dtype=np.uint8), np.full(MIB, 9, np.float64)),
    ],
)
def test_a_message_that_does_not_fit_leaves_the_buffer_and_stays_queued(
    pair: tuple[Endpoint, Endpoint], sent: np.ndarray, into: np.ndarray
) -> None:
    sender, receiver = pair
    before = into.copy()
    sender.isend(sent, 1, tag=7)
    with pytest.raises(MismatchError) as caught:
        receiver.recv_into(into, 0, 7, timeout_s=20)
    text = str(caught.value)
    for part in (str(sent.dtype), str(list(sent.shape)), str(into.dtype), str(list(into.shape)), "job/0", "tag 7"):
        assert part in text
    assert (caught.value.peer, caught.value.tag) == (0, 7)
    assert np.array_equal(into, before)
    assert np.array_equal(receiver.recv(0, 7, timeout_s=20).array, sent)
    sender.isend(before, 1, tag=7)
    assert receiver.recv_into(into, 0, 7, timeout_s=20) == before.nbytes


def test_bfloat16_is_told_from_float16_by_name(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    raw = np.arange(8, dtype=np.uint8)
    sender.isend(raw, 1, tag=1, dtype="bfloat16", shape=(2, 2))
    out = np.full(4, 9, np.float16)
    with pytest.raises(MismatchError, match=r"bfloat16\[2, 2\].*float16\[4\]"):
        receiver.recv_into(out, 0, 1, timeout_s=20)
    assert (out == 9).all()
    named = bytearray(8)
    assert receiver.recv_into(named, 0, 1, dtype="bfloat16", timeout_s=20) == 8
    assert named == raw.tobytes()


def test_raw_bytes_take_any_dtype_of_the_same_size(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    x = np.linspace(-1, 1, 6)
    sender.isend(x, 1, tag=1)
    out = bytearray(x.nbytes)
    assert receiver.recv_into(out, 0, 1, timeout_s=20) == x.nbytes
    assert out == x.tobytes()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bool", "int64", "complex64", "float16", "datetime64[ns]"])
@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (), (2,), (2, 1, 3)])
def test_dtypes_and_shapes_travel(pair: tuple[Endpoint, Endpoint], dtype: str, shape: tuple[int, ...]) -> None:
    sender, receiver = pair
    itemsize = 1 if dtype.startswith("float8") else np.dtype(dtype).itemsize
    raw = bytes(range(1, 1 + itemsize * int(np.prod(shape, dtype=int))))
    sender.isend(raw, 1, tag=1, dtype=dtype, shape=shape)
    sender.isend(b"next", 1, tag=1)
    m = receiver.recv(0, 1, timeout_s=20)
    assert (m.dtype, m.shape, bytes(m.data)) == (dtype, shape, raw)
    if dtype.startswith("float8"):
        with pytest.raises(ArgumentError, match="float8_e4m3fn"):
            _ = m.array
    else:
        assert m.array.shape == shape
        assert m.array.tobytes() == raw
    assert bytes(receiver.recv(0, 1, timeout_s=20).data) == b"next"


def test_nan_payloads_and_negative_zero_survive(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    x = np.array([0x7FC0_0001_0000_0002, 1 << 63], np.uint64).view(np.float64)
    sender.isend(x, 1)
    assert receiver.recv(0, timeout_s=20).data == memoryview(x).cast("B")


def test_the_block_is_given_back_when_the_last_view_dies(pair: tuple[Endpoint, Endpoint], agent: FakeAgent) -> None:
    sender, receiver = pair

    def released() -> int:
        receiver.link_state(0)  # behind whatever the endpoint wrote before
        return agent.count(wire.Release)

    for tag, keep in enumerate(
        (
            lambda m: m.data,
            lambda m: m.data[3:5],
            lambda m: m.array,
            lambda m: m.array[1:].reshape(-1)[::2],
            lambda m: m,
        )
    ):
        before = released()
        sender.send(np.arange(100, dtype=np.int32), 1, tag=tag, timeout_s=20)
        kept = keep(receiver.recv(0, tag, timeout_s=20))
        gc.collect()
        assert released() == before
        derived = memoryview(kept.data if hasattr(kept, "src") else kept)[1:]
        del kept
        gc.collect()
        assert released() == before
        del derived
        gc.collect()
        assert released() == before + 1


def test_views_outlive_the_endpoint(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    x = tensor(3 * MIB, 8)
    sender.isend(x, 1)
    array = receiver.recv(0, timeout_s=20).array
    receiver.close()
    sender.close()
    gc.collect()
    assert np.array_equal(array, x)


def test_a_handed_over_block_goes_back_to_its_sender(start_agent: Callable[..., FakeAgent], connect: Connect) -> None:
    agent = start_agent(hand_over=True)
    sender, receiver = connect(agent, 0), connect(agent, 1)
    x = tensor(5 * MIB, 9)
    handle = sender.isend(x, 1, tag=1)
    m = receiver.recv(0, 1, timeout_s=20)
    assert np.array_equal(m.array, x)
    with pytest.raises(ValueError, match="read-only"):
        m.array[0] = 1
    handle.wait(20)  # a receiver that keeps what it got doesn't hold its sender up
    assert handle.done()
    assert not handle.cancel()
    assert sender._session.sender.pending, "but the block is not free yet"
    del m
    out = np.empty_like(x)
    handle = sender.isend(x, 1, tag=1)
    receiver.recv_into(out, 0, 1, timeout_s=20)
    handle.wait(20)
    assert np.array_equal(out, x)


def test_messages_over_tcp_both_ways(start_agent: Callable[..., FakeAgent], connect: Connect) -> None:
    agent = start_agent()
    gateway, local = connect(agent, 0, tcp=True), connect(agent, 1)
    for nbytes in (0, 1, MIB + 5, 7 * MIB + 3):
        x = tensor(nbytes, nbytes)
        handle = gateway.isend(x, 1, tag=1)
        assert np.array_equal(local.recv(0, 1, timeout_s=20).array, x)
        handle.wait(20)
        handle = local.isend(x, 0, tag=2)
        out = np.empty_like(x)
        assert gateway.recv_into(out, 1, 2, timeout_s=20) == nbytes
        handle.wait(20)
        assert np.array_equal(out, x)
    handle = local.isend(x, 0, tag=3)
    assert np.array_equal(gateway.recv(1, 3, timeout_s=20).array, x)


def test_both_sides_send_first(start_agent: Callable[..., FakeAgent], connect: Connect) -> None:
    agent = start_agent(send_arena_bytes=4 * MIB)
    a, b = connect(agent, 0), connect(agent, 1)
    xs = [tensor(8 * MIB, seed) for seed in range(4)]
    handles = [a.isend(xs[0], 1, tag=1), a.isend(xs[1], 1, tag=2), b.isend(xs[2], 0, tag=1), b.isend(xs[3], 0, tag=2)]
    got = [
        b.recv(0, 2, timeout_s=20),
        b.recv(0, 1, timeout_s=20),
        a.recv(1, 2, timeout_s=20),
        a.recv(1, 1, timeout_s=20),
    ]
    for message, index in zip(got, (1, 0, 3, 2), strict=True):
        assert np.array_equal(message.array, xs[index])
    for handle in handles:
        handle.wait(20)


def test_a_timed_out_receive_leaves_the_message_to_the_next(pair: tuple[Endpoint, Endpoint], agent: FakeAgent) -> None:
    sender, receiver = pair
    x = tensor(4 * MIB, 11)
    agent.change(stall_at_bytes=MIB)
    sender.isend(x, 1, tag=1)
    sender.isend(b"after", 1, tag=1)
    out = np.zeros(4 * MIB, np.uint8)
    with pytest.raises(TransferTimeout, match="4194304 bytes have landed"):
        receiver.recv_into(out, 0, 1, timeout_s=0.05)
    agent.change(stall_at_bytes=None)
    assert receiver.recv_into(out, 0, 1, timeout_s=20) == 4 * MIB
    assert np.array_equal(out, x)
    assert bytes(receiver.recv(0, 1, timeout_s=20).data) == b"after"


def test_announce_and_link_state_and_eta(pair: tuple[Endpoint, Endpoint], agent: FakeAgent) -> None:
    sender, receiver = pair
    sender.announce(1, 7, nbytes=8 * MIB, ready_in_s=0.05, traffic="sync")
    state = sender.link_state(1)
    assert (state.link, state.rate_bytes_per_s) == ("here", 10**9)
    announced = [frame for _, frame in agent.frames if isinstance(frame, wire.AnnounceSend)]
    assert announced == [wire.AnnounceSend(1, "", 7, 1, 8 * MIB, 50_000_000)]
    assert receiver.eta(0, 7) is None
    agent.change(stall_at_bytes=MIB)
    handle = sender.isend(tensor(MIB, 1), 1, 7)
    handle.wait(20)
    receiver.link_state(0)
    assert receiver.eta(0, 7) == 0.0
    slow = sender.isend(tensor(2 * MIB, 1), 1, 8)
    pending = receiver.irecv(0, 8)
    while not slow.eta_s():  # until the agent's word of it is here
        sender.link_state(1)
    with pytest.raises(TransferTimeout, match="sending"):
        slow.wait(0.01)
    assert 0 < (slow.eta_s() or 0) <= 1
    transfer = next(iter(agent.transfers.values()))
    agent.tell(1, wire.Expect(*max(agent.transfers), finish_in_ns=3_000_000_000, uncertainty_ns=0))
    assert transfer.sequence
    receiver.link_state(0)
    assert 2 < (receiver.eta(0, 8) or 0) <= 3
    assert 2 < (pending.eta_s() or 0) <= 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda ep: ep.isend(np.zeros((4, 4))[:, 1], 1), "C-contiguous"),
        (lambda ep: ep.isend(np.zeros(3), -1), "dst must be a rank"),
        (lambda ep: ep.isend(np.zeros(3), 1, 1 << 63), "tag must fit"),
        (lambda ep: ep.isend(np.zeros(3), 1, group="g" * 256), "group must be"),
        (lambda ep: ep.isend(np.zeros(3), 1, traffic="urgent"), "pipeline"),
        (lambda ep: ep.recv_into(bytes(3), 1), "read-only"),
        (lambda ep: ep.recv(0, timeout_s=-1), "negative"),
        (lambda ep: ep.announce(1, 1, nbytes=-1), "nbytes must be"),
        (lambda ep: ep.announce(1, 1, nbytes=1, ready_in_s=-1), "ready_in_s must be"),
    ],
)
def test_wrong_arguments_are_refused_before_a_byte_leaves(
    pair: tuple[Endpoint, Endpoint], agent: FakeAgent, call: Callable[[Endpoint], object], text: str
) -> None:
    with pytest.raises(ArgumentError, match=text):
        call(pair[0])
    pair[0].link_state(1)
    assert {type(frame) for _, frame in agent.frames} == {wire.LinkStateWanted}


def _resident_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Rss:"))


def test_a_large_receive_is_not_counted_twice(start_agent: Callable[..., FakeAgent], connect: Connect) -> None:
    """The trainer holds the tensor; the arena that it came through is not counted on top of it."""
    nbytes = 160 * MIB
    agent = start_agent(send_arena_bytes=200 * MIB, memory_limit_bytes=1 << 30, hand_over=True)
    sender, receiver = connect(agent, 0), connect(agent, 1)
    x, out = np.full(nbytes, 1, np.uint8), np.full(nbytes, 9, np.uint8)  # touched
    before = _resident_bytes()
    handle = sender.isend(x, 1)
    assert receiver.recv_into(out, 0, timeout_s=60) == nbytes
    after = _resident_bytes()
    handle.wait(20)
    assert (out == 1).all()
    # Handed over: only sender and receiver have touched the message. What remains is what was prefaulted.
    assert after - before < 96 * MIB


def test_an_idle_endpoint_lets_go_of_what_messages_left(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    sender.isend(np.full(MIB, 7, np.uint8), 1)
    kept = receiver.recv(0, timeout_s=20)
    trimmed = receiver._session.receiver
    with receiver._session.core.lock:
        trimmed.trim()
    assert (kept.array == 7).all()
