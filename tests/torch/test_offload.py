"""Saved activations that leave the device and come back: same bits, honest accounts, and no way to lose a step."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from proxyd_client.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from proxyd_client.torch.offload import ActivationStore

pytestmark = pytest.mark.needs_torch

CHUNK = 4096
PLENTY = 64 << 20


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActivationStore]:
    with make(tmp_path if request.param == "file" else None) as store:
        yield store


def make(directory: Path | None = None, host_bytes: int = PLENTY, **how: Any) -> ActivationStore:
    """A store that moves whatever it can, in chunks so small that every activation has many."""
    from proxyd_client.torch.offload import ActivationStore

    return ActivationStore(
        host_bytes=host_bytes, directory=directory, **{"least_bytes": 1, "chunk_bytes": CHUNK, **how}
    )


class Moving:
    """One move, waited for."""

    def __init__(self, begin: Callable[[int, Callable[[], None]], None], micro_batch: int) -> None:
        self._over = threading.Event()
        begin(micro_batch, self._over.set)

    def wait(self) -> None:
        assert self._over.wait(20), "the move never ended"


def move_out(store: ActivationStore, micro_batch: int) -> bool:
    Moving(store.leave, micro_batch).wait()
    return store.settle(micro_batch, keep=False)


def bring_back(store: ActivationStore, micro_batch: int) -> None:
    Moving(store.come_back, micro_batch).wait()


# ------------------------------------------------------------------------------------------------- same bits


def odd_saves() -> Any:
    """An operation that saves what no ordinary one does."""
    import torch

    class OddSaves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            small = x.detach().float()
            ctx.save_for_backward(
                x,
                small.to(torch.float8_e4m3fn),
                small.to(torch.float8_e5m2).t(),
                x > 0,
                small.sum(),
                x[:0],
                small[:, :1].expand(-1, 7),
                torch.complex(small, -small).conj(),
                small.to(torch.int64)[::2],
                small.to(torch.bfloat16),
            )
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            x, fp8, fp8t, mask, total, empty, expanded, conjugated, whole, half = ctx.saved_tensors
            found = expanded.stride(1), total.dim(), empty.shape, whole.stride(0), conjugated.is_conj()
            assert found == (0, 0, (0, x.shape[1]), 2 * x.shape[1], True)
            assert not fp8t.is_contiguous()
            weight = fp8.float() + fp8t.float().t() + mask + total + expanded.sum(1, keepdim=True)
            weight = weight + conjugated.imag + half.float() + whole.float().sum() + empty.sum()
            return (grad * 2 + weight + x).to(grad.dtype)

    return OddSaves


def random_stage(rng: random.Random, width: int) -> Any:
    """A module of operations in a random order."""
    import torch
    import torch.nn.functional as f

    operations = [rng.randrange(13) for _ in range(rng.randint(3, 9))]
    odd = odd_saves()

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.randn(width, width) / 3 for _ in operations])
            self.register_buffer("mask", torch.randint(0, 2, (width, width)).bool())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, operation in enumerate(operations):
                weight: Any = self.weights[number]
                if operation == 0:
                    x = f.linear(x, weight)
                elif operation == 1:
                    x = torch.tanh(x) * torch.sigmoid(x)
                elif operation == 2:
                    x = f.layer_norm(x, (width,), weight[0], weight[1])
                elif operation == 3:
                    x = (x @ weight.t()).relu_()
                elif operation == 4:
                    x = f.dropout(x.t(), 0.3).t() + weight[0]
                elif operation == 5:
                    a, b = x.chunk(2, dim=-1)
                    x = torch.cat([b * a, a.sin()], dim=-1) @ weight
                elif operation == 6:
                    x = x.masked_fill(self.mask[0], 0.5).softmax(-1) * weight[0].exp()
                elif operation == 7:
                    x = odd.apply(x @ weight)
                elif operation == 8:
                    x = (x.double() @ weight.double()).cumprod(0).tanh().to(x.dtype)
                elif operation == 9:
                    x = (x.bfloat16() @ weight.bfloat16()).gelu().to(x.dtype) if hasattr(x, "gelu") else f.gelu(x)
                elif operation == 10:
                    order = x.detach().sum(1).argsort()
                    x = x[order][:, ::2].repeat_interleave(2, 1) * weight[0]
                elif operation == 11:
                    x = x * x[:1].expand_as(x) + weight.diagonal() * x.sum()
                else:
                    wave = torch.fft.fft(x @ weight)
                    x = (wave.conj() * wave.exp().conj()).real + wave.conj().imag
            return x.clamp(-50, 50)

    return Stage()


@pytest.mark.parametrize("seed", range(16))
def test_gradients_are_bitwise_equal_whatever_moves_when(seed: int, tmp_path: Path) -> None:
    import torch
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    rng = random.Random(seed)
    torch.manual_seed(seed)
    stage = random_stage(rng, 8)
    count = 4
    inputs = [torch.randn(rng.choice([3, 6]), 8) for _ in range(count)]

    def step(store: ActivationStore | None) -> list[torch.Tensor]:
        stage.zero_grad()
        for parameter in stage.parameters():
            parameter.grad = None
        moves = Mover(store, random.Random(seed))
        caches: dict[int, tuple[Any, Any]] = {}
        groups: dict[int, Any] = {}
        said: list[torch.Tensor] = []
        tasks = orders(random.Random(seed + 1), count)
        for kind, number in tasks:
            moves.some(list(caches))
            if kind == "F":
                x = inputs[number].clone().requires_grad_()
                torch.manual_seed(number)
                with store.saving(number) if store is not None else contextlib.nullcontext():
                    caches[number] = x, stage(x)
                del x
            elif kind == "B":
                x, out = caches[number]
                said.append(out.detach().clone())
                dx, groups[number] = stage_backward_input([out], [torch.ones_like(out)], [x], stage.parameters())
                said.append(dx[0].clone())
            else:
                stage_backward_weight(stage.parameters(), groups.pop(number))
                del caches[number]
                if store is not None:
                    store.drop(number)
                    moves.gone(number)
        said.extend(p.grad.clone() for p in stage.parameters() if p.grad is not None)
        return said

    expected = step(None)
    with make(tmp_path if seed % 2 else None, module=stage) as store:
        for _ in range(2):  # twice: the second step has the first one's buffers
            found = step(store)
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            gc.collect()
            assert (store.device_bytes, store.host_bytes_used) == (0, 0)
        assert store.report.moved_out > 0 or not store.peak_device_bytes
        assert store.report.failed == 0


def orders(rng: random.Random, count: int) -> list[tuple[str, int]]:
    """F, B and W of all micro-batches; each kind in order, each B after its F, each W after its B."""
    done = {"F": 0, "B": 0, "W": 0}
    tasks: list[tuple[str, int]] = []
    while done["W"] < count:
        kinds = [kind for kind, before in (("F", None), ("B", "F"), ("W", "B")) if done[kind] < done.get(before, count)]
        kind = rng.choice(kinds)
        tasks.append((kind, done[kind]))
        done[kind] += 1
    return tasks


class Mover:
    """Moves at random; what is under way is sometimes waited for, and sometimes a backward comes first."""

    def __init__(self, store: ActivationStore | None, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self._states: dict[int, tuple[str, Moving | None]] = {}

    def some(self, held: list[int]) -> None:
        store, rng = self._store, self._rng
        if store is None:
            return
        for number in held:
            state, moving = self._states.get(number, ("here", None))
            if rng.random() < 0.3:
                continue
            if state == "here":
                moving = Moving(store.leave, number)
                self._states[number] = "leaving", moving
                if rng.random() < 0.8:
                    moving.wait()
                    out = store.settle(number, keep=rng.random() < 0.1)
                    self._states[number] = "out" if out else "here", None
            elif state == "leaving" and moving is not None:
                if rng.random() < 0.5:
                    store.settle(number, keep=True)
                    moving.wait()
                    self._states[number] = "here", None
                else:
                    moving.wait()
                    self._states[number] = "out" if store.settle(number, keep=False) else "here", None
            else:
                moving = Moving(store.come_back, number)
                self._states[number] = "returning", moving
                if rng.random() < 0.5:
                    moving.wait()
                    self._states[number] = "here", None

    def gone(self, number: int) -> None:
        _, moving = self._states.pop(number, ("here", None))
        if moving is not None:
            moving.wait()


def test_a_backward_of_one_piece_and_a_second_one_find_what_has_moved(store: ActivationStore) -> None:
    import torch

    x = torch.randn(64, 64, requires_grad=True)
    with store.saving(0):
        y = (x.tanh() * x.sin()).exp().sum()
    assert move_out(store, 0)
    (first,) = torch.autograd.grad(y, x, retain_graph=True, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
    plain = (x.tanh() * x.sin()).exp().sum()
    (expected,) = torch.autograd.grad(plain, x, create_graph=True)
    (expected_second,) = torch.autograd.grad(expected.sum(), x)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected_second)
    assert store.report.surprises == 1


# ------------------------------------------------------------------------------------- what moves, and accounts


def test_a_storage_that_is_saved_often_is_counted_and_moved_once(store: ActivationStore) -> None:
    import torch

    x = torch.randn(32, 32, requires_grad=True)

    def forward() -> torch.Tensor:
        h = x * 2
        return (h * h).sum() + (h.t() * h[:, ::2].sum()).sum() + h[3:].sin().sum()

    with store.saving(0):
        y = forward()
    nbytes = 32 * 32 * 4
    assert store.bytes_of(0) <= 2 * nbytes + 64  # h, x (it is nobody's parameter), and a sum
    movable = store.movable_bytes_of(0)
    assert nbytes <= movable < 2 * nbytes
    before = store.device_bytes
    assert move_out(store, 0)
    assert store.device_bytes == before - movable
    assert store.bytes_of(0) == before
    assert store.report.moved_bytes == movable <= store.host_bytes_used < movable + 256
    bring_back(store, 0)
    assert (store.device_bytes, store.host_bytes_used) == (before, 0)
    y.backward()
    found, x.grad = x.grad, None
    forward().backward()
    assert torch.equal(found, x.grad)


def test_what_is_held_elsewhere_stays_and_counts(store: ActivationStore) -> None:
    import torch

    stage = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh())
    with make(module=stage) as store:
        x = torch.randn(64, 16, requires_grad=True)
        with store.saving(0):
            y = stage(x)  # tanh saves its output, which is the stage's
        stays = x.nbytes + y.nbytes
        assert store.bytes_of(0) - stays == store.movable_bytes_of(0)
        assert move_out(store, 0)
        assert store.device_bytes == stays
        out = store.bytes_of(0) - stays
        assert 64 * 16 * 4 <= out <= 64 * 16 * 4 + 2 * 16 * 4  # the linear's output, mean and deviation
        y.sum().backward()
        assert stage[0].weight.grad is not None


def test_parameters_buffers_and_their_views_are_no_activations() -> None:
    import torch

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32, 32))
            self.register_buffer("scale", torch.randn(32, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight.t()[:, :16].contiguous().t().t()) @ self.weight[:16] * self.scale[0]

    stage = Stage()
    with make(module=stage) as store, make() as without:
        x = torch.randn(32, 32)
        losses = []
        for each in (store, without):
            with each.saving(0):
                losses.append(stage(x.requires_grad_()).sum())
        # x, the copy of a part of the weight, and what comes out of the first product.
        assert store.bytes_of(0) == x.nbytes + 32 * 16 * 4 + 32 * 16 * 4
        # Without the module a buffer can't be told from an activation; a parameter and its views can.
        assert without.bytes_of(0) == store.bytes_of(0) + 32 * 32 * 4
        for loss in losses:
            loss.backward()


def test_two_micro_batches_that_save_one_tensor_count_it_once_and_move_it_never(store: ActivationStore) -> None:
    import torch

    common = torch.randn(32, 32)
    losses = []
    for number in range(2):
        x = torch.randn(32, 32, requires_grad=True)
        with store.saving(number):
            losses.append((x * common).sum())
    nbytes = common.nbytes
    del common
    assert store.device_bytes == nbytes
    assert not move_out(store, 0)
    assert not move_out(store, 1)
    assert (store.device_bytes, store.host_bytes_used) == (nbytes, 0)
    for loss in losses:
        loss.backward()


@pytest.mark.parametrize("when", ["out", "returning", "back"])
def test_an_address_that_is_used_again_is_another_storage(when: str, store: ActivationStore) -> None:
    import torch

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * x.sin() * x.cos()).sum()  # no storage that isn't saved, but for the sum

    def graph_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        with store.saving(number):
            x = torch.randn(64, 64, requires_grad=True)
            return x, forward(x)

    graphs = [graph_of(0)]
    keys, nbytes = set(store._by_key), store.bytes_of(0)
    assert move_out(store, 0)
    moving = None
    if when != "out":
        others = [torch.empty(64, 64) for _ in range(50)]  # what comes back finds other addresses
        moving = Moving(store.come_back, 0)
        if when == "back":
            moving.wait()
        del others
    for number in range(1, 50):
        graphs.append(graph_of(number))
        assert store.bytes_of(number) == nbytes
        if keys & set(store._records[number].helds.values()):
            break
    if moving is not None:
        moving.wait()
    for number, (x, y) in enumerate(graphs):
        if number:
            assert move_out(store, number)
        y.backward()
        (expected,) = torch.autograd.grad(forward(x), x)
        assert torch.equal(x.grad, expected)


def test_memory_follows_the_graph_even_if_nobody_drops(store: ActivationStore) -> None:
    import torch

    x = torch.randn(32, 32, requires_grad=True)
    with store.saving(0):
        y = x.exp().sin().sum()
    peak = store.peak_device_bytes
    assert peak == x.nbytes, "what exp made is what sin read"
    assert store.device_bytes == peak
    del y
    assert (store.device_bytes, store.peak_device_bytes) == (0, peak)
    store.reset_peak()
    assert store.peak_device_bytes == 0
    with pytest.raises(ArgumentError, match="micro-batch 0 is on the device"), store.saving(0):
        pass
    store.drop(0)
    with store.saving(0):
        y = x.exp().sin().sum()
    assert move_out(store, 0)
    del y
    assert store.host_bytes_used > 0  # the buffer is the micro-batch's until somebody drops it
    store.drop(0)
    assert store.host_bytes_used == 0


def test_a_forward_that_raises_leaves_nothing(store: ActivationStore) -> None:
    import torch

    x = torch.randn(32, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"), store.saving(0):
        x.exp().sin() @ x[:3]
    assert (store.bytes_of(0), store.device_bytes) == (0, 0)
    with store.saving(0):
        x.exp()


def test_small_storages_stay(tmp_path: Path) -> None:
    import torch

    with make(tmp_path, least_bytes=4096) as store:
        x = torch.randn(64, 64, requires_grad=True)
        with store.saving(0):
            y = x.exp().sum(0).exp().sum()
        assert store.bytes_of(0) > store.movable_bytes_of(0) >= 64 * 64 * 4
        assert move_out(store, 0)
        assert store.device_bytes == 64 * 4
        y.backward()


# --------------------------------------------------------------------------------------------- changed in place


@pytest.mark.parametrize("when", ["here", "before the copy", "before it settled", "out", "back"])
def test_a_tensor_that_was_changed_in_place_raises_as_torch_does(when: str, store: ActivationStore) -> None:
    import torch

    x = torch.randn(16, 16, requires_grad=True)
    with store.saving(0):
        h = x * 2
        y = (h * h).sum() + x.exp().sum()

    def change() -> None:
        with torch.no_grad():
            h.add_(1)

    # h is held here, so its storage stays; the check must hold for what really leaves too, so the holder goes in time.
    if when == "here":
        change()
    elif when == "before the copy":
        change()
        del h
        assert move_out(store, 0)
    elif when == "before it settled":
        moving = Moving(store.leave, 0)
        moving.wait()
        change()
        del h
        store.settle(0, keep=False)
    else:
        counter = h.detach()
        counter.data = torch.empty(0)  # shares the version, not the storage
        del h
        assert move_out(store, 0)
        if when == "back":
            bring_back(store, 0)
        with torch.no_grad():
            counter.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[16, 16\].*version 1; expected"):
        y.backward()


def test_a_parameter_that_was_changed_between_forward_and_backward_raises(store: ActivationStore) -> None:
    import torch

    stage = torch.nn.Linear(8, 8)
    with store.saving(0):
        y = stage(torch.randn(4, 8, requires_grad=True)).sum()
    with torch.no_grad():
        stage.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ----------------------------------------------------------------------------------------- predictions that fail


def graph(store: ActivationStore, micro_batch: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input, output, the input's gradient), of something that saves."""
    import torch

    x = torch.randn(64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().sin().exp().sum(), x)
    with store.saving(micro_batch):
        y = x.exp().sin().exp().sum()
    return x, y, expected


@pytest.mark.parametrize("state", ["leaving", "copied", "void", "out", "returning", "out again"])
def test_a_backward_never_waits_for_a_driver(state: str, store: ActivationStore) -> None:
    import torch

    x, y, expected = graph(store)
    moving = Moving(store.leave, 0)
    if state == "void":
        store.settle(0, keep=True)
    elif state != "leaving":
        moving.wait()
        if state != "copied":
            assert store.settle(0, keep=False)
        if state == "returning":
            Moving(store.come_back, 0)
        elif state == "out again":
            bring_back(store, 0)
            assert move_out(store, 0)
    y.backward()
    assert torch.equal(x.grad, expected)
    moving.wait()
    store.drop(0)
    assert store.report.surprises == state.startswith("out")


def test_what_the_driver_says_after_a_surprise_is_fine(store: ActivationStore) -> None:
    _, y, _ = graph(store)
    assert move_out(store, 0)
    y.backward(retain_graph=True)
    bring_back(store, 0)  # it is here: the driver hears so
    assert move_out(store, 0)
    y.backward()
    store.drop(0)
    store.drop(0)
    assert store.host_bytes_used == 0


def test_a_backward_after_the_drop_says_so(store: ActivationStore) -> None:
    from proxyd_client.torch.offload import OffloadError

    _, y, _ = graph(store)
    assert move_out(store, 0)
    store.drop_all()
    with pytest.raises(OffloadError, match="micro-batch 0 was dropped while it was outside"):
        y.backward()


def test_orders_that_can_not_be(store: ActivationStore) -> None:
    _, y, _ = graph(store)
    with pytest.raises(ArgumentError, match="not held"):
        store.leave(1, list)
    with pytest.raises(ArgumentError, match="not held"):
        store.settle(1, keep=True)
    Moving(store.leave, 0).wait()
    with pytest.raises(ArgumentError, match="can't leave: it is copied out"):
        store.leave(0, list)
    with pytest.raises(ArgumentError, match="can't come back: it is copied out"):
        store.come_back(0, list)
    assert store.settle(0, keep=False)
    assert store.settle(0, keep=False), "it is out, whoever asks"
    with pytest.raises(ArgumentError, match="can't leave: it is outside"):
        store.leave(0, list)
    del y


def test_a_callback_that_raises_stops_nothing(store: ActivationStore) -> None:
    import torch

    x, y, expected = graph(store)
    store.leave(0, lambda: [][0])
    store.settle(0, keep=True)
    x2, y2, expected2 = graph(store, 1)
    assert move_out(store, 1)
    y.backward()
    y2.backward()
    assert torch.equal(x.grad, expected)
    assert torch.equal(x2.grad, expected2)


# -------------------------------------------------------------------------------------------- full, broken, over


def test_what_finds_no_room_stays_and_the_report_says_why(tmp_path: Path) -> None:
    import torch

    for directory in (None, tmp_path):
        with make(directory, host_bytes=40_000) as store:
            (_, y, _), (x2, y2, expected) = graph(store), graph(store, 1)
            assert move_out(store, 0)
            before = store.device_bytes
            assert not move_out(store, 1)
            assert store.device_bytes == before
            assert "micro-batch 1 stays on the device: no room for" in store.report.trouble
            assert store.report.failed == 1
            y.backward()
            store.drop(0)
            assert move_out(store, 1), "there is room now"
            y2.backward()
            assert torch.equal(x2.grad, expected)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    import torch

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with make(tmp_path) as store:
        x, y, expected = graph(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK, hard))
        try:
            assert not move_out(store, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert f"a file in {tmp_path} has no {CHUNK} bytes more, beyond {2 * CHUNK}: OSError" in store.report.trouble
        assert move_out(store, 0), "the disk has room again"
        y.backward()
        assert torch.equal(x.grad, expected)


def test_a_file_that_can_not_be_read_is_an_error_and_no_gradient(tmp_path: Path) -> None:
    from proxyd_client.torch.offload import OffloadError

    with make(tmp_path) as store:
        _, y, _ = graph(store)
        assert move_out(store, 0)
        room: Any = store._room
        os.ftruncate(room._file.fileno(), 0)
        bring_back(store, 0)
        assert "micro-batch 0 is still out" in store.report.trouble
        with pytest.raises(OffloadError, match=f"can't be read from a file in {tmp_path}.*: the file ends at [0-9]+"):
            y.backward()


def test_no_room_on_the_device_to_come_back_to(store: ActivationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from proxyd_client.torch.offload.saved import Held

    x, y, expected = graph(store)
    assert move_out(store, 0)
    before = store.device_bytes

    def full(held: Held) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(Held, "room", full)
        bring_back(store, 0)
    assert "the device has no room for micro-batch 0 to come back" in store.report.trouble
    assert store.device_bytes == before
    y.backward()
    assert torch.equal(x.grad, expected)


def test_no_directory() -> None:
    with pytest.raises(ArgumentError, match="can't be kept in /nowhere/at/all"):
        make(Path("/nowhere/at/all"))
    with pytest.raises(ArgumentError, match="below 0"):
        make(host_bytes=-1)
    with pytest.raises(ArgumentError, match="multiple of 4096"):
        make(chunk_bytes=5000)


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    with make(tmp_path) as store:
        _, y, _ = graph(store)
        assert move_out(store, 0)
        assert list(tmp_path.iterdir()) == []
        del y


def test_buffers_are_used_again(store: ActivationStore) -> None:
    held = 0
    for _ in range(5):
        _, y, _ = graph(store)
        assert move_out(store, 0)
        y.backward()
        store.drop(0)
        held = held or store._room.held_bytes
    assert store._room.held_bytes == held


def test_speed_is_known_before_and_after_moves(tmp_path: Path) -> None:
    import torch

    from proxyd_client.torch.offload.store import NEVER_BYTES_PER_S

    with make(tmp_path) as store:
        assert store.transfer_bytes_per_s > 1e5
        x = torch.randn(512, 512, requires_grad=True)
        with store.saving(0):
            y = x.exp().sum()
        speeds = list(store._speeds)
        assert move_out(store, 0)
        y.backward()
        assert [now != before for now, before in zip(store._speeds, speeds, strict=True)] == [True, True]
    with make(host_bytes=0) as store:
        assert store.transfer_bytes_per_s == NEVER_BYTES_PER_S


def test_threads_end_with_the_store() -> None:
    from proxyd_client.torch.offload import OffloadError

    before = set(threading.enumerate())
    store = make()
    _, y, _ = graph(store)
    assert move_out(store, 0)
    bring_back(store, 0)
    assert move_out(store, 0)
    assert len(set(threading.enumerate()) - before) == 2
    store.close()
    store.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(OffloadError):
        y.backward()
    with pytest.raises(OffloadError, match="closed"), store.saving(1):
        pass


EXIT = """
import sys, torch
from proxyd_client.torch.offload import ActivationStore
store = ActivationStore(host_bytes=1 << 30)
x = torch.randn(4, 1 << 20, requires_grad=True)
for number in range(3):
    with store.saving(number):
        y = x.exp().sin()
    del y
    store.leave(number, lambda: None)
print("ends")
"""


def test_an_interpreter_ends_while_copies_are_under_way() -> None:
    ran = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ends\n", "")


# -------------------------------------------------------------------------------------------------- a device


class Stream:
    """Runs what is queued in a thread of its own, in order, and only when somebody waits for it."""

    def __init__(self, device: Any = None) -> None:
        self._queue: list[Callable[[], None]] = []

    def queue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)

    def record_event(self) -> Event:
        return Event(self, len(self._queue))

    def wait_event(self, event: Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        self.run(len(self._queue))

    def run(self, until: int) -> None:
        for place in range(until):
            self._queue[place]()
            self._queue[place] = list


class Event:
    def __init__(self, stream: Stream, place: int) -> None:
        self._stream, self._place = stream, place

    def wait(self) -> None:
        self._stream.run(self._place)


@pytest.mark.parametrize("tier", ["memory", "file"])
def test_moves_come_after_what_the_trainer_had_queued(tier: str, tmp_path: Path) -> None:
    import torch

    from proxyd_client.torch.devices import StreamCopies

    trainer = Stream()
    kept: list[Any] = []

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        yield

    api = SimpleNamespace(Stream=Stream, stream=on, current_stream=lambda device: trainer)
    cpu = torch.device("cpu")
    ways = [StreamCopies(api, cpu, keep=lambda tensor, stream: kept.append(stream)) for _ in range(2)]
    with make(tmp_path if tier == "file" else None, copies=(ways[0], ways[1])) as store:
        x = torch.randn(64, 64, requires_grad=True)
        with store.saving(0):
            h = x * 1
            y = (h * h).sum()
            # The device has not computed h yet: it does when its stream gets there.
            values = torch.randn(64, 64)
            trainer.queue(functools.partial(ctypes.memmove, h.data_ptr(), values.data_ptr(), values.nbytes))
        del h
        moving = Moving(store.leave, 0)
        moving.wait()
        assert store.settle(0, keep=False)
        assert {id(stream) for stream in kept} == {id(ways[0]._stream)}
        bring_back(store, 0)
        assert {id(stream) for stream in kept} == {id(way._stream) for way in ways}
        y.backward()
        assert torch.equal(x.grad, 2 * values)
