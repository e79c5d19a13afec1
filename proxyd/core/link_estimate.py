"""What is known of a link, for whoever shows or uses it (:mod:`proxyd.core.bandwidth` finds it out)."""

from __future__ import annotations

import dataclasses


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
    """"configured" (hint, or fixed), "default" (nothing known), "estimated", "policed"."""
