"""BBR's window and pace (version 1: Cardwell et al., ACM Queue 2016; draft-cardwell-iccrg-bbr-congestion-control-00).

What matters under grants: losses don't close the window, the pace follows the highest delivered rate of ten round trips
and probes a quarter above it once in eight, and every ten seconds the window shrinks to four packets for 200 ms, unless
a round trip as short as the shortest was seen meanwhile. Not modelled: the policer's long-term rate, pacing by single
packets.
"""

from __future__ import annotations

from collections import deque

NANOS = 1_000_000_000
UNLIMITED = 1 << 62
INITIAL_PACKETS = 10
LEAST_PACKETS = 4
STARTUP_GAIN = 2.885
WINDOW_GAIN = 2.0
CYCLE = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
RATE_ROUNDS = 10
FULL_GROWTH = 1.25
FULL_ROUNDS = 3
MIN_RTT_WINDOW_NS = 10 * NANOS
PROBE_RTT_NS = 200_000_000
PACE_MARGIN = 0.99


class BbrWindow:
    """Window and pace of one stream."""

    hystart = False

    def __init__(self, mss_bytes: int) -> None:
        self._mss = mss_bytes
        self.bytes = INITIAL_PACKETS * mss_bytes
        self.threshold_bytes = UNLIMITED
        """Above the window while it starts up, below it afterwards."""
        self.pace_bytes_per_s = 0
        """0: not known yet."""
        self._rates: deque[tuple[int, float]] = deque()
        """(round, rate): a falling staircase, the highest first."""
        self._round = 0
        self._full_rate = 0.0
        self._full_rounds = 0
        self._gain = STARTUP_GAIN
        self._draining = False
        self._phase = 0
        self._phase_ns = 0
        self._least_rtt_ns = 0
        self._least_since_ns = 0
        self._probe_until_ns = 0

    @property
    def _rate(self) -> float:
        return self._rates[0][1] if self._rates else 0.0

    def sampled(
        self, rate: float, app_limited: bool, round_ended: bool, rtt_ns: int, in_flight_bytes: int, now_ns: int
    ) -> None:
        """An acknowledgement's delivery rate (bytes/s) and round trip; the state machine's only input."""
        if round_ended:
            self._round += 1
        self._see_rtt(rtt_ns, now_ns)
        if rate >= self._rate or not app_limited:
            while self._rates and self._rates[-1][1] <= rate:
                self._rates.pop()
            self._rates.append((self._round, rate))
        while self._rates[0][0] < self._round - RATE_ROUNDS:
            self._rates.popleft()
        if self.threshold_bytes == UNLIMITED:
            self._start_up(round_ended and not app_limited)
        pipe = self._rate * self._least_rtt_ns / NANOS
        if self._draining and in_flight_bytes <= pipe:
            self._draining = False
            self._phase, self._phase_ns = 2, now_ns
        elif (
            not self._draining
            and self.threshold_bytes == 0
            and now_ns - self._phase_ns > self._least_rtt_ns
            and (CYCLE[self._phase] != CYCLE[1] or in_flight_bytes <= pipe)
        ):
            self._phase, self._phase_ns = (self._phase + 1) % len(CYCLE), now_ns
        if self.threshold_bytes == 0:
            self._gain = 1 / STARTUP_GAIN if self._draining else CYCLE[self._phase]
        self.pace_bytes_per_s = max(1, int(self._gain * self._rate * PACE_MARGIN))
        least = LEAST_PACKETS * self._mss
        if now_ns < self._probe_until_ns:
            self.bytes = least
            return
        target = int((WINDOW_GAIN if self.threshold_bytes == 0 else STARTUP_GAIN) * pipe) + 3 * self._mss
        self.bytes = max(self.bytes if self.threshold_bytes else least, target)

    def _see_rtt(self, rtt_ns: int, now_ns: int) -> None:
        if not self._least_rtt_ns or rtt_ns <= self._least_rtt_ns:
            self._least_rtt_ns, self._least_since_ns = rtt_ns, now_ns
        elif now_ns - self._least_since_ns > MIN_RTT_WINDOW_NS and self.threshold_bytes == 0:
            self._least_rtt_ns, self._least_since_ns = rtt_ns, now_ns
            self._probe_until_ns = now_ns + PROBE_RTT_NS

    def _start_up(self, full_round: bool) -> None:
        if not full_round:
            return
        if self._rate >= FULL_GROWTH * self._full_rate:
            self._full_rate, self._full_rounds = self._rate, 0
            return
        self._full_rounds += 1
        if self._full_rounds >= FULL_ROUNDS:
            self.threshold_bytes = 0
            self._draining = True

    def acknowledged(self, nbytes: int, now_ns: int, rtt_ns: int) -> None:
        """Start-up grows by what is acknowledged; afterwards samples alone set the window."""
        if self.threshold_bytes == UNLIMITED and now_ns >= self._probe_until_ns:
            self.bytes += nbytes

    def reduced(self) -> None:
        """A loss says nothing to BBR."""

    def timed_out(self) -> None:
        """Start over from one packet; the next samples open the window again."""
        self.bytes = self._mss

    def idle(self, for_ns: int) -> None:
        """Silence: the estimates stay."""

    def restart(self, timeouts: int) -> None:
        """Nor does the kernel touch its window afterwards."""
