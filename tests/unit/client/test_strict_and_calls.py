"""What the torch backend asks of the client: strict receives, callbacks, and memory that only a mover can reach."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

from proxyd.wire import client as wire
from proxyd_client import ClosedError, Endpoint, MismatchError, ProxydError, TransferCancelled, TransferFailed
from proxyd_client.buffers import Bytes, Payload
from proxyd_client.calls import Calls
from proxyd_client.matching import Matcher, Posted
from tests.fakes.fake_agent import FakeAgent

from .conftest import Connect
from .test_matching import message, receive

MIB = 1 << 20


@pytest.fixture(params=[False, True], ids=["shared", "tcp"])
def pair(agent: FakeAgent, connect: Connect, request: pytest.FixtureRequest) -> tuple[Endpoint, Endpoint]:
    return connect(agent, 0, tcp=request.param), connect(agent, 1, tcp=request.param)


def strict(only: str) -> Posted:
    posted = receive(0, only=only)
    posted.drops = True
    return posted


@pytest.mark.parametrize("posted_first", [True, False])
def test_a_receive_that_drops_takes_the_message_along(posted_first: bool) -> None:
    matcher = Matcher()
    first, second = message(0, sequence=1, dtype="int8"), message(0, sequence=2)
    picky, patient = strict("uint8"), strict("uint8")
    if posted_first:
        matcher.post(picky)
        matcher.post(patient)
        outcome = matcher.offer(first)
        assert matcher.offer(second).matched == [(patient, second)]
    else:
        matcher.offer(first)
        matcher.offer(second)
        outcome = matcher.post(picky)
        assert matcher.post(patient).matched == [(patient, second)]
    assert [(r, m) for r, m, _ in outcome.misfits] == [(picky, first)]
    assert not outcome.matched


@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize(("sent", "dtype"), [(3, "float32"), (5 * MIB, "float32"), (5, "int32"), (0, "float32")])
def test_a_misfit_ends_both_and_the_next_pair_matches(
    pair: tuple[Endpoint, Endpoint], agent: FakeAgent, posted_first: bool, sent: int, dtype: str
) -> None:
    sender, receiver = pair
    out, right = np.full(5, 9, np.float32), np.zeros(5, np.float32)
    wrong, good = np.zeros(sent, dtype), np.arange(5, dtype=np.float32)
    sends = []
    if not posted_first:
        sends = [sender.isend(wrong, 1), sender.isend(good, 1)]
    handles = [receiver.irecv_into(out, 0, strict=True), receiver.irecv_into(right, 0, strict=True)]
    if posted_first:
        sends = [sender.isend(wrong, 1), sender.isend(good, 1)]
    with pytest.raises(MismatchError, match=rf"{dtype}\[{sent}\].*float32\[5\].*dropped"):
        handles[0].wait(20)
    handles[1].wait(20)
    assert np.array_equal(out, np.full(5, 9, np.float32))
    assert np.array_equal(right, good)
    for send in sends:
        send.wait(20)
    for _ in range(2):  # what came with the first answer was released behind the first question
        receiver.link_state(0)
    assert agent.count(wire.Release) == 2


def test_raw_bytes_are_a_dtype_like_any_other_when_strict(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    out = np.zeros(4, np.uint8)
    sender.isend(np.ones(1, np.float32), 1)
    with pytest.raises(MismatchError, match="float32"):
        receiver.irecv_into(out, 0, strict=True).wait(20)
    sender.isend(np.ones(4, np.uint8), 1)
    assert receiver.irecv_into(out, 0, strict=True).wait(20) == 4


def test_any_source_tells_who_it_was(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    handle = receiver.irecv_into(np.zeros(3, np.uint8), None)
    assert handle.source is None
    sender.send(np.ones(3, np.uint8), 1, timeout_s=20)
    handle.wait(20)
    assert handle.source == 0


class Strided:
    """A mover of every other element."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array[::2]
        self.nbytes = self.array.nbytes
        self.waits = False

    def write_to(self, block: Bytes) -> None:
        np.copyto(block.view(self.array.dtype), self.array)

    def read_from(self, block: Bytes) -> None:
        np.copyto(self.array, block.view(self.array.dtype))


class Broken(Strided):
    def write_to(self, block: Bytes) -> None:
        raise OSError("the device is gone")

    def read_from(self, block: Bytes) -> None:
        raise OSError("the device is gone")


def payload(mover: Strided) -> Payload:
    return Payload(np.empty(0, np.uint8), "int64", mover.array.shape, mover)


@pytest.mark.parametrize("count", [6, 3 * MIB // 4])
def test_a_mover_moves_all_in_one_pass(pair: tuple[Endpoint, Endpoint], count: int) -> None:
    sender, receiver = pair
    source, target = np.arange(count), np.zeros(count, np.int64)
    send = sender.isend(payload(Strided(source)), 1)
    assert receiver.recv_into(payload(Strided(target)), 0, timeout_s=20) == count // 2 * 8
    send.wait(20)
    assert np.array_equal(target[::2], source[::2])
    assert not target[1::2].any()


@pytest.mark.parametrize("count", [6, 3 * MIB // 4])
def test_a_mover_that_fails_fails_its_own_message_only(pair: tuple[Endpoint, Endpoint], count: int) -> None:
    sender, receiver = pair
    source, target = np.arange(count), np.zeros(count, np.int64)
    with pytest.raises(OSError, match="device is gone"):
        sender.isend(payload(Broken(source)), 1)
    sends = [sender.isend(payload(Strided(source)), 1) for _ in range(2)]
    with pytest.raises(TransferFailed, match="device is gone"):
        receiver.irecv_into(payload(Broken(target)), 0).wait(20)
    receiver.recv_into(payload(Strided(target)), 0, timeout_s=20)
    assert np.array_equal(target[::2], source[::2])
    for send in sends:
        send.wait(20)


def test_callbacks_come_once_for_each_end(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    ends: list[str] = []
    done = threading.Semaphore(0)

    def note(name: str) -> Callable[[], None]:
        return lambda: (ends.append(name), done.release())[1]

    received = receiver.irecv_into(np.zeros(3, np.uint8), 0)
    received.call_when_done(note("received"))
    cancelled = receiver.irecv_into(np.zeros(3, np.uint8), 0)
    cancelled.call_when_done(note("cancelled"))
    sent = sender.isend(np.ones(3, np.uint8), 1)
    sent.call_when_done(note("sent"))
    assert done.acquire(timeout=20)
    assert done.acquire(timeout=20)
    assert sorted(ends) == ["received", "sent"]
    assert cancelled.cancel()
    assert done.acquire(timeout=20)
    assert ends[-1] == "cancelled"
    with pytest.raises(TransferCancelled):
        cancelled.wait(0)
    received.call_when_done(note("late"))
    assert done.acquire(timeout=20)
    assert ends[-1] == "late"


def test_pending_operations_are_called_back_when_the_endpoint_ends(pair: tuple[Endpoint, Endpoint]) -> None:
    _, receiver = pair
    done = threading.Event()
    handle = receiver.irecv_into(np.zeros(3, np.uint8), 0)
    handle.call_when_done(done.set)
    receiver.close(0)
    assert done.wait(20)
    with pytest.raises(ProxydError):
        handle.wait(0)


def test_a_callback_that_raises_is_reported_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(str(args.exc_value)))
    calls, done = Calls(), threading.Event()

    def broken() -> None:
        raise ValueError("mine")

    calls.put(broken)
    calls.put(done.set)
    assert done.wait(20)
    assert seen == ["mine"]


def test_the_thread_of_callbacks_ends_when_idle_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxyd_client.calls.LINGER_S", 0.0)
    calls = Calls()
    for _ in range(50):
        done = threading.Event()
        calls.put(done.set)
        assert done.wait(20)


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * MIB + 5])
def test_a_writable_message_is_copied_where_it_is_written_to_and_only_there(
    agent: FakeAgent, connect: Connect, nbytes: int
) -> None:
    sender, receiver = connect(agent, 0), connect(agent, 1)
    sent = np.arange(nbytes, dtype=np.uint8)
    for number in range(4):
        sender.isend(sent + np.uint8(number), 1)
        message = receiver.recv(0, writable=True, timeout_s=20)
        assert np.array_equal(message.array, sent + np.uint8(number))
        assert not message.data.readonly
        message.array[:] = 77
        assert (np.asarray(message.data) == 77).all()
        receiver.link_state(0)
        assert agent.count(wire.Release) == number
        del message
        gc.collect()
        receiver.link_state(0)
        assert agent.count(wire.Release) == number + 1
    sender.isend(sent, 1)
    message = receiver.recv(0, timeout_s=20)
    assert np.array_equal(message.array, sent)
    assert message.data.readonly


@pytest.mark.parametrize("count", [3, 5 * MIB])
def test_a_closed_group_gives_up_its_receives_and_drops_what_comes(
    pair: tuple[Endpoint, Endpoint], agent: FakeAgent, count: int
) -> None:
    sender, receiver = pair
    early = sender.isend(np.ones(count, np.uint8), 1, tag=1, group="old")
    receiver.irecv_into(np.zeros(count, np.uint8), 0, tag=2, group="other")
    posted = [
        receiver.irecv_into(np.zeros(count, np.uint8), 0, tag=9, group="old"),
        receiver.irecv(None, 9, group="old"),
    ]
    sender.link_state(1)
    receiver.link_state(0)  # the first message has been offered by now
    receiver.close_group("old")
    for handle in posted:
        with pytest.raises(ClosedError, match="its group was closed"):
            handle.wait(20)
    late = sender.isend(np.ones(count, np.uint8), 1, tag=9, group="old")
    early.wait(20)
    late.wait(20)
    for _ in range(2):  # what came with the first answer was released behind the first question
        receiver.link_state(0)
    assert agent.count(wire.Release) == 2
    sender.isend(np.full(count, 7, np.uint8), 1, tag=9, group="new")
    assert receiver.recv(0, 9, group="new", timeout_s=20).array[0] == 7


def test_at_the_end_all_calls_are_made_and_no_thread_is_left() -> None:
    calls, made = Calls(), []
    calls.finish()
    for number in range(5):
        calls.put(lambda number=number: made.append(number))  # type: ignore[misc]
    calls.finish()
    assert made == list(range(5))
    assert calls._thread is None
    calls.put(lambda: made.append(9))
    calls.finish()
    assert made[-1] == 9
