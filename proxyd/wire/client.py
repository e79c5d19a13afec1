"""Frames between a trainer's client library and its agent.

Transport: a Unix stream socket over which the agent passes the memory (``ARENA_GRANTED`` frames carry one file
descriptor each, in order), or TCP for a trainer on another host of the site, where payload follows its frame
(``SEND_DATA``, ``RECV_DATA``).

Order of a session: agent ``CHALLENGE`` -> client ``HELLO`` -> agent ``WELCOME`` | ``REFUSED`` -> agent
``ARENA_GRANTED`` x n -> frames. A client that comes from an earlier life of the agent (``HELLO.resumes``) first says
what it knows, ``RESUME`` x n and ``RESUMED``, and hears of nothing before (rules in :mod:`proxyd_client.resuming`). The
MACs of ``HELLO`` and ``WELCOME`` are :func:`hello_mac` and :func:`welcome_mac`.

A send, over a Unix socket::

    client                                   agent
    allocate a block in a SEND arena
    POST_SEND (filled_bytes = 0)   ------->  may ask for a grant
    copy 2 MiB, SEND_FILLED        ------->  may send that much
    ...                            <-------  SEND_STATE (granted, predicted finish)
                                   <-------  SEND_DONE | SEND_FAILED: the block is the client's again

A receive::

                                   <-------  OFFERED (arena != 0: block allocated; arena == 0: no memory yet)
    a receive matches it: ACCEPT   ------->  (only for arena == 0)
                                   <-------  BLOCK
                                   <-------  LANDED (verified prefix grows; == nbytes: complete)
    last view dies: RELEASE        ------->  the block is the agent's again

What the drawings leave open:

* Matching (source, tag, group, any-source, order) is the client's alone; the agent only keeps order: ``OFFERED`` frames
  come in the order in which each sender posted its messages.
* Every delivered message is given back by exactly one RELEASE, also an empty one (``nbytes`` 0: complete as soon as it
  is offered, no LANDED). After RECV_FAILED the block is the agent's at once and no RELEASE follows. A frame that names
  a transfer its reader has already forgotten (a CANCEL_SEND that crosses a SEND_DONE) is ignored, not an error.
* RECV_FAILED with code CANCELLED means that the sender took the message back: the receiver forgets it, and a receive
  that it had matched waits for the channel's next message. Any other code is raised by the receive that gets its turn.
* A send of at most FILL_CHUNK_BYTES comes as one POST_SEND with everything filled. Each ARENA_WANTED is answered by one
  ARENA_GRANTED (SEND) or one ARENA_REFUSED.
* Over TCP ``arena`` is 0 throughout. POST_SEND (filled_bytes 0) is followed by SEND_DATA in order of offset, without
  gaps; the client keeps no copy, so the agent must. RECV_DATA comes in order of offset, without gaps, after ACCEPT (or
  unasked, for a message that is small enough); there is neither BLOCK nor LANDED; RELEASE follows the last byte.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, TypeAlias, get_args

from proxyd.wire.auth import MAC_BYTES, NONCE_BYTES
from proxyd.wire.auth import hello_mac as hello_mac
from proxyd.wire.auth import welcome_mac as welcome_mac
from proxyd.wire.codec import (
    WireError,
    blob,
    decode_body,
    encode_body,
    flag,
    i64,
    nested,
    note,
    text,
    u8,
    u16,
    u32,
    u64,
    u64_list,
)
from proxyd.wire.envelope import MAX_GROUP_BYTES, MAX_JOB_BYTES, Envelope, TransferId
from proxyd.wire.phase import SendPhase as SendPhase
from proxyd.wire.values import value

PROTOCOL_VERSION = 4
HEADER = struct.Struct("<IHHQ")  # body bytes, type, flags (0), payload bytes that follow the body
HEADER_BYTES = HEADER.size
MAX_BODY_BYTES = 64 << 10
MAX_PAYLOAD_BYTES = 4 << 20  # one SEND_DATA / RECV_DATA of the TCP variant; none over a Unix socket
MAX_RESUMED = 2048
"""Sequences in each list of one RESUME."""
FILL_CHUNK_BYTES = 2 << 20
"""What the client copies between two SEND_FILLED: large enough that a frame costs nothing, small enough to overlap."""


class ArenaKind(enum.IntEnum):
    """Who writes an arena."""

    SEND = 1
    """Blocks allocated and written by the client."""
    RECEIVE = 2
    """Blocks allocated by the agent, written by it, read by the client."""
    PEER = 3
    """Another local client's SEND arena, read-only here: same-host messages are handed over without a copy."""


@value(frozen=True, slots=True)
class Challenge:
    """Agent's first frame."""

    TYPE = 1
    version: int = u16()
    nonce: bytes = blob(NONCE_BYTES)


@value(frozen=True, slots=True)
class Hello:
    """Client's first frame. ``incarnation`` is random per process life and names its transfers."""

    TYPE = 2
    version: int = u16()
    job: str = text(MAX_JOB_BYTES)
    rank: int = u32()
    incarnation: int = u64()
    pid: int = u32()
    nonce: bytes = blob(NONCE_BYTES)
    mac: bytes = blob(MAC_BYTES)
    shared_memory: bool = flag()
    resumes: int = u64(0)
    """The life of the agent (its incarnation) that this client was attached to until now; 0: it begins."""
    age_ns: int = u64(0)
    """How long ago it attached for the first time."""


@value(frozen=True, slots=True)
class Welcome:
    """The session stands."""

    TYPE = 3
    site: str = text(255)
    agent_name: str = text(255)
    agent_incarnation: int = u64()
    memory_limit_bytes: int = u64()
    linger_ns: int = u64()
    mac: bytes = blob(MAC_BYTES)
    reconnect_ns: int = u64(0)
    """How long the client is to look for the agent's next life, should this one end; 0: not at all."""


@value(frozen=True, slots=True)
class Refused:
    """The session doesn't stand; the agent closes after it."""

    TYPE = 4
    code: int = u16()
    message: str = note(2048)


@value(frozen=True, slots=True)
class ArenaGranted:
    """A shared arena; over a Unix socket its descriptor rides along (PEER: opened read-only)."""

    TYPE = 5
    arena: int = u32()
    kind: int = u8()
    size_bytes: int = u64()


@value(frozen=True, slots=True)
class ArenaRefused:
    """Answer to ArenaWanted when the memory limit is reached."""

    TYPE = 6
    wanted_bytes: int = u64()
    message: str = note(2048)


@value(frozen=True, slots=True)
class ArenaWanted:
    """The client needs (at least) one more SEND arena able to hold a block of ``nbytes``."""

    TYPE = 7
    nbytes: int = u64()


@value(frozen=True, slots=True)
class Resume:
    """What a client knows of one sender's messages to it, from earlier lives of the agent.

    All that was offered up to ``highest`` has ended, except what is ``awaited``. Of the rest those in ``delivered``
    (the latest ones) are known to have been delivered; of all others nothing is claimed. Several frames of one sender
    add up.
    """

    TYPE = 8
    rank: int = u32()
    incarnation: int = u64()
    highest: int = u64()
    delivered: tuple[int, ...] = u64_list(MAX_RESUMED)
    awaited: tuple[int, ...] = u64_list(MAX_RESUMED)
    """Told of and not complete: they are to be offered again, or to fail."""


@value(frozen=True, slots=True)
class Resumed:
    """That was all; from here on it is a session like any other."""

    TYPE = 9


@value(frozen=True, slots=True)
class PostSend:
    """A message; the block is the agent's from here to SEND_DONE / SEND_FAILED. ``arena`` 0 and no bytes: empty."""

    TYPE = 10
    sequence: int = u64()
    envelope: Envelope = nested(Envelope)
    arena: int = u32()
    offset: int = u64()
    filled_bytes: int = u64()
    deadline_in_ns: int = u64(0)
    """Wanted at the receiver within; 0: as soon as its turn comes."""
    again: bool = flag(False)
    """It was posted to an earlier life of this agent: the receiver may have parts of it, or all."""
    dst_incarnation: int = u64(0)
    """The only life of the receiver that may get it; 0: whichever is there."""


@value(frozen=True, slots=True)
class SendFilled:
    """The first ``filled_bytes`` of the block hold the message."""

    TYPE = 11
    sequence: int = u64()
    filled_bytes: int = u64()


@value(frozen=True, slots=True)
class SendData:
    """TCP variant of SEND_FILLED: ``payload`` follows at ``offset``."""

    TYPE = 12
    sequence: int = u64()
    offset: int = u64()


@value(frozen=True, slots=True)
class CancelSend:
    """The client no longer wants it sent; answered by SEND_FAILED (CANCELLED) or SEND_DONE."""

    TYPE = 13
    sequence: int = u64()


@value(frozen=True, slots=True)
class AnnounceSend:
    """A message that is not there yet: lets the agent ask ahead. Matched to the next POST_SEND of the same channel."""

    TYPE = 14
    dst_rank: int = u32()
    group: str = text(MAX_GROUP_BYTES)
    tag: int = i64()
    traffic: int = u8()
    nbytes: int = u64()
    ready_in_ns: int = u64()


@value(frozen=True, slots=True)
class SendDone:
    """Delivered, verified and acknowledged end to end; the block is the client's again."""

    TYPE = 15
    sequence: int = u64()


@value(frozen=True, slots=True)
class SendFailed:
    """Ended without delivery; the block is the client's again."""

    TYPE = 16
    sequence: int = u64()
    code: int = u16()
    message: str = note(4096)
    bytes_done: int = u64()


@value(frozen=True, slots=True)
class SendState:
    """Progress of a send: for error texts and ``Handle.eta_s``. ``finish_in_ns`` 0: no prediction."""

    TYPE = 17
    sequence: int = u64()
    phase: int = u8()
    bytes_done: int = u64()
    finish_in_ns: int = u64()


@value(frozen=True, slots=True)
class SendDelivered:
    """The receiver, a trainer of the same agent, has all of it where it stands: the send is done. SEND_DONE follows
    when it has released the block, which may be long after."""

    TYPE = 18
    sequence: int = u64()


@value(frozen=True, slots=True)
class Offered:
    """A message for this endpoint; ``arena`` 0 with ``nbytes`` > 0 means that it waits for ACCEPT."""

    TYPE = 20
    incarnation: int = u64()
    sequence: int = u64()
    envelope: Envelope = nested(Envelope)
    arena: int = u32()
    offset: int = u64()
    landed_bytes: int = u64(0)
    """So much is in place already, as if LANDED followed."""

    @property
    def transfer(self) -> TransferId:
        """The transfer's name."""
        return TransferId(self.incarnation, self.sequence)


@value(frozen=True, slots=True)
class Accept:
    """A posted receive matches a message that has no memory yet."""

    TYPE = 21
    incarnation: int = u64()
    sequence: int = u64()


@value(frozen=True, slots=True)
class Block:
    """Memory for an accepted message."""

    TYPE = 22
    incarnation: int = u64()
    sequence: int = u64()
    arena: int = u32()
    offset: int = u64()


@value(frozen=True, slots=True)
class Landed:
    """The first ``nbytes`` are in place and verified. Equal to the message's size: complete."""

    TYPE = 23
    incarnation: int = u64()
    sequence: int = u64()
    nbytes: int = u64()


@value(frozen=True, slots=True)
class RecvData:
    """TCP variant of LANDED: payload follows at ``offset``."""

    TYPE = 24
    incarnation: int = u64()
    sequence: int = u64()
    offset: int = u64()


@value(frozen=True, slots=True)
class RecvFailed:
    """An offered message will not come."""

    TYPE = 25
    incarnation: int = u64()
    sequence: int = u64()
    code: int = u16()
    message: str = note(4096)
    bytes_done: int = u64()


@value(frozen=True, slots=True)
class Release:
    """No view of the block is left at the client; it is the agent's again."""

    TYPE = 26
    incarnation: int = u64()
    sequence: int = u64()


@value(frozen=True, slots=True)
class Expect:
    """Prediction of the arrival of a message that was posted."""

    TYPE = 27
    incarnation: int = u64()
    sequence: int = u64()
    finish_in_ns: int = u64()
    uncertainty_ns: int = u64()


@value(frozen=True, slots=True)
class Foretold:
    """Prediction for what its sender announced as ``number`` and has not posted; ``finish_in_ns`` 0: withdrawn. The
    channel's next OFFERED ends the first of them."""

    TYPE = 32
    number: int = u64()
    src_rank: int = u32()
    group: str = text(MAX_GROUP_BYTES)
    tag: int = i64()
    nbytes: int = u64()
    finish_in_ns: int = u64()
    uncertainty_ns: int = u64()


@value(frozen=True, slots=True)
class PeerGone:
    """An endpoint of the job has ended, or is out of reach; pending receives from it fail unless another life of it
    comes."""

    TYPE = 28
    rank: int = u32()
    incarnation: int = u64()
    message: str = note(2048)
    returns: bool = flag(False)
    """It is out of reach: PEER_HERE may name the same life again."""


@value(frozen=True, slots=True)
class PeerHere:
    """An endpoint of the job is registered (also sent for each one known at the start of the session)."""

    TYPE = 29
    rank: int = u32()
    incarnation: int = u64()
    site: str = text(255)


@value(frozen=True, slots=True)
class LinkStateWanted:
    """Ask for the state of the path to ``dst_rank``."""

    TYPE = 30
    request: int = u32()
    dst_rank: int = u32()


@value(frozen=True, slots=True)
class LinkState:
    """Answer: the path to a destination. Zeros where nothing is known; ``source`` says where the figures come from,
    ``confidence_ppm``, in millionths, how far to trust the rate."""

    TYPE = 31
    request: int = u32()
    link: str = text(520)
    source: str = text(64)
    rate_bytes_per_s: int = u64()
    rtt_ns: int = u64()
    queue_ns: int = u64()
    waiting_bytes: int = u64()
    age_ns: int = u64()
    confidence_ppm: int = u32()
    error: str = note(2048, "")


@value(frozen=True, slots=True)
class Waited:
    """For so long more this trainer stood still for messages (:mod:`proxyd_client.waiting`); it adds up."""

    TYPE = 33
    waited_ns: int = u64()


@value(frozen=True, slots=True)
class Bye:
    """Orderly end, either side. The agent keeps unacknowledged sends going, up to its linger time, after a client's."""

    TYPE = 40
    code: int = u16()
    message: str = note(2048)


Frame: TypeAlias = (
    Challenge
    | Hello
    | Welcome
    | Refused
    | ArenaGranted
    | ArenaRefused
    | ArenaWanted
    | Resume
    | Resumed
    | PostSend
    | SendFilled
    | SendData
    | CancelSend
    | AnnounceSend
    | SendDone
    | SendDelivered
    | SendFailed
    | SendState
    | Offered
    | Accept
    | Block
    | Landed
    | RecvData
    | RecvFailed
    | Release
    | Expect
    | Foretold
    | PeerGone
    | PeerHere
    | LinkStateWanted
    | LinkState
    | Waited
    | Bye
)

FRAMES: dict[int, type[Any]] = {cls.TYPE: cls for cls in get_args(Frame)}
_WITH_PAYLOAD = frozenset({SendData.TYPE, RecvData.TYPE})


def encode(frame: Frame, payload_bytes: int = 0) -> bytes:
    """One frame's header and body; ``payload_bytes`` of raw payload must follow for SendData and RecvData."""
    body = encode_body(frame)
    return HEADER.pack(len(body), frame.TYPE, 0, payload_bytes) + body


class Decoder:
    """Incremental decoder: feed bytes, take frames.

    ``next_frame()`` returns ``(frame, payload_bytes)`` or None when more bytes are needed. When ``payload_bytes`` is
    not 0 the caller takes that many bytes with :meth:`take_payload` (what is buffered) before it asks for the next one.
    """

    def __init__(self, *, allow_payload: bool) -> None:
        self._buffer = bytearray()
        self._at = 0
        self._allow_payload = allow_payload
        self._payload_left_bytes = 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append received bytes."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    @property
    def payload_left_bytes(self) -> int:
        """Payload bytes of the last frame not taken yet."""
        return self._payload_left_bytes

    def take_payload(self, limit_bytes: int) -> bytes:
        """Up to ``limit_bytes`` buffered payload bytes of the last frame; b"" when the buffer holds none."""
        size = min(limit_bytes, self._payload_left_bytes, len(self._buffer) - self._at)
        piece = bytes(memoryview(self._buffer)[self._at : self._at + size])
        self._at += size
        self._payload_left_bytes -= size
        return piece

    def payload_received(self, nbytes: int) -> None:
        """``nbytes`` of payload were read from the socket straight into place, past this decoder."""
        if nbytes > self._payload_left_bytes or self._at != len(self._buffer):
            raise WireError(f"{nbytes} payload bytes taken while {self._payload_left_bytes} were due")
        self._payload_left_bytes -= nbytes

    def next_frame(self) -> tuple[Frame, int] | None:
        """Next whole frame, or None. Raises WireError; the connection is then beyond repair."""
        if self._payload_left_bytes:
            return None
        if len(self._buffer) - self._at < HEADER_BYTES:
            return None
        body_bytes, kind, flags, payload_bytes = HEADER.unpack_from(self._buffer, self._at)
        cls = FRAMES.get(kind)
        if cls is None or flags != 0:
            raise WireError(f"frame type {kind} (flags {flags}) is unknown to protocol version {PROTOCOL_VERSION}")
        if body_bytes > MAX_BODY_BYTES:
            raise WireError(f"{cls.__name__} claims a body of {body_bytes} bytes; the limit is {MAX_BODY_BYTES}")
        if payload_bytes and (
            not self._allow_payload or kind not in _WITH_PAYLOAD or payload_bytes > MAX_PAYLOAD_BYTES
        ):
            raise WireError(f"{cls.__name__} claims {payload_bytes} payload bytes, which it may not carry here")
        start = self._at + HEADER_BYTES
        if len(self._buffer) < start + body_bytes:
            return None
        # A copy: an error's traceback would keep a view alive, and a viewed bytearray can't be resized.
        frame = decode_body(cls, self._buffer[start : start + body_bytes])
        self._at = start + body_bytes
        self._payload_left_bytes = payload_bytes
        return frame, payload_bytes
