"""A token-bucket policer on the virtual clock: what exceeds the contract is dropped at once, nothing waits; pure.

Carriers and cloud gateways do this. The bucket fills at ``rate_bytes_per_s`` up to ``burst_bytes``; a packet passes if
the bucket holds its length. A flow may therefore run at line rate for a while (until the bucket is empty), and no queue
ever tells it that the rate is lower. (RFC 2697 calls what is dropped here "red"; there is no colour in between.)

Tokens are counted in byte-nanoseconds per second, so that no fraction is lost however often the clock is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxyd.wan.errors import WanError

NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class PolicerSpec:
    """A contract. Raises :class:`WanError` for one that lets nothing through."""

    rate_bytes_per_s: int
    burst_bytes: int

    def __post_init__(self) -> None:
        if self.rate_bytes_per_s <= 0 or self.burst_bytes <= 0:
            raise WanError(
                f"a policer needs a rate and a burst > 0, got {self.rate_bytes_per_s} bytes/s and {self.burst_bytes} "
                "bytes; give a burst of at least one packet"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"rate_bytes_per_s": self.rate_bytes_per_s, "burst_bytes": self.burst_bytes}


class Policer:
    """The bucket; full at first. Time must not decrease."""

    __slots__ = ("_full", "_level", "_rate_bytes_per_s", "_seen_ns")

    def __init__(self, spec: PolicerSpec, now_ns: int) -> None:
        self._rate_bytes_per_s = spec.rate_bytes_per_s
        self._full = self._level = spec.burst_bytes * NS_PER_S
        self._seen_ns = now_ns

    def admits(self, length_bytes: int, now_ns: int) -> bool:
        """Whether a packet passes; takes its tokens if it does."""
        level = min(self._full, self._level + (now_ns - self._seen_ns) * self._rate_bytes_per_s)
        self._seen_ns = now_ns
        cost = length_bytes * NS_PER_S
        if level < cost:
            self._level = level
            return False
        self._level = level - cost
        return True
