"""One transfer's life, as its sending and its receiving agent see it.

Theory of operation
-------------------
A transfer is one message. Its two ends keep one small state machine each, written down as a table: what isn't in the
table can't happen, and :func:`step` says so loudly instead of going on with a state that nobody thought of.

Sending end::

    RESOLVING --offered--------> CREDIT --credited--> QUEUED --granted--> SENDING --all_sent--> UNACKED --acked--> DONE
        |                          ^                    ^ |                  |                      |
        +------offered_eager-------|--------------------+ +<---starved-------+<-------nacked--------+
        +------offered_free--------|-------------------------------------> SENDING
                                   +--turned_down-- QUEUED, SENDING, UNACKED

  RESOLVING   the destination's agent isn't known or not connected yet
  CREDIT      offered; the receiver holds no memory for it
  QUEUED      the receiver holds memory; the coordinator has been asked
  SENDING     chunks go out (under a grant, or freely: small, or within the site)
  UNACKED     every chunk was handed to the kernel; the block is still ours, to send again what is asked for
  DONE        acknowledged end to end: the block is the trainer's again

Every state but DONE can fail; failing is final. A same-agent message takes none of the middle: RESOLVING ->
HANDED_OVER -> DONE.

A broken connection (any of the control and data connections to the peer: they stand and fall together)::

    CREDIT, QUEUED, SENDING, UNACKED --link_lost--> BROKEN --offered_again--> CREDIT --held--> QUEUED --> ... as before
                                                      ^                         |  |
                                                      +-------link_lost---------+  +--acked--> DONE

  BROKEN      the connection to the receiver's agent is gone. Nothing is asked for or held; the agent dials again. After
              ``peer_timeout`` away the message fails with PEER_LOST, on both sides, each by its own clock

Resuming goes by these rules; together they make "exactly once, in order, whole, or an error on both sides".

1. *Nothing taken is given up.* The sender's block is the agent's until ACK or failure, so every byte can go again.
2. *In order.* When the peer is there again, all that is BROKEN is offered again first, in the order in which it was
   posted, then whatever has waited since. Offers to one destination thus always rise in sequence.
3. *The receiver answers each*, from what it knows (:mod:`proxyd.core.receiving`): HELD with the ranges that are
   verified and in place, ACK if it was delivered (also long ago: :mod:`proxyd.wire.fence`), FAIL if it ended otherwise,
   CREDIT once it has memory, if it had none. Nothing is sent before the answer, so nothing that the receiver holds.
4. *What the sender gave up meanwhile* it says with CANCEL after the offers, also what it had said right before the
   break. OFFERED_ALL then ends the list: what else the receiver has of that life of the agent will not come.
5. *A new life of an agent* (another incarnation) knows nothing; its trainers do, and come back by themselves. Messages
   are named by the trainer's incarnation and sequence, so the old ones go on.

   * The sender's agent: its trainers post again what was not acknowledged, in order and before anything new; the new
     life offers it, and the receiver answers as in 3. What isn't offered within 4 s of the return fails.
   * The receiver's agent: its trainers say first what was delivered to them and what they await
     (:mod:`proxyd.core.remembering`). A BROKEN message waits until the directory lists its receiver,
     in the life it was for, at that very life of the agent; the messages behind it wait, too. It fails with PEER_LOST
     ``peer_timeout`` after the old life's last word, or as soon as the receiver is there in another life.
6. *Accounts.* Granted bytes that the transfer holds unspent go back at once, and the coordinator's queue forgets it;
   bytes in the kernel's hands count as delivered (nothing of them is outstanding any more). It asks anew for what is
   missing.
7. *A path that takes small frames only* (an MTU black hole) lets every handshake pass and no data. So the time away
   goes on over connections that broke again without progress, and the error says so.

Receiving end::

    OFFERED --accepted--> WANTED --allocated--> LANDING --complete--> LANDED --released--> RELEASED
       +--------------------(eager)-------------->^

Bytes are conserved: the chunks of a transfer are partitioned at all times into unsent, taken (handed to a stream) and,
at the receiver, landed; a chunk returns from taken to unsent only by a NACK, a TURNED_DOWN or a HELD that doesn't name
it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Mapping
from typing import TypeVar

from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.wire.arena import chunk_count
from proxyd.wire.client import SendPhase
from proxyd.wire.envelope import Envelope

MAX_RESENDS = 64
"""Chunks of one transfer that may fail their checksum before it fails as corrupt: TCP's own checksum lets about one in
10^7 damaged segments through, so more than a handful means broken memory or a trainer that writes into a posted
block."""


class _Member(enum.Enum):
    """Of a table's keys. Enum's own hash is Python code, and takes half the time of a step."""

    __hash__ = object.__hash__


class SendState(_Member):
    """Sending end; see the module's text."""

    RESOLVING = "resolving"
    CREDIT = "credit"
    QUEUED = "queued"
    SENDING = "sending"
    UNACKED = "unacked"
    BROKEN = "broken"
    HANDED_OVER = "handed over"
    DONE = "done"
    FAILED = "failed"


class SendInput(_Member):
    """What moves the sending end."""

    OFFERED = "offered"
    OFFERED_EAGER = "offered eager"
    OFFERED_FREE = "offered free"
    CREDITED = "credited"
    TURNED_DOWN = "turned down"
    GRANTED = "granted"
    STARVED = "starved"
    ALL_SENT = "all sent"
    NACKED = "nacked"
    LINK_LOST = "link lost"
    OFFERED_AGAIN = "offered again"
    HELD = "held"
    HANDED_OVER = "handed over"
    ACKED = "acked"
    FAILED = "failed"


class RecvState(_Member):
    """Receiving end; see the module's text."""

    OFFERED = "offered"
    WANTED = "wanted"
    LANDING = "landing"
    LANDED = "landed"
    RELEASED = "released"
    FAILED = "failed"


class RecvInput(_Member):
    """What moves the receiving end."""

    ACCEPTED = "accepted"
    ALLOCATED = "allocated"
    COMPLETE = "complete"
    RELEASED = "released"
    FAILED = "failed"


_S, _I = SendState, SendInput
SEND_TABLE: Mapping[tuple[SendState, SendInput], SendState] = {
    (_S.RESOLVING, _I.OFFERED): _S.CREDIT,
    (_S.RESOLVING, _I.OFFERED_EAGER): _S.QUEUED,
    (_S.RESOLVING, _I.OFFERED_FREE): _S.SENDING,
    (_S.RESOLVING, _I.HANDED_OVER): _S.HANDED_OVER,
    (_S.CREDIT, _I.CREDITED): _S.QUEUED,
    (_S.QUEUED, _I.GRANTED): _S.SENDING,
    (_S.SENDING, _I.GRANTED): _S.SENDING,
    (_S.SENDING, _I.STARVED): _S.QUEUED,
    (_S.SENDING, _I.ALL_SENT): _S.UNACKED,
    (_S.UNACKED, _I.NACKED): _S.QUEUED,
    (_S.SENDING, _I.NACKED): _S.SENDING,
    (_S.QUEUED, _I.NACKED): _S.QUEUED,
    # A receiver may turn an eager offer down, or lose and regain memory, while data is under way.
    (_S.QUEUED, _I.TURNED_DOWN): _S.CREDIT,
    (_S.SENDING, _I.TURNED_DOWN): _S.CREDIT,
    (_S.UNACKED, _I.TURNED_DOWN): _S.CREDIT,
    (_S.UNACKED, _I.ACKED): _S.DONE,
    # An empty message is complete when it is offered, and the receiver may answer before the last chunk's ledger
    # closes.
    (_S.SENDING, _I.ACKED): _S.DONE,
    (_S.QUEUED, _I.ACKED): _S.DONE,
    (_S.HANDED_OVER, _I.ACKED): _S.DONE,
    **{(state, _I.LINK_LOST): _S.BROKEN for state in (_S.CREDIT, _S.QUEUED, _S.SENDING, _S.UNACKED, _S.BROKEN)},
    (_S.BROKEN, _I.OFFERED_AGAIN): _S.CREDIT,
    (_S.CREDIT, _I.HELD): _S.QUEUED,
    # Delivered before the break; only its acknowledgement was lost.
    (_S.CREDIT, _I.ACKED): _S.DONE,
    **{(state, _I.FAILED): _S.FAILED for state in _S if state not in (_S.DONE, _S.FAILED)},
}

_R, _J = RecvState, RecvInput
RECV_TABLE: Mapping[tuple[RecvState, RecvInput], RecvState] = {
    (_R.OFFERED, _J.ACCEPTED): _R.WANTED,
    (_R.OFFERED, _J.ALLOCATED): _R.LANDING,
    (_R.WANTED, _J.ALLOCATED): _R.LANDING,
    (_R.LANDING, _J.COMPLETE): _R.LANDED,
    (_R.LANDED, _J.RELEASED): _R.RELEASED,
    **{(state, _J.FAILED): _R.FAILED for state in (_R.OFFERED, _R.WANTED, _R.LANDING)},
}

PHASES: Mapping[SendState, SendPhase] = {
    _S.RESOLVING: SendPhase.RESOLVE,
    _S.CREDIT: SendPhase.CREDIT,
    _S.QUEUED: SendPhase.QUEUED,
    _S.SENDING: SendPhase.SENDING,
    _S.UNACKED: SendPhase.UNACKNOWLEDGED,
    _S.BROKEN: SendPhase.RECONNECTING,
    _S.HANDED_OVER: SendPhase.UNACKNOWLEDGED,
    _S.DONE: SendPhase.UNACKNOWLEDGED,
    _S.FAILED: SendPhase.UNACKNOWLEDGED,
}

State = TypeVar("State")
Input = TypeVar("Input")


class TransitionError(AssertionError):
    """An input that the table doesn't have for this state: a defect of ours."""


def step(table: Mapping[tuple[State, Input], State], state: State, given: Input) -> State:
    """Next state. Raises TransitionError for a pair that isn't in the table."""
    try:
        return table[state, given]
    except KeyError:
        raise TransitionError(f"input {given} in state {state} is not in the table") from None


@dataclasses.dataclass(slots=True)
class Outgoing:
    """A message that a local trainer sends."""

    transfer: TransferId
    envelope: Envelope
    posted_ns: int
    filled_bytes: int
    state: SendState = SendState.RESOLVING
    due_ns: int = 0
    """When its trainer wants it at the receiver; 0: as soon as its turn comes."""
    peer: AgentName | None = None
    link: LinkName | None = None
    """None: within the site, no grants."""
    chunk_bytes: int = 1 << 20
    eager: bool = False
    free: bool = False
    """Needs no grants: small, or within the site."""
    padding: bool = False
    """A warm-up: no trainer's, never acknowledged, its chunks are thrown away."""
    observed: bool = False
    """Goes without grants, because its link is only observed."""
    announcement: int = 0
    requested: bool = False
    wanted_bytes: int = 0
    """Cumulative need, re-sent chunks included; what Request says."""
    granted_bytes: int = 0
    """Cumulative over all sessions; returned bytes stay in it and raise ``wanted_bytes`` instead."""
    session_base_bytes: int = 0
    """``granted_bytes`` when the present control session began: what it is told counts from there."""
    held_bytes: int = 0
    """Granted and not spent."""
    lent_bytes: int = 0
    """What was granted to it and went to a more urgent message (:mod:`proxyd.core.lending`); not in
    ``granted_bytes``."""
    owed_bytes: int = 0
    """What it took of others' grants; in ``granted_bytes``."""
    in_arrears: bool = False
    """It didn't pay back in time."""
    taken_bytes: int = 0
    """Cumulative payload handed to streams, re-sent chunks included."""
    next_offset: int = 0
    resend: deque[int] = dataclasses.field(default_factory=deque)
    """Offsets of chunks to be sent again, before anything new."""
    resends: int = 0
    orphaned_until_ns: int = 0
    """The trainer has closed; the message goes on until then. 0: the trainer is there."""
    told_phase: SendPhase | None = None
    expected_finish_ns: int = 0
    dst_incarnation: int = 0
    """The life of the receiver that it was offered to first; no later one may get it. Before that: the one that its
    trainer meant when it posted it to an earlier life of this agent; 0: any."""
    peer_incarnation: int = 0
    """The life of the receiver's agent that it was offered to last."""
    broken_ns: int = 0
    """BROKEN: since when the receiver's agent has been away."""
    again: bool = False
    """It may have been offered before: over a connection that broke, or by an earlier life of this agent."""
    held_before_bytes: int = 0
    """What the receiver held when it was last asked."""

    def step(self, given: SendInput) -> None:
        """Move by the table."""
        self.state = step(SEND_TABLE, self.state, given)

    @property
    def nbytes(self) -> int:
        """Size of the message."""
        return self.envelope.nbytes

    @property
    def finished(self) -> bool:
        """Nothing more will happen to it."""
        return self.state in (SendState.DONE, SendState.FAILED)

    @property
    def need_bytes(self) -> int:
        """Bytes that still want a grant."""
        return max(0, self.wanted_bytes - self.granted_bytes)

    @property
    def everything_taken(self) -> bool:
        """Each chunk was handed to a stream and none is to be sent again."""
        return not self.resend and self.next_offset >= self.nbytes

    @property
    def untaken_bytes(self) -> int:
        """What is still to be handed to a stream."""
        again = sum(min(self.chunk_bytes, self.nbytes - offset) for offset in self.resend)
        return self.nbytes - self.next_offset + again

    def next_chunk(self) -> tuple[int, int] | None:
        """``(offset, length)`` of the next chunk whose bytes exist, or None."""
        if self.resend:
            offset = self.resend[0]
            length = min(self.chunk_bytes, self.nbytes - offset)
            # Not filled: only after its trainer posted it again to a restarted agent.
            return (offset, length) if offset + length <= self.filled_bytes else None
        length = min(self.chunk_bytes, self.nbytes - self.next_offset)
        if length <= 0 or self.next_offset + length > self.filled_bytes:
            return None
        return self.next_offset, length

    def take(self, offset: int, length: int) -> None:
        """The chunk that next_chunk() named is handed to a stream."""
        if self.resend and self.resend[0] == offset:
            self.resend.popleft()
        else:
            self.next_offset = offset + length
        self.taken_bytes += length

    def send_again(self, offset: int) -> bool:
        """Put a taken chunk back (NACK). False: it isn't one of ours, or is waiting already."""
        if offset % self.chunk_bytes or not 0 <= offset < self.next_offset or offset in self.resend:
            return False
        self.resend.append(offset)
        self.resends += 1
        self.wanted_bytes += min(self.chunk_bytes, self.nbytes - offset)
        return True

    def start_over(self) -> None:
        """Everything that was taken is to be sent again (TURNED_DOWN)."""
        self.resend.clear()
        self.next_offset = 0
        self.held_bytes = 0
        self.wanted_bytes = self.granted_bytes + self.nbytes

    def resume(self, chunk_bytes: int, ranges: tuple[int, ...]) -> bool:
        """The receiver holds these ranges (offset, length in turns; whole chunks, ascending): send the others only.
        False: that can't be, and nothing was changed."""
        end = 0
        missing: list[int] = []
        for offset, length in zip(ranges[::2], ranges[1::2], strict=False):
            whole = offset + length == self.nbytes or not length % chunk_bytes
            if offset < end or offset % chunk_bytes or not length or not whole or offset + length > self.nbytes:
                return False
            missing += range(end, offset, chunk_bytes)
            end = offset + length
        self.chunk_bytes = chunk_bytes
        self.resend = deque(missing)
        self.next_offset = end
        self.held_bytes = 0
        self.held_before_bytes = sum(ranges[1::2])
        self.wanted_bytes = self.granted_bytes + self.nbytes - self.held_before_bytes
        return True

    def returned(self, nbytes: int) -> None:
        """``nbytes`` that it held unspent went back to the coordinator: they are needed again."""
        self.held_bytes -= nbytes
        self.wanted_bytes += nbytes


@dataclasses.dataclass(slots=True)
class Incoming:
    """A message for a local trainer."""

    transfer: TransferId
    envelope: Envelope
    peer: AgentName | None
    """None: the sender is a trainer of this agent too (its block is handed over)."""
    chunk_bytes: int
    eager: bool
    state: RecvState = RecvState.OFFERED
    has_memory: bool = False
    told: bool = False
    landed: bytearray = dataclasses.field(default_factory=bytearray)
    """One byte per chunk: fast to search, and 16 k of them are a gigabyte's worth."""
    prefix_chunks: int = 0
    landed_bytes: int = 0
    first_arrival_ns: int = 0
    last_arrival_ns: int = 0
    dst_incarnation: int = 0
    """The life of the receiver that it is for."""
    budgeted: bool = False
    """It counts against the eager budget of the connection that stands."""
    answer_due: bool = False
    """It was offered again and there was no memory yet: the sender waits for CREDIT or TURNED_DOWN."""
    connection: int = 0
    """Over which of its peer's connections (they are counted) it was offered last."""

    def step(self, given: RecvInput) -> None:
        """Move by the table."""
        self.state = step(RECV_TABLE, self.state, given)

    @property
    def nbytes(self) -> int:
        """Size of the message."""
        return self.envelope.nbytes

    @property
    def complete(self) -> bool:
        """Every byte is in place."""
        return self.landed_bytes == self.nbytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes in place from the start without a gap."""
        return min(self.nbytes, self.prefix_chunks * self.chunk_bytes)

    def held_ranges(self, limit: int) -> tuple[int, ...]:
        """What is in place: offset and length in turns, ascending; at most ``limit`` of them, the first ones."""
        ranges: list[int] = []
        start = self.landed.find(1)
        while start >= 0 and len(ranges) < 2 * limit:
            end = self.landed.find(0, start)
            end = len(self.landed) if end < 0 else end
            ranges += (start * self.chunk_bytes, min(self.nbytes, end * self.chunk_bytes) - start * self.chunk_bytes)
            start = self.landed.find(1, end)
        return tuple(ranges)

    def allocated(self) -> None:
        """Memory is there: start the chunk map."""
        self.has_memory = True
        if self.peer is not None:
            self.landed = bytearray(chunk_count(self.nbytes, self.chunk_bytes))

    def mark(self, offset: int, length: int, now_ns: int) -> bool:
        """A verified chunk is in place. False: it was there already, or isn't a chunk of this message."""
        index, rest = divmod(offset, self.chunk_bytes)
        if rest or index >= len(self.landed) or length != min(self.chunk_bytes, self.nbytes - offset):
            return False
        if self.landed[index]:
            return False
        self.landed[index] = 1
        self.landed_bytes += length
        if not self.first_arrival_ns:
            self.first_arrival_ns = now_ns
        self.last_arrival_ns = now_ns
        if index == self.prefix_chunks:
            gap = self.landed.find(0, index)
            self.prefix_chunks = len(self.landed) if gap < 0 else gap
        return True
