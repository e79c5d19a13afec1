"""The story of a transfer: what is kept of it, in words, and by cause."""

from __future__ import annotations

import pytest

from proxyd.coordinator import story as module
from proxyd.coordinator.story import Stories
from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.events import CoordinatorEvent, SessionMessage
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentMessage, CancelRequest, Denied, Grant, Queued, Request, TransferDone
from proxyd.runtime.translate_admin import Told, read_why, why_response
from proxyd.sim.fluid import FluidSender, FluidWorld
from proxyd.wire.envelope import TrafficClass

AB = LinkName("a", "b")
MS = 1_000_000


def request(number: int) -> Request:
    return Request(TransferId(1, number), AB, AgentName("b", "x"), "job", TrafficClass.PIPELINE, 8 << 20)


def grant(number: int, start_in_ns: int = 0, rate: int = 48_500_000, reason: str = "first in line") -> Grant:
    return Grant(9, TransferId(1, number), AB, 1 << 20, rate, start_in_ns, MS, 1, MS, reason)


def done(number: int) -> TransferDone:
    return TransferDone(TransferId(1, number), AB, TrafficClass.PIPELINE, 100, True, 0)


def said(message: AgentMessage) -> SessionMessage:
    return SessionMessage(1, message)


def told(stories: Stories, number: int, now_ns: int) -> Told:
    found = stories.of(TransferId(1, number), now_ns)
    assert found is not None
    return found


def test_a_story_in_words_with_its_times() -> None:
    stories = Stories()
    stories.saw(0, said(request(1)))
    stories.performed(1 * MS, [ToAgent(1, Queued(TransferId(1, 1), 2, 5 * MS, 200 * MS, "behind a/two"))])
    stories.performed(2 * MS, [ToAgent(1, grant(1, start_in_ns=MS))])
    stories.saw(9 * MS, said(done(1)))
    story = told(stories, 1, 10 * MS)
    assert [decision[:3] for decision in story.decisions] == [
        (10 * MS, "requested", "8 MiB over a->b, pipeline"),
        (9 * MS, "queued", "place 2, start in 5 ms, end in 200 ms: behind a/two"),
        (8 * MS, "granted", "1 MiB at 388 Mbit/s, start in 1 ms: first in line"),
        (1 * MS, "done", "100 B over a->b"),
    ]
    assert (story.requested_ago_ns, story.over_ago_ns, story.granted_bytes) == (10 * MS, 1 * MS, 1 << 20)


def test_grants_that_say_the_same_are_one_step() -> None:
    stories = Stories()
    stories.saw(0, said(request(1)))
    for number in range(100):
        stories.performed(number * MS, [ToAgent(1, grant(1, rate=48_500_000 + number * 1000))])
    stories.performed(100 * MS, [ToAgent(1, grant(1, reason="takes what is left over"))])
    steps = told(stories, 1, 100 * MS).decisions
    assert [step.what for step in steps] == ["requested", "granted", "granted"]
    assert steps[1].reason == "100 MiB in 100 grants over 99 ms at 388 Mbit/s to 388.8 Mbit/s: first in line"


def test_denied_and_cancelled_are_part_of_it_and_end_it() -> None:
    stories = Stories()
    stories.performed(0, [ToAgent(1, Denied(TransferId(1, 1), "no such link"))])
    stories.saw(0, said(CancelRequest(TransferId(1, 1), "the trainer left")))
    story = told(stories, 1, 0)
    assert [decision[1:3] for decision in story.decisions] == [
        ("denied", "no such link"),
        ("cancelled", "the trainer left"),
    ]
    assert story.over_ago_ns == 0
    assert story.link is None


def test_small_messages_and_grants_ahead_leave_no_story() -> None:
    stories = Stories()
    stories.saw(0, said(done(1)))
    stories.performed(0, [ToAgent(1, Grant(1, TransferId(0, 0), AB, 9, 9, 0, 9, 1, 9, "announced"))])
    assert stories.of(TransferId(1, 1), 0) is None
    assert stories.of(TransferId(0, 0), 0) is None


def test_stories_are_bounded_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TRANSFERS", 5)
    monkeypatch.setattr(module, "MAX_FIRST", 2)
    stories = Stories()
    for number in range(10):
        for at_ns in range(40):
            stories.performed(at_ns, [ToAgent(1, grant(number + 1, reason=f"reason {at_ns}"))])
    assert stories.of(TransferId(1, 5), 40) is None
    ages = [decision.age_ns for decision in told(stories, 10, 40).decisions]
    assert ages == [40, 39, *range(module.MAX_LAST, 0, -1)]


def test_the_wait_is_told_by_cause_and_crosses_the_wire_whole() -> None:
    machine = CoordinatorMachine(CoordinatorConfig(links=(LinkSettings(AB, 50_000_000, 40 * MS, 200_000),)), epoch=2)
    stories = Stories(machine)

    def handle(event: CoordinatorEvent, now_ns: int) -> list[CoordinatorEffect]:
        stories.saw(now_ns, event)
        effects = machine.handle(event, now_ns)
        stories.performed(now_ns, effects)
        return effects

    world = FluidWorld(machine, [FluidSender(AgentName("a", f"host{n}"), AB, 40 * MS) for n in range(2)], handle=handle)
    world.run(10 * MS)
    world.send(1, 10_000_000)
    second = world.send(2, 10_000_000)
    world.run(150 * MS)
    waiting = stories.of(second, world.now_ns)
    assert waiting is not None
    assert [wait.cause for wait in waiting.waits] == ["turn"]
    assert waiting.waits[0].waited_ns == pytest.approx(139.5 * MS, rel=0.01)
    world.run(1500 * MS)
    world.done(2, second, 10_000_000, TrafficClass.PIPELINE)
    world.run(1600 * MS)
    story = stories.of(second, world.now_ns)
    assert story is not None
    assert story.over_ago_ns is not None
    assert (story.agent, story.destination, story.job) == (AgentName("a", "host1"), AgentName("b", "gw"), "job")
    granted = next(step for step in story.decisions if step.what == "granted")
    assert granted.waits[0].cause == "turn"
    before = [wait.words for wait in granted.waits if wait.cause == "lane"]
    assert before == ["the sender before had not left (a/host0)"]
    assert sum(wait.waited_ns for wait in granted.waits) == pytest.approx(200 * MS, rel=0.15)
    assert read_why(why_response(story)) == story
