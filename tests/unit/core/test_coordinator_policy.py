"""The coordinator machine and its policy: what two events change, at once."""

from __future__ import annotations

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.events import LocalTime, PolicyChanged, SessionMessage, SessionOpened
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Beat, Grant, LinkInfo, Pace, Queued, Request, Welcome
from proxyd.core.policy import JobPolicy, LinkPolicy, Policy, parse_window
from proxyd.wire.envelope import TrafficClass

AB = LinkName("a", "b")
MIB = 1 << 20
MS = 1_000_000
RATE = 50_000_000


def machine(policy: Policy | None = None, *, live: bool = False) -> CoordinatorMachine:
    settings = LinkSettings(AB, RATE, 60 * MS, 300_000, mtu_bytes=9000, live=live)
    one = CoordinatorMachine(CoordinatorConfig(links=(settings,)), epoch=1)
    if policy is not None:
        assert one.handle(PolicyChanged(policy), 0) == []
    for session in (1, 2):
        hello = AgentHello(AgentName("a", f"host{session}"), session, "10.0.0.1:1")
        one.handle(SessionOpened(session, hello), 1)
    return one


def ask(
    one: CoordinatorMachine,
    session: int,
    sequence: int,
    *,
    job: str = "job",
    nbytes: int = 8 * MIB,
    deadline_in_ns: int = 0,
    now_ns: int = 10,
) -> list[CoordinatorEffect]:
    transfer = TransferId(session, sequence)
    request = Request(transfer, AB, AgentName("b", "0"), job, TrafficClass.BULK, nbytes, deadline_in_ns=deadline_in_ns)
    return one.handle(SessionMessage(session, request), now_ns)


def pace(one: CoordinatorMachine, now_ns: int = 20) -> int:
    return one.status(now_ns).links[0].pace_bytes_per_s


@pytest.mark.parametrize("live", [False, True])
def test_a_cap_bounds_the_pace_and_what_agents_are_told(live: bool) -> None:
    one = machine(Policy(links={AB: LinkPolicy(RATE // 5)}), live=live)
    assert pace(one) <= RATE // 5
    [welcome] = [
        effect.message
        for effect in one.handle(SessionOpened(3, AgentHello(AgentName("a", "host3"), 3, "10.0.0.1:1")), 30)
        if isinstance(effect, ToAgent) and isinstance(effect.message, Welcome)
    ]
    [info] = welcome.links
    assert isinstance(info, LinkInfo)
    assert info.rate_bytes_per_s <= RATE // 5
    assert one.audit(30) == ""


def test_whoever_holds_grants_hears_of_a_lower_limit_at_once() -> None:
    calendar = (parse_window("mon 09:00-18:00 100Mbit"),)
    one = machine(Policy(links={AB: LinkPolicy(0, calendar)}))
    one.handle(LocalTime(0), 5)
    before = pace(one)
    effects = ask(one, 1, 1)
    [grant] = [e.message for e in effects if isinstance(e, ToAgent) and isinstance(e.message, Grant)]
    assert grant.rate_bytes_per_s == before
    effects = one.handle(LocalTime(9 * 60), 20 * MS)
    assert pace(one) <= 12_500_000
    [told] = [e.message for e in effects if isinstance(e, ToAgent) and isinstance(e.message, Pace)]
    assert told.rate_bytes_per_s == pace(one)
    assert one.audit(20 * MS) == ""
    one.handle(LocalTime(18 * 60), 40 * MS)
    assert pace(one) == before


def test_without_a_time_the_strictest_window_holds() -> None:
    calendar = (parse_window("mon 09:00-18:00 100Mbit"), parse_window("sat 00:00-24:00 200Mbit"))
    one = machine(Policy(links={AB: LinkPolicy(0, calendar)}))
    assert pace(one) <= 12_500_000
    one.handle(LocalTime(5 * 1440), 5)
    assert 12_500_000 < pace(one) <= 25_000_000


def test_a_link_that_comes_later_has_its_policy() -> None:
    late = LinkName("a", "c")
    one = machine(Policy(links={late: LinkPolicy(1_000_000)}))
    one.handle(SessionOpened(9, AgentHello(AgentName("c", "0"), 9, "10.0.0.9:1")), 5)
    assert [link.pace_bytes_per_s <= 1_000_000 for link in one.status(5).links if link.link == late] == [True]


def test_fallback_rates_follow_the_limit_with_the_next_beat() -> None:
    one = machine(Policy())
    one.handle(PolicyChanged(Policy(links={AB: LinkPolicy(RATE // 10)})), 20)
    assert one.audit(20) == ""
    due_ns = one.next_deadline_ns()
    assert due_ns is not None
    effects = one.handle(LocalTime(0), due_ns + 200 * MS)
    rates = [
        rate
        for e in effects
        if isinstance(e, ToAgent) and isinstance(e.message, Beat)
        for _, rate in e.message.fallback
    ]
    assert rates
    assert sum(rates) <= RATE // 10 * 8 // 10
    assert one.audit(due_ns + 200 * MS) == ""


def test_weights_are_in_the_status_and_in_what_a_newcomer_is_told() -> None:
    one = machine(Policy({"x": JobPolicy(3)}))
    ask(one, 1, 1, job="x", nbytes=512 * MIB)
    effects = ask(one, 2, 1, job="y", nbytes=MIB)
    [queued] = [e.message for e in effects if isinstance(e, ToAgent) and isinstance(e.message, Queued)]
    assert queued.starts_in_ns < 1_000 * MS, "not behind all of x's half gigabyte"
    jobs = {job.name: job for job in one.status(20).links[0].jobs}
    assert (jobs["x"].weight, jobs["y"].weight) == (3, 1)
    assert jobs["y"].waiting_bytes == MIB


def test_a_repeated_request_does_not_put_a_deadline_off() -> None:
    one = machine()
    ask(one, 1, 1, nbytes=512 * MIB)
    ask(one, 2, 1, deadline_in_ns=100 * MS, now_ns=20)
    ask(one, 2, 2, deadline_in_ns=200 * MS, now_ns=30)
    ask(one, 2, 1, deadline_in_ns=900 * MS, now_ns=40)
    order = [item.transfer for item in one.status(50).links[0].transfers]
    assert order == [TransferId(2, 1), TransferId(2, 2), TransferId(1, 1)]
