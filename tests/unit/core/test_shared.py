"""One line that several links share: its window, its split, and whose a queue is."""

from __future__ import annotations

from proxyd.core.ids import LinkName
from proxyd.core.messages import Report
from proxyd.core.policy import BottleneckSettings
from proxyd.core.shared import SharedBottleneck
from proxyd.core.tally import Flow

AB, AC = LinkName("a", "b"), LinkName("a", "c")
MS = 1_000_000
RTT_NS = 60 * MS
RATE = 50_000_000


def report_of(link: LinkName, srtt_ns: int, min_rtt_ns: int) -> Report:
    return Report(link, 0, 0, 0, 0, 0, 0, 0, srtt_ns, min_rtt_ns, 0, 0, False)


def line(capacity: int = RATE, cap: int = 0) -> SharedBottleneck:
    one = SharedBottleneck(BottleneckSettings("a", True, capacity, cap), 9000)
    for link in (AB, AC):
        one.join(link)
    return one


def limits(one: SharedBottleneck) -> tuple[int, int]:
    return one.parts[AB].limit_bytes_per_s, one.parts[AC].limit_bytes_per_s


def test_one_alone_gets_all_and_two_get_half_each() -> None:
    one = line()
    pace = one.pace_bytes_per_s(0)
    assert 0.97 * RATE < pace < 0.98 * RATE
    assert one.wants(AB, 10 * RATE, 0, 0, 0)
    assert limits(one) == (pace, pace // 2)  # the other one would get half, should it begin
    assert one.wants(AC, 10 * RATE, 0, 0, 0)
    assert limits(one) == (pace // 2, pace // 2)
    assert one.wants(AB, 0, 0, 1, 0)
    assert limits(one)[1] == pace


def test_what_one_cannot_use_is_the_others() -> None:
    one = line()
    pace = one.pace_bytes_per_s(0)
    one.wants(AB, 10 * RATE, 0, 0, 0)
    one.wants(AC, pace // 10, 0, 0, 0)
    assert limits(one) == (pace - pace // 10, pace // 10)
    # Neither needs half: what is left is added to both, so that their estimates may grow.
    one.wants(AB, pace // 5, 0, 0, 0)
    ab, ac = limits(one)
    assert ab > pace // 2 > ac > pace // 3
    assert ab + ac <= pace


def test_what_cannot_be_told_anything_is_taken_off_first() -> None:
    one = line()
    pace = one.pace_bytes_per_s(0)
    one.wants(AB, 10 * RATE, 0, 0, 0)
    one.wants(AC, 10 * RATE, pace // 2, 0, 0)
    ab, ac = limits(one)
    assert abs(ab - pace // 4) < 2
    assert abs(ac - 3 * (pace // 4)) < 4
    assert ab + ac <= pace


def test_little_is_not_split_anew() -> None:
    one = line()
    assert one.wants(AB, RATE // 2, 0, 0, 0)
    assert not one.wants(AB, RATE // 2 + RATE // 200, 0, 0, 0)
    assert one.wants(AB, RATE // 4, 0, 0, 0)


def test_a_line_that_is_learned_does_not_limit_one_alone() -> None:
    one = line(0)
    one.wants(AB, 10 * RATE, 0, 0, 0)
    assert limits(one) == (0, 0)
    assert one.bound_bytes_per_s(0) == 0
    one.wants(AC, 10 * RATE, 0, 0, 0)
    pace = one.pace_bytes_per_s(0)
    assert pace // 2 == min(limits(one))
    assert sum(limits(one)) == pace
    assert one.bound_bytes_per_s(0) == pace


def test_a_cap_holds_for_one_alone_as_well() -> None:
    for capacity in (0, RATE):
        one = line(capacity, RATE // 10)
        one.wants(AB, 10 * RATE, 0, 0, 0)
        assert 0.99 * RATE / 10 < limits(one)[0] == one.bound_bytes_per_s(0) <= RATE // 10


def test_the_window_is_what_links_need_and_a_quarter_more() -> None:
    one = line()
    one.resize_for(AB, 800_000)
    one.resize_for(AC, 400_000)
    assert one.window_bytes == 1_500_000
    one.take(1_400_000)
    one.wants(AC, 0, 0, 0, 0)  # it has nothing any more
    assert one.window_bytes == 1_400_000  # what was granted is not un-granted
    one.settle(900_000)
    one.resize_for(AB, 400_000)
    assert one.window_bytes == 500_000
    before = one.violations
    one.take(1)
    assert (before, one.violations) == (0, 1)


def feed(one: SharedBottleneck, queues_ns: dict[LinkName, int], rtts: int, begin_ns: int = 0) -> dict[LinkName, bool]:
    """Both links deliver a quarter of RATE each, and see these queues; whose those are, as of the last reports."""
    whose: dict[LinkName, bool] = {}
    for step in range(begin_ns // (5 * MS), (begin_ns + rtts * RTT_NS) // (5 * MS)):
        now_ns = (step + 1) * 5 * MS
        for link, queue_ns in queues_ns.items():
            nbytes = RATE // 4 * 5 // 1000
            flow = Flow(nbytes, nbytes, 0, now_ns - 5 * MS, now_ns, now_ns, RATE // 4 * (RTT_NS + queue_ns) // 10**9)
            flow.missing_bytes, flow.demand = flow.in_flight_bytes, True
            report = report_of(link, RTT_NS + queue_ns, RTT_NS)
            whose[link] = one.on_report(link, report, flow, RTT_NS, False, now_ns)
    return whose


def test_a_queue_that_all_see_is_the_lines_and_one_that_one_sees_its_own() -> None:
    one = line(0)
    for link in (AB, AC):
        one.wants(link, 10 * RATE, 0, 0, 0)
    assert feed(one, {AB: 8 * MS, AC: 9 * MS}, 12) == {AB: True, AC: True}
    assert 0.4 * RATE < one.estimator.rate_bytes_per_s(12 * RTT_NS) < 0.6 * RATE
    assert feed(one, {AB: 8 * MS, AC: 30 * MS}, 1, 12 * RTT_NS) == {AB: True, AC: False}


def test_without_a_common_queue_each_link_answers_for_itself() -> None:
    one = line(0)
    for link in (AB, AC):
        one.wants(link, 10 * RATE, 0, 0, 0)
    assert feed(one, {AB: 0, AC: 20 * MS}, 12) == {AB: False, AC: False}


def test_when_several_have_just_begun_a_common_queue_is_the_lines() -> None:
    one = line(0)
    for link in (AB, AC):
        one.wants(link, 10 * RATE, 0, 0, 0)
    one._found = True  # one of them alone had met its limit before
    assert feed(one, {AB: MS, AC: MS}, 1) == {AB: True, AC: True}
    assert feed(one, {AB: 0, AC: 0}, 6, RTT_NS) == {AB: False, AC: False}


def test_one_alone_answers_for_itself() -> None:
    one = line(0)
    one.wants(AB, 10 * RATE, 0, 0, 0)
    assert feed(one, {AB: 20 * MS}, 12) == {AB: False}


def test_several_begin_at_what_one_alone_has_found() -> None:
    paces = []
    for found in (False, True):
        one = line(0)
        one.wants(AB, 10 * RATE, 0, 0, 0)
        feed(one, {AB: 0}, 4)
        flow = Flow(1000, 1000, 0, 4 * RTT_NS, 4 * RTT_NS + MS, 4 * RTT_NS + MS, 100_000, 100_000, True)
        one.on_report(AB, report_of(AB, RTT_NS, RTT_NS), flow, RTT_NS, found, 4 * RTT_NS + MS)
        paces.append(one.pace_bytes_per_s(4 * RTT_NS + MS) / one.estimator.rate_bytes_per_s(4 * RTT_NS + MS))
    assert paces[0] > 1.4
    assert 1 <= paces[1] <= 1.05


def test_distance_does_not_pass_for_a_queue() -> None:
    """What is in flight on a longer link counts as it would on the shortest."""
    one = line(0)
    for link, rtt_ns in ((AB, RTT_NS), (AC, 3 * RTT_NS)):
        flow = Flow(in_flight_bytes=rtt_ns, missing_bytes=rtt_ns, at_ns=MS, horizon_ns=MS)
        one.on_report(link, report_of(link, rtt_ns, rtt_ns), flow, rtt_ns, False, MS)
    total = one._sum(Flow(at_ns=MS, horizon_ns=MS), False, MS)
    assert total.in_flight_bytes == total.missing_bytes == 2 * RTT_NS


def test_fallback_is_split_among_links_that_were_used() -> None:
    one = line()
    whole = one.fallback_bytes_per_s(0)
    one.wants(AB, RATE, 0, 0, 0)
    assert one.fallback_bytes_per_s(0) == whole
    one.wants(AC, RATE, 0, 0, 0)
    assert one.fallback_bytes_per_s(0) == whole // 2
