"""A bottleneck that several links cross: the line out of a site, or into it.

Theory of operation
-------------------
Transfers from a to b and from a to c leave a by one line. Each of the two links has its own window, estimate and pace;
here is what holds for both together.

**Window.** Outstanding bytes of all its links never exceed the shared window: the sum of what its links need, and a
quarter more, because a link that has just been told to shrink still has more under way than it needs.

**Rate.** With a configured capacity that is believed (0.98 of its payload is granted, as on any fixed link). Without
one it is learned, by the same estimator as a link's (:mod:`proxyd.core.bandwidth`), fed with the sums over all links.
Two things make the sums fit. Links differ in distance, so what is in flight on each counts as it would at the least
round trip: ``rate x R_i`` bytes become ``rate x R_min``. And a queue is this line's only if every link sees it: the
estimator takes the least queue of all reports anyway. ``cap`` limits both.

**Whose queue is it?** While several links want to send and the common queue is what a link sees (within a host's
noise), this line is the limit: its estimator takes queue and losses, and the link's own one takes neither, or it would
fall to its part of the line and stay there. So it is for the first round trips after others have joined one that had
met its limit. A queue that a link sees beyond the common one is its own. While only one link sends, nothing can
tell the two apart: then the link's estimate follows whatever is narrower, and the line's only learns what got through,
so the line's is not lowered by what may be the link's. If a link alone has met its limit, what it got through is where
several begin, and not half as much again, as in a start-up.

**Split.** The rate is split among links that want to send, equally, none more than it can use (max-min fairness:
Bertsekas and Gallager, *Data Networks*, 6.5.2); what all of them leave is added to each, for estimates that grow. One
link alone is not limited but by capacity or cap; and if it was no limit itself of late, it begins at what the line has
carried for all of them, instead of finding that again. When a link begins, the others are told to shrink first, then it
is granted its part; what agents with a lost session may still be sending is taken off beforehand.

A link that crosses two such lines (the egress of one site and the ingress of another) gets the lesser of its two parts.
What it leaves of the greater one is offered to nobody else.
"""

from __future__ import annotations

import dataclasses

from proxyd.core.allocation import fair_shares
from proxyd.core.bandwidth import LinkEstimator, LinkSettings
from proxyd.core.flows import STALE_READING_NS
from proxyd.core.ids import LinkName
from proxyd.core.messages import Report
from proxyd.core.policy import BottleneckSettings
from proxyd.core.tally import Flow
from proxyd.core.window import Bottleneck

WINDOW_SLACK = 4
"""A quarter more than the links need (see the module's text)."""
NOISE_NS = 3_000_000
NOISE_OF_RTT = 16
"""A link's queue that is longer than the common one by the greater of both isn't the common one."""
SPLIT_DOWN = 128
SPLIT_UP = 64
"""The rate is split anew when it has fallen by 1/128 or risen by 1/64."""
NEED_MOVES = 32
"""... or when what a link can use has moved by 1/32."""
BEGIN_RTTS = 3
"""So long a line's own sums say little after several have begun."""
GROWTH = 20
"""From what one link alone has found several grow by a twentieth per round trip until the line is met."""


@dataclasses.dataclass(slots=True)
class SharedPart:
    """One link's part of a shared bottleneck."""

    need_bytes_per_s: int = 0
    """What it could use now; 0: it has nothing to send."""
    stuck_bytes_per_s: int = 0
    """What agents with a lost session may be sending on it: they can't be told to stop."""
    limit_bytes_per_s: int = 0
    """What it may be granted in all (if it has nothing to send: what it would get); 0: no limit."""
    window_bytes: int = 0
    in_flight_bytes: int = 0
    missing_bytes: int = 0
    horizon_ns: int = 0
    rtt_ns: int = 0
    queue_ns: int = 0
    """As its latest report with acknowledgements showed it."""


class SharedBottleneck(Bottleneck):
    """See the module's text. The window's bytes are taken and settled by the links' granters.

    :param mtu_bytes: of its packets; the least of its links'.
    """

    __slots__ = (
        "_began_ns",
        "_found",
        "_line",
        "_split_bytes_per_s",
        "_window_sum_bytes",
        "estimator",
        "parts",
        "settings",
        "short",
    )

    def __init__(self, settings: BottleneckSettings, mtu_bytes: int) -> None:
        super().__init__(settings.name, 0)
        self.settings = settings
        link = LinkName(settings.site, "*") if settings.egress else LinkName("*", settings.site)
        known = settings.capacity_bytes_per_s
        self._line = LinkSettings(
            link, known, mtu_bytes=mtu_bytes, source="configured" if known else "default", live=not known
        )
        self.estimator = LinkEstimator(self._line)
        self.parts: dict[LinkName, SharedPart] = {}
        self.short: set[LinkName] = set()
        """Links that were granted nothing because the window was full: to be asked again when it has room."""
        self._began_ns = -1
        """Since when several want to send; -1: they don't."""
        self._found = False
        """A link alone has met its limit."""
        self._split_bytes_per_s = 0
        self._window_sum_bytes = 0

    @property
    def live(self) -> bool:
        """Its rate is learned."""
        return not self.settings.capacity_bytes_per_s

    @property
    def _several(self) -> bool:
        return sum(1 for part in self.parts.values() if part.need_bytes_per_s) > 1

    def join(self, link: LinkName) -> None:
        """A link crosses it."""
        self.parts[link] = SharedPart()

    # ------------------------------------------------------------------------------------------------------------ rate

    def pace_bytes_per_s(self, now_ns: int) -> int:
        """What may be granted over all links together, payload."""
        pace, cap = self.estimator.pace_bytes_per_s, self._cap_bytes_per_s
        if self._found and pace > (most := self.estimator.rate_bytes_per_s(now_ns) * (GROWTH + 1) // GROWTH):
            pace = most
        return max(1, min(pace, cap) if cap else pace)

    def bound_bytes_per_s(self, now_ns: int) -> int:
        """What holds for the sum over all links now: the pace, or while only one sends over a line that is learned its
        cap; 0: nothing does."""
        return self.pace_bytes_per_s(now_ns) if self._several or not self.live else self._cap_bytes_per_s

    @property
    def _cap_bytes_per_s(self) -> int:
        return self._line.payload_of(self.settings.cap_bytes_per_s)

    def on_report(self, link: LinkName, report: Report, flow: Flow, rtt_ns: int, is_limit: bool, now_ns: int) -> bool:
        """An agent of one of the links reported; ``flow``: what that says of its link.

        :param rtt_ns: that link's.
        :param is_limit: it is the limit, as far as its own estimator can tell.

        True when queue and losses are this line's, and the link's own estimator should not see them.
        """
        part = self.parts[link]
        part.in_flight_bytes, part.missing_bytes = flow.in_flight_bytes, flow.missing_bytes
        part.horizon_ns, part.rtt_ns = flow.horizon_ns, rtt_ns
        if flow.delivered_bytes and report.srtt_ns and report.min_rtt_ns:
            part.queue_ns = max(0, report.srtt_ns - report.back_queue_ns - report.min_rtt_ns)
        if not self.live:
            return False
        several = self._several
        if not several:
            self._found, self._began_ns = self._found or is_limit, -1
        elif self._began_ns < 0:
            self._began_ns = now_ns
        self.estimator.on_report(report, self._sum(flow, several and flow.demand, now_ns), now_ns)
        if not several:
            return False
        if self.saturated(now_ns):
            self._found = False  # now it has met the line itself
        elif not self._found or now_ns - self._began_ns > BEGIN_RTTS * rtt_ns:
            return False
        common_ns = min(one.queue_ns for one in self.parts.values() if one.need_bytes_per_s)
        return part.queue_ns <= common_ns + max(NOISE_NS, rtt_ns // NOISE_OF_RTT)

    def _sum(self, flow: Flow, demand: bool, now_ns: int) -> Flow:
        """What one link's report says of the line."""
        present = [part for part in self.parts.values() if part.in_flight_bytes or part.missing_bytes]
        least_ns = min((part.rtt_ns for part in present), default=0)
        total = dataclasses.replace(flow, demand=demand, in_flight_bytes=0, missing_bytes=0)
        for part in present:
            total.in_flight_bytes += part.in_flight_bytes * least_ns // part.rtt_ns
            total.missing_bytes += part.missing_bytes * least_ns // part.rtt_ns
            if now_ns - max(STALE_READING_NS, part.rtt_ns // 2) < part.horizon_ns < total.horizon_ns:
                total.horizon_ns = part.horizon_ns
        return total

    def saturated(self, now_ns: int) -> bool:
        """The line itself was the limit within two round trips, as far as can be told."""
        return self.live and self._several and self.estimator.saturated(now_ns, 2 * self.estimator.min_rtt_ns(now_ns))

    # ----------------------------------------------------------------------------------------------------------- split

    def wants(
        self, link: LinkName, need_bytes_per_s: int, stuck_bytes_per_s: int, outstanding_bytes: int, now_ns: int
    ) -> bool:
        """What a link could use now; True when the rate was split anew."""
        part = self.parts[link]
        pace, split = self.pace_bytes_per_s(now_ns), self._split_bytes_per_s
        need = min(need_bytes_per_s, pace)
        if not need and not outstanding_bytes:
            self._set_window(part, 0)
        before = part.need_bytes_per_s
        if (
            abs(need - before) * NEED_MOVES > before
            or stuck_bytes_per_s != part.stuck_bytes_per_s
            or (split - pace) * SPLIT_DOWN > split
            or (pace - split) * SPLIT_UP > split
        ):
            part.need_bytes_per_s, part.stuck_bytes_per_s = need, stuck_bytes_per_s
            self._split(pace)
            return True
        return False

    def _split(self, pace: int) -> None:
        self._split_bytes_per_s = pace
        parts = list(self.parts.values())
        wanting = [part for part in parts if part.need_bytes_per_s]
        if self.live and len(wanting) < 2:
            # What one link alone finds is the narrower of link and line: only the operator limits it.
            pace = self._cap_bytes_per_s
            if not pace:
                for part in parts:
                    part.limit_bytes_per_s = 0
                return
        left = max(pace - sum(part.stuck_bytes_per_s for part in parts), 1)
        needs = [min(part.need_bytes_per_s, left) for part in wanting]
        shares = fair_shares(left, needs)
        more = (left - sum(shares)) // len(wanting) if wanting else 0
        for part, share in zip(wanting, shares, strict=True):
            part.limit_bytes_per_s = max(1, share + more + part.stuck_bytes_per_s)
        would_get = fair_shares(left, [*needs, left])[-1]
        for part in parts:
            if not part.need_bytes_per_s:
                part.limit_bytes_per_s = max(1, would_get + part.stuck_bytes_per_s)

    def fallback_bytes_per_s(self, now_ns: int) -> int:
        """What one link may count on while the coordinator is silent: an equal part for each that was used."""
        rate, cap = self.estimator.rate_bytes_per_s(now_ns), self._cap_bytes_per_s
        used = sum(1 for part in self.parts.values() if part.rtt_ns or part.need_bytes_per_s)
        return (min(rate, cap) if cap else rate) // max(1, used)

    # ---------------------------------------------------------------------------------------------------------- window

    def resize_for(self, link: LinkName, target_bytes: int) -> None:
        """A link's own window should be so large."""
        self._set_window(self.parts[link], target_bytes)

    def _set_window(self, part: SharedPart, nbytes: int) -> None:
        if nbytes != part.window_bytes:
            self._window_sum_bytes += nbytes - part.window_bytes
            part.window_bytes = nbytes
            self.resize(self._window_sum_bytes + self._window_sum_bytes // WINDOW_SLACK)
