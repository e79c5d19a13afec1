"""How long the trainers of each job stood still for messages, as they say themselves.

A trainer can't claim more than it has lived, and there are only so many jobs with a name of their own; a job's figures
go with its last trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

MAX_JOBS = 100
OTHER = "other"
"""All jobs beyond those, together."""


class JobWaits:
    """Of one agent.

    :param clock: monotonic nanoseconds.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._left_ns: dict[int, tuple[int, int]] = {}
        """By a trainer's incarnation: what it may still claim, and as of when."""
        self._trainers: Counter[str] = Counter()
        self._waited_ns: Counter[str] = Counter()
        self._names: dict[str, str] = {}

    def joined(self, job: str, incarnation: int, age_ns: int) -> None:
        """A trainer attached, which may have been attached to earlier lives of this agent, for ``age_ns``."""
        self._left_ns[incarnation] = age_ns, self._clock()
        if job not in self._names:
            self._names[job] = job if len(self._waited_ns) < MAX_JOBS else OTHER
        name = self._names[job]
        self._trainers[job] += 1
        self._waited_ns[name] += 0

    def left(self, job: str, incarnation: int) -> None:
        """A trainer is gone."""
        del self._left_ns[incarnation]
        self._trainers[job] -= 1
        if not self._trainers[job]:
            del self._trainers[job]
            name = self._names.pop(job)
            if name not in self._names.values():
                del self._waited_ns[name]

    def waited(self, job: str, incarnation: int, waited_ns: int) -> None:
        """One of its trainers says that it waited for so long more."""
        left_ns, at_ns = self._left_ns[incarnation]
        now_ns = self._clock()
        left_ns += now_ns - at_ns
        waited_ns = min(waited_ns, left_ns)
        self._left_ns[incarnation] = left_ns - waited_ns, now_ns
        self._waited_ns[self._names[job]] += waited_ns

    def all(self) -> list[tuple[str, int, int]]:
        """(job, attached trainers, nanoseconds that its trainers waited), by name."""
        trainers: Counter[str] = Counter()
        for job, count in self._trainers.items():
            trainers[self._names[job]] += count
        return [(name, trainers[name], waited_ns) for name, waited_ns in sorted(self._waited_ns.items())]
