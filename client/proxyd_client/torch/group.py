"""The process group: what torch.distributed calls.

A Python group replaces the whole C++ one, so every operation is here: one that isn't would run the base class's with
the interpreter's lock held, and wait for a thread that needs it. Collectives of a group whose ranks are all at one site
go to an inner plain group (gloo; nccl for CUDA tensors), which releases the lock. Across sites they are built on both:
:mod:`proxyd_client.torch.collectives`.
"""

from __future__ import annotations

import atexit
import datetime
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from proxyd_client.errors import ArgumentError
from proxyd_client.torch.collectives import Team
from proxyd_client.torch.membership import Membership, Options, join
from proxyd_client.torch.operations import Collectives
from proxyd_client.torch.p2p import PointToPoint
from proxyd_client.torch.works import TensorWork

BACKEND_NAME = "proxyd"


class ProcessGroupProxyd(Collectives, dist.ProcessGroup):
    """One group. Made by torch through :func:`register`; or directly, from a store."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        global_ranks: Sequence[int] = (),
        options: Options | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self.membership: Membership = join(store, rank, size, timeout, global_ranks, options)
        self.p2p = PointToPoint(self.membership)
        self.inner = _inner_group(store, self.membership)
        for device in self.inner._device_types:
            self._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, self.inner._get_backend(device))
        self.begin_collectives(_team(store, self.membership) if len(self.membership.sites) > 1 else None)
        _all_connected(store, self.membership)
        _live.add(self)

    # -- what it is --------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """For torch."""
        return BACKEND_NAME

    def name(self) -> str:
        """For torch."""
        return BACKEND_NAME

    def get_group_store(self) -> Any:
        """The group's store."""
        return self._store

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long operations may take that are started from now on."""
        self.membership.timeout = timeout

    def shutdown(self) -> None:
        """End it; what is under way fails, after sends have had the agent's linger time."""
        self.end_collectives("it was destroyed")
        self.membership.leave()

    def abort(self) -> None:
        """End it at once."""
        self.end_collectives("it was aborted")
        self.membership.leave(0.0)

    # -- point to point ----------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> TensorWork:
        """Ranks are the group's."""
        return self.p2p.send(_only(tensors), dst, tag)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> TensorWork:
        """Ranks are the group's."""
        return self.p2p.receive(_only(tensors), src, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> TensorWork:
        """The earliest message of the group with this tag."""
        return self.p2p.receive(_only(tensors), None, tag)


_live: weakref.WeakSet[ProcessGroupProxyd] = weakref.WeakSet()


def _end_all_at_exit() -> None:
    # A script need not destroy its groups. But a thread of theirs that is inside torch's C++ code when the interpreter
    # goes (freeing the last tensor is enough) would end the process by SIGABRT.
    for group in list(_live):
        if not group.membership.endpoint.closed:  # else it has ended, or is the parent's
            group.shutdown()


atexit.register(_end_all_at_exit)


def _inner_group(store: Any, membership: Membership) -> dist.ProcessGroup:
    """A plain group of the ranks of this member's site."""
    ranks = next(ranks for ranks in membership.sites if membership.rank in ranks)
    prefix = dist.PrefixStore(f"proxyd/inner/{membership.name}/{ranks[0]}", store)
    rank, size = ranks.index(membership.rank), len(ranks)
    group = dist.ProcessGroup(prefix, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu/", prefix), rank, size, timeout=membership.timeout)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", prefix), rank, size, membership.timeout)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_group_name(f"proxyd-{membership.name}-{ranks[0]}")
    return group


def _team(store: Any, membership: Membership) -> Team:
    """The members of a group that spans sites."""
    mates = next(ranks for ranks in membership.sites if membership.rank in ranks)
    inner = None
    if len(mates) > 1:
        # One of its own: closing it ends what the ranks of a site wait for in it, and it closes with its last
        # reference.
        prefix = dist.PrefixStore(f"proxyd/collectives/{membership.name}/{mates[0]}", store)
        inner = dist.ProcessGroupGloo(prefix, mates.index(membership.rank), len(mates), timeout=membership.timeout)
    return Team(
        endpoint=membership.endpoint,
        name=f"{membership.name}/collectives",
        rank=membership.rank,
        ranks=[member.rank for member in membership.members],
        sites=membership.sites,
        inner=inner,
        timeout_s=membership.timeout.total_seconds(),
    )


def _all_connected(store: Any, membership: Membership) -> None:
    """Wait until my site's ranks have connected their plain groups: one that ended its group at once would else cut off
    a mate that is still at it."""
    mates = next(ranks for ranks in membership.sites if membership.rank in ranks)
    store.set(f"proxyd/connected/{membership.name}/{membership.rank}", "yes")
    store.wait([f"proxyd/connected/{membership.name}/{mate}" for mate in mates], membership.timeout)


def _only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) != 1:
        raise ArgumentError(f"point-to-point takes one tensor at a time, got {len(tensors)}")
    return tensors[0]


def _create(backend_options: Any, options: Any) -> ProcessGroupProxyd:
    """What torch calls for ``init_process_group`` and ``new_group``."""
    if options is not None and not isinstance(options, Options):
        raise ArgumentError(
            f"pg_options of a proxyd group are proxyd_client.torch.Options, not {type(options).__name__}"
        )
    return ProcessGroupProxyd(
        backend_options.store,
        backend_options.group_rank,
        backend_options.group_size,
        backend_options.timeout,
        list(backend_options.global_ranks_in_group),
        options,
    )


def register(name: str = BACKEND_NAME) -> None:
    """Make the backend known to torch.distributed; again is fine."""
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, _create, extended_api=True, devices=["cpu", "cuda"])
