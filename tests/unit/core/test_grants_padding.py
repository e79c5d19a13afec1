"""Padding that warms connections up is no demand: a link is not judged by it."""

from __future__ import annotations

import dataclasses

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.grants import PADDING_JOB
from proxyd.core.messages import Grant
from proxyd.wire.envelope import TrafficClass

from .test_coordinator import LINK, MIB, MS, Desk, report


def live_desk() -> Desk:
    desk = Desk()
    settings = LinkSettings(LINK, 50_000_000, 60 * MS, 300_000, mtu_bytes=9000, live=True)
    desk.machine = CoordinatorMachine(CoordinatorConfig(name="c", links=(settings,)), epoch=7)
    desk.open(1)
    desk.open(2)
    return desk


def demand(desk: Desk) -> bool:
    return desk.machine._links[LINK].granter.estimator._flow.demand


@pytest.mark.parametrize(("job", "wanted"), [(PADDING_JOB, False), ("job", True)])
def test_only_what_somebody_really_wants_is_demand(job: str, wanted: bool) -> None:
    desk = live_desk()
    desk.request(1, 1, 64 * MIB, job=job, traffic=TrafficClass.BULK)
    granted = sum(grant.nbytes for grant in desk.heard(1, Grant))
    assert granted
    desk.advance(5 * MS)
    desk.say(1, report(granted // 4, granted // 8, backlog=granted // 2))
    assert demand(desk) is wanted


def test_a_real_message_beside_padding_is_demand() -> None:
    desk = live_desk()
    desk.request(1, 1, 64 * MIB, job=PADDING_JOB, traffic=TrafficClass.BULK)
    desk.request(2, 1, 64 * MIB)
    granted = sum(grant.nbytes for grant in desk.heard(1, Grant))
    desk.advance(5 * MS)
    desk.say(1, report(granted // 4, granted // 8, backlog=granted // 2))
    assert demand(desk)


def test_padding_never_lowers_the_estimate() -> None:
    """A window's worth per round trip, under a queue that stands: it would be a tenth of the link."""
    desk = live_desk()
    granter = desk.machine._links[LINK].granter
    before = granter.estimator.estimate(desk.now_ns).bottleneck_bytes_per_s
    desk.request(1, 1, 64 * MIB, job=PADDING_JOB, traffic=TrafficClass.BULK)
    left = 0
    for _ in range(200):
        desk.advance(5 * MS)
        granted = sum(grant.nbytes for grant in desk.heard(1, Grant))
        left = min(granted, left + 5_000_000 * 5 // 1000)
        slow = report(left, left - min(left, 300_000), backlog=granted - left)
        desk.say(1, dataclasses.replace(slow, srtt_ns=70 * MS))
    assert granter.estimator.estimate(desk.now_ns).bottleneck_bytes_per_s >= before
