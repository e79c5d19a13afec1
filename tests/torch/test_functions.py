"""What torch.distributed has no call for."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .worlds import World

pytestmark = pytest.mark.needs_torch


def without_copy(rank: int) -> None:
    import torch
    import torch.distributed as dist

    import proxyd_client.torch as proxyd

    sent = [torch.arange(300_000.0), torch.ones((2, 3), dtype=torch.bfloat16), torch.empty((0, 4)), torch.tensor(7)]
    if rank == 0:
        for tensor in sent:
            dist.send(tensor, 3)
    elif rank == 3:
        for tensor in sent:
            got = proxyd.recv_tensor(0)
            assert got.dtype == tensor.dtype
            assert torch.equal(got, tensor)
            got.add_(1)  # its own memory
            assert torch.equal(got, tensor + 1)
            view = got.reshape(-1)[-1:]
            del got
            gc.collect()
            assert torch.equal(view, (tensor + 1).reshape(-1)[-1:])


def test_tensors_are_received_without_a_copy_and_without_knowing_their_shape(world: World) -> None:
    for _ in range(3):
        world.run(without_copy)


def predictions(rank: int) -> None:
    import torch
    import torch.distributed as dist

    import proxyd_client.torch as proxyd

    if rank == 0:
        dist.send(torch.ones(1 << 20), 2, tag=3)
    elif rank == 2:
        assert proxyd.eta_s(0, tag=99) is None
        while (left_s := proxyd.eta_s(0, tag=3)) is None:
            pass
        assert 0 <= left_s < 60
        dist.recv(torch.zeros(1 << 20), 0, tag=3)
    state = proxyd.link_state(3 if rank < 2 else 0)
    assert state.link == ("a->b" if rank < 2 else "b->a")


def test_when_the_next_message_will_be_here(world: World) -> None:
    world.run(predictions)


def of_another_backend(rank: int) -> None:
    import torch.distributed as dist

    import proxyd_client.torch as proxyd

    plain = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="no proxyd group"):
        proxyd.recv_tensor(0, group=plain)
    dist.destroy_process_group(plain)


def test_other_groups_are_refused(world: World) -> None:
    world.run(of_another_backend)
