"""Proof by counters: the daemons' own metrics must show that the bytes crossed two agents under grants."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from proxyd.cli.scrape import scrape

if TYPE_CHECKING:
    from proxyd.cli.cluster import Cluster


@dataclass(frozen=True)
class Counters:
    """Sums over the agents of one direction's sites, in payload bytes unless the name says otherwise."""

    transfer_bytes: int
    """Acknowledged end to end, as the sending agents count."""
    received_bytes: int
    """Landed and verified at the receiving agents."""
    granted_bytes: int
    """Granted by the coordinator, as the sending agents count."""
    fallback_bytes: int
    """Sent without a coordinator's grant."""
    unscheduled_bytes: int
    """Of small messages, which need no grant."""
    corrupt_chunks: int
    window_violations: int
    """Times at which more was granted than the link's window allows."""
    handovers: int
    """Grants that went to another agent than the one before."""

    def since(self, earlier: Counters) -> Counters:
        """What was added after ``earlier``."""
        return Counters(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def problems(self, payload_bytes: int) -> list[str]:
        """In words, what speaks against ``payload_bytes`` having crossed under grants; empty if nothing does."""
        found = [
            f"{name} is {value:,}, less than the {payload_bytes:,} bytes that were sent"
            for name in ("transfer_bytes", "received_bytes", "granted_bytes")
            if (value := getattr(self, name)) < payload_bytes
        ]
        found += [
            f"{name} is {value:,}, should be 0"
            for name in ("fallback_bytes", "corrupt_chunks", "window_violations")
            if (value := getattr(self, name))
        ]
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def read_counters(cluster: Cluster, src: str, dst: str) -> Counters:
    """Scrape all daemons. Raises OSError if one doesn't answer."""
    link = f"{src}->{dst}"
    senders = [scrape(agent.metrics) for agent in cluster.agents if agent.site == src]
    receivers = [scrape(agent.metrics) for agent in cluster.agents if agent.site == dst]
    coordinator = scrape(cluster.coordinator.metrics)

    def total(name: str) -> int:
        return int(sum(page.total(name, link=link) for page in senders))

    return Counters(
        transfer_bytes=total("proxyd_transfer_bytes_total"),
        received_bytes=int(sum(page.total("proxyd_received_bytes_total") for page in receivers)),
        granted_bytes=total("proxyd_granted_bytes_total"),
        fallback_bytes=total("proxyd_fallback_bytes_total"),
        unscheduled_bytes=total("proxyd_unscheduled_bytes_total"),
        corrupt_chunks=int(sum(page.total("proxyd_corrupt_chunks_total") for page in receivers)),
        window_violations=int(coordinator.total("proxyd_window_violations_total", link=link)),
        handovers=int(coordinator.total("proxyd_handovers_total", link=link)),
    )
