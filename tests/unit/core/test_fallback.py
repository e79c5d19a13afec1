"""What agents may send by themselves never sums to more than 0.8 of the link."""

from __future__ import annotations

import random

from proxyd.core.fallback import FallbackRates


def test_a_newcomer_grows_only_when_the_others_have_shrunk() -> None:
    rates = FallbackRates(1000)
    rates.share([1])
    assert rates.of(1) == 800
    rates.share([1, 2])
    assert (rates.of(1), rates.of(2)) == (400, 0), "agent 1 may not know of its new rate yet"
    rates.share([1, 2])
    assert (rates.of(1), rates.of(2)) == (400, 400)
    rates.share([2])
    assert (rates.of(1), rates.of(2)) == (0, 800)


def test_what_is_reserved_is_not_shared() -> None:
    rates = FallbackRates(1000)
    rates.share([1, 2], reserved_bytes_per_s=400)
    assert rates.sum_bytes_per_s == 400
    rates.share([], reserved_bytes_per_s=400)
    assert rates.sum_bytes_per_s == 0


def test_old_and_new_rates_together_never_exceed_the_total() -> None:
    rng = random.Random(3)
    rates = FallbackRates(1_000_003)
    held: dict[int, int] = {}
    for _ in range(500):
        members = [session for session in range(8) if rng.random() < 0.6]
        rates.share(members)
        new = {session: rates.of(session) for session in members}
        # Until the beat has reached everybody each may still be at its old rate.
        worst = sum(max(held.get(session, 0), new[session]) for session in members)
        assert worst <= rates.total_bytes_per_s
        held = new
