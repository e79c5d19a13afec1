"""Sending: block, post, copy; and what the agent says about it afterwards.

A send is a snapshot: ``isend`` returns when the bytes are in the arena (or, over TCP, handed to the connection). The
message is *posted before it is copied*, so that the agent asks for its grant and sends the first bytes while the rest
is still being copied (cut-through). Small messages are copied first and posted once: one frame instead of several.

A block goes back to the allocator when the agent has ended the send *and* our copy has ended: an agent may fail a send
(the peer died) while this thread is still writing into the block.

No room left: one more arena is asked for. When the agent refuses, the caller waits until earlier sends are acknowledged
(backpressure); when there are none, waiting can't help, and it is an error.
"""

from __future__ import annotations

import time
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
from proxyd_client.errors import ConfigError, ProxydError, TransferTimeout, class_of_code, next_step_of_code

_TCP_PIECE_BYTES = 1 << 20
_TCP_BACKLOG_BYTES = 2 << 20
_FIRST_ARENA_WAIT_NS = 100_000_000
MOST_OF_ROOM = 0.75
"""What unacknowledged messages to one rank may hold of the room for sending, so that others can be sent to."""
_ASK_AGAIN_NS = 250_000_000


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
        self.copying = False
        self.delivered = False
        """Handed over within the host: done, while its block is still the receiver's."""
        self.ended = False
        """Off the books: nothing more will be said of it, and its block is free."""
        self.error: ProxydError | None = None
        self.phase = SendPhase.RESOLVE
        self.bytes_done = 0
        self.finish_at_ns = 0

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
            core.link.send(CancelSend(self.sequence))
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


class Sender:
    """The sending half of a session."""

    def __init__(self, core: SessionCore) -> None:
        self.core = core
        self.pending: dict[int, Send] = {}
        self._held_bytes: dict[int, int] = {}
        """By destination: payload of posted messages that lie in our arenas."""
        self._sequence = 0
        self._arenas = SendArenas()
        self._arena_asked = False
        self._refusal: tuple[int, str] | None = None
        self._room_changes = 0

    def send(self, payload: Payload, to: Destination, timeout_s: float | None) -> Send:
        """Post and copy one message. ``timeout_s`` bounds the wait for room."""
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
            block = self._allocate(envelope, deadline_ns, timeout_s)
            if payload.nbytes > FILL_CHUNK_BYTES:
                send = self._post(envelope, block, 0, to.due_ns)
                send.copying = True
        if payload.nbytes <= FILL_CHUNK_BYTES:
            return self._copy_and_post(payload, envelope, block, to.due_ns)
        self._fill(send, block, payload)
        return send

    def _copy_and_post(self, payload: Payload, envelope: Envelope, block: SendBlock, due_ns: int) -> Send:
        posted = False
        try:
            np.copyto(block.data, payload.data)
            with self.core.lock:
                self.core.check_open()
                send = self._post(envelope, block, payload.nbytes, due_ns)
                posted = True
                return send
        finally:
            if not posted:
                with self.core.lock:
                    self._free(block)

    def _fill(self, send: Send, block: SendBlock, payload: Payload) -> None:
        """Copy piece by piece, telling the agent after each. numpy copies without the GIL."""
        filled = 0
        try:
            while filled < payload.nbytes and not send.ended:
                end = min(filled + FILL_CHUNK_BYTES, payload.nbytes)
                np.copyto(block.data[filled:end], payload.data[filled:end])
                self.core.link.send(SendFilled(send.sequence, end))
                if payload.nbytes > LARGE_BYTES:
                    block.mapping.forget_pages(block.offset + filled, end - filled)
                filled = end
        finally:
            with self.core.lock:
                send.copying = False
                if send.ended:
                    self._free(block)
                elif filled < payload.nbytes:  # interrupted: the agent must not wait for the rest
                    self.core.link.send(CancelSend(send.sequence))

    def _send_over_tcp(self, payload: Payload, envelope: Envelope, deadline_ns: int | None, due_ns: int) -> Send:
        core = self.core
        with core.lock:
            core.check_open()
            send = self._post(envelope, None, 0, due_ns)
        view = view_of(payload.data)
        sent = 0
        try:
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

    def _post(self, envelope: Envelope, block: SendBlock | None, filled_bytes: int, due_ns: int) -> Send:
        """Number it and put it on the wire, in one step: POST_SENDs leave in the order of their sequences."""
        self._sequence += 1
        send = Send(self, self._sequence, envelope, block)
        self.pending[send.sequence] = send
        if block is not None:
            self._held_bytes[envelope.dst_rank] = self._held_bytes.get(envelope.dst_rank, 0) + envelope.nbytes
        self.core.link.send(
            PostSend(
                sequence=send.sequence,
                envelope=envelope,
                arena=block.mapping.arena if block else 0,
                offset=block.offset if block else 0,
                filled_bytes=filled_bytes,
                deadline_in_ns=max(1, due_ns - time.monotonic_ns()) if due_ns else 0,
            )
        )
        return send

    @property
    def all_settled(self) -> bool:
        """No send's outcome is open."""
        return all(send.settled for send in self.pending.values())

    # -- room --------------------------------------------------------------------------------------------------------

    def _allocate(self, envelope: Envelope, deadline_ns: int | None, timeout_s: float | None) -> SendBlock:
        core = self.core
        nbytes = envelope.nbytes
        limit_bytes = core.welcome.memory_limit_bytes
        if limit_bytes and nbytes > limit_bytes:
            raise self._no_room(
                ConfigError,
                envelope,
                f"a message of {nbytes} bytes can never fit: the agent's memory limit is {limit_bytes} bytes",
                "Raise the agent's memory limit, or send it in parts",
            )
        if not self._arenas:
            # The first arenas follow the welcome; asking now would only get one too many.
            core.progress.wait_for(
                lambda: len(self._arenas) > 0 or core.has_ended(), time.monotonic_ns() + _FIRST_ARENA_WAIT_NS
            )
        while True:
            core.check_open()
            block = self._arenas.allocate(nbytes) if self._may_hold(envelope) else None
            if block is not None:
                return block
            refusal = self._refusal if self._refusal is not None and nbytes >= self._refusal[0] else None
            if refusal is not None and not self._arenas.used_bytes:
                self._refusal = None
                raise self._no_room(
                    ConfigError,
                    envelope,
                    f"the agent has no memory for a message of {nbytes} bytes, and no earlier send of this endpoint "
                    f"is under way that could make room (it has {self._arenas.capacity_bytes} bytes)",
                    f"Raise the agent's memory limit, or send it in parts ({refusal[1]})",
                )
            if refusal is None and not self._arena_asked:
                self._arena_asked = True
                core.link.send(ArenaWanted(nbytes))
            self._wait_for_room(envelope, deadline_ns, timeout_s)

    def _may_hold(self, envelope: Envelope) -> bool:
        """Whether the destination leaves room for others with this message too.

        One that stands still would else hold all of it in the end, for whatever others give back it takes, and no
        message would leave for anybody. A single message may have any size.
        """
        held_bytes = self._held_bytes.get(envelope.dst_rank, 0)
        return not held_bytes or held_bytes + envelope.nbytes <= self._arenas.capacity_bytes * MOST_OF_ROOM

    def _wait_for_room(self, envelope: Envelope, deadline_ns: int | None, timeout_s: float | None) -> None:
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
                f"no room for a message of {envelope.nbytes} bytes within {timeout_s:g} s: "
                f"{self._arenas.used_bytes} of {self._arenas.capacity_bytes} bytes hold earlier sends that ranks "
                f"{waiting} have not acknowledged",
                "Receive what they sent, or raise the agent's memory limit; nothing of this message was sent",
            )
        self._refusal = None  # other clients may have let go of memory: ask again

    def _no_room(self, kind: type[ProxydError], envelope: Envelope, what: str, next_step: str) -> ProxydError:
        channel = self.core.channel(envelope.tag, envelope.group)
        return kind(
            f"send to {self.core.name_of(envelope.dst_rank)} ({channel}): {what}",
            next_step=next_step,
            peer=envelope.dst_rank,
            tag=envelope.tag,
            group=envelope.group,
            phase="waiting for room in shared memory",
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
            self.core.progress.notify()

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
        if send.block is not None and not send.copying:
            self._free(send.block)
        send.block = None  # a handle may be kept for long
        self.core.progress.notify()

    def fail_all(self, error: ProxydError) -> None:
        """The session ended. Its arenas go, except for blocks that are being copied into."""
        for send in list(self.pending.values()):
            send.fail(type(error), "was given up", str(error), "")
        self._arenas = SendArenas()
