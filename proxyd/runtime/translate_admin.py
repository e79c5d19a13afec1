"""The coordinator's status as protobuf, for the Admin service. One way only: nothing of it is read back into the core.

Beside :mod:`proxyd.runtime.translate`, and under the same rule: no other module sees both forms.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from proxyd.core.coordinator_status import CoordinatorStatus, LinkStatus
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.policy import Policy
from proxyd.core.shadow import Distribution, ShadowStatus
from proxyd.runtime.translate import TranslateError
from proxyd.v1 import admin_pb2, coordination_pb2
from proxyd.wire.envelope import TrafficClass


class WaitTold(NamedTuple):
    """How long a transfer waited for something."""

    cause: str
    """Name of a :class:`~proxyd.core.reasons.Cause`."""
    words: str
    waited_ns: int


class Decision(NamedTuple):
    """Something that happened to a transfer."""

    age_ns: int
    what: str
    reason: str
    waits: tuple[WaitTold, ...] = ()
    """Since the decision before."""


class Told(NamedTuple):
    """The story of one transfer."""

    transfer: TransferId
    link: LinkName | None
    agent: AgentName | None
    """None here and for what follows: the story's beginning is not known any more."""
    destination: AgentName | None
    job: str
    traffic: TrafficClass | None
    wanted_bytes: int
    granted_bytes: int
    requested_ago_ns: int
    over_ago_ns: int | None
    """None: it is not over."""
    waits: tuple[WaitTold, ...]
    decisions: tuple[Decision, ...]
    now: str = ""
    """Where it stands, in words; empty when it is over."""


def _agent(name: AgentName) -> coordination_pb2.AgentName:
    return coordination_pb2.AgentName(site=name.site, name=name.name)


def _link(name: LinkName) -> coordination_pb2.LinkName:
    return coordination_pb2.LinkName(src_site=name.src_site, dst_site=name.dst_site)


def _endpoint(name: EndpointName) -> coordination_pb2.EndpointName:
    return coordination_pb2.EndpointName(job=name.job, rank=name.rank)


def _transfer(transfer: TransferId) -> coordination_pb2.TransferId:
    return coordination_pb2.TransferId(incarnation=transfer.incarnation, sequence=transfer.sequence)


def _traffic(traffic: TrafficClass) -> coordination_pb2.TrafficClass.ValueType:
    return coordination_pb2.TrafficClass.Value(f"TRAFFIC_CLASS_{traffic.name}")


def status_response(status: CoordinatorStatus, version: str, uptime_ns: int) -> admin_pb2.StatusResponse:
    """Everything at a glance."""
    return admin_pb2.StatusResponse(
        coordinator=status.name,
        version=version,
        epoch=status.epoch,
        uptime_ns=uptime_ns,
        owns=status.owns,
        agents=[
            admin_pb2.AgentStatus(
                agent=_agent(agent.agent),
                incarnation=agent.incarnation,
                data_address=agent.data_address,
                endpoints=agent.endpoints,
                transfers=agent.transfers,
                heard_ago_ns=max(0, agent.heard_ago_ns),
            )
            for agent in status.agents
        ],
        endpoints=[
            admin_pb2.EndpointStatus(
                endpoint=_endpoint(entry.endpoint), incarnation=entry.incarnation, agent=_agent(entry.agent)
            )
            for entry in status.endpoints
        ],
        links=[link_status(link) for link in status.links],
        protocol_errors=status.protocol_errors,
    )


def link_status(link: LinkStatus) -> admin_pb2.LinkStatus:
    """One link with its lanes and the first in its line."""
    totals = link.totals
    return admin_pb2.LinkStatus(
        link=_link(link.link),
        source=link.source,
        pace_bytes_per_s=link.pace_bytes_per_s,
        bottleneck_bytes_per_s=link.bottleneck_bytes_per_s,
        granted_rate_bytes_per_s=link.granted_rate_bytes_per_s,
        rtt_ns=link.rtt_ns,
        queue_ns=link.queue_ns,
        buffer_bytes=link.buffer_bytes,
        window_bytes=link.window_bytes,
        outstanding_bytes=link.outstanding_bytes,
        slot_bytes=link.slot_bytes,
        chunk_bytes=link.chunk_bytes,
        waiting_transfers=link.waiting,
        waiting_bytes=link.waiting_bytes,
        window_violations=link.window_violations,
        fallback_bytes_per_s=link.fallback_bytes_per_s,
        last_reason=link.last_reason,
        totals=admin_pb2.LinkTotals(
            grants=totals.grants,
            granted_bytes=totals.granted_bytes,
            returned_bytes=totals.returned_bytes,
            delivered_bytes=totals.delivered_bytes,
            unscheduled_bytes=totals.unscheduled_bytes,
            fallback_bytes=totals.fallback_bytes,
            retransmits=totals.retransmits,
            handovers=totals.handovers,
        ),
        jobs=[
            admin_pb2.JobStatus(
                name=job.name,
                weight=job.weight,
                floor_bytes_per_s=job.floor_bytes_per_s,
                cap_bytes_per_s=job.cap_bytes_per_s,
                waiting_transfers=job.waiting,
                waiting_bytes=job.waiting_bytes,
                granted_bytes=job.granted_bytes,
                held_back=job.held_back,
            )
            for job in link.jobs
        ],
        limit_bytes_per_s=link.limit_bytes_per_s,
        lanes=[
            admin_pb2.LaneStatus(
                agent=_agent(lane.agent),
                rate_bytes_per_s=lane.rate_bytes_per_s,
                ceiling_bytes_per_s=lane.ceiling_bytes_per_s,
                outstanding_bytes=lane.outstanding_bytes,
                leaving=lane.leaving,
            )
            for lane in link.lanes
        ],
        waiting=[
            admin_pb2.WaitingStatus(
                transfer=_transfer(item.transfer),
                agent=_agent(item.agent),
                destination=_agent(item.destination),
                job=item.job,
                traffic=_traffic(item.traffic),
                wanted_bytes=item.wanted_bytes,
                granted_bytes=item.granted_bytes,
                waited_ns=max(0, item.waited_ns),
                reason=item.reason,
            )
            for item in link.transfers
        ],
        observe=link.shadow is not None,
        shadow=_shadow(link.shadow),
    )


def _shadow(found: ShadowStatus | None) -> admin_pb2.ShadowStatus | None:
    if found is None:
        return None
    return admin_pb2.ShadowStatus(
        classes=[
            admin_pb2.ShadowClass(
                traffic=_traffic(one.traffic),
                real=_spread(one.real),
                shadow=_spread(one.shadow),
                wait=_spread(one.wait),
            )
            for one in found.classes
        ],
        real_queue=_spread(found.real_queue),
        shadow_queue=_spread(found.shadow_queue),
        open_transfers=found.open,
        behind_transfers=found.behind,
        abandoned=found.abandoned,
    )


def _spread(found: Distribution) -> admin_pb2.Spread:
    return admin_pb2.Spread(
        count=found.count,
        mean_ns=found.mean_ns,
        p50_ns=found.percentile_ns(0.5),
        p99_ns=found.percentile_ns(0.99),
        most_ns=found.most_ns,
    )


def links_response(status: CoordinatorStatus, wanted: Iterable[LinkName]) -> admin_pb2.LinksResponse:
    """The links alone; of ``wanted`` only, unless that is empty."""
    names = set(wanted)
    return admin_pb2.LinksResponse(
        links=[link_status(link) for link in status.links if not names or link.link in names]
    )


def wanted_links(request: admin_pb2.LinksRequest) -> list[LinkName]:
    """The links that a request names."""
    return [LinkName(link.src_site, link.dst_site) for link in request.links]


def wanted_transfer(request: admin_pb2.WhyRequest) -> TransferId:
    """The transfer that a request names. Raises TranslateError when it names none."""
    if not request.HasField("transfer"):
        raise TranslateError("WhyRequest.transfer is missing")
    return TransferId(request.transfer.incarnation, request.transfer.sequence)


def why_response(told: Told) -> admin_pb2.WhyResponse:
    """The story of one transfer."""
    return admin_pb2.WhyResponse(
        transfer=_transfer(told.transfer),
        now=told.now,
        decisions=[
            admin_pb2.Decision(
                age_ns=max(0, one.age_ns), what=one.what, reason=one.reason, waits=[_wait(wait) for wait in one.waits]
            )
            for one in told.decisions
        ],
        link=None if told.link is None else _link(told.link),
        agent=None if told.agent is None else _agent(told.agent),
        destination=None if told.destination is None else _agent(told.destination),
        job=told.job,
        traffic=_traffic(told.traffic or TrafficClass.PIPELINE),
        wanted_bytes=told.wanted_bytes,
        granted_bytes=told.granted_bytes,
        requested_ago_ns=max(0, told.requested_ago_ns),
        over_ago_ns=max(0, told.over_ago_ns or 0),
        over=told.over_ago_ns is not None,
        waits=[_wait(wait) for wait in told.waits],
    )


def _wait(wait: WaitTold) -> admin_pb2.Wait:
    return admin_pb2.Wait(cause=wait.cause, words=wait.words, waited_ns=max(0, wait.waited_ns))


def why_request(transfer: TransferId) -> admin_pb2.WhyRequest:
    """A question after one transfer."""
    return admin_pb2.WhyRequest(transfer=_transfer(transfer))


def read_why(response: admin_pb2.WhyResponse) -> Told:
    """Inverse of :func:`why_response`, as the command sees it."""
    known = response.HasField("link")
    return Told(
        transfer=TransferId(response.transfer.incarnation, response.transfer.sequence),
        link=LinkName(response.link.src_site, response.link.dst_site) if known else None,
        agent=AgentName(response.agent.site, response.agent.name) if response.HasField("agent") else None,
        destination=AgentName(response.destination.site, response.destination.name) if known else None,
        job=response.job,
        traffic=_TRAFFIC.get(response.traffic) if known else None,
        wanted_bytes=response.wanted_bytes,
        granted_bytes=response.granted_bytes,
        requested_ago_ns=response.requested_ago_ns,
        over_ago_ns=response.over_ago_ns if response.over else None,
        waits=_read_waits(response.waits),
        decisions=tuple(
            Decision(one.age_ns, one.what, one.reason, _read_waits(one.waits)) for one in response.decisions
        ),
        now=response.now,
    )


def _read_waits(waits: Iterable[admin_pb2.Wait]) -> tuple[WaitTold, ...]:
    return tuple(WaitTold(wait.cause, wait.words, wait.waited_ns) for wait in waits)


_TRAFFIC = {int(_traffic(one)): one for one in TrafficClass}


def policy_response(
    policy: Policy, *, file: str, minute_of_week: int, time_zone: str, reloads: int, refused: int
) -> admin_pb2.GetPolicyResponse:
    """The policy that is in force."""
    return admin_pb2.GetPolicyResponse(
        file=file,
        minute_of_week=minute_of_week,
        time_zone=time_zone,
        jobs=[
            admin_pb2.JobPolicy(
                name=name,
                weight=job.weight,
                floor_bytes_per_s=job.floor_bytes_per_s,
                cap_bytes_per_s=job.cap_bytes_per_s,
            )
            for name, job in sorted(policy.jobs.items())
        ],
        links=[
            admin_pb2.LinkPolicy(
                link=_link(name),
                cap_bytes_per_s=link.cap_bytes_per_s,
                calendar=[str(window) for window in link.calendar],
                limit_bytes_per_s=link.limit_bytes_per_s(minute_of_week),
                fifo_share=link.fifo_share,
            )
            for name, link in sorted(policy.links.items())
        ],
        classes=[
            admin_pb2.ClassPolicy(traffic=_traffic(traffic), share=policy.sharing_of(traffic).value)
            for traffic in TrafficClass
        ],
        reloads=reloads,
        reloads_refused=refused,
    )


def reload_response(applied: bool, message: str, needs_restart: Iterable[str]) -> admin_pb2.ReloadPolicyResponse:
    """What came of reading the file again."""
    return admin_pb2.ReloadPolicyResponse(applied=applied, message=message, needs_restart=needs_restart)


def wants_drain(request: admin_pb2.DrainRequest) -> bool:
    """Whether draining is to begin (or to go on), rather than to end."""
    return request.drain


def drain_response(draining: bool, under_way: int, held: int, arriving: int = 0) -> admin_pb2.DrainResponse:
    """How far the draining is, in transfers."""
    return admin_pb2.DrainResponse(
        draining=draining, under_way_transfers=under_way, held_transfers=held, arriving_transfers=arriving
    )
