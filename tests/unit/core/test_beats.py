"""Sites take turns: each at least once in a beat's time, and never all at once for long."""

from __future__ import annotations

import itertools
import random

import pytest

from proxyd.core.beats import BeatTurns

BEAT_NS = 150_000_000


def run(turns: BeatTurns, from_ns: int, until_ns: int) -> list[tuple[int, str]]:
    """(time, site) of each turn, taken when it is due."""
    taken = []
    now_ns = from_ns
    while now_ns < until_ns:
        taken += [(now_ns, site) for site in turns.take(now_ns)]
        due_ns = turns.next_ns
        assert due_ns is not None
        assert due_ns > now_ns
        now_ns = due_ns
    return taken


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_every_site_has_a_turn_within_each_beat(count: int) -> None:
    turns = BeatTurns(BEAT_NS)
    sites = [f"site{number}" for number in range(count)]
    for site in random.Random(1).sample(sites, count):
        turns.join(site)
    turns.start(1_000)
    taken = run(turns, 1_000, 1_000 + 10 * BEAT_NS)
    for site in sites:
        times = [at_ns for at_ns, one in taken if one == site]
        assert times[0] == 1_000, "whoever begins to listen hears at once"
        assert all(later - earlier <= BEAT_NS for earlier, later in itertools.pairwise(times))
    later = [at_ns for at_ns, _ in taken if at_ns > 1_000]
    assert len(later) == len(set(later)), "after that no two at the same moment"


def test_nobody_has_a_turn_while_nobody_listens() -> None:
    turns = BeatTurns(BEAT_NS)
    turns.join("a")
    assert (turns.next_ns, turns.take(5)) == (None, [])
    turns.start(10)
    assert turns.take(10) == ["a"]
    turns.stop()
    assert (turns.next_ns, turns.take(10**12)) == (None, [])


def test_news_and_newcomers_do_not_wait_for_their_turn() -> None:
    turns = BeatTurns(BEAT_NS)
    for site in "abc":
        turns.join(site)
    turns.start(0)
    turns.take(0)
    turns.hurry("b")
    assert (turns.next_ns, turns.take(1)) == (0, ["b"])
    turns.join("aa")
    turns.join("aa")
    assert turns.take(2) == ["aa"]
    taken = run(turns, 3, 3 + 4 * BEAT_NS)
    assert {site: sum(one == site for _, one in taken) >= 4 for site in ("a", "aa", "b", "c")} == dict.fromkeys(
        ("a", "aa", "b", "c"), True
    )


def test_a_late_turn_is_not_made_up_for() -> None:
    turns = BeatTurns(BEAT_NS)
    turns.join("a")
    turns.start(0)
    turns.take(0)
    assert turns.take(10 * BEAT_NS + 1) == ["a"]
    assert turns.next_ns == 11 * BEAT_NS
