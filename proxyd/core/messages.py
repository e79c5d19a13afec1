"""What agents and coordinators say to each other, as plain values.

The daemon carries these over gRPC (``runtime.translate`` is the only file that knows both forms), the simulator over
modelled delay. Time crosses only as a duration (``*_in_ns``, ``ttl_ns``): each side anchors it to its own monotonic
clock on arrival.

**Accounts.** For each (agent, link) both sides keep cumulative counts of *granted payload bytes* since the agent's
session with the coordinator began::

    granted  = returned + untaken + taken                (coordinator knows granted; agent reports the rest)
    taken    = unsent in the kernel + in flight + delivered
    left     = taken - unsent

``outstanding = granted - returned - delivered`` is what the link's window limits. Cumulative counts make a lost or
merged report harmless: the newest says everything.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.permissions import EVERYTHING, Permissions
from proxyd.wire.envelope import TrafficClass
from proxyd.wire.values import value

# ---------------------------------------------------------------------------- agent -> coordinator


@dataclasses.dataclass(frozen=True, slots=True)
class AgentHello:
    """First message of a session (after authentication)."""

    agent: AgentName
    incarnation: int
    data_address: str
    """``host:port`` that peer agents dial."""
    epoch_seen: int = 0
    """Last epoch of this coordinator that the agent knows; 0: none."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointUp:
    """A trainer attached to this agent. The newest incarnation of an endpoint wins."""

    endpoint: EndpointName
    incarnation: int
    age_ns: int = 0
    """Since it attached. It orders the lives of one endpoint, wherever and in whatever order they are registered."""


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointDown:
    """A trainer is gone (its process died, or it closed)."""

    endpoint: EndpointName
    incarnation: int
    reason: str


@value(frozen=True, slots=True)
class Request:
    """Ask for grants. ``wanted_bytes`` is the transfer's total so far (cumulative: re-sent chunks raise it), so a
    repeated request is harmless."""

    transfer: TransferId
    link: LinkName
    destination: AgentName
    job: str
    traffic: TrafficClass
    wanted_bytes: int
    announcement: int = 0
    """The Announce that this request fulfils; it keeps its place in the queue. 0: none."""
    deadline_in_ns: int = 0
    """Wanted at the receiver within this time; 0: as soon as its turn comes."""
    chunk_bytes: int = 0
    """What the transfer was cut into: a grant of less is of no use to it. 0: as LinkInfo says."""


@dataclasses.dataclass(frozen=True, slots=True)
class Announce:
    """A transfer whose data will exist in ``ready_in_ns``. With ``nbytes`` 0 it is withdrawn: it will not come, or it
    needs no grants, and what was granted ahead to it goes back."""

    announcement: int
    link: LinkName
    job: str
    traffic: TrafficClass
    nbytes: int
    ready_in_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class CancelRequest:
    """The transfer needs no more grants; what it held unspent shows up in the next report's ``returned_bytes``."""

    transfer: TransferId
    reason: str


@value(frozen=True, slots=True)
class TransferDone:
    """Acknowledged end to end, or failed."""

    transfer: TransferId
    link: LinkName
    traffic: TrafficClass
    nbytes: int
    ok: bool
    arrival_span_ns: int
    """Last minus first arrival at the receiver; 0 when unknown."""


@value(frozen=True, slots=True)
class Report:
    """State of this agent's sending on one link; every max(5 ms, RTT/16) while it sends, and at each switch.

    Counts are cumulative over the session (see the module's text); rates and times are of now.
    """

    link: LinkName
    left_bytes: int
    delivered_bytes: int
    returned_bytes: int
    unscheduled_bytes: int
    fallback_bytes: int
    backlog_bytes: int
    """Granted and not yet left: untaken + unsent in the kernel."""
    leaves_in_ns: int
    """When the backlog will have left at the present pace; 0 when there is none."""
    srtt_ns: int
    min_rtt_ns: int
    retransmits: int
    """Segments retransmitted, cumulative."""
    delivery_rate_bytes_per_s: int
    """TCP's own estimate, summed over streams; equals the pace below capacity (no evidence of capacity)."""
    limited: bool
    """The agent had granted bytes to send during the whole interval: its delivery says something about the path."""
    observed_left_bytes: int = 0
    observed_delivered_bytes: int = 0
    """The same as ``left`` and ``delivered``, of what was sent without grants because the link is only observed."""
    window_bytes: int = 0
    """TCP's congestion windows, summed over the streams to the peer whose turn it is: no more leaves in a round trip,
    whatever is granted. 0: not known."""
    sacked_bytes: int = 0
    """Arrived behind a hole: acknowledged selectively, and not counted as delivered yet."""
    lost_bytes: int = 0
    """Left, taken for lost by TCP, and not sent again yet: not in flight any more."""
    elapsed_ns: int = 0
    """On the agent's clock, between the reading of the kernel's counters that this report tells and the one that its
    last report told; 0: they are the same, or this is the first. Hosts that are held up delay reports, but not this.
    """
    back_queue_ns: int = 0
    """So much of ``srtt_ns`` is queue of the other direction, which acknowledgements waited in; 0 also when it isn't
    known."""


@value(frozen=True, slots=True)
class Echo:
    """Answer to a beat, at once: what the coordinator measures this agent's control round trip from."""

    number: int
    held_ns: int
    """Between the beat's arrival and this answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """What an earlier life of a link's owner left with this agent. Said when a session begins, before its requests."""

    link: LinkName
    fallback_bytes_per_s: int
    """What it was allowed to send by itself until now."""
    fallback_total_bytes_per_s: int
    """The same of all agents together."""
    unsent_bytes: int
    """In the kernel and not left yet, granted or not, and what is left of a slot of its own: it goes on leaving."""
    unsent_rate_bytes_per_s: int
    estimate_bytes_per_s: int = 0
    """The link's rate as it was last told; 0: none that was found from live transfers."""
    estimate_age_ns: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Agents that a beat called missing and that this one has connections with: they are alive."""

    agents: tuple[AgentName, ...]


AgentMessage: TypeAlias = (
    AgentHello
    | EndpointUp
    | EndpointDown
    | Request
    | Announce
    | CancelRequest
    | TransferDone
    | Report
    | Echo
    | Carried
    | Seen
)

# ---------------------------------------------------------------------------- coordinator -> agent


@value(frozen=True, slots=True)
class LinkInfo:
    """What the coordinator knows of a link, and the sizes that follow from it."""

    link: LinkName
    rate_bytes_per_s: int
    rtt_ns: int
    buffer_bytes: int
    queue_ns: int
    slot_bytes: int
    chunk_bytes: int
    """Grants are whole multiples of it (or the rest of a transfer); agents cut transfers into chunks of it."""
    waiting_bytes: int
    age_ns: int
    source: str
    """Where the figures come from: "configured", "default", "estimated", "policed"."""
    confidence: float = 1.0
    """0 (a guess) to 1 (measured now, or told by the operator)."""
    observe: bool = False
    """Shadow mode: send at once and don't wait for grants, but ask and report as always."""
    fallback_bytes_per_s: int = 0
    """What all agents together may send by themselves; 0: not known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
    """The session stands."""

    coordinator: str
    epoch: int
    owns: tuple[str, ...]
    beat_ns: int
    lease_ns: int
    links: tuple[LinkInfo, ...]
    fence: int = 0
    """Of the lock that this coordinator holds: rises from holder to holder. Of two with one name the higher one counts.
    0: there is no lock, and one coordinator of this name."""
    permissions: Permissions = EVERYTHING
    """Which job may use what; comes again by itself whenever that changes."""


@value(frozen=True, slots=True)
class Queued:
    """Immediate answer to a Request: queued is not dead. ``starts_in_ns``: predicted start of its first slot."""

    transfer: TransferId
    position: int
    starts_in_ns: int
    finishes_in_ns: int
    reason: str


@value(frozen=True, slots=True)
class Grant:
    """Permission to send ``nbytes`` more of ``transfer`` at ``rate_bytes_per_s``, not before ``start_in_ns``, and to
    begin within ``ttl_ns``; what is unspent then is returned."""

    grant: int
    transfer: TransferId
    link: LinkName
    nbytes: int
    rate_bytes_per_s: int
    start_in_ns: int
    ttl_ns: int
    epoch: int
    lead_ns: int
    """Say ``leaves_in_ns`` this long before the last granted byte leaves."""
    reason: str
    announcement: int = 0
    """Granted ahead to this announcement of the agent, which binds it when the message is posted; ``transfer`` is then
    the null one. 0: granted to ``transfer``."""


@value(frozen=True, slots=True)
class Pace:
    """From now on everything that the agent holds on a link goes at this rate, whatever its grants say: the bottleneck
    changed, and waiting for the next grant would fill the gateway's queue meanwhile. Void under another epoch."""

    link: LinkName
    rate_bytes_per_s: int
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Denied:
    """No grant will come: a result with a reason, not an exception."""

    transfer: TransferId
    reason: str


@value(frozen=True, slots=True)
class Beat:
    """The coordinator lives; also hands out what the agent may send by itself when beats stop, and fresh link
    figures."""

    epoch: int
    fallback: tuple[tuple[LinkName, int], ...]
    """(link, rate_bytes_per_s) of this agent; over all agents <= 0.8 x the link's estimate."""
    links: tuple[LinkInfo, ...]
    number: int = 0
    """Of this beat, for its echo; 0: none is wanted."""
    missing: tuple[AgentName, ...] = ()
    """Agents of which nothing is heard; those that others see are alive (:class:`Seen`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """Where an endpoint lives."""

    endpoint: EndpointName
    incarnation: int
    agent: AgentName
    agent_incarnation: int
    data_address: str
    age_ns: int = dataclasses.field(default=0, compare=False)
    """Of this life of the endpoint, when this was said. No part of what makes an entry another one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Directory:
    """Endpoints that came (or changed) and went. ``full``: everything else is gone."""

    entries: tuple[DirectoryEntry, ...]
    gone: tuple[tuple[EndpointName, int, str], ...]
    """(endpoint, incarnation, reason)."""
    full: bool
    unsure: tuple[EndpointName, ...] = ()
    """Those of ``gone`` of which only the agent was lost sight of: their processes may live."""


CoordinatorMessage: TypeAlias = Welcome | Permissions | Queued | Grant | Pace | Denied | Beat | Directory
