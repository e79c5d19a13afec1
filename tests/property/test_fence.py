"""What an agent remembers of ended messages, in little, against a list of all of them."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from proxyd.core.ids import EndpointName
from proxyd.core.remembering import FORGET_NS, MAX_FENCES, Memory, Pair
from proxyd.wire import fence as fences
from proxyd.wire.fence import Fate, Fence

STEPS = st.lists(st.tuples(st.sampled_from(["offer", "well", "badly"]), st.integers(0, 20)), max_size=120)
T = 30_000_000_000


@given(STEPS, st.integers(1, 4))
def test_a_fence_says_what_a_list_of_all_ends_would_say_or_that_it_is_forgotten(
    steps: list[tuple[str, int]], most_failures: int
) -> None:
    """Sequences rise with gaps, ends come in any order. Never is a message that failed said to be delivered, nor one
    that was delivered to be new."""
    with patch.object(fences, "MAX_FAILURES", most_failures):
        fence = Fence()
        ends: dict[int, Fate] = {}
        under_way: list[int] = []
        highest = failures = 0
        for step, number in steps:
            if step == "offer":
                highest += 1 + number
                fence.offered(highest)
                under_way.append(highest)
            elif under_way:
                sequence = under_way.pop(number % len(under_way))
                ends[sequence] = Fate.DELIVERED if step == "well" else Fate.FAILED
                (fence.ended_well if step == "well" else fence.ended_badly)(sequence)
                failures += step == "badly"
        for sequence, end in ends.items():
            fate = fence.fate(sequence)
            assert fate is end or (fate is Fate.FORGOTTEN and failures > most_failures)
        assert fence.fate(highest + 1) is Fate.NEW
        assert fence.highest == highest


LIFE = st.integers(1, 4)
USES = st.lists(st.tuples(LIFE, LIFE, st.integers(0, FORGET_NS // 2)), max_size=60)


def pair(source: int, destination: int) -> Pair:
    return EndpointName("job", 0), source, EndpointName("job", 1), destination


@given(USES)
def test_what_was_used_within_the_time_is_known_and_the_rest_goes(uses: list[tuple[int, int, int]]) -> None:
    memory = Memory({}, [], T)
    used: dict[Pair, tuple[int, int]] = {}
    now_ns = 0
    for sequence, (source, destination, pause_ns) in enumerate(uses, 1):
        now_ns += pause_ns
        memory.fence(pair(source, destination)).offered(sequence)
        used[pair(source, destination)] = (now_ns, sequence)
        memory.tick(now_ns)
        for one, (used_ns, highest) in used.items():
            known = (memory._fences.get(one) or memory._earlier.get(one) or Fence()).highest
            assert known == highest if now_ns - used_ns < FORGET_NS else known in (0, highest)
    for _ in range(2):
        now_ns += FORGET_NS + 1
        memory.tick(now_ns)
    assert not memory._fences
    assert not memory._earlier


def test_a_week_of_restarts_takes_no_more_than_its_room() -> None:
    memory = Memory({}, [], T)
    for life in range(2 * MAX_FENCES):
        memory.fence(pair(life, 1)).offered(1)
    assert len(memory._fences) + len(memory._earlier) <= MAX_FENCES
    assert memory.fence(pair(2 * MAX_FENCES - 1, 1)).highest == 1
