"""A trainer: posts messages, takes what it is offered, and keeps a record of each message's fate."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from proxyd.core import events as ev
from proxyd.core.ids import EndpointName, TransferId
from proxyd.sim.clock import Clock
from proxyd.sim.link import NANOS
from proxyd.wire.client import FILL_CHUNK_BYTES
from proxyd.wire.envelope import Envelope, ErrorCode, TrafficClass

COPY_BYTES_PER_S = 2_000_000_000
"""How fast a trainer copies a tensor into its arena."""


@dataclasses.dataclass(slots=True)
class Fate:
    """What became of one message."""

    transfer: TransferId
    envelope: Envelope
    posted_ns: int
    offered_ns: int = 0
    landed_bytes: int = 0
    landed_ns: int = 0
    """Its last byte was in the receiver's memory, and the receiver knew."""
    done_ns: int = 0
    failed: ErrorCode | None = None
    failure: str = ""
    receive_failed: ErrorCode | None = None
    cancelled: bool = False
    on_landed: Callable[[Fate], None] | None = dataclasses.field(default=None, repr=False, compare=False)
    """What a workload does when the receiver has it."""
    on_settled: Callable[[Fate], None] | None = dataclasses.field(default=None, repr=False, compare=False)
    """What a workload does when the sender knows how it ended."""

    @property
    def settled(self) -> bool:
        """Its sender knows how it ended."""
        return bool(self.done_ns) or self.failed is not None

    @property
    def fct_ns(self) -> int:
        """From the send to the receiver's last byte; 0 when that never came."""
        return self.landed_ns - self.posted_ns if self.landed_ns else 0


class Trainer:
    """One endpoint. ``emit`` brings its events to its agent; ``fates`` is shared by all trainers of a world."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        endpoint: EndpointName,
        incarnation: int,
        emit: Callable[[ev.AgentEvent], None],
        fates: dict[TransferId, Fate],
        *,
        accept_after_ns: int = 200_000,
        release_after_ns: int = 1_000_000,
    ) -> None:
        self.endpoint = endpoint
        self.incarnation = incarnation
        self.alive = True
        self.offers: list[TransferId] = []
        """Messages in the order in which this trainer was told of them."""
        self.posts: list[TransferId] = []
        self._clock = clock
        self._rng = rng
        self._emit = emit
        self._fates = fates
        self._accept_after_ns = accept_after_ns
        self._release_after_ns = release_after_ns

    def send(
        self,
        dst_rank: int,
        nbytes: int,
        traffic: TrafficClass,
        tag: int = 0,
        *,
        on_landed: Callable[[Fate], None] | None = None,
        on_settled: Callable[[Fate], None] | None = None,
    ) -> TransferId:
        """Post a message; it is copied while it may already be asked for."""
        transfer = TransferId(self.incarnation, len(self.posts) + 1)
        envelope = Envelope(
            self.endpoint.job, self.endpoint.rank, dst_rank, "", tag, traffic, nbytes, "uint8", (nbytes,)
        )
        self.posts.append(transfer)
        self._fates[transfer] = Fate(transfer, envelope, self._clock.now_ns, on_landed=on_landed, on_settled=on_settled)
        self._emit(ev.SendPosted(transfer, envelope, 0))
        self._fill(transfer, min(FILL_CHUNK_BYTES, nbytes), nbytes)
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        """Give a message up."""
        if self.alive and not self._fates[transfer].settled:
            self._fates[transfer].cancelled = True
            self._emit(ev.SendCancelled(transfer))

    def _fill(self, transfer: TransferId, filled_bytes: int, nbytes: int) -> None:
        if nbytes == 0:
            return

        def filled() -> None:
            if self.alive:
                self._emit(ev.SendFilled(transfer, filled_bytes))
                if filled_bytes < nbytes:
                    self._fill(transfer, min(filled_bytes + FILL_CHUNK_BYTES, nbytes), nbytes)

        self._clock.after(min(FILL_CHUNK_BYTES, nbytes) * NANOS // COPY_BYTES_PER_S, filled)

    # ------------------------------------------------------------------------ what the agent says

    def offered(self, transfer: TransferId, has_memory: bool) -> None:
        """A message is coming; without memory it waits for a receive, which this trainer posts soon."""
        self.offers.append(transfer)
        fate = self._fates[transfer]
        fate.offered_ns = self._clock.now_ns
        if not has_memory and fate.envelope.nbytes:
            delay_ns = self._rng.randrange(self._accept_after_ns, 4 * self._accept_after_ns)
            self._clock.after(delay_ns, lambda: self._if_alive(ev.RecvAccepted(transfer)))

    def landed(self, transfer: TransferId, nbytes: int) -> None:
        """So much of a message is in place; a whole one is used for a while and released."""
        fate = self._fates[transfer]
        if nbytes <= fate.landed_bytes and fate.envelope.nbytes:
            raise AssertionError(f"{transfer}: landed {nbytes} bytes after {fate.landed_bytes}")
        fate.landed_bytes = nbytes
        if nbytes == fate.envelope.nbytes:
            if fate.landed_ns:
                raise AssertionError(f"{transfer}: delivered twice")
            fate.landed_ns = self._clock.now_ns
            self._clock.after(self._release_after_ns, lambda: self._if_alive(ev.RecvReleased(transfer)))
            if fate.on_landed is not None:
                self._clock.after(0, fate.on_landed, fate)  # not while its agent handles the event

    def send_done(self, transfer: TransferId) -> None:
        """A message was acknowledged."""
        fate = self._fates[transfer]
        if fate.settled:
            raise AssertionError(f"{transfer}: done after it was settled")
        fate.done_ns = self._clock.now_ns
        self._tell_settled(fate)

    def send_failed(self, transfer: TransferId, code: ErrorCode, message: str) -> None:
        """A message failed."""
        fate = self._fates[transfer]
        if fate.settled:
            raise AssertionError(f"{transfer}: failed after it was settled: {message}")
        fate.failed = code
        fate.failure = message
        self._tell_settled(fate)

    def _tell_settled(self, fate: Fate) -> None:
        if fate.on_settled is not None:
            self._clock.after(0, fate.on_settled, fate)

    def receive_failed(self, transfer: TransferId, code: ErrorCode) -> None:
        """An offered message will not come."""
        self._fates[transfer].receive_failed = code

    def _if_alive(self, event: ev.AgentEvent) -> None:
        if self.alive:
            self._emit(event)
