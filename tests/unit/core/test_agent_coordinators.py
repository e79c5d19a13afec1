"""The agent machine between several coordinators: who owns a link, what the directory's union is, and silence."""

from __future__ import annotations

import dataclasses

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.agent import AgentConfig, AgentMachine
from proxyd.core.ids import AgentName, EndpointName, LinkName
from proxyd.core.messages import (
    Announce,
    Beat,
    CancelRequest,
    Denied,
    Directory,
    DirectoryEntry,
    EndpointDown,
    EndpointUp,
    LinkInfo,
    Report,
    Request,
    TransferDone,
)
from proxyd.wire.client import SendPhase
from proxyd.wire.envelope import ErrorCode

from .agent_world import INFO, LINK, MS, World

ONE, TWO = "one:7600", "two:7600"
MIB = 1 << 20
ENDPOINT = EndpointName("job", 1)
ENTRY = DirectoryEntry(ENDPOINT, 101, AgentName("b", "0"), 2, "b/0:1")


def world_with(first: tuple[str, ...] = (), second: tuple[str, ...] = (), *, attached: bool = True) -> World:
    """Agents a/0 and b/0, configured with ONE and TWO in this order; a coordinator that owns nothing isn't there."""
    world = World("a/0", "b/0", coordinators=(ONE, TWO))
    if attached:
        world.attach("a/0", 0)
        world.attach("b/0", 1)
    if first:
        world.connect(owns=first, coordinator=ONE)
    if second:
        world.connect(owns=second, coordinator=TWO)
    return world


def asked_of(world: World, address: str, kind: type) -> list:
    return [message for to, message in world.asked_of if to == address and isinstance(message, kind)]


def say(world: World, address: str, directory: Directory) -> None:
    world.put("a/0", ev.CoordinatorSaid(address, directory))


def listed(world: World) -> DirectoryEntry | None:
    return world.agent("a/0").sender.directory.get(ENDPOINT)


# ------------------------------------------------------------------------------------------ who owns


@pytest.mark.parametrize(("first", "second", "owner"), [("a->*", "b->*", ONE), ("b->*", "a->*", TWO)])
def test_a_request_goes_to_the_owner_and_to_nobody_else(first: str, second: str, owner: str) -> None:
    world = world_with((first,), (second,))
    transfer = world.post("a/0", 1, 0, 1, MIB)
    other = TWO if owner == ONE else ONE
    assert [r.transfer for r in asked_of(world, owner, Request)] == [transfer]
    world.put("a/0", ev.SendAnnounced(world.agent("a/0").sender.transfers[transfer].envelope, MS))
    world.grant("a/0", transfer, MIB, coordinator=owner)
    world.delivered("a/0", "b/0")
    assert world.tells(fx.TellSendDone)
    for kind in (Announce, Report, TransferDone):
        assert asked_of(world, owner, kind), kind
        assert not asked_of(world, other, kind), kind
    assert not asked_of(world, other, Request)


def test_endpoints_are_registered_with_all() -> None:
    world = world_with(("a->*",), ("b->*",))
    for address in (ONE, TWO):
        assert EndpointUp(EndpointName("job", 0), 100) in asked_of(world, address, EndpointUp)
    world.put("a/0", ev.ClientDetached(EndpointName("job", 0), 100, "closed", True))
    for address in (ONE, TWO):
        assert [down.incarnation for down in asked_of(world, address, EndpointDown)] == [100]


@pytest.mark.parametrize("first_to_come", [ONE, TWO])
def test_of_two_that_own_a_link_the_first_configured_one_wins(first_to_come: str) -> None:
    world = world_with()
    last_to_come = TWO if first_to_come == ONE else ONE
    world.connect(owns=("*->*",), coordinator=first_to_come)
    world.connect(owns=("a->b",), coordinator=last_to_come)
    world.post("a/0", 1, 0, 1, MIB)
    assert asked_of(world, ONE, Request)
    assert not asked_of(world, TWO, Request)


def test_what_waits_moves_to_an_owner_that_is_configured_before_the_present_one() -> None:
    world = world_with((), ("*->*",))
    transfer = world.post("a/0", 1, 0, 1, 2 * MIB, filled=0)
    world.grant("a/0", transfer, MIB, coordinator=TWO)
    world.connect(epoch=9, owns=("a->*",), coordinator=ONE)
    assert [c.transfer for c in asked_of(world, TWO, CancelRequest)] == [transfer]
    assert [r.wanted_bytes for r in asked_of(world, ONE, Request)] == [2 * MIB], "the other's grant is void"
    world.put("a/0", ev.SendFilled(transfer, 2 * MIB))
    assert not world.chunks
    world.grant("a/0", transfer, MIB, coordinator=TWO)
    assert not world.chunks, "nor is what it grants now"
    world.grant("a/0", transfer, 2 * MIB, epoch=9, coordinator=ONE)
    assert world.tells(fx.TellSendDone)


def test_equal_epochs_of_two_coordinators_are_not_mistaken() -> None:
    world = world_with(("a->*",), ("b->*",))
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", transfer, MIB, epoch=1, coordinator=TWO)
    assert not world.chunks


def test_a_lost_owner_is_not_replaced_by_another_that_owns_the_link_too() -> None:
    world = world_with(("a->*",), ("*->*",))
    world.beat("a/0", 10_000_000, coordinator=ONE)
    world.beat("a/0", 40_000_000, coordinator=TWO)
    world.put("a/0", ev.CoordinatorLost(ONE, "killed"))
    world.connect(epoch=2, owns=("*->*",), coordinator=TWO)
    world.post("a/0", 1, 0, 1, MIB)
    assert not asked_of(world, TWO, Request)
    world.advance(700)
    assert world.agent("a/0").status(world.now_ns).links[0].fallback_bytes == MIB


def test_a_denial_of_a_coordinator_that_does_not_own_the_link_means_nothing() -> None:
    world = world_with(("a->*",), ("b->*",))
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.put("a/0", ev.CoordinatorSaid(TWO, Denied(transfer, "not mine")))
    assert not world.tells(fx.TellSendFailed)
    world.put("a/0", ev.CoordinatorSaid(ONE, Denied(transfer, "no")))
    assert world.tells(fx.TellSendFailed)[0].code is ErrorCode.REFUSED


def test_figures_of_a_link_are_taken_from_its_owner() -> None:
    world = world_with(("a->*",), ("*->*",))
    other = LinkInfo(LINK, 1, 1, 1, 0, 1 << 16, 1 << 16, 0, 0, "configured")
    world.put("a/0", ev.CoordinatorSaid(TWO, Beat(1, ((LINK, 1),), (other,))))
    state = world.agent("a/0").link_state(EndpointName("job", 0), 1, world.now_ns)
    assert state.rate_bytes_per_s == INFO.rate_bytes_per_s


# ------------------------------------------------------------------------------------ nobody owns it


def test_an_owner_that_appears_later_is_asked_then() -> None:
    world = world_with(("b->*",))
    transfer = world.post("a/0", 1, 0, 1, MIB)
    assert world.tells(fx.TellSendState)[-1].phase is SendPhase.QUEUED
    assert not asked_of(world, ONE, Request)
    world.advance(5_000)
    world.connect(owns=("a->*",), coordinator=TWO)
    assert [r.wanted_bytes for r in asked_of(world, TWO, Request)] == [MIB]
    # Cut before anything was known of the link: into chunks that any grant holds.
    world.grant("a/0", transfer, 64 << 10, coordinator=TWO)
    assert sum(chunk.length for _, chunk in world.chunks) == 64 << 10
    world.grant("a/0", transfer, MIB - (64 << 10), coordinator=TWO)
    assert world.tells(fx.TellSendDone)


def test_a_link_that_nobody_owns_is_an_error_that_says_who_owns_what() -> None:
    world = world_with(("b->*",))
    world.put("a/0", ev.CoordinatorLost(TWO, "unavailable: connection refused"))
    world.post("a/0", 1, 0, 1, MIB)
    world.advance(9_900)
    assert not world.tells(fx.TellSendFailed)
    world.advance(200)
    [failed] = world.tells(fx.TellSendFailed)
    assert failed.code is ErrorCode.CONTROL_LOST
    assert "no coordinator owns a->b" in failed.message
    assert f"{ONE} owns b->*" in failed.message
    assert f"{TWO} was not reached: unavailable: connection refused" in failed.message


def test_a_coordinator_that_comes_back_and_owns_less_passes_the_link_on() -> None:
    world = world_with(("*->*",), ("a->*",))
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.connect(epoch=2, owns=("b->*",), coordinator=ONE)
    assert [r.transfer for r in asked_of(world, TWO, Request)] == [transfer]
    world.grant("a/0", transfer, MIB, coordinator=TWO)
    assert world.tells(fx.TellSendDone)


def test_a_coordinator_that_comes_back_and_owns_less_may_leave_the_link_to_nobody() -> None:
    world = world_with(("*->*",), ("b->*",))
    world.beat("a/0", 10_000_000, coordinator=ONE)
    world.connect(epoch=2, owns=("b->*",), coordinator=ONE)
    world.post("a/0", 1, 0, 1, MIB)
    world.advance(10_100)
    assert not world.chunks, "its fallback rate went with it"
    assert "no coordinator owns a->b" in world.tells(fx.TellSendFailed)[0].message


# ------------------------------------------------------------------------------------------- silence


def test_session_lost_fallback_and_session_back() -> None:
    world = world_with(("a->*",), ("b->*",))
    world.beat("a/0", 10_000_000, coordinator=ONE)
    transfer = world.post("a/0", 1, 0, 1, 16 * MIB)
    world.put("a/0", ev.CoordinatorLost(ONE, "killed"))
    world.put("a/0", ev.CoordinatorSaid(TWO, Beat(1, (), ())))
    world.advance(490)
    assert not world.chunks, "0.5 s of silence, not less"
    world.advance(500)
    sent = sum(chunk.length for _, chunk in world.chunks)
    assert 3 * MIB <= sent <= 6 * MIB, "half a second at 10 MB/s"
    book = world.agent("a/0").status(world.now_ns).links[0]
    assert (book.fallback, book.fallback_bytes, book.granted_taken_bytes) == (True, sent, 0)
    world.connect(epoch=2, owns=("a->*",), coordinator=ONE)
    left = 16 * MIB - sent
    assert asked_of(world, ONE, Request)[-1].wanted_bytes == pytest.approx(left, abs=MIB)
    world.advance(100)
    assert sum(chunk.length for _, chunk in world.chunks) <= sent + MIB, "the fallback has ended"
    world.grant("a/0", transfer, 16 * MIB, epoch=2, coordinator=ONE)
    assert [done.transfer for done in world.tells(fx.TellSendDone)] == [transfer]
    assert not world.agent("a/0").status(world.now_ns).links[0].fallback


def test_the_others_word_is_no_sign_of_life_of_the_owner() -> None:
    world = world_with(("a->*",), ("b->*",))
    world.beat("a/0", 10_000_000, coordinator=ONE)
    world.post("a/0", 1, 0, 1, MIB)
    for _ in range(5):
        world.advance(150)
        world.put("a/0", ev.CoordinatorSaid(TWO, Beat(1, (), ())))
    assert world.agent("a/0").status(world.now_ns).links[0].fallback_bytes > 0


def test_a_link_that_came_with_a_beat_has_been_heard() -> None:
    world = world_with(("*->*",))
    new = LinkName("a", "c")
    info = LinkInfo(new, 50_000_000, 60 * MS, 300_000, 0, 1 << 20, 256 << 10, 0, 0, "default")
    world.put("a/0", ev.CoordinatorSaid(ONE, Beat(1, ((new, 10_000_000),), (info,))))
    book = world.agent("a/0").sender.asking.links[new]
    assert not book.silent(world.now_ns + 400 * MS), "a request now must wait for its grant, not fall back at once"


# ------------------------------------------------------------------------------- the directory's union


def test_full_of_one_does_not_remove_what_the_other_listed() -> None:
    world = world_with(("a->*",), ("b->*",))
    say(world, ONE, Directory((), (), full=True))
    assert listed(world) == ENTRY
    say(world, TWO, Directory((), (), full=True))
    assert listed(world) is None
    assert not world.tells(fx.TellPeerGone), "its trainer may live"
    world.advance(30_000)
    assert world.tells(fx.TellPeerGone)[-1].message == "its agent is no longer registered with the coordinator"


def test_gone_of_one_that_lost_sight_of_the_agent_removes_nothing_while_the_other_sees_it() -> None:
    world = world_with(("a->*",), ("b->*",))
    transfer = world.post("a/0", 1, 0, 1, MIB)
    say(world, ONE, Directory((), ((ENDPOINT, 101, "its agent was not heard for 2.0 s"),), full=False))
    assert listed(world) == ENTRY
    assert not world.tells(fx.TellSendFailed)
    say(world, TWO, Directory((), ((ENDPOINT, 101, "its process ended"),), full=False))
    assert listed(world) is None
    assert [failed.transfer for failed in world.tells(fx.TellSendFailed)] == [transfer]


@pytest.mark.parametrize("lost_first", [True, False])
def test_one_whose_session_is_lost_keeps_nothing_alive(lost_first: bool) -> None:
    world = world_with(("a->*",), ("b->*",))
    gone = Directory((), ((ENDPOINT, 101, "its process ended"),), full=False)
    if lost_first:
        world.put("a/0", ev.CoordinatorLost(TWO, "killed"))
        say(world, ONE, gone)
    else:
        say(world, ONE, gone)
        assert listed(world) == ENTRY
        world.put("a/0", ev.CoordinatorLost(TWO, "killed"))
    assert listed(world) is None
    assert world.tells(fx.TellPeerGone)[-1].message == "its process ended"


def test_while_all_are_lost_what_they_said_stands() -> None:
    world = world_with(("a->*",), ("b->*",))
    for address in (ONE, TWO):
        world.put("a/0", ev.CoordinatorLost(address, "killed"))
    assert listed(world) == ENTRY
    assert not world.tells(fx.TellPeerGone)


def test_one_that_sees_it_again_no_longer_doubts_it() -> None:
    world = world_with(("a->*",), ("b->*",))
    say(world, ONE, Directory((), ((ENDPOINT, 101, "not heard"),), full=False))
    say(world, ONE, Directory((ENTRY,), (), full=False))
    for address in (TWO, ONE):
        world.put("a/0", ev.CoordinatorLost(address, "killed"))
    assert listed(world) == ENTRY


def test_gone_of_an_earlier_life_is_ignored() -> None:
    world = world_with(("a->*",), ("b->*",))
    later = DirectoryEntry(ENDPOINT, 555, AgentName("b", "0"), 2, "b/0:1")
    say(world, ONE, Directory((later,), ((ENDPOINT, 101, "replaced"),), full=False))
    for address in (ONE, TWO):
        say(world, address, Directory((), ((ENDPOINT, 101, "replaced"),), full=False))
    assert listed(world) == later


def test_one_that_lags_behind_does_not_bring_an_earlier_life_back() -> None:
    world = world_with(("a->*",), ("b->*",))
    later = DirectoryEntry(ENDPOINT, 555, AgentName("b", "0"), 2, "b/0:1")
    say(world, ONE, Directory((later,), (), full=False))
    assert [gone.incarnation for gone in world.tells(fx.TellPeerGone) if gone.rank == 1] == [101]
    earlier = dataclasses.replace(ENTRY, age_ns=3_000_000_000)
    say(world, TWO, Directory((earlier,), (), full=True))
    assert listed(world) == later
    say(world, ONE, Directory((), ((ENDPOINT, 555, "ended"),), full=False))
    assert listed(world) is None, "who believes in the earlier life does not list the present one"


ELSEWHERE = AgentName("b", "1")


@pytest.mark.parametrize(("agent", "gone", "full"), [
    (ENTRY.agent, False, False), (ENTRY.agent, True, False), (ENTRY.agent, False, True),
    (ELSEWHERE, True, False), (ELSEWHERE, False, True),
])  # fmt: skip
def test_ones_later_word_is_not_judged_by_age_against_its_own(agent: AgentName, gone: bool, full: bool) -> None:
    """Our host stood still meanwhile, and its clock too: the new life passes for older than the one that we know."""
    world = world_with(("*->*",))
    world.machines.setdefault(ELSEWHERE, AgentMachine(AgentConfig(ELSEWHERE, 3, f"{ELSEWHERE}:1")))
    later = DirectoryEntry(ENDPOINT, 555, agent, 3, f"{agent}:1", age_ns=10_000_000_000)
    taken_back = ((ENDPOINT, 101, "replaced"),) if gone else ()
    say(world, ONE, Directory((later,), taken_back, full=full))
    assert listed(world) == later


def test_two_that_tell_of_a_new_life_one_after_the_other_are_believed_in_the_end() -> None:
    world = world_with(("a->*",), ("b->*",))
    later = dataclasses.replace(ENTRY, incarnation=555, age_ns=10_000_000_000)
    say(world, ONE, Directory((later,), (), full=False))
    assert listed(world) == ENTRY, "by its age it is an earlier one, and the other one lists the life that we know"
    say(world, TWO, Directory((later,), (), full=False))
    assert listed(world) == later


def test_its_own_trainers_an_agent_knows_best() -> None:
    world = world_with(("a->*",), ("b->*",))
    mine = EndpointName("job", 0)
    for address in (ONE, TWO):
        say(world, address, Directory((ENTRY,), ((mine, 100, "gone, it thinks"),), full=True))
    directory = world.agent("a/0").sender.directory
    assert directory.get(mine) is not None
    world.put("a/0", ev.ClientDetached(mine, 100, "closed", True))
    assert directory.get(mine) is None
