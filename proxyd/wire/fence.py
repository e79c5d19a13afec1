"""What has ended at a receiver: the memory that keeps a message from being delivered twice.

Theory of operation
-------------------
A sender that lost its connection offers again whatever was not acknowledged, and the acknowledgement may just have been
lost. So a receiver must know, of each message that was ever offered to it, whether it is new, under way, delivered, or
ended in another way. To remember every delivered one would take memory without end; it isn't needed, because each
sender offers its messages to one destination in the order of their sequences. One number, the highest sequence offered
so far, tells new from known; the receiver has a list of what is under way; of the rest, those that did *not* end well
are remembered one by one (they are few) and all others were delivered.

The list of failures is bounded. What falls off it is answered with "its end is no longer known", never with success:
an error too many is allowed, a short success is not.

The agent keeps a fence for each (sender's life, destination's life). When it is started again, the destination tells it
what it knows (:class:`proxyd.wire.client.Resume`). That is less: which messages *were* delivered, the latest ones, and
which it still waits for. Messages of the sender to others leave gaps that look like failures, so of all else up to the
highest no end is known. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Set

MAX_FAILURES = 1024
"""Failures remembered for one sender and destination: a peer that is lost fails what was under way, some hundred."""
_NONE: frozenset[int] = frozenset()


class Fate(enum.Enum):
    """What became of a sequence that is not under way."""

    NEW = "new"
    AWAITED = "awaited"
    """Offered before, to an earlier life of the agent, and not complete: as good as new, and to be told as the same."""
    DELIVERED = "delivered"
    FAILED = "failed"
    FORGOTTEN = "forgotten"


class Fence:
    """One sender's life towards one destination's life."""

    __slots__ = ("_awaited", "_delivered", "_failed", "_forgotten_to", "highest")

    # A fence is kept for every pair of lives that there ever was, and few have seen a failure or a restart: without
    # their own (empty) containers they take an eighth.
    def __init__(self, highest: int = 0, failed: Iterable[int] = (), forgotten_to: int = 0) -> None:
        self.highest = highest
        """The highest sequence that was ever offered."""
        self._failed: dict[int, None] | None = dict.fromkeys(failed) or None
        self._forgotten_to = forgotten_to
        """Failures up to this sequence may be missing from the list."""
        self._delivered: set[int] | None = None
        self._awaited: set[int] | None = None

    @property
    def awaited(self) -> Set[int]:
        """What the destination waits for since the agent's earlier life."""
        return self._awaited or _NONE

    @property
    def failed(self) -> tuple[int, ...]:
        """Sequences that ended without delivery, as far as they are remembered."""
        return tuple(self._failed or ())

    @property
    def forgotten_to(self) -> int:
        """Up to here an end that isn't remembered may have been a failure."""
        return self._forgotten_to

    def learn(self, highest: int, delivered: Iterable[int], awaited: Iterable[int]) -> None:
        """What the destination knows from an earlier life of the agent."""
        self.highest = max(self.highest, highest)
        self._forgotten_to = max(self._forgotten_to, highest)
        self._delivered = {*(self._delivered or ()), *delivered}
        self._awaited = {*(self._awaited or ()), *awaited}

    def offered(self, sequence: int) -> None:
        """A message was offered; it is under way from here on."""
        self.highest = max(self.highest, sequence)
        self._no_longer_awaited(sequence)

    def ended_well(self, sequence: int) -> None:
        """A message that was under way was delivered. Only needed for those below what is known all the same."""
        if sequence <= self._forgotten_to:
            if self._delivered is None:
                self._delivered = set()
            self._delivered.add(sequence)

    def ended_badly(self, sequence: int) -> None:
        """A message that was under way failed, was refused or was taken back."""
        if self._failed is None:
            self._failed = {}
        self._failed[sequence] = None
        if self._delivered is not None:
            self._delivered.discard(sequence)
        self._no_longer_awaited(sequence)
        if len(self._failed) > MAX_FAILURES:
            first = next(iter(self._failed))
            del self._failed[first]
            self._forgotten_to = max(self._forgotten_to, first)

    def _no_longer_awaited(self, sequence: int) -> None:
        if self._awaited is not None:
            self._awaited.discard(sequence)
            if not self._awaited:
                self._awaited = None

    def fate(self, sequence: int) -> Fate:
        """Of a message that is not under way."""
        if sequence in self.awaited:
            return Fate.AWAITED
        if sequence > self.highest:
            return Fate.NEW
        if self._failed is not None and sequence in self._failed:
            return Fate.FAILED
        if self._delivered is not None and sequence in self._delivered:
            return Fate.DELIVERED
        return Fate.FORGOTTEN if sequence <= self._forgotten_to else Fate.DELIVERED
