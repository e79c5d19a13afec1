"""Collectives of a group whose ranks are at several sites.

Each byte crosses the WAN once per site, not once per rank, in messages of the class ``sync``; inside a site a plain
group (gloo) moves bytes. Tensors given to these functions are contiguous and in host memory; what they aren't, the
group that calls them (:mod:`proxyd_client.torch.group`) makes them.

========================  ===========================================================================================
:mod:`.layout`            who holds what, and in which pieces it crosses
:mod:`.arithmetic`        reduce ops
:mod:`.scratch`           memory that is used again
:mod:`.team`              messages across sites, refusals, the end of a group
:mod:`.call`              one collective: agreement, the inner group's operations, deadlines, failures
:mod:`.reductions`        allreduce, reduce, reduce_scatter, and the order of their sums
:mod:`.moves`             broadcast, allgather, gather, scatter, alltoall, barrier
========================  ===========================================================================================
"""

from __future__ import annotations

from proxyd_client.torch.collectives.moves import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    gather,
    monitored_barrier,
    scatter,
)
from proxyd_client.torch.collectives.reductions import allreduce, reduce, reduce_scatter
from proxyd_client.torch.collectives.team import Team, bytes_of

__all__ = [
    "Team",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "bytes_of",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "scatter",
]
