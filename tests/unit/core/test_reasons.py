"""How long a transfer waited for what: the clock, and what the granter says of it."""

from __future__ import annotations

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.reasons import CAUSES, Cause, Waits
from proxyd.sim.fluid import FluidSender, FluidWorld
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000
AB = LinkName("a", "b")
RTT_NS = 40 * MS
RATE = 50_000_000


def found(waits: Waits, now_ns: int = 0) -> dict[Cause, int]:
    return {cause: ns for cause, ns in zip(CAUSES, waits.at(now_ns), strict=True) if ns}


def test_the_clock_leaves_nothing_over() -> None:
    waits = Waits()
    assert found(waits, 99) == {}
    waits.begin(10)
    waits.switch(Cause.LANE, 25)
    waits.switch(Cause.LANE, 27)
    assert found(waits, 30) == {Cause.TURN: 15, Cause.LANE: 5}
    waits.granted(False, 40, 43)
    waits.switch(Cause.WINDOW, 60)
    waits.granted(True, 64, 64)
    assert found(waits, 1000) == {Cause.TURN: 15, Cause.LANE: 15 + 3, Cause.SENDING: 17, Cause.WINDOW: 4}


def test_blame_comes_afterwards_and_goes_back_no_further_than_the_present_cause() -> None:
    waits = Waits()
    waits.begin(0)
    waits.switch(Cause.LANE, 100)
    waits.blame(Cause.SILENT, 130, 200)
    waits.blame(Cause.SILENT, 50, 250)
    assert found(waits, 300) == {Cause.TURN: 100, Cause.LANE: 80, Cause.SILENT: 120}


def test_a_clock_that_stopped_can_go_on() -> None:
    waits = Waits()
    waits.begin(0)
    waits.granted(True, 10, 10)
    waits.switch(Cause.WINDOW, 50)
    waits.begin(100)
    waits.end(130)
    waits.end(150)
    assert found(waits, 200) == {Cause.TURN: 40}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_words(cause: Cause) -> None:
    assert cause.words
    assert cause.label == cause.name.lower()


def world(senders: int = 2, **config: int) -> FluidWorld:
    settings = LinkSettings(AB, RATE, RTT_NS, 200_000, mtu_bytes=9000)
    machine = CoordinatorMachine(CoordinatorConfig(links=(settings,), **config), epoch=2)  # type: ignore[arg-type]
    fluid = FluidWorld(machine, [FluidSender(AgentName("a", f"host{n}"), AB, RTT_NS) for n in range(senders)])
    fluid.run(10 * MS)
    return fluid


def waits_of(fluid: FluidWorld, session: int, transfer: TransferId) -> dict[Cause, int]:
    waits = fluid.machine.waits(session, transfer)
    assert waits is not None
    return found(waits, fluid.now_ns)


def test_the_first_waits_for_nothing_and_the_second_for_its_turn() -> None:
    fluid = world()
    nbytes = 10_000_000
    first, second = fluid.send(1, nbytes), fluid.send(2, nbytes)
    fluid.run(1500 * MS)
    assert set(waits_of(fluid, 1, first)) <= {Cause.SENDING}
    waits = waits_of(fluid, 2, second)
    sending_ns = nbytes * 1_000_000_000 // RATE
    assert waits[Cause.TURN] + waits.get(Cause.LANE, 0) == pytest.approx(sending_ns, rel=0.15)
    assert waits[Cause.TURN] > 0.7 * sending_ns
    clock = fluid.machine.waits(2, second)
    assert clock is not None
    assert clock.who == AgentName("a", "host0"), "who was in the way is named"


def test_who_is_overtaken_waits_for_its_turn_again() -> None:
    fluid = world()
    bulk = fluid.send(1, 20_000_000, TrafficClass.BULK)
    fluid.run(100 * MS)
    before = waits_of(fluid, 1, bulk)
    assert set(before) <= {Cause.SENDING}
    fluid.send(2, 10_000_000, TrafficClass.PIPELINE)
    fluid.run(250 * MS)
    after = waits_of(fluid, 1, bulk)
    assert after[Cause.TURN] > 80 * MS


def test_a_sender_that_stopped_is_named_as_the_cause() -> None:
    fluid = world()
    first, second = fluid.send(1, 20_000_000), fluid.send(2, 1_000_000)
    fluid.run(100 * MS)
    fluid.senders[1].frozen = True
    fluid.run(900 * MS)
    for session, transfer in ((1, first), (2, second)):
        assert waits_of(fluid, session, transfer)[Cause.SILENT] > 150 * MS
    assert waits_of(fluid, 2, second).get(Cause.TURN, 0) < 150 * MS


def test_the_causes_sum_to_the_time_until_the_last_grant() -> None:
    fluid = world(4)
    sent = [(session, fluid.send(session, 2_000_000 * session, TrafficClass(session % 3))) for session in (1, 2, 3, 4)]
    fluid.run(2000 * MS)
    for session, transfer in sent:
        last_ns = max(at for at, number, grant in fluid.grants if (number, grant.transfer) == (session, transfer))
        total_ns = sum(waits_of(fluid, session, transfer).values())
        assert abs(total_ns - (last_ns - 10 * MS)) < 5 * MS
