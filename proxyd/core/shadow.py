"""Shadow mode: what a link would have been like under grants, beside what it is like without.

Theory of operation
-------------------
On a link in observe mode agents send at once, unpaced, and ask and report as always. Here each request goes to a
second granter (same policy, same estimator) whose grants nobody gets: modelled senders obey them
(:mod:`proxyd.core.shadow_model`) on a link whose rate and round trip are those that the reports of the real one show.
So every transfer has two completion times, both from its request to the moment when the coordinator hears of its end:
the real one, and the *counterfactual* one. Their distributions, the wait for a first grant, and the gateway's queue
both ways are what an operator judges by before he switches grants on.

What the comparison cannot know: requests come as they come in reality. A job whose next step waits for this one would
have asked earlier, had this one been quicker; the shadow's gain is then understated.

Only transfers that ended well count, and only once both ways have ended.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict

from proxyd.core.allocation import Waiting
from proxyd.core.grants import LinkGranter
from proxyd.core.ids import AgentName, TransferId
from proxyd.core.lanes import Lane
from proxyd.core.messages import Report
from proxyd.core.policy import Policy
from proxyd.core.reasons import Waits
from proxyd.core.shadow_model import ShadowLine, ShadowModel, ShadowTransfer
from proxyd.core.tally import Flow
from proxyd.wire.envelope import TrafficClass

MAX_BEHIND = 20_000
"""Transfers that have ended in reality and not in the shadow; more means that the link carries more than is thought."""
LATE_NS = 50_000_000
"""The shadow lives at its own times and may be this late: it costs fewer timers."""
STEPS = 8
"""Buckets per doubling: a percentile is known within 9 %, or better, since it is interpolated."""
LEAST_NS = 1_000_000
BUCKETS = 20 * STEPS + 1
"""From 1 ms to 17 minutes."""


@dataclasses.dataclass(slots=True)
class Distribution:
    """Counts of durations in buckets of equal ratio."""

    counts: list[int] = dataclasses.field(default_factory=lambda: [0] * (BUCKETS + 1))
    """``counts[i]``: above bound ``i - 1`` and up to bound ``i`` (see :func:`bound_ns`); the last one: above all."""
    count: int = 0
    sum_ns: int = 0
    most_ns: int = 0

    def add(self, duration_ns: int) -> None:
        """Count one."""
        duration_ns = max(0, duration_ns)
        place = 0
        if duration_ns > LEAST_NS:
            place = min(BUCKETS, math.ceil(STEPS * math.log2(duration_ns / LEAST_NS)))
        self.counts[place] += 1
        self.count += 1
        self.sum_ns += duration_ns
        self.most_ns = max(self.most_ns, duration_ns)

    def merge(self, other: Distribution) -> None:
        """Add what another one counted."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.count += other.count
        self.sum_ns += other.sum_ns
        self.most_ns = max(self.most_ns, other.most_ns)

    @property
    def mean_ns(self) -> int:
        """0 without any."""
        return self.sum_ns // self.count if self.count else 0

    def percentile_ns(self, share: float) -> int:
        """Interpolated within its bucket; 0 without any."""
        wanted = share * self.count
        below = 0
        for place, count in enumerate(self.counts):
            if count and below + count >= wanted:
                low = bound_ns(place - 1) if place else 0
                high = bound_ns(place) if place < BUCKETS else self.most_ns
                return min(self.most_ns, int(low + (high - low) * (wanted - below) / count))
            below += count
        return 0


def bound_ns(place: int) -> int:
    """The largest duration in bucket ``place``."""
    return int(LEAST_NS * 2 ** (place / STEPS))


@dataclasses.dataclass(frozen=True, slots=True)
class ShadowClass:
    """One traffic class, both ways."""

    traffic: TrafficClass
    real: Distribution
    """Completion times."""
    shadow: Distribution
    wait: Distribution
    """From the request until the first granted byte would have left."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShadowStatus:
    """What shadow mode found on one link since it began."""

    classes: tuple[ShadowClass, ...]
    real_queue: Distribution
    """Queueing delay at the gateway, as each report showed it."""
    shadow_queue: Distribution
    """The same as it would have been, at each report that there would have been."""
    open: int
    """Transfers under way in reality."""
    behind: int
    """Ended in reality, and not in the shadow."""
    abandoned: int
    """Not judged, because the shadow was too far behind."""


@dataclasses.dataclass(slots=True)
class _Agent:
    """What one agent's reports said so far, over its session."""

    counted_ns: int = 0
    """When it last had something to count."""
    left_bytes: int = 0
    arrived_bytes: int = 0
    in_flight_bytes: int = 0
    retransmits: int = 0
    asked_bytes: int = 0
    open: int = 0
    """Its transfers under way."""


@dataclasses.dataclass(slots=True)
class _Pair:
    session: int
    traffic: TrafficClass
    asked_ns: int
    real_ns: int = -1
    shadow_ns: int = -1
    wait_ns: int = 0


class ShadowLink:
    """One link in observe mode.

    :param real: the link's own granter: its estimator takes in what the reports show, and it grants nothing.
    """

    def __init__(self, real: LinkGranter, control_rtt_ns: int, lease_ns: int) -> None:
        self._real = real
        self._shadow = LinkGranter(
            dataclasses.replace(real.settings, observe=False), epoch=0, control_rtt_ns=control_rtt_ns, lease_ns=lease_ns
        )
        self._line = ShadowLine(real.estimator, live=real.settings.live)
        self._model = ShadowModel(self._shadow, self._line, control_rtt_ns)
        self._pairs: OrderedDict[TransferId, _Pair] = OrderedDict()
        """Asked for, and not ended both ways; oldest first."""
        self._behind = 0
        self._abandoned = 0
        self._classes = {traffic: (Distribution(), Distribution(), Distribution()) for traffic in TrafficClass}
        self._real_queue = Distribution()
        self._shadow_queue = Distribution()
        self._agents: dict[int, _Agent] = {}
        """By session."""

    # --------------------------------------------------------------------------------------------------------- events

    def set_policy(self, policy: Policy, minute_of_week: int | None, now_ns: int) -> None:
        """What the operator wants would hold as it would under grants."""
        self._model.run(now_ns)
        self._shadow.set_policy(policy, minute_of_week, now_ns)

    def request(self, agent: AgentName, waiting: Waiting, wanted_bytes: int, now_ns: int) -> None:
        """A new transfer, which goes at once."""
        transfer = waiting.transfer
        if transfer in self._pairs:
            return  # it asks again, for chunks that were lost: they would not have been
        self._pairs[transfer] = _Pair(waiting.session, waiting.traffic, now_ns)
        seen = self._agent(waiting.session)
        seen.open += 1
        seen.asked_bytes += wanted_bytes
        twin = dataclasses.replace(waiting, waits=Waits())
        self._model.request(waiting.session, agent, twin, wanted_bytes, now_ns)

    def reported(self, lane: Lane, report: Report, now_ns: int) -> None:
        """What a real agent saw of the link, without any grants."""
        lane.reported(report, now_ns)
        seen = self._agent(lane.session)
        before = dataclasses.replace(seen)
        seen.left_bytes = max(seen.left_bytes, report.observed_left_bytes)
        # Also what has arrived behind a hole: what TCP has acknowledged in order comes in jumps.
        arrived = report.observed_delivered_bytes + max(0, report.sacked_bytes)
        seen.arrived_bytes = max(seen.arrived_bytes, min(arrived, seen.left_bytes))
        seen.in_flight_bytes = max(0, seen.left_bytes - seen.arrived_bytes - max(0, report.lost_bytes))
        seen.retransmits = max(seen.retransmits, report.retransmits)
        if not seen.open:
            seen.asked_bytes = seen.left_bytes  # what chunks sent twice, or given up, put out of step
        flow = Flow(
            delivered_bytes=seen.arrived_bytes - before.arrived_bytes,
            sent_bytes=seen.left_bytes - before.left_bytes,
            retransmits=seen.retransmits - before.retransmits,
            since_ns=before.counted_ns or now_ns,
            at_ns=now_ns,
            horizon_ns=now_ns,
            in_flight_bytes=sum(one.in_flight_bytes for one in self._agents.values()),
            missing_bytes=sum(one.left_bytes - one.arrived_bytes for one in self._agents.values()),
            demand=any(one.asked_bytes > one.left_bytes for one in self._agents.values()),
            window_limited=report.limited,
            control_rtt_ns=lane.control_rtt_ns,
        )
        if flow.delivered_bytes or flow.sent_bytes:
            seen.counted_ns = now_ns
        self._real.estimator.on_report(report, flow, now_ns)
        self._line.arrived(flow.delivered_bytes, now_ns)
        if flow.sent_bytes and report.srtt_ns:
            queue_ns = report.srtt_ns - report.back_queue_ns - self._real.estimator.min_rtt_ns(now_ns)
            self._real_queue.add(max(0, queue_ns))  # whatever an agent claims

    def _agent(self, session: int) -> _Agent:
        found = self._agents.get(session)
        if found is None:
            found = self._agents[session] = _Agent()
        return found

    def ended(self, transfer: TransferId, ok: bool, now_ns: int) -> None:
        """A transfer ended in reality."""
        pair = self._pairs.get(transfer)
        if pair is None or pair.real_ns >= 0:
            return
        self._agent(pair.session).open -= 1
        if not ok:
            del self._pairs[transfer]
            self._model.drop(transfer, now_ns)
            return
        self.run(now_ns)
        pair.real_ns = now_ns - pair.asked_ns
        if pair.shadow_ns >= 0:
            self._judge(transfer, pair)
            return
        self._behind += 1
        if self._behind > MAX_BEHIND:
            self._abandon(now_ns)

    def session_ended(self, session: int, now_ns: int) -> None:
        """An agent is gone: nothing that it had under way is judged, in reality or in the shadow."""
        self.run(now_ns)
        self._agents.pop(session, None)
        self._model.session_ended(session, now_ns)
        for transfer in [transfer for transfer, pair in self._pairs.items() if pair.session == session]:
            if self._pairs.pop(transfer).real_ns >= 0:
                self._behind -= 1

    def run(self, now_ns: int) -> int | None:
        """Let the shadow live up to now; answers when to call again."""
        self._model.run(now_ns)
        for queue_ns in self._model.queue_samples:
            self._shadow_queue.add(queue_ns)
        self._model.queue_samples.clear()
        for known, at_ns in self._model.finished:
            self._shadow_done(known, at_ns)
        self._model.finished.clear()
        due_ns = self._model.next_ns()
        return None if due_ns is None else due_ns + LATE_NS

    # -------------------------------------------------------------------------------------------------------- judging

    def _shadow_done(self, known: ShadowTransfer, now_ns: int) -> None:
        transfer = known.waiting.transfer
        pair = self._pairs.get(transfer)
        if pair is None:
            return
        pair.shadow_ns = now_ns - pair.asked_ns
        pair.wait_ns = known.first_left_ns - known.asked_ns
        if pair.real_ns >= 0:
            self._behind -= 1
            self._judge(transfer, pair)

    def _judge(self, transfer: TransferId, pair: _Pair) -> None:
        del self._pairs[transfer]
        real, shadow, wait = self._classes[pair.traffic]
        real.add(pair.real_ns)
        shadow.add(pair.shadow_ns)
        wait.add(pair.wait_ns)

    def _abandon(self, now_ns: int) -> None:
        """The oldest one that only the shadow still works on."""
        transfer = next(t for t, pair in self._pairs.items() if pair.real_ns >= 0)
        del self._pairs[transfer]
        self._behind -= 1
        self._abandoned += 1
        self._model.drop(transfer, now_ns)

    def status(self) -> ShadowStatus:
        """Everything found so far. The distributions are the living ones: read them now."""
        return ShadowStatus(
            classes=tuple(
                ShadowClass(traffic, real, shadow, wait)
                for traffic, (real, shadow, wait) in self._classes.items()
                if real.count
            ),
            real_queue=self._real_queue,
            shadow_queue=self._shadow_queue,
            open=len(self._pairs) - self._behind,
            behind=self._behind,
            abandoned=self._abandoned,
        )
