"""What torch.distributed has no call for, as functions on its groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from proxyd_client.endpoint import LinkState
from proxyd_client.errors import ArgumentError
from proxyd_client.torch.group import ProcessGroupProxyd


def group_of(group: Any = None) -> ProcessGroupProxyd:
    """``group``, or the default group; raises ArgumentError when that isn't a proxyd group."""
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ProcessGroupProxyd):
        raise ArgumentError(
            f"{type(found).__name__} is no proxyd group",
            next_step='Make it with init_process_group("proxyd") or new_group(ranks, backend="proxyd")',
        )
    return found


def recv_tensor(
    src: int | None = None, tag: int = 0, group: Any = None, *, timeout_s: float | None = None
) -> torch.Tensor:
    """Receive a tensor without a copy, whatever its dtype and shape.

    It lies in the agent's shared memory and may be written to (copy on write). It holds that memory until its last view
    dies: clone what must live long.

    :param src: global rank; None takes the earliest message from any.
    :param timeout_s: None takes the group's.
    """
    found = group_of(group)
    return found.p2p.take(_group_rank(found, src), tag, timeout_s)[0]


def eta_s(src: int | None = None, tag: int = 0, group: Any = None) -> float | None:
    """Predicted seconds until the next message from ``src`` is all here; 0.0: it is; None: nothing is known of it yet.

    :param src: global rank; None looks at the earliest message from any.
    """
    found = group_of(group)
    return found.p2p.eta_s(_group_rank(found, src), tag)


def link_state(dst: int, group: Any = None) -> LinkState:
    """What this host's agent knows of the path to a global rank."""
    found = group_of(group)
    rank = _group_rank(found, dst)
    return found.membership.endpoint.link_state(found.membership.members[rank or 0].rank)


def _group_rank(group: ProcessGroupProxyd, rank: int | None) -> int | None:
    """torch's own translation, so that its idea of who is in a group holds here too."""
    if rank is None:
        return None
    return int(rank) if group is dist.group.WORLD else int(dist.get_group_rank(group, rank))
