"""What a coordinator tells of itself: plain values for the admin service, the metrics and the tests."""

from __future__ import annotations

import dataclasses

from proxyd.core.allocation import LinkQueue
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.jobs import JobAccount
from proxyd.core.messages import DirectoryEntry
from proxyd.core.shadow import ShadowStatus
from proxyd.core.sharing import BottleneckStatus
from proxyd.core.totals import LinkTotals
from proxyd.wire.envelope import TrafficClass


@dataclasses.dataclass(frozen=True, slots=True)
class LaneStatus:
    """What one agent holds on a link."""

    agent: AgentName
    session: int
    rate_bytes_per_s: int
    """The part of the link that its grants let it use now; lanes that are leaving have passed theirs on."""
    reserve_bytes_per_s: int
    """Kept free for an agent whose session was lost: it may send so much by itself."""
    ceiling_bytes_per_s: int
    """What it has shown that it can send; 0: no limit known."""
    outstanding_bytes: int
    leaving: bool
    ended: bool


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingStatus:
    """A transfer that waits for grants."""

    transfer: TransferId
    agent: AgentName
    destination: AgentName
    job: str
    traffic: TrafficClass
    wanted_bytes: int
    granted_bytes: int
    waited_ns: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class JobStatus:
    """One job on one link, as the policy has it and as it fares."""

    name: str
    weight: float
    floor_bytes_per_s: int
    cap_bytes_per_s: int
    """0: none."""
    waiting: int
    waiting_bytes: int
    granted_bytes: int
    """Since it was first seen; jobs that are over are forgotten when there are many."""
    held_back: bool
    """Its cap is used up for the moment."""

    @classmethod
    def of(cls, queue: LinkQueue, account: JobAccount) -> JobStatus:
        """As its account stands."""
        return cls(
            account.name,
            account.weight,
            account.floor_bytes_per_s,
            account.cap_bytes_per_s,
            account.count,
            sum(one.need_bytes for one in queue.queues_of(account)),
            account.granted_bytes,
            account.throttled,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LinkStatus:
    """One link."""

    link: LinkName
    source: str
    pace_bytes_per_s: int
    bottleneck_bytes_per_s: int
    rtt_ns: int
    queue_ns: int
    buffer_bytes: int
    window_bytes: int
    outstanding_bytes: int
    slot_bytes: int
    chunk_bytes: int
    waiting: int
    waiting_bytes: int
    lanes: tuple[LaneStatus, ...]
    transfers: tuple[WaitingStatus, ...]
    """The first ones in line (see ``CoordinatorMachine.status``)."""
    window_violations: int
    fallback_bytes_per_s: int
    """Sum of what agents may send by themselves."""
    totals: LinkTotals
    last_reason: str
    shadow: ShadowStatus | None = None
    """In observe mode."""
    jobs: tuple[JobStatus, ...] = ()
    """By name."""
    limit_bytes_per_s: int = 0
    """What the policy allows now, payload; 0: no limit."""
    estimate_age_ns: int = 0
    """Since the estimate was last confirmed; a configured one has no age."""
    segment_bytes: int = 0
    """Payload of a full packet, for shares of losses."""

    @property
    def granted_rate_bytes_per_s(self) -> int:
        """Sum of the rates of lanes that are not leaving: at most the pace."""
        return sum(lane.rate_bytes_per_s for lane in self.lanes if not lane.leaving)


@dataclasses.dataclass(frozen=True, slots=True)
class AgentStatus:
    """One agent with an open session."""

    agent: AgentName
    session: int
    incarnation: int
    data_address: str
    endpoints: int
    transfers: int
    """Requested and not done."""
    heard_ago_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """A coordinator."""

    name: str
    epoch: int
    owns: tuple[str, ...]
    agents: tuple[AgentStatus, ...]
    endpoints: tuple[DirectoryEntry, ...]
    links: tuple[LinkStatus, ...]
    protocol_errors: int
    bottlenecks: tuple[BottleneckStatus, ...] = ()
