"""What the status page shows of the last minutes."""

from __future__ import annotations

from proxyd.coordinator.history import MAX_LINKS, MAX_SLOTS, SHOWN_NS, History
from proxyd.core.effects import ToAgent
from proxyd.core.events import SessionMessage, SessionOpened
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Grant, Request
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000
LINK = LinkName("a", "b")


def grant(transfer: TransferId, nbytes: int, start_in_ns: int = 0) -> ToAgent:
    """At a byte a nanosecond."""
    return ToAgent(1, Grant(9, transfer, LINK, nbytes, 1_000_000_000, start_in_ns, MS, 1, MS, "first in line"))


def request(transfer: TransferId, traffic: TrafficClass) -> SessionMessage:
    return SessionMessage(1, Request(transfer, LINK, AgentName("b", "gw"), "job", traffic, 1))


def test_grants_that_follow_each_other_are_one_slot_of_their_agent() -> None:
    history = History()
    one, other = TransferId(7, 1), TransferId(7, 2)
    history.saw(SessionOpened(1, AgentHello(AgentName("a", "gw"), 7, "10.0.0.1:1")))
    history.saw(request(one, TrafficClass.SYNC))
    history.performed(0, [grant(one, 10 * MS), grant(one, 5 * MS, start_in_ns=10 * MS)])
    history.performed(20 * MS, [grant(other, 10 * MS)])
    history.performed(50 * MS, [grant(other, 10 * MS)])  # after a pause
    slots = history.plain(100 * MS)["slots"]
    assert [(slot["agent"], slot["traffic"], slot["bytes"]) for slot in slots] == [
        ("a/gw", "sync", 15 * MS),
        ("a/gw", "", 10 * MS),
        ("a/gw", "", 10 * MS),
    ]
    assert [(slot["begin_ago_ns"], slot["end_ago_ns"]) for slot in slots] == [
        (100 * MS, 85 * MS),
        (80 * MS, 70 * MS),
        (50 * MS, 40 * MS),
    ]
    assert slots[0]["transfer"] == str(one)


def test_what_is_old_is_not_shown_and_nothing_grows_without_end() -> None:
    history = History()
    history.performed(0, [grant(TransferId(1, 1), 10 * MS)])
    assert history.plain(SHOWN_NS + 9 * MS)["slots"]
    assert not history.plain(SHOWN_NS + 11 * MS)["slots"]
    for number in range(3 * MAX_SLOTS):
        history.saw(request(TransferId(1, number), TrafficClass.BULK))
        history.performed(0, [grant(TransferId(1, number), 1)])
    assert len(history.plain(0)["slots"]) == MAX_SLOTS
    assert len(history._traffic) <= MAX_SLOTS


def test_a_link_that_is_new_is_shown_however_many_there_were() -> None:
    history = History()
    for number in range(2 * MAX_LINKS):
        link = LinkName("a", f"b{number}")
        history.performed(
            number * MS, [ToAgent(1, Grant(9, TransferId(1, number), link, MS, 10**9, 0, MS, 1, MS, "first in line"))]
        )
    shown = {slot["link"] for slot in history.plain(2 * MAX_LINKS * MS)["slots"]}
    assert f"a->b{2 * MAX_LINKS - 1}" in shown
    assert len(history._last) == MAX_LINKS
