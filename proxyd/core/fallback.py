"""What each agent may send by itself should the coordinator fall silent.

Over all agents of a link's source site what they may have heard sums to at most 0.8 of the estimate, at every moment:
when an agent joins, the others' rates shrink with this beat, and the newcomer's grows with the first one after they
have answered it. A coordinator that dies in between must not leave more behind than the link carries, and beats get
lost. So for each agent there are two figures: the rate that it was told last, and the highest that it *may hold*,
which is that of any beat since the latest one that it has answered. For the same reason the rate of one that can't be
reached stays as it was: it doesn't hear of another.

An estimate that falls takes nothing back of what was handed out: the agents hear of it with the beat that shares anew,
and not before. The total falls with that beat too. Agents keep it beside their rates, and should this coordinator end,
its next life reckons from both what those may send that are not back yet: a total that is younger than the rates would
hide some of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

FALLBACK_SHARE = (4, 5)
"""Numerator and denominator of 0.8."""


class FallbackRates:
    """Rates of one link, by session."""

    __slots__ = ("_held", "_kept", "_next_total_bytes_per_s", "_rates", "_settled", "total_bytes_per_s")

    def __init__(self, bottleneck_bytes_per_s: int) -> None:
        self.total_bytes_per_s = bottleneck_bytes_per_s * FALLBACK_SHARE[0] // FALLBACK_SHARE[1]
        """What the rates were shared under."""
        self._next_total_bytes_per_s = self.total_bytes_per_s
        self._rates: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        """Of those that can't be reached: what they may hold."""
        self._held: dict[int, list[tuple[int, int]]] = {}
        """(number of the beat, rate told with it): the latest one that a session has answered, and all since."""
        self._settled: tuple[list[int], int] | None = None
        """Members and reserve for which everybody has the full share: nothing to do while they stay."""

    def of(self, session: int) -> int:
        """What a session was last given; 0 when nothing."""
        return self._rates.get(session, 0)

    def may_hold(self, session: int) -> int:
        """The highest rate at which its agent may go on, as far as is known."""
        return max((rate for _, rate in self._held.get(session, ())), default=0)

    def heard(self, session: int, beat: int) -> None:
        """A session has answered a beat: it holds none of the rates before that one's any more."""
        held = self._held.get(session)
        while held and len(held) > 1 and held[1][0] <= beat:
            del held[0]

    @property
    def sum_bytes_per_s(self) -> int:
        """Of all sessions that can be reached; never above ``total_bytes_per_s``."""
        return sum(self._rates.values())

    def problem(self) -> str:
        """What must always hold; "" when it does: those that can be reached were told no more than what the others
        leave of the total."""
        kept = sum(self._kept.values())
        if self.sum_bytes_per_s > max(0, self.total_bytes_per_s - kept):
            return (
                f"fallback rates sum to {self.sum_bytes_per_s} bytes/s, {kept} can't be reached, "
                f"{self.total_bytes_per_s} are theirs"
            )
        return ""

    def rebase(self, bottleneck_bytes_per_s: int) -> None:
        """The estimate moved: with the next :meth:`share` so do the rates, once it has moved by a sixteenth. A total
        that falls waits for that too, unless it still holds all that was handed out."""
        total = bottleneck_bytes_per_s * FALLBACK_SHARE[0] // FALLBACK_SHARE[1]
        if abs(total - self.total_bytes_per_s) * 16 > self.total_bytes_per_s:
            self._next_total_bytes_per_s = total
            self._settled = None
            if total >= self.sum_bytes_per_s + sum(self._kept.values()):
                self.total_bytes_per_s = total
        else:
            self._next_total_bytes_per_s = self.total_bytes_per_s

    def carried(self, session: int, rate_bytes_per_s: int) -> None:
        """An earlier life, or an earlier session, left a session's agent this rate: it keeps it until the next
        :meth:`share`."""
        if rate_bytes_per_s > self.may_hold(session):
            self._held.setdefault(session, []).insert(0, (0, rate_bytes_per_s))
        may_hold = sum(self.may_hold(other) for other in self._held if other != session)
        others = max(may_hold, self.sum_bytes_per_s - self.of(session) + sum(self._kept.values()))
        if (rate := max(0, min(rate_bytes_per_s, self.total_bytes_per_s - others))) > self.of(session):
            self._rates[session] = rate
            self._settled = None

    def share(
        self, sessions: Iterable[int], reserved_bytes_per_s: int = 0, keep: Collection[int] = (), *, beat: int = 0
    ) -> None:
        """Share anew among ``sessions``; ``beat`` tells them.

        :param reserved_bytes_per_s: stays with agents that have no session, and with those of ``keep``.
        :param keep: sessions whose agents can't be reached.
        """
        self.total_bytes_per_s = self._next_total_bytes_per_s
        members = sorted(session for session in sessions if session not in keep)
        if self._settled == (members, reserved_bytes_per_s):
            return
        held = {session: self.may_hold(session) for session in (*members, *keep)}
        self._held = {session: self._held.get(session, []) for session in held}
        self._kept = {session: held[session] for session in keep}
        total = max(0, self.total_bytes_per_s - max(reserved_bytes_per_s, sum(self._kept.values())))
        target = total // len(members) if members else 0
        self._rates = {session: min(held[session], target) for session in members}
        left = total - sum(held[session] for session in members)
        for session in members:
            more = min(target - self._rates[session], left)
            if more > 0 and held[session] < target:
                self._rates[session] += more
                left -= more
            if (rate := self._rates[session]) and (not self._held[session] or self._held[session][-1][1] != rate):
                self._held[session].append((beat, rate))
        done = not self._kept and all(self._rates[session] == target for session in members)
        self._settled = (members, reserved_bytes_per_s) if done else None
