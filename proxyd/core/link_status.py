"""A link's granter seen from outside: its status (what :meth:`~proxyd.core.coordinator.CoordinatorMachine.status` is
made of), what agents are told of it, and what must always hold."""

from __future__ import annotations

from proxyd.core.bandwidth import HEADERS_BYTES
from proxyd.core.coordinator_status import JobStatus, LaneStatus, LinkStatus, WaitingStatus
from proxyd.core.fallback import FallbackRates
from proxyd.core.grants import REPACE_DOWN, LinkGranter
from proxyd.core.messages import LinkInfo
from proxyd.core.shadow import ShadowLink


def link_status(
    granter: LinkGranter, fallback: FallbackRates, shadow: ShadowLink | None, now_ns: int, most: int
) -> LinkStatus:
    """One link as plain values; of its queue at most the first ``most``."""
    estimate = granter.estimator.estimate(now_ns)
    lanes = tuple(
        LaneStatus(
            lane.agent,
            lane.session,
            lane.account.binding_rate(now_ns),
            lane.reserve_bytes_per_s if lane.reserve_until_ns > now_ns else 0,
            lane.ceiling_bytes_per_s,
            lane.account.outstanding_bytes,
            lane.leaving,
            lane.ended,
        )
        for _, lane in sorted(granter.lanes.items())
    )
    waiting: list[WaitingStatus] = []
    for item in granter.queue if granter.queue.count else ():
        if len(waiting) >= most:
            break
        waiting.append(
            WaitingStatus(
                item.transfer,
                granter.lanes[item.session].agent,
                item.destination,
                item.job,
                item.traffic,
                item.wanted_bytes,
                item.granted_bytes,
                now_ns - item.since_ns,
                item.reason,
            )
        )
    return LinkStatus(
        link=granter.link,
        source=estimate.source,
        pace_bytes_per_s=granter.pace_bytes_per_s(now_ns),
        bottleneck_bytes_per_s=estimate.bottleneck_bytes_per_s,
        rtt_ns=estimate.min_rtt_ns,
        queue_ns=estimate.queue_ns,
        buffer_bytes=estimate.buffer_bytes,
        window_bytes=granter.window_bytes,
        outstanding_bytes=granter.outstanding_bytes,
        slot_bytes=granter.sizes.slot_bytes,
        chunk_bytes=granter.sizes.chunk_bytes,
        waiting=granter.queue.count,
        waiting_bytes=granter.queue.need_bytes,
        lanes=lanes,
        transfers=tuple(waiting),
        window_violations=sum(bottleneck.violations for bottleneck in granter.bottlenecks),
        fallback_bytes_per_s=fallback.sum_bytes_per_s,
        totals=granter.totals(),
        last_reason=granter.last_reason,
        shadow=None if shadow is None else shadow.status(),
        jobs=tuple(JobStatus.of(granter.queue, account) for account in granter.queue.accounts()),
        limit_bytes_per_s=granter.limit_bytes_per_s,
        estimate_age_ns=estimate.age_ns,
        segment_bytes=granter.settings.mtu_bytes - HEADERS_BYTES,
    )


def link_info(granter: LinkGranter, fallback: FallbackRates, now_ns: int) -> LinkInfo:
    """What agents are told of a link."""
    estimate, sizes = granter.estimator.estimate(now_ns), granter.sizes
    return LinkInfo(
        link=granter.link,
        rate_bytes_per_s=granter.rate_bytes_per_s(now_ns) if granter.settings.live else sizes.pace_bytes_per_s,
        rtt_ns=estimate.min_rtt_ns,
        buffer_bytes=estimate.buffer_bytes,
        queue_ns=estimate.queue_ns,
        slot_bytes=sizes.slot_bytes,
        chunk_bytes=sizes.chunk_bytes,
        waiting_bytes=granter.queue.need_bytes,
        age_ns=estimate.age_ns,
        source=estimate.source,
        confidence=estimate.confidence,
        observe=granter.settings.observe,
        fallback_bytes_per_s=fallback.total_bytes_per_s,
    )


def link_problem(granter: LinkGranter, now_ns: int) -> str:
    """What must always hold on a link; "" when it does. Cheap enough to call after every event of a simulation.

    **Bytes**: what lanes hold is what the link counts, and fits the window.

    **Rates**: whoever can be told something was told rates that sum to no more than the pace and what those who can't
    (their session ended, or nothing is heard of them) may be sending leave of it. The latter may be more than all of a
    pace that has fallen since; then the others were told to send next to nothing. A lane that is leaving counts no
    more: its successor's start waits for it.

    A rate counts from when it is said, not from when it is heard. So does the higher one of who gets what another
    loses, and it is said later: in the same event, or in one after it. For a moment the link may then see both: as long
    as the one who loses is further away than the one who gains, which is half the difference of two control round
    trips. A sum over what each lane has heard would have to let that time pass before it gave anything away, and idle
    the link at each hand-over among agents that are equally far.
    """
    outstanding = 0
    for lane in granter.active_lanes:
        held = lane.account.outstanding_bytes
        if held < 0:
            return f"{granter.link}: {lane.agent} holds {held} bytes"
        outstanding += held
    own = granter.bottlenecks[0]
    if own.outstanding_bytes != outstanding or outstanding > own.window_bytes or own.violations:
        return (
            f"{granter.link}: lanes hold {outstanding} bytes, {own.outstanding_bytes} are counted, "
            f"the window is {own.window_bytes}"
        )
    rate = stuck = 0
    for lane in granter.active_lanes:
        if lane.stuck:
            stuck += lane.binding_rate(now_ns)
        elif not lane.leaving:
            rate += lane.account.binding_rate(now_ns)
    pace = granter.pace_bytes_per_s(now_ns)
    # What is not worth a word to the agents (see REPACE_DOWN) may be above it meanwhile.
    if rate > max(0, pace - stuck) + pace // REPACE_DOWN * 2:
        return (
            f"{granter.link}: lanes may send {rate} bytes/s, the pace is {pace}, {stuck} of it can't be told anything"
        )
    return ""
