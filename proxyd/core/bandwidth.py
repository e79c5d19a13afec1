"""What is known of a link's bottleneck, how old it is and how sure.

For now the rate is the configured one; only delay is measured. The estimator that learns the rate from live transfers
will stand behind the same interface: :meth:`LinkEstimator.on_report` takes what agents saw,
:meth:`LinkEstimator.estimate` answers, and never with 0, infinity or NaN.

Rates here are **payload** bytes per second: what is left of the wire's rate after IP and TCP headers. A kernel's
``SO_MAX_PACING_RATE`` counts payload, and so do grants; pacing payload at the wire's rate would overfill the link by
the share of the headers.
"""

from __future__ import annotations

import dataclasses

from proxyd.core.errors import ConfigError
from proxyd.core.ids import LinkName
from proxyd.core.messages import Report
from proxyd.core.rtt import RttTracker

NANOS = 1_000_000_000
HEADERS_BYTES = 52
"""IPv4 (20), TCP (20) and its timestamps (12) in each packet."""
DEFAULT_CAPACITY_BYTES_PER_S = 100_000_000 // 8
DEFAULT_RTT_NS = 50_000_000
DEFAULT_BUFFER_SHARE_OF_BDP = 0.1
"""The safe start for a link of which nothing is configured: 100 Mbit/s, 50 ms, a shallow buffer."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSettings:
    """One link as configured. Raises ConfigError for values that no link can have."""

    link: LinkName
    capacity_bytes_per_s: int
    """On the wire, headers included."""
    rtt_ns: int
    buffer_bytes: int = 0
    """The gateway's drop-tail buffer; 0: not known, so nothing counts on it."""
    pace_share: float = 0.98
    """Part of the capacity that is granted; the rest drains what hand-overs queue up."""
    mtu_bytes: int = 1500
    source: str = "configured"

    def __post_init__(self) -> None:
        if self.capacity_bytes_per_s < 1000 or self.rtt_ns < 0 or self.buffer_bytes < 0:
            raise ConfigError(
                f"link {self.link}: capacity {self.capacity_bytes_per_s} bytes/s, rtt {self.rtt_ns} ns and buffer "
                f"{self.buffer_bytes} bytes are not those of a link",
                why="the capacity must be at least 8 kbit/s, the others not negative",
            )
        if not 0 < self.pace_share <= 1:
            raise ConfigError(f"link {self.link}: pace {self.pace_share} must be above 0 and at most 1")
        if self.mtu_bytes < 256:
            raise ConfigError(f"link {self.link}: mtu {self.mtu_bytes} is too small", why="the least is 256 bytes")

    @property
    def payload_bytes_per_s(self) -> int:
        """What the capacity leaves for payload in full packets."""
        return self.capacity_bytes_per_s * (self.mtu_bytes - HEADERS_BYTES) // self.mtu_bytes


def default_settings(link: LinkName) -> LinkSettings:
    """The documented safe start for an owned link that isn't configured."""
    buffer_bytes = int(DEFAULT_CAPACITY_BYTES_PER_S * DEFAULT_RTT_NS // NANOS * DEFAULT_BUFFER_SHARE_OF_BDP)
    return LinkSettings(link, DEFAULT_CAPACITY_BYTES_PER_S, DEFAULT_RTT_NS, buffer_bytes, source="default")


@dataclasses.dataclass(frozen=True, slots=True)
class LinkEstimate:
    """What a link can do, as far as is known."""

    bottleneck_bytes_per_s: int
    """Payload; always positive."""
    min_rtt_ns: int
    queue_ns: int
    buffer_bytes: int
    age_ns: int
    """Since the rate was last confirmed; a configured one has no age."""
    confidence: float
    """0 (a guess) to 1 (measured now, or told by the operator)."""
    source: str


class LinkEstimator:
    """The estimate of one link: configured rate, measured delay."""

    __slots__ = ("_confidence", "_settings", "rtt")

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._confidence = 1.0 if settings.source == "configured" else 0.0
        self.rtt = RttTracker()

    def on_report(self, report: Report, now_ns: int) -> None:
        """Take in what one agent saw."""
        self.rtt.add(report.srtt_ns, report.min_rtt_ns, now_ns)

    def min_rtt_ns(self, now_ns: int) -> int:
        """The least round trip: measured, but within 1 to 1.5 times the configured one.

        Stacks and relays add to what the wire takes, and a window that ignored it would idle the link; but a persistent
        queue must not pass for distance, hence the upper bound.
        """
        configured_ns = self._settings.rtt_ns
        return min(max(self.rtt.min_rtt_ns(now_ns), configured_ns), configured_ns + configured_ns // 2)

    def estimate(self, now_ns: int) -> LinkEstimate:
        """The present estimate."""
        settings = self._settings
        return LinkEstimate(
            bottleneck_bytes_per_s=settings.payload_bytes_per_s,
            min_rtt_ns=self.min_rtt_ns(now_ns),
            queue_ns=self.rtt.queue_ns(now_ns),
            buffer_bytes=settings.buffer_bytes,
            age_ns=0,
            confidence=self._confidence,
            source=settings.source,
        )
