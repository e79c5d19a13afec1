"""What frameworks do with a backend, re-created in our own words: each check runs in all four ranks of a world.

The layout is that of a two-site pipeline: ranks 0 and 1 are at one site, 2 and 3 at the other, so a pipeline is
{0, 2} or {1, 3}, a pair of tensor parallel ranks {0, 1} or {2, 3}. Tensors are filled with a count plus where they come
from and which one they are, never with a constant: what is mixed up shows.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PIPELINES = ([0, 2], [1, 3])
PAIRS = ([0, 1], [2, 3])


def filled(
    source: int, number: int, shape: tuple[int, ...] = (8, 5), dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The content of message ``number`` of rank ``source``."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    return (count + 100 * source + 1000 * number).to(dtype)


def group_of(rank: int, lists: Any, backend: str | None = None) -> Any:
    """The group, of the lists of ranks, that this rank is in; all ranks make all groups."""
    groups = [dist.new_group(ranks, backend=backend) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists, strict=True) if rank in ranks)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bit for bit."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert torch.equal(got, wanted), f"got {got.flatten()[:6].tolist()}, not {wanted.flatten()[:6].tolist()}"


def raises(call: Callable[[], Any], *words: str) -> str:
    """The text of the error that ``call`` raises; it holds all words."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 # which class it is says the test of the client
        text = f"{type(error).__name__}: {error}"
        missing = [word for word in words if word not in text]
        assert not missing, f"the error does not say {missing}: {text}"
        return text
    raise AssertionError("no error")


# Megatron-LM -----------------------------------------------------------------------------------------------------


def _megatron_exchange(group: Any, me: int, other: int, down: Any, up: Any, numbers: tuple[int, int]) -> None:
    """One exchange of a pipeline of two stages with overlap: what goes down travels in the pipeline's group, what goes
    up in WORLD, so that each pair of ranks has one channel for each direction. ``other`` is a global rank for both.

    The receivers are leaves that require a gradient, as an autograd graph wants them.
    """
    first = dist.get_rank(group) == 0
    send, receive = (down, up) if first else (up, down)
    out_group, in_group = (group, dist.group.WORLD) if first else (dist.group.WORLD, group)
    out_number, in_number = numbers if first else numbers[::-1]
    buffer = torch.empty(receive, requires_grad=True)
    tensor = filled(me, out_number, send)
    works = {}
    if first:
        works["send"] = dist.isend(tensor, dst=other, group=out_group)
        works["receive"] = dist.irecv(buffer, src=other, group=in_group)
    else:
        works["receive"] = dist.irecv(buffer, src=other, group=in_group)
        works["send"] = dist.isend(tensor, dst=other, group=out_group)
    works["receive"].wait()
    same(buffer.detach(), filled(other, in_number, receive))
    assert buffer.is_leaf
    assert buffer.requires_grad
    works["send"].wait()
    tensor.data = torch.empty(1)  # Megatron frees an output like this as soon as it is sent


def megatron_overlap(rank: int) -> None:
    """Pipeline of two stages with overlapping transfers: WORLD and group mixed, opposite roles, different shapes."""
    group = group_of(rank, PIPELINES)
    other = (rank + 2) % 4
    for step in range(6):
        _megatron_exchange(group, rank, other, (4, 3 + step), (2, 7), (10 + step, 50 + step))


def megatron_posted_ahead(rank: int) -> None:
    """Interleaved stages post the next exchange before they wait for the last one; each direction keeps its order."""
    group = group_of(rank, PIPELINES)
    other = (rank + 2) % 4
    first = dist.get_rank(group) == 0
    out_group, in_group = (group, dist.group.WORLD) if first else (dist.group.WORLD, group)
    buffers = [torch.empty(3, 4, requires_grad=True) for _ in range(5)]
    receives = [dist.irecv(buffer, src=other, group=in_group) for buffer in buffers]
    sends = [dist.isend(filled(rank, number, (3, 4)), dst=other, group=out_group) for number in range(5)]
    for number in (2, 0, 4, 1, 3):
        receives[number].wait()
        same(buffers[number].detach(), filled(other, number, (3, 4)))
    for work in sends:
        work.wait()


def megatron_batched(rank: int) -> None:
    """Without overlap: shapes first (variable sequence lengths), then both directions in one batch."""
    group = group_of(rank, PIPELINES)
    other = (rank + 2) % 4
    for step in range(4):
        mine, theirs = (2 + rank, 3 + step), (2 + other, 3 + step)
        shape = torch.empty(2, dtype=torch.int64)
        operations = [
            dist.P2POp(dist.isend, torch.tensor(mine), other, group),
            dist.P2POp(dist.irecv, shape, other, group),
        ]
        for work in dist.batch_isend_irecv(operations[:: 1 if rank < 2 else -1]):
            work.wait()
        assert tuple(shape.tolist()) == theirs
        buffer = torch.empty(tuple(shape.tolist()), dtype=torch.bfloat16, requires_grad=True)
        operations = [
            dist.P2POp(dist.isend, filled(rank, step, mine, torch.bfloat16), other, group),
            dist.P2POp(dist.irecv, buffer, other, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        same(buffer.detach(), filled(other, step, theirs, torch.bfloat16))


def megatron_ring(rank: int) -> None:
    """A pipeline of four stages that wraps around (interleaving): both neighbours in one batch, orders reversed."""
    group = dist.new_group([0, 1, 2, 3])
    after, before = (rank + 1) % 4, (rank - 1) % 4
    from_before, from_after = torch.empty(6, 2), torch.empty(6, 2)
    operations = [
        dist.P2POp(dist.isend, filled(rank, 1, (6, 2)), before, group),
        dist.P2POp(dist.irecv, from_before, before, group),
        dist.P2POp(dist.isend, filled(rank, 2, (6, 2)), after, group),
        dist.P2POp(dist.irecv, from_after, after, group),
    ]
    for work in dist.batch_isend_irecv(operations if rank % 2 else operations[::-1]):
        work.wait()
    same(from_before, filled(before, 2, (6, 2)))
    same(from_after, filled(after, 1, (6, 2)))


def megatron_groups(rank: int) -> None:
    """The groups it makes at the start, in its order, and one collective in each: a group has no backend of its own."""
    pair, pipeline = group_of(rank, PAIRS), group_of(rank, PIPELINES)
    ends = dist.new_group([0, 2])  # the embedding group: first and last stage
    for number, group in enumerate((pair, pipeline)):
        members = dist.get_process_group_ranks(group)
        tensor = filled(rank, number)
        dist.all_reduce(tensor, group=group)
        same(tensor, sum(filled(member, number) for member in members))  # type: ignore[arg-type]
        out = torch.empty(2 * 8, 5)
        dist.all_gather_into_tensor(out, filled(rank, number), group=group)
        same(out, torch.cat([filled(member, number) for member in members]))
        assert dist.get_backend(group) == dist.get_backend()
    if rank in (0, 2):
        shared = filled(rank, 7)
        dist.all_reduce(shared, group=ends)
        same(shared, filled(0, 7) + filled(2, 7))
    # The scatter and gather optimisation of its pipelines: each of a pair sends its half.
    whole = filled(rank % 2, 9, (4, 6))
    buffer = torch.empty(12)
    if rank < 2:
        dist.send(whole.flatten()[12 * rank : 12 * rank + 12], dst=rank + 2, group=pipeline)
    else:
        dist.recv(buffer, src=rank - 2, group=pipeline)
        out = torch.empty(24)
        dist.all_gather_into_tensor(out, buffer, group=pair)
        same(out, torch.cat([filled(0, 9, (4, 6)).flatten()[:12], filled(1, 9, (4, 6)).flatten()[12:]]))
    dist.barrier(group=pipeline)


# DeepSpeed -------------------------------------------------------------------------------------------------------


def deepspeed_blocking(rank: int) -> None:
    """Blocking send and receive without a group: even stages send first, odd ones receive first; a description of the
    tensors goes before the first ones, a mask of booleans travels as halves, gradients come back."""
    stage, other = rank // 2, (rank + 2) % 4
    shapes = ((2, 9), (4,), (2, 3, 2))
    kinds = (torch.float32, torch.int64, torch.float16)
    described = torch.zeros(256, dtype=torch.int32)
    if stage == 0:
        described[:3] = torch.tensor([2, len(shapes), 7], dtype=torch.int32)
        dist.send(described, other)
    else:
        dist.recv(described, other)
        assert described[:4].tolist() == [2, 3, 7, 0]
    for micro in range(4):
        for part, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
            if stage == 0:
                dist.send(filled(rank, 10 * micro + part, shape, kind), other)
            else:
                buffer = torch.empty(shape, dtype=kind)
                dist.recv(buffer, other)
                same(buffer, filled(other, 10 * micro + part, shape, kind))
        gradient = torch.empty(2, 9)
        if stage == 1:
            dist.send(filled(rank, 500 + micro, (2, 9)), other)
        else:
            dist.recv(gradient, other)
            same(gradient, filled(other, 500 + micro, (2, 9)))


def deepspeed_objects(rank: int) -> None:
    """An object as a length and its bytes, and the loss of the last stage to all ranks of a pipeline."""
    pipeline = group_of(rank, PIPELINES)
    if rank < 2:
        length = torch.tensor([0])
        dist.recv(length, src=rank + 2)
        raw = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(raw, src=rank + 2)
        assert bytes(raw.tolist()) == b"micro batch" * (rank + 3)
    else:
        raw = torch.frombuffer(bytearray(b"micro batch" * (rank + 1)), dtype=torch.uint8)
        dist.send(torch.tensor([len(raw)]), dst=rank - 2)
        dist.send(raw, dst=rank - 2)
    loss = filled(rank, 3, (1,))
    dist.broadcast(loss, src=rank % 2 + 2, group=pipeline)
    same(loss, filled(rank % 2 + 2, 3, (1,)))


# Data parallel ---------------------------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 12, generator=generator), torch.randn(6, 4, generator=generator)


def _alone(steps: int, size: int) -> list[torch.Tensor]:
    """The parameters after training on all ranks' batches in one process."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            data, wanted = _batch(rank, step)
            (nn.functional.mse_loss(model(data), wanted) / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _train(rank: int, model: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        data, wanted = _batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data), wanted).backward()
        optimizer.step()


def _close(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _equal_everywhere(tensors: list[torch.Tensor]) -> None:
    """All ranks hold the same, bit for bit."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    for other in gathered:
        same(other, gathered[0])


def ddp(rank: int) -> None:
    """DistributedDataParallel with small buckets, over all ranks."""
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.002, gradient_as_bucket_view=True)
    _train(rank, model, 4)
    parameters = [parameter.detach() for parameter in model.parameters()]
    _equal_everywhere(parameters)
    _close(parameters, _alone(4, 4))


def ddp_hooks(rank: int) -> None:
    """Communication hooks: the usual one, one in halves, and one of the user's that chains a future."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def averaged(state, bucket):  # type: ignore[no-untyped-def] # DDP wants types for annotations, and ours are text
        future = dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / dist.get_world_size())

    hooks = ((default_hooks.allreduce_hook, 1e-5), (default_hooks.fp16_compress_hook, 3e-2), (averaged, 1e-5))
    for hook, tolerance in hooks:
        model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.002)
        model.register_comm_hook(dist.group.WORLD, hook)
        _train(rank, model, 2)
        parameters = [parameter.detach() for parameter in model.parameters()]
        _equal_everywhere(parameters)
        for one, other in zip(parameters, _alone(2, 4), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def fsdp2(rank: int) -> None:
    """FSDP2 over all ranks: parameters gathered and gradients scattered by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _fsdp(rank, fully_shard, init_device_mesh("cpu", (4,)))


def hsdp(rank: int, replicate: str, shard: str) -> None:
    """FSDP2 with hybrid sharding: shards inside a site, replicas across sites, a backend for each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "shard"), backend_override={"replicate": replicate, "shard": shard}
    )
    assert dist.get_process_group_ranks(mesh["replicate"].get_group()) == [rank % 2, rank % 2 + 2]
    _fsdp(rank, fully_shard, mesh)


def _fsdp(rank: int, fully_shard: Any, mesh: Any) -> None:
    model: Any = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(rank, model, 3)
    _close([parameter.full_tensor().detach() for parameter in model.parameters()], _alone(3, 4))


# Meshes, functional collectives, groups, objects -------------------------------------------------------------------


def mesh(rank: int, across: str, inside: str) -> None:
    """A DeviceMesh whose dimensions have a backend each."""
    from torch.distributed.device_mesh import init_device_mesh

    one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"), backend_override={"pp": across, "tp": inside})
    pipeline, pair = one.get_group("pp"), one.get_group("tp")
    assert (dist.get_backend(pipeline), dist.get_backend(pair)) == (across, inside)
    assert (one.get_local_rank("pp"), one.get_local_rank("tp")) == (rank // 2, rank % 2)
    tensor = filled(rank, 1)
    dist.all_reduce(tensor, group=pipeline)
    same(tensor, filled(rank % 2, 1) + filled(rank % 2 + 2, 1))
    other = (rank + 2) % 4
    buffer = torch.empty(8, 5)
    works = [dist.isend(filled(rank, 2), other, group=pipeline), dist.irecv(buffer, other, group=pipeline)]
    for work in works:
        work.wait()
    same(buffer, filled(other, 2))
    gathered = [torch.empty(8, 5) for _ in range(2)]
    dist.all_gather(gathered, filled(rank, 3), group=pair)
    same(torch.stack(gathered), torch.stack([filled(rank // 2 * 2 + member, 3) for member in range(2)]))


def functional(rank: int) -> None:
    """Functional collectives, those that autograd knows as well, over all and over a part."""
    from torch.distributed import _functional_collectives as funcol

    pipeline = group_of(rank, PIPELINES)
    for group, members in ((dist.group.WORLD, [0, 1, 2, 3]), (pipeline, dist.get_process_group_ranks(pipeline))):
        size, me = len(members), members.index(rank)
        wanted = torch.stack([filled(member, 1) for member in members])
        same(funcol.all_reduce(filled(rank, 1), "sum", group) + 0, wanted.sum(0))
        same(funcol.all_reduce(filled(rank, 1), "max", group) + 0, wanted.max(0).values)
        same(funcol.all_gather_single(filled(rank, 1), 0, group) + 0, wanted.flatten(0, 1))
        same(funcol.broadcast(filled(rank, 1), 0, group) + 0, wanted[0])
        scattered = funcol.reduce_scatter_single(filled(rank, 2, (4 * size, 3)), "sum", 0, group)
        total = torch.stack([filled(member, 2, (4 * size, 3)) for member in members]).sum(0)
        same(scattered + 0, total[4 * me : 4 * me + 4])
        several = funcol.all_reduce_coalesced([filled(rank, 3), filled(rank, 4, (3,))], "sum", group)
        same(several[0] + 0, torch.stack([filled(member, 3) for member in members]).sum(0))
        same(several[1] + 0, torch.stack([filled(member, 4, (3,)) for member in members]).sum(0))
        swapped = funcol.all_to_all_single(filled(rank, 5, (2 * size, 3)), None, None, group)
        same(swapped + 0, torch.cat([filled(member, 5, (2 * size, 3))[2 * me : 2 * me + 2] for member in members]))
        leaf = filled(rank, 6).requires_grad_()
        out = funcol.all_gather_single_autograd(leaf, 0, group)
        (out * (me + 1)).sum().backward()
        assert leaf.grad is not None
        same(leaf.grad, torch.full((8, 5), float(sum(range(1, size + 1)))))


def objects(rank: int) -> None:
    """Object collectives, over all and over a part whose ranks are not the global ones."""
    pipeline = group_of(rank, PIPELINES)
    for group, members in ((dist.group.WORLD, [0, 1, 2, 3]), (pipeline, dist.get_process_group_ranks(pipeline))):
        mine: dict[str, Any] = {"rank": rank, "text": "ü" * (10**rank), "of": members}
        everybody: list[Any] = [None] * len(members)
        dist.all_gather_object(everybody, mine, group=group)
        assert [one["rank"] for one in everybody] == members
        assert [len(one["text"]) for one in everybody] == [10**member for member in members]
        told = [mine, rank] if rank == members[-1] else [None, None]
        dist.broadcast_object_list(told, src=members[-1], group=group)
        assert told[1] == members[-1]
        collected: list[Any] | None = [None] * len(members) if rank == members[0] else None
        dist.gather_object(mine, collected, dst=members[0], group=group)
        assert collected is None or [one["rank"] for one in collected] == members
        part: list[Any] = [None]
        dist.scatter_object_list(part, [f"for {member}" for member in members], src=members[0], group=group)
        assert part == [f"for {rank}"]
    other = (rank + 2) % 4
    if rank < 2:
        dist.send_object_list([{"from": rank}, "second"], dst=other)
    else:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, src=other)
        assert received == [{"from": other}, "second"]


def ranks_of_a_part(rank: int) -> None:
    """Case 24: in a group of ranks 3 and 1 (in this order), ``dst`` is a global rank and ``group_dst`` isn't."""
    group = dist.new_group([3, 1])
    if rank == 1:
        dist.send(filled(1, 1), dst=3, group=group)
        dist.send(filled(1, 2), group_dst=1, group=group)
        buffer = torch.empty(8, 5)
        assert dist.recv(buffer, group_src=1, group=group) in (1, 3)
        same(buffer, filled(3, 3))
        raises(lambda: dist.send(buffer, dst=0, group=group), "0", "group")
        raises(lambda: dist.send(buffer, dst=1, group=group), "rank")
    if rank == 3:
        for number in (1, 2):
            buffer = torch.empty(8, 5)
            dist.recv(buffer, src=1, group=group)
            same(buffer, filled(1, number))
        dist.send(filled(3, 3), dst=1, group=group)
    dist.barrier()
    # Any source: said as a global rank.
    if rank in (1, 3):
        buffer = torch.empty(8, 5)
        if rank == 1:
            dist.send(filled(1, 4), dst=3, group=group)
        else:
            assert dist.recv(buffer, group=group) == 1
            same(buffer, filled(1, 4))
    tensor = filled(rank, 5)
    dist.broadcast(tensor, src=2)
    same(tensor, filled(2, 5))


def tags(rank: int) -> None:
    """Messages are taken by tag, and in order within one; the same tags in two groups are not the same."""
    pipeline = group_of(rank, PIPELINES)
    other = (rank + 2) % 4
    channels = [(group, tag) for group in (dist.group.WORLD, pipeline) for tag in (1, 2, 3)]
    sends = [
        dist.isend(filled(rank, 10 * number + turn), other, group=group, tag=tag)
        for turn in range(2)
        for number, (group, tag) in enumerate(channels)
    ]
    for number, (group, tag) in reversed(list(enumerate(channels))):
        for turn in range(2):
            buffer = torch.empty(8, 5)
            dist.recv(buffer, other, group=group, tag=tag)
            same(buffer, filled(other, 10 * number + turn))
    for work in sends:
        work.wait()


def both_send_first(rank: int, nbytes: int) -> None:
    """Case 25: everybody sends before anybody receives, more than any buffer of a kernel holds; and the operations of a
    batch in opposite orders."""
    other = (rank + 2) % 4
    tensor = filled(rank, 1, (nbytes // 4,))
    work = dist.isend(tensor, other)
    buffer = torch.empty(nbytes // 4)
    dist.irecv(buffer, other).wait()
    work.wait()
    same(buffer, filled(other, 1, (nbytes // 4,)))
    buffers = [torch.empty(nbytes // 16) for _ in range(2)]
    operations = [
        dist.P2POp(dist.isend, filled(rank, 2 + turn, (nbytes // 16,)), other, tag=turn) for turn in range(2)
    ] + [dist.P2POp(dist.irecv, buffers[turn], other, tag=turn) for turn in range(2)]
    for one in dist.batch_isend_irecv(operations[:: 1 if rank < 2 else -1]):
        one.wait()
    for turn in range(2):
        same(buffers[turn], filled(other, 2 + turn, (nbytes // 16,)))


# Processes and lives -----------------------------------------------------------------------------------------------


class _Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid()])


def forked_workers(rank: int) -> None:
    """Workers of a DataLoader are forked while a transfer is under way; they live and end, the group goes on."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # may have children
    other = (rank + 2) % 4
    buffer = torch.empty(8, 5)
    receive = dist.irecv(buffer, other, tag=5)
    loader = torch.utils.data.DataLoader(_Numbers(), batch_size=6, num_workers=2, multiprocessing_context="fork")
    seen = []
    for number, batch in enumerate(loader):
        assert (batch[:, 1] != os.getpid()).all(), "no worker of its own"
        seen += batch[:, 0].tolist()
        if number == 1:
            dist.isend(filled(rank, 1), other, tag=5).wait()
    assert seen == list(range(24))
    receive.wait()
    same(buffer, filled(other, 1))
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert total.item() == 6.0


_AGAIN = itertools.count()


@contextlib.contextmanager
def _without_group(rank: int, backend: str) -> Iterator[Callable[[int], None]]:
    """For checks of groups' lives: the world's own group ends, and there is a fresh one in its place afterwards. The
    function makes the default group of a life; all lives meet at the same place of the same store."""
    shared = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
    base = f"again {next(_AGAIN)}"

    def make(place: str) -> None:
        store = dist.PrefixStore(f"{base} {place}", shared)
        dist.init_process_group(backend, store=store, rank=rank, world_size=4, timeout=timedelta(seconds=30))

    dist.barrier()
    dist.destroy_process_group()
    # gloo finds the addresses of its last life in a store: it needs a place for each.
    yield lambda life: make(f"life {life}" if backend == "gloo" else "lives")
    make("after")


def lives(rank: int, backend: str, count: int) -> None:
    """Case 23: a group is made again on the same store, many times; what was sent and never received in one life isn't
    there in the next."""
    other = (rank + 2) % 4
    begun_s = time.monotonic()
    with _without_group(rank, backend) as make:
        for life in range(count):
            make(life)
            unwanted = dist.isend(filled(rank, 100 + life), other, tag=1)
            if rank < 2:
                dist.send(filled(rank, life), other, tag=2)
            else:
                buffer = torch.empty(8, 5)
                dist.recv(buffer, other, tag=2)
                same(buffer, filled(other, life))
            if life % 2:  # the message before it is still there: tag 1 of an odd life is received
                buffer = torch.empty(8, 5)
                dist.recv(buffer, other, tag=1)
                same(buffer, filled(other, 100 + life))
                dist.barrier()
            dist.destroy_process_group()
            del unwanted
    assert time.monotonic() - begun_s < 5.0 * count, "a life takes more than five seconds"


def destroyed_in_flight(rank: int, backend: str) -> None:
    """``destroy_process_group`` with operations in flight returns, and who waits for one hears that it won't come."""
    other = (rank + 2) % 4
    with _without_group(rank, backend) as make:
        make(0)
        buffer = torch.full((8, 5), 9.0)
        receive = dist.irecv(buffer, other, tag=3)  # nobody sends it
        send = dist.isend(filled(rank, 1), other, tag=4)  # nobody receives it
        dist.barrier()
        begun_s = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - begun_s < 10.0
        if backend != "gloo":
            raises(receive.wait, "tag 3")
            with contextlib.suppress(RuntimeError):
                send.wait()  # its bytes may have arrived, for nobody
        same(buffer, torch.full((8, 5), 9.0))
        assert time.monotonic() - begun_s < 15.0
