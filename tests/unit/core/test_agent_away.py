"""A peer that has not been connected for ``peer_timeout``: its ranks are out of reach, whatever a coordinator says."""

from __future__ import annotations

from dataclasses import replace

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.agent import AgentMachine
from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import Directory, DirectoryEntry
from tests.unit.core.agent_world import COORDINATOR, World
from tests.unit.core.test_agent_resume import done, grant_all, landed_whole, two_sites

TIMEOUT_MS = 30_000
MIB = 1 << 20


def gone_at(world: World, name: str) -> list[tuple[int, int, int, bool]]:
    """(who is told, the rank, its life, whether it may be the same again)."""
    agent = AgentName.parse(name)
    return [
        (told.endpoint.rank, told.rank, told.incarnation, told.returns)
        for at, told in world.told
        if at == agent and isinstance(told, fx.TellPeerGone)
    ]


def here_at(world: World, name: str) -> list[tuple[int, int, int]]:
    agent = AgentName.parse(name)
    return [
        (told.endpoint.rank, told.rank, told.incarnation)
        for at, told in world.told
        if at == agent and isinstance(told, fx.TellPeerHere)
    ]


def test_a_dead_path_is_said_after_the_peers_timeout_though_nothing_is_under_way() -> None:
    world = two_sites()
    world.advance(20_000)
    world.cut("a/0", "b/0", silent_ms=6_000)
    world.run()
    world.advance(TIMEOUT_MS - 6_000 - 100)
    assert not world.tells(fx.TellPeerGone), "counted from the last word"
    world.advance(200)
    assert gone_at(world, "b/0") == [(1, 0, 100, True)]
    assert not gone_at(world, "a/0"), "b still dials a"
    assert "agent a/0 has not been heard of for 30.0 s: cut" in world.tells(fx.TellPeerGone)[0].message
    world.advance(100_000)
    assert len(world.tells(fx.TellPeerGone)) == 1, "once"


def test_after_it_the_same_life_is_here_again_and_the_next_message_arrives() -> None:
    world = two_sites()
    world.cut("a/0", "b/0")
    world.run()
    world.advance(2 * TIMEOUT_MS)
    before = len(here_at(world, "b/0"))
    world.heal("a/0", "b/0")
    assert here_at(world, "b/0")[before:] == [(1, 0, 100)]
    transfer = world.post("a/0", 1, 0, 1, MIB)
    grant_all(world)
    assert done(world) == landed_whole(world) == [transfer]
    world.advance(10 * TIMEOUT_MS)
    assert len(gone_at(world, "b/0")) == 1


def test_a_short_break_is_said_to_nobody() -> None:
    world = two_sites()
    before = len(world.tells(fx.TellPeerHere))
    for _ in range(10):
        world.cut("a/0", "b/0")
        world.run()
        world.advance(TIMEOUT_MS - 1_000)
        world.heal("a/0", "b/0")
        world.advance(1_000)
    assert not world.tells(fx.TellPeerGone)
    assert len(world.tells(fx.TellPeerHere)) == before


def test_what_was_under_way_fails_first_and_by_its_name() -> None:
    world = two_sites()
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB)
    world.grant("a/0", transfer, MIB)
    world.cut("a/0", "b/0")
    world.run()
    world.advance(TIMEOUT_MS + 100)
    at_b = [told for at, told in world.told if str(at) == "b/0"]
    failed = next(index for index, told in enumerate(at_b) if isinstance(told, fx.TellRecvFailed))
    gone = next(index for index, told in enumerate(at_b) if isinstance(told, fx.TellPeerGone))
    assert failed < gone


def out_of_reach(world: World) -> list[tuple[int, int]]:
    return [(told, rank) for told, rank, _, returns in gone_at(world, "b/0") if returns]


def test_a_trainer_that_came_later_waits_its_own_time_and_takes_nobody_elses_away() -> None:
    world = two_sites()
    world.cut("a/0", "b/0")
    world.run()
    for seconds in range(0, TIMEOUT_MS // 1000, 5):
        world.attach("b/0", 2, incarnation=1_000 + seconds)  # one that is started again and again
        world.advance(5_000)
    world.advance(100)
    assert out_of_reach(world) == [(1, 0)]
    world.advance(TIMEOUT_MS - 5_000)
    assert out_of_reach(world) == [(1, 0), (2, 0)]
    before = len(here_at(world, "b/0"))
    world.heal("a/0", "b/0")
    assert here_at(world, "b/0")[before:] == [(1, 0, 100), (2, 0, 100)]


def test_a_rank_that_is_listed_later_has_its_own_time_too() -> None:
    world = two_sites()
    world.cut("a/0", "b/0")
    world.run()
    world.advance(20_000)
    world.attach("a/0", 7)
    world.publish()
    world.advance(10_100)
    assert gone_at(world, "b/0") == [(1, 0, 100, True)]
    world.advance(20_000)
    assert gone_at(world, "b/0") == [(1, 0, 100, True), (1, 7, 107, True)]


def test_a_restarted_agent_is_given_its_time_to_connect() -> None:
    world = two_sites()
    world.restart("a/0")
    world.advance(20_000)
    world.down.add((AgentName("a", "0"), AgentName("b", "0")))
    world.attach("a/0", 0)
    world.publish()
    world.advance(TIMEOUT_MS - 100)
    assert not gone_at(world, "b/0")
    world.advance(200)
    assert gone_at(world, "b/0") == [(1, 0, 100, True)]


def test_one_that_never_came_is_out_of_reach_as_well() -> None:
    world = World("a/0", "b/0")
    world.down.add((AgentName("a", "0"), AgentName("b", "0")))
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect()
    world.advance(TIMEOUT_MS + 100)
    assert gone_at(world, "b/0") == [(1, 0, 100, True)]
    assert "it has not connected to this agent" in world.tells(fx.TellPeerGone)[0].message


def test_other_jobs_and_trainers_of_this_host_hear_nothing() -> None:
    world = two_sites()
    other = EndpointName("other", 1)
    world.put("b/0", ev.ClientAttached(other, 201))
    world.attach("b/0", 3)
    world.cut("a/0", "b/0")
    world.run()
    world.advance(TIMEOUT_MS + 100)
    assert {told.endpoint for told in world.tells(fx.TellPeerGone)} == {EndpointName("job", 1), EndpointName("job", 3)}
    assert {told.rank for told in world.tells(fx.TellPeerGone)} == {0}


def test_a_peer_that_nobody_needs_is_forgotten_and_its_next_trainer_has_its_time() -> None:
    """Its last trainer ends, it hangs up; much later another one is listed there."""
    world = two_sites()
    end = Directory((), ((EndpointName("job", 0), 100, "its process ended"),), full=False)
    world.put("b/0", ev.CoordinatorSaid(COORDINATOR, end))
    world.cut("a/0", "b/0")
    world.run()
    world.advance(4 * TIMEOUT_MS)
    assert gone_at(world, "b/0") == [(1, 0, 100, False)]
    entry = DirectoryEntry(EndpointName("job", 0), 555, AgentName("a", "0"), 1, "a/0:1")
    world.put("b/0", ev.CoordinatorSaid(COORDINATOR, Directory((entry,), (), full=False)))
    world.advance(TIMEOUT_MS - 100)
    assert len(gone_at(world, "b/0")) == 1
    world.advance(200)
    assert gone_at(world, "b/0")[1:] == [(1, 0, 555, True)]


def test_the_timeout_is_the_configured_one() -> None:
    world = two_sites()
    config = world.agent("b/0").config
    world.machines[AgentName("b", "0")] = AgentMachine(replace(config, peer_timeout_ns=2_000_000_000))
    world.attach("b/0", 1)
    world.connect()
    world.put("b/0", ev.InboundOpened(AgentName("a", "0"), 1))
    world.cut("a/0", "b/0")
    world.run()
    world.advance(2_100)
    assert gone_at(world, "b/0") == [(1, 0, 100, True)]
