"""A block that a local receiver has before the machine asks for it: the same as ever, with a step less."""

from __future__ import annotations

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.agent import AgentMachine
from proxyd.core.agent_config import AgentConfig
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.wire.envelope import Envelope

MIB = 1 << 20
NOW = 10**9
SENDER, RECEIVER = EndpointName("j", 0), EndpointName("j", 1)


@pytest.fixture
def machine() -> AgentMachine:
    made = AgentMachine(AgentConfig(AgentName("a", "0"), 1, "a:1", ("c:1",)))
    made.handle(ev.ClientAttached(SENDER, 100), NOW)
    made.handle(ev.ClientAttached(RECEIVER, 101), NOW)
    return made


def envelope(nbytes: int, rank: int = 1) -> Envelope:
    return Envelope("j", 0, rank, "", 0, 0, nbytes, "", ())


def test_it_is_delivered_in_one_step(machine: AgentMachine) -> None:
    one = TransferId(100, 1)
    assert machine.handle(ev.SendPosted(one, envelope(4096), 4096, handed_over=True), NOW) == [
        fx.TellOffered(RECEIVER, one, envelope(4096), True),
        fx.TellLanded(RECEIVER, one, 4096),
        fx.TellSendDelivered(SENDER, one),
    ]
    assert machine.handle(ev.RecvReleased(one), NOW) == [fx.FreeBlock(one, RECEIVER), fx.TellSendDone(SENDER, one)]
    assert not machine.receiver.transfers
    assert not machine.sender.transfers


def test_its_bytes_may_come_later(machine: AgentMachine) -> None:
    one = TransferId(100, 1)
    assert machine.handle(ev.SendPosted(one, envelope(3 * MIB), MIB, handed_over=True), NOW) == [
        fx.TellOffered(RECEIVER, one, envelope(3 * MIB), True),
        fx.TellLanded(RECEIVER, one, MIB),
    ]
    assert machine.handle(ev.SendFilled(one, 3 * MIB), NOW) == [
        fx.TellLanded(RECEIVER, one, 3 * MIB),
        fx.TellSendDelivered(SENDER, one),
    ]


def test_what_was_delivered_before_is_not_delivered_again(machine: AgentMachine) -> None:
    one = TransferId(100, 1)
    machine.handle(ev.SendPosted(one, envelope(4096), 4096, handed_over=True), NOW)
    machine.handle(ev.RecvReleased(one), NOW)
    assert machine.handle(ev.SendPosted(one, envelope(4096), 4096, again=True, handed_over=True), NOW) == [
        fx.FreeBlock(one, RECEIVER),
        fx.TellSendDone(SENDER, one),
    ]


def test_another_life_of_the_receiver_gets_nothing_of_it(machine: AgentMachine) -> None:
    one = TransferId(100, 1)
    event = ev.SendPosted(one, envelope(4096), 4096, again=True, dst_incarnation=55, handed_over=True)
    freed, failed = machine.handle(event, NOW)
    assert freed == fx.FreeBlock(one, RECEIVER)
    assert isinstance(failed, fx.TellSendFailed)
    assert not machine.sender.transfers


def test_a_receiver_that_is_gone_by_then_gives_it_back(machine: AgentMachine) -> None:
    one = TransferId(100, 1)
    machine.handle(ev.ClientDetached(RECEIVER, 101, "ended", orderly=True), NOW)
    assert fx.FreeBlock(one, RECEIVER) in machine.handle(
        ev.SendPosted(one, envelope(4096), 4096, handed_over=True), NOW
    )
    assert one in machine.sender.transfers, "it waits for the next life"


def test_it_keeps_its_place_behind_one_that_waits_for_memory(machine: AgentMachine) -> None:
    first, second = TransferId(100, 1), TransferId(100, 2)
    asked = machine.handle(ev.SendPosted(first, envelope(4096), 4096), NOW)
    assert [type(effect) for effect in asked] == [fx.AllocateBlock]
    assert machine.handle(ev.SendPosted(second, envelope(1000), 1000, handed_over=True), NOW) == []
    told = machine.handle(ev.BlockAllocated(first, 1, 4096), NOW)
    offers = [effect.transfer for effect in told if isinstance(effect, fx.TellOffered)]
    assert offers == [first, second]
    delivered = [effect.transfer for effect in told if isinstance(effect, fx.TellSendDelivered)]
    assert sorted(delivered) == [first, second]
