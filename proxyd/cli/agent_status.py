"""One agent as it sees itself, for ``proxyd status --agent`` and ``proxyd top --agent``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from proxyd.cli.asking import TIMEOUT_S, ask_agent
from proxyd.core.errors import EXIT_DEGRADED, EXIT_OK
from proxyd.core.units import format_duration, format_rate, format_size
from proxyd.runtime.json_values import as_plain

if TYPE_CHECKING:
    from rich.console import Group

    from proxyd.v1 import admin_pb2


def fetch(socket: str) -> admin_pb2.AgentStatusResponse:
    """Everything about the agent at a socket. Raises what :func:`~proxyd.cli.asking.ask_agent` does."""
    from proxyd.v1 import admin_pb2

    status: admin_pb2.AgentStatusResponse = ask_agent(
        socket, lambda stub: stub.AgentStatus(admin_pb2.AgentStatusRequest(), timeout=TIMEOUT_S)
    )
    return status


def is_well(status: admin_pb2.AgentStatusResponse) -> bool:
    """It takes messages, has a coordinator, and goes by grants."""
    reached = any(one.connected for one in status.coordinators)
    return reached and not status.draining and not any(link.fallback for link in status.links)


def status_of_agent(socket: str, *, as_json: bool) -> int:
    """Print it. Exit code 3 when the agent drains, has no coordinator or goes at its fallback rate."""
    status = fetch(socket)
    if as_json:
        print(json.dumps(as_plain(status), indent=2))
    else:
        from rich.console import Console

        width = None if sys.stdout.isatty() else 200
        Console(highlight=False, width=width).print(tables(status))
    return EXIT_OK if is_well(status) else EXIT_DEGRADED


def tables(status: admin_pb2.AgentStatusResponse) -> Group:
    """For people."""
    from rich.console import Group
    from rich.table import Table

    name = f"agent {status.agent.site}/{status.agent.name} {status.version}, pid {status.pid}"
    under_way = f"{status.outgoing_transfers} messages under way, {status.arriving_transfers} arriving"
    parts: list[str | Table] = [
        f"{name}, up {format_duration(status.uptime_ns)}, data {status.data_address}, {status.congestion_control}",
        f"{len(status.trainers)} trainers; {under_way}",
    ]
    if status.draining:
        parts.append(f"it drains: nothing new begins, {status.held_transfers} are held (proxyd undrain --agent)")
    if status.certificate:
        parts.append(f"TLS certificate {status.certificate}")
    coordinators = Table("coordinator", "session", box=None)
    for one in status.coordinators:
        coordinators.add_row(one.address, "stands" if one.connected else "lost")
    workers = Table("worker", "pid", "up", "trainers", "under way", "arriving", "session", box=None)
    for worker in status.workers:
        reached = sum(one.connected for one in worker.coordinators)
        workers.add_row(
            worker.agent.name,
            str(worker.pid or "-"),
            format_duration(worker.uptime_ns) if worker.pid else "does not answer",
            str(len(worker.trainers)),
            str(worker.outgoing_transfers),
            str(worker.arriving_transfers),
            f"with {reached} of {len(worker.coordinators)}" if worker.pid else "-",
        )
    if status.workers:
        parts.append(workers)
    links = Table("link", "rate", "from", "rtt", "backlog", "waiting", "granted", "goes by", box=None)
    for link in status.links:
        links.add_row(
            f"{link.link.src_site}->{link.link.dst_site}",
            format_rate(link.rate_bytes_per_s) if link.rate_bytes_per_s else "-",
            link.source or "-",
            format_duration(link.rtt_ns) if link.rtt_ns else "-",
            format_size(link.backlog_bytes),
            str(link.waiting_transfers),
            format_size(link.granted_bytes),
            "fallback: its coordinator is silent" if link.fallback else "grants",
        )
    peers = Table("peer", "address", "link", "streams", "rtt", "delivers", "path MTU", box=None)
    for peer in status.peers:
        peers.add_row(
            f"{peer.agent.site}/{peer.agent.name}",
            peer.address or "-",
            "up" if peer.connected else "not dialled, or down",
            str(peer.streams),
            format_duration(peer.rtt_ns) if peer.rtt_ns else "-",
            format_rate(peer.delivery_rate_bytes_per_s) if peer.delivery_rate_bytes_per_s else "-",
            str(peer.path_mtu or "-"),
        )
    return Group(*parts, coordinators, links if status.links else "no links yet", peers if status.peers else "no peers")
