"""Sizes that follow from a link, the account that believes nobody, and the window that is never overdrawn."""

from __future__ import annotations

import dataclasses
import random

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.ids import LinkName
from proxyd.core.messages import Report
from proxyd.core.window import (
    HOST_DELAY_LIVE_NS,
    HOST_DELAY_NS,
    MIN_CHUNK_BYTES,
    Account,
    Bottleneck,
    host_delay_ns,
    lane_window_bytes,
    link_sizes,
    report_interval_ns,
)

MS = 1_000_000
SECOND = 1_000 * MS
LINK = LinkName("a", "b")
CONTROL_NS = MS
LEASE_NS = 2 * SECOND


def settings(mbit: int, rtt_ms: int, buffer_bytes: int) -> LinkSettings:
    return LinkSettings(LINK, mbit * 125_000, rtt_ms * MS, buffer_bytes, mtu_bytes=9000)


@pytest.mark.parametrize(
    ("link", "slot", "chunk"),
    [
        (settings(400, 60, 300_000), 128 << 10, 128 << 10),  # half of a shallow buffer
        (settings(400, 60, 3_000_000), 512 << 10, 512 << 10),  # 20 ms of the link
        (settings(10, 60, 75_000), 64 << 10, 64 << 10),  # a slow link: the least chunk
        (settings(10_000, 60, 75_000_000), 16 << 20, 1 << 20),
        (settings(12_000, 60, 90_000_000), 16 << 20, 2 << 20),
    ],
)
def test_slots_and_chunks(link: LinkSettings, slot: int, chunk: int) -> None:
    sizes = link_sizes(link, CONTROL_NS, LEASE_NS)
    assert (sizes.slot_bytes, sizes.chunk_bytes) == (slot, chunk)
    assert sizes.slot_bytes % sizes.chunk_bytes == 0
    assert sizes.chunk_bytes & (sizes.chunk_bytes - 1) == 0


@pytest.mark.parametrize("mbit", [1, 10, 100, 1_000, 10_000, 100_000])
@pytest.mark.parametrize("rtt_ms", [0, 1, 60, 300])
@pytest.mark.parametrize("buffer_bytes", [0, 1_500, 300_000, 1 << 30])
def test_sizes_are_sane_for_any_link(mbit: int, rtt_ms: int, buffer_bytes: int) -> None:
    link = settings(mbit, rtt_ms, buffer_bytes)
    sizes = link_sizes(link, CONTROL_NS, LEASE_NS)
    assert 0 < sizes.pace_bytes_per_s < link.payload_bytes_per_s < link.capacity_bytes_per_s
    assert 64 << 10 <= sizes.chunk_bytes <= sizes.slot_bytes <= 16 << 20
    assert CONTROL_NS < sizes.lead_ns < SECOND
    assert 0 < sizes.ttl_ns <= LEASE_NS // 2
    assert sizes.report_ns == report_interval_ns(rtt_ms * MS) >= 5 * MS


def test_pace_counts_payload_not_packets() -> None:
    link = LinkSettings(LINK, 125_000_000, 60 * MS, mtu_bytes=1500)
    assert link.payload_bytes_per_s == 125_000_000 * 1448 // 1500
    assert link_sizes(link, CONTROL_NS, LEASE_NS).pace_bytes_per_s == int(link.payload_bytes_per_s * 0.98)


def test_window_is_bdp_and_slots_and_what_control_costs() -> None:
    rate, rtt, slot, extra = 50_000_000, 60 * MS, 128 << 10, 6 * MS
    assert lane_window_bytes(rate, rtt, 0, slot, extra, rate) == 3_000_000 + 2 * slot + 300_000
    # A deep buffer lets more be in flight, up to a quarter of the BDP.
    assert lane_window_bytes(rate, rtt, 3_000_000, slot, extra, rate) == 3_000_000 + 750_000 + 300_000
    # A lane at half of the pace may use half of the buffer's allowance.
    half = lane_window_bytes(rate // 2, rtt, 3_000_000, 64 << 10, extra, rate)
    assert half == 1_500_000 + 375_000 + 150_000
    # On a slow link four of the least chunks: one may wait for a timeout of TCP.
    slow = 1_250_000
    assert lane_window_bytes(slow, rtt, 0, MIN_CHUNK_BYTES, extra, slow) == 75_000 + 4 * MIN_CHUNK_BYTES + 7_500


# ------------------------------------------------------------------------------------ the account

NOTHING = Report(LINK, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, True)


def told(**figures: int) -> Report:
    return dataclasses.replace(NOTHING, **figures)  # type: ignore[arg-type]


def account(granted: int = 1000) -> Account:
    result = Account()
    result.grant(granted, 50, 10 * SECOND, 20 * SECOND, 0)
    return result


def test_delivered_and_returned_bytes_are_settled_once() -> None:
    it = account()
    assert it.report(told(left_bytes=600, delivered_bytes=400, backlog_bytes=300, returned_bytes=100), 1) == 500
    assert (it.outstanding_bytes, it.at_host_bytes, it.unseen_bytes) == (500, 300, 0)
    assert it.report(told(left_bytes=600, delivered_bytes=400, backlog_bytes=300, returned_bytes=100), 2) == 0
    assert it.report(told(left_bytes=500, delivered_bytes=300, returned_bytes=100), 3) == 0, "an older one, late"
    assert it.report(told(left_bytes=900, delivered_bytes=900, returned_bytes=100), 4) == 500
    assert (it.outstanding_bytes, it.clamped_reports) == (0, 0)
    assert not it.marks


@pytest.mark.parametrize(
    "lie",
    [
        {"delivered_bytes": -1},
        {"returned_bytes": -(2**63)},
        {"left_bytes": 2**62, "delivered_bytes": 2**62},
        {"returned_bytes": 2**62},
        {"delivered_bytes": 700, "left_bytes": 100},
        {"left_bytes": 800, "delivered_bytes": 0, "returned_bytes": 800},
    ],
)
def test_lies_are_clamped_and_counted(lie: dict[str, int]) -> None:
    it = account()
    it.report(told(**lie), 1)
    assert it.clamped_reports == 1
    assert 0 <= it.outstanding_bytes <= 1000
    assert it.delivered_bytes <= it.left_bytes
    assert it.left_bytes + it.returned_bytes <= 1000
    it.report(told(left_bytes=1000, delivered_bytes=1000), 2)
    assert it.outstanding_bytes >= 0


def test_what_is_never_accounted_for_is_forgiven() -> None:
    it = account()
    it.report(told(left_bytes=300, delivered_bytes=300, backlog_bytes=700), 1)
    assert it.expire(20 * SECOND - 1) == 0
    assert it.expire(20 * SECOND) == 700
    assert it.outstanding_bytes == 0
    it.report(told(left_bytes=1000, delivered_bytes=1000), 21 * SECOND)
    assert it.outstanding_bytes == 0, "late words about forgiven bytes free nothing twice"
    it.grant(500, 50, 30 * SECOND, 40 * SECOND, 22 * SECOND)
    assert it.outstanding_bytes == 500


@pytest.mark.parametrize("seed", range(20))
def test_sums_that_are_kept_are_those_of_the_counts(seed: int) -> None:
    chance = random.Random(seed)
    account = Account()
    now_ns = 0
    for _ in range(200):
        now_ns += chance.randrange(1_000)
        match chance.randrange(3):
            case 0:
                account.grant(chance.randrange(1, 500), 1_000, now_ns + 300, now_ns + 2_000, now_ns)
            case 1:
                figures = {
                    name: chance.randrange(-10, account.granted_bytes + 100)
                    for name in ("left_bytes", "delivered_bytes", "returned_bytes", "backlog_bytes")
                }
                before = account.settled_bytes
                assert account.report(told(**figures), now_ns) == account.settled_bytes - before
            case _:
                account.expire(now_ns)
        assert account.outstanding_bytes == account.granted_bytes - account.settled_bytes >= 0
        gone = max(account.left_bytes + account.returned_bytes, account.settled_bytes)
        assert account.at_host_bytes == account.granted_bytes - gone >= 0
        assert sum(mark.granted_bytes <= account.settled_bytes for mark in account.marks) == 0


def test_rates_bind_until_their_bytes_have_left_or_their_time_is_over() -> None:
    it = Account()
    it.grant(1000, 80, 10, 100, 0)
    it.grant(1000, 50, 20, 100, 0)
    assert it.binding_rate(1) == 80
    it.report(told(left_bytes=1000, backlog_bytes=1000), 2)
    assert it.binding_rate(3) == 50
    assert it.binding_rate(20) == 0
    it.grant(1000, 30, 40, 100, 25)
    assert it.binding_rate(26) == 30, "a rate whose time is over does not come back"
    it.believe(10, 27)
    assert it.binding_rate(28) == 10


# ----------------------------------------------------------------------------------- the window


def test_a_window_shrinks_only_as_fast_as_bytes_are_acknowledged() -> None:
    window = Bottleneck("a->b", 1000)
    window.take(900)
    window.resize(500)
    assert window.window_bytes == 900
    window.settle(300)
    window.resize(500)
    assert window.window_bytes == 600
    window.settle(600)
    window.resize(500)
    assert (window.window_bytes, window.room_bytes, window.violations) == (500, 500, 0)


def test_an_overdrawn_window_is_counted() -> None:
    window = Bottleneck("a->b", 1000)
    window.take(1001)
    assert window.violations == 1


def test_hosts_may_be_late_where_nobody_is_harmed_by_it() -> None:
    pace = 50_000_000
    assert host_delay_ns(True, 0, pace) == HOST_DELAY_LIVE_NS, "no losses yet"
    assert host_delay_ns(True, 3_000_000, pace) == HOST_DELAY_LIVE_NS
    assert host_delay_ns(True, 300_000, pace) == HOST_DELAY_NS, "a buffer of 6 ms"
    assert host_delay_ns(True, 0, 1_250_000) == HOST_DELAY_NS, "10 Mbit/s: a chunk takes 50 ms"
    assert host_delay_ns(False, 0, pace) == host_delay_ns(False, 3_000_000, pace) == HOST_DELAY_NS
