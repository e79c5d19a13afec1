"""Ends: of a peer, of a group, of a process in the middle of something."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from proxyd.cli.cluster import Cluster

pytestmark = pytest.mark.needs_torch


def waits_for(rank: int, peer: int, tag: int) -> str:
    import torch
    import torch.distributed as dist

    out = torch.full((3,), 9.0)
    try:
        dist.recv(out, peer, tag=tag)
    except RuntimeError as error:
        assert isinstance(error, ConnectionError)
        assert out.tolist() == [9.0] * 3
        return str(error)
    return "received"


def takes_what_is_whole(rank: int, peer: int) -> None:
    import torch
    import torch.distributed as dist

    out = torch.zeros(32 << 20)
    try:
        dist.recv(out, peer, tag=2)
    except ConnectionError:
        return
    assert bool((out == 1).all())


def sends_half(rank: int, peer: int) -> None:
    """As much as goes without being received, then dies: nothing of it may ever look like a whole message."""
    import torch
    import torch.distributed as dist

    dist.isend(torch.ones(32 << 20), peer, tag=2)
    os.kill(os.getpid(), 9)


def pings(rank: int) -> None:
    import torch
    import torch.distributed as dist

    peer = 2 - rank
    work = dist.isend(torch.full((5,), float(rank)), peer, tag=3)
    out = torch.zeros(5)
    dist.recv(out, peer, tag=3)
    work.wait()
    assert out.tolist() == [float(peer)] * 5


def test_a_killed_rank_is_named_to_whoever_waits_for_it_and_the_others_go_on(cluster: Cluster) -> None:
    from .worlds import World

    a, b = cluster.agent("a").socket, cluster.agent("b").socket
    with World(3, [a, a, b]) as world:
        waiting = world.start(waits_for, 1, 1, ranks=[0, 2])
        world.start(sends_half, 0, ranks=[1])
        world.processes[1].join(20)
        begun = time.monotonic()
        for text in world.finish(waiting, 30):
            assert "global rank 1, site a" in text, text
        assert time.monotonic() - begun < 10
        world.run(pings, ranks=[0, 2])
        world.run(takes_what_is_whole, 1, ranks=[0])


def abandoned(rank: int) -> list[str]:
    """The group is destroyed while a receive is posted and a send is not received."""
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1], backend="proxyd")
    if rank > 1:
        return []
    works = [dist.irecv(torch.zeros(3), 1 - rank, group=group, tag=1)]
    works.append(dist.isend(torch.ones(3), 1 - rank, group=group, tag=2))
    begun = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - begun < 10
    texts = []
    try:
        works[0].wait()
    except RuntimeError as error:
        texts.append(str(error))
    # The next life of the same ranks gets nothing of that.
    again = dist.new_group([0, 1], backend="proxyd", use_local_synchronization=True)
    out = torch.zeros(3)
    work = dist.isend(torch.full((3,), 5.0), 1 - rank, group=again, tag=2)
    dist.recv(out, 1 - rank, group=again, tag=2)
    work.wait()
    assert out.tolist() == [5.0] * 3
    dist.destroy_process_group(again)
    return texts


def test_a_group_that_is_destroyed_ends_what_was_under_way(cluster: Cluster) -> None:
    from .worlds import World

    a, b = cluster.agent("a").socket, cluster.agent("b").socket
    with World(2, [a, b]) as world:
        for texts in world.run(abandoned):
            assert len(texts) == 1, texts
            assert "its group was closed" in texts[0]
