"""Which worker a trainer goes to: the one with the fewest, and a process that was here before to where it was.

A trainer whose agent was killed comes back with what it knows, and peers look for it where it was. So a process keeps
its worker for as long as it lives, also while that worker is started again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection


@dataclasses.dataclass(slots=True)
class _Load:
    passed: int = 0
    """Connections that were given to it in this life ..."""
    settled: int = 0
    """... and how many of them it knows by now, or has lost."""
    attached: int = 0

    @property
    def trainers(self) -> int:
        """Those that it has, and those that may become some."""
        return self.attached + max(0, self.passed - self.settled)


class Placing:
    """Of one front. Processes are named by their pid; whoever calls says when one has ended."""

    def __init__(self, workers: int) -> None:
        self._loads = [_Load() for _ in range(workers)]
        self._of_process: dict[int, int] = {}

    def place(self, pid: int, living: Collection[int]) -> int:
        """The worker for a connection that has just come.

        :param pid: of the trainer; 0: not known.
        :param living: workers that take connections now; none: all are as good.
        """
        worker = self._of_process.get(pid) if pid else None
        if worker is None:
            worker = min(living or range(len(self._loads)), key=lambda one: (self._loads[one].trainers, one))
        self._loads[worker].passed += 1
        return worker

    def keep(self, pid: int, worker: int) -> None:
        """This process goes there from now on, until it has :meth:`ended`."""
        self._of_process[pid] = worker

    def knows(self, pid: int) -> bool:
        """It has a worker."""
        return pid in self._of_process

    def ended(self, pid: int) -> None:
        """The process is gone; its number may be another one's."""
        self._of_process.pop(pid, None)

    def reported(self, worker: int, settled: int, attached: int) -> None:
        """What a worker says of itself, in this life."""
        load = self._loads[worker]
        load.settled, load.attached = settled, attached
        # A life may find connections that its predecessor hadn't taken.
        load.passed = max(load.passed, settled)

    def begins_anew(self, worker: int) -> None:
        """A worker has died."""
        self._loads[worker] = _Load()

    def trainers(self) -> list[int]:
        """By worker."""
        return [load.trainers for load in self._loads]
