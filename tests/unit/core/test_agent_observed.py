"""Links that are only observed: everything goes at once and unpaced, and is asked for and reported all the same."""

from __future__ import annotations

import dataclasses
import random

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import AgentName
from proxyd.core.messages import Beat, CancelRequest, Report, Request, TransferDone

from .agent_world import COORDINATOR, INFO, LINK, World

MIB = 1 << 20
B = AgentName("b", "0")
OBSERVED = dataclasses.replace(INFO, observe=True)


def two_sites(*, observe: bool = True) -> World:
    world = World("a/0", "b/0", eager_bytes=1 << 30)
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect(infos=(OBSERVED if observe else INFO,))
    return world


def switch(world: World, *, observe: bool) -> None:
    info = OBSERVED if observe else INFO
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Beat(1, (), (info,))))


def observed_delivered(world: World) -> None:
    """The kernel reports that all that was taken has been delivered."""
    taken = sum(chunk.length for _, chunk in world.chunks if chunk.granted)
    world.put("a/0", ev.SendProgress(B, taken, taken, 0, 60_000_000, 60_000_000, 3, 1))


def test_a_message_goes_at_once_without_a_ceiling_and_is_asked_for() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB)
    assert [effect.transfer for effect in world.tells(fx.TellSendDone)] == [transfer]
    assert [(request.transfer, request.wanted_bytes) for request in world.asks(Request)] == [(transfer, 4 * MIB)]
    assert {effect.rate_bytes_per_s for effect in world.tells(fx.SetPace)} == {0}
    [done] = world.asks(TransferDone)
    assert done.ok


def test_it_is_reported_apart_from_what_is_granted() -> None:
    world = two_sites()
    world.post("a/0", 1, 0, 1, 4 * MIB)
    observed_delivered(world)
    report = world.asks(Report)[-1]
    assert (report.observed_left_bytes, report.observed_delivered_bytes) == (4 * MIB, 4 * MIB)
    assert (report.left_bytes, report.delivered_bytes, report.unscheduled_bytes, report.retransmits) == (0, 0, 0, 3)


def test_grants_that_come_all_the_same_go_back() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB, filled=MIB)
    world.grant("a/0", transfer, MIB)
    assert world.asks(Report)[-1].returned_bytes == MIB
    world.put("a/0", ev.SendFilled(transfer, 4 * MIB))
    assert world.tells(fx.TellSendDone)


def test_what_waits_goes_when_its_link_is_only_observed() -> None:
    world = two_sites(observe=False)
    first = world.post("a/0", 1, 0, 1, 4 * MIB)
    second = world.post("a/0", 2, 0, 1, 4 * MIB)
    world.grant("a/0", first, 2 * MIB, start_ms=50)
    assert not world.chunks
    switch(world, observe=True)
    assert {effect.transfer for effect in world.tells(fx.TellSendDone)} == {first, second}
    assert world.asks(Report)[-1].returned_bytes == 2 * MIB
    assert not world.agent("a/0").sender.asking.links[LINK].asked


def test_what_is_under_way_asks_for_the_rest_when_it_ends() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB, filled=MIB)
    assert sum(chunk.length for _, chunk in world.chunks) == MIB
    switch(world, observe=False)
    assert [cancel.transfer for cancel in world.asks(CancelRequest)] == [transfer]
    assert world.asks(Request)[-1].wanted_bytes == 3 * MIB, "what was sent meanwhile needs no grant"
    world.put("a/0", ev.SendFilled(transfer, 4 * MIB))
    assert sum(chunk.length for _, chunk in world.chunks) == MIB
    world.grant("a/0", transfer, 3 * MIB)
    assert world.tells(fx.TellSendDone)
    world.delivered("a/0", "b/0")
    report = world.asks(Report)[-1]
    assert (report.delivered_bytes, report.observed_delivered_bytes) == (3 * MIB, MIB)


def test_a_damaged_chunk_is_sent_again_without_a_grant() -> None:
    world = two_sites()
    world.corrupt.add((world.post("a/0", 1, 0, 1, MIB, filled=0), 0))
    transfer = next(iter(world.agent("a/0").sender.transfers))
    world.put("a/0", ev.SendFilled(transfer, MIB))
    assert world.tells(fx.TellSendDone)


def test_a_silent_coordinator_holds_up_nothing() -> None:
    world = two_sites()
    world.advance(5000)
    world.post("a/0", 1, 0, 1, 4 * MIB)
    assert world.tells(fx.TellSendDone)


@pytest.mark.parametrize("seed", range(40))
def test_switching_at_any_time_loses_nothing(seed: int) -> None:
    chance = random.Random(seed)
    world = two_sites(observe=bool(seed % 2))
    posted = []
    granted: dict[object, int] = {}
    total = 0
    cancels = 0

    def serve() -> None:
        nonlocal total, cancels
        wanted: dict[object, int] = {}
        for _, message in world.asked[cancels:]:
            if isinstance(message, CancelRequest):
                granted[message.transfer] = wanted[message.transfer] = 0
            elif isinstance(message, Request):
                wanted[message.transfer] = message.wanted_bytes
        cancels = len(world.asked)
        for transfer, nbytes in wanted.items():
            if (need := nbytes - granted.get(transfer, 0)) > 0:
                granted[transfer] = nbytes
                total += need
                world.grant("a/0", transfer, need)  # type: ignore[arg-type]

    for step in range(60):
        match chance.randrange(6):
            case 0 | 1:
                nbytes = chance.choice([700_000, 2 * MIB, 3 * MIB + 7])
                posted.append(world.post("a/0", step + 1, 0, 1, nbytes, filled=chance.choice([0, nbytes // 2, nbytes])))
            case 2:
                for out in list(world.agent("a/0").sender.transfers.values()):
                    if chance.random() < 0.3:
                        world.put("a/0", ev.SendFilled(out.transfer, out.nbytes))
            case 3:
                switch(world, observe=chance.random() < 0.5)
            case 4:
                serve()
            case _:
                world.advance(chance.choice([1, 20]))
    switch(world, observe=False)
    for _ in range(50):
        for out in list(world.agent("a/0").sender.transfers.values()):
            world.put("a/0", ev.SendFilled(out.transfer, out.nbytes))
        serve()
        world.advance(2)
    assert {effect.transfer for effect in world.tells(fx.TellSendDone)} == set(posted)
    world.advance(3000)
    world.delivered("a/0", "b/0")
    book = world.agent("a/0").sender.asking.links[LINK]
    assert not book.grants
    assert not book.asked
    if world.asks(Report):
        report = world.asks(Report)[-1]
        assert report.delivered_bytes + report.returned_bytes == total
        sent = sum(chunk.length for _, chunk in world.chunks)
        assert report.observed_delivered_bytes + report.delivered_bytes == sent
