"""A trainer's deadline travels as the time that is left when the agent asks."""

from __future__ import annotations

from proxyd.core import events as ev
from proxyd.core.ids import TransferId
from proxyd.core.messages import Request
from proxyd.wire.envelope import Envelope, TrafficClass

from .agent_world import MS, World

MIB = 1 << 20


def requests(world: World) -> list[Request]:
    return [message for _, message in world.asked_of if isinstance(message, Request)]


def test_what_is_left_of_a_deadline_is_asked_for_again_by_a_new_session() -> None:
    world = World("a/0", "b/0")
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect()
    envelope = Envelope("job", 0, 1, "", 0, TrafficClass.BULK, MIB, "uint8", (MIB,))
    world.put("a/0", ev.SendPosted(TransferId(100, 1), envelope, MIB, 50 * MS))
    world.put("a/0", ev.SendPosted(TransferId(100, 2), envelope, MIB))
    world.advance(1)
    first, second = requests(world)
    assert 49 * MS <= first.deadline_in_ns <= 50 * MS
    assert second.deadline_in_ns == 0
    world.advance(30)
    world.connect(epoch=2)
    world.advance(1)
    again = [request for request in requests(world)[2:] if request.transfer == first.transfer]
    assert 15 * MS < again[-1].deadline_in_ns <= 20 * MS
    world.advance(100)
    world.connect(epoch=3)
    world.advance(1)
    late = [request for request in requests(world) if request.transfer == first.transfer]
    assert late[-1].deadline_in_ns == 1, "it is late, and goes first all the same"
