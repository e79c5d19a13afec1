"""What is known of a link: configured rates, measured delay, and nothing absurd."""

from __future__ import annotations

import random

import pytest

from proxyd.core.bandwidth import LinkEstimator, LinkSettings, default_settings
from proxyd.core.errors import ConfigError
from proxyd.core.ids import LinkName
from proxyd.core.messages import Report
from proxyd.core.rtt import MIN_RTT_WINDOW_NS, RttTracker
from proxyd.core.tally import Flow
from proxyd.core.windowed import WindowedMin

MS = 1_000_000
LINK = LinkName("a", "b")


def test_windowed_minimum_against_a_naive_twin() -> None:
    rng = random.Random(1)
    least, samples, now = WindowedMin(50), list[tuple[int, int]](), 0
    for _ in range(2000):
        now += rng.randrange(10)
        value = rng.randrange(100)
        least.add(value, now)
        samples.append((now, value))
        probe = now + rng.randrange(3) * 30
        young = [v for t, v in samples if t >= probe - 50]
        assert least.get(probe) == (min(young) if young else None)
        now = probe


def test_round_trips_are_pooled_and_forgotten() -> None:
    rtt = RttTracker()
    assert (rtt.min_rtt_ns(0), rtt.queue_ns(0)) == (0, 0)
    rtt.add(70 * MS, 60 * MS, 0)
    rtt.add(62 * MS, 61 * MS, MS)
    assert rtt.min_rtt_ns(MS) == 60 * MS
    assert rtt.queue_ns(MS) == 9 * MS
    rtt.add(90 * MS, 80 * MS, MIN_RTT_WINDOW_NS + 2 * MS)
    assert rtt.min_rtt_ns(MIN_RTT_WINDOW_NS + 2 * MS) == 80 * MS, "a new route is believed after a while"


def test_absurd_round_trips_are_ignored() -> None:
    rtt = RttTracker()
    for value in (0, -5, 2**62):
        rtt.add(value, value, 0)
    assert (rtt.min_rtt_ns(0), rtt.queue_ns(0), rtt.smoothed_ns) == (0, 0, 0)


def report(srtt_ns: int, min_rtt_ns: int) -> Report:
    return Report(LINK, 0, 0, 0, 0, 0, 0, 0, srtt_ns, min_rtt_ns, 0, 0, True)


@pytest.mark.parametrize(("measured_ms", "believed_ms"), [(10, 60), (63, 63), (300, 90)])
def test_distance_is_measured_within_reason(measured_ms: int, believed_ms: int) -> None:
    estimator = LinkEstimator(LinkSettings(LINK, 50_000_000, 60 * MS))
    estimator.on_report(report(measured_ms * MS, measured_ms * MS), Flow(), 0)
    assert estimator.min_rtt_ns(0) == believed_ms * MS


def test_an_estimate_says_where_it_comes_from() -> None:
    configured = LinkEstimator(LinkSettings(LINK, 50_000_000, 60 * MS, 300_000)).estimate(0)
    assert (configured.source, configured.confidence, configured.min_rtt_ns) == ("configured", 1.0, 60 * MS)
    guessed = LinkEstimator(default_settings(LINK)).estimate(0)
    assert (guessed.source, guessed.confidence) == ("default", 0.0)
    assert guessed.bottleneck_bytes_per_s == 12_500_000 * 1448 // 1500
    assert guessed.buffer_bytes == 0  # nobody knows


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity_bytes_per_s": 0},
        {"rtt_ns": -1},
        {"buffer_bytes": -1},
        {"pace_share": 0.0},
        {"pace_share": 1.01},
        {"mtu_bytes": 60},
    ],
)
def test_a_link_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    figures: dict[str, float] = {"capacity_bytes_per_s": 50_000_000, "rtt_ns": 60 * MS} | wrong
    with pytest.raises(ConfigError, match="a->b"):
        LinkSettings(LINK, **figures)  # type: ignore[arg-type]


@pytest.mark.parametrize("rtt_us", [20, 200, 1_000, 4_000, 9_000, 60_000])
@pytest.mark.parametrize("every_ms", [1, 5, 40])
def test_any_distance_and_any_rhythm_of_reports_gives_an_estimate(rtt_us: int, every_ms: int) -> None:
    estimator = LinkEstimator(default_settings(LINK))
    for step in range(1, 400):
        now_ns = step * every_ms * MS
        flow = Flow(250_000, 250_000, 0, now_ns - every_ms * MS, in_flight_bytes=100_000, demand=step % 50 > 5)
        estimator.on_report(report(rtt_us * 1_100, rtt_us * 1_000), flow, now_ns)
    estimate = estimator.estimate(now_ns)
    assert 100_000 < estimate.bottleneck_bytes_per_s < 10**12
    assert estimator.pace_bytes_per_s > 0
