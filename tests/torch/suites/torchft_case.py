"""torchft's own ``process_group_test``, from the installed wheel, on our backend.

Its ranks are threads of one process, and its groups are made anew under way, one of them while a rank is away. What a
subclass gives is a process group that can be configured again; each rank's agent is named, so that ranks of one process
can be at two sites.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from parameterized import parameterized
from torchft import process_group_test as theirs
from torchft.process_group import ProcessGroup, ProcessGroupWrapper

from proxyd_client.torch import Options, ProcessGroupProxyd

SOCKETS = os.environ["PROXYD_TEST_SOCKETS"].split(":")
"""The agent of each rank."""
COLLECTIVES = sorted(theirs._ALL_COLLECTIVES)


class ProcessGroupProxydAgain(ProcessGroupWrapper):
    """torchft's wrapper around a group of ours: configuring it makes a new one."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
        return ProcessGroupProxyd(store, rank, world_size, self._timeout, options=Options(socket=SOCKETS[rank]))

    def getBackendName(self) -> str:
        return "torchft-proxyd"


class ProxydMultiPgTest(theirs.MultiPgBaseTest):
    """What torchft's own subclass for gloo does, with all of its collectives: gloo leaves out three."""

    BACKEND = "proxyd"
    WORLD_SIZE = len(SOCKETS)

    @classmethod
    def _create_pg(cls, backend: str) -> ProcessGroup:
        return ProcessGroupProxydAgain()

    @parameterized.expand(COLLECTIVES)
    def test_collective(self, collective: str) -> None:
        self._run_parallel(collective)

    @parameterized.expand(COLLECTIVES)
    def test_collective_with_resiliency(self, collective: str) -> None:
        self._run_with_resiliency(collective)
