"""Who is next: the heaps against a list that is sorted anew each time."""

from __future__ import annotations

import random

import pytest

from proxyd.core.allocation import LinkQueue, Waiting, fair_shares
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.wire.envelope import TrafficClass

LINK = LinkName("a", "b")


def waiting(order: int, session: int, traffic: TrafficClass = TrafficClass.PIPELINE) -> Waiting:
    return Waiting(TransferId(session, order), session, LINK, AgentName("b", "0"), "job", traffic, order, 0)


def test_first_come_first_served_within_a_class() -> None:
    queue = LinkQueue()
    late, early = waiting(2, 1), waiting(1, 2)
    queue.want(late, 10)
    queue.want(early, 10)
    pipeline = queue.classes[TrafficClass.PIPELINE]
    assert pipeline.first() is early
    assert pipeline.head(1) is late
    queue.granted(early, 10)
    assert pipeline.first() is late


def test_a_repeated_request_is_no_news_and_a_larger_one_keeps_its_place() -> None:
    queue = LinkQueue()
    first, second = waiting(1, 1), waiting(2, 2)
    assert queue.want(first, 10)
    assert queue.want(second, 10)
    assert not queue.want(first, 10)
    queue.granted(first, 10)
    assert queue.want(first, 25), "a chunk has to be sent again"
    assert queue.classes[TrafficClass.PIPELINE].first() is first
    assert (queue.count, queue.need_bytes) == (2, 25)


def test_what_ended_never_comes_back() -> None:
    queue = LinkQueue()
    gone = waiting(1, 1)
    queue.want(gone, 10)
    queue.end(gone, "cancelled")
    assert not queue.want(gone, 20)
    assert queue.classes[TrafficClass.PIPELINE].first() is None
    assert (queue.count, queue.need_bytes, gone.reason) == (0, 0, "cancelled")


def test_the_oldest_is_found_across_classes_and_passes_over_who_is_not_eligible() -> None:
    queue = LinkQueue()
    for order, session, traffic in [(3, 1, 0), (1, 2, 2), (2, 3, 1)]:
        queue.want(waiting(order, session, TrafficClass(traffic)), 5)
    oldest = queue.oldest(lambda session: True)
    assert oldest is not None
    assert oldest.session == 2
    second = queue.oldest(lambda session: session != 2)
    assert second is not None
    assert second.session == 3
    assert queue.oldest(lambda session: False) is None
    assert queue.waits_below(TrafficClass.PIPELINE)
    assert not queue.waits_below(TrafficClass.BULK)


@pytest.mark.parametrize("seed", range(20))
def test_against_a_naive_twin(seed: int) -> None:
    rng = random.Random(seed)
    queue, twin = LinkQueue(), list[Waiting]()
    for order in range(1, 400):
        act = rng.random()
        live = [item for item in twin if item.need_bytes > 0 and not item.ended]
        if act < 0.5 or not live:
            item = waiting(order, rng.randrange(6), TrafficClass(rng.randrange(3)))
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
        live = sorted((i for i in twin if i.need_bytes > 0 and not i.ended), key=lambda i: i.order)
        assert queue.count == len(live)
        assert queue.need_bytes == sum(i.need_bytes for i in live)
        assert list(queue) == sorted(live, key=lambda i: (i.traffic, i.order))
        for traffic in TrafficClass:
            of_class = [i for i in live if i.traffic is traffic]
            part = queue.classes[traffic]
            assert part.first() is (of_class[0] if of_class else None)
            firsts: dict[int, Waiting] = {}
            for i in of_class:
                firsts.setdefault(i.session, i)
            assert list(part.in_order()) == list(firsts.values())
            assert part.sessions() == sorted(firsts)
            for session in range(6):
                assert part.head(session) is firsts.get(session)


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
