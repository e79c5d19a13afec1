"""What a coordinator holds while it drains, and what goes on."""

from __future__ import annotations

from proxyd.coordinator.drain import DrainGate
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage, SessionOpened
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Announce, CancelRequest, Queued, Request, TransferDone
from proxyd.wire.envelope import TrafficClass

LINK = LinkName("a", "b")
MIB = 1 << 20


class Rig:
    """The gate in front of a real machine."""

    def __init__(self) -> None:
        self.machine = CoordinatorMachine(CoordinatorConfig(), 1)
        self.said: list[CoordinatorEffect] = []
        self.gate = DrainGate(self.machine, self.feed, self.said.append)
        self.feed(SessionOpened(1, AgentHello(AgentName("a", "0"), 7, "10.0.0.1:1")))
        self.said.clear()

    def feed(self, event: CoordinatorEvent) -> None:
        if not self.gate.take(event):
            self.said += self.machine.handle(event, 1_000_000)

    def knows(self, sequence: int) -> bool:
        return self.machine.waits(1, TransferId(7, sequence)) is not None

    def queued(self) -> list[tuple[int, str]]:
        """Every Queued since the last look: (sequence, reason)."""
        found = [one.message for one in self.said if isinstance(one, ToAgent) and isinstance(one.message, Queued)]
        self.said.clear()
        return [(one.transfer.sequence, one.reason) for one in found]


def request(sequence: int, wanted_bytes: int = MIB) -> SessionMessage:
    message = Request(TransferId(7, sequence), LINK, AgentName("b", "0"), "job", TrafficClass.SYNC, wanted_bytes)
    return SessionMessage(1, message)


def test_known_transfers_go_on_and_new_ones_are_told_why_they_wait() -> None:
    rig = Rig()
    rig.feed(request(1))
    rig.said.clear()
    rig.gate.drain(True)
    rig.feed(request(2))
    rig.feed(request(3))
    rig.feed(request(1, 2 * MIB))
    assert [rig.knows(number) for number in (1, 2, 3)] == [True, False, False]
    told = dict(rig.queued())
    assert "drains" in told[2]
    assert "drains" not in told.get(1, "")
    assert rig.gate.held == 2
    assert rig.gate.holds(TransferId(7, 2))
    rig.gate.drain(False)
    assert [number for number, _ in rig.queued()] == [2, 3], "in the order in which they came"
    assert rig.gate.held == 0
    assert rig.knows(2)


def test_what_was_held_can_end_and_its_session_too() -> None:
    rig = Rig()
    rig.gate.drain(True)
    for number in (1, 2, 3):
        rig.feed(request(number))
    rig.feed(SessionMessage(1, CancelRequest(TransferId(7, 1), "nobody wants it")))
    rig.feed(SessionMessage(1, TransferDone(TransferId(7, 2), LINK, TrafficClass.SYNC, MIB, False, 0)))
    assert rig.gate.held == 1
    rig.feed(SessionClosed(1, "gone"))
    assert rig.gate.held == 0
    rig.gate.drain(False)
    assert not rig.knows(3)


def test_what_only_warms_connections_is_not_counted() -> None:
    rig = Rig()
    rig.gate.drain(True)
    warming = Request(TransferId(7, 9), LINK, AgentName("b", "0"), "", TrafficClass.BULK, MIB)
    rig.feed(SessionMessage(1, warming))
    assert (rig.gate.held, rig.knows(9)) == (0, False)
    rig.feed(request(1))
    assert rig.gate.held == 1
    rig.gate.drain(False)
    assert (rig.gate.held, rig.knows(9), rig.knows(1)) == (0, True, True)


def test_nothing_is_granted_ahead_to_what_was_announced_meanwhile() -> None:
    rig = Rig()
    rig.gate.drain(True)
    assert rig.gate.take(SessionMessage(1, Announce(1, LINK, "job", TrafficClass.SYNC, MIB, 0)))
    assert not rig.gate.take(SessionMessage(1, Announce(1, LINK, "job", TrafficClass.SYNC, 0, 0)))
