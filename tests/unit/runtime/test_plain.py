"""Core values as plain ones and back, over versions."""

from __future__ import annotations

import dataclasses
import json

import pytest

from proxyd.core.errors import InternalError
from proxyd.core.events import CoordinatorEvent, PolicyChanged, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Directory, DirectoryEntry, Request
from proxyd.core.policy import JobPolicy, LinkPolicy, Policy
from proxyd.runtime.plain import Plain, PlainError
from proxyd.wire.envelope import TrafficClass

REQUEST = Request(TransferId(1 << 63, 7), LinkName("a", "b"), AgentName("b", "x"), "job", TrafficClass.SYNC, 8 << 20)
EVENTS: list[CoordinatorEvent] = [
    TimePassed(),
    SessionOpened(1, AgentHello(AgentName("a", "one"), 5, "127.0.0.1:7601", 9)),
    SessionMessage(1, REQUEST),
]


@pytest.mark.parametrize("event", EVENTS)
def test_there_and_back(event: CoordinatorEvent) -> None:
    plain = Plain()
    text = json.dumps(plain.encoder(CoordinatorEvent)(event))
    back = plain.decoder(CoordinatorEvent)(json.loads(text))
    assert back == event
    if isinstance(back, SessionMessage):
        assert isinstance(back.message, Request)
        assert isinstance(back.message.traffic, TrafficClass)
        assert isinstance(back.message.link, LinkName)


def test_lists_of_records_and_fixed_tuples() -> None:
    entry = DirectoryEntry(EndpointName("j", 3), 1, AgentName("a", "one"), 2, "127.0.0.1:1")
    value = Directory((entry, entry), ((EndpointName("j", 4), 9, "gone"),), full=True)
    plain = Plain()
    assert plain.decoder(Directory)(json.loads(json.dumps(plain.encoder(Directory)(value)))) == value


@dataclasses.dataclass(frozen=True)
class Newer:
    b: int
    a: str
    added: tuple[int, ...] = (7,)


def test_fields_are_put_by_the_name_that_they_were_written_under() -> None:
    old = Plain({"Newer": ["a", "removed", "b"]})
    assert old.decoder(Newer)(["text", 99, 5]) == Newer(5, "text")


@dataclasses.dataclass(frozen=True)
class Odd:
    value: object


def test_what_has_no_plain_form_is_refused_at_once() -> None:
    with pytest.raises(InternalError, match="no plain form"):
        Plain().encoder(Odd)


@pytest.mark.parametrize("wrong", [3, [], ["NoSuchEvent", []], ["SessionMessage", [1]]])
def test_what_does_not_fit_is_told(wrong: object) -> None:
    with pytest.raises(PlainError):
        Plain().decoder(CoordinatorEvent)(wrong)


def test_a_policy_crosses_whole() -> None:
    policy = Policy(
        jobs={"train": JobPolicy(weight=3, floor_bytes_per_s=1_000_000)},
        links={LinkName("a", "b"): LinkPolicy(cap_bytes_per_s=5_000_000)},
    )
    plain = Plain()
    text = json.dumps(plain.encoder(CoordinatorEvent)(PolicyChanged(policy)))
    assert plain.decoder(CoordinatorEvent)(json.loads(text)) == PolicyChanged(policy)
