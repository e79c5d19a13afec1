"""CUBIC's congestion window (RFC 9438), and what silence and losses do to it. In bytes; the curve counts packets."""

from __future__ import annotations

NANOS = 1_000_000_000
INITIAL_PACKETS = 10
BETA = 0.7
CUBIC_C = 0.4
RENO_ALPHA = 3 * (1 - BETA) / (1 + BETA)
UNLIMITED = 1 << 62


class CubicWindow:
    """A congestion window, in bytes; what is acknowledged and lost moves it."""

    __slots__ = ("_cubic_max", "_epoch_ns", "_k_s", "_mss", "_prior", "_reno", "bytes", "threshold_bytes")

    def __init__(self, mss_bytes: int) -> None:
        self._mss = mss_bytes
        self.bytes = INITIAL_PACKETS * mss_bytes
        self.threshold_bytes = UNLIMITED
        self._epoch_ns = 0
        """When the present curve began; 0: at the next acknowledgement."""
        self._cubic_max = 0.0
        """Where it levels off, in packets."""
        self._k_s = 0.0
        self._prior = 0.0
        self._reno = 0.0

    @property
    def in_slow_start(self) -> bool:
        """Below the threshold."""
        return self.bytes < self.threshold_bytes

    def acknowledged(self, nbytes: int, now_ns: int, rtt_ns: int) -> None:
        """Grow: the window was the limit when these bytes were acknowledged."""
        if self.bytes < self.threshold_bytes:
            grown = min(nbytes, self.threshold_bytes - self.bytes)
            self.bytes += grown
            nbytes -= grown
            if not nbytes:
                return
        mss = self._mss
        window = self.bytes / mss
        if not self._epoch_ns:
            self._epoch_ns = now_ns
            self._reno = window
            if self._cubic_max <= window:
                self._cubic_max, self._k_s = window, 0.0
            else:
                self._k_s = ((self._cubic_max - window) / CUBIC_C) ** (1 / 3)
        since_s = (now_ns - self._epoch_ns + rtt_ns) / NANOS
        target = self._cubic_max + CUBIC_C * (since_s - self._k_s) ** 3
        target = min(max(target, window), 1.5 * window)
        acked = nbytes / mss
        self._reno += (RENO_ALPHA if self._reno < self._prior else 1.0) * acked / window
        grown_to = max(window + acked * (target - window) / window, min(self._reno, window + acked))
        self.bytes = int(grown_to * mss)

    def reduced(self) -> None:
        """A loss, the first one of its round trip."""
        window = self.bytes / self._mss
        self._cubic_max = window * (1 + BETA) / 2 if window < self._cubic_max else window
        self._prior = window
        self._epoch_ns = 0
        self.bytes = self.threshold_bytes = max(2 * self._mss, int(self.bytes * BETA))

    def reopened(self) -> None:
        """Slow start goes on from the present window, and nothing is known of earlier losses (as in Linux, when a
        connection is lent to bbr and comes back: ``bbr_init``, ``cubictcp_init``)."""
        self.threshold_bytes = UNLIMITED
        self._epoch_ns, self._cubic_max, self._prior = 0, 0.0, 0.0

    def timed_out(self) -> None:
        """Start over from one packet."""
        self.reduced()
        self.bytes = self._mss

    def idle(self, for_ns: int) -> None:
        """Silence: the curve doesn't run on."""
        if self._epoch_ns:
            self._epoch_ns += for_ns

    def restart(self, timeouts: int) -> None:
        """Silence where the kernel distrusts its window after it (RFC 2861, as Linux does it)."""
        least = INITIAL_PACKETS * self._mss
        if timeouts > 0 and self.bytes > least:
            self.threshold_bytes = max(self.threshold_bytes, self.bytes * 3 // 4)
            self.bytes = max(least, self.bytes >> min(timeouts, 60))
            self._epoch_ns = 0
