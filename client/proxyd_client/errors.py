"""What the library raises.

====================================  ==================================================================
class                                 meaning
====================================  ==================================================================
:class:`ArgumentError`                the call itself is wrong (also a ValueError)
:class:`ConfigError`                  the installation or its settings are wrong; only a person can put it right
:class:`AgentUnavailable`             this host's agent can't be reached, or did not come back in time
:class:`PeerLost`                     the other endpoint is gone, or was never there
:class:`TransferTimeout`              not done within ``timeout_s``; the transfer itself goes on (also a TimeoutError)
:class:`TransferFailed`               an agent gave the transfer up for another reason
:class:`TransferCancelled`            cancelled by its own side
:class:`MismatchError`                the message that came does not fit the buffer that was offered
:class:`ClosedError`                  this endpoint is closed, replaced by a newer one, or belongs to the parent process
====================================  ==================================================================

Every error carries ``peer`` (rank), ``tag``, ``group``, ``phase`` and ``bytes_done``; its text names them together with
what happened, why, and what to do next. Its ``code`` is for scripts and searches and stays when texts change
(docs/errors.md).
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from proxyd.wire.envelope import ErrorCode


class ProxydError(Exception):
    """Root of everything this library raises on purpose.

    :param what: what happened, with the numbers; one sentence without a full stop.
    :param why: the cause; empty when *what* already says it.
    :param next_step: what the reader should do; empty when there is nothing to do.
    :param peer: rank of the other endpoint; None when there is none (or any source is meant).
    :param tag: the message's tag; None when no message is concerned.
    :param group: the message's group.
    :param phase: what the transfer was waiting for or doing, in words.
    :param bytes_done: bytes acknowledged (send) or landed (receive) by then.
    """

    code: ClassVar[str] = "failed"

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        next_step: str = "",
        peer: int | None = None,
        tag: int | None = None,
        group: str = "",
        phase: str = "",
        bytes_done: int = 0,
    ) -> None:
        self.what = what
        self.why = why
        self.next_step = next_step
        self.peer = peer
        self.tag = tag
        self.group = group
        self.phase = phase
        self.bytes_done = bytes_done
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.what}: {self.why}" if self.why else self.what
        return f"{text}. {self.next_step}" if self.next_step else text

    def again(self) -> Self:
        """A fresh copy: raising one instance twice would pile up its traceback."""
        return type(self)(self.what, **self._details())

    def _details(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "what" and not name.startswith("_")}

    def __reduce__(self) -> tuple[object, ...]:
        # The default would drop the keyword arguments when an error crosses a process boundary.
        return _rebuild, (type(self), self.what, self._details())


def _rebuild(kind: type[ProxydError], what: str, details: dict[str, Any]) -> ProxydError:
    return kind(what, **details)


class ArgumentError(ProxydError, ValueError):
    """The call is wrong: a strided buffer, a tag out of range, an unknown traffic class."""

    code = "argument"


class ConfigError(ProxydError):
    """A setting is wrong: socket path, token, job, or a message larger than the agent's memory limit."""

    code = "config"


class AgentUnavailable(ProxydError, ConnectionError):
    """No agent listens at the configured place, or the agent of this endpoint is gone and did not come back in time."""

    code = "agent-unavailable"


class PeerLost(ProxydError, ConnectionError):
    """The other endpoint is gone, or unknown. What it had already delivered can still be received."""

    code = "peer-lost"


class TransferTimeout(ProxydError, TimeoutError):
    """``timeout_s`` is over. Nothing is cancelled and everything stays in step: wait again, or cancel."""

    code = "transfer-timeout"


class TransferFailed(ProxydError):
    """An agent gave the transfer up: out of memory, corrupt, protocol or internal error, coordinator lost."""

    code = "transfer-failed"


class TransferCancelled(ProxydError):
    """The transfer was cancelled before it was delivered."""

    code = "transfer-cancelled"


class MismatchError(ProxydError):
    """The message does not fit the buffer; the buffer is untouched and the message stays queued for ``recv``."""

    code = "mismatch"


class ClosedError(ProxydError):
    """The endpoint is closed, was replaced by a newer process of the same rank, or belongs to another process."""

    code = "closed"


_CLASS_OF_CODE: dict[int, type[ProxydError]] = {
    ErrorCode.CONFIG: ConfigError,
    ErrorCode.AGENT_UNAVAILABLE: AgentUnavailable,
    ErrorCode.PEER_LOST: PeerLost,
    ErrorCode.UNKNOWN_DESTINATION: PeerLost,
    ErrorCode.TIMEOUT: TransferTimeout,
    ErrorCode.MISMATCH: MismatchError,
    ErrorCode.CLOSED: ClosedError,
    ErrorCode.CANCELLED: TransferCancelled,
    ErrorCode.REFUSED: ConfigError,
    ErrorCode.AGENT_STOPS: AgentUnavailable,
}

_NEXT_STEP_OF_CODE: dict[int, str] = {
    ErrorCode.PEER_LOST: "Restart that rank, or go on without it",
    ErrorCode.UNKNOWN_DESTINATION: "Check the rank, and that its process is connected to an agent under the same job",
    ErrorCode.CORRUPT: "Send it again; if it happens again, look at the agents' logs for the link at fault",
    ErrorCode.RESOURCE: "Receive or release messages that are held, or raise the agent's memory limit",
    ErrorCode.PROTOCOL: "Run the same version of proxyd on both sides",
    ErrorCode.CONTROL_LOST: "Look at the coordinator (`proxyd status`) and send it again",
    ErrorCode.INTERNAL: "This is a bug in proxyd; its agent's log has the details",
}


def class_of_code(code: int) -> type[ProxydError]:
    """Exception class for a code that came over the wire; TransferFailed for what has no class of its own."""
    return _CLASS_OF_CODE.get(code, TransferFailed)


def next_step_of_code(code: int) -> str:
    """What the reader should do about a code, one sentence without a full stop; empty when the text says it."""
    return _NEXT_STEP_OF_CODE.get(code, "")
