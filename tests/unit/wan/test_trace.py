from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.wan.errors import WanError
from proxyd.wan.trace import (
    OPPORTUNITY_BYTES,
    FixedRate,
    Line,
    RateSteps,
    TraceLine,
    opportunities,
    read_trace,
    write_trace,
)

pieces = st.lists(
    st.tuples(st.integers(1, 10**9), st.sampled_from([0, 1, 10**3, 10**6, 10**9])), min_size=1, max_size=9
)


def carries_something(line: tuple[list[tuple[int, int]], bool]) -> bool:
    parts, repeat = line
    return any(ns * rate >= 10**9 for ns, rate in parts) if repeat else parts[-1][1] > 0


lines: st.SearchStrategy[Line] = st.one_of(
    st.builds(FixedRate, st.integers(1, 10**10), st.integers(0, 10**15)),
    st.lists(st.integers(0, 300), min_size=1, max_size=40)
    .map(sorted)
    .filter(lambda times: times[-1] > 0)
    .flatmap(lambda times: st.builds(TraceLine, st.just(times), st.integers(0, 10**15), st.integers(1, 9000))),
    st.tuples(pieces, st.booleans())
    .filter(carries_something)
    .flatmap(lambda line: st.integers(0, 10**15).map(RateSteps(tuple(line[0]), line[1]).line)),
)


@given(lines, st.integers(1, 10**9))
def test_time_for_is_the_first_instant_by_which_the_bytes_are_carried(line: Line, position: int) -> None:
    when = line.time_for(position)
    assert line.bytes_by(when) >= position
    assert line.bytes_by(when - 1) < position


@given(lines, st.integers(0, 10**9), st.integers(0, 10**9))
def test_bytes_never_decrease(line: Line, first: int, more: int) -> None:
    start = line.time_for(0)
    assert line.bytes_by(start + first) <= line.bytes_by(start + first + more)


@given(lines, st.integers(0, 10**12), st.integers(0, 10**9))
def test_restarted_is_the_same_line_elsewhere(line: Line, origin: int, since: int) -> None:
    assert line.restarted(origin).bytes_by(origin + since) == line.restarted(0).bytes_by(since)


def test_a_fixed_rate_does_not_drift_in_a_day() -> None:
    line = FixedRate(333_333_333, 0)
    assert line.bytes_by(86_400 * 10**9) == 333_333_333 * 86_400
    assert line.time_for(333_333_333 * 86_400) == 86_400 * 10**9


def test_a_trace_repeats_with_the_period_of_its_last_entry() -> None:
    line = TraceLine([1, 1, 4], 0)
    assert [line.bytes_by(ms * 10**6) // OPPORTUNITY_BYTES for ms in (0, 1, 3, 4, 5, 8)] == [0, 2, 2, 3, 5, 6]


def test_a_trace_file_is_read_back_with_its_mean_rate(tmp_path: Path) -> None:
    path = tmp_path / "link.trace"
    write_trace(path, [50e6, 25e6], step_ms=100)
    times = read_trace(path)
    assert times == opportunities([50e6, 25e6], 100)
    assert times[-1] == 200
    assert len(times) * OPPORTUNITY_BYTES == pytest.approx(7.5e6, rel=0.001)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1\ntwo\n", ":2: 'two' is not a whole number"),
        ("", "at least one"),
        ("0\n", "at least one"),
        ("5\n3\n", "sort"),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.trace"
    path.write_text(text)
    with pytest.raises(WanError, match=said):
        TraceLine(read_trace(path), 0)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(WanError, match=r"nowhere\.trace"):
        read_trace(tmp_path / "nowhere.trace")


def test_rate_steps_carry_their_rates_and_repeat_or_hold() -> None:
    steps = ((10**9, 1000), (10**9, 0), (2 * 10**9, 500))
    repeating, holding = RateSteps(steps).line(0), RateSteps(steps, repeat=False).line(0)
    seconds = (0, 1, 2, 3, 4, 5, 7)
    assert [repeating.bytes_by(second * 10**9) for second in seconds] == [0, 1000, 1000, 1500, 2000, 3000, 3500]
    assert [holding.bytes_by(second * 10**9) for second in seconds] == [0, 1000, 1000, 1500, 2000, 2500, 3500]
    # The byte after the outage leaves 2 ms into the next piece.
    assert repeating.time_for(1001) == 2 * 10**9 + 2 * 10**6


@pytest.mark.parametrize("repeat", [True, False])
def test_a_rate_trace_goes_there_and_back(repeat: bool) -> None:
    steps = RateSteps(((10**9, 1000), (5, 0), (10**9, 500)), repeat)
    assert RateSteps.of(steps.line(77)) == steps


@pytest.mark.parametrize("steps", [((), True), (((0, 5),), True), (((10**9, 0),), True), (((5, 10**9), (5, 0)), False)])
def test_rate_steps_that_no_link_can_follow_are_refused(steps: tuple[tuple[tuple[int, int], ...], bool]) -> None:
    with pytest.raises(WanError, match="rate"):
        RateSteps(*steps)
