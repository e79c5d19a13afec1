"""The TCP model: cold start, CUBIC's curve, recovery, tail loss, idleness, pacing, and what it reports."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from proxyd.sim.clock import Clock
from proxyd.sim.cubic import BETA, INITIAL_PACKETS, CubicWindow
from proxyd.sim.host import back_queue_ns
from proxyd.sim.link import CrossPort, Link, LinkModel
from proxyd.sim.path import Path
from proxyd.sim.tcp import Stream

MS = 1_000_000
NANOS = 1_000_000_000
MSS = 8948
CHUNK = 131_072


class Rig:
    """One stream of chunks over one link, 30 ms each way."""

    def __init__(
        self,
        nbytes: int,
        model: LinkModel | None = None,
        *,
        pace: int = 0,
        idle_resets: bool = False,
        ack_wait_ns: int = 0,
    ) -> None:
        self.clock = Clock()
        self.arrivals: list[int] = []
        self.link = Link(self.clock, model or LinkModel(50_000_000, 30 * MS, 1 << 30), random.Random(1))
        self.chunks: list[tuple[object, int, bool]] = []
        self.posted = 0
        self.stream = Stream(
            self.clock,
            self.link,
            30 * MS,
            back_wait_ns=lambda: ack_wait_ns,
            slow_start_after_idle=idle_resets,
            ask=lambda: self.chunks.pop(0) if self.chunks else None,
            arrived=self.arrivals.append,
        )
        self.stream.pace_bytes_per_s = pace
        self.post(nbytes)

    def post(self, nbytes: int) -> None:
        while nbytes > 0:
            self.chunks.append((self.posted, min(CHUNK, nbytes), True))
            self.posted += 1
            nbytes -= CHUNK
        self.stream.pump()

    def run(self, until_ms: float, each: Callable[[], None] | None = None) -> None:
        self.clock.run(int(until_ms * MS), each)


def test_a_cold_stream_takes_round_trips_to_open_its_window() -> None:
    rig = Rig(8 << 20)
    rig.run(59)
    assert rig.stream.granted_delivered_bytes == 0
    assert rig.stream.granted_left_bytes <= INITIAL_PACKETS * MSS
    sizes = []
    for round_trip in range(1, 5):
        rig.run(60 * round_trip + 59)
        sizes.append(rig.stream.window_bytes)
    assert sizes[:3] == pytest.approx([2**n * INITIAL_PACKETS * MSS for n in (1, 2, 3)], rel=0.1)
    rig.run(2_000)
    assert rig.arrivals == list(range(64))
    assert rig.stream.granted_delivered_bytes == rig.stream.granted_sacked_bytes == 8 << 20
    assert rig.stream.settled
    assert rig.stream.min_rtt_ns == pytest.approx(60 * MS, rel=0.01)


def test_slow_start_ends_when_a_queue_shows() -> None:
    rig = Rig(64 << 20)  # a buffer that never overflows
    rig.run(1_000)
    bdp = 50_000_000 * 60 // 1000
    assert rig.link.dropped == 0
    assert bdp < rig.stream.window_bytes < 3 * bdp


def test_losses_are_repaired_in_order_and_shrink_the_window() -> None:
    rig = Rig(8 << 20, LinkModel(50_000_000, 30 * MS, 100_000))
    windows = [0]

    def look() -> None:
        windows.append(rig.stream.window_bytes)

    rig.run(20_000, look)
    assert rig.link.dropped > 0
    assert rig.stream.retransmits >= rig.link.dropped
    assert rig.stream.retransmits <= 1.2 * rig.link.dropped + 5
    assert min(after / before for before, after in pairwise(windows[1:])) == pytest.approx(BETA, abs=0.01)
    assert rig.arrivals == list(range(64))  # whole, once, in order
    assert rig.stream.granted_delivered_bytes == rig.stream.granted_left_bytes == 8 << 20


def test_a_hole_stalls_in_order_counts_and_not_selective_ones() -> None:
    rig = Rig(8 << 20, LinkModel(50_000_000, 30 * MS, 1 << 20))
    behind = [0]

    def look() -> None:
        behind.append(rig.stream.granted_sacked_bytes - rig.stream.granted_delivered_bytes)

    rig.run(3_000, look)
    assert rig.link.dropped > 0
    assert max(behind) > 200_000
    assert behind[-1] == 0


def test_a_lost_tail_is_probed_for_and_not_waited_for_a_timeout() -> None:
    rig = Rig(CHUNK)
    rig.run(500)
    assert rig.stream.settled
    send, cut = rig.link.send, rig.clock.now_ns + 1

    def lossy(nbytes: int, arrive: Callable[..., object], *args: object) -> int:
        return 0 if rig.clock.now_ns < cut else send(nbytes, arrive, *args)

    rig.link.send = lossy  # type: ignore[method-assign]
    rig.post(MSS)
    begin_ns = rig.clock.now_ns
    while not rig.stream.settled:
        rig.run((rig.clock.now_ns + MS) / MS)
    assert 120 * MS < rig.clock.now_ns - begin_ns < 250 * MS  # a probe after 2 round trips, and its own
    assert rig.stream.retransmits == 1


def test_a_dead_path_times_out_ever_more_rarely_and_starts_over_small() -> None:
    rig = Rig(CHUNK)
    rig.run(500)
    alive = rig.link.send
    sends: list[int] = []

    def dead(nbytes: int, arrive: Callable[..., object], *args: object) -> int:
        sends.append(rig.clock.now_ns)
        return 0

    rig.link.send = dead  # type: ignore[method-assign]
    rig.post(4 * MSS)
    rig.run(10_000)
    gaps = [b - a for a, b in pairwise(sends) if b - a > 100 * MS]
    assert gaps[-1] > 2 * gaps[-3]
    assert rig.stream.window_bytes <= 2 * MSS
    rig.link.send = alive  # type: ignore[method-assign]
    rig.run(30_000)
    assert rig.stream.settled
    assert rig.stream.granted_delivered_bytes == CHUNK + 4 * MSS


def test_pacing_holds_the_rate() -> None:
    rig = Rig(16 << 20, pace=10_000_000)
    rig.run(500)
    begin = rig.stream.granted_left_bytes
    rig.run(1_000)
    assert rig.stream.granted_left_bytes - begin == pytest.approx(5_000_000, rel=0.01)
    assert rig.link.peak_queue_bytes == 0
    # Below capacity the delivery rate shows the pace.
    assert rig.stream.delivery_rate_bytes_per_s == pytest.approx(10_000_000, rel=0.03)


def test_a_window_grows_only_while_it_is_the_limit() -> None:
    rig = Rig(64 << 20, pace=10_000_000)
    rig.run(5_000)
    in_flight = 10_000_000 * 60 // 1000
    assert in_flight < rig.stream.window_bytes <= 2.3 * in_flight
    assert not rig.stream.path_limited


def test_an_agent_that_looks_reopens_a_window_that_slow_start_left_too_small() -> None:
    """Never reopened it would take cubic some ten seconds."""
    widths = []
    for looks in (True, False):
        rig = Rig(256 << 20, pace=50_000_000)
        rig.stream.window.threshold_bytes = 400_000
        for at_ms in range(0, 1_500, 5):
            rig.run(at_ms)
            if looks:
                rig.stream.look()
        widths.append(rig.stream.window_bytes)
    in_flight = 50_000_000 * 60 // 1000
    assert widths[0] > in_flight
    assert widths[1] < in_flight / 2


def test_after_a_loss_an_agent_leaves_the_window_alone() -> None:
    rig = Rig(256 << 20, LinkModel(50_000_000, 30 * MS, 1_500_000), pace=80_000_000)
    while not rig.stream.retransmits:
        rig.run(rig.clock.now_ns / MS + 5)
        rig.stream.look()
    window = rig.stream.window
    assert isinstance(window, CubicWindow)
    for _ in range(20):
        rig.run(rig.clock.now_ns / MS + 5)
        rig.stream.look()
        assert not window.in_slow_start


def test_the_other_directions_queue_is_that_of_the_stream_that_sends() -> None:
    """One that has sent nothing has seen none, and that says nothing: pushed together acknowledgements would pass for a
    rate above the link's."""
    busy, idle = Rig(8 << 20, ack_wait_ns=40 * MS), Rig(0)
    busy.run(200)
    assert back_queue_ns([idle.stream, busy.stream]) == pytest.approx(40 * MS, abs=2 * MS)


def test_the_path_limits_a_cold_stream_and_says_so() -> None:
    rig = Rig(8 << 20, pace=50_000_000)
    rig.run(100)
    assert rig.stream.path_limited
    rig = Rig(8 << 20, pace=1_000_000)
    rig.run(200)
    assert not rig.stream.path_limited


@pytest.mark.parametrize("resets", [False, True])
def test_idleness_shrinks_the_window_only_where_the_kernel_does(resets: bool) -> None:
    rig = Rig(8 << 20, idle_resets=resets)
    rig.run(1_000)
    warm = rig.stream.window_bytes
    assert warm > 4 * INITIAL_PACKETS * MSS
    rig.run(10_000)
    rig.post(MSS)
    assert rig.stream.window_bytes == (INITIAL_PACKETS * MSS if resets else warm)


def test_cubic_is_flat_around_the_old_maximum_and_steep_after_it() -> None:
    window = CubicWindow(MSS)
    window.bytes = 1000 * MSS
    window.reduced()
    assert window.bytes == pytest.approx(700 * MSS, rel=1e-6)
    k_s = (1000 * (1 - BETA) / 0.4) ** (1 / 3)
    now_ns, sizes = NANOS, {}
    while now_ns < NANOS * (2 + 2 * k_s):
        window.acknowledged(window.bytes // 6, now_ns, 0)  # 10 ms of a round trip of 60
        now_ns += 10 * MS
        sizes[round((now_ns - NANOS) / NANOS / k_s, 3)] = window.bytes / MSS
    at = {share: sizes[min(sizes, key=lambda s: abs(s - share))] for share in (0.5, 0.75, 1.0, 1.25, 2.0)}
    assert at[1.0] == pytest.approx(1000, rel=0.01)
    assert at[1.25] - at[0.75] < 0.2 * (at[0.75] - 700)
    assert at[2.0] == pytest.approx(1300, rel=0.03)


def test_two_streams_one_of_them_not_ours_share_a_link_and_fill_its_buffer() -> None:
    rig = Rig(200 << 20, LinkModel(12_500_000, 30 * MS, 750_000))
    other = Stream(
        rig.clock,
        CrossPort(rig.link),
        30 * MS,
        slow_start_after_idle=False,
        ask=lambda: ("x", CHUNK, False),
        arrived=lambda chunk: None,
    )
    other.pump()
    rig.run(5_000)
    before, ours = rig.link.counts(), rig.stream.granted_sacked_bytes
    rig.run(40_000)
    after = rig.link.counts()
    share = (rig.stream.granted_sacked_bytes - ours) / (35 * 12_500_000)
    assert after.utilisation_since(before) > 0.97
    assert 0.25 < share < 0.75
    assert rig.link.peak_queue_bytes > 700_000


def test_what_a_later_queue_drops_is_found_and_repaired_as_well() -> None:
    """A fast access line in front of a slow link: the second queue overflows."""
    rig = Rig(1)
    line = Link(rig.clock, LinkModel(100_000_000, 0, 1 << 30), random.Random(1))
    narrow = Link(rig.clock, LinkModel(12_500_000, 30 * MS, 200_000), random.Random(1))
    chunks: list[tuple[object, int, bool]] = [(number, CHUNK, True) for number in range(64)]
    arrivals: list[int] = []
    stream = Stream(
        rig.clock,
        Path(narrow.model, [line, narrow]),
        30 * MS,
        slow_start_after_idle=False,
        ask=lambda: chunks.pop(0) if chunks else None,
        arrived=arrivals.append,
    )
    stream.pump()
    rig.run(20_000)
    assert narrow.dropped > 0
    assert line.dropped == 0
    assert arrivals == list(range(64))
    assert stream.settled
    assert stream.granted_delivered_bytes == 8 << 20
    assert stream.in_flight_bytes == 0
    assert line.accepted_bytes == narrow.offered_bytes
