"""One send: what a handle of ``isend`` stands for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from proxyd.wire.client import CancelSend, SendPhase
from proxyd.wire.envelope import Envelope
from proxyd_client.arena import SendBlock
from proxyd_client.errors import ProxydError, TransferCancelled, TransferTimeout
from proxyd_client.lending import Loan
from proxyd_client.link import Link

if TYPE_CHECKING:
    from proxyd_client.sending import Sender


class Destination(NamedTuple):
    """Where a message goes."""

    dst: int
    tag: int
    group: str
    traffic: int
    due_ns: int = 0
    """When it is wanted there, on the monotonic clock; 0: as soon as its turn comes."""


class Send:
    """One send; an :class:`~proxyd_client.handle.Operation`. Fields are guarded by the session's lock."""

    def __init__(self, sender: Sender, sequence: int, envelope: Envelope, block: SendBlock | None) -> None:
        self._sender = sender
        self._core = sender.core
        self.sequence = sequence
        self.envelope = envelope
        self.block = block
        self.loan: Loan | None = None
        """The trainer's own block that it was posted from; ``block`` is another one where that was in an earlier life's
        arena."""
        self.copying = False
        self.delivered = False
        """Handed over within the host: done, while its block is still the receiver's."""
        self.ended = False
        """Off the books: nothing more will be said of it, and its block is free."""
        self.error: ProxydError | None = None
        self.link: Link | None = None
        """Where it was posted; the connection may have ended since. None: nowhere yet."""
        self.again = False
        """It is to be posted to another life of the agent than before."""
        self.origin: SendBlock | None = None
        """All of its bytes in an arena of an earlier life of the agent, while they are being copied into ``block``."""
        self.dst_incarnation = 0
        """For this life of its destination only; 0: for any."""
        self.cancel_asked = False
        self.callbacks: tuple[Callable[[], None], ...] = ()
        self.due_ns = 0
        self.phase = SendPhase.RESOLVE
        self.bytes_done = 0
        self.finish_at_ns = 0

    @property
    def is_lent(self) -> bool:
        """Its block is the trainer's to write to, and stays so when it ends."""
        return self.loan is not None and self.block is self.loan.block

    @property
    def settled(self) -> bool:
        """Its outcome is known."""
        return self.ended or self.delivered

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it is acknowledged end to end."""
        core = self._core
        core.check_process()
        deadline_ns = core.deadline_ns(timeout_s)
        with core.lock:
            if not core.progress.wait_for(lambda: self.settled, deadline_ns):
                raise self._timeout(f"is not done after {timeout_s:g} s")
            if self.error is not None and not self.delivered:
                raise self.error.again()

    def poll(self) -> bool:
        """Whether it has ended; reads what is there."""
        core = self._core
        core.check_process()
        with core.lock:
            if not self.settled:
                core.progress.poll_now()
            return self.settled

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """See :meth:`Handle.call_when_done`."""
        core = self._core
        core.check_process()
        with core.lock:
            if self.settled:
                core.calls.put(callback)
            else:
                self.callbacks += (callback,)

    @property
    def source(self) -> int | None:
        """This endpoint's own rank."""
        return self.envelope.src_rank

    def eta_s(self) -> float | None:
        """Seconds until the predicted acknowledgement."""
        if self.settled:
            return 0.0
        return max(0.0, (self.finish_at_ns - time.monotonic_ns()) / 1e9) if self.finish_at_ns else None

    def cancel(self) -> bool:
        """Ask the agent to drop it."""
        core = self._core
        core.check_process()
        with core.lock:
            if self.settled:
                return False
            self.cancel_asked = True
            if self.link is core.link and not core.away:
                core.link.send(CancelSend(self.sequence))
            else:
                self.fail(TransferCancelled, "was cancelled", "", "")
            return True

    def describe(self) -> str:
        """State in one line."""
        state = "ended" if self.settled else self.phase.label
        return f"send to {self._core.name_of(self.envelope.dst_rank)}, tag {self.envelope.tag}: {state}"

    def fail(self, kind: type[ProxydError], what: str, why: str, next_step: str, phase: str = "") -> None:
        """End with an error; with the lock held."""
        envelope = self.envelope
        self.error = kind(
            f"send to {self._core.name_of(envelope.dst_rank)} ({self._core.channel(envelope.tag, envelope.group)}) "
            f"{what} ({phase or self.phase.label}, {self.bytes_done} of {envelope.nbytes} bytes done)",
            why=why,
            next_step=next_step,
            peer=envelope.dst_rank,
            tag=envelope.tag,
            group=envelope.group,
            phase=phase or self.phase.label,
            bytes_done=self.bytes_done,
        )
        self._sender.end(self)

    def _timeout(self, what: str) -> TransferTimeout:
        envelope = self.envelope
        return TransferTimeout(
            f"send to {self._core.name_of(envelope.dst_rank)} ({self._core.channel(envelope.tag, envelope.group)}) "
            f"{what}: {self.phase.label}, {self.bytes_done} of {envelope.nbytes} bytes done",
            next_step="The transfer goes on: wait again, or cancel() it",
            peer=envelope.dst_rank,
            tag=envelope.tag,
            group=envelope.group,
            phase=self.phase.label,
            bytes_done=self.bytes_done,
        )
