"""The models below the machines: the link's queue, the TCP stream, the clock."""

from __future__ import annotations

import random

import pytest

from proxyd.sim.clock import Alarm, Clock
from proxyd.sim.link import Link, LinkModel
from proxyd.sim.tcp import INITIAL_WINDOW_BYTES, Stream

MS = 1_000_000


def test_things_happen_in_time_order_and_then_in_planned_order() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(5, lambda: seen.append("b"))
    clock.at(2, lambda: seen.append("a"))
    clock.at(5, lambda: seen.append("c"))
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


def test_a_link_serialises_delays_and_drops_at_its_tail() -> None:
    clock, arrivals = Clock(), list[int]()
    link = Link(clock, LinkModel(1_000_000, 10 * MS, 20_000, mtu_bytes=1500), random.Random(1))
    accepted = [link.send(9_948, lambda: arrivals.append(clock.now_ns)) for _ in range(4)]
    wire = link.wire_bytes(9_948)
    assert wire == 9_948 + 7 * 52
    assert accepted == [True, True, False, False]  # 10.3 kB on the wire, then 10.3 kB waiting; a third would overflow
    clock.run(100 * MS)
    assert arrivals == [wire * 1000 + 10 * MS, 2 * wire * 1000 + 10 * MS]
    assert (link.dropped, link.peak_queue_bytes) == (2, wire)


def stream_world(
    nbytes: int, buffer_bytes: int = 1 << 30, pace: int = 0, idle_resets: bool = False
) -> tuple[Clock, Link, Stream, list[int]]:
    clock, arrivals = Clock(), list[int]()
    link = Link(clock, LinkModel(50_000_000, 30 * MS, buffer_bytes), random.Random(1))
    chunks = [(f"chunk{i}", min(131_072, nbytes - i * 131_072), True) for i in range(-(-nbytes // 131_072))]
    stream = Stream(
        clock,
        link,
        30 * MS,
        slow_start_after_idle=idle_resets,
        ask=lambda: chunks.pop(0) if chunks else None,
        arrived=lambda chunk: arrivals.append(int(str(chunk)[5:])),
    )
    stream.pace_bytes_per_s = pace
    stream.pump()
    return clock, link, stream, arrivals


def test_a_cold_stream_takes_round_trips_to_open_its_window() -> None:
    clock, _, stream, arrivals = stream_world(8 << 20)
    clock.run(60 * MS)
    assert stream.granted_delivered_bytes == 0
    assert stream.granted_left_bytes <= INITIAL_WINDOW_BYTES
    clock.run(2_000 * MS)
    assert arrivals == sorted(arrivals) == list(range(64))
    assert stream.granted_delivered_bytes == 8 << 20
    assert stream.settled
    assert stream.min_rtt_ns == pytest.approx(60 * MS, rel=0.01)


def test_losses_are_repaired_in_order_and_shrink_the_window() -> None:
    clock, link, stream, arrivals = stream_world(8 << 20, buffer_bytes=100_000)
    clock.run(20_000 * MS)
    assert link.dropped > 0
    assert stream.retransmits == link.dropped
    assert arrivals == list(range(64))  # whole, once, in order
    assert stream.granted_delivered_bytes == stream.granted_left_bytes == 8 << 20


def test_pacing_holds_the_rate() -> None:
    clock, link, stream, _ = stream_world(8 << 20, pace=10_000_000)
    clock.run(500 * MS)
    begin = stream.granted_left_bytes
    clock.run(700 * MS)
    assert stream.granted_left_bytes - begin == pytest.approx(2_000_000, rel=0.03)
    assert link.peak_queue_bytes == 0


@pytest.mark.parametrize("resets", [False, True])
def test_idleness_resets_the_window_only_where_the_kernel_does(resets: bool) -> None:
    clock, _, stream, _ = stream_world(8 << 20, idle_resets=resets)
    clock.run(3_000 * MS)
    warm = stream.window_bytes
    assert warm > 4 * INITIAL_WINDOW_BYTES
    stream.pump()
    assert stream.window_bytes == (INITIAL_WINDOW_BYTES if resets else warm)
