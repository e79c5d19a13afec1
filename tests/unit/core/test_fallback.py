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


def test_a_total_that_falls_falls_with_the_rates() -> None:
    rates = FallbackRates(1000)
    rates.share([1, 2])
    rates.rebase(500)
    assert (rates.total_bytes_per_s, rates.sum_bytes_per_s) == (800, 800), "nobody has heard of it yet"
    rates.share([1, 2])
    assert (rates.total_bytes_per_s, rates.of(1), rates.of(2)) == (400, 200, 200)
    rates.rebase(250)
    rates.rebase(500)
    rates.share([1, 2])
    assert (rates.total_bytes_per_s, rates.sum_bytes_per_s) == (400, 400), "it has moved back before anybody heard"


def test_a_total_that_falls_and_holds_all_that_was_handed_out_falls_at_once() -> None:
    rates = FallbackRates(1000)
    rates.carried(1, 300)
    rates.rebase(500)
    assert rates.total_bytes_per_s == 400
    rates.carried(2, 300)
    assert rates.of(2) == 100
    rates.rebase(2000)
    assert rates.total_bytes_per_s == 1600


def test_what_is_handed_out_never_exceeds_what_it_was_handed_out_under() -> None:
    rng = random.Random(4)
    for _ in range(50):
        rates = FallbackRates(1_000_003)
        for _ in range(60):
            members = [session for session in range(8) if rng.random() < 0.6]
            what = rng.random()
            if what < 0.3:
                rates.rebase(rng.randrange(1, 2_000_000))
            elif what < 0.6:
                rates.carried(rng.randrange(8), rng.randrange(1_000_000))
            else:
                away = [session for session in members if rng.random() < 0.2]
                rates.share(members, rng.choice((0, 100_000)), keep=away)
            assert rates.problem() == ""
