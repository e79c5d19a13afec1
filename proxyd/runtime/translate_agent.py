"""An agent's status and pings as protobuf, for the AgentAdmin service; under the same rule as
:mod:`proxyd.runtime.translate_admin`: no other module sees both forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from proxyd.core.ids import AgentName, EndpointName, LinkName
from proxyd.runtime.translate import TranslateError
from proxyd.v1 import admin_pb2, coordination_pb2

MAX_PINGS = 100
MAX_INTERVAL_MS = 10_000


class PeerTold(NamedTuple):
    """An agent that this one sends to, or knows of."""

    agent: AgentName
    address: str
    connected: bool = False
    streams: int = 0
    rtt_ns: int = 0
    delivery_rate_bytes_per_s: int = 0
    path_mtu: int = 0


class LinkTold(NamedTuple):
    """A link as this agent sends on it."""

    link: LinkName
    coordinator: str
    fallback: bool
    rate_bytes_per_s: int
    rtt_ns: int
    source: str
    backlog_bytes: int
    waiting_transfers: int
    granted_bytes: int
    fallback_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class AgentTold:
    """Everything about one agent."""

    agent: AgentName
    version: str
    incarnation: int
    uptime_ns: int
    pid: int
    socket: str
    data_address: str
    draining: bool
    held_transfers: int
    outgoing_transfers: int
    arriving_transfers: int
    trainers: Sequence[EndpointName]
    coordinators: Sequence[tuple[str, bool]]
    peers: Sequence[PeerTold]
    links: Sequence[LinkTold]
    certificate: str
    congestion_control: str


class PingWanted(NamedTuple):
    """Whom to ping, and how often."""

    peer: AgentName
    address: str
    """"": as the coordinators say."""
    pings: int
    interval_ns: int


@dataclasses.dataclass(slots=True)
class PingTold:
    """What came of it."""

    peer: AgentName
    address: str = ""
    dialled: bool = False
    rtts_ns: list[int] = dataclasses.field(default_factory=list)
    sent: int = 0
    large_rtt_ns: int = 0
    large_bytes: int = 0
    path_mtu: int = 0
    segment_bytes: int = 0
    delivery_rate_bytes_per_s: int = 0
    streams: int = 0
    link: LinkTold | None = None
    error: str = ""


def _agent(name: AgentName) -> coordination_pb2.AgentName:
    return coordination_pb2.AgentName(site=name.site, name=name.name)


def _link(told: LinkTold) -> admin_pb2.AgentLink:
    values = told._asdict()
    name = values.pop("link")
    return admin_pb2.AgentLink(link=coordination_pb2.LinkName(src_site=name.src_site, dst_site=name.dst_site), **values)


def agent_status_response(told: AgentTold) -> admin_pb2.AgentStatusResponse:
    """Everything at a glance."""
    return admin_pb2.AgentStatusResponse(
        agent=_agent(told.agent),
        version=told.version,
        incarnation=told.incarnation,
        uptime_ns=told.uptime_ns,
        pid=told.pid,
        socket=told.socket,
        data_address=told.data_address,
        draining=told.draining,
        held_transfers=told.held_transfers,
        outgoing_transfers=told.outgoing_transfers,
        arriving_transfers=told.arriving_transfers,
        trainers=[coordination_pb2.EndpointName(job=one.job, rank=one.rank) for one in told.trainers],
        coordinators=[admin_pb2.ControlSession(address=address, connected=up) for address, up in told.coordinators],
        peers=[
            admin_pb2.PeerStatus(
                agent=_agent(one.agent),
                address=one.address,
                connected=one.connected,
                streams=one.streams,
                rtt_ns=one.rtt_ns,
                delivery_rate_bytes_per_s=one.delivery_rate_bytes_per_s,
                path_mtu=one.path_mtu,
            )
            for one in told.peers
        ],
        links=[_link(one) for one in told.links],
        certificate=told.certificate,
        congestion_control=told.congestion_control,
    )


def wanted_ping(request: admin_pb2.PingRequest) -> PingWanted:
    """Raises TranslateError for a request that names nobody, or that would go on for too long."""
    if not request.peer.site or not request.peer.name:
        raise TranslateError("the request names no agent (SITE/NAME)")
    if not 1 <= request.count <= MAX_PINGS or request.interval_ms > MAX_INTERVAL_MS:
        raise TranslateError(f"1 to {MAX_PINGS} pings, at most {MAX_INTERVAL_MS} ms apart, are possible")
    peer = AgentName(request.peer.site, request.peer.name)
    return PingWanted(peer, request.address, request.count, request.interval_ms * 1_000_000)


def ping_response(told: PingTold) -> admin_pb2.PingResponse:
    """What came of a ping."""
    return admin_pb2.PingResponse(
        peer=_agent(told.peer),
        address=told.address,
        dialled=told.dialled,
        rtt_ns=told.rtts_ns,
        sent=told.sent,
        large_rtt_ns=told.large_rtt_ns,
        large_bytes=told.large_bytes,
        path_mtu=told.path_mtu,
        segment_bytes=told.segment_bytes,
        delivery_rate_bytes_per_s=told.delivery_rate_bytes_per_s,
        streams=told.streams,
        link=None if told.link is None else _link(told.link),
        error=told.error,
    )
