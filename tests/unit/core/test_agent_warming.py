"""Warm-up of connections by padding: who is warmed, when, and what ends it."""

from __future__ import annotations

import dataclasses

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.agent import AgentMachine
from proxyd.core.ids import AgentName
from proxyd.core.messages import Beat, CancelRequest, LinkInfo, Report, Request, TransferDone
from proxyd.core.warming import WARM_PEERS, WARM_UPS
from proxyd.wire.envelope import TrafficClass

from .agent_world import COORDINATOR, INFO, MS, World

MIB = 1 << 20
A, B0, B1 = AgentName("a", "0"), AgentName("b", "0"), AgentName("b", "1")
BDP = INFO.rate_bytes_per_s * INFO.rtt_ns // 10**9
COLD = 90_000


def world_of(*peers: str, warm: bool = True) -> World:
    world = World("a/0", *peers)
    config = dataclasses.replace(world.agent("a/0").config, warm=warm)
    world.machines[A] = AgentMachine(config)
    world.attach("a/0", 0)
    for rank, name in enumerate(peers, 1):
        world.attach(name, rank)
    world.connect()
    return world


def window(world: World, peer: AgentName, nbytes: int, taken: int = 0) -> None:
    progress = ev.SendProgress(peer, taken, taken, 0, 60 * MS, 60 * MS, 0, 0, window_bytes=nbytes, window_grows=True)
    world.put("a/0", progress)


def beat(world: World, info: LinkInfo = INFO) -> None:
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Beat(1, (), (info,))))


def padding(world: World) -> list[Request]:
    return [request for request in world.asks(Request) if not request.job]


def test_a_cold_connection_is_padded_under_a_grant_to_a_bdp() -> None:
    world = world_of("b/0")
    window(world, B0, COLD)
    beat(world)
    [request] = padding(world)
    assert (request.traffic, request.wanted_bytes, request.destination) == (TrafficClass.BULK, BDP - COLD, B0)
    assert not world.chunks, "not before it is granted"
    world.grant("a/0", request.transfer, BDP - COLD)
    chunks = [chunk for _, chunk in world.chunks]
    assert sum(chunk.length for chunk in chunks) == BDP - COLD
    assert all(chunk.padding and chunk.granted for chunk in chunks)
    [done] = world.asks(TransferDone)
    assert (done.ok, done.nbytes) == (True, 0), "over when it is handed to TCP; no payload of anybody"
    world.delivered("a/0", "b/0")
    assert world.asks(Report)[-1].delivered_bytes == BDP - COLD
    status = world.agent("a/0").status(world.now_ns)
    assert (status.links[0].padding_bytes, status.links[0].granted_taken_bytes) == (BDP - COLD, 0)
    assert not status.ended
    assert not status.outgoing


@pytest.mark.parametrize(
    ("warm", "width", "info"),
    [
        (False, COLD, INFO),
        (True, BDP * 6 // 10, INFO),
        (True, 0, INFO),
        (True, COLD, dataclasses.replace(INFO, waiting_bytes=1)),
        (True, COLD, dataclasses.replace(INFO, observe=True)),
        (True, COLD, dataclasses.replace(INFO, rtt_ns=1 * MS)),
    ],
    ids=["switched off", "wide enough", "window unknown", "somebody waits", "only observed", "hardly a path"],
)
def test_nothing_is_padded(warm: bool, width: int, info: LinkInfo) -> None:
    world = world_of("b/0", warm=warm)
    window(world, B0, width)
    beat(world, info)
    assert not padding(world)


def test_one_connection_at_a_time() -> None:
    world = world_of("b/0", "b/1")
    window(world, B0, COLD)
    window(world, B1, COLD)
    beat(world)
    beat(world)
    [first] = padding(world)
    assert first.destination == B0
    world.grant("a/0", first.transfer, BDP)
    window(world, B0, BDP, taken=BDP - COLD)
    beat(world)
    assert [request.destination for request in padding(world)] == [B0, B1]


def test_the_first_real_message_ends_it_for_good() -> None:
    world = world_of("b/0", "b/1")
    window(world, B0, COLD)
    window(world, B1, COLD)
    beat(world)
    [request] = padding(world)
    world.grant("a/0", request.transfer, MIB, start_ms=20)
    transfer = world.post("a/0", 1, 0, 1, MIB)
    assert [cancel.transfer for cancel in world.asks(CancelRequest)] == [request.transfer]
    assert world.asks(Report)[-1].returned_bytes == MIB
    world.grant("a/0", transfer, MIB)
    beat(world)
    assert len(padding(world)) == 1
    assert not world.tells(fx.TellSendFailed)
    assert [effect.transfer for effect in world.tells(fx.TellSendDone)] == [transfer]


def test_a_small_message_ends_nothing() -> None:
    world = world_of("b/0")
    window(world, B0, COLD)
    beat(world)
    world.post("a/0", 1, 0, 1, 1000)
    assert not world.asks(CancelRequest)


def test_a_window_that_stays_small_is_tried_a_few_times_only() -> None:
    world = world_of("b/0")
    taken = 0
    for _ in range(10):
        window(world, B0, COLD, taken=taken)
        beat(world)
        if padding(world):
            world.grant("a/0", padding(world)[-1].transfer, BDP)
            taken += BDP - COLD
    assert len(padding(world)) == WARM_UPS


def test_of_many_peers_the_first_few() -> None:
    names = [f"b/{number:02}" for number in range(WARM_PEERS + 4)]
    world = world_of(*names)
    for name in names:
        window(world, AgentName.parse(name), COLD)
    for name in names:
        beat(world)
        if len(padding(world)) <= names.index(name):
            break
        world.grant("a/0", padding(world)[-1].transfer, BDP)
        window(world, padding(world)[-1].destination, BDP, taken=BDP - COLD)
    assert [str(request.destination) for request in padding(world)] == names[:WARM_PEERS]


def test_a_lost_peer_ends_it_without_a_word_to_anybody() -> None:
    world = world_of("b/0")
    window(world, B0, COLD)
    beat(world)
    world.grant("a/0", padding(world)[0].transfer, MIB, start_ms=20)
    world.put("a/0", ev.PeerDisconnected(B0, "cut"))
    assert not world.tells(fx.TellSendFailed)
    assert world.agent("a/0").sender.warmer.under_way is None
    assert world.asks(Report)[-1].returned_bytes == MIB


def test_without_a_coordinator_nothing_is_padded_at_the_fallback_rate() -> None:
    world = world_of("b/0")
    world.beat("a/0", 5_000_000)
    window(world, B0, COLD)
    beat(world)
    assert padding(world)
    world.advance(3000)
    assert not world.chunks


def test_a_new_session_asks_for_the_rest_of_it() -> None:
    world = world_of("b/0")
    window(world, B0, COLD)
    beat(world)
    world.grant("a/0", padding(world)[0].transfer, MIB)
    world.connect(2)
    request = padding(world)[-1]
    assert request.wanted_bytes == BDP - COLD - MIB
    world.grant("a/0", request.transfer, request.wanted_bytes, epoch=2)
    assert world.agent("a/0").sender.warmer.under_way is None
