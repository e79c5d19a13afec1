"""What the coordinator counts and remembers at its door."""

from __future__ import annotations

import pytest

from proxyd.coordinator import observer as observer_module
from proxyd.coordinator.observer import Observer
from proxyd.core.effects import ToAgent
from proxyd.core.events import SessionMessage
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentMessage, Beat, CancelRequest, Grant, LinkInfo, Request, TransferDone, Welcome
from proxyd.wire.envelope import TrafficClass

AB = LinkName("a", "b")
MS = 1_000_000


def request(number: int, link: LinkName = AB) -> Request:
    return Request(TransferId(1, number), link, AgentName("b", "x"), "job", TrafficClass.PIPELINE, 8 << 20)


def grant(number: int, start_in_ns: int = 0) -> Grant:
    return Grant(9, TransferId(1, number), AB, 1 << 20, 48_500_000, start_in_ns, MS, 1, MS, "first in line")


def done(number: int, *, ok: bool = True, link: LinkName = AB) -> TransferDone:
    return TransferDone(TransferId(1, number), link, TrafficClass.PIPELINE, 100, ok, 0)


def said(message: AgentMessage) -> SessionMessage:
    return SessionMessage(1, message)


def values(observer: Observer, name: str) -> dict[tuple[str, ...], float]:
    [family] = [family for family in observer.families() if family.name == name]
    return {(*sample.labels.values(), sample.suffix): sample.value for sample in family.samples}


def test_the_wait_counts_from_the_request_to_the_first_byte() -> None:
    observer = Observer()
    observer.saw(0, said(request(1)))
    observer.performed(3 * MS, [ToAgent(1, grant(1, start_in_ns=4 * MS))])
    observer.performed(9 * MS, [ToAgent(1, grant(1))])  # its second grant is no wait
    found = values(observer, "proxyd_grant_wait_seconds")
    assert found["pipeline", "_count"] == 1
    assert found["pipeline", "_sum"] == pytest.approx(0.007)
    assert found["pipeline", "0.005", "_bucket"] == 0
    assert found["pipeline", "0.01", "_bucket"] == 1


@pytest.mark.parametrize("end", [CancelRequest(TransferId(1, 1), "gone"), done(1)])
def test_who_gave_up_waits_no_longer(end: AgentMessage) -> None:
    observer = Observer()
    observer.saw(0, said(request(1)))
    observer.saw(1, said(end))
    observer.performed(2, [ToAgent(1, grant(1))])
    assert values(observer, "proxyd_grant_wait_seconds") == {}


def test_transfers_by_outcome_and_only_delivered_bytes() -> None:
    observer = Observer()
    for message in (done(1), done(2), done(3, ok=False)):
        observer.saw(0, said(message))
    assert values(observer, "proxyd_transfers_total") == {
        ("a->b", "pipeline", "failed", ""): 1,
        ("a->b", "pipeline", "ok", ""): 2,
    }
    assert values(observer, "proxyd_transfer_bytes_total") == {("a->b", "pipeline", ""): 200}


def test_invented_links_share_one_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_module, "MAX_LINKS", 2)
    observer = Observer()
    for number in range(9):
        observer.saw(0, said(done(number, link=LinkName(f"s{number}", "x"))))
    assert set(values(observer, "proxyd_transfer_bytes_total")) == {
        ("s0->x", "pipeline", ""),
        ("s1->x", "pipeline", ""),
        ("other", "pipeline", ""),
    }


def test_requests_that_are_never_granted_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_module, "MAX_WAITING", 3)
    observer = Observer()
    for number in range(10):
        observer.saw(0, said(request(number)))
    observer.performed(1, [ToAgent(1, grant(number)) for number in range(10)])
    assert values(observer, "proxyd_grant_wait_seconds")["pipeline", "_count"] == 3


def test_a_link_of_which_nothing_is_known_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def info(src: str, source: str) -> LinkInfo:
        return LinkInfo(LinkName(src, "b"), 12_500_000, 50 * MS, 0, 0, 1 << 20, 1 << 18, 0, 0, source)

    observer = Observer()
    welcome = Welcome("c", 1, ("*->*",), 1, 2, (info("a", "default"), info("c", "configured"), info("d", "estimated")))
    for session in (1, 2):
        observer.performed(0, [ToAgent(session, welcome)])
    # A link that appears later is told of in a beat.
    beat = Beat(1, (), (*welcome.links, info("e", "default")))
    for session in (1, 1, 2):
        observer.performed(0, [ToAgent(session, beat)])
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in said] == ["a->b", "e->b"]
    assert said[0].startswith("a->b: no capacity is configured")
    assert "100 Mbit/s (source=default)" in said[0]
