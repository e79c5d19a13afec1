"""How the streams to one peer share its pace.

Equal shares would give a fresh stream, whose congestion window holds a few packets, half of a link and the chunks to go
with it: they would wait there for slow start, and what follows them would wait for them. So no stream is given more
than its window can use within the next round trip (twice what it holds, as slow start doubles), and the others get the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxyd.core.allocation import fair_shares

NANOS = 1_000_000_000


def stream_paces(pace_bytes_per_s: int, windows_bytes: Sequence[int], rtt_ns: int) -> list[int]:
    """Ceilings (bytes/s) of the streams whose congestion windows these are; they sum to at least the pace, by no more
    than one each.

    :param windows_bytes: 0 where a window isn't known: that one counts as wide.
    :param rtt_ns: 0 when it isn't known: then all windows do.
    """
    if len(windows_bytes) == 1:
        return [pace_bytes_per_s]
    most = [2 * window * NANOS // rtt_ns if window and rtt_ns else pace_bytes_per_s for window in windows_bytes]
    shares = fair_shares(pace_bytes_per_s, most)
    # All are cold: it makes no difference who gets what none can use, but the pace must stand should they grow.
    left = -(-max(0, pace_bytes_per_s - sum(shares)) // len(shares))
    return [max(1, share + left) for share in shares]
