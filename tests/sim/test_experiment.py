"""One link under load: the figures are what they say, the same for the same seed, and the inputs matter."""

from __future__ import annotations

import dataclasses

import pytest

from proxyd.core.errors import ConfigError
from proxyd.core.traces import constant, steps, synthetic
from proxyd.sim.experiment import WORKLOADS, LinkExperiment, LinkRun, percentile, run_link
from proxyd.sim.link import CrossTraffic, Policer
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000
NANOS = 1_000_000_000
RATE = 12_500_000
"""100 Mbit/s."""
KNOWN = LinkExperiment(
    trace=constant(RATE),
    rtt_ns=40 * MS,
    buffer_bytes=250_000,
    senders=4,
    duration_ns=6 * NANOS,
    message_bytes=1 << 20,
    hint_bytes_per_s=RATE,
    fixed=True,
    told=True,
    check=True,
)


def test_a_known_link_is_filled_without_a_queue() -> None:
    result = run_link(KNOWN)
    assert 0.9 < result.utilisation <= 1
    assert result.ours_share == pytest.approx(result.utilisation)
    assert result.queue_p99_bdp < 0.3
    assert result.loss < 0.001
    assert (result.estimate_error_p50, result.estimate_error_p95) == (0, 0)
    # Four senders and four messages each in a circle, at 0.95 of 12 MB/s.
    waiting = 4 * 4 * (1 << 20) / 11_500_000
    assert result.figures()["fct_seconds"]["mean"] == pytest.approx(waiting, rel=0.25)


def test_the_same_seed_gives_the_same_figures_and_another_one_does_not() -> None:
    moving = dataclasses.replace(KNOWN, trace=synthetic("moderate", RATE, 6 * NANOS, 1), duration_ns=3 * NANOS)
    first = run_link(moving)
    assert first.figures() == run_link(moving).figures()
    assert first.figures() != run_link(dataclasses.replace(moving, seed=2)).figures()


def test_a_rate_that_is_believed_and_halves_is_lost_packets_and_a_full_buffer() -> None:
    halves = dataclasses.replace(
        KNOWN, trace=steps(RATE, [(3 * NANOS, 0.5)]), nominal_bytes_per_s=RATE, step_ns=3 * NANOS
    )
    result = run_link(halves)
    assert result.loss > 0.003
    assert result.queue_p99_bdp > 0.3
    assert result.estimate_error_p95 == pytest.approx(1, abs=0.1)
    assert result.step["loss_of_5_rtts"] > 0.03  # type: ignore[operator]
    assert result.step["used_90_percent_after_rtts"] == pytest.approx(0, abs=3)
    assert "step" in result.figures()


def test_a_slow_link_is_found_from_a_start_ten_times_its_rate() -> None:
    slow = LinkExperiment(
        trace=constant(1_250_000),
        rtt_ns=60 * MS,
        buffer_bytes=75_000,
        senders=8,
        duration_ns=12 * NANOS,
        message_bytes=256 << 10,
        check=True,
    )
    result = run_link(slow)
    assert result.utilisation > 0.8
    assert result.loss < 0.005
    assert result.estimate_error_p95 < 0.5


def test_a_policer_is_found_although_losses_keep_the_windows_small() -> None:
    """Windows that are being mended explain a low rate, so an estimate of 2.4 times the policer's stood for 23 s."""
    policed = LinkExperiment(
        trace=constant(4 * RATE),
        rtt_ns=60 * MS,
        buffer_bytes=3_000_000,
        senders=8,
        duration_ns=9 * NANOS,
        message_bytes=8 << 20,
        mtu_bytes=9000,
        policer=Policer(RATE, 2_000_000),
        check=True,
    )
    result = run_link(policed)
    late = [sample.estimate_bytes_per_s for sample in result.series if sample.time_ns > 6 * NANOS]
    assert late
    assert max(late) < 1.2 * RATE
    assert min(late) > 0.85 * RATE
    assert result.ours_share > 0.24


def test_cross_traffic_and_a_policer_leave_less_for_us() -> None:
    shared = dataclasses.replace(
        KNOWN, cross=CrossTraffic(RATE // 4), hint_bytes_per_s=RATE * 3 // 4, duration_ns=4 * NANOS
    )
    run = LinkRun(shared)
    assert run.true_bytes_per_s(2 * NANOS) == pytest.approx(0.75 * RATE * 1448 / 1500, rel=0.001)
    result = run.result()
    assert result.utilisation == pytest.approx(result.ours_share + 0.25, abs=0.02)
    policed = dataclasses.replace(
        KNOWN, policer=Policer(RATE // 2, 100_000), hint_bytes_per_s=RATE // 2, duration_ns=4 * NANOS
    )
    result = run_link(policed)
    assert result.ours_share < 0.52
    assert result.loss == 0
    # From 0.8 to 1.9 % by seed: TCP below the grants backs off. Against none at all, half of the least is clear enough.
    assert run_link(dataclasses.replace(policed, hint_bytes_per_s=RATE)).loss > 0.004


def test_a_download_beside_us_takes_a_share_and_fills_the_buffer() -> None:
    result = run_link(dataclasses.replace(KNOWN, cross_tcp=1, hint_bytes_per_s=RATE // 2))
    assert result.utilisation > 0.9
    assert 0.2 < result.ours_share < 0.6
    assert result.queue_p99_bdp > 0.3


@pytest.mark.parametrize("workload", WORKLOADS)
def test_each_workload_moves_messages(workload: str) -> None:
    result = run_link(dataclasses.replace(KNOWN, workload=workload, duration_ns=3 * NANOS))
    assert result.messages > 5
    assert 0 < result.utilisation <= 1


@pytest.mark.parametrize("traffic", [TrafficClass.SYNC, TrafficClass.BULK])
def test_each_class_fills_a_known_link(traffic: TrafficClass) -> None:
    assert run_link(dataclasses.replace(KNOWN, traffic=traffic, duration_ns=4 * NANOS)).utilisation > 0.9


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(one) for one in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50, 99, 7)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"duration_ns": 400 * MS}, "too short"),
        ({"trace": constant(1000)}, "10 Mbit/s to 100 Gbit/s"),
        ({"workload": "nothing"}, "no workload 'nothing'"),
        ({"loss": 0.7}, "a loss of 0.7"),
        ({"senders": 0}, "0 senders"),
        ({"buffer_bytes": 100}, "a buffer of 100 bytes"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        dataclasses.replace(KNOWN, **changes)  # type: ignore[arg-type]
