"""What is kept free of a link for agents that may be sending by themselves.

Such an agent is at its fallback rate (or at what the kernel still holds of an earlier life's grants), and can't be told
otherwise. As long as that may be so its lane counts as busy at that rate, and others are granted the rest:

- its session has ended: for one lease, and on for as long as others see it (:mod:`proxyd.core.absent`);
- its session stands and nothing is heard: until something is;
- it was never here in this life: what :mod:`proxyd.core.takeover` reckons.
"""

from __future__ import annotations

from proxyd.core.bandwidth import NANOS
from proxyd.core.ids import AgentName
from proxyd.core.lanes import Lane

LEAST_SHARE = 6
"""All fallback rates are at most 0.8 of a link, and the pace is 0.98 of it or less: a sixth is always free."""
SLICE_NS = 20_000_000
"""What it has begun by itself an agent ends: a slot of so much link time."""


class Reserves:
    """Those of one link.

    :param active: its lanes that hold or reserve something, by session.
    """

    def __init__(self, active: dict[int, Lane], lease_ns: int, settle_until_ns: int) -> None:
        self._active = active
        self._lease_ns = lease_ns
        self.settle_until_ns = settle_until_ns
        """Agents that are not back yet may send by themselves until then."""
        self.absent_bytes_per_s: int | None = None
        """So much together; None: nobody has said."""

    def settle(self, until_ns: int) -> None:
        """An earlier life's agents are to come back until then."""
        self.settle_until_ns = until_ns

    def returned(self, absent_bytes_per_s: int) -> None:
        """One of them is back; the others may send so much."""
        self.absent_bytes_per_s = absent_bytes_per_s
        if not absent_bytes_per_s:
            self.settle_until_ns = 0

    def left_of(self, pace_bytes_per_s: int, now_ns: int) -> int:
        """What agents that are not back yet leave of the pace."""
        if now_ns >= self.settle_until_ns:
            return pace_bytes_per_s
        least = max(1, pace_bytes_per_s // LEAST_SHARE)
        absent = self.absent_bytes_per_s
        return least if absent is None else max(least, pace_bytes_per_s - absent)

    def total_bytes_per_s(self, now_ns: int) -> int:
        """What is kept free for agents that have been here."""
        return sum(lane.reserve_bytes_per_s for lane in self._active.values() if lane.reserve_until_ns > now_ns)

    def keep(self, lane: Lane, rate_bytes_per_s: int, until_ns: int) -> None:
        """A lane may go on at this rate until then: should it have been about to leave, it isn't any more."""
        lane.reserve_bytes_per_s, lane.reserve_until_ns = rate_bytes_per_s, until_ns
        lane.leaving = lane.harmless = False
        self._active[lane.session] = lane

    def carried(self, lane: Lane, unsent_bytes: int, rate_bytes_per_s: int, now_ns: int) -> None:
        """What its kernel holds of an earlier life's grants leaves at this rate."""
        if unsent_bytes > 0 and rate_bytes_per_s > 0:
            takes_ns = min(unsent_bytes * NANOS // rate_bytes_per_s, self._lease_ns)
            self.keep(lane, rate_bytes_per_s, now_ns + takes_ns)

    def agent_returned(self, agent: AgentName) -> int:
        """An agent has a session again: it sends under grants, so its reserve is free. Answers how much that was."""
        free = 0
        for lane in self._active.values():
            if lane.ended and lane.agent == agent:
                free = max(free, lane.reserve_bytes_per_s)
                lane.reserve_until_ns = 0
        return free

    def agent_seen(self, agent: AgentName, now_ns: int) -> None:
        """An agent without a session is alive: it goes on by itself."""
        for lane in self._active.values():
            if lane.ended and lane.agent == agent and lane.reserve_until_ns > now_ns:
                lane.reserve_until_ns = now_ns + self._lease_ns

    def out_of_reach(self, lane: Lane, rate_bytes_per_s: int, now_ns: int) -> None:
        """Nothing is heard of an agent whose session stands: it may send by itself, and no grant reaches it."""
        lane.out_of_reach = True
        self.keep(lane, rate_bytes_per_s, now_ns + self._lease_ns)
        lane.silent_until_ns = max(lane.silent_until_ns, lane.reserve_until_ns)

    def in_reach(self, lane: Lane, now_ns: int) -> None:
        """It has heard us again, and sends under grants from there on."""
        if lane.out_of_reach:
            lane.out_of_reach = False
            lane.silent_until_ns = 0
            lane.reserve_until_ns = now_ns + SLICE_NS
