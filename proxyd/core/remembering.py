"""What a receiving agent keeps in mind of messages that have ended, and of those that its trainers still await.

What has ended is in a :class:`~proxyd.wire.fence.Fence` for each pair of lives, so that nothing is delivered twice. A
pair is forgotten when nothing of it can come back any more.

When this agent itself was started again, its trainers say what they know (:meth:`Memory.resumed`). A message that one
of them still awaits is taken in like a new one. It fails when

* a later one of the same sender is offered before it: offers to one destination rise in sequence;
* its sender takes it back;
* the end of its sender's life has been known for RETURN_NS;
* its receiver has been back for ``peer_timeout``: by then the sender's agent, which counts from this agent's last word,
  has given it up, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxyd.core.effects import AgentEffect, TellRecvFailed
from proxyd.core.events import Past
from proxyd.core.ids import EndpointName, TransferId
from proxyd.wire.envelope import Envelope, ErrorCode
from proxyd.wire.fence import Fence

MAX_FENCES = 65536
"""Pairs of lives whose past is kept in mind, those that were not used for longest go first: more than any agent has
trainers and peers at a time."""
FORGET_NS = 10 * 60 * 1_000_000_000
"""A pair that was not used for so long (or four times ``peer_timeout``, where that is more) is forgotten: it takes some
600 bytes, and in a week of restarts there are many. What was delivered is acknowledged within seconds, or the
connection breaks; and after a break a sender offers again within its ``peer_timeout``, or never. So nothing comes back
that late."""
RETURN_NS = 4_000_000_000
"""How long another life of a peer has to offer again what an earlier one had under way."""

Pair = tuple[EndpointName, int, EndpointName, int]
"""Source, its incarnation, destination, its incarnation: a trainer that uses another one's incarnation must not get the
other's acknowledgements."""


def pair_of(transfer: TransferId, envelope: Envelope, dst_incarnation: int) -> Pair:
    """The two lives that a message is between."""
    return envelope.source, transfer.incarnation, envelope.destination, dst_incarnation


class Memory:
    """See the module's text. ``clients``: local endpoints and their incarnations, the machine's own."""

    def __init__(self, clients: Mapping[EndpointName, int], effects: list[AgentEffect], peer_timeout_ns: int) -> None:
        self._clients = clients
        self._effects = effects
        self._peer_timeout_ns = peer_timeout_ns
        self._fences: dict[Pair, Fence] = {}
        """Those that were used since ..."""
        self._earlier: dict[Pair, Fence] = {}
        """... and those that were used in the time before that."""
        self.turns_ns = 0
        """When :meth:`tick` is to move them on."""
        self._forget_ns = max(FORGET_NS, 4 * peer_timeout_ns)
        self.awaited: dict[Pair, int] = {}
        """Pairs of which the destination still awaits messages from before this agent's life, and when those fail."""

    def fence(self, pair: Pair) -> Fence:
        """What has ended between two lives."""
        fence = self._fences.get(pair)
        if fence is None:
            fence = self._fences[pair] = self._earlier.pop(pair) if pair in self._earlier else Fence()
            if len(self._fences) >= MAX_FENCES // 2:
                self._turn()
        return fence

    def _turn(self) -> None:
        """Whatever isn't used until the next turn is forgotten then."""
        self._earlier, self._fences = self._fences, {}

    def begins(self, pair: Pair, sequence: int) -> None:
        """A message is taken in: those before it that are still awaited will not come."""
        fence = self.fence(pair)
        fence.offered(sequence)
        for earlier in sorted(one for one in fence.awaited if one < sequence):
            why = f"its sender gave it up while this agent was away (it goes on with message {sequence})"
            self._will_not_come(pair, earlier, ErrorCode.PEER_LOST, why)
        if not fence.awaited:
            self.awaited.pop(pair, None)

    def resumed(self, endpoint: EndpointName, incarnation: int, past: Sequence[Past], now_ns: int) -> None:
        """A trainer came from an earlier life of this agent, and says what it knows."""
        for one in past:
            pair = (EndpointName(endpoint.job, one.rank), one.incarnation, endpoint, incarnation)
            fence = self.fence(pair)
            fence.learn(one.highest, one.delivered, one.awaited)
            if fence.awaited:
                self.awaited[pair] = now_ns + self._peer_timeout_ns

    def cancelled(self, transfer: TransferId, code: ErrorCode, why: str) -> None:
        """A sender took back a message that isn't under way here."""
        for pair in [one for one in self.awaited if one[1] == transfer.incarnation]:
            if transfer.sequence in self.fence(pair).awaited:
                self._will_not_come(pair, transfer.sequence, code, why)

    def sender_gone(self, endpoint: EndpointName, incarnation: int, now_ns: int) -> None:
        """A sender's life has ended, for all that is known. What it left with its agent may still be offered."""
        for pair, due_ns in self.awaited.items():
            if pair[:2] == (endpoint, incarnation):
                self.awaited[pair] = min(due_ns, now_ns + RETURN_NS)

    def client_gone(self, endpoint: EndpointName) -> None:
        """A local trainer has ended: it awaits nothing."""
        for pair in [one for one in self.awaited if one[2] == endpoint]:
            del self.awaited[pair]

    def tick(self, now_ns: int) -> None:
        """Fail what was awaited for too long; forget what was not used for long."""
        if now_ns >= self.turns_ns:
            self.turns_ns = now_ns + self._forget_ns
            self._turn()
        for pair in [pair for pair, due_ns in self.awaited.items() if due_ns <= now_ns]:
            for sequence in sorted(self.fence(pair).awaited):
                why = "its sender has not gone on with it in time"
                self._will_not_come(pair, sequence, ErrorCode.PEER_LOST, why)
            self.awaited.pop(pair, None)  # also where the pair has long been forgotten

    def _will_not_come(self, pair: Pair, sequence: int, code: ErrorCode, why: str) -> None:
        source, incarnation, destination, life = pair
        fence = self.fence(pair)
        fence.ended_badly(sequence)
        if not fence.awaited:
            self.awaited.pop(pair, None)
        if self._clients.get(destination) == life:
            text = f"a message from {source} that was under way when the agent of {destination} ended: {why}"
            self._effects.append(TellRecvFailed(destination, TransferId(incarnation, sequence), code, text, 0))
