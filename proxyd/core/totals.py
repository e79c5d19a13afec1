"""What happened on a link since its coordinator began."""

from __future__ import annotations

import dataclasses

from proxyd.core.lanes import Lane
from proxyd.wire.envelope import TrafficClass


@dataclasses.dataclass(slots=True)
class LinkTotals:
    """What happened on a link since the coordinator began; never decreases."""

    grants: int = 0
    granted_bytes: int = 0
    returned_bytes: int = 0
    delivered_bytes: int = 0
    forgiven_bytes: int = 0
    unscheduled_bytes: int = 0
    fallback_bytes: int = 0
    retransmits: int = 0
    clamped_reports: int = 0
    handovers: int = 0
    starvation_turns: int = 0
    class_bytes: list[int] = dataclasses.field(default_factory=lambda: [0] * len(TrafficClass))
    """Payload of finished transfers, by class."""

    def add(self, lane: Lane) -> None:
        """Add what a lane's account says."""
        account = lane.account
        self.returned_bytes += account.returned_bytes
        self.delivered_bytes += account.delivered_bytes
        self.unscheduled_bytes += account.unscheduled_bytes
        self.fallback_bytes += account.fallback_bytes
        self.retransmits += account.retransmits
        self.clamped_reports += account.clamped_reports
