"""``proxyd status``: links, grants and agents of a running coordinator, or one agent as it sees itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from proxyd.cli.asking import TIMEOUT_S, add_agent, add_coordinator, ask_coordinator
from proxyd.core.errors import EXIT_DEGRADED, EXIT_OK
from proxyd.core.units import format_duration, format_rate, format_size
from proxyd.runtime.json_values import as_plain

if TYPE_CHECKING:
    from rich.console import Console

    from proxyd.v1 import admin_pb2, coordination_pb2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whom = parser.add_mutually_exclusive_group()
    add_coordinator(whom)
    add_agent(whom)
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--why", metavar="TRANSFER", help="the same as proxyd why TRANSFER")


def run(args: argparse.Namespace) -> int:
    """Exit code 3 (degraded) when no agent is there."""
    if args.why:
        from proxyd.cli.why import why_of_coordinator

        return why_of_coordinator(args.why, args.coordinator, as_json=args.json)
    if args.agent is not None:
        from proxyd.cli.agent_status import status_of_agent

        return status_of_agent(args.agent, as_json=args.json)
    return ask_coordinator(args.coordinator, lambda stub: _status(stub, args))


def _status(stub: Any, args: argparse.Namespace) -> int:
    from proxyd.v1 import admin_pb2

    status: admin_pb2.StatusResponse = stub.Status(admin_pb2.StatusRequest(), timeout=TIMEOUT_S)
    if args.json:
        print(json.dumps(as_plain(status), indent=2))
    else:
        print_status(status)
    return EXIT_OK if status.agents else EXIT_DEGRADED


def _agent(name: coordination_pb2.AgentName) -> str:
    return f"{name.site}/{name.name}"


def _has_rule(jobs: Sequence[admin_pb2.JobStatus]) -> bool:
    return any(job.floor_bytes_per_s or job.cap_bytes_per_s or job.weight != 1 for job in jobs)


def _print_jobs(console: Console, jobs: Sequence[tuple[admin_pb2.LinkStatus, admin_pb2.JobStatus]]) -> None:
    """Who got how much of each link, beside what the policy says."""
    from rich.table import Table

    table = Table("job", "link", "weight", "floor", "cap", "granted", "of the link", "waiting", box=None)
    for link, job in jobs:
        total = sum(one.granted_bytes for one in link.jobs)
        cap = format_rate(job.cap_bytes_per_s) if job.cap_bytes_per_s else "-"
        table.add_row(
            job.name,
            f"{link.link.src_site}->{link.link.dst_site}",
            f"{job.weight:g}",
            format_rate(job.floor_bytes_per_s) if job.floor_bytes_per_s else "-",
            f"{cap} (used up)" if job.held_back else cap,
            format_size(job.granted_bytes),
            f"{100 * job.granted_bytes / total:.1f} %" if total else "-",
            f"{job.waiting_transfers} ({format_size(job.waiting_bytes)})" if job.waiting_transfers else "0",
        )
    console.print(table)


def print_status(status: admin_pb2.StatusResponse) -> None:
    """Tables for people."""
    from rich.console import Console
    from rich.table import Table

    # In a pipe nothing is cut to a terminal's width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(
        f"coordinator {status.coordinator} {status.version}, epoch {status.epoch}, "
        f"up {format_duration(status.uptime_ns)}, owns {', '.join(status.owns)}"
    )
    if status.draining:
        console.print(f"it drains: no new transfer begins, {status.held_transfers} are held (proxyd undrain ends that)")
    if status.certificate:
        console.print(f"TLS certificate {status.certificate}")
    links = Table(
        "link", "rate", "from", "granted", "rtt", "queue", "window", "outstanding", "waiting", "sender", box=None
    )
    for link in status.links:
        senders = ", ".join(f"{_agent(lane.agent)} {format_rate(lane.rate_bytes_per_s)}" for lane in link.lanes)
        links.add_row(
            f"{link.link.src_site}->{link.link.dst_site}",
            format_rate(link.pace_bytes_per_s),
            link.source,
            format_size(link.totals.granted_bytes),
            format_duration(link.rtt_ns),
            format_duration(link.queue_ns),
            format_size(link.window_bytes),
            format_size(link.outstanding_bytes),
            f"{link.waiting_transfers} ({format_size(link.waiting_bytes)})" if link.waiting_transfers else "0",
            senders or "-",
        )
    console.print(links if status.links else "no links yet")
    told = [link for link in status.links if len(link.jobs) > 1 or _has_rule(link.jobs)]
    if told:
        _print_jobs(console, [(link, job) for link in told for job in link.jobs])
    for link in status.links:
        for item in link.waiting[:3]:
            console.print(
                f"  {item.transfer.incarnation:016x}-{item.transfer.sequence} of {_agent(item.agent)} waits "
                f"{format_duration(item.waited_ns)}: {item.reason}"
            )
    if any(link.observe for link in status.links):
        print_shadow(console, status.links)
    agents = Table("agent", "data address", "endpoints", "transfers", "heard", box=None)
    for agent in status.agents:
        agents.add_row(
            _agent(agent.agent),
            agent.data_address,
            str(agent.endpoints),
            str(agent.transfers),
            f"{format_duration(agent.heard_ago_ns)} ago",
        )
    console.print(agents if status.agents else "no agents")


def print_shadow(console: Console, links: Iterable[admin_pb2.LinkStatus]) -> None:
    """Links in observe mode: how it is, and how it would have been under grants."""
    from rich.table import Table

    table = Table("observed", "class", "transfers", "now: mean", "p50", "p99", box=None)
    for name in ("granted: mean", "p50", "p99", "change of mean", "of p99", "would wait"):
        table.add_column(name)
    for link in links:
        name = f"{link.link.src_site}->{link.link.dst_site}"
        for one in link.shadow.classes:
            real, shadow = one.real, one.shadow
            table.add_row(
                name,
                traffic_label(one.traffic),
                str(real.count),
                *(format_duration(ns) for ns in (real.mean_ns, real.p50_ns, real.p99_ns)),
                *(format_duration(ns) for ns in (shadow.mean_ns, shadow.p50_ns, shadow.p99_ns)),
                _change(real.mean_ns, shadow.mean_ns),
                _change(real.p99_ns, shadow.p99_ns),
                format_duration(one.wait.mean_ns),
            )
    console.print(table if table.row_count else "observed links: no transfer has ended both ways yet")
    for link in links:
        if not link.observe:
            continue
        found = link.shadow
        now, granted = (format_duration(queue.p99_ns) for queue in (found.real_queue, found.shadow_queue))
        console.print(
            f"  {link.link.src_site}->{link.link.dst_site}: queue p99 now {now}, under grants {granted}; "
            f"{link.totals.retransmits} segments sent again; {found.open_transfers} transfers under way"
        )
        if found.abandoned:
            console.print(
                f"  the shadow lost {found.abandoned} transfers: the link carries more than the coordinator believes; "
                "its capacity is configured too low"
            )


def traffic_label(traffic: int) -> str:
    """A traffic class of the wire as people write it."""
    from proxyd.v1 import coordination_pb2

    name = coordination_pb2.TrafficClass.Name(cast("coordination_pb2.TrafficClass.ValueType", traffic))
    return name.removeprefix("TRAFFIC_CLASS_").lower()


def _change(before_ns: int, after_ns: int) -> str:
    return f"{100 * (after_ns - before_ns) / before_ns:+.0f} %" if before_ns else "-"
