"""Who should be sending on a link now, each at which rate, and why: the policy of the grants.

:class:`Planner` is asked with the pace that may be granted in all and answers with *shares*, most urgent first. It
decides from the queue alone; whether a share can be granted already (the lane before it must have left, the windows
must have room) is the granter's business.

The order:

1. the **longest waiter**, when the part of the bytes that is kept for those (5 %) has become a turn;
2. a job that its **floor** owes a turn, whatever its class;
3. the **classes**, pipeline before sync before bulk: an urgent one takes the whole link at the next slot;
4. within a class the **jobs** by weight, in turns; within a job the earliest **deadline**, then first come.

A class is served *one at a time* (pipeline, bulk): the whole pace to one agent, the rest to the next in line only where
an agent has shown that it can't use it all. Agents so far from the coordinator that a hand-over would be late by a
quarter slot get the link together, up to four. Or *all at once* (sync): all waiting agents at equal shares, jobs by
their weights (a barrier ends with its last member, and 1/N needs no hand-over).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from proxyd.core.allocation import (
    CLASSES,
    NO_DEADLINE_NS,
    ClassQueue,
    JobQueue,
    LinkQueue,
    Waiting,
    fair_shares,
    weighted_shares,
)
from proxyd.core.bandwidth import NANOS
from proxyd.core.jobs import JobAccount
from proxyd.core.lanes import Lane
from proxyd.core.policy import DEFAULT_FIFO_SHARE, Policy, Sharing
from proxyd.core.units import format_duration, format_rate, format_size
from proxyd.core.window import SLOT_NS
from proxyd.wire.envelope import TrafficClass

LEAST_SHARE = 20
"""A lane that would get less than 1/20 of the pace isn't worth a hand-over."""
MOST_TOGETHER = 4
"""So many far agents share a link: when one of them ends unnoticed, a quarter is lost for a control round trip."""
FAR_NS = SLOT_NS // 2
"""Half a slot. Slots that are shorter because a buffer is shallow don't make near agents far: the lead time knows
the buffer."""
QUANTUM_NS = 60_000_000
"""A turn of the heaviest job, in link time: a hand-over costs a millisecond or two. Over 10 s a job has its weight
within about one turn. What is urgent doesn't wait for the end of one."""
MOST_BEHIND = 4
"""Turns that a job can be behind those that are served beside it."""
LEAST_QUANTUM = 4
"""A light job's turn is shorter than a heavy one's, but not by more than this: hand-overs would eat it."""


@dataclasses.dataclass(slots=True)
class Share:
    """One line of the plan."""

    lane: Lane
    traffic: TrafficClass
    rate_bytes_per_s: int
    reason: str
    waiting: Waiting
    """Whose turn it is on this lane. Good until something is granted or comes."""
    limit_bytes: int = 0
    """Its job's cap leaves no more than this now; 0: no limit."""


class Planner:
    """The plan of one link.

    :param queue: its waiting transfers.
    :param lanes: its lanes, by session; those of all waiting transfers are there.
    """

    def __init__(self, queue: LinkQueue, lanes: dict[int, Lane]) -> None:
        self.turn: Waiting | None = None
        """The longest waiter, while it has its turn."""
        self.starvation_turns = 0
        self.fifo_share = DEFAULT_FIFO_SHARE
        self._queue = queue
        self._lanes = lanes
        self._sharing = tuple(queue.policy.sharing_of(traffic) for traffic in CLASSES)
        self._turn_left_bytes = 0
        self._credit_bytes = 0.0
        self._floor_turn: JobAccount | None = None
        self._floor_ns = 0
        """No floor owes a turn before."""
        self._now_ns = 0
        self._chunk_bytes = 1
        self._turn_bytes = self._quantum_bytes = 1
        self._far_ns = 0
        self._whole: tuple[int, Share, ClassQueue] | None = None
        """The latest plan, when it was the usual one: the queue's version, and the whole link for the first in line of
        a class whose jobs take turns."""

    def set_policy(self, policy: Policy, fifo_share: float) -> None:
        """Other rules hold from now on."""
        self._queue.set_policy(policy)
        self._sharing = tuple(policy.sharing_of(traffic) for traffic in CLASSES)
        self.fifo_share = fifo_share
        self._floor_turn = None

    @staticmethod
    def held_back(waiting: Waiting) -> bool:
        """Its job's cap is used up: it waits for that, not for its turn."""
        return waiting.home is not None and waiting.home.account.throttled

    def next_deadline_ns(self) -> int | None:
        """When the plan changes although nothing happens: a used-up cap leaves something again."""
        return self._queue.release_ns

    def granted(self, waiting: Waiting, nbytes: int) -> None:
        """Bytes were granted: they count against turn, floor, weight and cap."""
        queue, home = self._queue, waiting.home
        if self.turn is waiting:
            self._turn_left_bytes -= nbytes
        elif home is not None and (queue.waits_below(waiting.traffic) or 0 < home.deadlines < home.count):
            # Only a lower class can starve, and who has no deadline beside those who have one: jobs have weights.
            self._credit_bytes += nbytes * self.fifo_share / (1 - self.fifo_share)
        elif self._credit_bytes:
            # The lowest of all gets something as it is: as far as that goes it isn't starving.
            self._credit_bytes = max(0.0, self._credit_bytes - nbytes)
        if home is None:
            return
        account = home.account
        account.granted_bytes += nbytes
        if account is self._floor_turn:
            account.floor_owed_bytes -= nbytes
        else:
            queue.classes[waiting.traffic].charge(home, nbytes)
        if account.cap_bytes_per_s:
            account.cap_left_bytes -= nbytes
            if account.cap_left_bytes < self._chunk_bytes and not account.throttled:
                ready_ns = account.ready_ns(self._now_ns, self._chunk_bytes)
                queue.throttle(account, ready_ns)
                waiting.reason = (
                    f"job {account.name}: its cap of {format_rate(account.cap_bytes_per_s)} is used up for "
                    f"{format_duration(ready_ns - self._now_ns)}"
                )

    def plan(
        self, pace: int, in_flight_ns: int, chunk_bytes: int, turn_bytes: int, now_ns: int, far_ns: int = FAR_NS
    ) -> list[Share]:
        """Shares of ``pace`` (payload bytes/s), whose sum never exceeds it.

        :param in_flight_ns: how long a byte is outstanding; with ``chunk_bytes`` it says how many can share.
        :param turn_bytes: a turn of the longest waiter: long enough that the hand-overs around it cost little.
        :param far_ns: a control round trip above this is too long for hand-overs; 0: none is.
        """
        queue = self._queue
        self._now_ns, self._chunk_bytes, self._turn_bytes, self._far_ns = now_ns, chunk_bytes, turn_bytes, far_ns
        quantum_bytes = pace * QUANTUM_NS // NANOS
        self._quantum_bytes = quantum_bytes if quantum_bytes > turn_bytes else turn_bytes
        if queue.throttled:
            queue.release(now_ns)
        if self._whole is not None and (again := self._again(pace)) is not None:
            return [again]
        left = pace
        plan: list[Share] = []
        taken: set[int] = set()
        if self.turn is not None or self._credit_bytes >= turn_bytes:
            turn = self._turn_of_the_oldest()
        else:
            turn = None  # nearly always: not worth a call
        if turn is not None:
            reason = f"longest waiter: {100 * self.fifo_share:g} % of the link is for those"
            left = self._add(turn, left, reason, plan, taken)
        if queue.floors and left:
            account = self._owed()
            if account is not None:
                left = self._fill(self._of_account(account), left, pace, self._floor_reason(account), plan, taken)
        for traffic in CLASSES:
            members = queue.classes[traffic]
            if not members.count:
                continue
            if left * LEAST_SHARE < pace:
                break
            if self._sharing[traffic] is Sharing.EQUAL:
                most = max(1, left * in_flight_ns // NANOS // chunk_bytes)
                left = self._all_at_once(members, traffic, left, most, plan, taken)
            else:
                left = self._one_at_a_time(members, traffic, left, pace, plan, taken)
        if left and len(plan) == 1:
            # Nobody else waits: what it can't use would be nobody's, and a ceiling that is too low could not be found.
            plan[0].rate_bytes_per_s += left
        return plan

    def _is_usual(self, share: Share) -> bool:
        """Nothing in it changes by itself: no cap, no floor, no deadline, nobody more urgent who is silent now."""
        queue = self._queue
        return not (
            share.limit_bytes
            or queue.floors
            or share.waiting.due_ns != NO_DEADLINE_NS
            or any(queue.classes[traffic].count for traffic in CLASSES[: share.traffic])
        )

    def _again(self, pace: int) -> Share | None:
        """The share of the latest plan, while nothing has happened that could change more than its rate."""
        assert self._whole is not None
        version, share, members = self._whole
        lane = share.lane
        if (
            version == self._queue.version
            and members.turn_left_bytes > 0
            and self.turn is None
            and self._credit_bytes < self._turn_bytes
            and self._now_ns >= lane.silent_until_ns
            and not lane.ceiling_bytes_per_s
            and not 0 < self._far_ns < lane.control_rtt_ns
        ):
            share.rate_bytes_per_s = pace
            return share
        self._whole = None
        return None

    # --------------------------------------------------------------------------------------------------- one at a time

    def _one_at_a_time(
        self,
        members: ClassQueue,
        traffic: TrafficClass,
        left: int,
        pace: int,
        plan: list[Share],
        taken: set[int],
    ) -> int:
        job = members.current
        if job is None or members.turn_left_bytes <= 0 or not job.count or job.account.throttled:
            job = members.choose(self._quantum)
        first = None if job is None else job.first()
        if job is None or first is None:
            return left
        lane = self._lanes[first.session]
        reason = f"{traffic.label}: {members.reason}" if members.reason else _FIRST[traffic]
        if first.session not in taken and self._now_ns >= lane.silent_until_ns and not lane.ceiling_bytes_per_s:
            if 0 < self._far_ns < lane.control_rtt_ns:
                return self._together(members, traffic, left, plan, taken)
            # The usual case, without a walk over the others.
            left = self._add(first, left, reason, plan, taken)
            if len(plan) == 1 and self._is_usual(plan[0]):
                self._whole = (self._queue.version, plan[0], members)
            return left
        beside = reason if not plan else _BESIDE[traffic]
        return self._fill(self._in_turn(members, job), left, pace, beside, plan, taken, _BESIDE[traffic])

    def _in_turn(self, members: ClassQueue, first: JobQueue) -> Iterator[Waiting]:
        """The first in line of each session of each job, in the order of turns.

        Whoever looks at the next job does so because this one can't use all it is offered. Where that is less than its
        share it would fall behind for ever: it is owed some turns, and no more.
        """
        yield from first.in_order()
        previous = first
        for job in members.others():
            turn = max(self._quantum_bytes / self._queue.heaviest, self._quantum(job) / job.account.weight)
            members.lift(previous, job.tag - MOST_BEHIND * turn)
            yield from job.in_order()
            previous = job

    def _of_account(self, account: JobAccount) -> Iterator[Waiting]:
        for job in self._queue.queues_of(account):
            if job.count:
                yield from job.in_order()

    def _fill(
        self,
        line: Iterator[Waiting],
        left: int,
        pace: int,
        reason: str,
        plan: list[Share],
        taken: set[int],
        beside: str = "",
    ) -> int:
        """Fill what is left in the order of a line, each up to what its agent has shown that it can send."""
        for waiting in line:
            if self._can(waiting, taken):
                left = self._add(waiting, left, reason, plan, taken)
                reason = beside or reason
                if left * LEAST_SHARE < pace:
                    break  # before the line goes on to the next job: this one was offered all it is owed
        return left

    def _together(
        self, members: ClassQueue, traffic: TrafficClass, left: int, plan: list[Share], taken: set[int]
    ) -> int:
        """The first few in line side by side, by weight: what one leaves unnoticed is a part only."""
        line: list[Waiting] = []
        jobs: dict[JobQueue, int] = {}
        present = members.current
        for job in ([present] if present is not None else []) + list(members.others()):
            for waiting in job.in_order():
                if len(line) >= MOST_TOGETHER:
                    break
                if self._can(waiting, taken):
                    taken.add(waiting.session)
                    line.append(waiting)
                    jobs[job] = jobs.get(job, 0) + 1
        weights = [waiting.home.account.weight / jobs[waiting.home] for waiting in line if waiting.home is not None]
        lanes = [self._lanes[waiting.session] for waiting in line]
        rates = weighted_shares(left, weights, [lane.ceiling_bytes_per_s or left for lane in lanes])
        reason = f"{traffic.label}: first in line"
        if len(line) > 1:
            reason = f"{traffic.label}: {len(line)} agents share the link, they are far from the coordinator"
        for waiting, lane, rate in zip(line, lanes, rates, strict=True):
            plan.append(Share(lane, traffic, rate, reason, waiting, self._limit(waiting)))
        return left - sum(rates)

    # ----------------------------------------------------------------------------------------------------- all at once

    def _all_at_once(
        self, members: ClassQueue, traffic: TrafficClass, left: int, most: int, plan: list[Share], taken: set[int]
    ) -> int:
        # A lane that can't have one chunk in flight is none: more members than that take turns.
        groups: list[tuple[JobQueue, list[Waiting]]] = []
        for job in members.by_tag(most):
            line: list[Waiting] = []
            for waiting in job.in_order():
                if self._can(waiting, taken):
                    line.append(waiting)
                    if len(line) >= most:
                        break
            if line:
                groups.append((job, line))
        if not groups:
            return left
        total = sum(len(line) for _, line in groups)
        if total > most:
            groups = _part_of_each(groups, most)
            total = sum(len(line) for _, line in groups)
        if len(groups) == 1:
            ((job, line),) = groups
            rate = min(left, job.account.cap_bytes_per_s or left)
            reason = f"{traffic.label}: {total} agents at once, at equal shares"
            lines = {
                waiting.session: Share(
                    self._lanes[waiting.session], traffic, share, reason, waiting, self._limit(waiting)
                )
                for waiting, share in zip(line, self._equal(rate, line), strict=True)
            }
        else:
            lines = self._by_weight(members, groups, traffic, left, total)
        plan.extend(lines.values())
        taken.update(lines)
        return left - sum(share.rate_bytes_per_s for share in lines.values())

    def _by_weight(
        self,
        members: ClassQueue,
        groups: list[tuple[JobQueue, list[Waiting]]],
        traffic: TrafficClass,
        left: int,
        total: int,
    ) -> dict[int, Share]:
        """All members of all jobs at once, by session."""
        weights = [job.account.weight for job, _ in groups]
        weight = sum(weights)
        most_of_jobs = [min(self._ceiling_of(line, left), job.account.cap_bytes_per_s or left) for job, line in groups]
        lines: dict[int, Share] = {}
        job_rates = weighted_shares(left, weights, most_of_jobs)
        for (job, line), job_rate in zip(groups, job_rates, strict=True):
            account = job.account
            if job_rate < int(left * account.weight / weight):
                members.lift(job, groups[-1][0].tag)
            reason = (
                f"{traffic.label}: {len(line)} of {total} agents at once, "
                f"job {account.name}: weight {account.weight:g} of {weight:g}"
            )
            for waiting, rate in zip(line, self._equal(job_rate, line), strict=True):
                present = lines.get(waiting.session)
                if present is not None:
                    present.rate_bytes_per_s += rate  # an agent with several jobs: they share its lane by their tags
                else:
                    lane = self._lanes[waiting.session]
                    lines[waiting.session] = Share(lane, traffic, rate, reason, waiting, self._limit(waiting))
        return lines

    def _equal(self, rate: int, line: list[Waiting]) -> list[int]:
        """Equal shares, none above what its agent has shown that it can send."""
        ceilings = [self._lanes[waiting.session].ceiling_bytes_per_s for waiting in line]
        if not any(ceilings):
            return [rate // len(line)] * len(line)
        return fair_shares(rate, [ceiling or rate for ceiling in ceilings])

    def _ceiling_of(self, line: list[Waiting], left: int) -> int:
        return sum(self._lanes[waiting.session].ceiling_bytes_per_s or left for waiting in line)

    # ----------------------------------------------------------------------------------------------------------- parts

    def _add(self, waiting: Waiting, left: int, reason: str, plan: list[Share], taken: set[int]) -> int:
        """A line of the plan for a transfer's agent, up to its ceiling; what is left then."""
        lane = self._lanes[waiting.session]
        ceiling = lane.ceiling_bytes_per_s
        rate = ceiling if 0 < ceiling < left else left
        if waiting.due_ns != NO_DEADLINE_NS:
            left_ns = waiting.due_ns - self._now_ns
            reason += (
                f"; wanted in {format_duration(left_ns)}" if left_ns > 0 else f"; {format_duration(-left_ns)} late"
            )
        home = waiting.home
        limit = 0 if home is None or not home.account.cap_bytes_per_s else self._limit(waiting)
        plan.append(Share(lane, waiting.traffic, rate, reason, waiting, limit))
        taken.add(waiting.session)
        return left - rate

    def _can(self, waiting: Waiting, taken: set[int]) -> bool:
        return waiting.session not in taken and self._now_ns >= self._lanes[waiting.session].silent_until_ns

    def _limit(self, waiting: Waiting) -> int:
        """What its job's cap leaves; 0: it has none."""
        if waiting.home is None or not waiting.home.account.cap_bytes_per_s:
            return 0
        return max(1, waiting.home.account.refill(self._now_ns, self._chunk_bytes))

    def _quantum(self, job: JobQueue) -> int:
        """A job's turn: in proportion to its weight, so that every job has one in each round."""
        most = self._quantum_bytes
        return max(int(most * job.account.weight / self._queue.heaviest), most // LEAST_QUANTUM, 1)

    def _owed(self) -> JobAccount | None:
        """The job that its floor owes a turn: of several the one that has waited for longest."""
        queue, now_ns = self._queue, self._now_ns
        most = 2 * self._turn_bytes
        turn = self._floor_turn
        if turn is not None:
            if turn.count and not turn.throttled and turn.owed(now_ns, most) > 0:
                return turn
            self._floor_turn, self._floor_ns = None, 0
        if queue.floor_news:
            queue.floor_news, self._floor_ns = False, 0
        if now_ns < self._floor_ns:
            return None
        best, waited, due_ns = None, 0.0, NO_DEADLINE_NS
        for account in queue.floors.values():
            if not account.count or account.throttled:
                continue
            floor, enough = account.floor_bytes_per_s, account.floor_turn_bytes(self._turn_bytes, self._chunk_bytes)
            owed = account.owed(now_ns, max(most, floor // 2))
            if owed >= enough and owed / floor > waited:
                best, waited = account, owed / floor
            due_ns = min(due_ns, now_ns + max(1, -(-(enough - owed) * NANOS // floor)))
        self._floor_turn, self._floor_ns = best, due_ns
        return best

    def _floor_reason(self, account: JobAccount) -> str:
        floor, owed = format_rate(account.floor_bytes_per_s), format_size(account.floor_owed_bytes)
        return f"job {account.name}: its floor of {floor} owes it {owed}"

    def _turn_of_the_oldest(self) -> Waiting | None:
        """The longest waiter, when the part that is kept for those has become a turn."""
        turn = self.turn
        if turn is not None:
            if turn.queued and self._turn_left_bytes > 0 and self._eligible(turn):
                return turn
            self.turn = None
        if self._credit_bytes < self._turn_bytes:
            return None
        oldest = self._queue.oldest(self._eligible)
        if oldest is None:
            self._credit_bytes /= 2  # look again later, not at each decision
            return None
        self._credit_bytes = 0.0
        self.turn = oldest
        self._turn_left_bytes = self._turn_bytes
        self.starvation_turns += 1
        return oldest

    def _eligible(self, waiting: Waiting) -> bool:
        return not self.held_back(waiting) and self._now_ns >= self._lanes[waiting.session].silent_until_ns


def _part_of_each(groups: list[tuple[JobQueue, list[Waiting]]], most: int) -> list[tuple[JobQueue, list[Waiting]]]:
    """At most ``most`` members in all: of each job its part of them by weight, and one at least while there is room."""
    weight = sum(job.account.weight for job, _ in groups)
    chosen: list[tuple[JobQueue, list[Waiting]]] = []
    left = most
    for job, line in groups:
        number = min(left, len(line), max(1, int(most * job.account.weight / weight)))
        if number:
            chosen.append((job, line[:number]))
        left -= number
    return chosen


_FIRST = {
    TrafficClass.PIPELINE: "pipeline: first in line, whole link",
    TrafficClass.SYNC: "sync: nothing more urgent waits, first in line",
    TrafficClass.BULK: "bulk: nothing more urgent waits, first in line",
}
_BESIDE = {
    TrafficClass.PIPELINE: "pipeline: next in line, takes what the one before can't use",
    TrafficClass.SYNC: "sync: takes what is left over",
    TrafficClass.BULK: "bulk: takes what is left over",
}
