"""What each agent may send by itself should the coordinator fall silent.

Over all agents of a link's source site the rates sum to at most 0.8 of the estimate, at every moment: when an agent
joins, the others' rates shrink with this beat and the newcomer's grows with the next, because a coordinator that dies
in between must not leave more behind than the link carries.
"""

from __future__ import annotations

from collections.abc import Iterable

FALLBACK_SHARE = (4, 5)
"""Numerator and denominator of 0.8."""


class FallbackRates:
    """Rates of one link, by session."""

    __slots__ = ("_rates", "_settled", "total_bytes_per_s")

    def __init__(self, bottleneck_bytes_per_s: int) -> None:
        self.total_bytes_per_s = bottleneck_bytes_per_s * FALLBACK_SHARE[0] // FALLBACK_SHARE[1]
        self._rates: dict[int, int] = {}
        self._settled: tuple[list[int], int] | None = None
        """Members and reserve for which everybody has the full share: nothing to do while they stay."""

    def of(self, session: int) -> int:
        """What a session was last given; 0 when nothing."""
        return self._rates.get(session, 0)

    @property
    def sum_bytes_per_s(self) -> int:
        """Of all sessions; never above ``total_bytes_per_s``."""
        return sum(self._rates.values())

    def rebase(self, bottleneck_bytes_per_s: int) -> None:
        """The estimate moved: with the next :meth:`share` so do the rates, once it has moved by a sixteenth."""
        total = bottleneck_bytes_per_s * FALLBACK_SHARE[0] // FALLBACK_SHARE[1]
        if abs(total - self.total_bytes_per_s) * 16 > self.total_bytes_per_s:
            self.total_bytes_per_s = total
            self._settled = None

    def share(self, sessions: Iterable[int], reserved_bytes_per_s: int = 0) -> None:
        """Share anew among ``sessions``; ``reserved_bytes_per_s`` stay with agents whose session was lost."""
        members = sorted(sessions)
        if self._settled == (members, reserved_bytes_per_s):
            return
        total = max(0, self.total_bytes_per_s - reserved_bytes_per_s)
        target = total // len(members) if members else 0
        before = {session: self._rates.get(session, 0) for session in members}
        self._rates = {session: min(rate, target) for session, rate in before.items()}
        # A shrinking member may go on at its old rate until this beat has reached it.
        left = total - sum(before.values())
        for session in members:
            more = min(target - self._rates[session], left)
            if more > 0 and before[session] < target:
                self._rates[session] += more
                left -= more
        done = all(self._rates[session] == target for session in members)
        self._settled = (members, reserved_bytes_per_s) if done else None
