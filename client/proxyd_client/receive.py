"""One posted receive: what a handle of ``irecv`` and ``irecv_into`` stands for."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, TypeVar

from proxyd.wire.client import SendPhase
from proxyd.wire.envelope import Envelope
from proxyd_client.buffers import Payload, misfit
from proxyd_client.errors import ProxydError
from proxyd_client.matching import Incoming, Posted
from proxyd_client.message import Message

if TYPE_CHECKING:
    from proxyd_client.receiving import Receiver

E = TypeVar("E", bound=ProxydError)


class Receive(Posted):
    """One receive; an :class:`~proxyd_client.handle.Operation` that gives a Message, or the byte count of ``into``."""

    __slots__ = (
        "_receiver",
        "callbacks",
        "copied_bytes",
        "copying",
        "ended",
        "error",
        "into",
        "origin",
        "result",
        "waiters",
        "writable",
    )

    def __init__(
        self,
        receiver: Receiver,
        src: int | None,
        group: str,
        tag: int,
        into: Payload | None,
        *,
        strict: bool = False,
        writable: bool = False,
    ) -> None:
        def check(envelope: Envelope) -> str:
            if into is None:
                return ""
            return misfit(into, envelope.dtype, envelope.shape, envelope.nbytes, strict=strict)

        super().__init__(src, group, tag, check, drops=strict)
        self._receiver = receiver
        self.callbacks: tuple[Callable[[], None], ...] = ()
        self.origin: int | None = src
        self.into = into
        self.writable = writable
        self.copied_bytes = 0
        self.copying = False
        self.waiters = 0
        self.ended = False
        self.error: ProxydError | None = None
        self.result: Message | int | None = None

    @property
    def is_open(self) -> bool:
        """No message has been matched to it, and it has not failed."""
        return self.incoming is None and not self.ended

    @property
    def copy_is_due(self) -> bool:
        """Bytes have landed that are not copied, and nobody copies."""
        incoming = self.incoming
        return (
            self.into is not None
            and incoming is not None
            and not self.copying
            and not self.ended
            and incoming.landed_bytes > self.copied_bytes
            and (self.into.mover is None or incoming.complete)  # a mover moves all in one pass
        )

    @property
    def copy_is_due_here(self) -> bool:
        """Whoever waits for it is to copy."""
        return self.copy_is_due and not self.for_background

    @property
    def for_background(self) -> bool:
        """Its copies are the background thread's, whoever waits."""
        return self.into is not None and self.into.mover is not None and self.into.mover.waits

    def wait(self, timeout_s: float | None) -> Message | int:
        """Wait for the message; on a timeout the receive stays posted."""
        return self._receiver.wait(self, timeout_s, withdraw=False)

    def poll(self) -> bool:
        """Whether it has ended; reads what is there, and copies a piece of it."""
        return self._receiver.poll(self)

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """See :meth:`Handle.call_when_done`."""
        core = self._receiver.core
        core.check_process()
        with core.lock:
            if self.ended:
                core.calls.put(callback)
            else:
                self.callbacks += (callback,)

    @property
    def source(self) -> int | None:
        """Rank of the sender; None while that is open."""
        return self.origin

    def eta_s(self) -> float | None:
        """Seconds until the predicted arrival of the last byte."""
        if self.ended:
            return 0.0
        return eta_s(self.incoming) if self.incoming is not None else None

    def cancel(self) -> bool:
        """Take it back."""
        return self._receiver.cancel(self)

    def failure(self, kind: type[E], what: str, why: str, next_step: str, peer: int | None = None) -> E:
        """An error that says what this is, and how far it was; with the session's lock held."""
        core, incoming = self._receiver.core, self.incoming
        if peer is None:
            peer = incoming.envelope.src_rank if incoming is not None else self.src
        return kind(
            f"receive from {core.name_of(peer)} ({core.channel(self.tag, self.group)}) {what}",
            why=why,
            next_step=next_step,
            peer=peer,
            tag=self.tag,
            group=self.group,
            phase=SendPhase.AGENT_AWAY.label if core.away else self.phase,
            bytes_done=incoming.landed_bytes if incoming is not None else 0,
        )

    def describe(self) -> str:
        """State in one line."""
        return f"receive from {self._receiver.core.name_of(self.src)}, tag {self.tag}: {self.phase}"

    @property
    def phase(self) -> str:
        """What it waits for, in words."""
        if self.ended:
            return "ended"
        if self.incoming is None:
            return "waiting for a message"
        if self.incoming.awaited:
            return "waiting for its sender to go on after the restart of the agent"
        if self.incoming.arena or self.incoming.landed_bytes:
            return "landing"
        return "waiting for memory at the agent" if self.incoming.envelope.nbytes else "landing"

    def missing(self, here: Container[int], queued_elsewhere: Sequence[Envelope]) -> str:
        """Why it has not ended, in words.

        :param here: ranks that are registered.
        :param queued_elsewhere: messages from its source that wait on other channels.
        """
        core, incoming = self._receiver.core, self.incoming
        if core.away:
            return SendPhase.AGENT_AWAY.label  # whatever else is missing, it is for want of the agent
        if incoming is not None:
            return f"{self.phase}, {incoming.landed_bytes} of {incoming.envelope.nbytes} bytes have landed"
        if self.src is not None and self.src not in here:
            return f"no process is registered as {core.name_of(self.src)}"
        what = "no message was offered"
        if queued_elsewhere:
            first = queued_elsewhere[0].describe()
            what += f" on this channel, but {len(queued_elsewhere)} wait on others, the first one {first}"
        return what


def eta_s(incoming: Incoming) -> float | None:
    """Predicted seconds until all of a message is here; None when nothing is predicted."""
    if incoming.complete:
        return 0.0
    if not incoming.finish_at_ns:
        return None
    return max(0.0, (incoming.finish_at_ns - time.monotonic_ns()) / 1e9)
