from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from proxyd.wan.bottleneck import Bottleneck
from proxyd.wan.trace import FixedRate, TraceLine

arrivals = st.lists(st.tuples(st.integers(0, 2_000_000), st.integers(40, 9000)), min_size=1, max_size=120)
"""(ns since the packet before, bytes)"""


def drain(bottleneck: Bottleneck[int]) -> list[tuple[int, int]]:
    out = []
    while (popped := bottleneck.pop_due(1 << 62)) is not None:
        out.append(popped)
    return out


@given(arrivals, st.integers(1_000, 10**9), st.integers(9_000, 200_000), st.integers(0, 10**8))
def test_matches_a_naive_queue(packets: list[tuple[int, int]], rate: int, buffer_bytes: int, delay_ns: int) -> None:
    """Against the textbook recursion in exact fractions; the virtual clock may differ by its rounding: 1 byte, 1 ns."""
    bottleneck: Bottleneck[int] = Bottleneck(FixedRate(rate, 0), buffer_bytes=buffer_bytes, delay_ns=delay_ns)
    now, busy = 0, Fraction(0)
    expected = []
    for number, (gap, length) in enumerate(packets):
        now += gap
        start = max(busy, Fraction(now))
        backlog = (start - now) * rate / 10**9
        accepted = bottleneck.offer(number, length, now)
        assert 0 <= bottleneck.queue_bytes(now) <= buffer_bytes
        if abs(backlog + length - buffer_bytes) > 2:
            assert accepted == (backlog + length <= buffer_bytes)
        if accepted:
            busy = start + Fraction(length * 10**9, rate)
            expected.append((number, busy + delay_ns))
    slack = 2 * 10**9 / rate + 2
    for (due, number), (wanted_number, wanted) in zip(drain(bottleneck), expected, strict=True):
        assert number == wanted_number
        assert abs(due - wanted) <= slack


@given(arrivals, st.integers(9_000, 100_000))
def test_order_conservation_and_capacity_on_a_trace(packets: list[tuple[int, int]], buffer_bytes: int) -> None:
    line = TraceLine([1, 2, 2, 2, 7, 11], 0)
    bottleneck: Bottleneck[int] = Bottleneck(line, buffer_bytes=buffer_bytes, delay_ns=0)
    now, accepted = 0, []
    for number, (gap, length) in enumerate(packets):
        now += gap
        if bottleneck.offer(number, length, now):
            accepted.append(number)
    out = drain(bottleneck)
    assert [number for _, number in out] == accepted
    assert [due for due, _ in out] == sorted(due for due, _ in out)
    carried = 0
    for due, number in out:
        carried += packets[number][1]
        assert carried <= line.bytes_by(due)


@given(arrivals, st.integers(10**5, 10**8), st.integers(10**5, 10**8), st.integers(0, 10**8))
def test_a_change_of_rate_keeps_order_and_queue(
    packets: list[tuple[int, int]], before: int, after: int, at_ns: int
) -> None:
    bottleneck: Bottleneck[int] = Bottleneck(FixedRate(before, 0), buffer_bytes=10**7, delay_ns=1_000)
    now = 0
    for number, (gap, length) in enumerate(packets):
        now += gap
        assert bottleneck.offer(number, length, now)
    change = now + at_ns
    queued = bottleneck.queue_bytes(change)
    in_flight = [due for due, _, _ in bottleneck.pending if due - 1_000 <= change]
    bottleneck.change_line(FixedRate(after, 0), change)
    assert bottleneck.queue_bytes(change) == queued
    out = drain(bottleneck)
    assert [number for _, number in out] == list(range(len(packets)))
    assert [due for due, _ in out][: len(in_flight)] == in_flight
    assert [due for due, _ in out] == sorted(due for due, _ in out)
    if queued:
        assert abs(out[-1][0] - 1_000 - change - queued * 10**9 / after) <= 10**9 / after + 1


def test_a_late_wake_up_loses_no_capacity() -> None:
    """Packets read late, in one go, leave back to back at the link's rate."""
    bottleneck: Bottleneck[str] = Bottleneck(FixedRate(1_000_000, 0), buffer_bytes=10_000, delay_ns=0)
    assert bottleneck.offer("a", 1_000, 0)
    for name in "bcd":
        assert bottleneck.offer(name, 1_000, 500_000)
    assert [due for due, _, _ in bottleneck.pending] == [1_000_000, 2_000_000, 3_000_000, 4_000_000]


def test_idle_time_is_not_saved_up() -> None:
    bottleneck: Bottleneck[str] = Bottleneck(FixedRate(1_000_000, 0), buffer_bytes=10_000, delay_ns=0)
    assert bottleneck.offer("a", 1_000, 10_000_000)
    assert bottleneck.next_due_ns() == 11_000_000
    assert bottleneck.pop_due(10_999_999) is None
    assert bottleneck.pop_due(11_000_000) == (11_000_000, "a")
    assert bottleneck.next_due_ns() is None


def test_drop_tail_counts_the_packet_on_the_wire() -> None:
    bottleneck: Bottleneck[int] = Bottleneck(FixedRate(1_000_000, 0), buffer_bytes=3_000, delay_ns=0)
    assert [bottleneck.offer(n, 1_000, 0) for n in range(5)] == [True, True, True, False, False]
    assert not bottleneck.offer(5, 1_000, 999_000)
    assert bottleneck.offer(6, 1_000, 1_000_000)
