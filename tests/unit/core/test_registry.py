"""Whose endpoints are known, and what is told when they come and go."""

from __future__ import annotations

import pytest

from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import AgentHello
from proxyd.core.registry import Registry

RANK0 = EndpointName("job", 0)
RANK1 = EndpointName("job", 1)
A = AgentHello(AgentName("a", "0"), 11, "a:1")
B = AgentHello(AgentName("b", "0"), 22, "b:1")
LEASE = 100


def test_changes_are_collected_and_handed_out_once() -> None:
    registry = Registry()
    registry.up(1, A, RANK1, 5)
    registry.up(1, A, RANK0, 6)
    assert registry.changed
    changes = registry.take_changes()
    assert [entry.endpoint for entry in changes.entries] == [RANK0, RANK1]
    assert changes.entries[0].data_address == "a:1"
    assert (changes.gone, changes.full) == ((), False)
    assert not registry.changed
    registry.up(1, A, RANK0, 6)
    assert not registry.changed, "the same again is no news"


def test_the_newest_life_wins_wherever_it_registers() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5)
    registry.take_changes()
    registry.up(2, B, RANK0, 7)
    changes = registry.take_changes()
    assert [(entry.agent, entry.incarnation) for entry in changes.entries] == [(B.agent, 7)]
    assert [(name, life) for name, life, _ in changes.gone] == [(RANK0, 5)]
    registry.down(1, RANK0, 5, "its process ended")
    assert not registry.changed, "word of the old life, and from where it no longer lives"
    registry.down(2, RANK0, 7, "its process ended")
    assert registry.take_changes().gone == ((RANK0, 7, "its process ended"),)
    assert len(registry) == 0


def test_an_agent_out_of_reach_keeps_its_endpoints_for_a_lease() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5)
    registry.up(1, A, RANK1, 6)
    registry.take_changes()
    registry.session_lost(1, A.agent, 1000)
    registry.agent_returned(A.agent, A.incarnation)
    registry.up(2, A, RANK0, 5)
    assert not registry.changed, "back within its lease: nobody needs to know"
    assert registry.next_deadline_ns(LEASE) == 1100
    registry.expire(1099, LEASE)
    assert not registry.changed
    registry.expire(1100, LEASE)
    changes = registry.take_changes()
    assert [(name, life) for name, life, _ in changes.gone] == [(RANK1, 6)], "the one that did not come back"
    assert registry.next_deadline_ns(LEASE) is None
    assert registry.count(2) == 1


def test_a_restarted_agent_has_none_of_its_old_endpoints() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5)
    registry.take_changes()
    registry.session_lost(1, A.agent, 0)
    registry.agent_returned(A.agent, A.incarnation + 1)
    ((name, life, reason),) = registry.take_changes().gone
    assert (name, life) == (RANK0, 5)
    assert "restarted" in reason


@pytest.mark.parametrize("away", [LEASE - 1, LEASE])
def test_a_hung_process_whose_agent_returns_does_not_take_its_rank_back(away: int) -> None:
    """Its agent was out of reach while the rank was started elsewhere: after its end the new one is still there."""
    registry = Registry()
    registry.up(1, A, RANK0, 5)
    registry.session_lost(1, A.agent, 0)
    registry.expire(away, LEASE)
    registry.up(2, B, RANK0, 7)
    registry.take_changes()
    registry.agent_returned(A.agent, A.incarnation)
    assert registry.up(3, A, RANK0, 5)
    assert not registry.changed
    registry.down(3, RANK0, 5, "killed")
    registry.expire(2 * LEASE, LEASE)
    assert not registry.changed
    assert [(entry.agent, entry.incarnation) for entry in registry.entries] == [(B.agent, 7)]


def test_an_earlier_life_is_welcome_where_nobody_has_taken_its_place() -> None:
    registry = Registry()
    registry.up(1, A, RANK0, 5)
    registry.session_lost(1, A.agent, 0)
    registry.expire(LEASE, LEASE)
    registry.up(2, A, RANK0, 5)
    assert [entry.incarnation for entry in registry.entries] == [5]
    registry.up(3, B, RANK0, 7)
    registry.down(3, RANK0, 7, "killed")
    registry.up(4, A, RANK0, 5)
    assert [entry.incarnation for entry in registry.entries] == [5]


def test_earlier_lives_are_forgotten_when_they_end_or_become_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxyd.core.registry.MAX_EARLIER", 2)
    registry = Registry()
    registry.up(1, A, RANK0, 5)
    registry.up(2, B, RANK0, 7)
    assert registry._earlier == {RANK0: 5}
    registry.down(1, RANK0, 5, "killed")
    assert registry._earlier == {}
    for rank in range(3):
        registry.up(1, A, EndpointName("job", rank), 10)
        registry.up(2, B, EndpointName("job", rank), 20)
    assert list(registry._earlier) == [RANK1, EndpointName("job", 2)]
