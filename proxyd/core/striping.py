"""How the streams to one peer share its pace, and when one's congestion window stands in its way.

Equal shares would give a fresh stream, whose congestion window holds a few packets, half of a link and the chunks to go
with it: they would wait there for slow start, and what follows them would wait for them. So no stream is given more
than its window can use within the next round trip (twice what it holds while slow start doubles it, a sixteenth more
than it holds afterwards), and the others get the rest.

**A stream without a chunk** leaves its part to those that have one. Chunks are cut by the rate of when a message was
asked for, and of these a sender is granted two ahead: after a deep fall of the rate there are fewer of them than
streams. Where two of four had one, half of the pace stayed unused; that was then taken for what the sender can do, and
neither the estimate nor the shares ever came back.

**A window that slow start left too small.** HyStart (Ha and Rhee, 2011) ends slow start when acknowledgements come
without a gap for a round trip: it takes that for a full path. Under a ceiling they always do, so a stream that had a
small part of the link in its first slots keeps a window of that size, and cubic needs some ten seconds to widen it. A
ceiling does by itself what HyStart is there for: slow start can't overshoot it. So the window is *reopened*: slow start
goes on, as far as the ceiling lets it. After losses the window is TCP's own, and stays so for a while: it is what holds
the senders back while the estimate is wrong. And only where the rate is found from live transfers: what an operator
says stays within TCP's windows.

**A stripe that is slow all the same.** One path of several may be narrow, or one flow policed, with its window wide
open: its ceiling would be wasted, and each chunk that it takes comes late by what it is slower than the others, which
a message waits for. Nothing in its own state says so, only the others: while it never ran out of bytes to send, they
got rid of four times as much for their ceilings. Such a stream rests. It takes no chunk for a while, its ceiling is
the others', and then it is tried again, ever more seldom while it stays slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

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


LAG = 4
"""A stream lags that carries less than such a part of what the others do, for its ceiling ..."""
LAG_NS = 200_000_000
LAG_RTTS = 4
"""... for so long. Acknowledgements come a round trip late, and hosts are held up for some 20 ms."""
REST_NS = NANOS
MOST_REST_NS = 30 * NANOS
"""How long it rests, doubling. A chunk of a slow stripe takes a second or so, and a path mends within minutes."""


class Stripe:
    """What is known of one stream's speed."""

    __slots__ = ("_acked_bytes", "_busy", "_looks", "_paces", "_rest_ns", "_rests_until_ns", "_then_bytes", "speed")

    def __init__(self) -> None:
        self.speed = 0
        """Bytes/s within the latest span."""
        self._paces = self._looks = 0
        """Its ceilings since then, summed, and how many."""
        self._acked_bytes = self._then_bytes = 0
        self._busy = False
        self._rest_ns = REST_NS
        self._rests_until_ns = 0

    def seen(self, acked_bytes: int, pace_bytes_per_s: int, *, busy: bool) -> None:
        """The kernel was read. ``busy``: bytes wait to be sent."""
        self._acked_bytes = acked_bytes
        self._paces += pace_bytes_per_s
        self._looks += 1
        self._busy = self._busy and busy

    def rests(self, now_ns: int) -> bool:
        """It should take no more chunks now."""
        return now_ns < self._rests_until_ns

    def _part(self) -> float:
        return self.speed * self._looks / max(1, self._paces)

    def _judge(self, others: float, now_ns: int) -> None:
        """``others``: what they got of their ceilings on average; with :meth:`_part` the same of this one."""
        if not self._busy or others * LAG < 1:
            return  # it, or they, may have had nothing to send
        if self._part() * LAG < others:
            if not self.rests(now_ns):
                self._rests_until_ns = now_ns + self._rest_ns
                self._rest_ns = min(2 * self._rest_ns, MOST_REST_NS)
        else:
            self._rest_ns, self._rests_until_ns = REST_NS, 0


class Stripes:
    """Looks at the streams to one peer together, once in a span."""

    def __init__(self) -> None:
        self._since_ns = 0

    def look(self, stripes: Sequence[Stripe], rtt_ns: int, now_ns: int) -> bool:
        """All were :meth:`Stripe.seen` now. True when a span has ended: who rests may have changed."""
        span_ns = now_ns - self._since_ns
        if span_ns < max(LAG_NS, LAG_RTTS * rtt_ns):
            return False
        self._since_ns = now_ns
        for one in stripes:
            one.speed = (one._acked_bytes - one._then_bytes) * NANOS // span_ns
        working = [one for one in stripes if not one.rests(now_ns)]
        for one in stripes:
            others = [other._part() for other in working if other is not one]
            if others:
                one._judge(sum(others) / len(others), now_ns)
        for one in stripes:
            one._then_bytes, one._busy = one._acked_bytes, True
            one._paces = one._looks = 0
        return True


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


GROWTH = 16
"""A window out of slow start can use a 16th more than it holds within a round trip, and no more: it grows by packets.
At twice what it holds it left the other half of its share to nobody: of a link of 5.5 Gbit/s and 360 ms a sixth, for
half a minute, to a third stream with a tenth of the others' windows. With nothing on top it would never be the limit,
and wouldn't grow."""


def stream_paces(
    pace_bytes_per_s: int,
    windows_bytes: Sequence[int],
    rtt_ns: int,
    grow: Sequence[bool] = (),
    busy: Sequence[bool] = (),
) -> list[int]:
    """Ceilings (bytes/s) of the streams whose congestion windows these are; those of the busy ones sum to at least the
    pace, by no more than one each.

    :param windows_bytes: 0 where a window isn't known: that one counts as wide.
    :param rtt_ns: 0 when it isn't known: then all windows do.
    :param grow: whether each is in slow start; where nothing is said, all may be.
    :param busy: whether each has something to send; where nothing is said, all have.
    """
    if len(windows_bytes) == 1:
        return [pace_bytes_per_s]
    if any(busy) and not all(busy):
        return _paces_of_busy(pace_bytes_per_s, windows_bytes, rtt_ns, grow, busy)
    most = []
    for window, grows in zip_longest(windows_bytes, grow, fillvalue=True):
        usable = 2 * window if grows else window + window // GROWTH
        most.append(usable * NANOS // rtt_ns if usable and rtt_ns else pace_bytes_per_s)
    shares = fair_shares(pace_bytes_per_s, most)
    # All are cold: it makes no difference who gets what none can use, but the pace must stand should they grow.
    left = -(-max(0, pace_bytes_per_s - sum(shares)) // len(shares))
    return [max(1, share + left) for share in shares]


def _paces_of_busy(
    pace_bytes_per_s: int, windows_bytes: Sequence[int], rtt_ns: int, grow: Sequence[bool], busy: Sequence[bool]
) -> list[int]:
    at_work = [index for index, works in enumerate(busy) if works]
    windows, growing = [windows_bytes[index] for index in at_work], [grow[index] for index in at_work] if grow else ()
    shares = stream_paces(pace_bytes_per_s, windows, rtt_ns, growing)
    begins = max(1, pace_bytes_per_s // (len(at_work) + 1))  # until what it takes is known to the others
    paces = [begins] * len(windows_bytes)
    for index, share in zip(at_work, shares, strict=True):
        paces[index] = share
    return paces
