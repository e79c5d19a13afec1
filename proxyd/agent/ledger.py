"""Which granted payload bytes of a TCP stream have left this host, and which the peer's kernel has acknowledged.

The kernel speaks of positions in the byte stream (``SIOCOUTQ``: written and not acknowledged; unsent: written and not
yet sent once). The coordinator's window counts *granted payload*, and a stream also carries headers, unscheduled
chunks and chunks for nobody. So the ledger notes where in the stream each granted payload lies, and settles the
kernel's two positions against those notes. Pure: no socket, no clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Settled(NamedTuple):
    """Cumulative counts of one stream since it was opened; ``delivered <= left``."""

    granted_left_bytes: int
    granted_delivered_bytes: int


class _Mark:
    """A position that moves along the stream, and the granted payload behind it."""

    __slots__ = ("_ahead", "_passed_bytes", "total_bytes")

    def __init__(self) -> None:
        self._ahead: deque[tuple[int, int]] = deque()
        self._passed_bytes = 0
        self.total_bytes = 0

    def add(self, start: int, end: int) -> None:
        self._ahead.append((start, end))

    def move(self, position: int) -> int:
        ahead = self._ahead
        while ahead and ahead[0][1] <= position:
            start, end = ahead.popleft()
            self._passed_bytes += end - start
        partial = max(0, position - ahead[0][0]) if ahead else 0
        # Two kernel reads are not one snapshot; a count that went down would look like bytes coming back.
        self.total_bytes = max(self.total_bytes, self._passed_bytes + partial)
        return self.total_bytes

    @property
    def is_settled(self) -> bool:
        return not self._ahead


class StreamLedger:
    """Notes of one stream. ``written_bytes`` counts everything that the kernel took since the ledger began."""

    __slots__ = ("_delivered", "_left", "_noted_bytes", "written_bytes")

    def __init__(self) -> None:
        self.written_bytes = 0
        self._noted_bytes = 0
        self._left = _Mark()
        self._delivered = _Mark()

    def begin(self, header_bytes: int, payload_bytes: int, *, granted: bool) -> None:
        """A frame starts behind everything noted before it."""
        start = self._noted_bytes + header_bytes
        self._noted_bytes = start + payload_bytes
        if granted and payload_bytes:
            self._left.add(start, self._noted_bytes)
            self._delivered.add(start, self._noted_bytes)

    def wrote(self, nbytes: int) -> None:
        """The kernel took ``nbytes`` more."""
        self.written_bytes += nbytes

    @property
    def pending_bytes(self) -> int:
        """Noted and not yet taken by the kernel: the rest of the frame that is being written."""
        return self._noted_bytes - self.written_bytes

    def settle(self, unacked_bytes: int, unsent_bytes: int) -> Settled:
        """Read the kernel's positions. ``unacked_bytes`` includes ``unsent_bytes``, as SIOCOUTQ counts it."""
        delivered = self._delivered.move(self.written_bytes - unacked_bytes)
        left = self._left.move(self.written_bytes - unsent_bytes)
        return Settled(max(left, delivered), delivered)

    @property
    def is_settled(self) -> bool:
        """All granted payload has been acknowledged, as of the last :meth:`settle`."""
        return self._delivered.is_settled
