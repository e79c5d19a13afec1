"""Small messages go without asking, within a budget, and are accounted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.core import effects as fx
from proxyd.core.linkbook import LinkBook
from proxyd.core.messages import Report, Request

from .agent_world import INFO, LINK, MS, World

SMALL = 64 << 10
SHARE = INFO.rate_bytes_per_s // 20
BURST = INFO.buffer_bytes // 2
"""Half the buffer is less than a quarter of a second's share here."""


def two_sites() -> World:
    world = World("a/0", "b/0")
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect()
    return world


def test_what_is_beyond_the_budget_asks_like_everybody_and_arrives_in_order() -> None:
    world = two_sites()
    posted = [world.post("a/0", number, 0, 1, SMALL) for number in range(1, 11)]
    free = BURST // SMALL
    assert [effect.transfer for effect in world.tells(fx.TellSendDone)] == posted[:free]
    assert [request.transfer for request in world.asks(Request)] == posted[free:]
    for transfer in posted[free:]:
        world.grant("a/0", transfer, SMALL)
    assert [effect.transfer for effect in world.tells(fx.TellSendDone)] == posted
    assert [effect.transfer for effect in world.tells(fx.TellOffered)] == posted


def test_the_budget_fills_again() -> None:
    world = two_sites()
    for number in range(1, 6):
        world.post("a/0", number, 0, 1, SMALL)
    asked = len(world.asks(Request))
    world.advance(SMALL * 1000 // SHARE + 1)
    world.post("a/0", 6, 0, 1, SMALL)
    assert len(world.asks(Request)) == asked


def test_agents_divide_the_budget_as_they_divide_the_fallback_rate() -> None:
    world = two_sites()
    world.beat("a/0", INFO.rate_bytes_per_s * 8 // 10 // 64)
    for number in range(1, 6):
        world.post("a/0", number, 0, 1, SMALL)
    asked = len(world.asks(Request))
    assert asked == 4, "a message's worth, whatever the share"
    world.advance(SMALL * 1000 // SHARE + 1)
    world.post("a/0", 6, 0, 1, SMALL)
    assert len(world.asks(Request)) == asked + 1, "one of 64 waits 64 times as long"


def test_empty_messages_cost_nothing() -> None:
    world = two_sites()
    for number in range(1, 1000):
        world.post("a/0", number, 0, 1, 0)
    world.post("a/0", 1000, 0, 1, SMALL)
    assert not world.asks(Request)


def test_all_of_them_are_reported_soon_without_any_grant() -> None:
    world = two_sites()
    world.post("a/0", 1, 0, 1, SMALL)
    world.post("a/0", 2, 0, 1, 1000)
    world.advance(20)
    assert world.asks(Report)[-1].unscheduled_bytes == SMALL + 1000


def test_without_any_figures_of_the_link_they_go() -> None:
    world = World("a/0", "b/0")
    world.attach("a/0", 0)
    world.attach("b/0", 1)
    world.connect(infos=())
    for number in range(1, 50):
        world.post("a/0", number, 0, 1, SMALL)
    assert not world.asks(Request)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, SMALL)), min_size=1, max_size=200),
    st.sampled_from([10_000, 1_250_000, 50_000_000, 1_250_000_000]),
    st.sampled_from([0, 10_000, 300_000, 1 << 30]),
)
def test_never_more_than_a_twentieth_and_a_burst(steps: list[tuple[int, int]], rate: int, buffer_bytes: int) -> None:
    book = LinkBook(LINK)
    book.info = INFO.__class__(LINK, rate, 60 * MS, buffer_bytes, 0, 1 << 20, 256 << 10, 0, 0, "configured")
    now_ns = start_ns = 10**15
    sent = 0
    for wait_us, nbytes in steps:
        now_ns += wait_us * 1000
        if book.may_go_unscheduled(nbytes, SMALL, now_ns):
            sent += nbytes
        burst = max(SMALL, min(rate // 80, buffer_bytes // 2) if buffer_bytes else rate // 80)
        assert sent <= burst + rate // 20 * (now_ns - start_ns) / 1e9 + 1


@pytest.mark.parametrize("gap_ns", [1, 50, 10_000_000])
def test_the_budget_fills_however_often_it_is_asked(gap_ns: int) -> None:
    book = LinkBook(LINK)
    book.info = INFO
    now_ns = 0
    while book.may_go_unscheduled(1000, SMALL, now_ns):
        pass
    went = 0
    calls = 200_000_000 // gap_ns if gap_ns > 1000 else 20_000
    for _ in range(calls):
        now_ns += gap_ns
        while book.may_go_unscheduled(1000, SMALL, now_ns):
            went += 1000
    assert went >= SHARE * now_ns // 10**9 - 2000
