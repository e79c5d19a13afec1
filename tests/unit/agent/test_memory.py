"""One cap over all arenas, and what happens near it."""

from __future__ import annotations

import pytest

from proxyd.agent.arenas import Arena
from proxyd.agent.memory import EndpointMemory, MemoryBudget, MemoryLimitError
from proxyd.wire.client import ArenaKind
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import TransferId

MIB = 1 << 20


class Rig:
    """A budget, a clock, and one endpoint's memory."""

    def __init__(self, limit_bytes: int = 16 * MIB, arena_bytes: int = 2 * MIB) -> None:
        self.budget = MemoryBudget(limit_bytes)
        self.arena_bytes = arena_bytes
        self.granted: list[Arena] = []
        self.now_ns = 0
        self.memory = self.endpoint()
        self._sequence = 0

    def endpoint(self) -> EndpointMemory:
        return EndpointMemory(
            self.budget,
            arena_bytes=self.arena_bytes,
            endpoint_incarnation=1,
            agent_incarnation=2,
            granted=self.granted.append,
            clock=lambda: self.now_ns,
        )

    def transfer(self) -> TransferId:
        self._sequence += 1
        return TransferId(1, self._sequence)


def test_an_endpoint_starts_with_one_arena_each_way() -> None:
    rig = Rig()
    send, receive = rig.memory.open()
    assert [arena.kind for arena in rig.granted] == [ArenaKind.SEND, ArenaKind.RECEIVE]
    assert (send.number, receive.number) == (1, 2)
    assert rig.budget.used_bytes == 4 * MIB
    rig.memory.close()
    assert rig.budget.used_bytes == 0


def test_first_arenas_shrink_near_the_cap_and_then_are_refused() -> None:
    rig = Rig(limit_bytes=5 * MIB, arena_bytes=2 * MIB)
    rig.memory.open()
    second = rig.endpoint()
    with pytest.raises(MemoryLimitError, match=r"memory"):
        second.open()
    assert rig.budget.used_bytes == 4 * MIB
    rig = Rig(limit_bytes=6 * MIB, arena_bytes=2 * MIB)
    rig.memory.open()
    small = rig.endpoint()
    assert small.open()[0].size_bytes == MIB


def test_a_message_larger_than_an_arena_gets_its_own_and_that_is_used_again() -> None:
    rig = Rig()
    rig.memory.open()
    big = rig.memory.allocate(rig.transfer(), 5 * MIB, 65536)
    assert big is not None
    assert big.arena is rig.granted[2]
    number = big.arena_number
    big.payload[-1:] = b"x"
    rig.memory.free(big)
    rig.memory.free(big)
    used_bytes = rig.budget.used_bytes
    rig.memory.reclaim(older_than_ns=-1)
    assert rig.budget.used_bytes == used_bytes, "it is still warm"
    rig.now_ns = 10
    rig.memory.reclaim(older_than_ns=5)
    assert rig.budget.used_bytes == 4 * MIB
    again = rig.memory.allocate(rig.transfer(), 5 * MIB, 65536)
    assert again is not None
    assert again.arena_number == number, "a client keeps it mapped: no need for another"
    assert len(rig.granted) == 3
    assert bytes(again.payload[-1:]) == b"\0", "the pages went back"


def test_idle_arenas_of_others_make_room() -> None:
    rig = Rig(limit_bytes=14 * MIB)
    rig.memory.open()
    other = rig.endpoint()
    other.open()
    block = rig.memory.allocate(rig.transfer(), 5 * MIB, 65536)
    assert block is not None
    assert other.allocate(rig.transfer(), 5 * MIB, 65536) is None
    assert other.can_ever_hold(5 * MIB, 65536)
    assert not other.can_ever_hold(14 * MIB, 65536)
    rig.memory.free(block)
    assert other.allocate(rig.transfer(), 5 * MIB, 65536) is not None


def test_send_blocks_are_checked_against_the_clients_own_arenas() -> None:
    rig = Rig()
    send, receive = rig.memory.open()
    end = send.size_bytes
    assert rig.memory.send_block(rig.transfer(), send.number, 4096, end - 4096).nbytes == end - 4096
    assert rig.memory.send_block(rig.transfer(), 0, 0, 0).arena_number == 0
    for number, offset, nbytes in [
        (send.number, 0, 100),
        (send.number, 4096, end),
        (send.number, 1 << 63, 1),
        (receive.number, 4096, 100),
        (99, 4096, 100),
    ]:
        with pytest.raises(WireError):
            rig.memory.send_block(rig.transfer(), number, offset, nbytes)


def test_more_send_arenas_up_to_half_of_the_cap() -> None:
    rig = Rig()
    rig.memory.open()
    assert rig.memory.want_send_arena(5 * MIB).size_bytes == 5 * MIB + 4096
    # Less than another whole arena is left of the half.
    assert rig.memory.want_send_arena(100).size_bytes == 8192
    with pytest.raises(MemoryLimitError, match="at most half is"):
        rig.memory.want_send_arena(2 * MIB)
    block = rig.memory.allocate_send_block(rig.transfer(), 3 * MIB)
    assert block.offset == 4096
    rig.memory.free(block)
    assert rig.memory.allocate_send_block(rig.transfer(), 3 * MIB).offset == 4096
    # The other half serves what comes in, whatever is being sent.
    assert rig.memory.allocate(rig.transfer(), 3 * MIB, 65536) is not None
    assert rig.budget.send_bytes <= rig.budget.limit_bytes // 2
    rig.memory.close()
    assert (rig.budget.used_bytes, rig.budget.send_bytes) == (0, 0)


def test_a_closed_endpoint_allocates_nothing() -> None:
    rig = Rig()
    rig.memory.open()
    block = rig.memory.allocate(rig.transfer(), 100, 65536)
    assert block is not None
    rig.memory.close()
    rig.memory.free(block)
    assert rig.memory.allocate(rig.transfer(), 100, 65536) is None
    assert rig.budget.used_bytes == 0
