"""Messages of this agent's trainers that ended: how many, how large, how long they took.

Completion times are of messages that were delivered, from the trainer's post until its agent knew of the delivery.
Messages between trainers of one agent have none: they are over when their receiver lets go of them.
"""

from __future__ import annotations

import bisect
import dataclasses

from proxyd.core.ids import LinkName

MS = 1_000_000
BOUNDS_NS = tuple(
    int(ms * MS)
    for ms in (1, 2, 5, 10, 20, 35, 50, 75, 100, 150, 200, 350, 500, 750, 1000, 1500, 2000, 3500, 5000, 10000, 30000)
) + (120_000 * MS,)
"""Dense from 20 ms to 5 s, where a tensor over a WAN ends: between the round trip alone and a burst's last one, so that
a p99 that doubles crosses two bounds. Coarse below, for what stays in a site, and above, for checkpoints."""


@dataclasses.dataclass(slots=True)
class Ended:
    """One link, one traffic class."""

    ok: int = 0
    failed: int = 0
    ok_bytes: int = 0
    took_ns: int = 0
    """Sum over those that have a completion time."""
    counts: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(BOUNDS_NS) + 1))
    """``counts[i]``: took more than bound ``i - 1`` and at most bound ``i``; the last one: more than all."""


class EndedMessages:
    """All of them, since the agent began."""

    def __init__(self) -> None:
        self._by: dict[tuple[LinkName, int], Ended] = {}

    def add(self, link: LinkName, traffic: int, ok: bool, nbytes: int, took_ns: int | None) -> None:
        """Count one. ``took_ns`` None: it has no completion time."""
        found = self._by.get((link, traffic))
        if found is None:
            found = self._by[link, traffic] = Ended()
        if not ok:
            found.failed += 1
            return
        found.ok += 1
        found.ok_bytes += nbytes
        if took_ns is not None:
            found.took_ns += took_ns
            found.counts[bisect.bisect_left(BOUNDS_NS, took_ns)] += 1

    def all(self) -> tuple[tuple[LinkName, int, Ended], ...]:
        """(link, traffic class, figures), in order."""
        return tuple((link, traffic, found) for (link, traffic), found in sorted(self._by.items()))
