"""Trainers that post, fill, take, keep, give up and die; and what is known of each message for certain.

A trainer outlives its agent as its library does (:mod:`proxyd_client.resuming`): it looks for the next life, says what
it knows, and posts again what was not acknowledged. Only what a dying process didn't get to say is not modelled: an
agent here tells its trainers in the instant in which its machine says so.

A message's payload is one number per chunk, drawn from the message's name: enough to see when a byte range arrives that
nobody posted, arrives twice in different forms, or comes from a block that its trainer had back already.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from proxyd.core import effects as ef
from proxyd.core import events as ev
from proxyd.core.ids import EndpointName, TransferId
from proxyd.sim.faults.plan import KIB, MS, SECOND
from proxyd.wire.envelope import Envelope, ErrorCode

if TYPE_CHECKING:
    from proxyd.sim.faults.agents import AgentHost, AgentLife
    from proxyd.sim.faults.world import World

SOUND_ERRORS = frozenset(ErrorCode) - {ErrorCode.INTERNAL, ErrorCode.PROTOCOL, ErrorCode.CONFIG, ErrorCode.MISMATCH}
"""What may end a message here; the others would be mistakes of ours."""
RECONNECT_NS = 2500 * MS
"""How long a trainer looks for the next life of its agent."""
MASK = (1 << 64) - 1


class Broken(AssertionError):
    """Something that must always hold does not."""


@dataclasses.dataclass(slots=True)
class Message:
    """All that is known of one message."""

    transfer: TransferId
    envelope: Envelope
    posted_ns: int
    filled_bytes: int
    sender: Trainer
    must_arrive: bool
    """Posted when nothing breaks any more."""
    outcome: str = ""
    """"" while the sender doesn't know; else "done" or an error's name."""
    why: str = ""
    block_with_agent: bool = True
    done_ns: int = 0
    taken_by: Trainer | None = None
    """Who was told of it."""
    landed_bytes: int = 0
    landed: bool = False
    dst_incarnation: int = 0
    """For this life of its receiver only, since its sender's agent ended once; 0: for any."""
    whole: bool = False
    """Its receiver's agent said that all of it is there, whether that trainer lived to read it or not."""
    receive_failed: str = ""

    def content(self, offset: int) -> int:
        """The chunk that begins at ``offset``, as a number."""
        mixed = (self.transfer.incarnation * 0x9E3779B97F4A7C15 + self.transfer.sequence) & MASK
        return ((mixed ^ (offset + 1)) * 0xD1342543DE82EF95) & MASK

    def __str__(self) -> str:
        return f"{self.transfer} ({self.envelope.describe()}, posted at {self.posted_ns / SECOND:.3f} s)"


class Trainer:
    """One life of an endpoint."""

    def __init__(self, world: World, host: AgentHost, endpoint: EndpointName, incarnation: int) -> None:
        self.world = world
        self.host = host
        self.endpoint = endpoint
        self.incarnation = incarnation
        self.alive = True
        self.agent: AgentLife | None = None
        """The life of its agent that it is attached to."""
        self.sequence = 0
        self.told: list[TransferId] = []
        self.open: dict[TransferId, Message] = {}
        """Told of, and neither complete nor failed."""
        self.keeps: dict[TransferId, Message] = {}
        """Complete and not released."""
        self.waiting: dict[TransferId, Message] = {}
        """Posted, outcome unknown."""
        self.awaited: dict[TransferId, Message] = {}
        """Told of by an earlier life of the agent, and not complete."""
        self.again: list[Message] = []
        """To be posted to the next life of its agent."""
        self.here: dict[int, int] = {}
        """Ranks that are registered, and their lives."""
        self.here_ns: dict[int, int] = {}
        """When the present life of its agent said so last."""
        self.out_of_reach: set[int] = set()
        """Those of which it said that they can't send to us."""
        self.begun_ns = world.clock.now_ns
        self.attached_before = False
        self.outages = 0
        self.lazy_until_ns = 0

    # -- what it does --------------------------------------------------------------------------------------------

    def say(self, event: ev.AgentEvent) -> None:
        """Something for its agent; lost when that is gone."""
        if self.agent is not None:
            self.agent.process(self.agent.emit, event)

    def post_some(self) -> None:
        """Post a message now and then."""
        world, rng = self.world, self.world.rng
        if not self.alive or world.calm:
            return
        if self.agent is not None and not self.host.suspended:
            others = [rank for rank in world.ranks if rank != self.endpoint.rank]
            nbytes = rng.choice((0, 1, 1000, 64 * KIB, 65 * KIB, 100 * KIB, world.shape.most_bytes))
            if nbytes == world.shape.most_bytes:
                nbytes = rng.randrange(nbytes // 2, nbytes)
            self.post(rng.choice(others), nbytes)
        self.world.clock.after(int(rng.expovariate(1.0) * world.shape.post_every_ns) + MS, self.post_some)

    def post(self, rank: int, nbytes: int, *, must_arrive: bool = False) -> Message:
        """Post one message, whole or to be filled while it is under way."""
        world, rng = self.world, self.world.rng
        self.sequence += 1
        transfer = TransferId(self.incarnation, self.sequence)
        tag, group, traffic = rng.randrange(3), rng.choice(("", "g")), rng.randrange(3)
        envelope = Envelope(self.endpoint.job, self.endpoint.rank, rank, group, tag, traffic, nbytes, "", ())
        filled_bytes = rng.choice((0, nbytes, nbytes)) if nbytes else 0
        message = Message(transfer, envelope, world.clock.now_ns, filled_bytes, self, must_arrive)
        world.messages[transfer] = message
        self.waiting[transfer] = message
        self.say(ev.SendPosted(transfer, envelope, filled_bytes, rng.choice((0, 0, 0, 50 * MS))))
        if filled_bytes < nbytes:
            world.clock.after(rng.randrange(1, 30) * MS, self._fill, message)
        return message

    def _fill(self, message: Message) -> None:
        if not self.alive or message.outcome or message.filled_bytes == message.envelope.nbytes:
            return
        if self.host.suspended:
            self.world.clock.after(50 * MS, self._fill, message)
            return
        rng, nbytes = self.world.rng, message.envelope.nbytes
        message.filled_bytes = min(nbytes, message.filled_bytes + rng.choice((100 * KIB, nbytes)))
        self.say(ev.SendFilled(message.transfer, message.filled_bytes))
        if message.filled_bytes < nbytes:
            self.world.clock.after(rng.randrange(1, 20) * MS, self._fill, message)

    def cancel_one(self) -> None:
        """Give up one of its messages."""
        if self.waiting and self.agent is not None:
            self.say(ev.SendCancelled(self.world.rng.choice(sorted(self.waiting))))

    def _when_it_likes(self, most_ms: int) -> int:
        now_ns = self.world.clock.now_ns
        return max(0, self.lazy_until_ns - now_ns) + self.world.rng.randrange(1, most_ms) * MS

    def _accept(self, message: Message) -> None:
        if self.alive and message.transfer in self.open:
            if self.host.suspended or self.lazy_until_ns > self.world.clock.now_ns:
                self.world.clock.after(self._when_it_likes(30), self._accept, message)
            else:
                self.say(ev.RecvAccepted(message.transfer))

    def _release(self, message: Message) -> None:
        if self.alive and message.transfer in self.keeps:
            if self.host.suspended or self.lazy_until_ns > self.world.clock.now_ns:
                self.world.clock.after(self._when_it_likes(30), self._release, message)
            else:
                del self.keeps[message.transfer]
                self.say(ev.RecvReleased(message.transfer))

    # -- what it is told -----------------------------------------------------------------------------------------

    def send_ended(self, message: Message, outcome: str, why: str, *, block_back: bool) -> None:
        """Its message is done or failed."""
        if not message.outcome:
            message.outcome, message.why = outcome, why
            message.done_ns = self.world.clock.now_ns
            del self.waiting[message.transfer]
        elif not (outcome == message.outcome == "done" and block_back):
            raise Broken(f"{message} ended twice: {message.outcome}, then {outcome} {why}")
        if block_back:
            if not message.block_with_agent:
                raise Broken(f"{message}: its block was given back twice")
            message.block_with_agent = False

    def offered(self, effect: ef.TellOffered) -> None:
        """A message is coming."""
        message = self.world.messages[effect.transfer]
        if effect.envelope != message.envelope:
            raise Broken(f"{message} was offered as {effect.envelope}")
        if effect.envelope.destination != self.endpoint:
            raise Broken(f"{message} was offered to {self.endpoint}")
        if effect.transfer in self.awaited:
            self.open[effect.transfer] = self.awaited.pop(effect.transfer)
            if not effect.has_memory:
                self.world.clock.after(self._when_it_likes(30), self._accept, message)
            return
        if message.taken_by is not None:
            raise Broken(f"{message} was offered twice: to {message.taken_by.incarnation:x}, then {self.incarnation:x}")
        for earlier in reversed(self.told):
            if earlier.incarnation == effect.transfer.incarnation:
                if earlier.sequence > effect.transfer.sequence:
                    raise Broken(f"{message} was offered after {self.world.messages[earlier]}")
                break
        self.told.append(effect.transfer)
        message.taken_by = self
        self.open[effect.transfer] = message
        if not effect.has_memory and message.envelope.nbytes:
            self.world.clock.after(self._when_it_likes(30), self._accept, message)

    def landed(self, effect: ef.TellLanded, life: AgentLife) -> None:
        """A prefix of a message is in its memory: it reads it, at once."""
        message = self.open.get(effect.transfer)
        if message is None:
            raise Broken(f"{self.world.messages[effect.transfer]}: landed, and was not open at {self.endpoint}")
        nbytes = message.envelope.nbytes
        if not message.landed_bytes <= effect.nbytes <= nbytes:
            raise Broken(f"{message}: landed {effect.nbytes} bytes after {message.landed_bytes} of {nbytes}")
        life.check_content(message, message.landed_bytes, effect.nbytes)
        message.landed_bytes = effect.nbytes
        if effect.nbytes == nbytes:
            message.landed = True
            del self.open[effect.transfer]
            if nbytes:
                self.keeps[effect.transfer] = message
                self.world.clock.after(self._when_it_likes(20), self._release, message)

    def receive_failed(self, effect: ef.TellRecvFailed) -> None:
        """A message that it was told of will not come."""
        message = self.open.pop(effect.transfer, None) or self.awaited.pop(effect.transfer, None)
        if message is None:
            raise Broken(f"{self.world.messages[effect.transfer]}: failed at its receiver, where it was not open")
        check_code(message, effect.code, effect.message)
        message.receive_failed = effect.code.name

    def is_here(self, effect: ef.TellPeerHere, now_ns: int) -> None:
        """A rank is registered, or within reach again."""
        self.here[effect.rank] = effect.incarnation
        self.here_ns[effect.rank] = now_ns
        self.out_of_reach.discard(effect.rank)

    def is_gone(self, effect: ef.TellPeerGone) -> None:
        """A rank has ended, or is out of reach."""
        if self.here.get(effect.rank) != effect.incarnation:
            return
        if effect.returns:
            self.out_of_reach.add(effect.rank)
        else:
            del self.here[effect.rank]
            self.here_ns.pop(effect.rank, None)

    # -- the agent's next life -----------------------------------------------------------------------------------

    def agent_gone(self, life: AgentLife) -> None:
        """Its agent has ended, or says that it does: what is whole is delivered, the rest waits for the next life."""
        if self.agent is None:
            return
        self.agent = None
        self.outages += 1
        for message in self.open.values():
            block, nbytes = life.blocks.get(message.transfer), message.envelope.nbytes
            if block is not None and not block.local and block.is_whole:
                life.check_content(message, 0, nbytes)
                message.landed_bytes, message.landed, message.whole = nbytes, True, True
            else:
                message.landed_bytes = 0
                self.awaited[message.transfer] = message
        self.open.clear()
        self.keeps.clear()
        for message in self.world.messages.values():
            if message.sender is self:
                message.block_with_agent = False
        self.again = sorted(self.waiting.values(), key=lambda message: message.transfer)
        for message in self.again:
            message.dst_incarnation = message.dst_incarnation or self.here.get(message.envelope.dst_rank, 0)
        self.world.clock.after(RECONNECT_NS, self._give_up, self.outages)

    def _give_up(self, outage: int) -> None:
        if self.alive and self.agent is None and self.outages == outage:
            self.host.abandon(self)

    def past(self) -> tuple[ev.Past, ...] | None:
        """What it knows from earlier lives of its agent; None: there was none."""
        if not self.attached_before:
            return None
        known: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for transfer in self.told:
            message = self.world.messages[transfer]
            delivered, _ = known.setdefault((message.envelope.src_rank, transfer.incarnation), ([0], []))
            delivered.append(transfer.sequence)
        highest = {key: max(all_of_it) for key, (all_of_it, _) in known.items()}
        for (_, incarnation), (delivered, awaited) in known.items():
            for sequence in delivered[:]:
                transfer = TransferId(incarnation, sequence)
                if sequence and transfer in self.awaited:
                    awaited.append(sequence)
                if not sequence or not self.world.messages[transfer].landed:
                    delivered.remove(sequence)
        return tuple(
            ev.Past(rank, incarnation, highest[rank, incarnation], tuple(delivered), tuple(awaited))
            for (rank, incarnation), (delivered, awaited) in known.items()
        )

    def go_on(self) -> None:
        """It is attached: what was not acknowledged is posted again, whole, in order."""
        self.attached_before = True
        for message in [one for one in self.again if one.transfer in self.waiting]:
            message.filled_bytes = message.envelope.nbytes
            message.block_with_agent = True
            self.say(
                ev.SendPosted(
                    message.transfer,
                    message.envelope,
                    message.filled_bytes,
                    again=True,
                    dst_incarnation=message.dst_incarnation,
                )
            )

    # -- its ends ------------------------------------------------------------------------------------------------

    def agent_lost(self) -> None:
        """Its agent is gone for good: all that was under way fails, in its library."""
        self.agent = None
        for message in list(self.waiting.values()):
            name = ErrorCode.AGENT_UNAVAILABLE.name
            self.send_ended(message, name, "its agent is gone", block_back=message.block_with_agent)
        for message in (*self.open.values(), *self.awaited.values()):
            message.receive_failed = ErrorCode.AGENT_UNAVAILABLE.name
        self.open.clear()
        self.awaited.clear()
        self.keeps.clear()

    def ended(self) -> None:
        """It lives no longer."""
        self.alive = False
        self.agent = None
        self.open.clear()
        self.awaited.clear()
        self.keeps.clear()
        self.waiting.clear()


def check_code(message: Message, code: ErrorCode, text: str) -> None:
    """Raises Broken for an error that nothing in this world explains."""
    if code not in SOUND_ERRORS:
        raise Broken(f"{message}: {code.name}: {text}")
    if not text:
        raise Broken(f"{message}: {code.name} without a word why")
