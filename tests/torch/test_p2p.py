"""Point-to-point through agents: values by index, dtypes, order, tags, any source, mismatches, ranks, timeouts."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .worlds import World

pytestmark = pytest.mark.needs_torch

DTYPES = (
    "bfloat16",
    "bool",
    "complex64",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint8",
)
PAIRS = ((0, 1), (0, 2), (3, 1))
"""Within a site, and across, both ways."""


def bits(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def filled(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    import torch

    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * torch.empty(0, dtype=kind).element_size()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(kind).view(shape) if count else torch.empty(shape, dtype=kind)


def exchange(rank: int, src: int, dst: int, shapes: list[tuple[int, ...]], dtype: str) -> list[bytes]:
    import torch
    import torch.distributed as dist

    got = []
    for seed, shape in enumerate(shapes):
        if rank == src:
            dist.send(filled(shape, dtype, seed), dst)
        elif rank == dst:
            out = torch.zeros_like(filled(shape, dtype, seed + 1))
            assert dist.recv(out, src) == src
            got.append(bits(out))
    return got


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_bit_for_bit(world: World, dtype: str) -> None:
    shapes: list[tuple[int, ...]] = [(3, 4), (), (0, 7), (2,), (7, 0), (1, 1, 5)]
    for src, dst in PAIRS:
        got = world.run(exchange, src, dst, shapes, dtype)[dst]
        assert got == [bits(filled(shape, dtype, seed)) for seed, shape in enumerate(shapes)]


def test_large_ones_cross_sites_and_stay(world: World) -> None:
    for src, dst in PAIRS:
        got = world.run(exchange, src, dst, [(9 << 20,), (1,), ((1 << 20) + 7,)], "uint8")[dst]
        assert got == [
            bits(filled(shape, "uint8", seed)) for seed, shape in enumerate([(9 << 20,), (1,), ((1 << 20) + 7,)])
        ]


def layouts(rank: int) -> None:
    import torch
    import torch.distributed as dist

    base = torch.arange(12.0).reshape(3, 4)
    big = torch.arange(4_000_000.0).reshape(2000, 2000)
    cases = [
        base.t(),
        base[:, 1],
        base[::2],
        base[0].expand(5, 4),
        big.t(),
        big[::2, 1::3],
        base[1:].clone().requires_grad_(),
        torch.tensor([1.0, -0.0, float("nan")]),
    ]
    for tag, x in enumerate(cases):
        if rank == 0:
            dist.send(x, 2, tag=tag)
        elif rank == 2:
            targets = [torch.zeros(x.shape), torch.zeros([*x.shape, 2])[..., 1]]
            if x.ndim == 2:
                targets.append(torch.zeros(x.shape[::-1]).t())
            out = targets[tag % len(targets)]
            before = [t.clone() for t in targets]
            dist.recv(out, 0, tag=tag)
            assert bits(out) == bits(x), tag
            for other, was in zip(targets, before, strict=True):
                assert other is out or torch.equal(other, was)


def test_strided_tensors_arrive_by_index(world: World) -> None:
    world.run(layouts)


def conjugates(rank: int) -> None:
    import torch
    import torch.distributed as dist

    pg = dist.group.WORLD
    assert pg is not None
    z = torch.tensor([1 + 2j, 3 - 4j])
    for x in (z.conj(), z.conj().imag, z.imag):
        if rank == 0:
            pg.send([x], 1, 0).wait()
        elif rank == 1:
            out = torch.zeros(x.shape, dtype=x.dtype)
            pg.recv([out], 0, 0).wait()
            assert torch.equal(out, x)
            if x.is_complex():
                break
    # Into a lazily conjugated one.
    if rank == 0:
        pg.send([z], 1, 1).wait()
    elif rank == 1:
        into = torch.zeros(2, dtype=z.dtype).conj()
        pg.recv([into], 0, 1).wait()
        assert torch.equal(into, z)
        for rest in (z.conj().imag, z.imag):
            out = torch.zeros(rest.shape)
            pg.recv([out], 0, 0).wait()
            assert torch.equal(out, rest)


def test_lazily_conjugated_and_negated_tensors_arrive_as_their_values(world: World) -> None:
    world.run(conjugates)


def refused(rank: int) -> list[str]:
    import torch
    import torch.distributed as dist

    pg = dist.group.WORLD
    assert pg is not None
    texts = []
    if rank == 0:
        for wrong in (
            torch.eye(3).to_sparse(),
            torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            torch.empty(3, device="meta"),
        ):
            for start in (pg.send, pg.recv):
                try:
                    start([wrong], 1, 0)
                except TypeError as error:
                    texts.append(str(error))
        try:
            pg.recv([torch.zeros(1).expand(4)], 1, 0)
        except ValueError as error:
            texts.append(str(error))
        try:
            pg.send([torch.zeros(1)], 9, 0)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_what_does_not_travel_is_refused_in_words(world: World) -> None:
    texts = world.run(refused)[0]
    assert len(texts) == 8
    for word in ("sparse", "quantised", "meta", "share memory", "rank 9 is not in group"):
        assert any(word in text for text in texts), (word, texts)
    world.run(exchange, 0, 1, [(4,)], "float32")


def mismatch(rank: int, sent: list[Any], wanted: list[Any]) -> str | None:
    """One pair that doesn't match, then one that does."""
    import torch
    import torch.distributed as dist

    (sent_shape, sent_dtype), (shape, dtype) = sent, wanted
    good = torch.arange(5.0)
    if rank == 0:
        dist.send(filled(tuple(sent_shape), sent_dtype, 3), 2)
        dist.send(good, 2)
        return None
    if rank != 2:
        return None
    out = torch.full(tuple(shape), 9, dtype=getattr(torch, dtype))
    begun = time.monotonic()
    text = ""
    try:
        dist.recv(out, 0)
    except RuntimeError as error:
        text = str(error)
    assert time.monotonic() - begun < 5
    assert bool((out == 9).all())
    right = torch.zeros(5)
    dist.recv(right, 0)
    assert torch.equal(right, good)
    return text


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ([[3], "float32"], [[5], "float32"]),
        ([[5], "float32"], [[3], "float32"]),
        ([[2], "int32"], [[2], "float32"]),
        ([[4], "bfloat16"], [[4], "float16"]),
        ([[4], "float32"], [[16], "uint8"]),
        ([[0], "float32"], [[3], "float32"]),
        ([[3000000], "float32"], [[5], "float32"]),
    ],
)
def test_a_mismatch_names_both_sides_and_the_next_pair_matches(
    world: World, sent: list[Any], wanted: list[Any]
) -> None:
    text = world.run(mismatch, sent, wanted)[2]
    for part in (f"{sent[1]}{sent[0]}", f"{wanted[1]}{wanted[0]}", "group rank 0 (global rank 0", "tag 0"):
        assert part in text, text


def tags(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        works = [dist.isend(torch.full((10,), float(tag)), 3, tag=tag) for tag in (1, 2, 3)]
        works += [dist.isend(torch.full((4 << 20,), 7.0), 3, tag=9), dist.isend(torch.tensor([8.0]), 3, tag=9)]
        for work in works:
            work.wait()
    elif rank == 3:
        for tag in (3, 1, 2):
            out = torch.zeros(10)
            dist.recv(out, 1, tag=tag)
            assert out.tolist() == [float(tag)] * 10
        large, small = torch.zeros(4 << 20), torch.zeros(1)
        dist.recv(large, 1, tag=9)
        dist.recv(small, 1, tag=9)
        assert bool((large == 7).all())
        assert small.item() == 8


def test_values_follow_tags_and_a_channel_keeps_its_order(world: World) -> None:
    world.run(tags)


def any_source(rank: int) -> list[int]:
    import torch
    import torch.distributed as dist

    if rank != 2:
        dist.send(torch.tensor([rank]), 2, tag=5)
        return []
    sources = []
    for _ in range(3):
        out = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(out, tag=5)
        assert out.item() == source
        sources.append(source)
    return sorted(sources)


def test_any_source_says_which(world: World) -> None:
    assert world.run(any_source)[2] == [0, 1, 3]


def both_send_first(rank: int, nbytes: int) -> None:
    import torch
    import torch.distributed as dist

    peer = {0: 2, 2: 0}.get(rank)
    if peer is None:
        return
    sent = torch.full((nbytes,), rank + 1, dtype=torch.uint8)
    out = torch.zeros(nbytes, dtype=torch.uint8)
    work = dist.isend(sent, peer)
    dist.recv(out, peer)
    work.wait()
    assert bool((out == peer + 1).all())


def test_both_sides_send_first(world: World) -> None:
    world.run(both_send_first, 64 << 20)


def batches(rank: int) -> None:
    """The middle of a pipeline: four operations at once, the other side's in another order; one is never matched."""
    import torch
    import torch.distributed as dist

    if rank not in (0, 3):
        return
    peer = 3 - rank
    count = 2 << 20
    outs = [torch.zeros(count) for _ in range(2)]
    sends = [dist.P2POp(dist.isend, torch.full((count,), 10.0 * rank + i), peer, tag=i) for i in range(2)]
    receives = [dist.P2POp(dist.irecv, outs[i], peer, tag=i) for i in range(2)]
    unmatched = dist.irecv(torch.zeros(3), peer, tag=77)
    for work in dist.batch_isend_irecv([*sends, *receives] if rank else [*reversed(receives), *reversed(sends)]):
        work.wait()
    assert [out[0].item() for out in outs] == [10.0 * peer, 10.0 * peer + 1]
    assert not unmatched.is_completed()
    looked = dist.isend(torch.ones(1), peer, tag=78)
    dist.recv(torch.zeros(1), peer, tag=78)
    looked.wait()
    dist.send(torch.ones(3), peer, tag=77)
    unmatched.wait()


def test_batches_in_any_order(world: World) -> None:
    world.run(batches)


def sub_groups(rank: int) -> list[str]:
    import torch
    import torch.distributed as dist

    group = dist.new_group([3, 1], backend="proxyd")
    texts = []
    if rank in (1, 3):
        out = torch.zeros(2)
        if rank == 1:
            dist.send(torch.tensor([1.0, 2.0]), dst=3, group=group)
            dist.send(torch.tensor([3.0, 4.0]), group_dst=1, group=group)
        else:
            assert dist.recv(out, src=1, group=group) == 1
            assert out.tolist() == [1.0, 2.0]
            assert dist.recv(out, group=group) == 1
            assert out.tolist() == [3.0, 4.0]
            try:
                dist.recv(out, src=1, group=group)
            except RuntimeError as error:
                texts.append(str(error))
        if rank == 1:
            dist.send(torch.ones(2, dtype=torch.int64), dst=3, group=group)
        dist.destroy_process_group(group)
    return texts


def test_ranks_of_a_sub_group_are_told_from_global_ones(world: World) -> None:
    (text,) = world.run(sub_groups)[3]
    assert "group rank 0 (global rank 1, site a)" in text
    assert "group rank 1 (global rank 3, site b)" in text


def futures(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 0:
        future = dist.isend(torch.ones(5), 1).get_future()
        assert torch.equal(future.wait()[0], torch.ones(5))
    elif rank == 1:
        out = torch.zeros(5)
        work = dist.irecv(out, 0)
        doubled = work.get_future().then(lambda f: f.value()[0] * 2)
        assert torch.equal(doubled.wait(), torch.full((5,), 2.0))
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None


def test_futures(world: World) -> None:
    world.run(futures)


def to_itself(rank: int) -> None:
    import torch
    import torch.distributed as dist

    out = torch.zeros(1 << 20)
    receive = dist.irecv(out, rank)
    send = dist.isend(torch.full((1 << 20,), float(rank)), rank)
    receive.wait()
    send.wait()
    assert out[5].item() == rank


def test_a_rank_may_send_to_itself(world: World) -> None:
    world.run(to_itself)


def times_out(rank: int) -> tuple[float, str]:
    import torch
    import torch.distributed as dist

    if rank != 0:
        return 0.0, ""
    work = dist.irecv(torch.zeros(3), 3, tag=1234)
    begun = time.monotonic()
    try:
        work.wait(datetime.timedelta(seconds=0.5))
    except RuntimeError as error:
        assert isinstance(error, TimeoutError)
        return time.monotonic() - begun, str(error)
    return 0.0, ""


def test_a_timeout_is_kept_and_says_who(world: World) -> None:
    took_s, text = world.run(times_out)[0]
    assert 0.5 <= took_s < 3
    for part in ("float32[3]", "global rank 3", "tag 1234", "global rank 0"):
        assert part in text
    world.run(exchange, 0, 3, [(4,)], "float32")
