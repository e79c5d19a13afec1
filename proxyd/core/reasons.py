"""Why a transfer waits, as a fact that is kept and not only as a sentence: how long for what.

Theory of operation
-------------------
Each waiting transfer has a clock (:class:`Waits`) that runs on exactly one :class:`Cause` from its request until its
last byte is granted; so the sums over all causes are the time that it waited, with nothing left over. The granter
switches the clock of those that could be next, whenever it decided (:func:`cause_of_block`): all others wait for their
turn, and that is where a clock begins. One comparison per decision is what it costs.

``SENDING`` is no waiting: part of the transfer is granted, its bytes leave, and the next slot follows in time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxyd.core.ids import AgentName
    from proxyd.core.lanes import Lane


class Cause(enum.IntEnum):
    """What a transfer waits for."""

    TURN = 0
    """Others go first: a more urgent class, or those that came before."""
    WINDOW = 1
    """As much as the path holds is granted and not delivered yet."""
    LANE = 2
    """The sender before has not left yet; also the start time of a grant that waits for that."""
    SILENT = 3
    """An agent that holds grants doesn't say what became of them (or this transfer's own agent doesn't report)."""
    RESERVED = 4
    """The rate is kept free for an agent whose session was lost."""
    SETTLING = 5
    """The coordinator was restarted: for one lease it grants only what agents' fallback leaves over."""
    POLICY = 6
    """A cap of its job or its link holds it back."""
    SENDING = 7
    """Not a wait: what is granted is leaving."""

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self]

    @property
    def label(self) -> str:
        """For programs: ``"turn"``."""
        return self.name.lower()


_WORDS = {
    Cause.TURN: "others went first",
    Cause.WINDOW: "the window was full: what was granted had not been delivered",
    Cause.LANE: "the sender before had not left",
    Cause.SILENT: "an agent with grants did not report",
    Cause.RESERVED: "the rate was kept free for an agent whose session was lost",
    Cause.SETTLING: "the coordinator had been restarted",
    Cause.POLICY: "a cap held it back",
    Cause.SENDING: "its granted bytes were leaving",
}
CAUSES = tuple(Cause)
BY_SOMEBODY = (Cause.LANE, Cause.SILENT, Cause.RESERVED)
"""Waits that a certain agent is the cause of."""


class Waits:
    """The clock of one transfer."""

    __slots__ = ("_by_cause", "_since_ns", "cause", "running", "who")

    def __init__(self) -> None:
        self.cause = Cause.TURN
        self.running = False
        self.who: AgentName | None = None
        """Which agent was last in the way; kept after it has left."""
        self._since_ns = 0
        self._by_cause = [0] * len(CAUSES)

    def begin(self, now_ns: int) -> None:
        """The transfer wants (more) grants. A running clock goes on."""
        if not self.running:
            self.running = True
            self.cause = Cause.TURN
            self._since_ns = now_ns

    def switch(self, cause: Cause, now_ns: int, who: AgentName | None = None) -> None:
        """From now on it waits for this, because of that agent."""
        if who is not None:
            self.who = who
        if self.running and cause is not self.cause:
            self._by_cause[self.cause] += max(0, now_ns - self._since_ns)
            self._since_ns = now_ns
            self.cause = cause

    def blame(self, cause: Cause, from_ns: int, now_ns: int, who: AgentName | None = None) -> None:
        """It has turned out that from ``from_ns`` until now it really waited for this."""
        if self.running:
            self.who = who or self.who
            begun_ns = min(max(from_ns, self._since_ns), now_ns)
            self._by_cause[self.cause] += begun_ns - self._since_ns
            self._by_cause[cause] += now_ns - begun_ns
            self._since_ns = now_ns

    def granted(self, whole: bool, now_ns: int, start_ns: int, before: AgentName | None = None) -> None:
        """Bytes were granted, to leave from ``start_ns`` on: until then the sender before is waited for.

        :param whole: nothing more is wanted: the clock stops.
        :param before: that sender.
        """
        self.who = before or self.who
        if not self.running:
            return
        self._by_cause[self.cause] += max(0, now_ns - self._since_ns)
        if start_ns > now_ns and self.cause is not Cause.SENDING:
            self._by_cause[Cause.LANE] += start_ns - now_ns
        self._since_ns = max(now_ns, start_ns)
        self.cause = Cause.SENDING
        self.running = not whole

    def end(self, now_ns: int) -> None:
        """The transfer is over, served or not."""
        if self.running:
            self._by_cause[self.cause] += max(0, now_ns - self._since_ns)
            self.running = False

    def at(self, now_ns: int) -> tuple[int, ...]:
        """Nanoseconds by :class:`Cause`, up to now."""
        sums = list(self._by_cause)
        if self.running:
            sums[self.cause] += max(0, now_ns - self._since_ns)
        return tuple(sums)


def cause_of_block(
    lane: Lane, others: Iterable[Lane], *, rate: int, begun: bool, settling: bool, now_ns: int
) -> tuple[Cause, AgentName | None]:
    """Why the planned ``lane`` got nothing now, and which agent is in the way.

    That a lane is silent can't be seen at a decision, because nothing happens then; it is found out when the time of
    its grants has run out (:meth:`Waits.blame`).

    :param others: busy lanes, itself perhaps among them.
    :param rate: what they leave for it; 0: nothing, so they are the cause; else it is a window.
    :param begun: the transfer in question was granted something before.
    """
    if lane.account.at_host_bytes > 0:
        # Its own agent still has bytes to send: of this transfer, or of the one before.
        return (Cause.SENDING, None) if begun else (Cause.LANE, lane.agent)
    if settling:
        return Cause.SETTLING, None
    if rate:
        return Cause.WINDOW, None
    last: Lane | None = None
    for other in others:
        if other is lane:
            continue
        if other.reserve_until_ns > now_ns:
            return Cause.RESERVED, other.agent
        if last is None or other.leaves_ns > last.leaves_ns:
            last = other
    return Cause.LANE, None if last is None else last.agent
