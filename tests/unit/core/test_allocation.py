"""Who is next: the heaps against a list that is sorted anew each time."""

from __future__ import annotations

import random

import pytest

from proxyd.core.allocation import (
    MAX_IDLE_JOBS,
    NO_DEADLINE_NS,
    ClassQueue,
    JobQueue,
    LinkQueue,
    Waiting,
    fair_shares,
    weighted_shares,
)
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.policy import JobPolicy, Policy
from proxyd.wire.envelope import TrafficClass

LINK = LinkName("a", "b")


def waiting(
    order: int,
    session: int,
    traffic: TrafficClass = TrafficClass.PIPELINE,
    job: str = "job",
    due_ns: int = NO_DEADLINE_NS,
) -> Waiting:
    transfer = TransferId(session, order)
    return Waiting(transfer, session, LINK, AgentName("b", "0"), job, traffic, order, 0, due_ns=due_ns)


def turn(queue: ClassQueue, quantum: int = 1) -> JobQueue | None:
    return queue.choose(lambda job: quantum)


def first_of(queue: ClassQueue) -> Waiting | None:
    job = turn(queue)
    return None if job is None else job.first()


def test_first_come_first_served_within_a_class() -> None:
    queue = LinkQueue()
    late, early = waiting(2, 1), waiting(1, 2)
    queue.want(late, 10)
    queue.want(early, 10)
    pipeline = queue.classes[TrafficClass.PIPELINE]
    assert first_of(pipeline) is early
    assert late.home is not None
    assert late.home.head(1) is late
    queue.granted(early, 10)
    assert first_of(pipeline) is late


def test_a_repeated_request_is_no_news_and_a_larger_one_keeps_its_place() -> None:
    queue = LinkQueue()
    first, second = waiting(1, 1), waiting(2, 2)
    assert queue.want(first, 10)
    assert queue.want(second, 10)
    assert not queue.want(first, 10)
    queue.granted(first, 10)
    assert queue.want(first, 25), "a chunk has to be sent again"
    assert first_of(queue.classes[TrafficClass.PIPELINE]) is first
    assert (queue.count, queue.need_bytes) == (2, 25)


def test_what_ended_never_comes_back() -> None:
    queue = LinkQueue()
    gone = waiting(1, 1)
    queue.want(gone, 10)
    queue.end(gone, "cancelled")
    assert not queue.want(gone, 20)
    assert first_of(queue.classes[TrafficClass.PIPELINE]) is None
    assert (queue.count, queue.need_bytes, gone.reason) == (0, 0, "cancelled")


def test_the_oldest_is_found_across_classes_and_passes_over_who_is_not_eligible() -> None:
    queue = LinkQueue()
    for order, session, traffic in [(3, 1, 0), (1, 2, 2), (2, 3, 1)]:
        queue.want(waiting(order, session, TrafficClass(traffic)), 5)
    oldest = queue.oldest(lambda item: True)
    assert oldest is not None
    assert oldest.session == 2
    second = queue.oldest(lambda item: item.session != 2)
    assert second is not None
    assert second.session == 3
    assert queue.oldest(lambda item: False) is None
    assert queue.waits_below(TrafficClass.PIPELINE)
    assert not queue.waits_below(TrafficClass.BULK)


@pytest.mark.parametrize("seed", range(20))
def test_against_a_naive_twin(seed: int) -> None:
    """Jobs, deadlines, classes, sessions: the heaps answer what sorting everything anew answers."""
    rng = random.Random(seed)
    queue, twin = LinkQueue(), list[Waiting]()
    for order in range(1, 400):
        act = rng.random()
        live = [item for item in twin if item.need_bytes > 0 and not item.ended]
        if act < 0.5 or not live:
            due_ns = rng.choice([NO_DEADLINE_NS, rng.randrange(50)])
            item = waiting(order, rng.randrange(6), TrafficClass(rng.randrange(3)), rng.choice("xyz"), due_ns)
            twin.append(item)
            queue.want(item, rng.randrange(1, 100))
        elif act < 0.8:
            item = rng.choice(live)
            queue.granted(item, rng.randrange(1, item.need_bytes + 1))
        elif act < 0.9:
            queue.end(rng.choice(live), "over")
        else:
            item = rng.choice(twin)
            queue.want(item, item.wanted_bytes + rng.randrange(20))
        live = sorted(
            (i for i in twin if i.need_bytes > 0 and not i.ended), key=lambda i: (i.traffic, i.job, i.due_ns, i.order)
        )
        assert queue.count == len(live)
        assert queue.need_bytes == sum(i.need_bytes for i in live)
        assert sorted(queue, key=lambda i: (i.traffic, i.job)) == live
        unserved = rng.sample(range(6), 2)
        oldest = min((i for i in live if i.session not in unserved), key=lambda i: i.order, default=None)
        assert queue.oldest(lambda item, without=unserved: item.session not in without) is oldest  # type: ignore[misc]
        for traffic in TrafficClass:
            of_class = [i for i in live if i.traffic is traffic]
            part = queue.classes[traffic]
            assert (part.count, part.jobs) == (len(of_class), len({i.job for i in of_class}))
            assert {job.account.name for job in part.by_tag()} == {i.job for i in of_class}
            for job in part.by_tag():
                of_job = [i for i in of_class if i.job == job.account.name]
                assert job.first() is of_job[0]
                firsts: dict[int, Waiting] = {}
                for i in of_job:
                    firsts.setdefault(i.session, i)
                assert list(job.in_order()) == list(firsts.values())
                assert job.sessions() == sorted(firsts)
                assert list(job) == of_job
                for session in range(6):
                    assert job.head(session) is firsts.get(session)


def test_deadlines_come_first_within_a_job_and_take_nothing_from_another() -> None:
    queue = LinkQueue()
    plain, later, sooner = waiting(1, 1), waiting(2, 2, due_ns=900), waiting(3, 3, due_ns=500)
    other = waiting(4, 4, job="other")
    for item in (plain, later, sooner, other):
        queue.want(item, 100)
    part = queue.classes[TrafficClass.PIPELINE]
    present = turn(part)
    assert present is not None
    assert [item.order for item in present.in_order()] == [3, 2, 1]
    queue.charge(sooner, 10)
    assert first_of(part) is other, "the job's turn is over, whatever is urgent in it"


def serve(queue: LinkQueue, rounds: int) -> dict[str, int]:
    """Serve whoever's turn it is, 10 bytes each time."""
    got: dict[str, int] = {}
    for _ in range(rounds):
        item = first_of(queue.classes[TrafficClass.PIPELINE])
        assert item is not None
        queue.granted(item, 10)
        queue.charge(item, 10)
        got[item.job] = got.get(item.job, 0) + 10
    return got


def weights(**jobs: float) -> Policy:
    return Policy({name: JobPolicy(weight) for name, weight in jobs.items()})


def test_turns_are_in_proportion_to_weights() -> None:
    queue = LinkQueue()
    queue.set_policy(weights(heavy=3, light=0.5))
    for order, job in enumerate(("heavy", "light", "plain"), 1):
        queue.want(waiting(order, order, job=job), 100_000)
    got = serve(queue, 900)
    assert got["heavy"] == pytest.approx(6000, abs=20)
    assert got["plain"] == pytest.approx(2000, abs=20)
    assert got["light"] == pytest.approx(1000, abs=20)


def test_nobody_saves_up_while_idle() -> None:
    queue = LinkQueue()
    queue.want(waiting(1, 1, job="busy"), 100_000)
    serve(queue, 100)
    queue.want(waiting(2, 2, job="late"), 100_000)
    got = serve(queue, 100)
    assert abs(got["busy"] - got["late"]) <= 20


def test_a_job_that_left_and_came_back_owes_what_it_got() -> None:
    queue = LinkQueue()
    queue.want(waiting(1, 1, job="steady"), 100_000)
    for order in range(2, 52):
        queue.want(waiting(order, 2, job="restless"), 10)
        serve(queue, 2)
    got = serve(queue, 2)
    account = queue.account("restless")
    assert account is not None
    assert got.get("restless", 0) <= 10


def test_weights_that_change_count_from_then_on() -> None:
    queue = LinkQueue()
    for order, job in enumerate("xy", 1):
        queue.want(waiting(order, order, job=job), 100_000)
    serve(queue, 100)
    queue.set_policy(weights(x=4))
    got = serve(queue, 100)
    assert got["x"] == pytest.approx(4 * got["y"], rel=0.05)


def test_a_job_beyond_its_cap_is_in_no_order_until_it_is_released() -> None:
    queue = LinkQueue()
    capped, other = waiting(1, 1, job="capped"), waiting(2, 2, job="other")
    queue.want(capped, 100)
    account = queue.account("capped")
    assert account is not None
    queue.throttle(account, 50)
    assert queue.release_ns == 50
    assert first_of(queue.classes[0]) is None
    queue.want(other, 100)
    assert first_of(queue.classes[0]) is other
    queue.release(49)
    assert [job.account.name for job in queue.classes[0].by_tag()] == ["other"]
    queue.release(50)
    assert {job.account.name for job in queue.classes[0].by_tag()} == {"capped", "other"}
    assert queue.release_ns is None


def test_accounts_of_jobs_that_are_over_do_not_pile_up() -> None:
    queue = LinkQueue()
    for order in range(1, 5000):
        item = waiting(order, 1, job=f"job{order}")
        queue.want(item, 1)
        queue.granted(item, 1)
        queue.charge(item, 1)
    assert len(queue.accounts()) <= MAX_IDLE_JOBS


def test_a_newcomer_waits_for_others_only_as_far_as_their_weights_go() -> None:
    queue = LinkQueue()
    queue.want(waiting(1, 1, job="big"), 1_000_000)
    assert queue.ahead_of(TrafficClass.PIPELINE, "new") == (1, 0)
    assert queue.ahead_of(TrafficClass.PIPELINE, "big") == (1, 1_000_000)
    queue.want(waiting(2, 2, job="new"), 1000)
    assert queue.ahead_of(TrafficClass.PIPELINE, "new") == (2, 2000)
    assert queue.ahead_of(TrafficClass.BULK, "third") == (2, 1_001_000), "whoever is of a higher class goes first"


@pytest.mark.parametrize(
    ("total", "weights_", "ceilings", "shares"),
    [
        (90, [2, 1], [100, 100], [60, 30]),
        (90, [2, 1], [30, 100], [30, 60]),
        (90, [2, 1, 1], [100, 5, 100], [56, 5, 29]),
        (90, [1, 1], [20, 20], [20, 20]),
        (0, [1.5], [5], [0]),
        (7, [], [], []),
    ],
)
def test_weighted_shares(total: int, weights_: list[float], ceilings: list[int], shares: list[int]) -> None:
    assert weighted_shares(total, weights_, ceilings) == shares
    assert sum(weighted_shares(total, weights_, ceilings)) <= total


@pytest.mark.parametrize(
    ("total", "ceilings", "shares"),
    [
        (90, [100, 100, 100], [30, 30, 30]),
        (90, [10, 100, 100], [10, 40, 40]),
        (90, [10, 20, 30], [10, 20, 30]),
        (10, [7, 7, 7], [3, 3, 4]),
        (0, [5], [0]),
        (5, [], []),
    ],
)
def test_fair_shares(total: int, ceilings: list[int], shares: list[int]) -> None:
    assert fair_shares(total, ceilings) == shares
    assert sum(fair_shares(total, ceilings)) <= total
