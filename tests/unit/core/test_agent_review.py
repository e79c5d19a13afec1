"""The agent machine in the corners: ends that cross, lives that clash, and others' names in a frame."""

from __future__ import annotations

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import AgentName, EndpointName

from .agent_world import World

MIB = 1 << 20
A, B, C = AgentName("a", "0"), AgentName("b", "0"), AgentName("b", "1")
RANK = [EndpointName("job", rank) for rank in range(4)]


def two_sites(**kw: int) -> World:
    world = World("a/0", "b/0", **kw)
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect()
    return world


def one_host(*ranks: int) -> World:
    world = World("a/0")
    for rank in ranks:
        world.attach("a/0", rank)
    return world


# -- within a host -----------------------------------------------------------------------------------------------------


def test_a_message_of_a_closed_trainer_that_found_its_local_receiver_outlives_the_linger_time() -> None:
    world = one_host(0)
    transfer = world.post("a/0", 1, 0, 1, 1000)
    world.put("a/0", ev.ClientDetached(RANK[0], 100, "closed", True))
    world.attach("a/0", 1)
    assert [o.transfer for o in world.tells(fx.TellOffered)] == [transfer]
    world.advance(10_000)
    assert not world.tells(fx.TellSendFailed), "it is in the receiver's hands"
    world.put("a/0", ev.RecvReleased(transfer))
    assert len(world.tells(fx.TellSendDone)) == 1
    assert len(world.tells(fx.FreeBlock)) == 1


def test_a_message_of_a_closed_trainer_may_be_released_before_the_linger_time_is_over() -> None:
    world = one_host(0)
    transfer = world.post("a/0", 1, 0, 1, 1000)
    world.put("a/0", ev.ClientDetached(RANK[0], 100, "closed", True))
    world.attach("a/0", 1)
    world.put("a/0", ev.RecvReleased(transfer))
    world.advance(10_000)
    assert len(world.tells(fx.TellSendDone)) == 1
    assert not world.tells(fx.TellSendFailed)


def test_an_empty_message_keeps_its_place_behind_one_that_waits_for_its_block() -> None:
    world = one_host(0)
    world.post("a/0", 1, 0, 1, 1000)
    world.post("a/0", 2, 0, 1, 0)
    world.post("a/0", 3, 0, 1, 1000)
    world.attach("a/0", 1)
    assert [o.transfer.sequence for o in world.tells(fx.TellOffered)] == [1, 2, 3]
    assert [d.transfer.sequence for d in world.tells(fx.TellSendDone)] == [2]
    assert world.agent("a/0").status(world.now_ns).outgoing == 2


def test_messages_for_a_local_receiver_that_dies_are_forgotten() -> None:
    world = one_host(0, 1)
    world.post("a/0", 1, 0, 1, 1000)
    world.post("a/0", 2, 0, 1, 1000, filled=10)
    world.put("a/0", ev.ClientDetached(RANK[1], 101, "killed", False))
    ends = [t.transfer.sequence for t in [*world.tells(fx.TellSendDone), *world.tells(fx.TellSendFailed)]]
    assert sorted(ends) == [1, 2]
    status = world.agent("a/0").status(world.now_ns)
    assert (status.outgoing, status.incoming) == (0, 0)
