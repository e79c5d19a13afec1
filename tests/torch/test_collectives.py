"""Collectives across sites: every one by torch's own calls, against gloo, in groups of any layout.

Groups say their members' sites themselves (``Options(sites=...)``), so one world has two sites, three, unequal ones
and ones of a single rank. gloo's group of the same ranks is the reference: what has no rounding must be equal to it,
sums of floats equal to what the documented order of sums gives, bit for bit.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.rig import Counters, crossed_under_grants, until

if TYPE_CHECKING:
    from proxyd.cli.cluster import Cluster

    from .worlds import World

pytestmark = pytest.mark.needs_torch

SIZE = 6
LAYOUTS = ("aaabbb", "aaaabb", "abbbbb", "ababab", "aabbcc", "abcccc", "abcabc")
MIB = 1 << 20
MIXED = 10_000 if os.environ.get("TORCH_LONG") == "1" else 500
"""Operations of the mixed run."""


@pytest.fixture(scope="module")
def six(cluster: Cluster) -> Any:
    """Six ranks of one agent."""
    from .worlds import World

    with World(SIZE, [cluster.agent("a").socket] * SIZE) as world:
        yield world


_groups: dict[str, tuple[Any, Any, list[list[int]]]] = {}


def groups(layout: str) -> tuple[Any, Any, list[list[int]]]:
    """On a rank: the proxyd group of this layout, gloo's, and the ranks of each site in order."""
    import torch.distributed as dist

    from proxyd_client.torch import Options

    if layout not in _groups:
        sites = dict(enumerate(layout))
        ours = dist.new_group(list(range(SIZE)), backend="proxyd", pg_options=Options(sites=sites))
        gloo = _groups["gloo"][1] if _groups else dist.new_group(list(range(SIZE)), backend="gloo")
        by_site = [[rank for rank in range(SIZE) if layout[rank] == site] for site in dict.fromkeys(layout)]
        _groups.setdefault("gloo", (None, gloo, []))
        _groups[layout] = ours, gloo, by_site
    return _groups[layout]


def numbers(seed: int, count: int, dtype: Any) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.rand(count * 2, dtype=torch.float64, generator=generator) * 2 - 0.5
        return (torch.view_as_complex(values.view(count, 2)) if dtype.is_complex else values[:count]).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 7, (count,), generator=generator).to(dtype)


def everybodys(tensor: Any, gloo: Any) -> list[Any]:
    import torch
    import torch.distributed as dist

    if not tensor.numel():
        return [tensor.clone() for _ in range(SIZE)]
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    rows = [torch.empty_like(raw) for _ in range(SIZE)]
    dist.all_gather(rows, raw, group=gloo)
    return [row.view(tensor.dtype).reshape(tensor.shape) for row in rows]


def in_order(rows: list[Any], sites: list[list[int]], op: str) -> Any:
    """What the documentation says: rank by rank in each site, then site by site."""
    import torch

    function = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[op]
    partials = []
    for site in sites:
        partial = rows[site[0]]
        for rank in site[1:]:
            partial = function(partial, rows[rank])
        partials.append(partial)
    total = partials[0]
    for partial in partials[1:]:
        total = function(total, partial)
    if op == "AVG":
        whole = total.is_floating_point() or total.is_complex()
        total = total / SIZE if whole else torch.div(total, SIZE, rounding_mode="trunc")
    return total.to(rows[0].dtype)


def same(one: Any, other: Any, where: str) -> None:
    import torch

    assert one.dtype == other.dtype, where
    assert one.shape == other.shape, where
    raw = [bytes(x.contiguous().reshape(-1).view(torch.uint8).numpy()) if x.numel() else b"" for x in (one, other)]
    assert raw[0] == raw[1], f"{where}: {one.flatten()[:6]} {other.flatten()[:6]}"


def check(rank: int, layout: str, seed: int, count: int) -> None:
    """``count`` collectives of random kinds, sizes and dtypes."""
    for step in range(count):
        one_collective(rank, layout, random.Random(seed * 1000 + step), seed * 100_000 + step * 10)


def one_collective(rank: int, layout: str, chance: random.Random, seed: int, lengths: tuple[int, ...] = ()) -> None:
    import torch
    import torch.distributed as dist

    ours, gloo, sites = groups(layout)
    kind = chance.choice(
        ["all_reduce"] * 3
        + ["reduce", "broadcast", "all_gather", "all_gather_into", "gather", "scatter", "barrier", "objects"]
        + ["reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"]
    )
    alone = kind in ("all_reduce", "reduce", "broadcast")
    length = chance.choice(lengths or [0, 1, 5, 1000, 8192, 8193, 100_003, *([1 << 20, 2_500_001] if alone else [])])
    dtype = chance.choice([torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16])
    op = chance.choice(["SUM", "SUM", "MAX", "MIN", "PRODUCT", "AVG"])
    reduce_op = getattr(dist.ReduceOp, op)
    root = chance.randrange(SIZE)
    where = f"{kind} {op} {dtype} x{length} root {root} in {layout}, rank {rank}"
    x = numbers(seed + rank, length, dtype)
    if kind == "all_reduce":
        out = x.clone()
        work = dist.all_reduce(out, reduce_op, group=ours, async_op=True)
        if chance.random() < 0.5:
            assert work is not None
            work.wait()
        else:
            assert work.get_future().wait()[0] is out
        same(out, in_order(everybodys(x, gloo), sites, op), where)
    elif kind == "reduce":
        out = x.clone()
        dist.reduce(out, root, reduce_op, group=ours)
        rows = everybodys(x, gloo)
        same(out, in_order(rows, sites, op) if rank == root else x, where)
    elif kind == "broadcast":
        out = x.clone()
        dist.broadcast(out, root, group=ours)
        same(out, everybodys(x, gloo)[root], where)
    elif kind == "all_gather":
        outs = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(outs, x, group=ours)
        for got, want in zip(outs, everybodys(x, gloo), strict=True):
            same(got, want, where)
    elif kind == "all_gather_into":
        out = x.new_empty(SIZE * length)
        dist.all_gather_into_tensor(out, x, group=ours)
        same(out, torch.cat(everybodys(x, gloo)), where)
    elif kind == "gather":
        outs = [torch.empty_like(x) for _ in range(SIZE)] if rank == root else None
        dist.gather(x, outs, root, group=ours)
        rows = everybodys(x, gloo)
        for got, want in zip(outs or (), rows, strict=outs is not None):
            same(got, want, where)
    elif kind == "scatter":
        table = numbers(seed + rank, SIZE * length, dtype).view(SIZE, length)
        dist.scatter(x, list(table) if rank == root else None, root, group=ours)
        same(x, everybodys(table, gloo)[root][rank], where)
    elif kind in ("reduce_scatter", "reduce_scatter_tensor"):
        table = numbers(seed + rank, SIZE * length, dtype).view(SIZE, length)
        out = torch.empty_like(x)
        if kind == "reduce_scatter":
            dist.reduce_scatter(out, list(table), reduce_op, group=ours)
        else:
            dist.reduce_scatter_tensor(out, table, reduce_op, group=ours)
        same(out, in_order([each[rank] for each in everybodys(table, gloo)], sites, op), where)
    elif kind == "all_to_all":
        table = numbers(seed + rank, SIZE * length, dtype).view(SIZE, length)
        outs = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_to_all(outs, list(table), group=ours)
        for got, each in zip(outs, everybodys(table, gloo), strict=True):
            same(got, each[rank], where)
    elif kind == "all_to_all_single":
        parts = [[chance.choice([0, 1, 3, length]) for _ in range(SIZE)] for _ in range(SIZE)]
        longest = max(sum(part) for part in parts)
        source = numbers(seed + rank, 2 * longest, dtype).view(longest, 2)
        mine, theirs = parts[rank], [part[rank] for part in parts]
        out = source.new_empty(sum(theirs), 2)
        dist.all_to_all_single(out, source[: sum(mine)], theirs, mine, group=ours)
        rows = everybodys(source, gloo)
        want = [row[sum(part[:rank]) : sum(part[: rank + 1])] for row, part in zip(rows, parts, strict=True)]
        same(out, torch.cat(want), where)
    elif kind == "objects":
        told: list[Any] = [None] * SIZE
        dist.all_gather_object(told, {"rank": rank, "seed": seed}, group=ours)
        assert told == [{"rank": other, "seed": seed} for other in range(SIZE)], where
        listed = [seed, "x" * rank] if rank == root else [None, None]
        dist.broadcast_object_list(listed, root, group=ours)
        assert listed == [seed, "x" * root], where
    else:
        dist.barrier(group=ours)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_collective_in_every_layout(six: World, layout: str) -> None:
    six.run(check, layout, LAYOUTS.index(layout) + 1, 40)


def check_in_pieces(rank: int, layout: str) -> None:
    """The same with everything cut small: hundreds of chunks and pieces, and little ahead."""
    from proxyd_client.torch.collectives import layout as sizes

    small = {"SMALL_BYTES": 512, "PIECE_BYTES": 4096, "OWNED_BYTES": 2048, "AHEAD_BYTES": 16384}
    before = {name: getattr(sizes, name) for name in small}
    try:
        for name, value in small.items():
            setattr(sizes, name, value)
        for step in range(25):
            chance = random.Random(7000 + step)
            one_collective(rank, layout, chance, 7_000_000 + step * 10, lengths=(1, 200, 5000, 50_021))
    finally:
        for name, value in before.items():
            setattr(sizes, name, value)


@pytest.mark.parametrize("layout", ["aaabbb", "abbbbb", "aabbcc", "abcccc"])
def test_every_collective_in_many_pieces(six: World, layout: str) -> None:
    six.run(check_in_pieces, layout)


def ops_and_dtypes(rank: int) -> None:
    import torch
    import torch.distributed as dist

    ours, gloo, sites = groups("aaabbb")
    arithmetic, order, bitwise = ("SUM", "PRODUCT", "AVG"), ("MIN", "MAX"), ("BAND", "BOR", "BXOR")
    whole = ("uint8", "int8", "int16", "int32", "int64")
    table: dict[str, tuple[str, ...]] = {
        **dict.fromkeys(whole, arithmetic + order + bitwise),
        "bool": ("SUM", "PRODUCT", *order, *bitwise),
        **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), arithmetic + order),
        "complex64": arithmetic,
        "complex128": arithmetic,
    }
    for name, ops in table.items():
        for number, op in enumerate(ops):
            for length in (17, 20_011):
                x = numbers(number * 100 + rank, length, getattr(torch, name))
                # dist.all_reduce itself hands complex numbers over as pairs of reals: the group's own call here.
                options = dist.AllreduceOptions()
                options.reduceOp = getattr(dist.ReduceOp, op)
                out = x.clone()
                ours.allreduce([out], options).wait()
                rows, where = everybodys(x, gloo), f"{op} {name} x{length}"
                if x.is_complex():
                    # torch multiplies complex numbers in vectors otherwise than at the ends of a tensor.
                    assert torch.allclose(out, in_order(rows, sites, op)), where
                    for row in everybodys(out, gloo):
                        same(out, row, where)
                else:
                    same(out, in_order(rows, sites, op), where)
    x = numbers(rank, 50_000, torch.float32)
    out = x.clone()
    dist.all_reduce(out, dist._make_nccl_premul_sum(0.5), group=ours)
    same(out, in_order([row * 0.5 for row in everybodys(x, gloo)], sites, "SUM"), "PREMUL_SUM")
    for name, op in (("complex64", "MAX"), ("float32", "BAND"), ("float8_e4m3fn", "SUM"), ("bool", "AVG")):
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op)
        with pytest.raises(ValueError, match=op):
            ours.allreduce([numbers(1, 4, torch.float32).to(getattr(torch, name))], options)
    # What moves without being added up may be of any dtype.
    for name in ("float8_e4m3fn", "bool", "complex64", "bfloat16"):
        x = numbers(7 + rank, 50_000, torch.float32).to(getattr(torch, name))
        rows = everybodys(x, gloo)
        dist.broadcast(x, 4, group=ours)
        same(x, rows[4], name)


def the_same_bits(rank: int, layout: str) -> None:
    """What torch computes in vectors otherwise than at the ends: complex products and means, NaNs of bf16."""
    import torch
    import torch.distributed as dist

    ours, gloo, _ = groups(layout)
    options = dist.AllreduceOptions()
    for name, op in (("complex64", "PRODUCT"), ("complex64", "AVG"), ("bfloat16", "SUM"), ("float16", "MAX")):
        for length in (20_011, 200_003):
            x = numbers(rank, length, getattr(torch, name))
            if name == "bfloat16":
                x[:: 3 + rank] = float("nan")
            options.reduceOp = getattr(dist.ReduceOp, op)
            ours.allreduce([x], options).wait()
            for row in everybodys(x, gloo):
                same(x, row, f"{op} {name} x{length} in {layout}")


@pytest.mark.parametrize("layout", ["abbbbb", "aaaabb", "abcccc", "aabbbc"])
def test_all_ranks_have_the_same_bits_where_sites_differ_in_size(six: World, layout: str) -> None:
    six.run(the_same_bits, layout)


def test_every_op_and_dtype(six: World) -> None:
    six.run(ops_and_dtypes)


def floats_beside_gloo(rank: int) -> None:
    import torch
    import torch.distributed as dist

    for layout in ("aaabbb", "aabbcc"):
        ours, gloo, _ = groups(layout)
        x = numbers(rank, 700_001, torch.float32)
        one, again, reference = x.clone(), x.clone(), x.clone()
        dist.all_reduce(one, group=ours)
        dist.all_reduce(again, group=ours)
        dist.all_reduce(reference, group=gloo)
        same(one, again, "a rerun")
        rows = everybodys(one, gloo)
        for row in rows:
            same(one, row, "all ranks")
        # Six terms below 2 in another order: a few units in the last place of the largest sum.
        assert (one - reference).abs().max() <= 4 * 2.0**-23 * 8


def test_sums_have_the_same_bits_everywhere_and_again_and_are_gloos_but_for_rounding(six: World) -> None:
    six.run(floats_beside_gloo)


def nan_payloads(rank: int) -> None:
    import torch
    import torch.distributed as dist

    ours, gloo, sites = groups("aaabbb")
    bits = torch.full((20_000,), 0x7FC00000 + rank, dtype=torch.int32)
    x = bits.view(torch.float32).clone()
    x[::3] = float(rank) - 2.0
    x[1::3] = -0.0
    out = x.clone()
    dist.all_reduce(out, group=ours)
    for row in everybodys(out, gloo):
        same(out, row, "all ranks")
    same(out, in_order(everybodys(x, gloo), sites, "SUM"), "order")


def test_nans_and_zeros_have_the_same_bits_everywhere(six: World) -> None:
    six.run(nan_payloads)


def layouts_of_memory(rank: int) -> None:
    import torch
    import torch.distributed as dist

    ours, _, _ = groups("aaabbb")
    base = torch.arange(60_000.0).view(200, 300) + rank
    total = sum(torch.arange(60_000.0).view(200, 300) + other for other in range(SIZE))
    for number, view in enumerate((base.clone().t(), base.repeat(2, 1)[::2], base.clone()[:, 7], base.clone()[3, 3])):
        want = (total.t(), torch.cat([total, total])[::2], total[:, 7], total[3, 3])[number]
        dist.all_reduce(view, group=ours)
        assert torch.equal(view, want), number
    # Strided outputs, a parameter, a leaf in inference mode, 0-dim.
    outs = [torch.zeros(300, 200).t() for _ in range(SIZE)]
    dist.all_gather(outs, base, group=ours)
    assert all(torch.equal(out, base - rank + other) for other, out in enumerate(outs))
    parameter = torch.nn.Parameter(torch.full((10,), float(rank)))
    dist.broadcast(parameter, 5, group=ours)
    assert parameter.detach().eq(5).all()
    assert parameter.is_leaf
    assert parameter.requires_grad
    with torch.inference_mode():
        inferred = torch.full((50_000,), 1.0)
        dist.all_reduce(inferred, group=ours)
    assert inferred.eq(SIZE).all()
    lazily = torch.tensor([1 + 2j, 3 - 4j]).conj()
    out = torch.zeros(SIZE * 2, dtype=torch.complex64)
    ours.all_gather_single(out, lazily).wait()
    assert torch.equal(out, torch.tensor([1 - 2j, 3 + 4j]).repeat(SIZE))
    nothing = torch.zeros(0, 7, dtype=torch.bfloat16)
    for call in (lambda: dist.all_reduce(nothing, group=ours), lambda: dist.broadcast(nothing, 3, group=ours)):
        call()
    for wrong in (torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)):
        with pytest.raises(TypeError):
            ours.broadcast([wrong], dist.BroadcastOptions())


def test_strided_empty_zero_dim_conjugated_and_inference_tensors(six: World) -> None:
    six.run(layouts_of_memory)


def many_names(rank: int) -> None:
    """Old and new names, coalesced forms, functional collectives, a device mesh, sub-groups of other ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    from proxyd_client.torch import Options

    ours, _, _ = groups("aaabbb")
    ones = torch.ones(40_000)
    for tensors in ([ones.clone(), ones.clone() * 2], [torch.ones(3), torch.ones(4, dtype=torch.int64)]):
        options = dist.AllreduceCoalescedOptions()
        ours.allreduce_coalesced(tensors, options).wait()
        assert tensors[0].eq(SIZE).all()
        assert tensors[1].eq(SIZE * (2 if len(tensors[0]) > 3 else 1)).all()
    with dist._coalescing_manager(ours, async_ops=True) as manager:
        a, b = ones.clone(), ones.clone()
        dist.all_reduce(a, group=ours)
        dist.all_reduce(b, group=ours)
    manager.wait()
    assert a.eq(SIZE).all()
    assert b.eq(SIZE).all()
    with dist._coalescing_manager(ours, torch.device("cpu"), async_ops=True) as manager:
        c = ones.clone() + rank
        dist.broadcast(c, 3, group=ours)
    manager.wait()
    assert c.eq(4).all()
    for gather in (ours._allgather_base, ours.all_gather_single):
        out = torch.empty(SIZE * 3)
        gather(out, torch.full((3,), float(rank))).wait()
        assert torch.equal(out, torch.arange(6.0).repeat_interleave(3))
    for scatter in (ours._reduce_scatter_base, ours.reduce_scatter_single):
        out = torch.empty(3)
        scatter(out, torch.arange(18.0), dist.ReduceScatterOptions()).wait()
        assert torch.equal(out, torch.arange(18.0)[3 * rank : 3 * rank + 3] * SIZE)
    for exchange in (ours.alltoall_base, ours.all_to_all_single):
        out = torch.empty(SIZE)
        exchange(out, torch.arange(6.0) + 10 * rank, [], []).wait()
        assert torch.equal(out, torch.arange(0.0, 60, 10) + rank)
    for gather in (ours.allgather_into_tensor_coalesced, ours.all_gather_single_coalesced):
        outs = [torch.empty(SIZE * 2), torch.empty(SIZE, dtype=torch.int32)]
        gather(outs, [torch.full((2,), float(rank)), torch.tensor([rank], dtype=torch.int32)]).wait()
        assert torch.equal(outs[0], torch.arange(6.0).repeat_interleave(2))
        assert outs[1].tolist() == list(range(6))
    for scatter in (ours.reduce_scatter_tensor_coalesced, ours.reduce_scatter_single_coalesced):
        outs = [torch.empty(1), torch.empty(1, dtype=torch.int32)]
        scatter(outs, [torch.arange(6.0), torch.arange(6, dtype=torch.int32)]).wait()
        assert [out.item() for out in outs] == [rank * SIZE] * 2
    lists = [[torch.empty(2), torch.empty(1)] for _ in range(SIZE)]
    ours.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((1,), -float(rank))]).wait()
    assert [[t[0].item() for t in each] for each in lists] == [[other, -other] for other in range(SIZE)]
    # One tensor instead of a list, arguments instead of options.
    x = torch.full((4,), float(rank))
    ours.allreduce(x, dist.ReduceOp.MAX).wait()
    assert x.eq(5).all()
    ours.broadcast(x.fill_(rank), 2).wait()
    assert x.eq(2).all()
    ours.barrier().wait()

    assert functional.all_reduce(torch.ones(5), "sum", ours).eq(SIZE).all()
    assert functional.all_gather_single(torch.full((2,), rank), 0, ours).tolist() == [r for r in range(6) for _ in "12"]
    assert functional.reduce_scatter_single(torch.ones(12), "sum", 0, ours).tolist() == [SIZE] * 2
    assert functional.all_to_all_single(torch.arange(6) + 10 * rank, None, None, ours).tolist() == [
        10 * other + rank for other in range(6)
    ]
    assert functional.broadcast(torch.full((2,), rank), 3, ours).tolist() == [3, 3]

    options = Options(sites=dict(enumerate("aaabbb")))
    mesh = init_device_mesh(
        "cpu", (2, 3), mesh_dim_names=("replicate", "shard"), backend_override={"replicate": ("proxyd", options)}
    )
    group = mesh.get_group("replicate")
    assert group._get_backend_name() == "proxyd" if hasattr(group, "_get_backend_name") else True
    x = torch.full((10,), float(rank))
    dist.all_reduce(x, group=group)
    assert x.eq(rank % 3 * 2 + 3).all()

    # new_group sorts: group ranks and global ranks differ.
    few = dist.new_group([5, 1, 3], backend="proxyd", pg_options=Options(sites=dict(enumerate("aaabbb"))))
    if rank in (1, 3, 5):
        x = torch.full((30_000,), float(rank))
        dist.broadcast(x, src=3, group=few)
        assert x.eq(3).all()
        dist.broadcast(x.fill_(rank), group_src=2, group=few)
        assert x.eq(5).all()
        dist.all_reduce(x.fill_(rank), group=few)
        assert x.eq(9).all()
        dist.destroy_process_group(few)


def test_every_name_that_torch_has_for_them(six: World) -> None:
    six.run(many_names)


def chained(rank: int) -> None:
    """Futures whose callbacks start collectives of the group and wait for them, as DDP's hooks do."""
    import torch
    import torch.distributed as dist

    ours, _, _ = groups("aabbcc")

    def next_one(future: Any) -> Any:
        value = future.value()[0]
        return dist.all_reduce(value, group=ours, async_op=True).get_future().wait()[0]

    futures = []
    for number in range(3):
        first = dist.all_reduce(torch.full((100,), 1.0 + number), group=ours, async_op=True)
        futures.append(first.get_future().then(next_one))
        futures[-1].wait()  # the order of calls must be the same on all ranks
    assert [future.value()[0].item() for future in futures] == [36.0 * (1 + number) for number in range(3)]


def test_what_is_chained_to_a_future_may_use_the_group(six: World) -> None:
    six.run(chained)


def gradients(rank: int) -> list[bytes]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ours, _, _ = groups("aaabbb")
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    parallel = DistributedDataParallel(model, process_group=ours, bucket_cap_mb=1)
    torch.manual_seed(rank)
    for _ in range(3):
        parallel(torch.randn(16, 64)).square().mean().backward()
    return [bytes(p.grad.numpy().tobytes()) for p in model.parameters() if p.grad is not None]


def test_data_parallel_ends_with_the_same_gradients_everywhere(six: World) -> None:
    results = six.run(gradients)
    assert len(results[0]) == 4
    assert all(result == results[0] for result in results)


def sharded(rank: int, backend: str) -> list[bytes]:
    """FSDP2 with a replicate dimension across sites (HSDP): two steps, the parameters at the end."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from proxyd_client.torch import Options

    override: Any = {
        "replicate": ("proxyd", Options(sites=dict(enumerate("aaabbb")))) if backend == "proxyd" else backend
    }
    mesh = init_device_mesh(
        "cpu", (2, 3), mesh_dim_names=("replicate", "shard"), backend_override={**override, "shard": "gloo"}
    )
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(48, 600), torch.nn.GELU(), torch.nn.Linear(600, 6))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(rank)
    for _ in range(2):
        model(torch.randn(8, 48)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    return [bytes(p.full_tensor().detach().numpy().tobytes()) for p in model.parameters()]


def test_sharded_inside_sites_and_replicated_across_them_equals_gloo(six: World) -> None:
    ours, gloo = six.run(sharded, "proxyd"), six.run(sharded, "gloo")
    assert ours == gloo, "two terms have one order"
    assert all(each == ours[0] for each in ours)


def refusals(rank: int, layout: str) -> list[str]:
    """Each call differs between ranks; after each one that doesn't, works."""
    import torch
    import torch.distributed as dist

    from proxyd_client import MismatchError

    ours, _, _ = groups(layout)
    last = SIZE - 1
    cases: list[Any] = [
        lambda x: dist.all_reduce(x[: 5 if rank == 0 else 3], group=ours),
        lambda x: dist.all_reduce(x[: 5 if rank == last else 3], group=ours),
        lambda x: dist.all_reduce(x[: 30_000 if rank >= 3 else 3], group=ours),
        lambda x: dist.all_reduce(x[: 30_000 if rank >= 3 else 20_000], group=ours),
        lambda x: dist.all_reduce(x if rank < 3 else x.int(), group=ours),
        lambda x: dist.all_reduce(x, dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM, group=ours),
        lambda x: (
            dist.all_gather([torch.empty_like(x) for _ in range(SIZE)], x, group=ours)
            if rank < 3
            else dist.all_reduce(x, group=ours)
        ),
        lambda x: dist.all_to_all_single(x[:6], x[6:12], None, [0, 2, 1, 1, 1, 1] if rank == 0 else None, group=ours),
    ]
    texts = []
    for number, case in enumerate(cases):
        x = torch.full((30_000,), 9.0)
        try:
            case(x)
        except MismatchError as error:
            assert isinstance(error, RuntimeError)
            texts.append(str(error))
            if number < 7:
                assert x.eq(9).all(), f"case {number}: a buffer was touched"
        else:
            texts.append("")
        x = torch.full((30_000,), 1.0)
        dist.all_reduce(x, group=ours)
        assert x.eq(SIZE).all(), f"after case {number}"
    return texts


@pytest.mark.parametrize("layout", ["aaabbb", "abbbbb", "aabbcc"])
def test_ranks_that_do_not_do_the_same_are_refused_and_the_next_call_works(six: World, layout: str) -> None:
    results = six.run(refusals, layout)
    for number in range(7):
        for rank, texts in enumerate(results):
            text = texts[number]
            assert "was refused" in text, (number, rank, text)
            assert f"group rank {rank} (global rank {rank})" in text, (number, rank, text)
    assert any(texts[7] for texts in results), "whoever meets the wrong size says so"


def wrong_calls(rank: int) -> None:
    import torch
    import torch.distributed as dist

    ours, _, _ = groups("aaabbb")
    x = torch.ones(4)
    options = dist.BroadcastOptions()
    options.rootRank = 6
    for call in (
        lambda: ours.broadcast([x], options),
        lambda: ours.broadcast([x, x], dist.BroadcastOptions()),
        lambda: ours.allgather([[x] * 5], [x]),
        lambda: ours.allgather([[torch.ones(3)] * 6], [x]),
        lambda: ours.all_gather_single(torch.ones(9), x),
        lambda: ours.all_to_all_single(x, x, [], []),
        lambda: ours.all_to_all_single(x, x, [1] * 6, [1] * 6),
        lambda: ours.reduce_scatter_single(x, torch.ones(7)),
    ):
        with pytest.raises(ValueError):
            call()
    dist.barrier(group=ours)


def test_wrong_calls_raise_before_anything_moves(six: World) -> None:
    six.run(wrong_calls)


def mixed(rank: int, seed: int, count: int) -> None:
    """Collectives of several groups and point-to-point, many under way at once."""
    import torch
    import torch.distributed as dist

    chance = random.Random(seed)
    names = [chance.choice(LAYOUTS) for _ in range(3)]
    pending: list[tuple[Any, Any, float]] = []
    for number in range(count):
        ours = groups(chance.choice(names))[0]
        length = chance.choice([1, 10, 5000, 40_000])
        kind = chance.choice(["sum", "broadcast", "pair", "ring", "gather"])
        root = chance.randrange(SIZE)
        x = torch.full((length,), float(rank))
        if kind == "sum":
            pending.append((dist.all_reduce(x, group=ours, async_op=True), x, 15.0))
        elif kind == "broadcast":
            pending.append((dist.broadcast(x, root, group=ours, async_op=True), x, float(root)))
        elif kind == "gather":
            out = torch.empty(SIZE * length)
            pending.append((dist.all_gather_into_tensor(out, x, group=ours, async_op=True), out[-1:], 5.0))
        elif kind == "ring":
            into = torch.empty(length)
            left, right = (rank - 1) % SIZE, (rank + 1) % SIZE
            ops = [dist.P2POp(dist.isend, x, right, ours), dist.P2POp(dist.irecv, into, left, ours)]
            if rank % 2:
                ops.reverse()
            for work in dist.batch_isend_irecv(ops):
                pending.append((work, into, float(left)))
        else:
            other = chance.randrange(SIZE)
            if root != other and rank == root:
                pending.append((dist.isend(x, other, ours, tag=number), x, float(rank)))
            elif root != other and rank == other:
                into = torch.empty(length)
                pending.append((dist.irecv(into, root, ours, tag=number), into, float(root)))
        at_most = chance.choice([0, 4, 12])
        while len(pending) > at_most:
            work, result, want = pending.pop(0)
            work.wait()
            # Of a batch, the send may be done before the receive.
            if not any(other is result for _, other, _ in pending):
                assert result.eq(want).all(), (number, kind)
    for work, _, _ in pending:
        work.wait()


def test_many_at_once_of_several_groups_beside_point_to_point(six: World) -> None:
    six.run(mixed, 5, MIXED, timeout_s=60 + MIXED / 20)


def sum_of(rank: int, nbytes: int) -> float:
    import torch
    import torch.distributed as dist

    x = torch.full((nbytes // 4,), 1.0 + rank)
    dist.all_reduce(x)
    assert x.eq(10).all()
    return float(x[0])


def acknowledged(cluster: Cluster, before: Counters, wanted: dict[str, int]) -> Counters:
    """The counters once so much was acknowledged: a collective is done when everything is received, before that."""

    def counted() -> Counters | None:
        after = Counters.of(cluster)
        enough = all(after.transferred[link] - before.transferred[link] >= size for link, size in wanted.items())
        return after if enough else None

    counters = until(counted, f"{wanted} bytes are acknowledged", timeout_s=20)
    assert counters is not None
    return counters


def test_a_sum_crosses_once_per_site_and_under_grants(world: World, cluster: Cluster) -> None:
    size = 8 * MIB
    world.run(sum_of, 1000)
    before = Counters.of(cluster)
    world.run(sum_of, size)
    after = acknowledged(cluster, before, {"a->b": size, "b->a": size})
    crossed_under_grants(before, after, dict.fromkeys(("a->b", "b->a"), size), dict.fromkeys(("a->b", "b->a"), size))
    for link in ("a->b", "b->a"):
        assert after.transferred[link] - before.transferred[link] <= 1.05 * size, link


def broadcast_and_gather(rank: int, nbytes: int) -> None:
    import torch
    import torch.distributed as dist

    x = torch.full((nbytes,), rank, dtype=torch.uint8)
    dist.broadcast(x, 1)
    assert x.eq(1).all()
    rows = torch.empty(4 * nbytes, dtype=torch.uint8)
    dist.all_gather_into_tensor(rows, x.fill_(rank))
    assert rows[3 * nbytes :].eq(3).all()
    assert rows[:nbytes].eq(0).all()


def test_broadcasts_and_gathers_cross_once_per_site(world: World, cluster: Cluster) -> None:
    size = 3 * MIB
    world.run(broadcast_and_gather, 10)
    before = Counters.of(cluster)
    world.run(broadcast_and_gather, size)
    after = acknowledged(cluster, before, {"a->b": 3 * size, "b->a": 2 * size})
    moved = {link: after.transferred[link] - before.transferred[link] for link in ("a->b", "b->a")}
    assert 3 * size <= moved["a->b"] <= 1.05 * 3 * size, "the broadcast's and two ranks' blocks"
    assert 2 * size <= moved["b->a"] <= 1.05 * 2 * size, "two ranks' blocks"


def wait_for_the_dead(rank: int, nbytes: int) -> list[Any]:
    import time

    import torch
    import torch.distributed as dist

    started = time.monotonic()
    texts = []
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(nbytes // 4))
        except RuntimeError as error:
            texts.append((type(error).__name__, str(error)))
    return [time.monotonic() - started, *texts]


@pytest.mark.parametrize("nbytes", [1000, 9 * MIB])
def test_the_death_of_a_rank_is_a_typed_error_on_all_others(cluster: Cluster, nbytes: int) -> None:
    from .worlds import World

    a, b = cluster.agent("a").socket, cluster.agent("b").socket
    with World(4, [a, a, b, b]) as world:
        world.run(sum_of, 1000)
        started = world.start(wait_for_the_dead, nbytes, ranks=[0, 1, 3])
        world.kill(2)
        for seconds, first, second in world.finish(started):
            assert seconds < 15, "well below the group's timeout of 60 s"
            assert first[0] in ("PeerLost", "TransferFailed"), first
            assert "has ended" in second[1], second
            assert second[0] == first[0], second


def late(rank: int) -> tuple[float, str, str]:
    import datetime
    import time

    import torch
    import torch.distributed as dist

    from proxyd_client.torch import Options

    group = dist.new_group(
        list(range(SIZE)),
        timeout=datetime.timedelta(seconds=2),
        backend="proxyd",
        pg_options=Options(sites=dict(enumerate("aaabbb"))),
    )
    dist.barrier(group=group)
    started = time.monotonic()
    if rank == 4:
        time.sleep(2.6)
        return 0.0, "", ""
    try:
        dist.all_reduce(torch.ones(40_000), group=group)
    except RuntimeError as error:
        return time.monotonic() - started, type(error).__name__, str(error)
    return 0.0, "", ""


def test_a_rank_that_does_not_come_is_a_timeout_on_all_others(six: World) -> None:
    results = six.run(late)
    for rank, (seconds, kind, text) in enumerate(results):
        if rank != 4:
            assert kind == "TransferTimeout", text
            assert 1.9 < seconds < 8, "the group's 2 s, and a busy machine"
            for part in ("timed out after", "group rank", "allreduce"):
                assert part in text, text


def monitored(rank: int) -> str:
    import datetime

    ours, _, _ = groups("aaabbb")
    ours.monitored_barrier(datetime.timedelta(seconds=30))
    return "passed"


def test_a_monitored_barrier_passes(six: World) -> None:
    assert six.run(monitored) == ["passed"] * SIZE


def destroyed(rank: int) -> list[str]:
    """Half of the ranks destroy the group while a collective waits for the other half."""
    import torch
    import torch.distributed as dist

    from proxyd_client.torch import Options

    group = dist.new_group(list(range(SIZE)), backend="proxyd", pg_options=Options(sites=dict(enumerate("aaabbb"))))
    dist.barrier(group=group)
    if rank < 3:
        work = dist.all_reduce(torch.ones(50_000), group=group, async_op=True)
        dist.destroy_process_group(group)
        try:
            work.wait()
        except RuntimeError as error:
            return [type(error).__name__, str(error)]
        return ["none", ""]
    dist.destroy_process_group(group)
    return ["", ""]


def test_destroying_a_group_ends_what_is_under_way(six: World) -> None:
    for kind, text in six.run(destroyed)[:3]:
        assert kind == "ClosedError", (kind, text)
        assert "destroyed" in text, text
