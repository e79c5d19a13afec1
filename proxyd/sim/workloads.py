"""What trainers do to a link, beyond single bursts: backlogs, pipelines both ways, checkpoints.

A workload posts messages by itself, reacts to their arrival, and stops by time or by number. ``pending`` says whether
it will post more; what it has posted is in the world's record of fates. All use :class:`Pair`: who sends to whom.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from proxyd.core.ids import EndpointName, TransferId
from proxyd.sim.trainer import Fate, Trainer
from proxyd.sim.world import World
from proxyd.wire.envelope import TrafficClass


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A sender and its receiver; with a pipeline also the other way round."""

    sender: EndpointName
    receiver: EndpointName


class Workload(Protocol):
    """Something that goes on."""

    @property
    def pending(self) -> bool:
        """It will post more."""

    def start(self) -> None:
        """Begin, at the clock's present time."""


def _alive(world: World, endpoint: EndpointName) -> Trainer | None:
    trainer = world.trainers.get(endpoint)
    return trainer if trainer is not None and trainer.alive else None


class Backlog:
    """Each sender always has ``depth`` messages posted and not acknowledged, until ``until_ns``."""

    def __init__(
        self, world: World, pairs: list[Pair], nbytes: int, traffic: TrafficClass, *, depth: int, until_ns: int
    ) -> None:
        self._world = world
        self._pairs = pairs
        self._nbytes = nbytes
        self._traffic = traffic
        self._depth = depth
        self._until_ns = until_ns
        self.posted: list[TransferId] = []

    @property
    def pending(self) -> bool:
        return self._world.clock.now_ns < self._until_ns

    def start(self) -> None:
        for _ in range(self._depth):
            for pair in self._pairs:
                self._post(pair)

    def _post(self, pair: Pair) -> None:
        sender = _alive(self._world, pair.sender)
        if sender is None or not self.pending:
            return
        self.posted.append(
            sender.send(pair.receiver.rank, self._nbytes, self._traffic, on_settled=lambda _: self._post(pair))
        )


class Pipeline:
    """Each pair passes micro-batches: activations one way, and after ``compute_ns`` gradients the other way.

    At most ``in_flight`` micro-batches of a pair are between its first send and its gradient's arrival, as in a
    pipeline schedule with that many warm-up steps; the next one also takes ``compute_ns`` to be made. Both directions
    are busy at once.
    """

    def __init__(
        self,
        world: World,
        pairs: list[Pair],
        nbytes: int,
        *,
        compute_ns: int,
        in_flight: int,
        count: int = 0,
        until_ns: int = 0,
    ) -> None:
        self._world = world
        self._pairs = pairs
        self._nbytes = nbytes
        self._compute_ns = compute_ns
        self._in_flight = in_flight
        self._count = count
        self._until_ns = until_ns
        self._begun = dict.fromkeys(pairs, 0)
        self._back = 0

    @property
    def pending(self) -> bool:
        if self._until_ns:
            return self._world.clock.now_ns < self._until_ns
        return self._back < self._count * len(self._pairs)

    def start(self) -> None:
        for pair in self._pairs:
            for number in range(self._in_flight):
                self._world.clock.after(number * self._compute_ns, self._forward, pair)

    def _forward(self, pair: Pair) -> None:
        sender = _alive(self._world, pair.sender)
        if sender is None or not self.pending or (self._count and self._begun[pair] >= self._count):
            return
        self._begun[pair] += 1
        sender.send(
            pair.receiver.rank,
            self._nbytes,
            TrafficClass.PIPELINE,
            on_landed=lambda _: self._world.clock.after(self._compute_ns, self._backward, pair),
        )

    def _backward(self, pair: Pair) -> None:
        receiver = _alive(self._world, pair.receiver)
        if receiver is not None:
            receiver.send(
                pair.sender.rank, self._nbytes, TrafficClass.PIPELINE, on_landed=lambda _: self._came_back(pair)
            )

    def _came_back(self, pair: Pair) -> None:
        self._back += 1
        self._world.clock.after(self._compute_ns, self._forward, pair)


class Checkpoint:
    """Every ``every_ns`` each sender posts a checkpoint: ``nbytes`` in bulk messages of ``message_bytes``."""

    def __init__(
        self,
        world: World,
        pairs: list[Pair],
        nbytes: int,
        *,
        message_bytes: int,
        every_ns: int,
        times: int = 0,
        until_ns: int = 0,
    ) -> None:
        self._world = world
        self._pairs = pairs
        self._nbytes = nbytes
        self._message_bytes = message_bytes
        self._every_ns = every_ns
        self._times = times
        self._until_ns = until_ns
        self._done = 0

    @property
    def pending(self) -> bool:
        if self._until_ns:
            return self._world.clock.now_ns < self._until_ns
        return self._done < self._times

    def start(self) -> None:
        if not self.pending:
            return
        self._done += 1
        for pair in self._pairs:
            sender = _alive(self._world, pair.sender)
            left = self._nbytes if sender is not None else 0
            while sender is not None and left > 0:
                sender.send(pair.receiver.rank, min(left, self._message_bytes), TrafficClass.BULK)
                left -= self._message_bytes
        self._world.clock.after(self._every_ns, self.start)


class Rounds:
    """Bursts in a closed loop: all senders post one message each, again ``gap_ns`` after the last arrival."""

    def __init__(
        self,
        world: World,
        pairs: list[Pair],
        nbytes: int,
        traffic: TrafficClass,
        *,
        gap_ns: int,
        spread_ns: int = 200_000,
        times: int = 0,
        until_ns: int = 0,
    ) -> None:
        self._world = world
        self._pairs = pairs
        self._nbytes = nbytes
        self._traffic = traffic
        self._gap_ns = gap_ns
        self._spread_ns = max(1, spread_ns)
        self._times = times
        self._until_ns = until_ns
        self._left = 0
        self.rounds: list[list[TransferId]] = []
        """What each burst posted."""

    @property
    def pending(self) -> bool:
        if self._until_ns:
            return self._world.clock.now_ns < self._until_ns
        return len(self.rounds) < self._times or self._left > 0

    def start(self) -> None:
        world = self._world
        if not self.pending:
            return
        sent: list[TransferId] = []
        self.rounds.append(sent)
        self._left = len(self._pairs)
        for pair in self._pairs:
            world.clock.after(world.rng.randrange(self._spread_ns), self._post, pair, sent)

    def _post(self, pair: Pair, sent: list[TransferId]) -> None:
        sender = _alive(self._world, pair.sender)
        if sender is None:
            self._over()
            return
        sent.append(sender.send(pair.receiver.rank, self._nbytes, self._traffic, on_settled=self._settled))

    def _settled(self, fate: Fate) -> None:
        self._over()

    def _over(self) -> None:
        self._left -= 1
        if not self._left:
            # The sender knows of the last arrival half a round trip late.
            world = self._world
            last_ns = max((world.fates[transfer].landed_ns for transfer in self.rounds[-1]), default=0)
            world.clock.at(last_ns + self._gap_ns, self.start)
