"""Without its coordinator an agent goes on by itself: which class at which rate, how it backs off, what is logged."""

from __future__ import annotations

import dataclasses

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import AgentName, TransferId
from proxyd.core.messages import Beat, Carried, Welcome
from proxyd.wire.envelope import Envelope, TrafficClass

from .agent_world import COORDINATOR, INFO, LINK, MS, World

MIB = 1 << 20
RATE = 10 * MIB


def world_of(percent: tuple[int, int, int] = (100, 100, 100), fallback: int = RATE) -> World:
    world = World("a/0", "b/0", eager_bytes=1 << 30)
    for name, machine in world.machines.items():
        config = dataclasses.replace(machine.config, fallback_percent=percent)
        world.machines[name] = type(machine)(config)
    for name, rank in (("a/0", 0), ("b/0", 1)):
        world.attach(name, rank)
    world.connect()
    info = dataclasses.replace(INFO, fallback_bytes_per_s=4 * RATE)
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Beat(1, ((LINK, fallback),), (info,))))
    return world


def post(world: World, sequence: int, traffic: TrafficClass, nbytes: int = 4 * MIB) -> TransferId:
    transfer = TransferId(100, sequence)
    envelope = Envelope("job", 0, 1, "", 0, traffic, nbytes, "uint8", (nbytes,))
    world.put("a/0", ev.SendPosted(transfer, envelope, nbytes))
    return transfer


def sent(world: World, transfer: TransferId) -> int:
    return sum(chunk.length for _, chunk in world.chunks if chunk.transfer == transfer)


def test_a_class_has_the_part_that_the_operator_leaves_it() -> None:
    world = world_of((100, 50, 0))
    bulk = post(world, 1, TrafficClass.BULK)
    sync = post(world, 2, TrafficClass.SYNC, 16 * MIB)
    world.advance(1_500)
    assert sent(world, sync) == pytest.approx(RATE // 2, rel=0.15), "from 0.5 s on, at half the rate"
    assert sent(world, bulk) == 0
    pipeline = post(world, 3, TrafficClass.PIPELINE)
    world.advance(500)
    assert sent(world, pipeline) == 4 * MIB, "the more urgent one goes first, at the whole rate"
    world.advance(60_000)
    assert sent(world, sync) == 16 * MIB
    assert sent(world, bulk) == 0
    assert not world.tells(fx.TellSendFailed), "it waits for the coordinator"


def test_what_it_does_alone_is_told_once_at_its_begin_and_its_end() -> None:
    world = world_of()
    post(world, 1, TrafficClass.PIPELINE, 64 * MIB)
    world.advance(2_500)
    (begun,) = world.tells(fx.FallbackBegan)
    assert (begun.link, begun.coordinator, begun.rate_bytes_per_s) == (LINK, COORDINATOR, RATE)
    assert 500 * MS <= begun.silent_ns <= 650 * MS
    assert not world.tells(fx.FallbackEnded)
    world.beat("a/0", RATE)
    (ended,) = world.tells(fx.FallbackEnded)
    assert ended.nbytes == world.agent("a/0").status(world.now_ns).links[0].fallback_bytes > 15 * MIB
    world.beat("a/0", RATE)
    assert len(world.tells(fx.FallbackEnded)) == 1
    world.advance(1_000)
    assert len(world.tells(fx.FallbackBegan)) == 2, "silent again"


@pytest.mark.parametrize("lost_share", [0.0, 0.01, 0.1])
def test_it_backs_off_on_losses_and_grows_back(lost_share: float) -> None:
    world = world_of()
    transfer = post(world, 1, TrafficClass.PIPELINE, 512 * MIB)
    world.advance(600)
    retransmits = 0
    rates: list[float] = []
    for turn in range(90):
        before = sent(world, transfer)
        world.advance(100)
        nbytes = sent(world, transfer) - before
        rates.append(nbytes * 10 / RATE)
        retransmits += int(nbytes * lost_share / 1448) if turn < 20 else 0
        taken = sent(world, transfer)
        counts = ev.SendProgress(AgentName("b", "0"), taken, taken, 0, 60 * MS, 60 * MS, retransmits, RATE)
        world.put("a/0", counts)
    if lost_share < 0.02:
        assert min(rates[3:]) > 0.7, "a few losses are the path's own"
        assert sum(rates) / len(rates) == pytest.approx(1.0, rel=0.1)
    else:
        assert sum(rates[10:20]) / 10 < 0.2
        assert sum(rates[-10:]) / 10 == pytest.approx(1.0, rel=0.2)
    assert max(rates) < 1.4


def test_it_tells_the_next_life_of_its_coordinator_what_the_last_one_left_it() -> None:
    world = world_of()
    post(world, 1, TrafficClass.PIPELINE, 64 * MIB)
    world.advance(1_000)
    world.asked.clear()
    info = dataclasses.replace(INFO, fallback_bytes_per_s=123)
    world.put("a/0", ev.CoordinatorConnected(COORDINATOR, Welcome("c", 2, ("*->*",), 150 * MS, 2_000 * MS, (info,))))
    said = [message for _, message in world.asked]
    (carried,) = [message for message in said if isinstance(message, Carried)]
    assert carried.fallback_bytes_per_s == RATE
    assert carried.fallback_total_bytes_per_s == 4 * RATE
    assert carried.unsent_bytes > 0, "taken, and as far as is known still in the kernel"
    assert carried.unsent_rate_bytes_per_s == RATE
    assert carried.estimate_bytes_per_s == 0, "it was configured, not found"
    kinds = [type(message).__name__ for message in said]
    assert kinds.index("Carried") < kinds.index("Request")
    world.asked.clear()
    world.put("a/0", ev.CoordinatorConnected(COORDINATOR, Welcome("c", 2, ("*->*",), 150 * MS, 2_000 * MS, (info,))))
    assert not [message for _, message in world.asked if isinstance(message, Carried)], "the same life knows it"
