from __future__ import annotations

from array import array

import pytest

from proxyd.wan import History, WanError

MS = 1_000_000


def history(rows: list[tuple[int, int, int, int, int, int, int]]) -> History:
    """Rows of (ms, peak, queue, carried, capacity, dropped, accepted)."""
    columns = [array("q", column) for column in zip(*rows, strict=True)]
    columns[0] = array("q", (ms * MS for ms in columns[0]))
    return History(*columns)


# 100 bytes/ms; full for 20 ms, idle for 50, then half used.
LINE = history(
    [
        (0, 0, 0, 0, 0, 0, 0),
        (10, 700, 500, 1000, 1000, 0, 15),
        (20, 900, 200, 2000, 2000, 3, 22),
        (70, 0, 0, 2000, 7000, 3, 22),
        (90, 50, 10, 3000, 9000, 3, 27),
    ]
)


def test_used_carried_and_dropped_between_any_two_instants() -> None:
    assert LINE.used(0, 20 * MS) == 1.0
    assert LINE.used(0, 90 * MS) == pytest.approx(1 / 3)
    assert LINE.carried(5 * MS, 15 * MS) == 1000
    assert LINE.used(20 * MS, 70 * MS) == 0.0
    assert LINE.drops(0, 90 * MS) == 3
    assert LINE.loss(0, 90 * MS) == 0.1
    assert LINE.loss(20 * MS, 90 * MS) == 0.0
    assert LINE.used(90 * MS, 95 * MS) == 0.0  # nothing was sampled there
    assert LINE.series(0, 25 * MS, 10 * MS) == [(10 * MS, 100_000, 100_000), (20 * MS, 100_000, 100_000)]


def test_queue_quantiles_count_time_not_samples() -> None:
    # Of 90 ms: 50 at 0, 20 at 10, 10 at 200, 10 at 500.
    assert LINE.queue_quantiles([0.5, 0.7, 0.8, 0.99], 0, 90 * MS) == [0, 10, 200, 500]
    assert LINE.queue_quantiles([0.5], 80 * MS, 81 * MS) == [0]


def test_when_the_queue_is_back_and_the_link_full() -> None:
    assert LINE.settled_ns(0, 90 * MS, 100, 10 * MS) == 20 * MS
    assert LINE.settled_ns(0, 10 * MS, 100, 10 * MS) is None
    assert LINE.settled_ns(25 * MS, 90 * MS, 100, 20 * MS) == 25 * MS
    assert LINE.settled_ns(0, 90 * MS, 100, 200 * MS) is None
    assert LINE.filled_ns(0, 90 * MS, 0.9, 10 * MS) == 0
    assert LINE.filled_ns(20 * MS, 90 * MS, 0.5, 20 * MS) == 70 * MS
    assert LINE.filled_ns(20 * MS, 90 * MS, 0.6, 20 * MS) is None


def test_nothing_measured_is_said() -> None:
    with pytest.raises(WanError, match="nothing was measured"):
        History().used(0, 1)
    assert History().queue_quantiles([0.5], 0, 1) == [0]
