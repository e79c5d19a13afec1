"""The grant policy of one link: who may send how much, at which rate, from when on, and why.

Theory of operation
-------------------
Each agent with granted bytes has a *lane* (:mod:`proxyd.core.lanes`). Whenever something happened (a request, a report,
a deadline), :meth:`LinkGranter.decide` asks for the *plan* (:mod:`proxyd.core.plan`): which agents should be sending
now, each at which share of the *pace*. How high that is, :mod:`proxyd.core.bandwidth` says.

Agents in the plan are granted whole chunks as long as their lane's window and each bottleneck's window have room: the
next slots of the present sender are issued ahead, clocked by what is delivered. Agents not in the plan get nothing more
and drain within a slot or two.

**Hand-over.** The successor's grant is issued one lead time before the last granted byte of the present lane leaves,
as its agent reports it, and starts when that has happened. If the reports stop (the agent died or hangs), the lane
counts as busy until the time of its grants has run out, and then gets nothing for a while, or until it reports. Rates
of lanes that are not leaving never sum to more than the pace: others shrink before anyone grows.

**A pace that changes** reaches whoever holds grants at once, by a :class:`~proxyd.core.messages.Pace`: every lane keeps
its part of the pace. Waiting for its next grant would fill (or idle) the bottleneck for as long as what it holds lasts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from proxyd.core.allocation import LinkQueue, Waiting, fair_shares
from proxyd.core.announced import TTL_NS
from proxyd.core.bandwidth import NANOS, LinkEstimator, LinkSettings
from proxyd.core.flows import flow_of
from proxyd.core.ids import AgentName
from proxyd.core.lanes import Lane
from proxyd.core.messages import Grant, Pace, Report
from proxyd.core.plan import Planner, Share
from proxyd.core.policy import Policy
from proxyd.core.reasons import Cause, cause_of_block
from proxyd.core.reserves import Reserves
from proxyd.core.shared import SharedBottleneck
from proxyd.core.tally import Flow
from proxyd.core.totals import LinkTotals
from proxyd.core.window import Bottleneck, host_delay_ns, lane_window_bytes, lead_ns, link_sizes, sizes_for
from proxyd.wire.envelope import TrafficClass

REPACE_DOWN = 64
_NEVER_NS = 1 << 63
_NO_FLOW = Flow()
"""What a fixed estimate needs to know."""
REPACE_UP = 128
"""A lane is told a new rate when it falls by more than 1/64, or rises by more than 1/128: probes begin with 1/50."""
LIFT_RTTS = 4
RESIZE = 8
"""Sizes follow the estimate when it has moved by 1/8: they are kept still, because chunks are cut by them."""

PADDING_JOB = ""
"""Agents warm cold connections up by transfers of no job: while there are only those, nobody really wants the link, and
what is delivered says nothing of it."""


class LinkGranter:
    """Grants on one link. Its caller tells it what happened and then asks :meth:`decide`."""

    def __init__(
        self, settings: LinkSettings, *, epoch: int, control_rtt_ns: int, lease_ns: int, settle_until_ns: int = 0
    ) -> None:
        self.settings = settings
        self.link = settings.link
        self.epoch = epoch
        self.sizes = link_sizes(settings, control_rtt_ns, lease_ns)
        self.estimator = LinkEstimator(settings)
        self.queue = LinkQueue()
        self.lanes: dict[int, Lane] = {}
        self._active: dict[int, Lane] = {}
        """Lanes with unsettled grants or a reserve: the others cost nothing per decision."""
        self._totals = LinkTotals()
        self._last: Waiting | str = ""
        self.reserves = Reserves(self._active, lease_ns, settle_until_ns)
        self._control_rtt_ns = control_rtt_ns
        self._lease_ns = lease_ns
        self._grants = 0
        self._front: list[Waiting] = []
        """Those whose turn it was at the last decision, and who wait for something else."""
        self._rtt_ns = settings.start_rtt_ns
        self.limit_bytes_per_s = 0
        """What the operator's policy allows now, payload; 0: no limit."""
        self._room_bytes_per_s = 0
        """What of the pace those who can be told something may use, as of the latest decision."""
        self._room_changed = False
        """Also who is on a link with a fixed estimate has to be told."""
        self._raise_ns = _NEVER_NS
        """When a lane may be told a higher rate for what it holds."""
        self.planner = Planner(self.queue, self.lanes)
        self._last_session = 0
        self._window_of_lanes: dict[tuple[int, int], int] = {}
        """Cache: (rate, control round trip) -> window."""
        self.bottlenecks: tuple[Bottleneck, ...] = (Bottleneck(str(self.link), 0),)
        """The link itself, and the lines that it shares with others."""
        self.shared: tuple[SharedBottleneck, ...] = ()
        self.shared_limit_bytes_per_s = 0
        """What the shared lines leave for it; 0: no limit."""
        self._shared_reason = ""
        self._lift_bytes_per_s = self._lift_ns = 0
        """A pace below the former counts as that, for some round trips after then."""
        self.planned_bytes_per_s = 0
        """What the senders of the latest plan can use together."""
        self._resize([])

    # --------------------------------------------------------------------------------------------------------- events

    def lane(self, session: int, agent: AgentName) -> Lane:
        """The session's lane, made when it is new."""
        lane = self.lanes.get(session)
        if lane is None:
            lane = self.lanes[session] = Lane(session, agent, self._control_rtt_ns)
        return lane

    def report(self, lane: Lane, report: Report, now_ns: int) -> None:
        """An agent reported."""
        if self.settings.live or self.shared:
            self._live_report(lane, report, now_ns)
        else:
            self._settle(lane.reported(report, now_ns))
            self.estimator.on_report(report, _NO_FLOW, now_ns)
        rtt_ns = self.estimator.min_rtt_ns(now_ns)
        if rtt_ns != self._rtt_ns:
            self._rtt_ns = rtt_ns
            self._window_of_lanes.clear()
        if self.settings.live:
            self._follow(now_ns)
        saturated = self.estimator.saturated(now_ns, 2 * rtt_ns) or any(one.saturated(now_ns) for one in self.shared)
        if self.settings.live:
            lane.see_window(report.window_bytes, rtt_ns, self.estimator.pace_bytes_per_s, now_ns)
        chunk = self.sizes.chunk_bytes
        changed = lane.measure(report, now_ns, rtt_ns, self.sizes.pace_bytes_per_s, saturated, chunk)
        if changed:
            self._last = changed

    def _live_report(self, lane: Lane, report: Report, now_ns: int) -> None:
        """Settle what a report says, and tell the estimator what it adds to the link's totals."""
        padding = self.queue.account(PADDING_JOB)
        wanted = self.queue.count > (padding.count if padding is not None else 0)
        flow, settled = flow_of(lane, report, self._active.values(), wanted, self._rtt_ns, now_ns)
        self._settle(settled)
        if self.shared:
            limit = self.estimator.saturated(now_ns, 2 * self._rtt_ns)
            # All of them hear of it, so no any().
            if sum([one.on_report(self.link, report, flow, self._rtt_ns, limit, now_ns) for one in self.shared]):
                flow.demand, flow.retransmits = False, 0
        self.estimator.on_report(report, flow, now_ns)

    def share(self, lines: tuple[SharedBottleneck, ...]) -> None:
        """The link crosses these, and others do too."""
        self.shared += lines
        self.bottlenecks += lines

    def set_shared_limit(self, limit_bytes_per_s: int, reason: str, now_ns: int) -> None:
        """What the shared lines leave for it has changed; its next decision tells whoever holds grants."""
        self.shared_limit_bytes_per_s, self._shared_reason = limit_bytes_per_s, reason
        self._room_changed = True
        self._window_of_lanes.clear()
        self._follow(now_ns)

    def lift(self, rate_bytes_per_s: int, now_ns: int) -> None:
        """A shared line has carried so much, and is left to this link alone. It begins there, unless it was the limit
        itself; what is delivered then raises its own estimate."""
        if self.settings.live and not self.estimator.saturated(now_ns, LIFT_RTTS * 2 * self._rtt_ns):
            self._lift_bytes_per_s, self._lift_ns = rate_bytes_per_s, now_ns

    @property
    def own_pace_bytes_per_s(self) -> int:
        """What could be granted if the shared lines had room for it."""
        pace, limit = max(self.estimator.pace_bytes_per_s, self._lift_bytes_per_s), self.limit_bytes_per_s
        return limit if 0 < limit < pace else pace

    @property
    def active_lanes(self) -> Iterable[Lane]:
        """Lanes that hold or reserve something."""
        return self._active.values()

    def set_policy(self, policy: Policy, minute_of_week: int | None, now_ns: int) -> bool:
        """What the operator wants holds from now on, and his limit of that minute; True when that limit is another."""
        if policy is not self.queue.policy:
            self.planner.set_policy(policy, policy.link(self.link).fifo_share)
        limit = self.settings.payload_of(policy.link(self.link).limit_bytes_per_s(minute_of_week))
        if limit == self.limit_bytes_per_s:
            return False
        self.limit_bytes_per_s = limit
        self._room_changed = True
        self._window_of_lanes.clear()
        self._follow(now_ns)
        return True

    def _limited(self, rate: int) -> int:
        if 0 < self.shared_limit_bytes_per_s < rate:
            rate = self.shared_limit_bytes_per_s
        return self.limit_bytes_per_s if 0 < self.limit_bytes_per_s < rate else rate

    def rate_bytes_per_s(self, now_ns: int) -> int:
        """What the bottleneck carries as far as is known, or less where the operator allows less."""
        return self._limited(self.estimator.rate_bytes_per_s(now_ns))

    def _follow(self, now_ns: int) -> None:
        """Let the sizes follow the estimate."""
        rate, sizes = self.rate_bytes_per_s(now_ns), self.sizes
        if not self.settings.live:
            rate = self._limited(self.estimator.pace_bytes_per_s)
        if abs(rate - sizes.pace_bytes_per_s) * RESIZE > sizes.pace_bytes_per_s:
            self.sizes = sizes_for(
                rate, self._rtt_ns, self.estimator.buffer_bytes, self._control_rtt_ns, self._lease_ns
            )

    def session_ended(self, session: int, agent: AgentName, reserve_bytes_per_s: int, now_ns: int) -> None:
        """A session is gone. What its agent holds is reserved until it can't matter any more, and so is what it may
        send by itself until its lease has ended."""
        lane = self.lane(session, agent)
        lane.ended = True
        if reserve_bytes_per_s:
            self.reserves.keep(lane, reserve_bytes_per_s, now_ns + self._lease_ns)
        elif session not in self._active:
            self._retire(lane)

    # ----------------------------------------------------------------------------------------------------------- time

    def next_deadline_ns(self, now_ns: int) -> int | None:
        """When :meth:`decide` should be called although nothing has happened."""
        best = _NEVER_NS
        for lane in self._active.values():
            due_ns = lane.account.next_deadline_ns(now_ns)
            if due_ns is not None and due_ns < best:
                best = due_ns
            if lane.out_of_turn and now_ns < (leads_ns := lane.leaves_ns - self._lead_ns(lane)) < best:
                best = leads_ns
            if now_ns < lane.silent_until_ns < best:
                best = lane.silent_until_ns
            if now_ns < lane.reserve_until_ns < best:
                best = lane.reserve_until_ns
        if (released_ns := self.planner.next_deadline_ns()) is not None and released_ns < best:
            best = released_ns
        if now_ns < self.reserves.settle_until_ns < best and self.queue.count:
            best = self.reserves.settle_until_ns
        if now_ns < self._raise_ns < best:
            best = self._raise_ns
        return None if best == _NEVER_NS else best

    def _expire(self, now_ns: int) -> None:
        idle: list[Lane] = []
        for lane in self._active.values():
            account = lane.account
            if account.top_rate_bytes_per_s and now_ns >= account.binds_until_ns:
                lane.fell_silent(now_ns, self._lease_ns)
                for waiting in self.queue:  # all of them, which is rare
                    waiting.waits.blame(Cause.SILENT, max(lane.leaves_ns, lane.reported_ns), now_ns, lane.agent)
            if account.marks and account.marks[0].forgiven_ns <= now_ns:
                settled = account.expire(now_ns)
                self._totals.forgiven_bytes += settled
                self._settle(settled)
            if not account.marks and lane.reserve_until_ns <= now_ns and lane.silent_until_ns <= now_ns:
                idle.append(lane)
        for lane in idle:
            del self._active[lane.session]
            if lane.ended:
                self._retire(lane)

    def _retire(self, lane: Lane) -> None:
        """Forget an ended lane, but not what it has sent."""
        del self.lanes[lane.session]
        self._totals.add(lane)

    def _settle(self, nbytes: int) -> None:
        if nbytes:
            for bottleneck in self.bottlenecks:
                bottleneck.settle(nbytes)

    @property
    def last_reason(self) -> str:
        """The latest decision, in words."""
        last = self._last
        return last if isinstance(last, str) else f"{last.transfer}: {last.reason}"

    def totals(self) -> LinkTotals:
        """All that happened, present lanes included."""
        totals = dataclasses.replace(
            self._totals, class_bytes=list(self._totals.class_bytes), starvation_turns=self.planner.starvation_turns
        )
        for lane in self.lanes.values():
            totals.add(lane)
        return totals

    def finished(self, traffic: TrafficClass, nbytes: int) -> None:
        """A transfer was acknowledged end to end."""
        self._totals.class_bytes[traffic] += nbytes

    # ------------------------------------------------------------------------------------------------------- decisions

    @property
    def window_bytes(self) -> int:
        """The present window."""
        return self.bottlenecks[0].window_bytes

    @property
    def outstanding_bytes(self) -> int:
        """Granted and not yet settled, over all lanes."""
        return self.bottlenecks[0].outstanding_bytes

    def pace_bytes_per_s(self, now_ns: int) -> int:
        """What may be granted in all at present."""
        pace = self._limited(self.own_pace_bytes_per_s)
        return self.reserves.left_of(pace, now_ns)

    def decide(self, now_ns: int) -> list[tuple[int, Grant | Pace]]:
        """Issue what can be issued now: (session, message) pairs, in order."""
        self._expire(now_ns)
        if now_ns - self._lift_ns > LIFT_RTTS * self._rtt_ns or self.estimator.saturated_ns > self._lift_ns:
            self._lift_bytes_per_s = 0
        issued: list[tuple[int, Grant | Pace]] = []
        pace = self.pace_bytes_per_s(now_ns)
        self._make_room(pace, now_ns)
        while self.queue.count and self._round(pace, now_ns, issued):
            pass
        if not self.queue.count:
            if self.settings.live:
                self._spread(now_ns, issued)
            elif self._room_changed:
                self._repace([], now_ns, issued)
        self._room_changed = False
        return issued

    def _make_room(self, pace: int, now_ns: int) -> None:
        """Find out what those leave of the pace who can't be told anything. Next to nothing where that is all of it: at
        less than a 64th a chunk that was begun would hold its connection for minutes."""
        stuck = sum(lane.binding_rate(now_ns) for lane in self._active.values() if lane.stuck)
        before, self._room_bytes_per_s = self._room_bytes_per_s, max(1, pace // REPACE_DOWN, pace - stuck)
        if abs(self._room_bytes_per_s - before) * REPACE_DOWN > before:
            self._room_changed = True

    def _spread(self, now_ns: int, issued: list[tuple[int, Grant | Pace]]) -> None:
        """Nobody waits any more: those who still send what they hold have the link to themselves, in equal parts."""
        lanes = [lane for lane in self._active.values() if lane.hears and lane.account.at_host_bytes > 0]
        if lanes := [lane for lane in lanes if lane.room_then_bytes_per_s]:
            room = self._room_bytes_per_s
            rates = fair_shares(room, [lane.ceiling_bytes_per_s or room for lane in lanes])
            for lane, rate in zip(lanes, rates, strict=True):
                self._tell_pace(lane, rate, now_ns, issued)

    def _repace(self, planned: list[Lane], now_ns: int, issued: list[tuple[int, Grant | Pace]]) -> int:
        """Tell who holds grants, and isn't in the plan, its part of a new pace. Answers what all could send before."""
        # Shares that were made at different paces may sum to more than any of those.
        hearing = [lane for lane in self._active.values() if lane.hears]
        total = sum(lane.binding_rate(now_ns) for lane in hearing if not lane.leaving)
        room = self._room_bytes_per_s
        for lane in hearing:
            then = lane.room_then_bytes_per_s
            if not then or lane in planned:
                continue
            if lane.account.outstanding_bytes <= 0:
                lane.room_then_bytes_per_s = 0
                continue
            rate, ceiling = lane.rate_bytes_per_s * room // max(then, total), lane.ceiling_bytes_per_s
            self._tell_pace(lane, ceiling if 0 < ceiling < rate else rate, now_ns, issued)
        return total

    def _tell_pace(self, lane: Lane, rate: int, now_ns: int, issued: list[tuple[int, Grant | Pace]]) -> None:
        """Tell a lane its rate, if that has changed by enough to be worth it."""
        rate = max(1, rate)
        # Grants that it still holds may be of other rates than the latest one: higher ones, while the pace crept down,
        # and lower ones, while another lane had the most of it.
        slowest, fastest = lane.slowest_bytes_per_s, max(lane.rate_bytes_per_s, lane.account.binding_rate(now_ns))
        if (rate - slowest) * REPACE_UP > slowest or (fastest - rate) * REPACE_DOWN > fastest:
            lane.repace(rate, self._room_bytes_per_s, now_ns)
            issued.append((lane.session, Pace(self.link, rate, self.epoch)))

    def _lead_ns(self, lane: Lane) -> int:
        """How long before its last byte leaves a lane passes its share on."""
        if lane.control_rtt_ns == self._control_rtt_ns:
            return self.sizes.lead_ns
        return lead_ns(lane.control_rtt_ns, self.sizes.half_buffer_bytes * NANOS // self.sizes.pace_bytes_per_s)

    def _round(self, pace: int, now_ns: int, issued: list[tuple[int, Grant | Pace]]) -> bool:
        """Serve the plan once; True when a transfer was fully granted, so that the plan may have changed."""
        sizes = self.sizes
        busy = [lane for lane in self._active.values() if lane.busy(now_ns)]
        outstanding_ns = self._rtt_ns if self._rtt_ns > sizes.report_ns else sizes.report_ns
        if pace < sizes.pace_bytes_per_s:
            # Of the estimate, not of a pace that is lower while a queue drains: else senders would come and go with it.
            outstanding_ns = outstanding_ns * sizes.pace_bytes_per_s // pace
        room = self._room_bytes_per_s
        plan = self.planner.plan(room, outstanding_ns, sizes.chunk_bytes, sizes.turn_bytes, now_ns)
        planned = [share.lane for share in plan]
        if self.shared:
            can = [(share.rate_bytes_per_s, share.lane.ceiling_bytes_per_s) for share in plan]
            self.planned_bytes_per_s = sum(min(rate, ceiling or rate) for rate, ceiling in can)
        tails = sum(lane.account.at_host_bytes for lane in busy if lane.harmless)
        for lane in busy:
            lane.out_of_turn = lane not in planned
            if lane.out_of_turn and not lane.leaving:
                fresh_ns = sizes.report_ns + sizes.report_ns // 2 + lane.control_rtt_ns
                lane.leaving = lane.near_end(now_ns, self._lead_ns(lane), fresh_ns, sizes.half_buffer_bytes)
            if lane.out_of_turn and not lane.harmless and self._creeps(lane, now_ns):
                # The last chunk may creep out of a cold stream, be it after it was said to leave: nobody needs to wait.
                tails += lane.account.at_host_bytes
                lane.harmless = tails <= sizes.half_buffer_bytes
                lane.leaving = lane.leaving or lane.harmless
        follows = self.settings.live or self._room_changed
        total = self._repace(planned, now_ns, issued) if follows else 0
        self._resize(plan)
        front: list[Waiting] = []
        self._raise_ns = _NEVER_NS
        for share in plan:
            rate, start_ns = self._rate(share, busy, pace, now_ns)
            lane = share.lane
            if follows and lane in busy and not lane.leaving:
                # Its part of the link may have changed: also for what it holds.
                if rate and (start_ns <= now_ns or rate < lane.rate_bytes_per_s):
                    self._tell_pace(lane, rate, now_ns, issued)
                elif rate > lane.slowest_bytes_per_s:
                    self._raise_ns = min(self._raise_ns, start_ns)  # to be told when the lane before it has left
                elif not rate and room < lane.room_then_bytes_per_s:
                    # Together they hold more than the pace that has fallen: each gives up its part of the difference.
                    part = lane.rate_bytes_per_s * room // max(lane.room_then_bytes_per_s, total)
                    self._tell_pace(lane, part, now_ns, issued)
            if rate and self._issue(share, rate, start_ns, pace, now_ns, issued):
                return True
            if rate and lane not in busy:
                busy.append(lane)
            self._note_blocked(share, busy, rate, now_ns)
            front.append(share.waiting)
        if front != self._front:
            for waiting in self._front:
                if waiting not in front:
                    # Somebody more urgent came, or its job's cap is used up.
                    waiting.waits.switch(Cause.POLICY if self.planner.held_back(waiting) else Cause.TURN, now_ns)
            self._front = front
        return False

    def _creeps(self, lane: Lane, now_ns: int) -> bool:
        """It doesn't leave within the time for which whoever follows is told a start."""
        free = self.settings.live and lane.hears and now_ns >= lane.reserve_until_ns
        return free and (not lane.leaving or lane.leaves_ns - now_ns > self._longest_lead_ns(lane))

    def _longest_lead_ns(self, lane: Lane) -> int:  # a start is handed out no longer ahead: it can't be moved forward
        return max(self._lead_ns(lane), self.sizes.lead_ns) + self.sizes.report_ns

    def _note_blocked(self, share: Share, busy: list[Lane], rate: int, now_ns: int) -> None:
        """Why the first in line of a share got no more, on its clock."""
        waiting = share.waiting
        if waiting.waits.cause is Cause.SENDING and share.lane.account.at_host_bytes > 0:
            return  # the usual case: its slots leave one after the other
        cause, who = cause_of_block(
            share.lane,
            busy,
            rate=rate,
            begun=waiting.granted_bytes > 0,
            settling=now_ns < self.reserves.settle_until_ns,
            now_ns=now_ns,
        )
        waiting.waits.switch(cause, now_ns, who)

    def _leaving_last(self, lane: Lane) -> AgentName | None:
        """Whose end another lane's start waits for."""
        leaving = [other for other in self._active.values() if other.leaving and other is not lane]
        return max(leaving, key=lambda other: other.leaves_ns).agent if leaving else None

    def _rate(self, share: Share, busy: list[Lane], pace: int, now_ns: int) -> tuple[int, int]:
        """(rate, start) that the lanes now busy leave for a share; rate 0: nothing yet."""
        lane = share.lane
        held = leaving = 0
        start_ns = now_ns
        for other in busy:
            if other is lane or other.harmless:
                continue
            if other.leaving:
                leaving += other.binding_rate(now_ns)
            else:
                held += other.binding_rate(now_ns)
        rate = pace - held
        if share.rate_bytes_per_s < rate:
            rate = share.rate_bytes_per_s
        if rate * 4 < share.rate_bytes_per_s or rate <= 0:
            return 0, now_ns
        if lane.leaving and held + lane.binding_rate(now_ns) > pace:
            return 0, now_ns  # it has passed its share on: first its last bytes must leave
        if leaving and rate + held + leaving > pace:
            start_ns = max(now_ns, max(other.leaves_ns for other in busy if other.leaving and other is not lane))
            if start_ns - now_ns > self._longest_lead_ns(lane):
                # It was held up after it had said that it leaves. When it goes on is not known: its next report tells.
                return 0, now_ns
        return rate, start_ns

    def _issue(
        self, share: Share, rate: int, start_ns: int, pace: int, now_ns: int, issued: list[tuple[int, Grant | Pace]]
    ) -> bool:
        """Grant a lane what its window holds; True when a transfer was fully granted."""
        lane, sizes = share.lane, self.sizes
        waiting = share.waiting
        account = lane.account
        # While a queue drains the pace is below the estimate, but what is granted ahead must not run out.
        steady = rate
        if self.settings.live and pace < sizes.pace_bytes_per_s:
            steady = rate * sizes.pace_bytes_per_s // pace
        window = self._lane_window(steady, lane.control_rtt_ns)
        # What a sender can't get rid of (its TCP window is cold, its host busy) must not pile up there: it could be
        # sent by others meanwhile, and it can't be called back.
        chunk = waiting.chunk_bytes or sizes.chunk_bytes
        least = 2 * chunk
        ahead = window - steady * (self._rtt_ns + self.estimator.back_queue_ns) // NANOS
        room = (ahead if ahead > least else least) - account.at_host_bytes
        lane_room = (window if window > least else least) - account.outstanding_bytes + lane.behind_holes_bytes
        if lane_room < room:
            room = lane_room
        for bottleneck in self.bottlenecks:
            link_room = bottleneck.window_bytes - bottleneck.outstanding_bytes
            if link_room < room:
                room = link_room
        if 0 < share.limit_bytes < room:
            room = share.limit_bytes
        need = waiting.wanted_bytes - waiting.granted_bytes
        nbytes = need if need <= room else room // chunk * chunk
        if nbytes <= 0:
            for line in self.shared:
                if line.room_bytes <= room:
                    line.short.add(self.link)
            return False
        idle = not lane.busy(now_ns)
        reason = f"{share.reason}; {self._shared_reason}" if self._shared_reason else share.reason
        if self._last_session != lane.session:
            self._last_session = lane.session
            self._totals.handovers += 1
            if start_ns > now_ns:
                reason = f"{reason}; starts when the lane before it has left"
        send_ns = nbytes * NANOS // rate
        ttl_ns = min(sizes.ttl_ns, TTL_NS) if waiting.announcement else sizes.ttl_ns
        leaves_by_ns = (start_ns if start_ns > lane.leaves_ns else lane.leaves_ns) + ttl_ns + 2 * send_ns
        account.grant(nbytes, rate, leaves_by_ns, leaves_by_ns + 2 * self._rtt_ns + self._lease_ns // 4, now_ns)
        lane.granted(nbytes, rate, start_ns, self._room_bytes_per_s, idle)
        lane.padding = waiting.job == PADDING_JOB
        self._active[lane.session] = lane
        for bottleneck in self.bottlenecks:
            bottleneck.take(nbytes)
        self.queue.granted(waiting, nbytes)
        waiting.reason = reason
        before = self._leaving_last(lane) if start_ns > now_ns else None
        waiting.waits.granted(nbytes >= need, now_ns, start_ns, before)
        self._count(waiting, nbytes)
        self._grants += 1
        start_in_ns = start_ns - now_ns - lane.control_rtt_ns // 2 if start_ns > now_ns else 0
        grant = Grant(
            self._grants,
            waiting.transfer,
            self.link,
            nbytes,
            rate,
            start_in_ns if start_in_ns > 0 else 0,
            ttl_ns,
            self.epoch,
            self._lead_ns(lane),
            reason,
            waiting.announcement,
        )
        issued.append((lane.session, grant))
        return nbytes >= need

    def _count(self, waiting: Waiting, nbytes: int) -> None:
        totals = self._totals
        totals.grants += 1
        totals.granted_bytes += nbytes
        self.planner.granted(waiting, nbytes)
        self._last = waiting

    # ----------------------------------------------------------------------------------------------------------- sizes

    def _lane_window(self, rate: int, control_rtt_ns: int) -> int:
        """What a lane at ``rate`` may have outstanding."""
        key = (rate, control_rtt_ns)
        window = None if self.settings.live else self._window_of_lanes.get(key)
        if window is None:
            sizes, buffer = self.sizes, self.estimator.buffer_bytes
            pace, chunk = sizes.pace_bytes_per_s, sizes.chunk_bytes
            slot = max(chunk, sizes.slot_bytes * rate // pace // chunk * chunk)
            extra_ns = sizes.report_ns + control_rtt_ns + host_delay_ns(self.settings.live, buffer, pace)
            path_ns = self._rtt_ns + self.estimator.back_queue_ns  # acknowledged late, outstanding for longer
            window = lane_window_bytes(rate, path_ns, buffer, slot, extra_ns, pace)
            if len(self._window_of_lanes) > 64:
                self._window_of_lanes.clear()
            self._window_of_lanes[key] = window
        return window

    def _resize(self, plan: list[Share]) -> None:
        """The link's window for those who send: each needs a chunk or two ahead, however slow it is."""
        pace, now = self.sizes.pace_bytes_per_s, max(self.estimator.pace_bytes_per_s, self._lift_bytes_per_s)
        pace = self._limited(pace if pace > now else now)
        control_rtt_ns, chunk_bytes, ahead = self._control_rtt_ns, self.sizes.chunk_bytes, 0
        for share in plan:
            if share.lane.control_rtt_ns > control_rtt_ns:
                control_rtt_ns = share.lane.control_rtt_ns
            ahead += 2 * (share.waiting.chunk_bytes or chunk_bytes)
        target = self._lane_window(pace, control_rtt_ns) + max(0, ahead - 2 * chunk_bytes)
        # A hole is mended a round trip later: what has arrived behind it is outstanding until then, in nobody's way.
        target += sum([lane.behind_holes_bytes for lane in self._active.values()])
        self.bottlenecks[0].resize(target)
        for line in self.shared:
            line.resize_for(self.link, target)
