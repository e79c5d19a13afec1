"""Whose endpoints are known, and what is told when they come and go."""

from __future__ import annotations

import dataclasses

import pytest

from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import AgentHello
from proxyd.core.registry import Registry

RANK0 = EndpointName("job", 0)
RANK1 = EndpointName("job", 1)
A = AgentHello(AgentName("a", "0"), 11, "a:1")
B = AgentHello(AgentName("b", "0"), 22, "b:1")
LEASE = 100
ABSENT = 1500


def test_changes_are_collected_and_handed_out_once() -> None:
    registry = Registry()
    registry.up(1, A, RANK1, 5, 0)
    registry.up(1, A, RANK0, 6, 0)
    assert registry.changed
    changes = registry.take_changes(0)
    assert [entry.endpoint for entry in changes.entries] == [RANK0, RANK1]
    assert changes.entries[0].data_address == "a:1"
    assert (changes.gone, changes.full) == ((), False)
    assert not registry.changed
    registry.up(1, A, RANK0, 6, 0)
    assert not registry.changed, "the same again is no news"


def test_the_newest_life_wins_wherever_it_registers() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5, 0)
    registry.take_changes(0)
    registry.up(2, B, RANK0, 7, 10)
    changes = registry.take_changes(0)
    assert [(entry.agent, entry.incarnation) for entry in changes.entries] == [(B.agent, 7)]
    assert [(name, life) for name, life, _ in changes.gone] == [(RANK0, 5)]
    registry.down(1, RANK0, 5, "its process ended")
    assert not registry.changed, "word of the old life, and from where it no longer lives"
    registry.down(2, RANK0, 7, "its process ended")
    assert registry.take_changes(0).gone == ((RANK0, 7, "its process ended"),)
    assert len(registry) == 0


def test_an_agent_out_of_reach_keeps_its_endpoints_and_names_them_within_a_lease_of_its_return() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5, 0)
    registry.up(1, A, RANK1, 6, 0)
    registry.take_changes(0)
    registry.session_lost(1, A.agent, 1000, 1000 + ABSENT)
    assert registry.next_deadline_ns() == 1000 + ABSENT
    registry.agent_returned(A.agent, 1200 + LEASE)
    registry.up(2, A, RANK0, 5, 0)
    assert not registry.changed, "back in time: nobody needs to know"
    assert registry.next_deadline_ns() == 1200 + LEASE
    registry.expire(1199 + LEASE)
    assert not registry.changed
    registry.expire(1200 + LEASE)
    changes = registry.take_changes(0)
    assert [(name, life) for name, life, _ in changes.gone] == [(RANK1, 6)], "the one that did not come back"
    assert registry.next_deadline_ns() is None
    assert registry.count(2) == 1


def test_an_agent_that_others_see_keeps_its_endpoints_for_as_long() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5, 0)
    registry.take_changes(0)
    registry.session_lost(1, A.agent, 1000, 1000 + ABSENT)
    registry.agent_seen(A.agent, 5000)
    registry.agent_seen(B.agent, 9000)
    registry.expire(4999)
    assert not registry.changed
    registry.expire(5000)
    ((name, _, reason),) = registry.take_changes(5000).gone
    assert name == RANK0
    assert "a/0" in reason


def test_trainers_of_a_restarted_agent_come_back_to_it() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5, 0)
    registry.up(1, A, RANK1, 6, 0)
    registry.take_changes(0)
    registry.session_lost(1, A.agent, 0, ABSENT)
    registry.agent_returned(A.agent, LEASE)
    again = dataclasses.replace(A, incarnation=A.incarnation + 1)
    registry.up(2, again, RANK0, 5, 0)
    changes = registry.take_changes(0)
    assert not changes.gone, "the same life at another life of its agent"
    assert [(entry.incarnation, entry.agent_incarnation) for entry in changes.entries] == [(5, A.incarnation + 1)]
    registry.expire(LEASE)
    assert [(name, life) for name, life, _ in registry.take_changes(0).gone] == [(RANK1, 6)]


def test_lives_are_in_order_whatever_the_order_in_which_they_register() -> None:
    """As after a restart of the coordinator: a rank is alive at two agents, and the older one is back last."""
    registry = Registry()
    registry.up(1, B, RANK0, 7, 500)
    registry.take_changes(600)
    assert registry.up(2, A, RANK0, 5, 100)
    assert not registry.changed
    registry.down(2, RANK0, 5, "killed")
    assert not registry.changed
    assert [(entry.agent, entry.incarnation) for entry in registry.entries] == [(B.agent, 7)]
    registry.up(2, A, RANK0, 9, 700)
    assert [(entry.agent, entry.incarnation) for entry in registry.entries] == [(A.agent, 9)], "and a newer one wins"


def test_an_agent_needs_no_order_for_its_own_trainers() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5, 500)
    registry.up(1, A, RANK0, 9, 100)
    assert [entry.incarnation for entry in registry.entries] == [9]


@pytest.mark.parametrize("away", [ABSENT - 1, ABSENT])
def test_a_hung_process_whose_agent_returns_does_not_take_its_rank_back(away: int) -> None:
    """Its agent was out of reach while the rank was started elsewhere: after its end the new one is still there."""
    registry = Registry()
    registry.up(1, A, RANK0, 5, 0)
    registry.session_lost(1, A.agent, 0, ABSENT)
    registry.expire(away)
    registry.up(2, B, RANK0, 7, 50)
    registry.take_changes(0)
    registry.agent_returned(A.agent, away + LEASE)
    assert registry.up(3, A, RANK0, 5, 1)
    assert not registry.changed
    registry.down(3, RANK0, 5, "killed")
    registry.expire(2 * ABSENT)
    assert not registry.changed
    assert [(entry.agent, entry.incarnation) for entry in registry.entries] == [(B.agent, 7)]


def test_an_earlier_life_is_welcome_where_nobody_has_taken_its_place() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5, 0)
    registry.session_lost(1, A.agent, 0, ABSENT)
    registry.expire(ABSENT)
    registry.up(2, A, RANK0, 5, 0)
    assert [entry.incarnation for entry in registry.entries] == [5]
    registry.up(3, B, RANK0, 7, 50)
    registry.down(3, RANK0, 7, "killed")
    registry.up(4, A, RANK0, 5, 0)
    assert [entry.incarnation for entry in registry.entries] == [5]


def test_what_is_told_says_how_old_a_life_is_and_late_words_make_none_younger() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5, 100)
    assert [entry.age_ns for entry in registry.take_changes(150).entries] == [50]
    registry.up(2, A, RANK0, 5, 130)
    assert [entry.age_ns for entry in registry.whole(200, full=True).entries] == [100]
