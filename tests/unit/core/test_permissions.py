"""Which job may use which link and class: the rules, and the coordinator that goes by them."""

from __future__ import annotations

import pytest

from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import ToAgent
from proxyd.core.events import CoordinatorEvent, PolicyChanged, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Announce, Denied, Grant, Request, Welcome
from proxyd.core.permissions import EVERYTHING, JobRule, Permissions
from proxyd.core.policy import Policy
from proxyd.wire.envelope import TrafficClass

LINK, BACK = LinkName("a", "b"), LinkName("b", "a")
RULES = Permissions((JobRule("free"), JobRule("llama", ("a->*",), ("sync", "bulk"))))
MIB = 1 << 20


@pytest.mark.parametrize(
    ("job", "link", "traffic", "words"),
    [
        ("llama", LINK, TrafficClass.SYNC, ""),
        ("llama", LinkName("a", "c"), TrafficClass.BULK, ""),
        ("llama", BACK, TrafficClass.SYNC, "may not use link b->a (its [[job]] allows a->*)"),
        ("llama", LINK, TrafficClass.PIPELINE, "may not use class pipeline (its [[job]] allows sync, bulk)"),
        ("free", BACK, TrafficClass.PIPELINE, ""),
        ("other", BACK, TrafficClass.PIPELINE, ""),
    ],
)
def test_rules(job: str, link: LinkName, traffic: TrafficClass, words: str) -> None:
    found = RULES.denial(job, link, traffic)
    assert words in found
    assert bool(found) == bool(words)
    assert EVERYTHING.denial(job, link, traffic) == ""


def test_only_named_jobs() -> None:
    strict = Permissions(RULES.rules, only_named=True)
    assert strict.denial("free", LINK, TrafficClass.BULK) == ""
    assert "is not named" in strict.denial("other", LINK, TrafficClass.BULK)
    assert "is not named" in Permissions(only_named=True).denial("free", LINK, TrafficClass.BULK)


class Desk:
    """A coordinator with an agent of site a, and what it says to it."""

    def __init__(self, permissions: Permissions) -> None:
        self.machine = CoordinatorMachine(CoordinatorConfig(), epoch=1)
        self.now_ns = 1_000_000_000
        self.said: list[object] = []
        self.put(PolicyChanged(Policy(permissions=permissions)))
        self.put(SessionOpened(1, AgentHello(AgentName("a", "x"), 5, "10.0.0.1:7601")))

    def put(self, event: CoordinatorEvent | TimePassed) -> None:
        self.said += [e.message for e in self.machine.handle(event, self.now_ns) if isinstance(e, ToAgent)]

    def ask(self, number: int, job: str, traffic: TrafficClass, announcement: int = 0) -> list[object]:
        before = len(self.said)
        transfer = TransferId(7, number)
        request = Request(transfer, LINK, AgentName("b", "y"), job, traffic, MIB, announcement, 0, 0)
        self.put(SessionMessage(1, request))
        return self.said[before:]


def test_a_forbidden_request_is_denied_with_the_reason_and_others_are_not() -> None:
    desk = Desk(RULES)
    (denied,) = [one for one in desk.ask(1, "llama", TrafficClass.PIPELINE) if isinstance(one, Denied)]
    assert "may not use class pipeline" in denied.reason
    assert not any(isinstance(one, Denied) for one in desk.ask(2, "llama", TrafficClass.SYNC))
    assert any(isinstance(one, Grant) and one.transfer == TransferId(7, 2) for one in desk.said)
    assert not any(isinstance(one, Grant) and one.transfer == TransferId(7, 1) for one in desk.said)


def test_nothing_is_granted_ahead_to_what_is_forbidden() -> None:
    desk = Desk(RULES)
    desk.put(SessionMessage(1, Announce(1, LINK, "llama", TrafficClass.PIPELINE, MIB, 0)))
    for _ in range(50):
        desk.now_ns += 10_000_000
        desk.put(TimePassed())
    assert not any(isinstance(one, Grant) for one in desk.said)


def test_agents_are_told_with_the_welcome_and_when_it_changes() -> None:
    desk = Desk(RULES)
    (welcome,) = [one for one in desk.said if isinstance(one, Welcome)]
    assert welcome.permissions == RULES
    strict = Permissions((), only_named=True)
    desk.put(PolicyChanged(Policy(permissions=strict)))
    desk.put(PolicyChanged(Policy(permissions=strict)))
    assert [one for one in desk.said if isinstance(one, Permissions)] == [strict]
    assert any(isinstance(one, Denied) for one in desk.ask(3, "llama", TrafficClass.SYNC))
