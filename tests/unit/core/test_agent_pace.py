"""What an agent holds follows the coordinator's newest word on the rate; beats are echoed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import AgentName, LinkName
from proxyd.core.messages import Beat, Echo, Pace, Report
from tests.unit.core.agent_world import COORDINATOR, LINK, MS, World

MIB = 1 << 20
B0, B1 = AgentName("b", "0"), AgentName("b", "1")


def two_peers(*more: str) -> World:
    world = World("a/0", "b/0", "b/1", **({"coordinators": (COORDINATOR, *more)} if more else {}))
    for name, rank in (("a/0", 0), ("b/0", 1), ("b/1", 2)):
        world.attach(name, rank)
    world.connect()
    return world


def pace(world: World, rate: int, *, epoch: int = 1, link: LinkName = LINK, coordinator: str = COORDINATOR) -> None:
    world.put("a/0", ev.CoordinatorSaid(coordinator, Pace(link, rate, epoch)))


def ceilings(world: World) -> list[tuple[AgentName, int]]:
    return [(effect.peer, effect.rate_bytes_per_s) for effect in world.tells(fx.SetPace)]


def rates(world: World) -> list[int]:
    return [held.rate_bytes_per_s for held in world.agent("a/0").sender.asking.links[LINK].grants]


def test_all_that_is_held_goes_at_the_new_pace_and_that_is_reported_at_once() -> None:
    world = two_peers()
    first = world.post("a/0", 1, 0, 1, 4 * MIB, filled=0)
    second = world.post("a/0", 2, 0, 2, 4 * MIB, filled=0)
    world.grant("a/0", first, 2 * MIB, rate=48_000_000)
    world.grant("a/0", second, MIB, rate=48_000_000, start_ms=10)
    pace(world, 20_000_000)
    assert rates(world) == [20_000_000, 20_000_000]
    assert ceilings(world)[-1] == (B0, 20_000_000)
    report = world.asks(Report)[-1]
    assert report.leaves_in_ns == pytest.approx(3 * MIB * 1e9 / 20_000_000, rel=0.01)


def test_what_is_in_the_kernel_follows_too() -> None:
    world = two_peers()
    transfer = world.post("a/0", 1, 0, 1, MIB)
    world.grant("a/0", transfer, MIB, rate=48_000_000)
    world.delivered("a/0", "b/0", unsent=500_000)
    pace(world, 10_000_000)
    assert ceilings(world)[-1] == (B0, 10_000_000)
    world.delivered("a/0", "b/0", unsent=400_000)
    assert world.asks(Report)[-1].leaves_in_ns == 40 * MS


def test_a_peer_to_which_nothing_is_under_way_keeps_its_ceiling() -> None:
    world = two_peers()
    done = world.post("a/0", 1, 0, 2, MIB)
    world.grant("a/0", done, MIB, rate=48_000_000)
    world.delivered("a/0", "b/1")
    transfer = world.post("a/0", 2, 0, 1, MIB)
    world.grant("a/0", transfer, MIB, rate=48_000_000)
    before = len(ceilings(world))
    pace(world, 10_000_000)
    assert ceilings(world)[before:] == [(B0, 10_000_000)]


def test_the_backlog_is_told_again_one_lead_early_at_the_new_pace() -> None:
    world = two_peers()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB, filled=0)
    world.grant("a/0", transfer, MIB, rate=50_000_000)
    world.advance(17)  # 4 ms before the end at the old pace
    said = len(world.asks(Report))
    book = world.agent("a/0").sender.asking.links[LINK]
    assert book.lead_due_ns is None, "said already"
    pace(world, 25_000_000)
    assert len(world.asks(Report)) == said + 1, "at once: the backlog leaves later than was said"
    assert book.lead_due_ns == world.now_ns + MIB * 1_000_000_000 // 25_000_000 - 5 * MS


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": 2},
        {"coordinator": "127.0.0.1:7601"},
        {"link": LinkName("a", "c")},
        {"link": LinkName("b", "a")},
    ],
)
def test_only_the_owner_of_this_epoch_sets_the_pace(wrong: dict[str, object]) -> None:
    world = two_peers("127.0.0.1:7601")
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB, filled=0)
    world.grant("a/0", transfer, 2 * MIB, rate=48_000_000)
    pace(world, 20_000_000, **wrong)  # type: ignore[arg-type]
    assert rates(world) == [48_000_000]


def test_a_slot_of_our_own_keeps_the_rate_that_was_handed_out() -> None:
    world = two_peers()
    world.beat("a/0", 5_000_000)
    world.post("a/0", 1, 0, 1, 4 * MIB, filled=0)
    world.advance(700)
    pace(world, 20_000_000)
    assert set(rates(world)) == {5_000_000}


def test_a_grant_with_a_lower_rate_counts_for_all_at_once() -> None:
    world = two_peers()
    first = world.post("a/0", 1, 0, 1, 4 * MIB, filled=0)
    second = world.post("a/0", 2, 0, 2, 4 * MIB, filled=0)
    world.grant("a/0", first, MIB, rate=48_000_000)
    world.grant("a/0", second, MIB, rate=30_000_000, start_ms=10)
    assert rates(world) == [30_000_000, 30_000_000]
    assert ceilings(world)[-1] == (B0, 30_000_000)


def test_a_grant_with_a_higher_rate_counts_for_all_from_its_start_on() -> None:
    world = two_peers()
    first = world.post("a/0", 1, 0, 1, 4 * MIB, filled=0)
    second = world.post("a/0", 2, 0, 2, 4 * MIB, filled=0)
    world.grant("a/0", first, MIB, rate=10_000_000)
    world.grant("a/0", second, MIB, rate=30_000_000, start_ms=10)
    world.advance(9)
    assert rates(world) == [10_000_000, 30_000_000], "until then others have the rest"
    world.advance(2)
    assert rates(world) == [30_000_000, 30_000_000]


def test_a_change_too_small_to_matter_costs_no_system_calls() -> None:
    world = two_peers()
    transfer = world.post("a/0", 1, 0, 1, 4 * MIB, filled=0)
    world.grant("a/0", transfer, 2 * MIB, rate=48_000_000)
    before = len(ceilings(world))
    for step in range(1, 5):
        pace(world, 48_000_000 + step * 60_000)
    assert ceilings(world)[before:] == [(B0, 48_240_000)], "steps of 1/800 add up to one of 1/200"


def test_a_beat_with_a_number_is_echoed_to_its_sender() -> None:
    world = two_peers("127.0.0.1:7601")
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Beat(1, (), (), number=7)))
    world.put("a/0", ev.CoordinatorSaid(COORDINATOR, Beat(1, (), ())))
    echoes = [(address, message) for address, message in world.asked_of if isinstance(message, Echo)]
    assert echoes == [(COORDINATOR, Echo(7, 0))]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("pace"), st.integers(1_000_000, 60_000_000)),
            st.tuples(st.just("grant"), st.integers(1_000_000, 60_000_000)),
            st.tuples(st.just("later"), st.integers(1_000_000, 60_000_000)),
            st.tuples(st.just("wait"), st.integers(1, 20)),
            st.tuples(st.just("delivered"), st.integers(0, MIB)),
        ),
        max_size=25,
    )
)
def test_no_peer_is_faster_than_the_newest_word(steps: list[tuple[str, int]]) -> None:
    """Whatever comes in which order: where nothing waits for its start, each ceiling with bytes under way and each held
    grant is at the last rate that was said (but for steps too small to matter)."""
    world = two_peers()
    transfer = world.post("a/0", 1, 0, 1, 64 * MIB, filled=8 * MIB)
    highest = last = 0
    for what, value in steps:
        match what:
            case "pace":
                pace(world, value)
                last = highest = value if rates(world) else last
            case "grant":
                world.grant("a/0", transfer, 256 << 10, rate=value)
                last = highest = value
            case "later":
                world.grant("a/0", transfer, 256 << 10, rate=value, start_ms=5)
                last, highest = value, max(highest, value)
            case "wait":
                world.advance(value)
            case "delivered":
                world.delivered("a/0", "b/0", unsent=0)
        book = world.agent("a/0").sender.asking.links[LINK]
        assert all(held.rate_bytes_per_s <= highest for held in book.grants)
        if all(held.begun for held in book.grants) and what in ("pace", "grant"):
            assert all(held.rate_bytes_per_s == last for held in book.grants)
            head = next(iter(book.grants), None)
            if head is not None:
                ceiling = world.agent("a/0").sender.peers[B0].pace_bytes_per_s
                assert abs(ceiling - last) <= last // 200
