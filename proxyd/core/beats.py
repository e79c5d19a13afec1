"""Beats and their echoes: when which site is told of its links next, how far each agent is, and who is not heard.

Every agent hears a beat at least once in ``beat_ns``. All at the same moment would be simplest, and would keep whoever
asks just then waiting: a beat for each of some hundred agents takes a coordinator ten milliseconds and more. So sites
take turns, evenly spread over a beat's time. The agents of one site are told together, since they share its links.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections import deque

from proxyd.core.allocation import Waiting
from proxyd.core.coordinator_status import AgentStatus
from proxyd.core.ids import AgentName, TransferId
from proxyd.core.messages import AgentHello, Echo

MAX_BEATS_UNDER_WAY = 4096
"""Echoes of older beats count for nothing."""
ECHOES = 64  # an agent is as far as the least of these: ten seconds, since a busy host's are late for some
OUT_OF_REACH_NS = 450_000_000
"""Since the latest beat was sent that an agent has answered. One that has heard nothing for 0.5 s goes on by itself."""


@dataclasses.dataclass(slots=True)
class AgentSession:
    """One agent's open control stream, as its coordinator sees it."""

    number: int
    hello: AgentHello
    agent: AgentName
    heard_ns: int
    transfers: dict[TransferId, Waiting] = dataclasses.field(default_factory=dict)
    answered_ns: int = -1
    """When the latest beat was sent that it has answered; -1: none yet, so silence says nothing. Not when it was heard:
    it may reach us and not we it."""
    out_of_reach: bool = False
    """It may have heard nothing for so long that it sends by itself."""
    control_rtt_ns: int = 0
    """The least of the latest echoes of beats; 0: not measured yet."""
    echoes_ns: deque[int] = dataclasses.field(default_factory=lambda: deque(maxlen=ECHOES))

    def look(self, now_ns: int) -> bool:
        """Whether it is out of reach now."""
        unanswered_ns = now_ns - self.answered_ns - self.control_rtt_ns
        self.out_of_reach = self.answered_ns >= 0 and unanswered_ns >= OUT_OF_REACH_NS
        return self.out_of_reach

    def status(self, endpoints: int, now_ns: int) -> AgentStatus:
        """As plain values; ``endpoints``: how many it has registered."""
        return AgentStatus(
            agent=self.agent,
            session=self.number,
            incarnation=self.hello.incarnation,
            data_address=self.hello.data_address,
            endpoints=endpoints,
            transfers=len(self.transfers),
            heard_ago_ns=now_ns - self.heard_ns,
        )


class Beats:
    """Beats under way, by number."""

    def __init__(self) -> None:
        self._last = 0
        self._sent_ns: dict[int, int] = {}

    def next(self, now_ns: int) -> int:
        """The number of a beat that goes out now."""
        self._last += 1
        self._sent_ns[self._last] = now_ns
        self._sent_ns.pop(self._last - MAX_BEATS_UNDER_WAY, None)
        return self._last

    def echoed(self, session: AgentSession, echo: Echo, now_ns: int) -> bool:
        """A beat came back: how far is this agent? False: that beat means nothing (any more)."""
        sent_ns = self._sent_ns.get(echo.number)
        if sent_ns is None:
            return False
        session.answered_ns = max(session.answered_ns, sent_ns)
        # The least of the latest ones: a host that was held up for a moment is no further away.
        session.echoes_ns.append(max(0, now_ns - sent_ns - max(0, echo.held_ns)))
        session.control_rtt_ns = min(session.echoes_ns)
        return True


class BeatTurns:
    """The turns of all sites; none before :meth:`start`."""

    def __init__(self, beat_ns: int) -> None:
        self._beat_ns = beat_ns
        self._sites: list[str] = []
        self._due_ns: dict[str, int] = {}
        self._begun_ns = 0
        self.running = False

    def join(self, site: str) -> None:
        """A site (more than once is harmless): its first turn is at once."""
        if site not in self._due_ns:
            insort(self._sites, site)
            self._due_ns[site] = 0

    def start(self, now_ns: int) -> None:
        """Somebody listens from now on: everybody's turn is now."""
        self.running = True
        self._begun_ns = now_ns
        for site in self._sites:
            self._due_ns[site] = now_ns

    def stop(self) -> None:
        """Nobody listens any more."""
        self.running = False

    def hurry(self, site: str) -> None:
        """There is news for a site: its turn is at once, whatever the time."""
        self._due_ns[site] = 0

    @property
    def next_ns(self) -> int | None:
        """When the next turn is due."""
        return min(self._due_ns.values()) if self.running and self._due_ns else None

    def take(self, now_ns: int) -> list[str]:
        """Sites whose turn it is, sorted; their next one comes within a beat's time."""
        if not self.running:
            return []
        due = [site for site in self._sites if self._due_ns[site] <= now_ns]
        for site in due:
            phase_ns = self._begun_ns + self._beat_ns * bisect_left(self._sites, site) // len(self._sites)
            self._due_ns[site] = phase_ns + ((now_ns - phase_ns) // self._beat_ns + 1) * self._beat_ns
        return due
