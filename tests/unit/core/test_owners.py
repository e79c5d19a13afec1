"""A coordinator and its standby, as an agent sees them: whose word counts, and which Welcome is taken at all."""

from __future__ import annotations

import dataclasses

from proxyd.core import events as ev
from proxyd.core.ids import LinkName
from proxyd.core.messages import Beat, CancelRequest, Carried, Denied, Directory, Grant, Request, Welcome
from proxyd.core.owners import FENCE_MEMORY_NS, Fences, Owners

from .agent_world import INFO, LINK, MS, World

ONE, TWO = "one:7600", "two:7600"
MIB = 1 << 20
RATE = 10 * MIB


def welcome(fence: int, name: str = "hub") -> Welcome:
    return Welcome(name, fence or 1, ("*->*",), 150 * MS, 2000 * MS, (INFO,), fence)


def test_the_highest_fence_owns_the_link_whatever_the_order_of_the_addresses() -> None:
    owners = Owners((ONE, TWO))
    owners.began(ONE, welcome(5), 0)
    owners.began(TWO, welcome(9), 1)
    assert owners.superseded(ONE)
    assert owners.of(LINK).address == TWO  # type: ignore[union-attr]
    assert owners.alive() == {TWO}, "though the session of the other one stands"
    owners.ended(TWO, "gone")
    assert owners.of(LINK).address == TWO, "dead or not: the old one is no owner any more"  # type: ignore[union-attr]
    owners.began(ONE, welcome(12), 2)
    assert owners.of(LINK).address == ONE  # type: ignore[union-attr]
    assert not owners.superseded(ONE)


def test_coordinators_of_other_names_or_without_a_lock_are_not_compared() -> None:
    owners = Owners((ONE, TWO))
    owners.began(ONE, welcome(5), 0)
    owners.began(TWO, welcome(9, "another"), 1)
    assert owners.of(LINK).address == ONE  # type: ignore[union-attr]
    assert owners.alive() == {ONE, TWO}
    assert not owners.same(ONE, TWO)
    plain = Owners((ONE, TWO))
    plain.began(ONE, welcome(0), 0)
    plain.began(TWO, welcome(0), 1)
    assert not plain.superseded(ONE)
    assert not plain.same(ONE, TWO), "two that share a name by accident, each with its own links"


def test_a_welcome_of_a_lower_fence_is_refused_while_the_higher_one_is_remembered() -> None:
    fences = Fences()
    assert fences.admits(welcome(9), 0) == ""
    fences.heard(welcome(9), 5_000_000_000)
    why = fences.admits(welcome(8), 7_000_000_000)
    assert "fence 8" in why
    assert "2.0 s ago" in why
    assert fences.admits(welcome(9), 8_000_000_000) == "", "its own session broke and is back"
    assert fences.admits(welcome(10), 9_000_000_000) == ""
    assert fences.admits(welcome(9), 10_000_000_000) != ""
    assert fences.admits(welcome(1, "another"), 10_000_000_000) == ""
    # A lock service that was set up anew counts from the beginning.
    assert fences.admits(welcome(2), 9_000_000_000 + FENCE_MEMORY_NS) == ""
    assert fences.admits(welcome(3), 9_000_000_001 + FENCE_MEMORY_NS) == ""


def world_of_two() -> World:
    world = World("a/0", "b/0", coordinators=(ONE, TWO))
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    for name in ("a/0", "b/0"):
        world.put(name, ev.CoordinatorConnected(ONE, welcome(5)))
    world.publish(ONE)
    return world


def test_grants_of_one_that_was_taken_over_are_refused_though_its_session_stands() -> None:
    """Stopped and woken up again, it grants as if nothing had been."""
    world = world_of_two()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB)
    world.grant("a/0", transfer, MIB, epoch=5, coordinator=ONE)
    assert len(world.chunks) > 0
    world.put("a/0", ev.CoordinatorConnected(TWO, welcome(9)))
    world.asked_of.clear()
    world.chunks.clear()
    world.grant("a/0", transfer, MIB, epoch=5, coordinator=ONE)
    world.grant("a/0", transfer, MIB, epoch=9, coordinator=ONE)
    world.put("a/0", ev.CoordinatorSaid(ONE, Denied(transfer, "not today")))
    gone = tuple((entry.endpoint, entry.incarnation, "gone, it thinks") for entry in world.endpoints)
    world.put("a/0", ev.CoordinatorSaid(ONE, Directory((), gone, full=False)))
    assert not world.chunks
    assert not [message for address, message in world.asked_of if address == ONE], "nothing is said to it either"
    world.grant("a/0", transfer, 3 * MIB, epoch=9, coordinator=TWO)
    assert sum(chunk.length for _, chunk in world.chunks) == 3 * MIB


def test_the_standby_is_told_what_the_other_one_left_and_asked_for_the_rest() -> None:
    world = world_of_two()
    info = dataclasses.replace(INFO, fallback_bytes_per_s=4 * RATE)
    world.put("a/0", ev.CoordinatorSaid(ONE, Beat(5, ((LINK, RATE),), (info,))))
    world.post("a/0", 1, 0, 1, 64 * MIB)
    world.put("a/0", ev.CoordinatorLost(ONE, "killed"))
    world.put("a/0", ev.CoordinatorLost(TWO, "it stands by for hub; the active one is at one:7600"))
    world.advance(2_000)
    sent = sum(chunk.length for _, chunk in world.chunks)
    assert sent > 10 * MIB, "meanwhile it goes on by itself"
    world.asked_of.clear()
    world.put("a/0", ev.CoordinatorConnected(TWO, welcome(9)))
    said = [message for address, message in world.asked_of if address == TWO]
    (carried,) = [message for message in said if isinstance(message, Carried)]
    assert (carried.fallback_bytes_per_s, carried.fallback_total_bytes_per_s) == (RATE, 4 * RATE)
    (request,) = [message for message in said if isinstance(message, Request)]
    assert 64 * MIB - sent - MIB <= request.wanted_bytes <= 64 * MIB - sent
    assert [type(message) for address, message in world.asked_of if address == ONE] in ([], [CancelRequest])
    # Should that one die before its first beat, the old rate still holds: it is that of the same coordinator.
    book = world.agent("a/0").sender.asking.links[LinkName("a", "b")]
    assert (book.coordinator, book.fallback_rate_bytes_per_s) == (TWO, RATE)


def test_a_grant_means_the_epoch_of_its_own_session_only() -> None:
    world = world_of_two()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB)
    stale = Grant(1, transfer, LINK, MIB, RATE, 0, 2000 * MS, 4, 5 * MS, "of an earlier life")
    world.put("a/0", ev.CoordinatorSaid(ONE, stale))
    assert not world.chunks
