"""Receiving: matching offered messages to posted receives, and getting their bytes to where they are wanted.

``recv`` hands out a view of the block once all of it is there. ``recv_into`` copies while the message is still landing
(cut-through): whoever waits for it copies; for a receive that nobody waits for, the background thread does. A copy runs
without the lock, and one at a time per receive (:attr:`Receive.copying`), so a receive can't end, nor its buffer go
back to the caller, under a running copy. What becomes of all this when the agent ends: :mod:`proxyd_client.resuming`.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import cast

import numpy as np

from proxyd.wire.client import (
    Accept,
    ArenaKind,
    Block,
    Expect,
    Frame,
    Landed,
    Offered,
    PeerGone,
    PeerHere,
    RecvData,
    RecvFailed,
    Release,
    encode,
)
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import MAX_TRANSFER_BYTES, ErrorCode, TransferId
from proxyd_client.arena import LARGE_BYTES, Mapping
from proxyd_client.buffers import Bytes, Payload
from proxyd_client.core import SessionCore
from proxyd_client.errors import (
    ClosedError,
    MismatchError,
    PeerLost,
    ProxydError,
    TransferCancelled,
    TransferFailed,
    TransferTimeout,
    class_of_code,
    next_step_of_code,
)
from proxyd_client.forecast import Forecast
from proxyd_client.link import Link
from proxyd_client.matching import Incoming, Matcher, Outcome
from proxyd_client.message import Message
from proxyd_client.private import Private
from proxyd_client.receive import Receive, eta_s
from proxyd_client.resuming import Knowledge

_COPY_BYTES = 4 << 20
SMALL_BYTES = 64 << 10
"""Copied at once by whoever hears of it, with the lock held: that takes less than to hand it to another thread."""
LOST_GRACE_S = 0.3
"""A restarted rank is announced a moment after the end of its former life: so long its receives don't fail."""


class Receiver:
    """The receiving half of a session. Everything but the public calls runs with the session's lock held."""

    def __init__(self, core: SessionCore) -> None:
        self.core = core
        self._matcher = Matcher()
        self._incoming: dict[TransferId, Incoming] = {}
        self._arenas: dict[int, Mapping] = {}
        self._private = Private()
        self._landing: dict[int, Receive] = {}
        self._knowledge = Knowledge()
        self._unconfirmed: dict[int, int] = {}
        """Ranks that were here when the agent ended, and of which its next life has said nothing yet."""
        self._missing_timer: threading.Timer | None = None
        self._here: dict[int, int] = {}
        """Ranks that are registered (or out of reach), and their lives."""
        self._leaving: dict[int, PeerGone] = {}
        """Those that are gone or out of reach, if the next moment doesn't show otherwise."""
        self._gone: dict[int, str] = {}
        self.forecast = Forecast()

    # -- calls -------------------------------------------------------------------------------------------------------

    def post(
        self,
        src: int | None,
        group: str,
        tag: int,
        into: Payload | None,
        *,
        strict: bool = False,
        writable: bool = False,
    ) -> Receive:
        """Post a receive."""
        core = self.core
        core.check_process()
        receive = Receive(self, src, group, tag, into, strict=strict, writable=writable)
        with core.lock:
            core.check_open()
            self._settle(self._matcher.post(receive))
            if self._lost(receive) is not None:
                # A newer life of the peer, or a message, may wait in the socket's buffer.
                core.progress.poll_now()
                if (why := self._lost(receive)) is not None:
                    self._fail_lost(receive, why)
        return receive

    def wait(self, receive: Receive, timeout_s: float | None, *, withdraw: bool) -> Message | int:
        """Wait for a receive, copying what lands. ``withdraw``: take it back when time is up."""
        core = self.core
        core.check_process()
        deadline_ns = core.deadline_ns(timeout_s)
        with core.lock:
            receive.waiters += 1
            try:
                while not receive.ended:
                    if receive.copy_is_due_here:
                        self.copy_step(receive)
                    elif not core.waiting.wait_for(lambda: receive.ended or receive.copy_is_due_here, deadline_ns):
                        raise self._timeout(receive, timeout_s)
                core.progress.wait_locally(lambda: not receive.copying)
            except BaseException:
                if withdraw:
                    self._withdraw(receive)
                raise
            finally:
                receive.waiters -= 1
                if receive.copy_is_due:
                    core.progress.call_background()
            if receive.error is not None:
                raise receive.error.again()
            if receive.result is None:
                raise RuntimeError("a receive ended without a result")  # unreachable: _complete sets it
            return receive.result

    def poll(self, receive: Receive) -> bool:
        """See :meth:`Receive.poll`."""
        core = self.core
        core.check_process()
        with core.lock:
            if not receive.ended:
                core.progress.poll_now()
                if receive.copy_is_due_here:
                    self.copy_step(receive)
            return receive.ended and not receive.copying

    def cancel(self, receive: Receive) -> bool:
        """See :meth:`Receive.cancel`."""
        core = self.core
        core.check_process()
        with core.lock:
            if receive.ended:
                return False
            if self._withdraw(receive):
                self._end(receive, receive.failure(TransferCancelled, "was cancelled", "", ""))
                return True
            return False

    def eta_s(self, src: int | None, group: str, tag: int) -> float | None:
        """Seconds until the channel's next message is all here; 0.0 when it is, None when nothing is known of it."""
        core = self.core
        core.check_process()
        with core.lock:
            core.check_open()
            core.progress.poll_now()
            candidates = [
                incoming
                for incoming in self._incoming.values()
                if src in (None, incoming.envelope.src_rank)
                and (incoming.envelope.group, incoming.envelope.tag) == (group, tag)
            ]
            if candidates:
                return eta_s(min(candidates, key=lambda incoming: incoming.number))
            return self.forecast.eta_s(src, group, tag, time.monotonic_ns())

    def close_group(self, group: str) -> None:
        """See :meth:`Endpoint.close_group`."""
        core = self.core
        core.check_process()
        with core.lock:
            if core.failure is not None:
                return
            open_ones = self._matcher.close_group(group)
            held = [i.receive for i in self._incoming.values() if i.envelope.group == group and i.receive]
            for receive in cast("list[Receive]", [*open_ones, *held]):
                if self._withdraw(receive):
                    self._end(receive, receive.failure(ClosedError, "was given up", "its group was closed", ""))
            for incoming in self._matcher.of_group(group):
                self._matcher.retract(incoming)
                self._drop(incoming)

    # -- frames ------------------------------------------------------------------------------------------------------

    def add_arena(self, mapping: Mapping) -> None:
        """An arena that messages arrive in."""
        self._arenas[mapping.arena] = mapping

    def on_offered(self, frame: Offered) -> None:
        """A message is on its way."""
        incoming = self._incoming.get(frame.transfer)
        if incoming is not None and incoming.awaited and incoming.envelope == frame.envelope:
            incoming.awaited = False
            incoming.link = self.core.link
            incoming.offers += 1
            if frame.arena:
                self._place(incoming, frame.arena, frame.offset, frame.landed_bytes)
            self._advance(incoming)
            return
        if incoming is not None or not self._knowledge.offered(frame.envelope.src_rank, frame.transfer):
            raise WireError(f"transfer {frame.transfer} was offered twice, or out of turn")
        if frame.envelope.nbytes > MAX_TRANSFER_BYTES:
            raise WireError(f"transfer {frame.transfer} claims {frame.envelope.nbytes} bytes")
        incoming = Incoming(frame.transfer, frame.envelope, link=self.core.link)
        incoming.finish_at_ns = self.forecast.offered(frame.transfer, frame.envelope)
        if frame.arena:
            self._place(incoming, frame.arena, frame.offset, frame.landed_bytes)
        self._incoming[frame.transfer] = incoming
        if not frame.envelope.nbytes:
            self._knowledge.delivered(frame.envelope.src_rank, frame.transfer)
        if self._matcher.is_closed(frame.envelope.group):
            self._drop(incoming)
        else:
            self._settle(self._matcher.offer(incoming))

    def on_block(self, frame: Block) -> None:
        """Memory for an accepted message."""
        incoming = self._incoming.get(TransferId(frame.incarnation, frame.sequence))
        if incoming is not None:
            self._place(incoming, frame.arena, frame.offset)

    def on_landed(self, frame: Landed) -> None:
        """More of a message is there."""
        incoming = self._incoming.get(TransferId(frame.incarnation, frame.sequence))
        if incoming is None or frame.nbytes <= incoming.landed_bytes:
            return
        self._landed(incoming, frame.nbytes)
        self._advance(incoming)

    def _landed(self, incoming: Incoming, nbytes: int) -> None:
        if nbytes > incoming.envelope.nbytes or not incoming.arena:
            raise WireError(f"{nbytes} bytes of transfer {incoming.transfer} landed, more than it has room for")
        incoming.landed_bytes = nbytes
        if incoming.complete:
            self._knowledge.delivered(incoming.envelope.src_rank, incoming.transfer)

    def data_target(self, frame: RecvData, payload_bytes: int) -> memoryview | None:
        """Where the payload of a RECV_DATA goes (TCP); None for a transfer that is no longer known."""
        incoming = self._incoming.get(TransferId(frame.incarnation, frame.sequence))
        if incoming is None:
            return None
        return self._private.room_for(incoming, frame, payload_bytes)

    def on_data(self, frame: RecvData) -> None:
        """The payload that :meth:`data_target` made room for is in place."""
        incoming = self._incoming.get(TransferId(frame.incarnation, frame.sequence))
        if incoming is not None:
            self._private.filled(incoming)
            self._advance(incoming)

    def on_failed(self, frame: RecvFailed) -> None:
        """A message will not come."""
        incoming = self._incoming.pop(TransferId(frame.incarnation, frame.sequence), None)
        if incoming is None:
            return
        self._private.forget(incoming.transfer)
        if frame.code == ErrorCode.CANCELLED:
            # As if it had never been offered: a receive that had it starts again with the next one.
            receive = cast("Receive | None", incoming.receive)
            if receive is not None:
                self._landing.pop(id(receive), None)
                receive.copied_bytes = 0
            self._settle(self._matcher.retract(incoming))
            return
        incoming.failed = frame.code, frame.message, frame.bytes_done
        if incoming.receive is not None:
            self._fail_with(cast(Receive, incoming.receive), incoming)

    def on_expect(self, frame: Expect) -> None:
        """A prediction; it may come before the offer that it is about."""
        transfer, finish_at_ns = TransferId(frame.incarnation, frame.sequence), time.monotonic_ns() + frame.finish_in_ns
        if (incoming := self._incoming.get(transfer)) is None:
            self.forecast.expected(transfer, finish_at_ns)
        else:
            incoming.finish_at_ns = finish_at_ns

    def on_peer_here(self, frame: PeerHere) -> None:
        """A rank is registered, or within reach again."""
        self._here[frame.rank] = frame.incarnation
        self._unconfirmed.pop(frame.rank, None)
        self._leaving.pop(frame.rank, None)
        self._gone.pop(frame.rank, None)

    def on_peer_gone(self, frame: PeerGone) -> None:
        """A rank has ended, or can't reach us: only what it offered may still land (or fail by itself)."""
        if self._here.get(frame.rank, frame.incarnation) != frame.incarnation:
            return  # a newer life of it is here already
        if not frame.returns:
            self._here.pop(frame.rank, None)
            self._unconfirmed.pop(frame.rank, None)
        self._leaving[frame.rank] = frame
        self.forecast.lost(frame.rank)
        timer = threading.Timer(LOST_GRACE_S, self._declare_lost, (frame,))
        timer.daemon = True
        timer.start()

    def _declare_lost(self, frame: PeerGone) -> None:
        """Unless it is here again, or another life of it, its receives fail; in a thread of its own."""
        with self.core.lock:
            if self.core.failure is None and self._leaving.get(frame.rank) is frame:
                del self._leaving[frame.rank]
                self._lose(frame.rank, frame.message or "its process has ended")

    def _lose(self, rank: int, why: str) -> None:
        self._gone[rank] = why
        for receive in self._matcher.waiting_for(rank):
            self._fail_lost(cast(Receive, receive), why)

    def life_of(self, rank: int) -> int:
        """The life of a rank that is registered, as far as this endpoint knows; 0: none."""
        return self._here.get(rank, 0)

    # -- the agent's next life ---------------------------------------------------------------------------------------

    def agent_lost(self) -> None:
        """The agent is gone, and all that it had said is read. What is whole is delivered; the rest is awaited."""
        if self._missing_timer is not None:
            self._missing_timer.cancel()
        whole = []
        for incoming in self._incoming.values():
            mapping, nbytes = incoming.mapping, incoming.envelope.nbytes
            if incoming.complete or incoming.awaited:
                continue
            if (
                mapping is not None
                and mapping.kind is ArenaKind.RECEIVE
                and mapping.holds_all(incoming.transfer, nbytes, incoming.offset)
            ):
                incoming.landed_bytes = nbytes
                self._knowledge.delivered(incoming.envelope.src_rank, incoming.transfer)
                whole.append(incoming)
                continue
            incoming.awaited = True
            incoming.offers += 1
            incoming.accepted = False
            incoming.mapping = None
            incoming.arena = incoming.offset = incoming.landed_bytes = incoming.finish_at_ns = 0
            receive = cast("Receive | None", incoming.receive)
            if receive is not None:
                self._landing.pop(id(receive), None)
                receive.copied_bytes = 0
        self._arenas.clear()
        self.forecast.clear()
        for incoming in whole:
            self._advance(incoming)

    def what_it_knows(self) -> list[Frame]:
        """For the agent's next life, before anything else is said."""
        awaited = [(i.envelope.src_rank, i.transfer) for i in self._incoming.values() if i.awaited]
        return self._knowledge.frames(awaited)

    def agent_back(self, timeout_s: float) -> None:
        """Its next life is there. A rank that it doesn't name within the time has ended meanwhile."""
        self._unconfirmed = dict(self._here)
        if self._unconfirmed:
            self._missing_timer = threading.Timer(timeout_s, self._declare_missing, (self.core.link, timeout_s))
            self._missing_timer.daemon = True
            self._missing_timer.start()

    def _declare_missing(self, link: Link, timeout_s: float) -> None:
        """In a thread of its own."""
        with self.core.lock:
            if self.core.failure is not None or self.core.link is not link:
                return
            for rank, incarnation in sorted(self._unconfirmed.items()):
                if self._here.get(rank) == incarnation:
                    del self._here[rank]
                    self._lose(rank, f"it was not seen again within {timeout_s:g} s of the return of this host's agent")
            self._unconfirmed.clear()

    def fail_all(self, error: ProxydError) -> None:
        """The session ended: every receive that isn't complete fails. Arenas go, except for those that views lie in."""
        waiting = [cast(Receive, receive) for receive in self._matcher.all_waiting()]
        held = [cast(Receive, i.receive) for i in self._incoming.values() if i.receive is not None]
        for receive in (*waiting, *held):
            if not receive.ended:
                what = "was given up"
                if (incoming := receive.incoming) is not None:
                    done = f"{incoming.landed_bytes} of {incoming.envelope.nbytes} bytes done"
                    what = f"was given up ({receive.phase}, {done})"
                self._end(receive, receive.failure(type(error), what, str(error), ""))
            if receive.incoming is not None:
                self._matcher.finished(receive.incoming)  # they refer to each other, and so would keep the buffer
        if self._missing_timer is not None:
            self._missing_timer.cancel()
        self._matcher = Matcher()
        self._incoming.clear()
        self._private.clear()
        self._landing.clear()
        self._arenas.clear()

    # -- inside ------------------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Copy a piece of a posted receive that nobody waits for; whether there was one."""
        for receive in self._landing.values():
            if receive.copy_is_due and (receive.for_background or not receive.waiters):
                self.copy_step(receive)
                return True
        return False

    def trim(self) -> None:
        """Nothing has happened for a while: what messages left in the resident set goes (views fault it in again)."""
        for mapping in self._arenas.values():
            mapping.forget_pages(0, mapping.size_bytes)

    def _place(self, incoming: Incoming, arena: int, offset: int, landed_bytes: int = 0) -> None:
        mapping = self._arenas.get(arena)
        if mapping is None:
            raise WireError(f"transfer {incoming.transfer} lies in arena {arena}, which was never granted")
        mapping.block(offset, incoming.envelope.nbytes)  # validates
        incoming.mapping, incoming.arena, incoming.offset, incoming.accepted = mapping, arena, offset, True
        if landed_bytes:
            self._landed(incoming, landed_bytes)

    def _settle(self, outcome: Outcome) -> None:
        for posted, incoming, reason in outcome.misfits:
            receive = cast(Receive, posted)
            step = "The buffer is untouched and the message stays queued: take it with recv()"
            if receive.drops:
                step = "The buffer is untouched and the message was dropped; the next receive gets the next one"
                self._drop(incoming)
            peer = incoming.envelope.src_rank
            self._end(receive, receive.failure(MismatchError, "does not fit", reason, step, peer=peer))
        for _, incoming in outcome.matched:
            self._advance(incoming)

    def _drop(self, incoming: Incoming) -> None:
        """Nobody will take a message: it lands for a receive that nobody holds, whose result gives its block back."""
        sink = Receive(self, incoming.envelope.src_rank, incoming.envelope.group, incoming.envelope.tag, None)
        incoming.receive, sink.incoming = sink, incoming
        self._advance(incoming)

    def _advance(self, incoming: Incoming) -> None:
        """A message was matched, or more of it landed: take the next step that is possible."""
        receive = cast("Receive | None", incoming.receive)
        if receive is None:
            return
        receive.origin = incoming.envelope.src_rank
        if incoming.failed is not None:
            self._fail_with(receive, incoming)
        elif incoming.awaited:
            pass
        elif not incoming.accepted and incoming.envelope.nbytes:
            incoming.accepted = True
            self._link_of(incoming).send(Accept(*incoming.transfer))
        elif receive.into is None or not incoming.envelope.nbytes:
            if incoming.complete:
                self._complete(receive, incoming)
        elif incoming.complete and incoming.envelope.nbytes <= SMALL_BYTES and receive.into.mover is None:
            np.copyto(receive.into.data, self._source(incoming))  # sooner done than handed to whoever waits
            self._complete(receive, incoming)
        elif receive.copy_is_due:
            self._landing[id(receive)] = receive
            if receive.for_background or not receive.waiters:
                self.core.progress.call_background()

    def _source(self, incoming: Incoming) -> Bytes:
        private = self._private.get(incoming.transfer)
        if private is not None:
            return private
        if incoming.mapping is None:
            raise RuntimeError("bytes have landed nowhere")  # unreachable: on_landed refuses that
        return incoming.mapping.block(incoming.offset, incoming.envelope.nbytes)

    def _link_of(self, incoming: Incoming) -> Link:
        """Where to speak of a message: the agent's next life knows nothing of those that ended before it."""
        return incoming.link if incoming.link is not None else self.core.link

    def copy_step(self, receive: Receive) -> None:
        """Copy the next piece, without the lock meanwhile."""
        incoming, into = receive.incoming, receive.into
        if incoming is None or into is None:
            return
        start = receive.copied_bytes
        end = incoming.landed_bytes if into.mover else min(incoming.landed_bytes, start + _COPY_BYTES)
        source = self._source(incoming)
        mapping, offers = incoming.mapping, incoming.offers  # the session, or the agent, may end meanwhile
        offset = incoming.offset
        broken: Exception | None = None
        receive.copying = True
        self.core.lock.release()
        try:
            if into.mover is not None:
                into.mover.read_from(source)
            else:
                np.copyto(into.data[start:end], source[start:end])
            if mapping is not None and incoming.envelope.nbytes > LARGE_BYTES:
                mapping.forget_pages(offset + start, end - start)
        except Exception as error:  # noqa: BLE001 - of a mover's: this thread may be anybody's, and has others to serve
            broken = error
        finally:
            self.core.lock.acquire()
            receive.copying = False
            self.core.progress.notify()
        if receive.ended or receive.incoming is not incoming or incoming.offers != offers:
            return  # failed, taken back by its sender, or to be offered again, meanwhile
        if broken is not None:
            self._fail_here(receive, incoming, broken)
            return
        receive.copied_bytes = end
        if end == incoming.envelope.nbytes:
            self._complete(receive, incoming)

    def _fail_here(self, receive: Receive, incoming: Incoming, cause: Exception) -> None:
        """The message is all here, and can't be put where it is wanted (a device's error)."""
        error = receive.failure(TransferFailed, "could not be copied out", f"{type(cause).__name__}: {cause}", "")
        self._matcher.finished(incoming)
        self._drop(incoming)
        self._end(receive, error)

    def _complete(self, receive: Receive, incoming: Incoming) -> None:
        envelope = incoming.envelope
        if receive.into is not None:
            receive.result = envelope.nbytes
            self._release(incoming)
        elif envelope.nbytes and incoming.arena:
            link = self._link_of(incoming)
            give_back = functools.partial(link.send_from_finalizer, encode(Release(*incoming.transfer)))
            block = self._source(incoming)
            if receive.writable and incoming.mapping is not None:
                block = incoming.mapping.private_block(incoming.offset, envelope.nbytes)
            receive.result = Message(envelope, block, give_back, writable=receive.writable)
        else:
            # Empty, or in memory of our own.
            block = self._source(incoming) if envelope.nbytes else np.empty(0, np.uint8)
            receive.result = Message(envelope, block, None, writable=receive.writable)
            self._link_of(incoming).send(Release(*incoming.transfer))
        self._forget(incoming)
        self._end(receive, None)

    def _release(self, incoming: Incoming) -> None:
        """Give the block back: one that is small and a neighbour's with the next frame, which may well be an answer."""
        link, mapping = self._link_of(incoming), incoming.mapping
        small = mapping is not None and mapping.kind is ArenaKind.PEER and incoming.envelope.nbytes <= SMALL_BYTES
        if small and link is self.core.link and self.core.progress.undriven:
            link.send_with_next(encode(Release(*incoming.transfer)))
        else:
            link.send(Release(*incoming.transfer))

    def _fail_with(self, receive: Receive, incoming: Incoming) -> None:
        code, message, bytes_done = incoming.failed or (ErrorCode.INTERNAL, "", 0)
        what = f"failed ({receive.phase}, {bytes_done} of {incoming.envelope.nbytes} bytes done)"
        error = receive.failure(class_of_code(code), what, message, next_step_of_code(code), incoming.envelope.src_rank)
        error.bytes_done = bytes_done
        self._forget(incoming)
        self._end(receive, error)

    def _lost(self, receive: Receive) -> str | None:
        """Why nothing can come any more for a receive that has no message; None when something can."""
        return self._gone.get(receive.src) if receive.is_open and receive.src is not None else None

    def _fail_lost(self, receive: Receive, why: str) -> None:
        self._matcher.withdraw(receive)
        step = next_step_of_code(ErrorCode.PEER_LOST)
        self._end(receive, receive.failure(PeerLost, "can't be fulfilled", why, step))

    def _withdraw(self, receive: Receive) -> bool:
        """Take a receive back; the message it held, if any, goes to the next one. False: it ended meanwhile."""
        # A piece is a few megabytes: this wait is bounded, and the caller's buffer is its own again afterwards.
        self.core.progress.wait_locally(lambda: not receive.copying)
        if receive.ended:
            return False
        self._landing.pop(id(receive), None)
        receive.copied_bytes = 0
        self._settle(self._matcher.withdraw(receive))
        return True

    def _forget(self, incoming: Incoming) -> None:
        self._incoming.pop(incoming.transfer, None)
        self._private.forget(incoming.transfer)
        self._matcher.finished(incoming)

    def _end(self, receive: Receive, error: ProxydError | None) -> None:
        self._landing.pop(id(receive), None)
        receive.ended = True
        receive.error = error
        callbacks, receive.callbacks = receive.callbacks, ()
        for callback in callbacks:
            self.core.calls.put(callback)
        self.core.progress.notify()

    # -- texts -------------------------------------------------------------------------------------------------------

    def _timeout(self, receive: Receive, timeout_s: float | None) -> TransferTimeout:
        what = receive.missing(self._here, self._matcher.queued_elsewhere(receive.src, receive.group, receive.tag))
        step = "Wait or receive again: nothing is lost"
        return receive.failure(TransferTimeout, f"is not done after {timeout_s:g} s", what, step)
