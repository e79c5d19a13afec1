"""Queues of one direction: clocks that nobody compared, late processes, queues of either way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.core.oneway import FRESH_NS, LATEST, NOISE_NS, OneWayDelays

MS = 1_000_000
HALF_NS = 30 * MS


class Peers:
    """Two hosts whose clocks differ by ``offset_ns``, and frames between them every 10 ms."""

    def __init__(self, offset_ns: int = 0) -> None:
        self.delays = OneWayDelays()
        self.offset_ns = offset_ns
        self.now_ns = 10**12

    def ask(self, forth_ns: int = 0, back_ns: int = 0, held_ns: int = 0) -> None:
        """One frame there and back: queues on its ways, and how long the peer took to answer."""
        arrived_ns = self.now_ns + HALF_NS + forth_ns + self.offset_ns
        self.delays.add(
            self.now_ns,
            arrived_ns,
            arrived_ns + held_ns,
            self.now_ns + 2 * HALF_NS + forth_ns + held_ns + back_ns,
        )
        self.now_ns += 10 * MS

    def back_ns(self, queue_ns: int) -> int:
        """Right after the last answer."""
        return self.delays.back_queue_ns(queue_ns, self.now_ns + 2 * HALF_NS)


@pytest.mark.parametrize("offset_ns", [0, 5 * 10**15, -(10**12)])
def test_a_queue_of_the_way_back_is_told_apart(offset_ns: int) -> None:
    peers = Peers(offset_ns)
    for _ in range(5):
        peers.ask()
    assert peers.back_ns(0) == 0
    for _ in range(LATEST):
        peers.ask(forth_ns=3 * MS, back_ns=8 * MS)
    assert peers.back_ns(11 * MS) == 8 * MS - NOISE_NS
    assert peers.back_ns(5 * MS) == 2 * MS, "no more than the round trip shows beyond the way there"
    for _ in range(LATEST):
        peers.ask(forth_ns=9 * MS)
    assert peers.back_ns(9 * MS) == 0


def test_one_late_answer_is_no_queue() -> None:
    peers = Peers()
    for _ in range(5):
        peers.ask()
    peers.ask(back_ns=20 * MS)
    assert peers.back_ns(20 * MS) == 0


def test_a_peer_that_takes_its_time_to_answer_is_no_queue() -> None:
    peers = Peers()
    for _ in range(5):
        peers.ask()
    for _ in range(LATEST):
        peers.ask(held_ns=15 * MS)
    assert peers.back_ns(15 * MS) == 0


def test_old_answers_and_too_few_say_nothing() -> None:
    peers = Peers()
    assert peers.back_ns(50 * MS) == 0
    peers.ask(back_ns=MS)
    for _ in range(LATEST):
        peers.ask(back_ns=9 * MS)
    assert peers.back_ns(9 * MS) > 0
    peers.now_ns += FRESH_NS
    assert peers.back_ns(9 * MS) == 0


@given(
    st.lists(st.tuples(st.integers(0, 100 * MS), st.integers(0, 100 * MS)), min_size=1, max_size=50),
    st.integers(0, 200 * MS),
    st.integers(-(2**63), 2**63),
)
def test_it_is_never_more_than_there_was(queues: list[tuple[int, int]], queue_ns: int, offset_ns: int) -> None:
    """Whatever comes: not negative, not more than the round trip shows, not more than the way back ever had."""
    peers = Peers(offset_ns)
    for forth_ns, back_ns in queues:
        peers.ask(forth_ns, back_ns)
    assert 0 <= peers.back_ns(queue_ns) <= min(queue_ns, max(back_ns for _, back_ns in queues))
