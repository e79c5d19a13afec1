"""Who should be sending now, each at which rate, and why: one plan at a time."""

from __future__ import annotations

import random

import pytest

from proxyd.core.allocation import NO_DEADLINE_NS, LinkQueue, Waiting
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.lanes import Lane
from proxyd.core.plan import Planner, Share
from proxyd.core.policy import JobPolicy, Policy, Sharing
from proxyd.wire.envelope import TrafficClass

LINK = LinkName("a", "b")
PACE = 1_000_000
MS = 1_000_000
TURN = 80_000
CHUNK = 1000
PIPELINE, SYNC, BULK = TrafficClass


class Link:
    """A queue, lanes and a planner, with a clock."""

    def __init__(self, policy: Policy | None = None, fifo_share: float = 0.05) -> None:
        self.queue = LinkQueue()
        self.lanes: dict[int, Lane] = {}
        self.planner = Planner(self.queue, self.lanes)
        self.planner.set_policy(policy or Policy(), fifo_share)
        self.now_ns = 0
        self.orders = 0

    def want(
        self,
        session: int,
        traffic: TrafficClass = BULK,
        job: str = "job",
        nbytes: int = 10_000_000,
        due_ns: int = NO_DEADLINE_NS,
    ) -> Waiting:
        self.lanes.setdefault(session, Lane(session, AgentName("a", str(session))))
        self.orders += 1
        waiting = Waiting(
            TransferId(session, self.orders),
            session,
            LINK,
            AgentName("b", "0"),
            job,
            traffic,
            self.orders,
            self.now_ns,
            due_ns=due_ns,
        )
        self.queue.want(waiting, nbytes)
        return waiting

    def ceiling(self, session: int, rate_bytes_per_s: int) -> None:
        """The session's agent has shown that it can't send faster."""
        self.lanes[session]._measured_bytes_per_s = rate_bytes_per_s

    def plan(self) -> list[Share]:
        shares = self.planner.plan(PACE, 60 * MS, CHUNK, TURN, self.now_ns)
        assert sum(share.rate_bytes_per_s for share in shares) <= PACE
        assert len({share.lane.session for share in shares}) == len(shares)
        return shares

    def grant(self, waiting: Waiting, nbytes: int) -> None:
        self.queue.granted(waiting, nbytes)
        self.planner.granted(waiting, nbytes)

    def lines(self) -> list[tuple[int, int]]:
        return [(share.lane.session, share.rate_bytes_per_s) for share in self.plan()]


def test_an_empty_queue_plans_nothing() -> None:
    assert Link().plan() == []


def test_one_at_a_time_and_the_urgent_class_first() -> None:
    link = Link()
    link.want(1, BULK)
    link.want(2, PIPELINE)
    link.want(3, PIPELINE)
    assert link.lines() == [(2, PACE)]
    assert link.plan()[0].reason == "pipeline: first in line, whole link"


def test_a_ceiling_leaves_the_rest_to_the_next_in_line_and_down_the_classes() -> None:
    link = Link()
    for session, traffic in ((1, PIPELINE), (2, BULK), (3, BULK)):
        link.want(session, traffic)
    link.ceiling(1, PACE // 2)
    link.ceiling(2, PACE // 4)
    assert link.lines() == [(1, PACE // 2), (2, PACE // 4), (3, PACE // 4)]
    assert link.plan()[1].reason == "bulk: takes what is left over"


def test_a_ceiling_is_not_applied_when_nobody_else_waits() -> None:
    """What it can't use would be nobody's, and a ceiling that is too low could never be found."""
    for traffic in TrafficClass:
        link = Link()
        link.want(1, traffic)
        link.ceiling(1, PACE // 10)
        assert link.lines() == [(1, PACE)], traffic
        link.want(2, BULK)
        lines = dict(link.lines())
        assert lines[1] == PACE // 10, traffic
        assert lines[2] == PACE - PACE // 10, traffic


def test_all_at_once_at_equal_shares_and_no_more_than_can_have_a_chunk_in_flight() -> None:
    link = Link()
    for session in range(1, 5):
        link.want(session, SYNC)
    assert link.lines() == [(session, PACE // 4) for session in range(1, 5)]
    assert link.plan()[0].reason == "sync: 4 agents at once, at equal shares"
    for session in range(5, 200):
        link.want(session, SYNC)
    assert [session for session, _ in link.lines()] == list(range(1, 61)), "60 chunks are one round trip"


def test_all_at_once_by_weight_when_there_are_jobs() -> None:
    link = Link(Policy({"x": JobPolicy(3)}))
    for session, job in ((1, "x"), (2, "x"), (3, "x"), (4, "y")):
        link.want(session, SYNC, job)
    assert dict(link.lines()) == {1: PACE // 4, 2: PACE // 4, 3: PACE // 4, 4: PACE // 4}
    link.want(4, SYNC, "x")
    shares = {share.lane.session: share for share in link.plan()}
    assert shares[4].rate_bytes_per_s == PACE // 4 + PACE * 3 // 16, "its lane carries both jobs"
    assert shares[1].reason == "sync: 4 of 5 agents at once, job x: weight 3 of 4"


def test_a_silent_lane_gets_nothing_meanwhile() -> None:
    link = Link()
    link.want(1)
    link.want(2)
    link.lanes[1].silent_until_ns = 50 * MS
    assert link.lines() == [(2, PACE)]
    link.now_ns = 50 * MS
    assert link.lines() == [(1, PACE)]


def test_far_agents_share_the_link_and_near_ones_do_not() -> None:
    link = Link(Policy({"x": JobPolicy(2)}))
    for session, job in ((1, "x"), (2, "y"), (3, "y"), (4, "y"), (5, "y")):
        link.want(session, BULK, job)
    assert len(link.plan()) == 1
    for lane in link.lanes.values():
        lane.control_rtt_ns = 90 * MS
    lines = dict(link.lines())
    assert len(lines) == 4
    assert lines[1] == PACE * 2 // 3, "by weight: one agent of x beside three of y"
    assert {lines[session] for session in lines if session != 1} == {PACE // 9}


def test_a_floor_comes_before_the_classes_and_stops_when_it_is_paid() -> None:
    link = Link(Policy({"low": JobPolicy(1, PACE // 10)}))
    low = link.want(1, BULK, "low")
    high = link.want(2, PIPELINE, "high")
    assert link.lines() == [(2, PACE)], "nothing is owed yet"
    link.now_ns = 300 * MS
    [share] = link.plan()
    assert share.waiting is low
    assert share.reason == "job low: its floor of 800 kbit/s owes it 29.3 KiB"
    link.grant(low, 30_000)
    assert link.plan()[0].waiting is high
    assert low.home is not None
    assert low.home.tag == 0, "what a floor pays isn't charged to the weight"
    link.queue.end(high, "done")
    link.now_ns = 10_000 * MS
    assert [share.waiting for share in link.plan()] == [low]


def test_a_floor_promises_nothing_while_there_is_nothing_to_send() -> None:
    link = Link(Policy({"low": JobPolicy(1, PACE // 10)}))
    low = link.want(1, BULK, "low", nbytes=10)
    link.want(2, PIPELINE, "high")
    link.plan()
    link.grant(low, 10)
    link.now_ns = 100_000 * MS
    link.want(1, BULK, "low")
    assert link.lines() == [(2, PACE)]


def test_of_several_floors_the_one_that_has_waited_longest_is_paid_first() -> None:
    link = Link(Policy({"x": JobPolicy(1, PACE // 10), "y": JobPolicy(1, PACE // 5)}))
    link.want(1, BULK, "x")
    link.plan()
    link.now_ns = 100 * MS
    link.want(2, BULK, "y")
    link.plan()
    link.now_ns = 400 * MS
    assert link.plan()[0].lane.session == 1


def test_a_cap_limits_a_grant_and_then_holds_the_job_back_until_it_has_refilled() -> None:
    link = Link(Policy({"capped": JobPolicy(1, 0, PACE // 10)}))
    waiting = link.want(1, BULK, "capped")
    [share] = link.plan()
    assert share.limit_bytes == 10_000, "100 ms of its rate"
    assert link.planner.next_deadline_ns() is None
    link.grant(waiting, 10_000)
    assert link.plan() == []
    assert waiting.reason == "job capped: its cap of 800 kbit/s is used up for 50 ms"
    assert link.planner.held_back(waiting)
    assert link.planner.next_deadline_ns() == 50 * MS
    other = link.want(2, BULK)
    assert link.plan()[0].waiting is other
    link.queue.end(other, "done")
    link.now_ns = 50 * MS
    assert link.plan()[0].limit_bytes == 5_000


def test_a_lifted_cap_counts_at_once() -> None:
    link = Link(Policy({"capped": JobPolicy(1, 0, PACE // 10)}))
    waiting = link.want(1, BULK, "capped")
    link.plan()
    link.grant(waiting, 10_000)
    assert link.plan() == []
    link.planner.set_policy(Policy(), 0.05)
    [share] = link.plan()
    assert (share.waiting, share.limit_bytes) == (waiting, 0)


def test_the_longest_waiter_has_a_turn_when_its_part_has_gathered() -> None:
    link = Link(fifo_share=0.2)
    patient = link.want(1, BULK)
    urgent = link.want(2, PIPELINE)
    granted = 0
    while link.plan()[0].waiting is urgent:
        link.grant(urgent, 10_000)
        granted += 10_000
    assert granted == 4 * TURN, "a fifth of all is a fourth of the others'"
    assert link.plan()[0].reason == "longest waiter: 20 % of the link is for those"
    link.grant(patient, TURN)
    assert link.plan()[0].waiting is urgent
    assert link.planner.starvation_turns == 1


def test_who_gets_something_as_it_is_does_not_starve() -> None:
    link = Link(fifo_share=0.2)
    patient = link.want(1, BULK)
    for _ in range(20):
        urgent = link.want(2, PIPELINE, nbytes=10_000)
        link.grant(urgent, 10_000)
        link.grant(patient, 5_000)
    link.want(2, PIPELINE)
    assert link.plan()[0].waiting is not patient
    assert link.planner.starvation_turns == 0


def test_without_a_part_for_it_the_longest_waiter_waits() -> None:
    link = Link(fifo_share=0)
    link.want(1, BULK)
    urgent = link.want(2, PIPELINE, nbytes=1 << 40)
    for _ in range(100):
        assert link.plan()[0].waiting is urgent
        link.grant(urgent, TURN)


def test_deadlines_order_a_job_and_are_told() -> None:
    link = Link()
    link.want(1)
    late = link.want(2, due_ns=-5 * MS)
    soon = link.want(3, due_ns=40 * MS)
    [share] = link.plan()
    assert share.waiting is late
    assert share.reason.endswith("; 5 ms late")
    link.queue.end(late, "done")
    [share] = link.plan()
    assert share.waiting is soon
    assert share.reason.endswith("; wanted in 40 ms")


def test_a_turn_goes_on_until_it_is_used_up() -> None:
    link = Link(Policy({"x": JobPolicy(2), "y": JobPolicy(1)}))
    waiting = {"x": link.want(1, BULK, "x"), "y": link.want(2, BULK, "y")}
    turns: list[tuple[str, int]] = []
    for _ in range(240):
        job = link.plan()[0].waiting.job
        link.grant(waiting[job], 2_000)
        if not turns or turns[-1][0] != job:
            turns.append((job, 0))
        turns[-1] = (job, turns[-1][1] + 2_000)
    assert turns[:4] == [("x", TURN), ("y", TURN // 2), ("x", TURN), ("y", TURN // 2)]
    assert "job x: weight 2 of 3, " in link.plan()[0].reason


def test_a_class_is_served_as_the_policy_says() -> None:
    link = Link(Policy(sharing={SYNC: Sharing.ONE, PIPELINE: Sharing.EQUAL}))
    for session in (1, 2):
        link.want(session, SYNC)
    assert link.lines() == [(1, PACE)]
    for session in (3, 4):
        link.want(session, PIPELINE)
    assert link.lines() == [(3, PACE // 2), (4, PACE // 2)]


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_that_is_remembered_is_the_one_that_would_be_made(seed: int) -> None:
    """Two links live through the same; one of them makes each plan anew."""
    chance = random.Random(seed)
    jobs = {"x": JobPolicy(2), "y": JobPolicy(1, cap_bytes_per_s=400_000), "z": JobPolicy(1, floor_bytes_per_s=50_000)}
    links = [Link(Policy(jobs if seed % 2 else {})) for _ in range(2)]
    wanted: list[list[Waiting]] = [[], []]
    reused = 0
    for _ in range(400):
        step, pick, size = chance.randrange(9), chance.random(), chance.randrange(1, 60) * CHUNK
        traffic, job, session = chance.choice((PIPELINE, BULK, BULK)), chance.choice("xyz"), chance.randrange(1, 5)
        lines = []
        for link, mine in zip(links, wanted, strict=True):
            link.now_ns += size * 1_000
            match step:
                case 0 if len(mine) < 12:
                    mine.append(link.want(session, traffic, job, 10 * size))
                case 1 if mine:
                    link.queue.end(mine.pop(int(pick * len(mine))), "cancelled")
                case 2 if session in link.lanes:
                    link.ceiling(session, 0 if pick < 0.7 else PACE // 3)
                case 3 if session in link.lanes and pick < 0.3:
                    link.lanes[session].silent_until_ns = link.now_ns + 20 * MS
                case 4 if pick < 0.2:
                    link.planner.set_policy(Policy(jobs if pick < 0.1 else {}), 0.05)
            if link is links[1]:
                link.planner._whole = None
            before = link.planner._whole
            plan = link.plan()
            reused += before is not None and link.planner._whole is before
            lines.append([(one.lane.session, one.rate_bytes_per_s, one.reason, one.waiting.order) for one in plan])
            if plan and plan[0].waiting.need_bytes > 0:
                link.grant(plan[0].waiting, min(size, plan[0].waiting.need_bytes, plan[0].limit_bytes or size))
            mine[:] = [waiting for waiting in mine if waiting.queued]
        assert lines[0] == lines[1]
    assert reused or seed % 2, "floors are looked at each time"
