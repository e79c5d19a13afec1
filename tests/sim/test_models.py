"""The clock, the link's queue, and what else may stand in a link's way."""

from __future__ import annotations

import random

import pytest

from proxyd.core.traces import steps
from proxyd.sim.clock import Alarm, Clock
from proxyd.sim.link import CrossTraffic, Link, LinkModel, Policer, segment_bytes

MS = 1_000_000
NANOS = 1_000_000_000


def test_things_happen_in_time_order_and_then_in_planned_order() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(5, seen.append, "b")
    clock.at(2, seen.append, "a")
    clock.at(5, seen.append, "c")
    clock.run(4)
    assert (seen, clock.now_ns) == (["a"], 4)
    clock.run(10)
    assert seen == ["a", "b", "c"]


def test_an_alarm_rings_once_at_its_latest_time() -> None:
    clock, seen = Clock(), list[int]()
    alarm = Alarm(clock, lambda: seen.append(clock.now_ns))
    alarm.set(10)
    alarm.set(20)
    alarm.set(5)
    clock.run(100)
    assert seen == [5]
    alarm.set(200)
    alarm.set(None)
    clock.run(300)
    assert seen == [5]


def test_an_alarm_that_is_moved_often_fills_no_heap() -> None:
    clock, seen = Clock(), list[int]()
    alarm = Alarm(clock, lambda: seen.append(clock.now_ns))
    for due_ns in range(100, 1100):
        alarm.set(due_ns)
    clock.run(5000)
    assert seen == [1099]
    assert clock.events == 2


def make(model: LinkModel, seed: int = 1) -> tuple[Clock, Link, list[int]]:
    clock = Clock()
    return clock, Link(clock, model, random.Random(seed)), []


def test_a_link_serialises_delays_and_drops_at_its_tail() -> None:
    clock, link, arrivals = make(LinkModel(1_000_000, 10 * MS, 21_000, mtu_bytes=1500))
    passed = [link.send(9_948, lambda: arrivals.append(clock.now_ns)) for _ in range(4)]
    wire = link.wire_bytes(9_948)
    assert wire == 9_948 + 7 * 52
    # One on the wire, one behind it; of a third nothing fits any more.
    assert passed == [9_948, 9_948, 0, 0]
    clock.run(100 * MS)
    assert arrivals == [wire * 1000 + 10 * MS, 2 * wire * 1000 + 10 * MS]
    assert (link.dropped, link.peak_queue_bytes) == (14, wire)  # packets; a queue is what one meets


def test_of_a_segment_those_packets_are_dropped_that_do_not_fit() -> None:
    clock, link, arrivals = make(LinkModel(1_000_000, 0, 7 * 1500, mtu_bytes=1500))
    assert link.send(10 * 1448, arrivals.append, 0) == 7 * 1448
    assert link.dropped == 3
    assert link.queue_bytes == 7 * 1500
    clock.run(4 * MS)  # room for two and a half
    assert link.send(10 * 1448, arrivals.append, 0) == 2 * 1448


def test_a_packet_is_served_at_the_rates_of_its_time() -> None:
    trace = steps(1_000_000, [(5 * MS, 0.5)])
    clock, link, arrivals = make(LinkModel(1_000_000, 0, 1 << 20, mtu_bytes=9000, trace=trace))
    link.send(8_948, lambda: arrivals.append(clock.now_ns))  # 5000 bytes in 5 ms, the other 4000 in 8 ms
    clock.run(100 * MS)
    assert arrivals == [13 * MS]


def test_counts_say_what_was_carried_and_what_was_dropped() -> None:
    clock, link, _ = make(LinkModel(1_500_000, 5 * MS, 15_000, mtu_bytes=1500))
    before = link.counts()
    for _ in range(20):
        link.send(1448, lambda: None)
    assert link.counts().carried_bytes == 0  # all of it is still in the queue
    clock.run(20 * MS)
    after = link.counts()
    assert after.utilisation_since(before) == pytest.approx(0.5)
    assert after.loss_since(before) == pytest.approx(0.5)


def test_random_loss_takes_single_packets_at_its_rate() -> None:
    clock, link, _ = make(LinkModel(1_000_000_000, 0, 1 << 40, mtu_bytes=1500, loss=0.001))
    passed = sum(link.send(10 * 1448, lambda: None) for _ in range(20_000))
    assert link.lost == pytest.approx(200, rel=0.2)
    assert passed == 20_000 * 10 * 1448 - link.lost * 1448
    assert clock.now_ns == 0


def test_cross_traffic_takes_its_share_and_queues_like_ours() -> None:
    cross = CrossTraffic(500_000)
    clock, link, _ = make(LinkModel(1_000_000, 0, 100_000, mtu_bytes=1500, cross=cross))
    before = link.counts()
    clock.run(NANOS)
    after = link.counts()
    assert after.utilisation_since(before) == pytest.approx(0.5, abs=0.01)
    assert after.cross_bytes == pytest.approx(500_000, rel=0.01)
    assert after.offered_bytes == 0
    cross = CrossTraffic(2_000_000)
    clock, link, _ = make(LinkModel(1_000_000, 0, 100_000, mtu_bytes=1500, cross=cross))
    clock.run(NANOS)
    assert link.queue_bytes == pytest.approx(100_000, abs=1500)
    assert link.send(14_480, lambda: None) <= 1448


def test_cross_traffic_goes_on_and_off() -> None:
    cross = CrossTraffic(1_000_000, on_ns=100 * MS, off_ns=300 * MS, start_ns=50 * MS)
    clock, link, _ = make(LinkModel(2_000_000, 0, 100_000, mtu_bytes=1500, cross=cross))
    seen = []
    for _ in range(16):
        begin = link.counts().cross_bytes
        clock.run(clock.now_ns + 50 * MS)
        seen.append(link.counts().cross_bytes - begin > 25_000)
    assert seen == [False, True, True, False, False, False, False, False] * 2


def test_a_policer_passes_a_burst_and_then_its_rate_without_any_queue() -> None:
    clock, link, _ = make(
        LinkModel(10_000_000, 0, 1 << 20, mtu_bytes=1500, policer=Policer(1_000_000, 150_000)),
    )
    burst = sum(link.send(1448, lambda: None) > 0 for _ in range(200))
    assert burst == 100
    passed = 0
    for _ in range(1000):
        clock.run(clock.now_ns + MS)
        passed += link.send(3 * 1448, lambda: None)
    assert passed / 1448 * 1500 == pytest.approx(1_000_000, rel=0.02)
    assert link.peak_queue_bytes <= 150_000


def test_segments_grow_with_the_rate_and_shrink_with_the_buffer() -> None:
    def size(rate: int, buffer_bytes: int, mtu: int = 1500) -> int:
        return segment_bytes(LinkModel(rate, 0, buffer_bytes, mtu_bytes=mtu))

    assert size(12_500_000_000, 1 << 30) == pytest.approx(3_750_000, rel=0.01)
    assert size(50_000_000, 300_000) == pytest.approx(16 << 10, rel=0.1)
    assert size(5_000_000, 1 << 20) == 3 * 1448, "a millisecond, as the kernel's bursts"
    assert size(1_250_000, 1 << 20) == size(1_250_000, 7_500) == 2 * 1448
    assert size(1_250_000, 7_500, 9000) == 8948
