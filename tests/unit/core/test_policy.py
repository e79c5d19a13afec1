"""What an operator may say, and what is refused."""

from __future__ import annotations

import pytest

from proxyd.core.errors import ConfigError
from proxyd.core.ids import LinkName
from proxyd.core.policy import (
    DAY_MINUTES,
    WEEK_MINUTES,
    CapWindow,
    JobPolicy,
    LinkPolicy,
    Policy,
    Sharing,
    floors_problem,
    overlap_of,
    parse_window,
)
from proxyd.wire.envelope import TrafficClass

AB = LinkName("a", "b")
MBIT = 125_000


@pytest.mark.parametrize(
    ("text", "days", "start", "end", "rate"),
    [
        ("weekdays 09:00-18:00 100Mbit", (0, 1, 2, 3, 4), 540, 1080, 100 * MBIT),
        ("sat,sun 00:00-24:00 2Gbit", (5, 6), 0, 1440, 2000 * MBIT),
        ("mon-wed,fri 7:30-08:00 8 Mbit", (0, 1, 2, 4), 450, 480, 8 * MBIT),
        ("sat-mon 00:00-01:00 1MB", (0, 5, 6), 0, 60, 1_000_000),
        ("Daily 23:59-24:00 1Mbit", (0, 1, 2, 3, 4, 5, 6), 1439, 1440, MBIT),
    ],
)
def test_windows_as_people_write_them(text: str, days: tuple[int, ...], start: int, end: int, rate: int) -> None:
    assert parse_window(text) == CapWindow(days, start, end, rate)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("weekdays 18:00-09:00 1Mbit", "ends before it starts. Over midnight write two"),
        ("weekdays 09:00-09:00 1Mbit", "ends before it starts"),
        ("moonday 09:00-10:00 1Mbit", "'moonday' is not a day"),
        ("mon-moon 09:00-10:00 1Mbit", "'moon' is not a day"),
        ("mon 09:60-10:00 1Mbit", "'09:60'"),
        ("mon 09:00-24:01 1Mbit", "'24:01'"),
        ("mon 09:00 1Mbit", "are not two times"),
        ("mon 09:00-10:00 100", "no unit"),
        ("mon", "is not a window"),
        ("", "is not a window"),
    ],
)
def test_windows_that_are_none(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        parse_window(text)


def test_a_window_takes_the_place_of_the_cap_while_it_holds() -> None:
    windows = (parse_window("weekdays 09:00-18:00 100Mbit"), parse_window("sat 00:00-24:00 2Gbit"))
    link = LinkPolicy(1000 * MBIT, windows)
    monday_nine = 9 * 60
    assert link.limit_bytes_per_s(monday_nine - 1) == 1000 * MBIT
    assert link.limit_bytes_per_s(monday_nine) == 100 * MBIT
    assert link.limit_bytes_per_s(18 * 60 - 1) == 100 * MBIT
    assert link.limit_bytes_per_s(18 * 60) == 1000 * MBIT
    assert link.limit_bytes_per_s(5 * DAY_MINUTES + 700) == 2000 * MBIT
    assert link.limit_bytes_per_s(6 * DAY_MINUTES + 700) == 1000 * MBIT
    assert LinkPolicy(0, windows).limit_bytes_per_s(0) == 0


def test_the_strictest_rate_holds_until_the_time_is_known() -> None:
    windows = (parse_window("mon 09:00-18:00 100Mbit"), parse_window("sat 00:00-24:00 2Gbit"))
    assert LinkPolicy(0, windows).limit_bytes_per_s(None) == 100 * MBIT
    assert LinkPolicy(50 * MBIT, windows).limit_bytes_per_s(None) == 50 * MBIT
    assert LinkPolicy(7).limit_bytes_per_s(None) == 7
    assert LinkPolicy().limit_bytes_per_s(None) == 0


def test_overlapping_windows_are_refused_and_both_are_named() -> None:
    first, second = parse_window("weekdays 09:00-18:00 100Mbit"), parse_window("fri,sat 17:59-20:00 1Gbit")
    apart = parse_window("weekdays 18:00-20:00 1Gbit")
    assert overlap_of([first, apart]) is None
    assert overlap_of([apart, first, second]) == (0, 2)
    with pytest.raises(ConfigError, match=r"mon,tue,wed,thu,fri 09:00-18:00 .* and fri,sat 17:59-20:00 .* overlap"):
        LinkPolicy(0, (first, second))


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e9])
def test_weights_that_are_none(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight"):
        JobPolicy(weight)


def test_a_floor_above_the_cap_is_refused() -> None:
    JobPolicy(1, 10, 10)
    JobPolicy(1, 10, 0)
    with pytest.raises(ConfigError, match="is below floor"):
        JobPolicy(1, 11 * MBIT, 10 * MBIT)


@pytest.mark.parametrize("share", [-0.01, 0.21, float("nan")])
def test_a_fifo_share_beyond_reason_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="fifo_share"):
        LinkPolicy(fifo_share=share)


def test_floors_must_fit_into_capacity_and_strictest_cap() -> None:
    jobs = {"x": JobPolicy(1, 60 * MBIT), "y": JobPolicy(1, 50 * MBIT)}
    calendar = (parse_window("mon 00:00-01:00 100Mbit"),)
    policy = Policy(jobs, {AB: LinkPolicy(0, calendar)})
    assert floors_problem(Policy(jobs), AB, 110 * MBIT) == ""
    assert "110 Mbit/s, which is above the capacity of link a->b, 109 Mbit/s" in floors_problem(
        Policy(jobs), AB, 109 * MBIT
    )
    assert "above the strictest cap" in floors_problem(policy, AB, 0)
    assert floors_problem(Policy(), AB, 1) == ""


def test_defaults_and_boundaries() -> None:
    policy = Policy()
    assert policy.job("any") == JobPolicy()
    assert policy.link(AB).fifo_share == 0.05
    assert [policy.sharing_of(traffic) for traffic in TrafficClass] == [Sharing.ONE, Sharing.EQUAL, Sharing.ONE]
    assert policy.minutes_to_boundary(5) == WEEK_MINUTES
    policy = Policy(links={AB: LinkPolicy(0, (parse_window("mon,sun 22:00-24:00 1Mbit"),))})
    assert policy.has_calendar
    assert policy.minutes_to_boundary(0) == 22 * 60
    assert policy.minutes_to_boundary(22 * 60) == 120
    assert policy.minutes_to_boundary(WEEK_MINUTES - 1) == 1, "Sunday's window ends with the week"
