"""The public face: one trainer process as a sender and receiver of messages."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

from proxyd.wire.client import AnnounceSend
from proxyd.wire.envelope import MAX_GROUP_BYTES, MAX_JOB_BYTES, MAX_TRANSFER_BYTES, TrafficClass
from proxyd_client.buffers import payload_of
from proxyd_client.dial import Identity, parse_address, token_of
from proxyd_client.errors import ArgumentError
from proxyd_client.first_of import wait_any, wake
from proxyd_client.handle import Handle, Operation
from proxyd_client.lending import SendBuffer, Shape
from proxyd_client.message import Message
from proxyd_client.receive import Receive
from proxyd_client.send import Destination
from proxyd_client.session import Session

DEFAULT_ROOM_TIMEOUT_S = 300.0
MAX_DEADLINE_S = 86_400.0
_MAX_RANK = 2**32 - 1
_MAX_TAG = 2**63 - 1


class LinkState(NamedTuple):
    """The path to a destination as the agent knows it; zeros where nothing is known."""

    link: str
    """``site->site``; the site alone when both ends share one."""
    source: str
    """Where the figures come from: an estimate, the configuration, a default."""
    rate_bytes_per_s: int
    rtt_ns: int
    queue_ns: int
    """Predicted wait before a message posted now would start."""
    waiting_bytes: int
    age_ns: int
    """How old the figures are."""
    confidence: float = 0.0
    """How far to trust the rate: 1 as configured or freshly measured, 0 a guess; it halves with age."""


class Endpoint:
    """One rank of a job. Thread-safe; not usable in a forked child (connect again there).

    Messages are ordered per (source, destination, group, tag). Use as a context manager, or :meth:`close` it.
    """

    def __init__(self, session: Session, job: str, rank: int) -> None:
        self._session = session
        self.job = job
        self.rank = rank

    @property
    def site(self) -> str:
        """The site of this endpoint's agent."""
        return self._session.welcome.site

    @property
    def agent_name(self) -> str:
        """The name of this endpoint's agent."""
        return self._session.welcome.agent_name

    @property
    def closed(self) -> bool:
        """Whether it has ended: closed, replaced by a newer process, without an agent, or a forked child's."""
        core = self._session.core
        return core.has_ended() or core.closing or core.pid != os.getpid()

    @property
    def waiting(self) -> AbstractContextManager[None]:
        """To be entered around a wait that is for messages, by what is built on this library: then the operator sees it
        with the trainer's own (``proxyd_job_wait_seconds_total``)."""
        return self._session.core.waiting

    def isend(
        self,
        buffer: Any,
        dst: int,
        tag: int = 0,
        *,
        group: str = "",
        traffic: str = "pipeline",
        dtype: Any = None,
        shape: Sequence[int] | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = DEFAULT_ROOM_TIMEOUT_S,
    ) -> Handle[None]:
        """Start sending; the buffer may change as soon as this returns (a snapshot was taken).

        :param buffer: a numpy array or anything with the buffer protocol, C-contiguous. Never modified. A
            :class:`SendBuffer` of this endpoint is sent as it is, without a copy, and must not change meanwhile.
        :param dst: rank of the receiver, in the same job.
        :param traffic: ``pipeline`` (one at a time at full rate), ``sync`` (shared among a barrier), ``bulk``.
        :param dtype: names the elements that raw bytes hold (``"bfloat16"``); default: what the buffer says.
        :param shape: the shape to travel along.
        :param deadline_s: wanted at the receiver within so many seconds: it goes before this job's messages of the same
            class that have a later deadline, or none. Nothing fails when it passes; that is ``wait``'s timeout.
        :param timeout_s: how long to wait for room in shared memory while earlier sends are unacknowledged.
        :returns: a handle whose ``wait`` returns when the receiver has the message: acknowledged end to end.
        :raises ArgumentError: the buffer or an argument is wrong; nothing was sent.
        :raises ConfigError: the message can never fit the agent's memory limit.
        :raises TransferTimeout: no room within ``timeout_s``; nothing was sent.
        """
        sender, loan = self._session.sender, None
        if isinstance(buffer, SendBuffer):
            payload, loan = buffer.payload(sender.loans, dtype, shape)
        else:
            payload = payload_of(buffer, dtype, shape)
        to = Destination(_rank("dst", dst), _tag(tag), _group(group), _traffic(traffic), _due_ns(deadline_s))
        return Handle(sender.send(payload, to, timeout_s, loan))

    def send_buffer(
        self,
        shape: int | Sequence[int],
        dtype: Any = "uint8",
        *,
        timeout_s: float | None = DEFAULT_ROOM_TIMEOUT_S,
    ) -> SendBuffer:
        """Memory that the agent reads, to be filled by the caller and sent by :meth:`isend` without a copy, as often as
        wanted. What it holds at first is undefined. Make it once and keep it: it takes room in shared memory.

        :param shape: extents, or a number of elements.
        :param dtype: what they are; a name (``"bfloat16"``) or a numpy dtype.
        :param timeout_s: how long to wait for room while earlier sends are unacknowledged.
        :raises ConfigError: it can never fit the agent's memory limit.
        :raises TransferTimeout: no room within ``timeout_s``.
        """
        return self._session.sender.loans.lend(Shape.of(shape, dtype), timeout_s)

    def send(
        self,
        buffer: Any,
        dst: int,
        tag: int = 0,
        *,
        group: str = "",
        traffic: str = "pipeline",
        dtype: Any = None,
        shape: Sequence[int] | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = DEFAULT_ROOM_TIMEOUT_S,
    ) -> None:
        """:meth:`isend` and wait until it is delivered. On TransferTimeout the transfer goes on without a handle."""
        core = self._session.core
        deadline_ns = core.deadline_ns(timeout_s)
        handle = self.isend(
            buffer,
            dst,
            tag,
            group=group,
            traffic=traffic,
            dtype=dtype,
            shape=shape,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
        )
        handle.wait(core.remaining_s(deadline_ns))

    def recv(
        self,
        src: int | None = None,
        tag: int = 0,
        *,
        group: str = "",
        writable: bool = False,
        timeout_s: float | None = None,
    ) -> Message:
        """Receive the channel's next message, without a copy.

        :param src: rank of the sender; None takes the earliest from any.
        :param writable: the message's memory may be written to (copy on write: nobody else sees it).
        :param timeout_s: seconds; None waits without limit.
        :raises TransferTimeout: the receive is taken back, so the next one gets the message.
        :raises PeerLost: the sender has ended and nothing more will come from it.
        """
        receive = self._session.receiver.post(_source(src), _group(group), _tag(tag), None, writable=writable)
        return cast(Message, self._session.receiver.wait(receive, timeout_s, withdraw=True))

    def recv_into(
        self,
        out: Any,
        src: int | None = None,
        tag: int = 0,
        *,
        group: str = "",
        dtype: Any = None,
        timeout_s: float | None = None,
    ) -> int:
        """Receive the channel's next message into ``out``, copying while it is still landing.

        :param out: writable and C-contiguous. Raw bytes (``uint8``) take any message of the same size; a buffer with a
            dtype only that dtype. Shapes may differ as long as the sizes agree.
        :param dtype: names the elements that ``out`` holds when it can't (``"bfloat16"``).
        :returns: bytes received.
        :raises MismatchError: sizes or dtypes differ; ``out`` is untouched, the message stays queued for :meth:`recv`.
        :raises TransferTimeout: the receive is taken back; ``out`` may hold the beginning of the message.
        :raises PeerLost: also in the middle of a message; what ``out`` holds is then undefined.
        """
        into = payload_of(out, dtype, writable=True)
        receive = self._session.receiver.post(_source(src), _group(group), _tag(tag), into)
        return cast(int, self._session.receiver.wait(receive, timeout_s, withdraw=True))

    def irecv(
        self, src: int | None = None, tag: int = 0, *, group: str = "", writable: bool = False
    ) -> Handle[Message]:
        """Post a receive; the handle's ``wait`` returns the message (see :meth:`recv`)."""
        receive = self._session.receiver.post(_source(src), _group(group), _tag(tag), None, writable=writable)
        return Handle(cast("Operation[Message]", receive))

    def irecv_into(
        self,
        out: Any,
        src: int | None = None,
        tag: int = 0,
        *,
        group: str = "",
        dtype: Any = None,
        strict: bool = False,
    ) -> Handle[int]:
        """Post a receive into ``out`` (see :meth:`recv_into`), which must stay alone until the handle is done.

        :param strict: as torch and MPI count: raw bytes are a dtype like any other, and a message that doesn't fit is
            dropped with the receive that it was for, so that the next two belong together again.
        """
        into = payload_of(out, dtype, writable=True)
        receive = self._session.receiver.post(_source(src), _group(group), _tag(tag), into, strict=strict)
        return Handle(cast("Operation[int]", receive))

    def wait_any(
        self,
        handles: Sequence[Handle[Any]],
        timeout_s: float | None = None,
        *,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until one of these receives has ended, well or not, or the time is up; ask them which.

        :param handles: of ``irecv`` and ``irecv_into`` of this endpoint; a few.
        :param interrupted: also return when it says so; it is asked after each :meth:`wake`, and must not call the
            library.
        """
        receives = [handle._operation for handle in handles]
        if not all(isinstance(receive, Receive) for receive in receives):
            raise ArgumentError("wait_any takes handles of receives")
        wait_any(self._session.receiver, cast("list[Receive]", receives), timeout_s, interrupted)

    def wake(self) -> None:
        """Have threads that are in :meth:`wait_any` ask ``interrupted`` again."""
        wake(self._session.receiver)

    def close_group(self, group: str) -> None:
        """Take part in a group no longer: its receives fail with ClosedError, and what was or will be offered in it is
        dropped. Sends go on. The name is not to be used again.
        """
        self._session.receiver.close_group(_group(group))

    def announce(
        self,
        dst: int,
        tag: int = 0,
        *,
        nbytes: int,
        ready_in_s: float = 0.0,
        group: str = "",
        traffic: str = "pipeline",
    ) -> None:
        """Say that a message will be sent, so that its slot is asked for before its bytes exist. A hint: never binding.

        :param nbytes: its size.
        :param ready_in_s: when it will be posted, seconds from now.
        """
        core = self._session.core
        core.check_process()
        size = operator.index(nbytes)
        if not 0 <= size <= MAX_TRANSFER_BYTES:
            raise ArgumentError(f"nbytes must be from 0 to {MAX_TRANSFER_BYTES}, got {nbytes}")
        if not 0 <= ready_in_s < 86400:
            raise ArgumentError(f"ready_in_s must be from 0 to 86400, got {ready_in_s}")
        frame = AnnounceSend(
            dst_rank=_rank("dst", dst),
            group=_group(group),
            tag=_tag(tag),
            traffic=_traffic(traffic),
            nbytes=size,
            ready_in_ns=int(ready_in_s * 1e9),
        )
        with core.lock:
            core.check_open()
            core.link.send(frame)

    def link_state(self, dst: int, *, timeout_s: float | None = 5.0) -> LinkState:
        """What the agent knows of the path to ``dst``. Raises PeerLost when there is none, TransferTimeout."""
        answer = self._session.link_state(_rank("dst", dst), timeout_s)
        return LinkState(
            answer.link,
            answer.source,
            answer.rate_bytes_per_s,
            answer.rtt_ns,
            answer.queue_ns,
            answer.waiting_bytes,
            answer.age_ns,
            answer.confidence_ppm / 1_000_000,
        )

    def eta(self, src: int | None = None, tag: int = 0, *, group: str = "") -> float | None:
        """Predicted seconds until the channel's next message is all here; 0.0 when it is, None when none is known."""
        return self._session.receiver.eta_s(_source(src), _group(group), _tag(tag))

    def close(self, linger_s: float | None = None) -> None:
        """End the endpoint; whatever is pending fails with ClosedError. Messages that were received stay readable.

        :param linger_s: how long to wait for sends to be acknowledged; None takes the agent's linger time.
        """
        core = self._session.core
        core.deadline_ns(linger_s)  # checks it
        self._session.close(linger_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error nobody may be left to receive: don't hold it up.
        self.close(0.0 if kind is not None else None)

    def __repr__(self) -> str:
        return f"<Endpoint {self.job}/{self.rank} at {self._session.address}>"


def connect(
    job: str,
    rank: int,
    *,
    socket: str | os.PathLike[str] | None = None,
    token: str | bytes | None = None,
    timeout_s: float = 10.0,
) -> Endpoint:
    """Register this process as ``job/rank`` with its agent.

    :param job: name of the training job; endpoints reach each other within one job.
    :param rank: global rank in it. The newest process of a rank wins; an older one gets ClosedError.
    :param socket: the agent's Unix socket, or ``tcp://host:port``; default: PROXYD_SOCKET, then /run/proxyd/agent.sock.
    :param token: the secret that this trainer proves: its job's, where the agent asks for one, else (over TCP) the
        site's. Default: what the file holds that PROXYD_TOKEN_FILE names. It is proven, never sent.
    :param timeout_s: how long to wait for an agent that isn't there (yet).
    :raises ConfigError: what waiting can't mend: path too long, no permission, not a socket, wrong token.
    :raises AgentUnavailable: no agent answered in time.
    """
    if not 0 < len(os.fsencode(job)) <= MAX_JOB_BYTES:
        raise ArgumentError(f"job must be a name of 1 to {MAX_JOB_BYTES} bytes, got {job!r}")
    incarnation = int.from_bytes(os.urandom(8), "little") or 1  # not `secrets`: its import costs 10 ms
    identity = Identity(job, _rank("rank", rank), incarnation, b"" if token is None else token_of(token))
    path = None if socket is None else os.fspath(socket)
    return Endpoint(Session(parse_address(path), identity, timeout_s), job, identity.rank)


def _rank(name: str, value: int) -> int:
    rank = operator.index(value)
    if not 0 <= rank <= _MAX_RANK:
        raise ArgumentError(f"{name} must be a rank from 0 to {_MAX_RANK}, got {value}")
    return rank


def _source(src: int | None) -> int | None:
    return None if src is None else _rank("src", src)


def _tag(value: int) -> int:
    tag = operator.index(value)
    if not -_MAX_TAG - 1 <= tag <= _MAX_TAG:
        raise ArgumentError(f"tag must fit 64 signed bits, got {value}")
    return tag


def _group(group: str) -> str:
    if len(group.encode("utf-8", "replace")) > MAX_GROUP_BYTES:
        raise ArgumentError(f"group must be a name of at most {MAX_GROUP_BYTES} bytes, got {group!r}")
    return group


def _traffic(name: str) -> int:
    try:
        return int(TrafficClass.parse(name))
    except (AttributeError, ValueError) as error:
        raise ArgumentError(str(error)) from error


def _due_ns(deadline_s: float | None) -> int:
    if deadline_s is None:
        return 0
    try:
        possible = 0 < deadline_s < MAX_DEADLINE_S
    except TypeError:
        possible = False
    if not possible:
        raise ArgumentError(f"deadline_s is {deadline_s!r}, but must be above 0 and below {MAX_DEADLINE_S:.0f} seconds")
    return time.monotonic_ns() + int(deadline_s * 1e9)
