"""What the two machines ask their driver to do. Effects are carried out in the order in which they are returned.

Effects that concern memory name it by transfer; the driver maps that to (arena, offset).
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import AgentMessage, CoordinatorMessage
from proxyd.wire.client import SendPhase
from proxyd.wire.envelope import Envelope, ErrorCode
from proxyd.wire.peer import Foretell
from proxyd.wire.peer import Frame as ControlFrame
from proxyd.wire.values import value

# ----------------------------------------------------------------------------- coordinator machine


@value(frozen=True, slots=True)
class ToAgent:
    """Send ``message`` on a session; consecutive ones for one session travel in one batch."""

    session: int
    message: CoordinatorMessage


@dataclasses.dataclass(frozen=True, slots=True)
class CloseSession:
    """End a session: a newer life of the same agent took over, or it broke the protocol."""

    session: int
    reason: str


CoordinatorEffect: TypeAlias = ToAgent | CloseSession

# ----------------------------------------------------------------------------------- agent machine


@value(frozen=True, slots=True)
class ToCoordinator:
    """Send ``message`` on the control session named by ``address``."""

    address: str
    message: AgentMessage


@dataclasses.dataclass(frozen=True, slots=True)
class FallbackBegan:
    """A link's coordinator is silent, and messages wait: they go on at this agent's fallback rate. To be logged."""

    link: LinkName
    coordinator: str
    silent_ns: int
    rate_bytes_per_s: int


@dataclasses.dataclass(frozen=True, slots=True)
class FallbackEnded:
    """The coordinator is heard again, or another one took over. To be logged."""

    link: LinkName
    after_ns: int
    nbytes: int
    """Sent meanwhile at the fallback rate."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToPeer:
    """Send a control frame. ``inbound``: on the connection that the peer dialled (answers to its transfers)."""

    peer: AgentName
    inbound: bool
    transfer: TransferId
    frame: ControlFrame


@dataclasses.dataclass(frozen=True, slots=True)
class WantPeer:
    """Keep connections to this peer: dial it at ``address``, and again when they fail, until DropPeer.

    ``streams``: number of data connections; raised by a later WantPeer.
    """

    peer: AgentName
    address: str
    incarnation: int
    streams: int


@dataclasses.dataclass(frozen=True, slots=True)
class DropPeer:
    """No endpoint lives there any more: close the connections to it."""

    peer: AgentName
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Pump:
    """``next_chunk(peer)`` may have something now: offer it to each writable stream."""

    peer: AgentName


@dataclasses.dataclass(frozen=True, slots=True)
class SetPace:
    """Ceiling for all data streams to this peer together; 0: none (a path within the site)."""

    peer: AgentName
    rate_bytes_per_s: int
    live: bool = False
    """It is found from live transfers: TCP's windows may be reopened below it (:mod:`proxyd.core.striping`)."""
    yields: bool = False
    """What goes now gives way to whatever comes: little of it shall wait in the kernel, which takes nothing back."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllocateBlock:
    """Find memory for an incoming message; answer with BlockAllocated or BlockDenied (at once or later).

    ``local_source``: the message is in that transfer's block of a local sender's arena: hand that over, no copy.
    """

    transfer: TransferId
    endpoint: EndpointName
    nbytes: int
    chunk_bytes: int
    local_source: bool


@dataclasses.dataclass(frozen=True, slots=True)
class FreeBlock:
    """A receive block is free again (released, or its transfer failed)."""

    transfer: TransferId
    endpoint: EndpointName


@dataclasses.dataclass(frozen=True, slots=True)
class TellOffered:
    """Tell the receiving trainer of a message; ``has_memory``: with the block of BlockAllocated."""

    endpoint: EndpointName
    transfer: TransferId
    envelope: Envelope
    has_memory: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TellBlock:
    """Tell the receiving trainer which block its accepted message has."""

    endpoint: EndpointName
    transfer: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class TellLanded:
    """Tell the receiving trainer how much of a message, from its start, is in place."""

    endpoint: EndpointName
    transfer: TransferId
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TellRecvFailed:
    """Tell the receiving trainer that an offered message will not come."""

    endpoint: EndpointName
    transfer: TransferId
    code: ErrorCode
    message: str
    bytes_done: int


@dataclasses.dataclass(frozen=True, slots=True)
class TellExpect:
    """Tell the receiving trainer when a message is predicted to be there."""

    endpoint: EndpointName
    transfer: TransferId
    finish_in_ns: int
    uncertainty_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class TellForetold:
    """Tell the receiving trainer when a message is predicted that has only been announced (or that it won't come)."""

    endpoint: EndpointName
    frame: Foretell


@dataclasses.dataclass(frozen=True, slots=True)
class TellSendState:
    """Tell the sending trainer where its message stands; ``finish_in_ns`` 0: no prediction."""

    endpoint: EndpointName
    transfer: TransferId
    phase: SendPhase
    bytes_done: int
    finish_in_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class TellSendDelivered:
    """Handed over within the host and complete: the send is done, its block is the receiver's until TellSendDone."""

    endpoint: EndpointName
    transfer: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class TellSendDone:
    """Delivered, verified, acknowledged: the send block is the trainer's again."""

    endpoint: EndpointName
    transfer: TransferId


@dataclasses.dataclass(frozen=True, slots=True)
class TellSendFailed:
    """Not delivered: the send block is the trainer's again."""

    endpoint: EndpointName
    transfer: TransferId
    code: ErrorCode
    message: str
    bytes_done: int


@dataclasses.dataclass(frozen=True, slots=True)
class TellPeerHere:
    """Tell a trainer that an endpoint of its job is registered."""

    endpoint: EndpointName
    rank: int
    incarnation: int
    site: str


@dataclasses.dataclass(frozen=True, slots=True)
class TellPeerGone:
    """Tell a trainer that an endpoint of its job has ended, or can't send to it."""

    endpoint: EndpointName
    rank: int
    incarnation: int
    message: str
    returns: bool = False
    """It is out of reach, and has not ended: the same life of it may be here again."""


@dataclasses.dataclass(frozen=True, slots=True)
class CloseClient:
    """End a trainer's session (Bye): a newer life took over, or the agent stops."""

    endpoint: EndpointName
    incarnation: int
    code: ErrorCode
    message: str


AgentEffect: TypeAlias = (
    ToCoordinator
    | ToPeer
    | WantPeer
    | DropPeer
    | Pump
    | SetPace
    | AllocateBlock
    | FreeBlock
    | TellOffered
    | TellBlock
    | TellLanded
    | TellRecvFailed
    | TellExpect
    | TellForetold
    | TellSendState
    | TellSendDelivered
    | TellSendDone
    | TellSendFailed
    | TellPeerHere
    | TellPeerGone
    | CloseClient
    | FallbackBegan
    | FallbackEnded
)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Answer of ``AgentMachine.next_chunk``: send this range of the transfer's block, now, on one stream.

    ``granted``: it spends a grant (and counts as such in SendProgress); else it is unscheduled or local to the site.
    """

    transfer: TransferId
    offset: int
    length: int
    granted: bool
    padding: bool = False
    """Zeros that the receiver throws away; there is no block."""
