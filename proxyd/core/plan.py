"""Who should be sending on a link now, each at which rate, and why: the policy of the grants.

:class:`Planner` is asked with the pace that may be granted in all and answers with *shares*, most urgent first. It
decides from the queue alone; whether a share can be granted already (the lane before it must have left, the windows
must have room) is the granter's business.

* ``pipeline`` and ``bulk``: one agent at a time, in the order of their transfers' arrival, at the whole pace. Only
  where an agent has shown that it can't use it all, the next in line gets the rest, and so on.
* ``sync``: all waiting agents at once, at equal shares (a barrier ends with its last member, and 1/N needs no
  hand-over).
* An urgent class takes the whole link from the others at the next slot; 5 % of the bytes go to the longest waiter.
"""

from __future__ import annotations

import dataclasses

from proxyd.core.allocation import CLASSES, LinkQueue, Waiting, fair_shares
from proxyd.core.bandwidth import NANOS
from proxyd.core.lanes import Lane
from proxyd.wire.envelope import TrafficClass

STARVATION_SHARE = 20
"""One byte in this many goes to the longest waiter."""
LEAST_SHARE = 20
"""A lane that would get less than 1/20 of the pace isn't worth a hand-over."""


@dataclasses.dataclass(slots=True)
class Share:
    """One line of the plan."""

    lane: Lane
    traffic: TrafficClass
    rate_bytes_per_s: int
    reason: str


class Planner:
    """The plan of one link.

    :param queue: its waiting transfers.
    :param lanes: its lanes, by session; those of all waiting transfers are there.
    """

    def __init__(self, queue: LinkQueue, lanes: dict[int, Lane]) -> None:
        self.turn: Waiting | None = None
        """The longest waiter, while it has its turn."""
        self.starvation_turns = 0
        self._queue = queue
        self._lanes = lanes
        self._turn_left_bytes = 0
        self._credit_bytes = 0

    def granted(self, waiting: Waiting, nbytes: int) -> None:
        """Bytes were granted: they count against the turn, or towards the next one."""
        if self.turn is waiting:
            self._turn_left_bytes -= nbytes
        elif self._queue.waits_below(waiting.traffic):
            # Only a lower class can starve: within a class it is first come, first served.
            self._credit_bytes += nbytes // STARVATION_SHARE

    def plan(self, pace: int, in_flight_ns: int, chunk_bytes: int, turn_bytes: int, now_ns: int) -> list[Share]:
        """Shares of ``pace`` (payload bytes/s), whose sum never exceeds it.

        :param in_flight_ns: how long a byte is outstanding; with ``chunk_bytes`` it says how many can share.
        :param turn_bytes: a turn of the longest waiter: long enough that the hand-overs around it cost little.
        """
        left = pace
        plan: list[Share] = []
        turn = self._turn_of_the_oldest(turn_bytes, now_ns)
        if turn is not None:
            lane = self._lanes[turn.session]
            rate = min(left, lane.ceiling_bytes_per_s or left)
            return [Share(lane, turn.traffic, rate, "longest waiter: 5 % of the link is for those")]
        taken: set[int] = set()
        for traffic, queue in zip(CLASSES, self._queue.classes, strict=True):
            if not queue.count:
                continue
            if traffic is TrafficClass.SYNC:
                most = max(1, left * in_flight_ns // NANOS // chunk_bytes)
                left = self._plan_all_at_once(left, most, plan, taken, now_ns)
            else:
                left = self._plan_one_at_a_time(traffic, left, pace, plan, taken, now_ns)
            if left * LEAST_SHARE < pace:
                break
        return plan

    def _plan_one_at_a_time(
        self, traffic: TrafficClass, left: int, pace: int, plan: list[Share], taken: set[int], now_ns: int
    ) -> int:
        queue = self._queue.classes[traffic]
        first = queue.first()
        if first is None:
            return left
        lane = self._lanes[first.session]
        if not lane.ceiling_bytes_per_s and now_ns >= lane.silent_until_ns and first.session not in taken:
            plan.append(Share(lane, traffic, left, _FIRST[traffic]))  # the usual case, without a walk over the others
            taken.add(first.session)
            return 0
        for waiting in queue.in_order():
            if left * LEAST_SHARE < pace:
                break
            lane = self._lanes[waiting.session]
            if waiting.session in taken or now_ns < lane.silent_until_ns:
                continue
            rate = min(left, lane.ceiling_bytes_per_s or left)
            reason = _FIRST[traffic] if not plan else _BESIDE[traffic]
            plan.append(Share(lane, traffic, rate, reason))
            taken.add(waiting.session)
            left -= rate
        return left

    def _plan_all_at_once(self, left: int, most: int, plan: list[Share], taken: set[int], now_ns: int) -> int:
        queue = self._queue.classes[TrafficClass.SYNC]
        # A lane that can't have one chunk in flight is none: more members than that take turns.
        sessions = [s for s in queue.sessions() if s not in taken and now_ns >= self._lanes[s].silent_until_ns]
        if len(sessions) > most:
            firsts = [waiting for session in sessions if (waiting := queue.head(session)) is not None]
            firsts.sort(key=lambda waiting: waiting.order)
            sessions = sorted(waiting.session for waiting in firsts[:most])
        lanes = [self._lanes[session] for session in sessions]
        shares = fair_shares(left, [lane.ceiling_bytes_per_s or left for lane in lanes])
        reason = f"sync: {len(lanes)} agents at once, at equal shares"
        for lane, rate in zip(lanes, shares, strict=True):
            plan.append(Share(lane, TrafficClass.SYNC, rate, reason))
            taken.add(lane.session)
        return left - sum(shares)

    def _turn_of_the_oldest(self, turn_bytes: int, now_ns: int) -> Waiting | None:
        """The longest waiter, when the 5 % that it is owed have become a turn."""
        turn = self.turn
        if turn is not None:
            if turn.queued and self._turn_left_bytes > 0 and now_ns >= self._lanes[turn.session].silent_until_ns:
                return turn
            self.turn = None
        if self._credit_bytes < turn_bytes:
            return None
        oldest = self._queue.oldest(lambda session: now_ns >= self._lanes[session].silent_until_ns)
        if oldest is None:
            return None
        self._credit_bytes = 0
        self.turn = oldest
        self._turn_left_bytes = turn_bytes
        self.starvation_turns += 1
        return oldest


_FIRST = {
    TrafficClass.PIPELINE: "pipeline: first in line, whole link",
    TrafficClass.BULK: "bulk: nothing more urgent waits, first in line",
}
_BESIDE = {
    TrafficClass.PIPELINE: "pipeline: next in line, takes what the one before can't use",
    TrafficClass.BULK: "bulk: takes what is left over",
}
