"""What an agent holds while it drains, and in which order it lets it go."""

from __future__ import annotations

import pytest

from proxyd.agent.drain import DrainGate
from proxyd.core.effects import TellSendState
from proxyd.core.events import (
    AgentEvent,
    ClientDetached,
    RecvReleased,
    SendAnnounced,
    SendCancelled,
    SendFilled,
    SendPosted,
)
from proxyd.core.ids import EndpointName, TransferId
from proxyd.wire.envelope import Envelope, TrafficClass
from proxyd.wire.phase import SendPhase


class Rig:
    def __init__(self) -> None:
        self.fed: list[AgentEvent] = []
        self.told: list[TellSendState] = []
        self.gate = DrainGate(self.fed.append, self.told.append)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def posted(sequence: int, incarnation: int = 1, filled_bytes: int = 0) -> SendPosted:
    envelope = Envelope("job", 0, 1, "", 0, TrafficClass.SYNC, 100, "|u1", (100,))
    return SendPosted(TransferId(incarnation, sequence), envelope, filled_bytes)


def test_what_does_not_drain_holds_nothing(rig: Rig) -> None:
    events: list[AgentEvent] = [posted(1), SendFilled(TransferId(1, 1), 5)]
    for event in events:
        rig.gate.emit(event)
    assert rig.fed == events


def test_new_messages_wait_and_go_in_order_with_what_was_filled(rig: Rig) -> None:
    rig.gate.emit(posted(1))
    rig.gate.drain(True)
    for event in (
        posted(2),
        posted(3, filled_bytes=10),
        SendFilled(TransferId(1, 2), 60),
        SendFilled(TransferId(1, 1), 9),
    ):
        rig.gate.emit(event)
    assert rig.fed == [posted(1), SendFilled(TransferId(1, 1), 9)], "what is under way goes on"
    assert rig.gate.held == 2
    assert [(one.transfer.sequence, one.phase) for one in rig.told] == [
        (2, SendPhase.DRAINING),
        (3, SendPhase.DRAINING),
    ]
    rig.gate.drain(False)
    assert rig.fed[2:] == [posted(2, filled_bytes=60), posted(3, filled_bytes=10)]
    assert rig.gate.held == 0
    rig.gate.emit(posted(4))
    assert rig.fed[-1] == posted(4)


def test_receivers_are_not_in_the_way_and_announcements_ask_for_nothing(rig: Rig) -> None:
    rig.gate.drain(True)
    rig.gate.emit(RecvReleased(TransferId(9, 1)))
    rig.gate.emit(SendAnnounced(posted(1).envelope, 0))
    assert rig.fed == [RecvReleased(TransferId(9, 1))]


def test_a_cancelled_message_ends_at_once(rig: Rig) -> None:
    rig.gate.drain(True)
    rig.gate.emit(posted(1))
    rig.gate.emit(SendCancelled(TransferId(1, 1)))
    assert rig.fed == [posted(1), SendCancelled(TransferId(1, 1))]
    assert rig.gate.held == 0


def test_a_trainer_that_leaves_takes_its_messages_along(rig: Rig) -> None:
    rig.gate.drain(True)
    rig.gate.emit(posted(1, incarnation=1))
    rig.gate.emit(posted(1, incarnation=2))
    gone = ClientDetached(EndpointName("job", 0), 1, "it closed", True)
    rig.gate.emit(gone)
    assert rig.fed == [posted(1, incarnation=1), gone]
    assert rig.gate.held == 1
