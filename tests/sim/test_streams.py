"""A peer's data connections together: whatever chunks there are, they leave at the pace that was granted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from proxyd.core import effects as ef
from proxyd.core import events as ev
from proxyd.core.agent import AgentConfig
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.sim.host import AgentHost, PeerLink
from proxyd.sim.link import LinkModel
from proxyd.sim.world import World

MS = 1_000_000
CHUNK = 1 << 20
PACE = 25_000_000
THERE, HERE = AgentName("b", "two"), AgentName("a", "one")


class Granted(AgentHost):
    """Hands out a chunk whenever fewer than ``ahead`` are at the host, as grants do that are asked for in chunks."""

    def __init__(self, world: World, name: AgentName, ahead: int = 0) -> None:
        super().__init__(world, AgentConfig(name, 1, "10.0.0.1:7500"), 1 << 40)
        self.ahead = ahead
        self.to: PeerLink | None = None

    def next_chunk(self, peer: AgentName) -> tuple[object, int, bool] | None:
        if self.to is None or sum(stream.unsent_bytes for stream in self.to.streams) > (self.ahead - 1) * CHUNK:
            return None
        return ef.Chunk(TransferId(1, 1), 0, CHUNK, True, True), CHUNK, True

    def emit(self, event: ev.AgentEvent) -> None:
        if self.to is not None and self.to.connected:
            self.to.pump()


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("streams", [2, 4, 8])
def test_streams_without_a_chunk_leave_their_part_of_the_pace_to_the_others(streams: int, ahead: int) -> None:
    """Chunks are cut by the rate of when a message was asked for, and streams are added by it: after a deep fall there
    are fewer chunks than streams. Two of four streams then left half of the pace unused, so the estimate sank."""
    world = World(1, {LinkName(*pair): LinkModel(10 * PACE, 30 * MS, 1 << 24) for pair in (("a", "b"), ("b", "a"))})
    world.hosts[HERE] = one = Granted(world, HERE, ahead)
    world.hosts[THERE] = Granted(world, THERE)
    one.to = link = PeerLink(one, ef.WantPeer(THERE, "10.1.0.1:7500", 1, streams))
    link.set_pace(PACE)
    link.dial()
    world.clock.run(6_000 * MS)  # windows grow only while they are the limit
    left = [sum(stream.granted_left_bytes for stream in link.streams)]
    for _ in range(20):
        world.clock.run(world.clock.now_ns + 100 * MS)
        left.append(sum(stream.granted_left_bytes for stream in link.streams))
    assert 0.95 <= (left[-1] - left[0]) / (2 * PACE) <= 1.03
    assert max(later - earlier for earlier, later in pairwise(left)) <= 1.25 * PACE / 10, "some segments more"
