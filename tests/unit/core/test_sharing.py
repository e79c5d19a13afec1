"""Links of one coordinator over one line: who decides first, and who is told what."""

from __future__ import annotations

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.errors import ConfigError
from proxyd.core.events import LocalTime, SessionClosed, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Beat, Echo, Grant, Pace, Report, Request
from proxyd.core.policy import BottleneckSettings
from proxyd.wire.envelope import TrafficClass

AB, AC, BA = LinkName("a", "b"), LinkName("a", "c"), LinkName("b", "a")
MIB = 1 << 20
MS = 1_000_000
RATE = 50_000_000
EGRESS = BottleneckSettings("a", True, RATE)


def machine(*lines: BottleneckSettings, observe: LinkName | None = None) -> CoordinatorMachine:
    settings = tuple(
        LinkSettings(link, RATE, 60 * MS, 300_000, mtu_bytes=9000, observe=link == observe) for link in (AB, AC, BA)
    )
    one = CoordinatorMachine(CoordinatorConfig(links=settings, bottlenecks=lines), epoch=1)
    for session, site in ((1, "a"), (2, "a"), (3, "b")):
        one.handle(SessionOpened(session, AgentHello(AgentName(site, f"h{session}"), session, "10.0.0.1:1")), 1)
    return one


def ask(one: CoordinatorMachine, session: int, link: LinkName, now_ns: int, nbytes: int = 64 * MIB) -> list[object]:
    request = Request(TransferId(session, 1), link, AgentName(link.dst_site, "0"), "job", TrafficClass.PIPELINE, nbytes)
    return told(one, one.handle(SessionMessage(session, request), now_ns), now_ns)


def told(one: CoordinatorMachine, effects: list[CoordinatorEffect], now_ns: int) -> list[object]:
    assert one.audit(now_ns) == ""
    return [
        effect.message for effect in effects if isinstance(effect, ToAgent) and isinstance(effect.message, Grant | Pace)
    ]


def paces(one: CoordinatorMachine, now_ns: int) -> dict[LinkName, int]:
    return {link.link: link.pace_bytes_per_s for link in one.status(now_ns).links}


def test_who_sends_shrinks_before_another_link_begins() -> None:
    one = machine(EGRESS)
    [first, *_] = ask(one, 1, AB, 10)
    assert isinstance(first, Grant)
    assert first.rate_bytes_per_s == paces(one, 10)[AB]
    [shrunk, *begins] = ask(one, 2, AC, 20 * MS)
    assert isinstance(shrunk, Pace)
    assert shrunk.link == AB
    assert begins
    assert all(isinstance(grant, Grant) and grant.link == AC for grant in begins)
    assert begins[0].reason.startswith("pipeline: first in line, whole link; a egress: ")  # type: ignore[attr-defined]
    assert begins[0].reason.endswith(" of it, 2 links share it")  # type: ignore[attr-defined]
    assert "egress" not in first.reason
    [line] = one.status(20 * MS).bottlenecks
    assert shrunk.rate_bytes_per_s == paces(one, 20 * MS)[AC] == line.pace_bytes_per_s // 2
    assert 0.95 * line.pace_bytes_per_s < line.granted_bytes_per_s <= line.pace_bytes_per_s
    assert line.outstanding_bytes <= line.window_bytes


def test_who_is_left_grows_when_the_other_has_left() -> None:
    one = machine(EGRESS)
    ask(one, 1, AB, 10)
    granted = sum(grant.nbytes for grant in ask(one, 2, AC, 20 * MS, MIB // 4) if isinstance(grant, Grant))
    assert granted == MIB // 4
    half = paces(one, 20 * MS)[AB]
    report = Report(AC, MIB // 4, MIB // 4, 0, 0, 0, 0, 0, 60 * MS, 60 * MS, 0, 0, False)
    now_ns = 120 * MS
    [grown, *_] = told(one, one.handle(SessionMessage(2, report), now_ns), now_ns)
    assert isinstance(grown, Pace)
    assert grown.link == AB
    assert grown.rate_bytes_per_s == paces(one, now_ns)[AB] > 1.9 * half


def test_the_reverse_direction_is_no_part_of_it() -> None:
    one = machine(EGRESS)
    whole = paces(one, 10)[BA]
    ask(one, 1, AB, 10)
    ask(one, 2, AC, 20)
    ask(one, 3, BA, 30)
    assert paces(one, 30)[BA] == whole
    assert [name for name, _ in one.status(30).bottlenecks[0].links] == [AB, AC]


def test_a_link_over_two_lines_gets_the_lesser_part() -> None:
    one = machine(EGRESS, BottleneckSettings("c", False, RATE // 10))
    ask(one, 1, AC, 10)
    assert paces(one, 10)[AC] <= RATE // 10


def test_a_link_that_is_only_observed_takes_no_part() -> None:
    one = machine(EGRESS, observe=AC)
    assert [name for name, _ in one.status(10).bottlenecks[0].links if name in (AB, AC)] == [AB]


def test_what_a_lost_agent_may_send_by_itself_is_kept_free() -> None:
    one = machine(EGRESS)
    now_ns = 300 * MS
    for at_ns in range(MS, now_ns, 50 * MS):
        one.handle(TimePassed(), at_ns)  # beats hand fallback rates out
    ask(one, 2, AC, now_ns)
    effects = one.handle(SessionClosed(2, "lost"), now_ns + MS)
    told(one, effects, now_ns + MS)
    ask(one, 1, AB, now_ns + 2 * MS)
    [line] = one.status(now_ns + 2 * MS).bottlenecks
    assert paces(one, now_ns + 2 * MS)[AB] < 0.7 * line.pace_bytes_per_s


def test_fallback_rates_fit_into_the_line() -> None:
    one = machine(EGRESS)
    ask(one, 1, AB, 10)
    ask(one, 2, AC, 20)
    sums: dict[int, int] = {}
    for at_ns in range(MS, 700 * MS, 50 * MS):
        for effect in one.handle(LocalTime(0), at_ns):
            if isinstance(effect, ToAgent) and isinstance(effect.message, Beat) and effect.session in (1, 2):
                sums[effect.session] = sum(rate for _, rate in effect.message.fallback)
                one.handle(SessionMessage(effect.session, Echo(effect.message.number, 0)), at_ns)
    assert 0.7 * RATE < sum(sums.values()) <= 0.8 * RATE


def test_a_line_stands_once() -> None:
    with pytest.raises(ConfigError, match="a bottleneck stands twice among a egress, a egress"):
        CoordinatorConfig(bottlenecks=(EGRESS, EGRESS))
