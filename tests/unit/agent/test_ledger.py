"""Positions in a TCP stream -> granted payload that left and was acknowledged."""

from __future__ import annotations

import random

from proxyd.agent.ledger import Settled, StreamLedger


def test_headers_and_unscheduled_chunks_do_not_count() -> None:
    ledger = StreamLedger()
    ledger.begin(48, 100, granted=True)
    ledger.begin(48, 500, granted=False)
    ledger.begin(48, 200, granted=True)
    ledger.wrote(48 + 100 + 48 + 500 + 48 + 200)
    assert ledger.settle(unacked_bytes=944, unsent_bytes=944) == Settled(0, 0)
    assert ledger.settle(unacked_bytes=944, unsent_bytes=944 - 48) == Settled(0, 0)
    assert ledger.settle(unacked_bytes=944, unsent_bytes=944 - 58) == Settled(10, 0)
    assert ledger.settle(unacked_bytes=200, unsent_bytes=50) == Settled(250, 100)
    assert not ledger.is_settled
    assert ledger.settle(0, 0) == Settled(300, 300)
    assert ledger.is_settled


def test_what_the_kernel_has_not_taken_is_pending() -> None:
    ledger = StreamLedger()
    ledger.begin(48, 1000, granted=True)
    ledger.wrote(300)
    assert ledger.pending_bytes == 748
    assert ledger.settle(300, 0) == Settled(252, 0)
    ledger.wrote(748)
    assert ledger.pending_bytes == 0


def test_counts_never_go_back() -> None:
    ledger = StreamLedger()
    ledger.begin(0, 1000, granted=True)
    ledger.wrote(1000)
    assert ledger.settle(400, 100) == Settled(900, 600)
    assert ledger.settle(500, 200) == Settled(900, 600)


def test_handshake_bytes_still_unacknowledged_do_not_count() -> None:
    ledger = StreamLedger()
    ledger.begin(48, 100, granted=True)
    ledger.wrote(148)
    assert ledger.settle(unacked_bytes=400, unsent_bytes=148) == Settled(0, 0)


def test_random_streams_conserve_bytes() -> None:
    rng = random.Random(1)
    for _ in range(50):
        ledger = StreamLedger()
        chunks = [(rng.randint(1, 300), rng.random() < 0.6) for _ in range(rng.randint(1, 20))]
        owner: list[bool] = []
        for size, granted in chunks:
            ledger.begin(48, size, granted=granted)
            owner += [False] * 48 + [granted] * size
        written = acked = sent = 0
        while acked < len(owner):
            step = rng.randint(0, len(owner) - written)
            written += step
            ledger.wrote(step)
            sent = rng.randint(sent, written)
            acked = rng.randint(acked, sent) if written < len(owner) else sent
            if written == len(owner):
                sent = acked = written
            settled = ledger.settle(written - acked, written - sent)
            assert settled == Settled(sum(owner[:sent]), sum(owner[:acked]))
        assert ledger.is_settled
