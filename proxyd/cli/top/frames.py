"""One look at a daemon, what changed since the look before, and how it is drawn."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from proxyd.cli.asking import TIMEOUT_S, ask_coordinator
from proxyd.core.units import format_duration, format_rate, format_size
from proxyd.runtime.json_values import as_plain
from proxyd.wire.envelope import TransferId

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from proxyd.v1 import admin_pb2

GREEN_SHARE = 0.9
"""A link that waits for nothing and delivers this part of its rate is well used."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """One picture. Exactly one of the two statuses is there.

    :param delivered: bytes/s by link, since the look before; empty at the first.
    """

    at_s: float
    coordinator: admin_pb2.StatusResponse | None = None
    agent: admin_pb2.AgentStatusResponse | None = None
    delivered: dict[str, float] = dataclasses.field(default_factory=dict)
    problem: str = ""
    """Why the picture is an old one."""

    def totals(self) -> dict[str, int]:
        """What each link has carried so far: delivered in all, or granted and sent by this agent."""
        if self.coordinator is not None:
            links = self.coordinator.links
            return {
                _link(one.link): one.totals.delivered_bytes + one.totals.unscheduled_bytes + one.totals.fallback_bytes
                for one in links
            }
        assert self.agent is not None
        return {_link(one.link): one.granted_bytes + one.fallback_bytes for one in self.agent.links}

    def since(self, before: Frame) -> Frame:
        """With the rates between that look and this one. A daemon that was started anew counts from zero."""
        span_s = self.at_s - before.at_s
        earlier = before.totals()
        rates = {
            name: max(0, total - earlier.get(name, total)) / span_s
            for name, total in self.totals().items()
            if span_s > 0
        }
        return dataclasses.replace(self, delivered=rates)

    def without_answer(self, problem: str) -> Frame:
        """The picture of before, and why there is no newer one."""
        return dataclasses.replace(self, problem=problem)

    def plain(self) -> dict[str, Any]:
        """For programs: the status as ``proxyd status --json`` has it, and the measured rates."""
        status = self.coordinator if self.coordinator is not None else self.agent
        return {
            "at_seconds": self.at_s,
            "delivered_bytes_per_s": {name: round(rate) for name, rate in self.delivered.items()},
            "problem": self.problem,
            "status": as_plain(status),
        }


def look_at_coordinator(address: str | None) -> Frame:
    """Ask a coordinator. Raises what :func:`~proxyd.cli.asking.ask_coordinator` does."""
    from proxyd.v1 import admin_pb2

    status: admin_pb2.StatusResponse = ask_coordinator(
        address, lambda stub: stub.Status(admin_pb2.StatusRequest(), timeout=TIMEOUT_S)
    )
    return Frame(time.monotonic(), coordinator=status)


def look_at_agent(socket: str) -> Frame:
    """Ask an agent. Raises what :func:`~proxyd.cli.asking.ask_agent` does."""
    from proxyd.cli.agent_status import fetch

    return Frame(time.monotonic(), agent=fetch(socket))


def _link(name: Any) -> str:
    return f"{name.src_site}->{name.dst_site}"


def _agent(name: Any) -> str:
    return f"{name.site}/{name.name}"


def picture(frame: Frame, rows: int) -> RenderableType:
    """For people; ``rows``: the most transfers that are shown."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if frame.problem:
        parts.append(Text(f"this is an old picture: {frame.problem}", "red"))
    if frame.coordinator is not None:
        parts += _of_coordinator(frame, frame.coordinator, rows)
    elif frame.agent is not None:
        from proxyd.cli.agent_status import tables

        parts += [tables(frame.agent), _sent(frame)]
    return Group(*parts)


def _sent(frame: Frame) -> str:
    rates = [f"{name} {format_rate(round(rate))}" for name, rate in frame.delivered.items()]
    return f"sent: {', '.join(rates) or 'nothing'}"


def _of_coordinator(frame: Frame, status: admin_pb2.StatusResponse, rows: int) -> list[RenderableType]:
    from rich.text import Text

    transfers = sum(agent.transfers for agent in status.agents)
    head = Text(
        f"proxyd {status.coordinator} {status.version}  up {format_duration(status.uptime_ns)}  "
        f"{len(status.agents)} agents  {len(status.endpoints)} trainers  {transfers} transfers",
        "bold",
    )
    parts: list[RenderableType] = [head]
    if status.draining:
        parts.append(Text(f"it drains: no new transfer begins, {status.held_transfers} are held", "yellow"))
    parts += [_links(frame, status), Text("sending", "bold"), _senders(status)]
    waiting = [(link, one) for link in status.links for one in link.waiting]
    count = sum(link.waiting_transfers for link in status.links)
    parts.append(Text(f"waiting: {count or 'nobody'}", "bold"))
    if waiting and rows:
        waiting.sort(key=lambda item: -item[1].waited_ns)
        parts.append(_waiting(waiting[:rows]))
    return parts


def _links(frame: Frame, status: admin_pb2.StatusResponse) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("link", "may carry", "from", "delivers", "used", "rtt", "queue", "window", box=None)
    for link in status.links:
        name = _link(link.link)
        rate = frame.delivered.get(name, 0.0)
        share = rate / link.pace_bytes_per_s if link.pace_bytes_per_s else 0.0
        full = link.outstanding_bytes / link.window_bytes if link.window_bytes else 0.0
        style = "green" if share >= GREEN_SHARE else "yellow" if link.waiting_transfers else ""
        table.add_row(
            name,
            format_rate(link.pace_bytes_per_s),
            "observed" if link.observe else link.source,
            format_rate(round(rate)),
            Text(f"{100 * share:3.0f} % {_bar(share)}", style),
            format_duration(link.rtt_ns),
            format_duration(link.queue_ns),
            f"{format_size(link.outstanding_bytes)} of {format_size(link.window_bytes)} {_bar(full, 5)}",
        )
    return table


def _bar(share: float, width: int = 10) -> str:
    filled = round(min(1.0, share) * width)
    return "█" * filled + "·" * (width - filled)


def _senders(status: admin_pb2.StatusResponse) -> RenderableType:
    from rich.table import Table

    table = Table("link", "agent", "rate", "granted, not delivered", "", box=None)
    for link in status.links:
        for lane in link.lanes:
            if lane.outstanding_bytes:
                table.add_row(
                    _link(link.link),
                    _agent(lane.agent),
                    format_rate(lane.rate_bytes_per_s),
                    format_size(lane.outstanding_bytes),
                    "leaving: the next one follows" if lane.leaving else "",
                )
    return table if table.row_count else "nobody"


def _waiting(waiting: list[tuple[admin_pb2.LinkStatus, admin_pb2.WaitingStatus]]) -> Table:
    from rich.table import Table

    from proxyd.cli.status import traffic_label

    table = Table("transfer", "link", "agent", "job", "class", "size", "granted", "waits", "why", box=None)
    for link, one in waiting:
        share = 100 * one.granted_bytes / one.wanted_bytes if one.wanted_bytes else 0.0
        table.add_row(
            str(TransferId(one.transfer.incarnation, one.transfer.sequence)),
            _link(link.link),
            _agent(one.agent),
            one.job or "(warming)",
            traffic_label(one.traffic),
            format_size(one.wanted_bytes),
            f"{share:.0f} %",
            format_duration(one.waited_ns),
            one.reason,
        )
    return table
