"""What is kept of one job on one link: its place in the weighted order, what its floor owes it, what its cap leaves it.

**Weights** are start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing", SIGCOMM 1996): in each traffic
class a job has a *tag*, the bytes that it was granted divided by its weight, and the lowest tag is served next. A job
that comes (back) starts at the class's virtual time, so that nobody saves up while idle; one that can't use what it is
offered is never more than some turns behind the next one, so that nobody saves up while held back either.

**Floors** are token buckets that fill while the job has something to send. What is served from them isn't charged to
the tag: weights split what floors leave.

**Caps** are token buckets too. An empty one takes the job out of the order until it holds enough again.
"""

from __future__ import annotations

from proxyd.core.bandwidth import NANOS
from proxyd.core.policy import JobPolicy

CLASS_COUNT = 3
FLOOR_SPAN_NS = 250_000_000
"""A floor is kept over stretches of about this length."""
CAP_SPAN_NS = 100_000_000
"""A cap is kept over stretches of about this length (or over one chunk, where that is longer)."""


class JobAccount:
    """One job on one link, over all traffic classes."""

    __slots__ = (
        "_cap_ns",
        "_floor_ns",
        "cap_bytes_per_s",
        "cap_left_bytes",
        "count",
        "floor_bytes_per_s",
        "floor_owed_bytes",
        "granted_bytes",
        "name",
        "throttled",
        "weight",
    )

    def __init__(self, name: str, policy: JobPolicy) -> None:
        self.name = name
        self.weight = policy.weight
        self.floor_bytes_per_s = policy.floor_bytes_per_s
        self.cap_bytes_per_s = policy.cap_bytes_per_s
        self.count = 0
        """Its waiting transfers, in all classes."""
        self.granted_bytes = 0
        self.floor_owed_bytes = 0
        self._floor_ns: int | None = None
        self.cap_left_bytes = 0
        self._cap_ns: int | None = None
        self.throttled = False
        """Its cap is used up: it is in no order until it was released."""

    def set_policy(self, policy: JobPolicy) -> None:
        """Another weight, floor or cap holds from now on; what was saved up under the old ones counts no more."""
        if policy.floor_bytes_per_s != self.floor_bytes_per_s:
            self.floor_bytes_per_s = policy.floor_bytes_per_s
            self.floor_owed_bytes = 0
            self._floor_ns = None
        if policy.cap_bytes_per_s != self.cap_bytes_per_s:
            self.cap_bytes_per_s = policy.cap_bytes_per_s
            self._cap_ns = None
        self.weight = policy.weight

    # ----------------------------------------------------------------------------------------------------------- floor

    def idle(self) -> None:
        """It has nothing to send: its floor promises nothing meanwhile."""
        self._floor_ns = None

    def floor_turn_bytes(self, turn_bytes: int, chunk_bytes: int) -> int:
        """What it must be owed to get a turn: worth the hand-over, but not long in coming for a small floor."""
        return max(chunk_bytes, min(turn_bytes, self.floor_bytes_per_s * FLOOR_SPAN_NS // NANOS))

    def owed(self, now_ns: int, most_bytes: int) -> int:
        """What its floor owes it by now, at most ``most_bytes``."""
        if self._floor_ns is not None:
            gained = self.floor_bytes_per_s * (now_ns - self._floor_ns) // NANOS
            if not gained:
                return self.floor_owed_bytes  # what less than a byte took isn't lost
            self.floor_owed_bytes = min(most_bytes, self.floor_owed_bytes + gained)
        self._floor_ns = now_ns
        return self.floor_owed_bytes

    # ------------------------------------------------------------------------------------------------------------- cap

    def refill(self, now_ns: int, chunk_bytes: int) -> int:
        """What its cap leaves it now; at most a chunk, or what it may send in ``CAP_SPAN_NS``."""
        most = max(chunk_bytes, self.cap_bytes_per_s * CAP_SPAN_NS // NANOS)
        if self._cap_ns is None:
            self.cap_left_bytes = most
        else:
            gained = self.cap_bytes_per_s * (now_ns - self._cap_ns) // NANOS
            if not gained:
                return self.cap_left_bytes
            self.cap_left_bytes = min(most, self.cap_left_bytes + gained)
        self._cap_ns = now_ns
        return self.cap_left_bytes

    def ready_ns(self, now_ns: int, chunk_bytes: int) -> int:
        """When a used-up cap leaves enough again: half of what it can hold, and a chunk at least."""
        enough = max(chunk_bytes, self.cap_bytes_per_s * CAP_SPAN_NS // NANOS // 2)
        missing = max(0, enough - self.cap_left_bytes)
        return now_ns + -(-missing * NANOS // self.cap_bytes_per_s)
