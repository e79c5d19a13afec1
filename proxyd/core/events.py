"""What happens to the two machines: every input they have besides time.

The daemon and the simulator both turn what they see into these and pass them to ``handle(event, now_ns)``. Payload
never appears; memory is named by (arena, offset).
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.core.messages import AgentMessage, CoordinatorMessage
from proxyd.core.policy import Policy
from proxyd.wire.envelope import Envelope
from proxyd.wire.peer import Frame as ControlFrame
from proxyd.wire.values import value

# ----------------------------------------------------------------------------------- both machines


@dataclasses.dataclass(frozen=True, slots=True)
class TimePassed:
    """``next_deadline_ns()`` has come (or may have: an early one is harmless)."""


# ---------------------------------------------------------------------------- coordinator machine


@dataclasses.dataclass(frozen=True, slots=True)
class SessionOpened:
    """An authenticated agent said hello. ``session`` is a number the driver never uses twice."""

    session: int
    message: AgentMessage


@value(frozen=True, slots=True)
class SessionMessage:
    """A message of an open session."""

    session: int
    message: AgentMessage


@dataclasses.dataclass(frozen=True, slots=True)
class SessionClosed:
    """The session's stream ended."""

    session: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyChanged:
    """What the operator wants of jobs and links, from now on: at start, and whenever it was read anew."""

    policy: Policy


@dataclasses.dataclass(frozen=True, slots=True)
class LocalTime:
    """Which minute of the week it is where the links' calendars count (0: Monday 00:00).

    Said at start, at each boundary of a window and at least once a minute, so that a stepped wall clock or a change to
    summer time is followed. The machine itself keeps no wall clock.
    """

    minute_of_week: int


CoordinatorEvent: TypeAlias = TimePassed | SessionOpened | SessionMessage | SessionClosed | PolicyChanged | LocalTime

# ----------------------------------------------------------------------------------- agent machine


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """What a trainer knows of one sender's messages from before this life of the agent; see
    :class:`proxyd.wire.client.Resume`."""

    rank: int
    incarnation: int
    highest: int
    delivered: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ClientAttached:
    """A trainer finished its hello. A known endpoint with another incarnation: the newest wins (the driver has
    checked the uid)."""

    endpoint: EndpointName
    incarnation: int
    past: tuple[Past, ...] | None = None
    """It comes from an earlier life of this agent, and knows this; None: it begins."""
    age_ns: int = 0
    """How long ago it attached for the first time."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClientDetached:
    """A trainer is gone. Its unacknowledged sends fail unless ``orderly`` (then they go on up to the linger time)."""

    endpoint: EndpointName
    incarnation: int
    reason: str
    orderly: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SendPosted:
    """A message from a local trainer; its block is the agent's until TellSendDone / TellSendFailed."""

    transfer: TransferId
    envelope: Envelope
    filled_bytes: int
    deadline_in_ns: int = 0
    """Wanted at the receiver within; 0: as soon as its turn comes."""
    again: bool = False
    """It was posted to an earlier life of this agent before: the receiver may have parts of it, or all."""
    dst_incarnation: int = 0
    """The only life of the receiver that may get it; 0: whichever is there."""
    handed_over: bool = False
    """The receiver is a trainer of this agent and has the block already: no AllocateBlock is to follow."""


@dataclasses.dataclass(frozen=True, slots=True)
class SendFilled:
    """More of a posted message is in its block."""

    transfer: TransferId
    filled_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class SendCancelled:
    """The trainer gave the message up."""

    transfer: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class SendAnnounced:
    """A message that a local trainer will post in ``ready_in_ns`` (envelope without dtype and shape)."""

    envelope: Envelope
    ready_in_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class RecvAccepted:
    """A local trainer posted the receive that an offered message without memory was waiting for."""

    transfer: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class RecvReleased:
    """A local trainer needs a received block no longer."""

    transfer: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class BlockAllocated:
    """Answer to AllocateBlock: memory in the receiver's arena."""

    transfer: TransferId
    arena: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class BlockDenied:
    """Answer to AllocateBlock: none now. The driver says BlockFreed when it is worth another try."""

    transfer: TransferId
    reason: str
    permanent: bool


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryFreed:
    """Receive memory of an endpoint became free: denied blocks may be asked for again."""

    endpoint: EndpointName


@dataclasses.dataclass(frozen=True, slots=True)
class PeerConnected:
    """The outgoing control connection to a peer agent stands."""

    peer: AgentName
    incarnation: int
    eager_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The outgoing connections to a peer failed or were closed; the driver dials again. ``silent_ns``: how long nothing
    had been heard of it by then."""

    peer: AgentName
    reason: str
    silent_ns: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """Dialling a peer failed; the driver goes on trying for as long as it is wanted."""

    peer: AgentName
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class InboundOpened:
    """A peer's control connection to this agent stands."""

    peer: AgentName
    incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class InboundClosed:
    """A peer's connections to this agent ended. ``silent_ns``: how long nothing had been heard of it by then."""

    peer: AgentName
    incarnation: int
    reason: str
    silent_ns: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PeerFrame:
    """A control frame. ``inbound``: it came on the connection that the peer dialled (it is the sender)."""

    peer: AgentName
    inbound: bool
    transfer: TransferId
    frame: ControlFrame


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk from a peer is in place; ``good``: its checksum held."""

    peer: AgentName
    transfer: TransferId
    offset: int
    length: int
    good: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SendProgress:
    """Cumulative counts over all data streams to one peer since it connected, from the kernel (SIOCOUTQ, TCP_INFO).

    ``granted_left_bytes``, ``granted_delivered_bytes``: payload of granted chunks that left this host / was
    acknowledged by TCP. ``unsent_bytes``: written to the kernel and not yet left. ``path_limited``: at this reading TCP
    itself (its congestion window, its own pacing) held bytes back, not our ceiling and not a lack of data.
    """

    peer: AgentName
    granted_left_bytes: int
    granted_delivered_bytes: int
    unsent_bytes: int
    srtt_ns: int
    min_rtt_ns: int
    retransmits: int
    delivery_rate_bytes_per_s: int
    path_limited: bool = True
    window_bytes: int = 0
    """Congestion windows, summed; 0: not known."""
    window_grows: bool = False
    """They are in slow start: another round trip doubles them."""
    sacked_bytes: int = 0
    """Acknowledged selectively, behind a hole."""
    lost_bytes: int = 0
    """Taken for lost and not sent again yet."""
    back_queue_ns: int = 0
    """So much of ``srtt_ns`` is queue of the other direction, which acknowledgements waited in."""


@dataclasses.dataclass(frozen=True, slots=True)
class CoordinatorConnected:
    """A control session stands; ``message`` is its Welcome. ``address``: as configured, names the session from here
    on."""

    address: str
    message: CoordinatorMessage


@value(frozen=True, slots=True)
class CoordinatorSaid:
    """A message of a control session."""

    address: str
    message: CoordinatorMessage


@dataclasses.dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """A control session ended; the driver goes on trying to reach it."""

    address: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stopping:
    """The agent shuts down. Its trainers go on with its next life, and peers wait for that: nothing fails by this."""

    reason: str


AgentEvent: TypeAlias = (
    TimePassed
    | ClientAttached
    | ClientDetached
    | SendPosted
    | SendFilled
    | SendCancelled
    | SendAnnounced
    | RecvAccepted
    | RecvReleased
    | BlockAllocated
    | BlockDenied
    | MemoryFreed
    | PeerConnected
    | PeerDisconnected
    | PeerUnreachable
    | InboundOpened
    | InboundClosed
    | PeerFrame
    | ChunkArrived
    | SendProgress
    | CoordinatorConnected
    | CoordinatorSaid
    | CoordinatorLost
    | Stopping
)
