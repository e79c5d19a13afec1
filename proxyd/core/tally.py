"""What a link's senders sent and delivered, interval by interval, and which of that says something about the link.

Agents report at their own times, hosts are held up, and acknowledgements bunch; the estimator needs one series for the
link. :class:`Tally` spreads what each report adds over the time in which it happened, up to a horizon until which all
senders have reported, smooths stalls, and answers the three questions that the estimator asks: how fast is it
delivered, does the link decide that or do the senders, and was the pipe filled without gaps?
"""

from __future__ import annotations

import dataclasses

NANOS = 1_000_000_000
LEAST_WIDTH_NS = 5_000_000
"""An interval is a report interval: this, or a sixteenth of the round trip."""
WINDOW_OF_RTT = 2
LEAST_WINDOW_NS = 20_000_000
"""A rate is measured over half a round trip, but no less than four report intervals: less would measure when reports
came. A fifth follows a smooth path faster, and takes every hiccup of a busy host for the link's."""
KEPT_NS = 2 * NANOS
LONG_INTERVALS = 4
"""What an agent that had nothing in flight reports after a longer silence happened within so many intervals before."""
STALL = 0.2
STALL_RTTS = 2
STALL_PACKETS = 8
"""Less than this part of the rate within an interval that should hold so many packets is a stall."""
BURST = 1.03
"""A rate that is believed isn't further than this above what two thirds of a round trip delivered."""
LASTING_NS = 40_000_000
"""Nor above what this long delivered: hosts and middle boxes hold packets up for ten milliseconds and more, and let
them go in one burst. With 20 ms (on a path of 30 ms) such a burst raised the estimate by 17 % for seconds."""
DIFFERS = 0.08
"""Delivered and sent rates that are further apart than this say that the link decides ..."""
DIFFERS_LEAST = 0.03
"""... if it is this part of the estimate as well: little that goes slowly is all noise."""
PLAY = 2
"""Intervals by which a round trip may be off."""
HOLES = 0.95
"""Less than this part of the pace was sent: the pipe has holes."""


@dataclasses.dataclass(slots=True)
class Flow:
    """What one report adds to a link's totals, and how they stand with it."""

    delivered_bytes: int = 0
    sent_bytes: int = 0
    retransmits: int = 0
    """What the reporting agent's streams delivered (also behind a hole), sent (first times only) and sent again
    (segments) since its last report."""
    since_ns: int = 0
    at_ns: int = 0
    """Between which times, on our clock."""
    horizon_ns: int = 0
    """Until when all agents that have bytes in flight have reported."""
    in_flight_bytes: int = 0
    """Of all agents: left and not delivered."""
    missing_bytes: int = 0
    """Of all agents: left and not arrived, what is lost of it included."""
    demand: bool = False
    """Data waits at some host for its turn at the link."""
    window_limited: bool = False
    """TCP's own window, not the granted rate, holds the reporting sender back."""
    control_rtt_ns: int = 0
    under_way: bool = False
    """Something was in flight when the agent reported last: what it tells now happened all the time since."""
    ack_wait_ns: int = 0
    """How long the acknowledgements that it tells of last waited in queues of the other direction ..."""
    ack_waited_ns: int = 0
    """... and those of its last report."""


class Interval:
    """What happened on a link within one report interval."""

    __slots__ = (
        "back_queue_ns",
        "delivered_bytes",
        "end_ns",
        "pace_bytes_per_s",
        "queue_ns",
        "retransmits",
        "sent_bytes",
    )

    def __init__(self, end_ns: int, pace_bytes_per_s: int) -> None:
        self.end_ns = end_ns
        self.pace_bytes_per_s = pace_bytes_per_s
        self.delivered_bytes = 0.0
        self.sent_bytes = 0.0
        self.retransmits = 0
        self.queue_ns = -1
        """The least that any agent saw; -1: nobody saw any."""
        self.back_queue_ns = -1
        """The same of the other direction's."""

    def seen(self, queue_ns: int, back_queue_ns: int) -> None:
        """An agent saw so much of a queue, and so much of one in the other direction."""
        self.queue_ns = queue_ns if self.queue_ns < 0 else min(self.queue_ns, queue_ns)
        self.back_queue_ns = back_queue_ns if self.back_queue_ns < 0 else min(self.back_queue_ns, back_queue_ns)


class Tally:
    """The last two seconds of one link."""

    __slots__ = ("_mtu_bytes", "complete", "intervals", "judged_ns", "width_ns")

    def __init__(self, mtu_bytes: int) -> None:
        self._mtu_bytes = mtu_bytes
        self.intervals: list[Interval] = []
        """The newest ones fill still. A list: they are looked at by index at every report."""
        self.width_ns = LEAST_WIDTH_NS
        self.complete = 0
        """How many of them are complete, and fit to be judged."""
        self.judged_ns = 0
        """Until when they are."""

    def add(self, flow: Flow, rtt_ns: int, pace_bytes_per_s: int) -> None:
        """Spread what a report adds over the time in which it happened.

        Agents report at their own times. Were their counts simply added up at fixed ones, the first and last reports in
        a window of four intervals would be off by up to a quarter of the rate at each hand-over.
        """
        intervals, at_ns = self.intervals, flow.at_ns
        width_ns = max(LEAST_WIDTH_NS, rtt_ns // 16)
        if abs(width_ns - self.width_ns) * 4 > self.width_ns:
            intervals.clear()
            self.width_ns = width_ns
        width_ns = self.width_ns
        if not intervals or at_ns - intervals[-1].end_ns > KEPT_NS:
            intervals.clear()
            intervals.append(Interval(at_ns, pace_bytes_per_s))
            self.judged_ns = at_ns
        while intervals[-1].end_ns < at_ns:
            intervals.append(Interval(intervals[-1].end_ns + width_ns, pace_bytes_per_s))
        kept_ns, old = at_ns - KEPT_NS, 0
        while intervals[old].end_ns < kept_ns:
            old += 1
        if old:
            del intervals[:old]
        intervals[-1].retransmits += flow.retransmits
        since_ns = flow.since_ns if flow.under_way else max(flow.since_ns, at_ns - LONG_INTERVALS * width_ns)
        for one, share in self._spread(since_ns, at_ns):
            one.sent_bytes += flow.sent_bytes * share
        # A queue of the other direction that grows keeps acknowledgements apart, and one that shrinks pushes them
        # together; their data arrived at its own rate.
        for one, share in self._spread(since_ns - flow.ack_waited_ns, at_ns - flow.ack_wait_ns):
            one.delivered_bytes += flow.delivered_bytes * share

    def _spread(self, since_ns: int, at_ns: int) -> list[tuple[Interval, float]]:
        """The intervals between two times, and their shares in them."""
        span_ns = at_ns - since_ns
        if span_ns <= 0:  # should an agent's clock say nonsense
            since_ns, span_ns = at_ns - 1, 1
        until_ns = at_ns
        found: list[tuple[Interval, float]] = []
        for one in reversed(self.intervals):
            begin_ns = max(one.end_ns - self.width_ns, since_ns)
            if until_ns > begin_ns:
                found.append((one, (until_ns - begin_ns) / span_ns))
                until_ns = begin_ns
            if until_ns <= since_ns:
                break
        return found

    def settle(self, horizon_ns: int, rate: float, rtt_ns: int) -> None:
        """Find out what is complete up to ``horizon_ns``, and smooth stalls; ``rate``: what is usual."""
        intervals = self.intervals
        end = len(intervals)
        while end and intervals[end - 1].end_ns > horizon_ns:
            end -= 1  # it still fills
        if end:
            self.judged_ns = intervals[end - 1].end_ns
        self.complete = self._smooth(end, rate, rtt_ns)

    def window(self, rtt_ns: int) -> int:
        """Intervals over which a rate is measured."""
        return max(rtt_ns // WINDOW_OF_RTT, LEAST_WINDOW_NS) // self.width_ns

    def queue_ns(self) -> int:
        """The queue that all agents saw of late: senders bunch, and what each of them sees for moments isn't standing.
        What the luckiest sees is."""
        latest = self.intervals[max(0, self.complete - 1) :]
        return min([one.queue_ns for one in latest if one.queue_ns >= 0], default=0)

    def back_queue_ns(self) -> int:
        """What all agents saw of the other direction's, of late: acknowledgements wait in it."""
        latest = self.intervals[max(0, self.complete - 1) :]
        return min([one.back_queue_ns for one in latest if one.back_queue_ns >= 0], default=0)

    def delivered_rate(self, count: int) -> float:
        """Over the latest ``count`` complete intervals."""
        begin = max(0, self.complete - count)
        delivered = sum([one.delivered_bytes for one in self.intervals[begin : self.complete]])
        return delivered * NANOS / (count * self.width_ns)

    def lasting_rate(self, rate: float, usual: float, count: int, rtt_ns: int) -> float:
        """``rate``, or what of it is more than a burst of acknowledgements: what a stall has held up comes all at
        once afterwards, so it counts with the stall. ``usual``: what isn't one."""
        longer = min(self.complete, max(count, max(rtt_ns * 2 // 3, LASTING_NS) // self.width_ns))
        if usual * self.width_ns >= STALL_PACKETS * self._mtu_bytes * NANOS:
            stalled = STALL * usual * self.width_ns / NANOS
            first = max(0, self.complete - STALL_RTTS * rtt_ns // self.width_ns)
            for index in range(first, self.complete - longer):
                if self.intervals[index].delivered_bytes < stalled:
                    longer = self.complete - index
                    break
        return min(rate, BURST * self.delivered_rate(longer))

    def begins_ns(self, count: int) -> int:
        """When the latest ``count`` complete intervals began."""
        return self.intervals[self.complete - count].end_ns - self.width_ns

    def _smooth(self, end: int, rate: float, rtt_ns: int) -> int:
        """Acknowledgements that stopped for a moment, and came all at once afterwards, say nothing but their average: a
        host or a middle box was held up, not the link. Until they come, what there is of them isn't judged (unless it
        takes half a round trip: then it is an outage). Answers the end of what can be judged."""
        intervals = self.intervals
        usual = STALL * rate * self.width_ns / NANOS
        if rate * self.width_ns < STALL_PACKETS * self._mtu_bytes * NANOS:
            return end  # at such rates intervals without a packet are usual
        begin, outage = end, end - -(-(rtt_ns // 2) // self.width_ns)
        while begin > 0 and intervals[begin - 1].delivered_bytes < usual:
            begin -= 1
            if begin <= outage:
                return end  # how long it has been one doesn't matter: on a quiet link that is all there is
        if begin < end:
            return begin
        first = end - 1
        while (
            first > 0 and intervals[first - 1].delivered_bytes < usual and end - first <= rtt_ns // 2 // self.width_ns
        ):
            first -= 1
        if 0 < first < end - 1:
            mean = sum([one.delivered_bytes for one in intervals[first:end]]) / (end - first)
            for one in intervals[first:end]:
                one.delivered_bytes = mean
        return end

    def link_decides(self, rate: float, usual: float, count: int, trip_ns: int) -> bool:
        """What was delivered differs from what was sent a round trip (``trip_ns``) before: then the link decides
        how much that is, and not the senders. Hand-overs between fast and cold senders are steep, so the round trip is
        taken with some play."""
        intervals, end = self.intervals, self.complete
        ago = (trip_ns + self.width_ns // 2) // self.width_ns
        first = end - count - ago - PLAY
        if first < 0:
            return False
        # On a path shorter than the play there is nothing later than the present interval.
        counts = [one.sent_bytes for one in intervals[first : min(end - ago + PLAY, end)]]
        sums = [sum(counts[index : index + count]) for index in range(len(counts) - count + 1)]
        scale = NANOS / (count * self.width_ns)
        noise = DIFFERS_LEAST * usual
        least, most = min(sums) * scale, max(sums) * scale
        return rate < (1 - DIFFERS) * least - noise or rate > (1 + DIFFERS) * most + noise

    def has_holes(self, rtt_ns: int) -> bool:
        """Senders didn't send all they might have, in the last round trip: the pipe has holes, which must not be made
        up for (they would come out of it as a queue)."""
        trip = self.intervals[max(0, self.complete - rtt_ns // self.width_ns) : self.complete]
        sent = sum([one.sent_bytes for one in trip])
        might = sum([one.pace_bytes_per_s for one in trip]) * self.width_ns
        return sent * NANOS < HOLES * might

    def lost(self, rtt_ns: int) -> tuple[int, float]:
        """(packets sent again, bytes delivered) within the latest round trip."""
        recent = self.intervals[: -(rtt_ns // self.width_ns) - 2 : -1]
        return sum([one.retransmits for one in recent]), sum([one.delivered_bytes for one in recent])

    def queue_before_ns(self, within_ns: int) -> int:
        """The longest queue that all agents saw at one time, of late."""
        recent = self.intervals[-(within_ns // self.width_ns) - 1 :]
        return max([one.queue_ns for one in recent], default=0)

    def long_rate(self) -> tuple[float, int]:
        """(rate, time) over all that is kept."""
        span_ns = self.intervals[-1].end_ns - self.intervals[0].end_ns + self.width_ns
        return sum([one.delivered_bytes for one in self.intervals]) * NANOS / span_ns, span_ns
