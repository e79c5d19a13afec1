"""Every message survives the crossing unchanged, and nothing broken comes in."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxyd.core import messages as core
from proxyd.core.errors import InternalError
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.runtime import crossing, translate
from proxyd.runtime.translate import TranslateError
from proxyd.v1 import coordination_pb2 as pb
from proxyd.wire.envelope import TrafficClass

names = st.builds("{}{}".format, st.sampled_from("aZ7"), st.text("bY0._-", max_size=8))
lives = st.integers(0, 2**64 - 1)
counts = st.integers(0, 2**63 - 1)
sizes = st.integers(0, 2**60)
rates = st.integers(0, 10**15)
durations = st.integers(0, 10**17)
# Limits are in bytes: a character has up to four.
texts = st.text(st.characters(codec="utf-8"), max_size=15)
addresses = st.builds("{}.{}.{}.{}:{}".format, *[st.integers(1, 255)] * 4, st.integers(1, 65535))
links = st.builds(LinkName, names, names)
agents = st.builds(AgentName, names, names)
transfers = st.builds(TransferId, lives, lives)
endpoints = st.builds(EndpointName, texts, st.integers(0, 2**32 - 1))

NAMED = {
    "job": texts,
    "reason": texts,
    "source": texts,
    "data_address": addresses,
    "coordinator": names,
    "traffic": st.sampled_from(TrafficClass),
    "owns": st.lists(st.sampled_from(["a->*", "*->*", "a->b"]), max_size=3).map(tuple),
    "fallback": st.lists(st.tuples(links, rates), max_size=3).map(tuple),
    "gone": st.lists(st.tuples(endpoints, lives, texts), max_size=3).map(tuple),
    "unsure": st.lists(endpoints, max_size=3).map(tuple),
    "incarnation": lives,
    "agent_incarnation": lives,
}
TYPED = {
    AgentName: agents,
    LinkName: links,
    TransferId: transfers,
    EndpointName: endpoints,
    bool: st.booleans(),
    str: names,
    float: st.floats(0.0, 1.0),
}
SUFFIXED = {"_ns": durations, "_bytes_per_s": rates, "bytes": sizes, "": counts}


def message_of(kind: type) -> st.SearchStrategy:
    """Any message of a kind, from the names and types of its fields."""
    hints = typing.get_type_hints(kind)
    parts = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if field.name in NAMED:
            parts[field.name] = NAMED[field.name]
        elif hint in TYPED:
            parts[field.name] = TYPED[hint]
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            parts[field.name] = message_of(hint)
        elif typing.get_origin(hint) is tuple:
            part = typing.get_args(hint)[0]
            parts[field.name] = st.lists(TYPED[part] if part in TYPED else message_of(part), max_size=3).map(tuple)
        else:
            assert hint is int, f"{kind.__name__}.{field.name}: say here how it is made"
            parts[field.name] = next(made for suffix, made in SUFFIXED.items() if field.name.endswith(suffix))
    return st.builds(kind, **parts)


AGENT_KINDS = [kind for kind in typing.get_args(core.AgentMessage) if kind is not core.AgentHello]
COORDINATOR_KINDS = list(typing.get_args(core.CoordinatorMessage))


@pytest.mark.parametrize("kind", AGENT_KINDS)
def test_agent_messages_survive(kind: type) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(message_of(kind), max_size=3))
    def check(messages: list[core.AgentMessage]) -> None:
        raw = translate.agent_batch(messages).SerializeToString()
        assert translate.agent_messages(pb.AgentBatch.FromString(raw)) == messages

    check()


@pytest.mark.parametrize("kind", COORDINATOR_KINDS)
def test_coordinator_messages_survive(kind: type) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(message_of(kind), max_size=3))
    def check(messages: list[core.CoordinatorMessage]) -> None:
        raw = translate.coordinator_batch(messages).SerializeToString()
        assert translate.coordinator_messages(pb.CoordinatorBatch.FromString(raw)) == messages

    check()


@given(message_of(core.AgentHello), st.binary(min_size=32, max_size=32), st.sampled_from([b"", b"m" * 32]))
def test_a_hello_survives_with_its_proof(hello: core.AgentHello, nonce: bytes, mac: bytes) -> None:
    signed = translate.SignedHello(hello, nonce, mac)
    raw = translate.hello_batch(signed).SerializeToString()
    assert translate.read_hello(pb.AgentBatch.FromString(raw)) == signed


@given(message_of(core.Welcome))
def test_a_welcome_carries_its_proof_and_what_follows(welcome: core.Welcome) -> None:
    beat = core.Beat(1, (), ())
    batch = translate.coordinator_batch([welcome, beat], lambda seen: b"s" * 32 if seen == welcome else b"")
    assert translate.read_welcome(batch) == (welcome, b"s" * 32, [beat])


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_read_but_never_anything_else(raw: bytes) -> None:
    try:
        batch = pb.AgentBatch.FromString(raw)
    except DecodeError:  # protobuf's own, before us
        return
    try:
        translate.agent_messages(batch)
    except TranslateError as error:
        assert str(error)


REQUEST = core.Request(
    TransferId(1, 2), LinkName("a", "b"), AgentName("b", "x"), "job", TrafficClass.SYNC, 100, announcement=3
)


def request_batch() -> pb.AgentBatch:
    return translate.agent_batch([REQUEST])


def breaks(change: typing.Callable[[pb.Request], object]) -> pb.AgentBatch:
    batch = request_batch()
    change(batch.messages[0].request)
    return batch


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (breaks(lambda r: r.ClearField("transfer")), r"Request\.transfer is missing"),
        (breaks(lambda r: r.ClearField("link")), r"Request\.link is missing"),
        (breaks(lambda r: r.ClearField("traffic")), r"Request\.traffic is 0"),
        (breaks(lambda r: setattr(r, "traffic", 77)), r"Request\.traffic is 77"),
        (breaks(lambda r: setattr(r, "wanted_bytes", 2**63)), r"Request\.wanted_bytes is 9223372036854775808"),
        (breaks(lambda r: setattr(r, "job", "j" * 129)), r"Request\.job has 129 bytes.*128"),
        (breaks(lambda r: setattr(r.link, "src_site", "a->b")), r"Request\.link\.src_site is 'a->b'"),
        (breaks(lambda r: setattr(r.destination, "name", "")), r"Request\.destination\.name is ''"),
        (breaks(lambda r: setattr(r.destination, "name", "gw#64")), r"Request\.destination\.name is 'gw#64'"),
        (breaks(lambda r: setattr(r.destination, "site", "gw#1")), r"Request\.destination\.site is 'gw#1'"),
        (pb.AgentBatch(messages=[pb.AgentMessage()]), "of a kind that this version"),
        (
            pb.AgentBatch(
                messages=[
                    pb.AgentMessage(
                        hello=pb.AgentHello(agent=pb.AgentName(site="a", name="b"), data_address="1.2.3.4:5")
                    )
                ]
            ),
            "second hello",
        ),
    ],
)
def test_a_broken_message_names_its_field(batch: pb.AgentBatch, words: str) -> None:
    with pytest.raises(TranslateError, match=words):
        translate.agent_messages(batch)


def test_a_worker_of_an_agent_is_an_agent() -> None:
    request = dataclasses.replace(REQUEST, destination=AgentName("b", "gw#63"))
    assert translate.agent_messages(translate.agent_batch([request])) == [request]


def test_the_first_batch_is_a_hello_and_nothing_else() -> None:
    with pytest.raises(TranslateError, match="begins with one hello"):
        translate.read_hello(request_batch())


def test_another_protocol_version_says_which() -> None:
    hello = core.AgentHello(AgentName("a", "b"), 1, "1.2.3.4:5")
    batch = translate.hello_batch(translate.SignedHello(hello, b"n" * 32, b""))
    batch.messages[0].hello.protocol_version = 9
    with pytest.raises(TranslateError, match=r"version 9, the coordinator 1.*Upgrade the older"):
        translate.read_hello(batch)


@pytest.mark.parametrize("nonce", [b"", b"n" * 31, b"n" * 33])
def test_a_nonce_has_its_length(nonce: bytes) -> None:
    hello = core.AgentHello(AgentName("a", "b"), 1, "1.2.3.4:5")
    with pytest.raises(TranslateError, match=rf"nonce has {len(nonce)} bytes"):
        translate.read_hello(translate.hello_batch(translate.SignedHello(hello, nonce, b"")))


def test_a_negative_number_of_ours_is_a_bug() -> None:
    with pytest.raises(InternalError, match="cannot be sent"):
        translate.coordinator_batch([core.Queued(TransferId(1, 1), 0, -1, 0, "")])


def test_a_long_reason_is_cut_and_still_arrives() -> None:
    batch = translate.coordinator_batch([core.Denied(TransferId(1, 1), "é" * 5000)])
    [denied] = translate.coordinator_messages(batch)
    assert isinstance(denied, core.Denied)
    assert denied.reason == "é" * 2048


@pytest.mark.parametrize("confidence", [-0.1, 1.5, float("nan"), float("inf")])
def test_a_share_is_between_0_and_1(confidence: float) -> None:
    info = core.LinkInfo(LinkName("a", "b"), 1, 1, 1, 1, 1, 1, 1, 1, "estimated", 0.5, observe=True)
    batch = translate.coordinator_batch([core.Beat(1, (), (info,), number=7)])
    batch.messages[0].beat.links[0].confidence = confidence
    with pytest.raises(TranslateError, match=r"confidence is .*between 0 and 1"):
        translate.coordinator_messages(batch)


def test_what_an_older_version_does_not_say_is_harmless() -> None:
    """New fields are absent from its messages: nothing is echoed, observed, bound ahead or due."""
    beat = pb.Beat(epoch=3, links=[pb.LinkInfo(link=pb.LinkName(src_site="a", dst_site="b"))])
    [message] = translate.coordinator_messages(pb.CoordinatorBatch(messages=[pb.CoordinatorMessage(beat=beat)]))
    assert isinstance(message, core.Beat)
    assert (message.number, message.links[0].observe, message.links[0].confidence) == (0, False, 0.0)


def test_names_are_remembered_but_not_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossing, "MAX_KNOWN", 2)
    for number in [*range(5), *range(5)]:
        request = dataclasses.replace(REQUEST, link=LinkName(f"site{number}", "b"))
        assert translate.agent_messages(translate.agent_batch([request])) == [request]


def test_a_bad_name_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(TranslateError, match=r"Request\.link\.dst_site is 'a b'"):
            translate.agent_messages(breaks(lambda r: setattr(r.link, "dst_site", "a b")))


def test_a_message_of_nothing_but_zeros_keeps_its_kind() -> None:
    messages = [
        core.Request(TransferId(0, 0), LinkName("a", "b"), AgentName("b", "x"), "", TrafficClass.PIPELINE, 0),
        core.CancelRequest(TransferId(0, 0), ""),
    ]
    raw = translate.agent_batch(messages).SerializeToString()
    assert translate.agent_messages(pb.AgentBatch.FromString(raw)) == messages
    empty = [core.Beat(0, (), ()), core.Directory((), (), False)]
    raw = translate.coordinator_batch(empty).SerializeToString()
    assert translate.coordinator_messages(pb.CoordinatorBatch.FromString(raw)) == empty
