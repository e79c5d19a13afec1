"""The receiving half of an agent: from a peer's offer to the trainer's release.

Messages of one sending endpoint are told to the receiving trainer in the order in which they were offered, even when
memory for them is found in another order. A message is acknowledged when every chunk of it is verified and in the
trainer's arena, and the trainer was told of it, and not before: the trainer may outlive this agent, and what it was not
told of it can't find. An acknowledgement that gets lost is given again when the message is offered again.

When a peer's connections break, what is half here stays: block, map, place in the order. The peer offers it again
(rules in :mod:`proxyd.core.transfer`), and is told what is here. It fails when the peer

* stays away for ``peer_timeout``, or comes back as another life and doesn't offer it within 4 s (its trainers come back
  by themselves within about one, and post it again);
* comes back as the same life and ends its offers (OFFERED_ALL) without it.

What has ended is kept in mind (:mod:`proxyd.core.remembering`), so that nothing is delivered twice. The eager budget
belongs to a connection: what was counted over an earlier one is not given back.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from proxyd.core.effects import (
    AgentEffect,
    AllocateBlock,
    FreeBlock,
    TellBlock,
    TellExpect,
    TellLanded,
    TellOffered,
    TellRecvFailed,
    TellSendDelivered,
    TellSendDone,
    TellSendFailed,
    ToPeer,
)
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.core.remembering import RETURN_NS, Memory, pair_of
from proxyd.core.transfer import Incoming, RecvInput, RecvState
from proxyd.wire import peer as wire
from proxyd.wire.envelope import MAX_TRANSFER_BYTES, Envelope, ErrorCode, TrafficClass
from proxyd.wire.fence import Fate

LOCAL_CHUNK_BYTES = 1 << 20

OTHER_LIFE = "was restarted: this life of it is over"


@dataclasses.dataclass(slots=True)
class _Source:
    """A peer agent as a sender."""

    incarnation: int = 0
    connection: int = 0
    """How many of its connections there have been."""
    first_connection: int = 0
    """The first one of its present life."""
    judged_ns: int | None = None
    """When what it has not offered over the present connection (or, while it is away, anything unfinished) fails."""
    reason: str = ""


class Receiver:
    """Incoming transfers of one agent."""

    def __init__(
        self, clients: dict[EndpointName, int], effects: list[AgentEffect], peer_timeout_ns: int = 30_000_000_000
    ) -> None:
        self.clients = clients
        """Local endpoints and their incarnations; shared with the machine."""
        self.effects = effects
        self.transfers: dict[TransferId, Incoming] = {}
        self._peer_timeout_ns = peer_timeout_ns
        self._sources: dict[AgentName, _Source] = {}
        self.past = Memory(clients, effects, peer_timeout_ns)
        self._untold: dict[tuple[EndpointName, EndpointName], deque[TransferId]] = {}
        """Per (source, destination): offered and not told yet, in order."""
        self._denied: dict[EndpointName, dict[TransferId, None]] = {}
        """Per destination: accepted messages for which there was no memory, in order."""
        self._trying_below_bytes: dict[EndpointName, int] = {}
        """Destinations for whose denied messages memory is being asked for again, one after the other: those below
        this size. One that was denied again speaks for all of its size and above."""
        self._asked: dict[TransferId, EndpointName] = {}
        """Messages whose AllocateBlock has not been answered."""
        self.ended_local: list[TransferId] = []
        """Handed-over messages that have ended here since the machine last looked."""
        self.corrupt_chunks = 0
        self.received_bytes = 0

    # ----------------------------------------------------------------------------- from the sender

    def offered(self, peer: AgentName, transfer: TransferId, offer: wire.Offer) -> None:
        """A peer offers a message."""
        envelope = offer.envelope
        known = self.transfers.get(transfer)
        if known is not None and (known.peer, known.envelope) == (peer, envelope):
            self._known_again(known, peer, offer)
            return
        problem = _problem_of(offer) if known is None else _clash_of(known)
        if problem is not None:
            self._refuse_offer(peer, transfer, offer, ErrorCode.PROTOCOL, problem)
            return
        incarnation = self.clients.get(envelope.destination)
        meant = offer.dst_incarnation or incarnation or 0
        fate = self.past.fence(pair_of(transfer, envelope, meant)).fate(transfer.sequence)
        if fate is Fate.DELIVERED:
            if offer.eager and envelope.nbytes:
                self._return_budget(peer, envelope)
            self._answer(peer, transfer, wire.Ack(envelope.nbytes, 0))
            return
        if (ended := _ended_before(envelope, fate)) is not None:
            self._refuse_offer(peer, transfer, offer, ErrorCode.PEER_LOST, ended)
            return
        if incarnation is None or offer.dst_incarnation not in (0, incarnation):
            life = "is not connected to this agent" if incarnation is None else OTHER_LIFE
            self._refuse_offer(peer, transfer, offer, ErrorCode.PEER_LOST, f"{envelope.destination} {life}")
            return
        incoming = Incoming(transfer, envelope, peer, offer.chunk_bytes, offer.eager)
        incoming.dst_incarnation = incarnation
        incoming.budgeted = offer.eager
        incoming.answer_due = offer.again
        incoming.connection = self._source(peer).connection
        self.past.begins(pair_of(transfer, envelope, incarnation), transfer.sequence)
        self._take_in(incoming)

    def _known_again(self, known: Incoming, peer: AgentName, offer: wire.Offer) -> None:
        """A message that is here already is offered once more: say what is here of it."""
        known.connection = self._source(peer).connection
        if offer.eager and known.nbytes and not known.budgeted:
            if known.eager:
                known.budgeted = True
            else:
                # It was turned down, and the sender has not heard of it.
                self._answer(peer, known.transfer, wire.TurnedDown("there was no memory for it"))
                self._return_budget(peer, known.envelope)
        if known.state is RecvState.LANDED:
            if known.told:
                self._answer(peer, known.transfer, wire.Ack(known.nbytes, 0))
        elif known.has_memory:
            held = wire.Held(known.chunk_bytes, known.held_ranges(wire.MAX_HELD_RANGES))
            self._answer(peer, known.transfer, held)
        elif known.eager:
            known.answer_due = True  # memory is being looked for

    def _source(self, peer: AgentName) -> _Source:
        source = self._sources.get(peer)
        if source is None:
            source = self._sources[peer] = _Source()
        return source

    def handed_over(
        self, transfer: TransferId, envelope: Envelope, dst_incarnation: int = 0, *, placed_bytes: int | None = None
    ) -> None:
        """A message between two trainers of this agent: its block is handed over.

        :param dst_incarnation: the only life of the receiver that may get it; 0: the one that is there.
        :param placed_bytes: the receiver has the block, and this much of it is filled; None: it is yet to get it.
        """
        incarnation = self.clients.get(envelope.destination, 0)
        pair = pair_of(transfer, envelope, dst_incarnation or incarnation)
        fate = self.past.fence(pair).fate(transfer.sequence)
        code, problem = ErrorCode.PEER_LOST, _ended_before(envelope, fate)
        if (known := self.transfers.get(transfer)) is not None:
            code, problem = ErrorCode.PROTOCOL, f"{envelope.describe()}: {_clash_of(known)}"
        elif fate is Fate.DELIVERED:
            self._not_taken_over(transfer, envelope, placed_bytes)
            self.effects.append(TellSendDone(envelope.source, transfer))
            return
        elif problem is None and dst_incarnation not in (0, incarnation):
            problem = f"{envelope.describe()}: {envelope.destination} {OTHER_LIFE}"
        if problem is not None:
            self._not_taken_over(transfer, envelope, placed_bytes)
            self.effects.append(TellSendFailed(envelope.source, transfer, code, problem, 0))
            return
        incoming = Incoming(transfer, envelope, None, LOCAL_CHUNK_BYTES, eager=True)
        incoming.dst_incarnation = incarnation
        if placed_bytes is not None:
            incoming.allocated()
            incoming.step(RecvInput.ALLOCATED)
            incoming.landed_bytes = min(placed_bytes, incoming.nbytes)
            if incoming.complete:
                incoming.step(RecvInput.COMPLETE)
        self.past.begins(pair, transfer.sequence)
        self._take_in(incoming)

    def _not_taken_over(self, transfer: TransferId, envelope: Envelope, placed_bytes: int | None) -> None:
        self.ended_local.append(transfer)
        if placed_bytes is not None:
            self.effects.append(FreeBlock(transfer, envelope.destination))

    def _take_in(self, incoming: Incoming) -> None:
        envelope = incoming.envelope
        self.transfers[incoming.transfer] = incoming
        self._untold.setdefault((envelope.source, envelope.destination), deque()).append(incoming.transfer)
        if incoming.nbytes == 0:
            # Empty: complete as it is, delivered in order, without memory or a slot.
            incoming.allocated()
            incoming.step(RecvInput.ALLOCATED)
        elif incoming.eager and not incoming.has_memory:
            self._allocate(incoming)
        self._tell_in_order(envelope)

    def _allocate(self, incoming: Incoming) -> None:
        local = incoming.peer is None
        self._asked[incoming.transfer] = incoming.envelope.destination
        effect = AllocateBlock(
            incoming.transfer, incoming.envelope.destination, incoming.nbytes, incoming.chunk_bytes, local
        )
        self.effects.append(effect)

    def _tell_in_order(self, envelope: Envelope) -> None:
        key = (envelope.source, envelope.destination)
        waiting = self._untold.get(key)
        while waiting:
            incoming = self.transfers.get(waiting[0])
            if incoming is None:
                waiting.popleft()
                continue
            if incoming.eager and not incoming.has_memory:
                return  # its allocation is still to be answered; later ones wait behind it
            waiting.popleft()
            incoming.told = True
            self.effects.append(
                TellOffered(envelope.destination, incoming.transfer, incoming.envelope, incoming.has_memory)
            )
            if incoming.nbytes == 0:
                self._complete(incoming)
            elif incoming.state is RecvState.LANDED:
                self._delivered(incoming)
            elif incoming.landed_bytes if incoming.peer is None else incoming.prefix_bytes:
                self._tell_landed(incoming)
        self._untold.pop(key, None)

    def expected(self, peer: AgentName, transfer: TransferId, frame: wire.Expect) -> None:
        """A prediction for the receiving trainer."""
        incoming = self.transfers.get(transfer)
        if incoming is not None and incoming.peer == peer and incoming.told:
            destination = incoming.envelope.destination
            self.effects.append(TellExpect(destination, transfer, frame.finish_in_ns, frame.uncertainty_ns))

    def cancelled(self, peer: AgentName, transfer: TransferId, frame: wire.Cancel) -> None:
        """The sender gave the message up."""
        incoming = self.transfers.get(transfer)
        code = ErrorCode(frame.code) if frame.code in ErrorCode._value2member_map_ else ErrorCode.INTERNAL
        if incoming is None:
            self.past.cancelled(transfer, code, f"cancelled by the sender: {frame.message}")
        elif incoming.peer == peer and incoming.state is not RecvState.LANDED:
            # The sender's text begins with the same description.
            message = frame.message.removeprefix(f"{incoming.envelope.describe()}: ")
            self._fail(incoming, code, f"{incoming.envelope.describe()}: cancelled by the sender: {message}")

    # -------------------------------------------------------------------------------------- memory

    def allocated(self, transfer: TransferId) -> None:
        """Memory was found."""
        incoming = self.transfers.get(transfer)
        asked_by = self._asked.pop(transfer, None)
        if incoming is None:
            if asked_by is not None:
                # It ended while its memory was being looked for.
                self.effects.append(FreeBlock(transfer, asked_by))
                self._try_next(asked_by)
            return
        destination = incoming.envelope.destination
        was_told = incoming.told
        incoming.allocated()
        incoming.step(RecvInput.ALLOCATED)
        if was_told:
            self.effects.append(TellBlock(destination, transfer))
        if incoming.peer is not None and (was_told or incoming.answer_due):
            self._answer(incoming.peer, transfer, wire.Credit())
        incoming.answer_due = False
        if not was_told:
            self._tell_in_order(incoming.envelope)
        self._denied.get(destination, {}).pop(transfer, None)
        self._try_next(destination)

    def denied(self, transfer: TransferId, reason: str, permanent: bool) -> None:
        """No memory: now, or ever."""
        asked_by = self._asked.pop(transfer, None)
        incoming = self.transfers.get(transfer)
        if incoming is None or permanent:
            if incoming is not None:
                self._refuse(incoming, ErrorCode.RESOURCE, f"{incoming.envelope.describe()}: {reason}")
            if asked_by is not None:
                self._try_next(asked_by)
            return
        if incoming.eager and not incoming.told:
            incoming.eager = incoming.answer_due = False
            if incoming.peer is not None:
                # Its budget comes back as for any other: the sender may have given it up meanwhile.
                self._answer(incoming.peer, transfer, wire.TurnedDown(reason[:1024]))
                if incoming.budgeted:
                    self._return_budget(incoming.peer, incoming.envelope)
                incoming.budgeted = False
            self._tell_in_order(incoming.envelope)
            return
        destination = incoming.envelope.destination
        waiting = self._denied.setdefault(destination, {})
        if transfer in waiting and destination in self._trying_below_bytes:
            below_bytes = min(self._trying_below_bytes[destination], incoming.nbytes)
            self._trying_below_bytes[destination] = below_bytes
        waiting[transfer] = None
        self._try_next(destination)

    def memory_freed(self, endpoint: EndpointName) -> None:
        """Ask again for what was denied, oldest first; a smaller one doesn't wait for a larger one, for the trainer may
        need it before it gives anything back."""
        if endpoint in self._denied:
            self._trying_below_bytes[endpoint] = MAX_TRANSFER_BYTES + 1
            self._try_next(endpoint)

    def _try_next(self, endpoint: EndpointName) -> None:
        below_bytes = self._trying_below_bytes.get(endpoint)
        if below_bytes is None:
            return
        waiting = self._denied.get(endpoint, {})
        for transfer in list(waiting):
            incoming = self.transfers.get(transfer)
            if incoming is None or incoming.state is not RecvState.WANTED:
                del waiting[transfer]
            elif transfer in self._asked:
                return  # its answer goes on
            elif incoming.nbytes < below_bytes:
                self._allocate(incoming)
                return
        del self._trying_below_bytes[endpoint]
        if not waiting:
            self._denied.pop(endpoint, None)

    # ----------------------------------------------------------------------------- from the client

    def accepted(self, transfer: TransferId) -> None:
        """A posted receive matched a message that has no memory yet."""
        incoming = self.transfers.get(transfer)
        if incoming is None or incoming.state is not RecvState.OFFERED or incoming.eager:
            return
        incoming.step(RecvInput.ACCEPTED)
        self._allocate(incoming)

    def released(self, transfer: TransferId) -> None:
        """The trainer needs the block no longer."""
        incoming = self.transfers.get(transfer)
        if incoming is None or incoming.state is not RecvState.LANDED:
            return
        incoming.step(RecvInput.RELEASED)
        del self.transfers[transfer]
        self._free(incoming)
        if incoming.peer is None:
            self.ended_local.append(transfer)
            self.effects.append(TellSendDone(incoming.envelope.source, transfer))

    def _free(self, incoming: Incoming) -> None:
        envelope = incoming.envelope
        if incoming.nbytes and incoming.has_memory:
            self.effects.append(FreeBlock(incoming.transfer, envelope.destination))
        if incoming.budgeted and incoming.peer is not None and incoming.nbytes:
            self._return_budget(incoming.peer, envelope)

    def _return_budget(self, peer: AgentName, envelope: Envelope) -> None:
        frame = wire.EagerReturned(envelope.job, envelope.src_rank, envelope.dst_rank, envelope.nbytes)
        self.effects.append(ToPeer(peer, True, wire.NO_TRANSFER, frame))

    # ---------------------------------------------------------------------------------------- data

    def chunk(self, peer: AgentName, transfer: TransferId, offset: int, length: int, good: bool, now_ns: int) -> None:
        """A chunk is in place."""
        incoming = self.transfers.get(transfer)
        if incoming is None or incoming.state is not RecvState.LANDING or incoming.peer != peer:
            return
        if not good:
            self.corrupt_chunks += 1
            self._answer(peer, transfer, wire.Nack(offset, length))
            return
        before = incoming.prefix_chunks
        if not incoming.mark(offset, length, now_ns):
            return
        self.received_bytes += length
        if incoming.complete:
            self._complete(incoming)
        elif incoming.prefix_chunks != before:
            self._tell_landed(incoming)

    def local_filled(self, transfer: TransferId, filled_bytes: int) -> None:
        """More of a handed-over block holds its message."""
        incoming = self.transfers.get(transfer)
        if incoming is None or incoming.peer is not None or incoming.state is not RecvState.LANDING:
            return
        if not incoming.landed_bytes < filled_bytes <= incoming.nbytes:
            return
        incoming.landed_bytes = filled_bytes
        if incoming.complete:
            self._complete(incoming)
        else:
            self._tell_landed(incoming)

    def _complete(self, incoming: Incoming) -> None:
        incoming.step(RecvInput.COMPLETE)
        if incoming.told:
            self._delivered(incoming)

    def _delivered(self, incoming: Incoming) -> None:
        """All of it is in place and its trainer hears so: now it may be acknowledged."""
        self._tell_landed(incoming)
        pair = pair_of(incoming.transfer, incoming.envelope, incoming.dst_incarnation)
        self.past.fence(pair).ended_well(incoming.transfer.sequence)
        if incoming.peer is None:
            if incoming.nbytes == 0:
                self.ended_local.append(incoming.transfer)
                self.effects.append(TellSendDone(incoming.envelope.source, incoming.transfer))
                del self.transfers[incoming.transfer]
            else:
                # A receiver may keep what it got for long (activations until their backward): its sender doesn't wait.
                self.effects.append(TellSendDelivered(incoming.envelope.source, incoming.transfer))
            return
        span_ns = incoming.last_arrival_ns - incoming.first_arrival_ns
        self._answer(incoming.peer, incoming.transfer, wire.Ack(incoming.nbytes, span_ns))
        if incoming.nbytes == 0:
            del self.transfers[incoming.transfer]

    def _tell_landed(self, incoming: Incoming) -> None:
        if incoming.told:
            nbytes = incoming.landed_bytes if incoming.peer is None else incoming.prefix_bytes
            self.effects.append(TellLanded(incoming.envelope.destination, incoming.transfer, nbytes))

    # ------------------------------------------------------------------------------------- failing

    def _answer(self, peer: AgentName, transfer: TransferId, frame: wire.Frame) -> None:
        self.effects.append(ToPeer(peer, True, transfer, frame))

    def _refuse_offer(
        self, peer: AgentName, transfer: TransferId, offer: wire.Offer, code: ErrorCode, message: str
    ) -> None:
        """An offer that isn't even taken in; its budget comes back like that of any other."""
        self._answer(peer, transfer, wire.Fail(code, message, 0))
        if offer.eager and offer.envelope.nbytes:
            self._return_budget(peer, offer.envelope)

    def _refuse(self, incoming: Incoming, code: ErrorCode, message: str) -> None:
        """End a message from this side: the sender hears it, and the trainer if it was told of the message."""
        if incoming.peer is not None:
            self._answer(incoming.peer, incoming.transfer, wire.Fail(code, message[:2048], incoming.landed_bytes))
        else:
            self.effects.append(TellSendFailed(incoming.envelope.source, incoming.transfer, code, message, 0))
        self._fail(incoming, code, message)

    def _fail(self, incoming: Incoming, code: ErrorCode, message: str) -> None:
        incoming.step(RecvInput.FAILED)
        del self.transfers[incoming.transfer]
        pair = pair_of(incoming.transfer, incoming.envelope, incoming.dst_incarnation)
        self.past.fence(pair).ended_badly(incoming.transfer.sequence)
        if incoming.peer is None:
            self.ended_local.append(incoming.transfer)
        destination = incoming.envelope.destination
        if incoming.told and destination in self.clients:
            done = incoming.landed_bytes
            self.effects.append(TellRecvFailed(destination, incoming.transfer, code, message, done))
        self._free(incoming)
        self._tell_in_order(incoming.envelope)

    def client_gone(self, endpoint: EndpointName, reason: str) -> None:
        """The receiving trainer ended: free its blocks, tell the senders of what had not arrived."""
        for incoming in [i for i in self.transfers.values() if i.envelope.destination == endpoint]:
            if incoming.state is RecvState.LANDED:
                self.released(incoming.transfer)
            else:
                self._refuse(incoming, ErrorCode.PEER_LOST, f"{incoming.envelope.describe()}: receiver gone: {reason}")
        self.past.client_gone(endpoint)
        self._denied.pop(endpoint, None)
        self._trying_below_bytes.pop(endpoint, None)

    def source_gone(self, endpoint: EndpointName, reason: str) -> None:
        """A local sending trainer ended: what it was still filling for another local trainer can't be completed."""
        for incoming in [i for i in self.transfers.values() if i.peer is None and i.envelope.source == endpoint]:
            if incoming.state is not RecvState.LANDED:
                self._fail(incoming, ErrorCode.PEER_LOST, f"{incoming.envelope.describe()}: sender gone: {reason}")

    def cancel_local(self, transfer: TransferId) -> None:
        """A local sender gives up a handed-over message. Too late when it is complete."""
        incoming = self.transfers.get(transfer)
        if incoming is not None and incoming.state is not RecvState.LANDED:
            self._refuse(incoming, ErrorCode.CANCELLED, f"{incoming.envelope.describe()}: cancelled by the sender")

    def abandon(self) -> None:
        """This agent ends, and its trainers go on with its next life: nothing is told to anybody any more."""
        for incoming in self.transfers.values():
            if incoming.nbytes and incoming.has_memory:
                self.effects.append(FreeBlock(incoming.transfer, incoming.envelope.destination))
        self.transfers.clear()
        self._untold.clear()
        self._denied.clear()
        self._trying_below_bytes.clear()
        self.past.awaited.clear()
        self._sources.clear()

    # ------------------------------------------------------------------------- broken connections

    def _unfinished(self, peer: AgentName) -> list[Incoming]:
        return [i for i in self.transfers.values() if i.peer == peer and i.state is not RecvState.LANDED]

    def inbound_opened(self, peer: AgentName, incarnation: int, now_ns: int) -> None:
        """A peer's connections stand. What it had under way it offers again, over them."""
        source = self._source(peer)
        source.connection += 1
        another = source.incarnation != incarnation
        if another:
            source.first_connection = source.connection
        source.incarnation, source.judged_ns = incarnation, None
        if self._unfinished(peer):
            # The same life says when it has offered all; another one has to find its trainers first.
            source.judged_ns = now_ns + (min(RETURN_NS, self._peer_timeout_ns) if another else self._peer_timeout_ns)
            source.reason = "it was started again" if another else "it was there again"
        for incoming in self.transfers.values():
            if incoming.peer == peer:
                incoming.budgeted = False

    def lives(self, peer: AgentName, incarnation: int, now_ns: int) -> None:
        """A peer was reached: if it is another life, it need not come to us before what it had under way is judged."""
        source = self._sources.get(peer)
        if source is None or source.judged_ns is None or source.incarnation in (0, incarnation):
            return
        source.judged_ns = min(source.judged_ns, now_ns + RETURN_NS)
        source.reason = "it was started again"

    def inbound_closed(self, peer: AgentName, reason: str, now_ns: int, silent_ns: int = 0) -> None:
        """A peer's connections ended: what is half here waits for it to come back, for ``peer_timeout``."""
        source = self._source(peer)
        source.reason = reason
        source.judged_ns = now_ns - min(silent_ns, self._peer_timeout_ns) + self._peer_timeout_ns
        # Whatever comes is another connection.
        source.connection += 1

    def offered_all(self, peer: AgentName) -> None:
        """A peer that was away has offered again all that it had under way: the rest will not come."""
        source = self._source(peer)
        for incoming in self._unfinished(peer):
            if source.first_connection <= incoming.connection < source.connection:
                self._lost(incoming, peer, "the sender gave it up while the connection was down")
        if all(incoming.connection == source.connection for incoming in self._unfinished(peer)):
            source.judged_ns = None

    def deadlines_ns(self) -> list[int]:
        """Times at which :meth:`tick` has something to do."""
        times = [s.judged_ns for s in self._sources.values() if s.judged_ns is not None] if self._sources else []
        return [*times, *self.past.awaited.values()] if self.past.awaited else times

    def tick(self, now_ns: int) -> None:
        """Fail what a peer that stayed away, or another life of it, has not offered again in time."""
        for peer, source in self._sources.items():
            if source.judged_ns is not None and source.judged_ns <= now_ns:
                source.judged_ns = None
                for incoming in self._unfinished(peer):
                    if incoming.connection != source.connection:
                        self._lost(incoming, peer, f"agent {peer} has not gone on with it in time ({source.reason})")
        if self.past.awaited or now_ns >= self.past.turns_ns:
            self.past.tick(now_ns)

    def _lost(self, incoming: Incoming, peer: AgentName, why: str) -> None:
        self._fail(
            incoming,
            ErrorCode.PEER_LOST,
            f"{incoming.envelope.describe()}: {why}, after {incoming.landed_bytes} of {incoming.nbytes} bytes. "
            "The sender has to send it again",
        )


def _ended_before(envelope: Envelope, fate: Fate) -> str | None:
    """Why a message can't be taken in (again), in words; None: it can, or was delivered."""
    if fate is Fate.FAILED:
        return f"{envelope.describe()}: it has ended before (it failed or was taken back)"
    if fate is Fate.FORGOTTEN:
        return f"{envelope.describe()}: it has ended before (how is no longer known)"
    return None


def _clash_of(known: Incoming) -> str:
    """What is wrong with a second message of the same name, in words."""
    return (
        f"another message is under way as {known.transfer} ({known.envelope.source} sends it): two trainers use the "
        "same incarnation; start one of them again"
    )


def _problem_of(offer: wire.Offer) -> str | None:
    """What is wrong with an offer's figures, in words; None: nothing."""
    if offer.envelope.nbytes > MAX_TRANSFER_BYTES:
        return f"a message of {offer.envelope.nbytes} bytes is above the limit of {MAX_TRANSFER_BYTES}"
    if not wire.MIN_CHUNK_BYTES <= offer.chunk_bytes <= wire.MAX_CHUNK_BYTES:
        limits = f"{wire.MIN_CHUNK_BYTES} to {wire.MAX_CHUNK_BYTES}"
        return f"a chunk size of {offer.chunk_bytes} bytes is outside {limits}"
    if offer.envelope.traffic not in TrafficClass._value2member_map_:
        return f"traffic class {offer.envelope.traffic} is unknown"
    return None
