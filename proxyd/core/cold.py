"""How long TCP takes to send what it is given, when its congestion window may be smaller than the grant assumes.

A cold or shrunk window sends one window per round trip, whatever the pace allows; in slow start the window doubles from
one round trip to the next (RFC 5681, section 3.1). A sender that knows its window can therefore say when its backlog
will have left long before that shows in what was delivered, so that its successor isn't started on top of it.
"""

from __future__ import annotations

NANOS = 1_000_000_000
GROWTH = 2
"""Per round trip in slow start, while the window is the limit."""
BURST = 2
"""The kernel paces slow start at twice the window per round trip: what is left for the last one goes in its first
half."""
MAX_LEAVES_NS = 60 * NANOS
"""A prediction further ahead says no more than this."""


def leaving_ns(nbytes: int, rate_bytes_per_s: int, window_bytes: int, rtt_ns: int, grows: bool) -> int:
    """How long ``nbytes`` take to leave at this pace through this window.

    :param window_bytes: congestion window of all streams together; 0: not known, the pace alone counts.
    :param grows: the window is in slow start.
    """
    elapsed_ns = 0
    left, window = nbytes, window_bytes
    enough = rate_bytes_per_s * rtt_ns // NANOS
    while 0 < window < enough and left > 0:
        if left <= window:
            able = min(rate_bytes_per_s, BURST * window * NANOS // rtt_ns) if grows else window * NANOS // rtt_ns
            return min(MAX_LEAVES_NS, elapsed_ns + left * NANOS // max(1, able))
        if not grows:
            return min(MAX_LEAVES_NS, elapsed_ns + left * rtt_ns // window)
        left -= window
        elapsed_ns += rtt_ns
        window *= GROWTH
    return min(MAX_LEAVES_NS, elapsed_ns + left * NANOS // rate_bytes_per_s)
