"""What agents may send by themselves never sums to more than 0.8 of the link."""

from __future__ import annotations

import random

from proxyd.core.fallback import FallbackRates


def test_a_newcomer_grows_only_when_the_others_have_shrunk() -> None:
    rates = FallbackRates(1000)
    rates.share([1])
    assert rates.of(1) == 800
    rates.share([1, 2], beat=2)
    assert (rates.of(1), rates.of(2)) == (400, 0), "agent 1 may not know of its new rate yet"
    rates.share([1, 2], beat=3)
    assert (rates.of(1), rates.of(2)) == (400, 0), "it hasn't answered"
    assert rates.may_hold(1) == 800
    rates.heard(1, 2)
    assert rates.may_hold(1) == 400
    rates.share([1, 2], beat=4)
    assert (rates.of(1), rates.of(2)) == (400, 400)
    rates.share([2])
    assert (rates.of(1), rates.of(2)) == (0, 800)


def test_what_is_reserved_is_not_shared() -> None:
    rates = FallbackRates(1000)
    rates.share([1, 2], reserved_bytes_per_s=400)
    assert rates.sum_bytes_per_s == 400
    rates.share([], reserved_bytes_per_s=400)
    assert rates.sum_bytes_per_s == 0


def test_what_agents_hold_never_exceeds_the_total_however_late_beats_are() -> None:
    rng = random.Random(3)
    for _ in range(40):
        rates = FallbackRates(1_000_003)
        held: dict[int, int] = {1: 0}
        beats: dict[int, list[tuple[int, int]]] = {1: []}
        """What is on its way to each."""
        answers: list[tuple[int, int]] = []
        for number in range(1, 60):
            if rng.random() < 0.15:
                held[number + 1], beats[number + 1] = 0, []
            if rng.random() < 0.1 and len(held) > 1:
                gone = rng.choice(sorted(held))
                del held[gone], beats[gone]
            if rng.random() < 0.5:
                rates.share(held, beat=number)
            for session in held:
                if rates.of(session):
                    beats[session].append((number, rates.of(session)))
                if rng.random() < 0.4:
                    for beat, rate in beats[session]:
                        held[session] = rate
                        answers.append((session, beat))
                    beats[session].clear()
            for session, beat in answers if rng.random() < 0.5 else ():
                rates.heard(session, beat)
                answers = []
            assert sum(held.values()) <= rates.total_bytes_per_s
            assert all(held[session] <= rates.may_hold(session) for session in held)
            assert rates.problem() == ""


def test_the_rates_are_equal_once_all_have_answered() -> None:
    rates = FallbackRates(1000)
    for beat in range(1, 12):
        rates.share([1, 2, 3, 4][: 1 + beat // 2], beat=beat)
        for session in range(1, 5):
            rates.heard(session, beat)
    assert [rates.of(session) for session in range(1, 5)] == [200] * 4


def test_who_comes_back_holds_what_it_held() -> None:
    rates = FallbackRates(1000)
    rates.share([1], beat=1)
    rates.carried(2, rates.may_hold(1))  # the same agent in another session
    rates.share([2, 3], beat=2)
    assert (rates.of(2), rates.of(3)) == (400, 0)
    rates.heard(2, 2)
    rates.share([2, 3], beat=3)
    assert (rates.of(2), rates.of(3)) == (400, 400)


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
