"""Sending: block, post, copy; and what the agent says about it afterwards.

A send is a snapshot: ``isend`` returns when the bytes are in the arena (or, over TCP, handed to the connection). The
message is *posted before it is copied*, so that the agent asks for its grant and sends the first bytes while the rest
is still being copied (cut-through). Small messages are copied first and posted once: one frame instead of several.

A block goes back to the allocator when the agent has ended the send *and* our copy has ended: an agent may fail a send
(the peer died) while this thread is still writing into the block.

When the agent ends, what was not acknowledged waits, in its order, for the next life of it, and is posted again before
anything new (:mod:`proxyd_client.resuming`). Its bytes are copied once more: the next life has arenas of its own.

What the trainer wrote into a block itself (:mod:`proxyd_client.lending`) is posted where it lies.

No room left: one more arena is asked for. When the agent refuses, the caller waits until earlier sends are acknowledged
(backpressure); when there are none, waiting can't help, and it is an error.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from proxyd.wire.client import (
    FILL_CHUNK_BYTES,
    ArenaRefused,
    ArenaWanted,
    CancelSend,
    PostSend,
    SendData,
    SendDelivered,
    SendDone,
    SendFailed,
    SendFilled,
    SendPhase,
    SendState,
)
from proxyd.wire.envelope import Envelope
from proxyd_client.arena import LARGE_BYTES, Mapping, SendArenas, SendBlock
from proxyd_client.buffers import Payload, view_of
from proxyd_client.core import SessionCore
from proxyd_client.errors import (
    AgentUnavailable,
    ConfigError,
    ProxydError,
    TransferCancelled,
    TransferTimeout,
    class_of_code,
    next_step_of_code,
)
from proxyd_client.lending import Loan, Loans
from proxyd_client.link import Link
from proxyd_client.send import Destination, Send

_TCP_PIECE_BYTES = 1 << 20
_TCP_BACKLOG_BYTES = 2 << 20
_FIRST_ARENA_WAIT_NS = 100_000_000
MOST_OF_ROOM = 0.75
"""What unacknowledged messages to one rank may hold of the room for sending, so that others can be sent to."""
_ASK_AGAIN_NS = 250_000_000


class _Copy(NamedTuple):
    """A message that was posted again and is to be copied from its block in an earlier life's arena."""

    send: Send
    block: SendBlock
    origin: SendBlock


def _is_copied(send: Send) -> bool:
    return not send.copying


class Sender:
    """The sending half of a session."""

    def __init__(self, core: SessionCore, life_of: Callable[[int], int]) -> None:
        """``life_of``: the life of a rank that is registered; 0: none."""
        self.core = core
        self._life_of = life_of
        self.pending: dict[int, Send] = {}
        self._again: deque[Send] = deque()
        """To be posted (again), in order; what is new waits behind them."""
        self._held_bytes: dict[int, int] = {}
        """By destination: payload of posted messages that lie in our arenas."""
        self._sequence = 0
        self._arenas = SendArenas()
        self.loans = Loans(core, self._allocate_lent, self._free)
        self._arena_asked = False
        self._refusal: tuple[int, str] | None = None
        self._room_changes = 0

    def send(self, payload: Payload, to: Destination, timeout_s: float | None, loan: Loan | None = None) -> Send:
        """Post one message, copied unless it lies in ``loan``. ``timeout_s`` bounds the wait for room."""
        core = self.core
        core.check_process()
        deadline_ns = core.deadline_ns(timeout_s)
        envelope = Envelope(
            job=core.identity.job,
            src_rank=core.identity.rank,
            dst_rank=to.dst,
            group=to.group,
            tag=to.tag,
            traffic=to.traffic,
            nbytes=payload.nbytes,
            dtype=payload.dtype,
            shape=payload.shape,
        )
        if not core.address.shared_memory:
            return self._send_over_tcp(payload, envelope, deadline_ns, to.due_ns)
        if not payload.nbytes:
            with core.lock:
                core.check_open()
                return self._post(envelope, None, 0, to.due_ns)
        with core.lock:
            core.check_open()
            if loan is not None and self._arenas.holds(loan.block):
                return self._post(envelope, loan.block, payload.nbytes, to.due_ns, loan)
            block = self._allocate(payload.nbytes, envelope, deadline_ns, timeout_s)
            if payload.nbytes > FILL_CHUNK_BYTES:
                send = self._post(envelope, block, 0, to.due_ns)
                send.copying = True
        if payload.nbytes <= FILL_CHUNK_BYTES:
            return self._copy_and_post(payload, envelope, block, to.due_ns, deadline_ns, timeout_s)
        self._fill(send, block, payload)
        return send

    def _copy_and_post(
        self,
        payload: Payload,
        envelope: Envelope,
        block: SendBlock,
        due_ns: int,
        deadline_ns: int | None,
        timeout_s: float | None,
    ) -> Send:
        posted = False
        try:
            while True:
                payload.write_to(block.data)
                with self.core.lock:
                    self.core.check_open()
                    if not self.standing or self._arenas.holds(block):
                        send = self._post(envelope, block, payload.nbytes, due_ns)
                        posted = True
                        return send
                    # The agent has ended, and another life of it begun, since the block was allocated.
                    block = self._allocate(payload.nbytes, envelope, deadline_ns, timeout_s)
        finally:
            if not posted:
                with self.core.lock:
                    self._free(block)

    def _fill(self, send: Send, block: SendBlock, payload: Payload) -> None:
        """Copy piece by piece, telling the agent after each. numpy copies without the GIL."""
        filled = 0
        link = send.link  # should the agent end meanwhile, all of it is posted again afterwards
        try:
            while filled < payload.nbytes and not send.ended:
                if payload.mover is not None:
                    end = payload.nbytes
                    payload.mover.write_to(block.data)
                else:
                    end = min(filled + FILL_CHUNK_BYTES, payload.nbytes)
                    np.copyto(block.data[filled:end], payload.data[filled:end])
                if link is not None:
                    link.send(SendFilled(send.sequence, end))
                if payload.nbytes > LARGE_BYTES:
                    block.mapping.forget_pages(block.offset + filled, end - filled)
                filled = end
        finally:
            with self.core.lock:
                send.copying = False
                self.core.progress.notify()
                if send.ended:
                    self._free(block)
                elif filled < payload.nbytes:  # interrupted: the agent must not wait for the rest
                    send.cancel_asked = True
                    if link is not None and link is self.core.link and not self.core.away:
                        link.send(CancelSend(send.sequence))
                    else:
                        send.fail(TransferCancelled, "was interrupted", "", "")

    def _send_over_tcp(self, payload: Payload, envelope: Envelope, deadline_ns: int | None, due_ns: int) -> Send:
        core = self.core
        with core.lock:
            core.check_open()
            send = self._post(envelope, None, 0, due_ns)
        sent = 0
        try:
            view = view_of(payload.in_one_piece())
            while sent < payload.nbytes and not send.ended:
                piece = view[sent : sent + _TCP_PIECE_BYTES]
                core.link.send(SendData(send.sequence, sent), piece)
                sent += len(piece)
                if core.link.backlog_bytes <= _TCP_BACKLOG_BYTES:
                    continue
                with core.lock:
                    if not core.progress.wait_for(
                        lambda: core.link.backlog_bytes <= _TCP_BACKLOG_BYTES or send.ended, deadline_ns
                    ):
                        raise TransferTimeout(
                            f"the agent at {core.address} took {sent} of {payload.nbytes} bytes of a send to "
                            f"{core.name_of(envelope.dst_rank)} ({core.channel(envelope.tag, envelope.group)}) in time",
                            next_step="The send was cancelled; send it again when the agent has room",
                            peer=envelope.dst_rank,
                            tag=envelope.tag,
                            group=envelope.group,
                            phase="handing it to the agent",
                        )
        except BaseException:
            core.link.send(CancelSend(send.sequence))
            raise
        return send

    def _post(
        self, envelope: Envelope, block: SendBlock | None, filled_bytes: int, due_ns: int, loan: Loan | None = None
    ) -> Send:
        """Number it and put it on the wire, in one step: POST_SENDs leave in the order of their sequences."""
        self._sequence += 1
        send = Send(self, self._sequence, envelope, block)
        send.due_ns = due_ns
        if loan is not None:
            send.loan = loan
            loan.sends += 1
        self.pending[send.sequence] = send
        if block is not None:
            self._held_bytes[envelope.dst_rank] = self._held_bytes.get(envelope.dst_rank, 0) + envelope.nbytes
        if self.standing:
            self._say(send, filled_bytes)
        else:
            send.again, send.phase = True, SendPhase.AGENT_AWAY
            self._again.append(send)
        return send

    def _say(self, send: Send, filled_bytes: int) -> None:
        """Put it on the wire."""
        block = send.block
        send.link = self.core.link
        send.link.send(
            PostSend(
                sequence=send.sequence,
                envelope=send.envelope,
                arena=block.mapping.arena if block else 0,
                offset=block.offset if block else 0,
                filled_bytes=filled_bytes,
                deadline_in_ns=max(1, send.due_ns - time.monotonic_ns()) if send.due_ns else 0,
                again=send.again,
                dst_incarnation=send.dst_incarnation,
            )
        )

    @property
    def all_settled(self) -> bool:
        """No send's outcome is open."""
        return all(send.settled for send in self.pending.values())

    # -- room --------------------------------------------------------------------------------------------------------

    def _allocate(
        self, nbytes: int, envelope: Envelope | None, deadline_ns: int | None, timeout_s: float | None
    ) -> SendBlock:
        """``envelope`` None: for a buffer."""
        core = self.core
        limit_bytes = core.welcome.memory_limit_bytes
        if limit_bytes and nbytes > limit_bytes:
            raise self._no_room(
                ConfigError,
                envelope,
                f"a message of {nbytes} bytes can never fit: the agent's memory limit is {limit_bytes} bytes",
                "Raise the agent's memory limit, or send it in parts",
            )
        self._wait_for_first_arena()
        while True:
            core.check_open()
            if not self.standing:
                self._wait_for_agent(envelope, deadline_ns, timeout_s)
                continue
            self.loans.collect()
            block = self._arenas.allocate(nbytes) if self._may_hold(envelope) else None
            if block is not None:
                return block
            refusal = self._refusal if self._refusal is not None and nbytes >= self._refusal[0] else None
            lent_bytes = self.loans.idle_bytes(self._arenas) if refusal is not None else 0
            if refusal is not None and self._arenas.used_bytes == lent_bytes:
                self._refusal = None
                raise self._no_room(
                    ConfigError,
                    envelope,
                    f"the agent has no memory for a message of {nbytes} bytes, and no earlier send of this endpoint "
                    f"is under way that could make room (it has {self._arenas.capacity_bytes} bytes, {lent_bytes} of "
                    "them in send buffers)",
                    f"Raise the agent's memory limit, or send it in parts ({refusal[1]})",
                )
            if refusal is None and not self._arena_asked:
                self._arena_asked = True
                core.link.send(ArenaWanted(nbytes))
            self._wait_for_room(nbytes, envelope, deadline_ns, timeout_s)

    def _allocate_lent(self, nbytes: int, deadline_ns: int | None, timeout_s: float | None) -> SendBlock:
        return self._allocate(nbytes, None, deadline_ns, timeout_s)

    def _wait_for_first_arena(self) -> None:
        """The first arenas follow the welcome; asking now would only get one too many."""
        core = self.core
        if not self._arenas and not core.away:
            core.progress.wait_for(
                lambda: len(self._arenas) > 0 or core.away or core.has_ended(),
                time.monotonic_ns() + _FIRST_ARENA_WAIT_NS,
            )

    def _wait_for_agent(self, envelope: Envelope | None, deadline_ns: int | None, timeout_s: float | None) -> None:
        core = self.core
        if core.progress.wait_for(lambda: self.standing or core.has_ended(), deadline_ns) or core.has_ended():
            return
        raise self._no_room(
            TransferTimeout,
            envelope,
            f"the agent at {core.address} has ended, and its next life was not ready for it within {timeout_s:g} s",
            "Look at the agent's log; nothing of this message was sent",
            SendPhase.AGENT_AWAY.label,
        )

    def _may_hold(self, envelope: Envelope | None) -> bool:
        """Whether the destination leaves room for others with this message too.

        One that stands still would else hold all of it in the end, for whatever others give back it takes, and no
        message would leave for anybody. A single message may have any size.
        """
        if envelope is None:
            return True
        held_bytes = self._held_bytes.get(envelope.dst_rank, 0)
        return not held_bytes or held_bytes + envelope.nbytes <= self._arenas.capacity_bytes * MOST_OF_ROOM

    def _wait_for_room(
        self, nbytes: int, envelope: Envelope | None, deadline_ns: int | None, timeout_s: float | None
    ) -> None:
        core = self.core
        seen = self._room_changes
        ask_again_ns = time.monotonic_ns() + _ASK_AGAIN_NS
        until_ns = ask_again_ns if deadline_ns is None else min(ask_again_ns, deadline_ns)
        if core.progress.wait_for(lambda: self._room_changes != seen or core.has_ended(), until_ns):
            return
        if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
            waiting = sorted({send.envelope.dst_rank for send in self.pending.values()})
            raise self._no_room(
                TransferTimeout,
                envelope,
                f"no room for a message of {nbytes} bytes within {timeout_s:g} s: "
                f"{self._arenas.used_bytes} of {self._arenas.capacity_bytes} bytes hold earlier sends that ranks "
                f"{waiting} have not acknowledged",
                "Receive what they sent, or raise the agent's memory limit; nothing of this message was sent",
            )
        self._refusal = None  # other clients may have let go of memory: ask again

    def _no_room(
        self,
        kind: type[ProxydError],
        envelope: Envelope | None,
        what: str,
        next_step: str,
        phase: str = "waiting for room in shared memory",
    ) -> ProxydError:
        if envelope is None:
            return kind(f"send buffer: {what}", next_step=next_step, phase=phase)
        channel = self.core.channel(envelope.tag, envelope.group)
        return kind(
            f"send to {self.core.name_of(envelope.dst_rank)} ({channel}): {what}",
            next_step=next_step,
            peer=envelope.dst_rank,
            tag=envelope.tag,
            group=envelope.group,
            phase=phase,
        )

    def _free(self, block: SendBlock) -> None:
        if not self.core.has_ended():  # else its arena is given up, too
            self._arenas.free(block)
        self._room_changed()

    def _room_changed(self) -> None:
        self._room_changes += 1
        self.core.progress.notify()

    # -- frames; with the lock held ----------------------------------------------------------------------------------

    def add_arena(self, mapping: Mapping) -> None:
        """One more arena to send from."""
        self._arenas.add(mapping)
        self._arena_asked = False
        self._refusal = None
        self._room_changed()

    def on_arena_refused(self, frame: ArenaRefused) -> None:
        """No more memory."""
        self._arena_asked = False
        self._refusal = frame.wanted_bytes, frame.message or "the agent's memory limit is reached"
        self._room_changed()

    def on_state(self, frame: SendState) -> None:
        """Progress of a send."""
        send = self.pending.get(frame.sequence)
        if send is None:
            return
        if frame.phase in SendPhase.__members__.values():
            send.phase = SendPhase(frame.phase)
        send.bytes_done = min(frame.bytes_done, send.envelope.nbytes)
        send.finish_at_ns = time.monotonic_ns() + frame.finish_in_ns if frame.finish_in_ns else 0

    def on_done(self, frame: SendDone) -> None:
        """Delivered and acknowledged."""
        send = self.pending.get(frame.sequence)
        if send is not None:
            send.bytes_done = send.envelope.nbytes
            self.end(send)

    def on_delivered(self, frame: SendDelivered) -> None:
        """Handed over to a trainer of this host; SEND_DONE will give the block back."""
        send = self.pending.get(frame.sequence)
        if send is not None:
            send.bytes_done = send.envelope.nbytes
            send.delivered = True
            self._tell(send)

    def on_failed(self, frame: SendFailed) -> None:
        """Ended without delivery."""
        send = self.pending.get(frame.sequence)
        if send is not None:
            send.bytes_done = min(frame.bytes_done, send.envelope.nbytes)
            send.fail(class_of_code(frame.code), "failed", frame.message, next_step_of_code(frame.code))

    def end(self, send: Send) -> None:
        """Take a send off the books; its block is free once our own copy has ended too."""
        send.ended = True
        self.pending.pop(send.sequence, None)
        if send.block is not None:
            rank, held_bytes = send.envelope.dst_rank, self._held_bytes[send.envelope.dst_rank] - send.envelope.nbytes
            if held_bytes:
                self._held_bytes[rank] = held_bytes
            else:
                del self._held_bytes[rank]
        if send.block is not None and not send.copying and not send.is_lent:
            self._free(send.block)
        if send.loan is not None:
            self.loans.sent(send.loan)
        send.block = send.loan = None  # a handle may be kept for long
        self._tell(send)

    def _tell(self, send: Send) -> None:
        """Its outcome is known; whoever waits for it or asked to be called hears of it."""
        callbacks, send.callbacks = send.callbacks, ()
        for callback in callbacks:
            self.core.calls.put(callback)
        self.core.progress.notify()

    # -- the agent's next life; with the lock held -------------------------------------------------------------------

    @property
    def standing(self) -> bool:
        """A message may be posted now: the agent is there, and has all that its earlier life had."""
        return not self.core.away and not self._again

    def agent_lost(self) -> None:
        """The agent is gone, and all that it had said is read."""
        self._arenas = SendArenas()
        self._arena_asked = False
        self._refusal = None
        self._again.clear()
        for send in list(self.pending.values()):
            if send.origin is not None:
                send.block, send.origin = send.origin, None
            if send.delivered:
                self._lose_sight(send)
                self.end(send)
            elif send.cancel_asked:
                send.fail(TransferCancelled, "was cancelled", "", "")
            else:
                if send.link is not None and not send.dst_incarnation:
                    # What was for an earlier life of it has failed: that is said before the next one is named.
                    send.dst_incarnation = self._life_of(send.envelope.dst_rank)
                send.again, send.phase, send.finish_at_ns = True, SendPhase.AGENT_AWAY, 0
                self._again.append(send)
        self._room_changed()

    @staticmethod
    def _lose_sight(send: Send) -> None:
        """Nobody will say when the neighbour that it was handed to lets go of it."""
        if send.delivered and send.loan is not None:
            send.loan.lost = True

    def post_again(self) -> None:
        """Post what waits, in order, as room comes; the lock is let go of in between. Returns when nothing waits any
        more, the agent has ended again, or the session has."""
        core, link = self.core, self.core.link
        to_copy: deque[_Copy] = deque()

        def over() -> bool:
            return core.has_ended() or core.away

        self._wait_for_first_arena()
        while (self._again or to_copy) and not over():
            send = self._again[0] if self._again else None
            if send is not None and send.copying:
                core.progress.wait_locally(functools.partial(_is_copied, send))
            elif send is not None and (send.ended or self._post_once_more(send, to_copy)):
                self._again.popleft()
            elif to_copy:
                # All that has room is posted before any of it is copied: the receivers' agents wait for them.
                self._copy_once_more(to_copy.popleft(), link)
            elif send is not None:
                self._make_room(send, over)
        for copy in to_copy:
            self._copied(copy)
        self._room_changed()

    def _post_once_more(self, send: Send, to_copy: deque[_Copy]) -> bool:
        """False: there is no room for it now."""
        nbytes, origin = send.envelope.nbytes, send.block
        if origin is None:
            self._say(send, 0)
            return True
        block = self._arenas.allocate(nbytes)
        if block is None:
            return False
        send.block = block
        if nbytes <= FILL_CHUNK_BYTES:
            np.copyto(block.data, origin.data)
            self._say(send, nbytes)
        else:
            send.origin, send.copying = origin, True
            to_copy.append(_Copy(send, block, origin))
            self._say(send, 0)
        return True

    def _copy_once_more(self, copy: _Copy, link: Link) -> None:
        """Copy a message into the block in which it was posted again, without the lock meanwhile."""
        send, nbytes = copy.send, copy.send.envelope.nbytes
        self.core.lock.release()
        try:
            filled = 0
            while filled < nbytes and not send.ended and send.origin is copy.origin:
                end = min(filled + FILL_CHUNK_BYTES, nbytes)
                np.copyto(copy.block.data[filled:end], copy.origin.data[filled:end])
                link.send(SendFilled(send.sequence, end))
                filled = end
        finally:
            self.core.lock.acquire()
            self._copied(copy)

    def _copied(self, copy: _Copy) -> None:
        """It is, or there is no need any more."""
        send = copy.send
        send.copying = False
        if send.origin is copy.origin:
            send.origin = None
        if send.ended:
            self._free(copy.block)
        self.core.progress.notify()

    def _make_room(self, send: Send, over: Callable[[], bool]) -> None:
        """Wait until there may be room for a message that was posted before; it fails when there never will be."""
        core, nbytes = self.core, send.envelope.nbytes
        refused = self._refusal is not None and nbytes >= self._refusal[0]
        if refused and self._arenas.used_bytes == self.loans.idle_bytes(self._arenas):
            self._refusal = None
            why = f"there is no memory for its {nbytes} bytes any more"
            step = "Raise the agent's memory limit, or send it in parts"
            send.fail(AgentUnavailable, "was not taken by the agent's next life", why, step)
            return
        if not refused and not self._arena_asked:
            self._arena_asked = True
            core.link.send(ArenaWanted(nbytes))
        seen = self._room_changes
        if not core.progress.wait_for(
            lambda: self._room_changes != seen or send.ended or over(), time.monotonic_ns() + _ASK_AGAIN_NS
        ):
            self._refusal = None  # other clients may have let go of memory: ask again

    def fail_all(self, error: ProxydError) -> None:
        """The session ended. Its arenas go, except for blocks that are being copied into."""
        for send in list(self.pending.values()):
            self._lose_sight(send)
            send.fail(type(error), "was given up", str(error), "")
        self._again.clear()
        self.loans.end()
        self._arenas = SendArenas()
