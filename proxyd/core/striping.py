"""How the streams to one peer share its pace, and when one's congestion window stands in its way.

Equal shares would give a fresh stream, whose congestion window holds a few packets, half of a link and the chunks to go
with it: they would wait there for slow start, and what follows them would wait for them. So no stream is given more
than its window can use within the next round trip (twice what it holds, as slow start doubles), and the others get the
rest.

**A window that slow start left too small.** HyStart (Ha and Rhee, 2011) ends slow start when acknowledgements come
without a gap for a round trip: it takes that for a full path. Under a ceiling they always do, so a stream that had a
small part of the link in its first slots keeps a window of that size, and cubic needs some ten seconds to widen it. A
ceiling does by itself what HyStart is there for: slow start can't overshoot it. So the window is *reopened*: slow start
goes on, as far as the ceiling lets it. After losses the window is TCP's own, and stays so for a while: it is what holds
the senders back while the estimate is wrong. And only where the rate is found from live transfers: what an operator
says stays within TCP's windows.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxyd.core.allocation import fair_shares

NANOS = 1_000_000_000
WIDE = 2
"""A window of so many times what the ceiling has in flight is in nobody's way; slow start leaves it at that."""
CALM_RTTS = 16
"""After a loss a window is left alone for so long ..."""
LONG_RTTS = 1 << 16
"""... and for an hour after one that a reopened window had: where losses come again and again it is TCP's window that
keeps a shallow buffer from overflowing at each hand-over."""
BURST_PACKETS = 2
BURST_NS = 25_000_000
"""The kernel sends at least two packets at a time and waits for as long as these take at the ceiling of that moment; a
higher one doesn't shorten the wait (it was seen to last eleven seconds). So no ceiling is lower than two packets in
this time, unless the stream never was any faster. What may be sent at all, the grants say."""


SLOWEST = 32


def least_pace(packet_bytes: int, highest_bytes_per_s: int) -> int:
    """The lowest ceiling (bytes/s) that a stream is given, of which the highest so far was that: a 32nd of it is enough
    of a brake, and a slow link must not be overrun."""
    return min(BURST_PACKETS * packet_bytes * NANOS // BURST_NS, highest_bytes_per_s // SLOWEST)


class WindowKeeper:
    """Says when one stream's slow start should go on."""

    __slots__ = ("_calm_rtts", "_harmed_ns", "_reopened", "_retransmits")

    def __init__(self) -> None:
        self._retransmits = 0
        self._reopened = False
        """Since the last loss."""
        self._calm_rtts = CALM_RTTS
        self._harmed_ns: int | None = None
        """When it was last seen to have lost something."""

    def reopens(
        self,
        *,
        window_bytes: int,
        in_slow_start: bool,
        retransmits: int,
        recovers: bool,
        pace_bytes_per_s: int,
        rtt_ns: int,
        now_ns: int,
    ) -> bool:
        """Whether its window stands in the way, as the kernel was just read.

        :param pace_bytes_per_s: its ceiling; 0: none, and then its window is all that holds it back.
        :param rtt_ns: 0 when it isn't known.
        """
        if recovers or retransmits != self._retransmits:
            self._retransmits, self._harmed_ns = retransmits, now_ns
            if self._reopened:
                self._reopened = False
                self._calm_rtts = LONG_RTTS
        if in_slow_start or not pace_bytes_per_s or not rtt_ns:
            return False
        if self._harmed_ns is not None and now_ns - self._harmed_ns < self._calm_rtts * rtt_ns:
            return False
        if window_bytes * NANOS >= WIDE * pace_bytes_per_s * rtt_ns:
            return False
        self._reopened = True
        return True


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
