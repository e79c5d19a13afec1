"""The models beside what was measured on real sockets: 400 Mbit/s, 60 ms, 8 senders of 8 MiB (seconds).

Measured over the emulated WAN: one sender at a time paced just below the link, warm connections, mean 0.816 and p99
1.43; plain CUBIC with one BDP of buffer, mean 1.29 and p99 1.97. The daemons themselves are compared in tests/wan.
"""

from __future__ import annotations

import dataclasses

import pytest

from proxyd.sim.burst import BurstSpec, burst_fct, plain_fct

ONE_BDP = dataclasses.replace(BurstSpec(), buffer_bytes=3_000_000)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_known_link_and_warm_connections_are_the_oracle(seed: int) -> None:
    fct = burst_fct(fixed=True, seed=seed)
    assert fct.mean(2) == pytest.approx(0.816, rel=0.05)
    assert fct.p99(2) == pytest.approx(1.43, rel=0.05)
    assert fct.retransmits == 0
    assert [len(burst) for burst in fct.bursts] == [8] * 6
    assert min(max(burst) for burst in fct.bursts) >= BurstSpec().ideal_cct_s


def test_a_cold_start_costs_and_then_no_more() -> None:
    fct = burst_fct(fixed=True)
    cold, warm = max(fct.cold), max(fct.bursts[3])
    assert cold > warm * 1.03
    assert cold < warm * 2
    assert fct.p99() == pytest.approx(cold, rel=0.01)


def test_plain_cubic_on_a_deep_buffer_is_as_it_was_measured() -> None:
    runs = [plain_fct(ONE_BDP, seed=seed) for seed in (1, 2, 3)]
    assert sum(run.mean(2) for run in runs) / 3 == pytest.approx(1.29, rel=0.1)
    assert sum(run.p99(2) for run in runs) / 3 == pytest.approx(1.97, rel=0.15)


def test_plain_cubic_on_a_shallow_buffer_is_what_the_grants_are_for() -> None:
    plain, granted = plain_fct(), burst_fct(fixed=True)
    assert plain.mean(2) > 2 * granted.mean(2)
    assert plain.retransmits > 1000
    assert plain_fct(slow_start_after_idle=True).mean(2) > plain_fct(ONE_BDP).mean(2)


def test_the_same_seed_gives_the_same_times() -> None:
    assert plain_fct(seed=3) == plain_fct(seed=3) != plain_fct(seed=4)
    quick = dataclasses.replace(BurstSpec(), bursts=2, message_bytes=1 << 20)
    assert burst_fct(quick, seed=3) == burst_fct(quick, seed=3) != burst_fct(quick, seed=4)
