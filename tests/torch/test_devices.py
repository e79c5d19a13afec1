"""Tensors of a device: the order of streams, with one that runs behind its host as a real one does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import proxyd_client
from proxyd_client import Endpoint
from tests.fakes.fake_agent import FakeAgent

pytestmark = pytest.mark.needs_torch


class Stream:
    """Runs what is queued in a thread of its own, in order and late."""

    current: Stream

    def __init__(self, device: Any = None) -> None:
        self._queue: list[Callable[[], None]] = []
        self._there = threading.Condition()
        self.kept: list[int] = []
        threading.Thread(target=self._run, daemon=True).start()

    def queue(self, work: Callable[[], None]) -> None:
        with self._there:
            self._queue.append(work)
            self._there.notify()

    def record_event(self) -> threading.Event:
        reached = threading.Event()
        self.queue(reached.set)
        return reached

    def wait_event(self, event: threading.Event) -> None:
        # A copy of host memory runs at once, so what must come before it is awaited here.
        assert event.wait(20)

    def synchronize(self) -> None:
        self.record_event().wait(20)

    def _run(self) -> None:
        while True:
            with self._there:
                self._there.wait_for(lambda: bool(self._queue))
                work = self._queue.pop(0)
            work()


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    yield


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Endpoint, Endpoint]]:
    with FakeAgent(tmp_path) as agent:
        pair = [proxyd_client.connect("job", rank, socket=agent.path) for rank in range(2)]
        yield pair[0], pair[1]
        for endpoint in pair:
            endpoint.close(0)


def copies_of(trainer: Stream) -> tuple[Any, list[Any]]:
    import torch

    from proxyd_client.torch.devices import StreamCopies

    kept: list[Any] = []
    api = SimpleNamespace(Stream=Stream, stream=on, current_stream=lambda device: trainer)
    return StreamCopies(api, torch.device("cpu"), keep=lambda tensor, stream: kept.append(tensor)), kept


@pytest.mark.parametrize("count", [10, 1_000_000])
def test_a_send_right_after_a_long_kernel_takes_its_result(ends: tuple[Endpoint, Endpoint], count: int) -> None:
    import torch

    from proxyd_client.torch.outbox import Outbox
    from proxyd_client.torch.tensors import payload_of_tensor

    trainer = Stream()
    copies, kept = copies_of(trainer)
    tensor = torch.zeros(count)
    release = threading.Event()
    trainer.queue(lambda: (release.wait(20), tensor.fill_(7.0))[0] and None)
    handle = Outbox(ends[0]).send(payload_of_tensor(tensor, copies=copies), 1, tag=0)  # returns before the kernel ran
    assert not handle.done()
    release.set()
    out = torch.zeros(count)
    ends[1].recv_into(payload_of_tensor(out, writable=True), 0, timeout_s=20)
    handle.wait(20)
    assert bool((out == 7).all())
    assert kept


def test_a_receive_waits_for_what_still_reads_the_tensor(ends: tuple[Endpoint, Endpoint]) -> None:
    import torch

    from proxyd_client.torch.tensors import payload_of_tensor

    trainer = Stream()
    copies, _ = copies_of(trainer)
    tensor, seen = torch.full((10,), 3.0), []
    release = threading.Event()
    trainer.queue(lambda: (release.wait(20), seen.append(tensor.tolist()))[0] and None)
    handle = ends[1].irecv_into(payload_of_tensor(tensor, writable=True, copies=copies), 0, strict=True)
    ends[0].isend(payload_of_tensor(torch.full((10,), 8.0)), 1)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        handle.wait(0.05)
    assert time.monotonic() - begun < 10
    release.set()
    handle.wait(20)
    assert seen == [[3.0] * 10]
    assert tensor.tolist() == [8.0] * 10


def test_order_is_kept_between_a_device_and_the_host(ends: tuple[Endpoint, Endpoint]) -> None:
    import torch

    from proxyd_client.torch.outbox import Outbox
    from proxyd_client.torch.tensors import payload_of_tensor

    copies, _ = copies_of(Stream())
    outbox = Outbox(ends[0])
    handles = [
        outbox.send(payload_of_tensor(torch.full((4,), float(n)), copies=copies if n % 2 else None), 1, tag=0)
        for n in range(10)
    ]
    got = []
    for _ in range(10):
        out = torch.zeros(4)
        ends[1].recv_into(payload_of_tensor(out, writable=True), 0, timeout_s=20)
        got.append(out[0].item())
    assert got == [float(n) for n in range(10)]
    for handle in handles:
        handle.wait(20)


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="no CUDA device")
def test_cuda_tensors(ends: tuple[Endpoint, Endpoint]) -> None:
    import torch

    from proxyd_client.torch.outbox import Outbox
    from proxyd_client.torch.tensors import payload_of_tensor

    side = torch.cuda.Stream()
    big = torch.rand(2048, 2048, device="cuda")
    with torch.cuda.stream(side):
        result = big
        for _ in range(30):
            result = result @ big / 1024
        handle = Outbox(ends[0]).send(payload_of_tensor(result), 1, tag=0)
    out = torch.zeros(2048, 2048, device="cuda")
    ends[1].recv_into(payload_of_tensor(out, writable=True), 0, timeout_s=60)
    handle.wait(20)
    assert torch.equal(out, result)


def test_a_collective_takes_what_was_queued_before_it_and_gives_its_result_back() -> None:
    import torch

    from proxyd_client.torch.host_tensors import HostTensor

    trainer = Stream()
    copies, kept = copies_of(trainer)
    tensor = torch.zeros(4, 1000).t()

    def kernel() -> None:
        time.sleep(0.05)
        tensor.fill_(3)

    trainer.queue(kernel)
    host = HostTensor(tensor, copies)
    values = host.values()
    assert values.eq(3).all(), "the kernel came first"
    values.add_(1)
    assert tensor.eq(3).all(), "only when it is given back"
    host.give_back()
    assert tensor.eq(4).all()
    assert len(kept) == 2, "the allocator knows of both copies"
