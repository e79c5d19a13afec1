"""The ack-clocked window: how much may be granted and not yet delivered.

One window per bottleneck, for all its senders together, like one congestion controller. What TCP reports as *delivered*
opens it, so an estimate that is too high fills the window and no more, where a timetable would go on overfilling the
queue.

Its size is what one needs to keep the path busy, and little else::

    max((1 + g) x BDP, BDP + 2 slots) + rate x (report interval + control round trip + 8 or 20 ms)
        g = min(0.25, half the buffer in BDP)

The BDP is in flight; one slot is being sent and one waits behind it; a report is old by up to one interval and its
answer takes one control round trip; and processes on busy hosts are kept waiting for some milliseconds, during which
the kernel can go on only with what it has. Where several agents send at once each has such a window for its own rate,
and the bottleneck's is their sum.

Nothing an agent says is believed beyond what is possible: :class:`Account` clamps every count, so outstanding bytes are
never negative and never more than was granted.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from proxyd.core.bandwidth import NANOS, LinkSettings
from proxyd.core.messages import Report

MIN_SLOT_BYTES = 16 << 10
MAX_SLOT_BYTES = 16 << 20
MIN_CHUNK_BYTES = 64 << 10
MAX_CHUNK_BYTES = 1 << 20
MAX_CHUNK_FAST_BYTES = 2 << 20
FAST_BYTES_PER_S = 10_000_000_000 // 8
SLOT_NS = 20_000_000
"""Link time of a slot: what an urgent tensor waits for at most, beside what is on its way."""
MIN_SLOT_NS = 2_500_000
"""Shorter slots would be lost in the jitter of timers and control messages, however shallow the buffer."""
SLOTS_AHEAD = 2
SLOTS_AHEAD_SLOW = 4
"""One slot is being sent and one waits behind it. On a slow link a chunk takes long, and a lane whose TCP waits for a
timeout would hold all there is: with four 10 Mbit/s are used to 88 instead of 72 %, 30 Mbit/s to 93 instead of 92 %
(moderate, simulated). At 400 Mbit/s four would cost 1.5 % of a calm link, and for many lanes at once they add up."""
MIN_REPORT_NS = 5_000_000
HOST_DELAY_NS = 8_000_000
"""How long agents and coordinator may be kept waiting by their hosts without idling the link. In the simulator
(processes held up for up to 20 ms, three times a second) it takes the burst's p99 from 1.09 to 1.05 x ideal. Above 10
small urgent messages take longer than two round trips and a slot, above 12 cold senders overfill a buffer of 6 ms."""
HOST_DELAY_LIVE_NS = 20_000_000
"""The same on a link whose rate is found from live transfers, unless losses have shown that its buffer is small: what
its senders leave unused would pass for the link's. On two busy cores it took the used part from 91 to 94 %."""


def host_delay_ns(live: bool, buffer_bytes: int, pace_bytes_per_s: int) -> int:
    """How long hosts may be held up without idling a link of this pace; ``buffer_bytes`` 0: not known."""
    small = 0 < buffer_bytes // 2 * NANOS < HOST_DELAY_LIVE_NS * pace_bytes_per_s
    # Where chunks take longer than that, a lane holds them ahead as it is.
    return HOST_DELAY_LIVE_NS if live and not small and not is_slow(pace_bytes_per_s) else HOST_DELAY_NS


def is_slow(pace_bytes_per_s: int) -> bool:
    """Eight of the least chunks take longer than hosts are held up (below 210 Mbit/s)."""
    return HOST_DELAY_LIVE_NS * pace_bytes_per_s < 8 * MIN_CHUNK_BYTES * NANOS


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSizes:
    """Sizes that follow from a link's figures; constant while those are."""

    pace_bytes_per_s: int
    """Payload rate that is granted in all."""
    report_ns: int
    """How often an agent reports while it sends."""
    slot_bytes: int
    chunk_bytes: int
    lead_ns: int
    """How long before its last byte an agent says so."""
    half_buffer_bytes: int
    """What an unplanned overlap may put into the gateway's queue."""
    ttl_ns: int
    """How long a grant may wait to be begun."""
    turn_bytes: int
    """A turn of the longest waiter or of a job: long enough that the hand-overs around it cost little."""


def report_interval_ns(rtt_ns: int) -> int:
    """How often agents report: often enough for a window of one round trip, not more often than costs allow."""
    return max(MIN_REPORT_NS, rtt_ns // 16)


def link_sizes(settings: LinkSettings, control_rtt_ns: int, lease_ns: int) -> LinkSizes:
    """The sizes of a link as configured (see :func:`sizes_for`)."""
    pace = max(1, int(settings.payload_bytes_per_s * settings.pace_share))
    return sizes_for(pace, settings.start_rtt_ns, settings.buffer_bytes, control_rtt_ns, lease_ns)


def sizes_for(pace: int, rtt_ns: int, buffer_bytes: int, control_rtt_ns: int, lease_ns: int) -> LinkSizes:
    """Derive a link's sizes from its payload rate, round trip and buffer (0: not known).

    A slot is 20 ms of link time, or half the buffer where that is less: one slot too many must not overflow the
    gateway. A hand-over is announced two control round trips ahead, but by no more than half the buffer drains in:
    should the announced end not come, the two senders' overlap still fits.
    """
    bdp = pace * rtt_ns // NANOS
    half_buffer = (buffer_bytes or bdp // 10) // 2
    slot = min(pace * SLOT_NS // NANOS, max(half_buffer, pace * MIN_SLOT_NS // NANOS))
    slot = min(max(slot, MIN_SLOT_BYTES), MAX_SLOT_BYTES)
    most_chunk = MAX_CHUNK_FAST_BYTES if pace > FAST_BYTES_PER_S else MAX_CHUNK_BYTES
    chunk = min(max(1 << (slot.bit_length() - 1), MIN_CHUNK_BYTES), most_chunk)
    slot = max(chunk, slot // chunk * chunk)
    lead = lead_ns(control_rtt_ns, half_buffer * NANOS // pace)
    ttl = min(max(200_000_000, 3 * rtt_ns, 4 * slot * NANOS // pace), lease_ns // 2)
    turn = max(4 * slot, pace // 50)
    return LinkSizes(pace, report_interval_ns(rtt_ns), slot, chunk, lead, half_buffer, ttl, turn)


def lead_ns(control_rtt_ns: int, half_buffer_ns: int) -> int:
    """How long before its last byte an agent at this distance says so (see :func:`sizes_for`)."""
    lead = min(2 * control_rtt_ns + 1_000_000, max(2_000_000, half_buffer_ns))
    return max(lead, control_rtt_ns + 500_000)


def lane_window_bytes(
    rate_bytes_per_s: int, rtt_ns: int, buffer_bytes: int, slot_bytes: int, extra_ns: int, pace_bytes_per_s: int
) -> int:
    """Window for senders that share ``rate_bytes_per_s`` of a link paced at ``pace_bytes_per_s`` (see the module's
    text).

    :param slot_bytes: what one lane sends at a time at this rate.
    :param extra_ns: report interval plus control round trip.
    """
    bdp = rate_bytes_per_s * rtt_ns // NANOS
    share_of_buffer = buffer_bytes * rate_bytes_per_s // (2 * pace_bytes_per_s)
    alone = 2 * rate_bytes_per_s > pace_bytes_per_s
    slots = SLOTS_AHEAD_SLOW if alone and is_slow(pace_bytes_per_s) else SLOTS_AHEAD
    ahead = max(min(bdp // 4, share_of_buffer), slots * slot_bytes)
    return bdp + ahead + rate_bytes_per_s * extra_ns // NANOS


@dataclasses.dataclass(slots=True)
class Mark:
    """Where the account stood after one grant, and until when that grant can still matter."""

    granted_bytes: int
    rate_bytes_per_s: int
    leaves_by_ns: int
    """If its bytes haven't left by then, they never will (it had to begin within its ttl)."""
    forgiven_ns: int
    """If they are not acknowledged by then, they are given up as lost."""


class Account:
    """One agent's bytes on one link during one session: granted, given back, left, delivered.

    ``outstanding = granted - settled`` with ``settled = max(returned + delivered, forgiven)``: what a silent or broken
    agent never accounts for is forgiven a lease after its grants' time, so that it can't hold the window for ever.
    """

    __slots__ = (
        "at_host_bytes",
        "binds_until_ns",
        "clamped_reports",
        "delivered_bytes",
        "fallback_bytes",
        "forgiven_bytes",
        "granted_bytes",
        "left_bytes",
        "marks",
        "outstanding_bytes",
        "retransmits",
        "returned_bytes",
        "settled_bytes",
        "top_rate_bytes_per_s",
        "unscheduled_bytes",
        "unseen_bytes",
    )

    def __init__(self) -> None:
        self.granted_bytes = 0
        self.returned_bytes = 0
        self.left_bytes = 0
        self.delivered_bytes = 0
        self.unscheduled_bytes = 0
        self.fallback_bytes = 0
        self.retransmits = 0
        self.forgiven_bytes = 0
        self.settled_bytes = 0
        self.unseen_bytes = 0
        """Granted, but not known to the agent when it last reported."""
        self.outstanding_bytes = 0
        """Granted and neither delivered, nor given back, nor forgiven."""
        self.at_host_bytes = 0
        """Granted and, as far as is known, still at the agent."""
        self.clamped_reports = 0
        self.marks: deque[Mark] = deque()
        """Grants whose bytes are not all acknowledged, oldest first."""
        self.top_rate_bytes_per_s = 0
        """Highest rate among grants whose bytes have not all left; it binds until ``binds_until_ns``."""
        self.binds_until_ns = 0

    def grant(self, nbytes: int, rate_bytes_per_s: int, leaves_by_ns: int, forgiven_ns: int, now_ns: int) -> None:
        """Note a grant."""
        self.granted_bytes += nbytes
        self.outstanding_bytes += nbytes
        self.at_host_bytes += nbytes
        self.marks.append(Mark(self.granted_bytes, rate_bytes_per_s, leaves_by_ns, forgiven_ns))
        if rate_bytes_per_s > self.top_rate_bytes_per_s or now_ns >= self.binds_until_ns:
            self.top_rate_bytes_per_s = rate_bytes_per_s
        if leaves_by_ns > self.binds_until_ns:
            self.binds_until_ns = leaves_by_ns

    def report(self, report: Report, now_ns: int) -> int:
        """Take in a report; answers the bytes that it settled.

        Counts only grow, so an old or repeated report changes nothing. A count beyond the possible (negative, more
        delivered than granted) is clamped to it and counted in ``clamped_reports``.
        """
        granted = self.granted_bytes
        returned, left, delivered = report.returned_bytes, report.left_bytes, report.delivered_bytes
        if returned < 0 or delivered < 0 or left < delivered or left + returned > granted:
            self.clamped_reports += 1
        if returned > self.returned_bytes:
            self.returned_bytes = min(returned, granted - self.left_bytes)
        if left > self.left_bytes:
            self.left_bytes = min(left, granted - self.returned_bytes)
        if delivered > self.delivered_bytes:
            self.delivered_bytes = min(delivered, self.left_bytes)
        if report.unscheduled_bytes > self.unscheduled_bytes:
            self.unscheduled_bytes = report.unscheduled_bytes
        if report.fallback_bytes > self.fallback_bytes:
            self.fallback_bytes = report.fallback_bytes
        if report.retransmits > self.retransmits:
            self.retransmits = report.retransmits
        backlog = report.backlog_bytes
        unseen = granted - left - returned - (backlog if backlog > 0 else 0)
        self.unseen_bytes = unseen if unseen > 0 else 0
        settled = self._settle()
        self._top_rate(now_ns)
        return settled

    def expire(self, now_ns: int) -> int:
        """Forgive what is overdue and forget rates that no longer bind; answers the bytes that it settled."""
        for mark in self.marks:
            if mark.forgiven_ns > now_ns:
                break
            self.forgiven_bytes = max(self.forgiven_bytes, mark.granted_bytes)
        settled = self._settle()
        self._top_rate(now_ns)
        return settled

    def next_deadline_ns(self, now_ns: int) -> int | None:
        """When the passing of time alone changes something."""
        if not self.marks:
            return None
        forgiven_ns = self.marks[0].forgiven_ns
        return self.binds_until_ns if now_ns < self.binds_until_ns < forgiven_ns else forgiven_ns

    def _settle(self) -> int:
        """Find out what is settled and what is still at the host; answers by how much the former grew."""
        before = settled = self.settled_bytes
        acknowledged = self.returned_bytes + self.delivered_bytes
        if acknowledged > settled:
            settled = acknowledged
        if self.forgiven_bytes > settled:
            settled = self.forgiven_bytes
        gone = self.left_bytes + self.returned_bytes
        self.at_host_bytes = self.granted_bytes - (gone if gone > settled else settled)
        if settled == before:
            return 0
        self.settled_bytes = settled
        self.outstanding_bytes = self.granted_bytes - settled
        marks = self.marks
        while marks and marks[0].granted_bytes <= settled:
            marks.popleft()
        return settled - before

    def believe(self, rate_bytes_per_s: int, now_ns: int) -> None:
        """The agent can't send faster than this, whatever its grants say."""
        for mark in self.marks:
            mark.rate_bytes_per_s = min(mark.rate_bytes_per_s, rate_bytes_per_s)
        self._top_rate(now_ns)

    def repace(self, rate_bytes_per_s: int, now_ns: int) -> None:
        """The agent was told another rate for all that it holds."""
        gone = self.granted_bytes - self.at_host_bytes
        for mark in reversed(self.marks):
            if mark.granted_bytes <= gone:
                break
            mark.rate_bytes_per_s = rate_bytes_per_s
        self._top_rate(now_ns)

    def binding_rate(self, now_ns: int) -> int:
        """The highest rate at which bytes granted so far may still be leaving."""
        return self.top_rate_bytes_per_s if now_ns < self.binds_until_ns else 0

    def _top_rate(self, now_ns: int) -> None:
        gone = self.granted_bytes - self.at_host_bytes
        top = until_ns = 0
        for mark in reversed(self.marks):
            if mark.granted_bytes <= gone:
                break
            if mark.leaves_by_ns > now_ns and mark.rate_bytes_per_s > top:
                top = mark.rate_bytes_per_s
            if mark.leaves_by_ns > until_ns:
                until_ns = mark.leaves_by_ns
        self.top_rate_bytes_per_s = top
        self.binds_until_ns = until_ns


class Bottleneck:
    """What transfers share: the link itself; for lines that several links share see :mod:`proxyd.core.shared`."""

    __slots__ = ("name", "outstanding_bytes", "violations", "window_bytes")

    def __init__(self, name: str, window_bytes: int) -> None:
        self.name = name
        self.window_bytes = window_bytes
        self.outstanding_bytes = 0
        self.violations = 0
        """Times that more than the window was granted: must stay 0, exported as a metric."""

    @property
    def room_bytes(self) -> int:
        """What may be granted now."""
        return self.window_bytes - self.outstanding_bytes

    def resize(self, target_bytes: int) -> None:
        """Set the window. It shrinks only as fast as bytes are acknowledged: what was granted is not un-granted."""
        self.window_bytes = max(target_bytes, min(self.window_bytes, self.outstanding_bytes))

    def take(self, nbytes: int) -> None:
        """Count a grant."""
        self.outstanding_bytes += nbytes
        if self.outstanding_bytes > self.window_bytes:
            self.violations += 1

    def settle(self, nbytes: int) -> None:
        """Count acknowledged, returned or forgiven bytes."""
        self.outstanding_bytes -= nbytes
