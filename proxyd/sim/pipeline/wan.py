"""How pipelines share a wire: all at once, as plain TCP does it, or one message after the other.

Both are exact on a rate trace: a message's last byte leaves when the trace's integral has come so far; nothing ticks.

*Fair sharing*: each pipeline has one connection per direction. n busy connections get an nth each, and all together
``1 / (1 + penalty * (n - 1))`` of the rate: what queues that overflow, retransmissions and timeouts cost. One number
stands for all of that, so each figure names it.

*One at a time* is pacing without any cost of control: the ideal that the granting core is compared with
(:mod:`proxyd.sim.pipeline.granted`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from proxyd.core.traces import RateTrace
from proxyd.sim.clock import Clock
from proxyd.sim.pipeline.model import NANOS, PipelineModel

LOOK_BACK_NS = NANOS
"""A prediction's rate is the mean over this long, up to one round trip ago."""
LEAST_UNCERTAIN = 0.05
"""Share of a prediction's way that it may be off by, at least."""

ROUNDING_BYTES = 0.001
"""Of served bytes, which are floats: a thousandth of a byte is less than a nanosecond of any wire here."""

Direction = tuple[str, str]


class Prediction(NamedTuple):
    """When a message's last byte is expected, give or take."""

    eta_ns: int
    uncertainty_ns: int


class Wan(Protocol):
    """What an engine needs of it."""

    clock: Clock
    """The run's one clock."""

    def start(self) -> None:
        """Bring it to where the step begins."""

    def send(self, pipeline: int, direction: Direction, arrived: Callable[[], None]) -> None:
        """A message goes out now; ``arrived()`` is called when its last byte is there."""

    def predict(self, pipeline: int, direction: Direction, ready_ns: int) -> Prediction | None:
        """Of a message that is ready to go at ``ready_ns``; None: nothing can be said."""

    def use(self) -> dict[Direction, list[tuple[int, int]]]:
        """Stretches of time in which each wire carried something."""


class _Busy:
    """Stretches of use of one wire."""

    def __init__(self) -> None:
        self.stretches: list[tuple[int, int]] = []

    def add(self, start_ns: int, end_ns: int) -> None:
        if self.stretches and self.stretches[-1][1] >= start_ns:
            start_ns = self.stretches.pop()[0]
        self.stretches.append((start_ns, end_ns))


def estimate(rate: RateTrace, one_way_ns: int, now_ns: int) -> tuple[int, float]:
    """The rate as seen one round trip ago, and by which share it moved before that."""
    end_ns = max(1, now_ns - 2 * one_way_ns)
    start_ns = max(0, end_ns - LOOK_BACK_NS)
    middle_ns = (start_ns + end_ns) // 2
    if middle_ns <= start_ns or end_ns <= middle_ns:
        return max(1, rate.rate_at(0)), LEAST_UNCERTAIN
    seen = max(1, rate.mean_between(start_ns, end_ns))
    moved = abs(rate.mean_between(middle_ns, end_ns) - rate.mean_between(start_ns, middle_ns))
    return seen, max(LEAST_UNCERTAIN, moved / seen)


class SerialWan:
    """One message at a time, first come first served, at the wire's full rate."""

    def __init__(self, model: PipelineModel) -> None:
        self.clock = Clock()
        self._model = model
        self._position = dict.fromkeys(model.wires, 0)
        """Of each wire's integral: what is taken."""
        self._busy = {direction: _Busy() for direction in model.wires}

    def start(self) -> None:
        pass

    def send(self, pipeline: int, direction: Direction, arrived: Callable[[], None]) -> None:
        now_ns = self.clock.now_ns
        wire = self._model.wires[direction]
        start = max(self._position[direction], wire.rate.bytes_by(now_ns))
        end = self._position[direction] = start + self._model.message_bytes
        left_ns = wire.rate.time_for(end)
        self._busy[direction].add(max(now_ns, wire.rate.time_for(start)), left_ns)
        self.clock.at(left_ns + wire.one_way_ns, arrived)

    def predict(self, pipeline: int, direction: Direction, ready_ns: int) -> Prediction | None:
        now_ns = self.clock.now_ns
        wire = self._model.wires[direction]
        rate, moved = estimate(wire.rate, wire.one_way_ns, now_ns)
        queued = max(0, self._position[direction] - wire.rate.bytes_by(now_ns))
        free_ns = now_ns + queued * NANOS // rate
        left_ns = max(ready_ns, free_ns) + self._model.message_bytes * NANOS // rate
        return Prediction(left_ns + wire.one_way_ns, round(moved * (left_ns - now_ns)))

    def use(self) -> dict[Direction, list[tuple[int, int]]]:
        return {direction: busy.stretches for direction, busy in self._busy.items()}


class _Shared:
    """A wire that connections share: what each one's message has still to get, as the sum of what one has got since."""

    def __init__(self) -> None:
        self.at_ns = 0
        self.served = 0.0
        """What a message that has been under way from the beginning would have got."""
        self.heads: dict[int, tuple[float, Callable[[], None]]] = {}
        """By connection: its message under way, over when ``served`` has come so far."""
        self.behind: dict[int, deque[Callable[[], None]]] = {}
        self.turn = 0
        self.busy = _Busy()


class FairWan:
    """One connection per pipeline and direction: an equal share each, at a loss. Within one, messages go in order."""

    def __init__(self, model: PipelineModel) -> None:
        self.clock = Clock()
        self._model = model
        self._wires = {direction: _Shared() for direction in model.wires}

    def start(self) -> None:
        pass

    def send(self, pipeline: int, direction: Direction, arrived: Callable[[], None]) -> None:
        shared = self._wires[direction]
        if pipeline in shared.heads:
            shared.behind.setdefault(pipeline, deque()).append(arrived)
            return
        self._serve(direction, shared)
        shared.heads[pipeline] = shared.served + self._model.message_bytes, arrived
        self._plan(direction, shared)

    def _cost(self, count: int) -> float:
        return count * (1 + self._model.loss_penalty * (count - 1))

    def _serve(self, direction: Direction, shared: _Shared) -> None:
        now_ns, rate = self.clock.now_ns, self._model.wires[direction].rate
        if shared.heads and now_ns > shared.at_ns:
            carried = rate.bytes_by(now_ns) - rate.bytes_by(shared.at_ns)
            shared.served += carried / self._cost(len(shared.heads))
            shared.busy.add(shared.at_ns, now_ns)
        shared.at_ns = now_ns

    def _plan(self, direction: Direction, shared: _Shared) -> None:
        shared.turn += 1
        if shared.heads:
            rate = self._model.wires[direction].rate
            first = min(end for end, _ in shared.heads.values())
            needed = (first - shared.served) * self._cost(len(shared.heads))
            due_ns = rate.time_for(rate.bytes_by(self.clock.now_ns) + max(0, int(needed)) + 1)
            self.clock.at(due_ns, self._due, direction, shared.turn)

    def _due(self, direction: Direction, turn: int) -> None:
        shared = self._wires[direction]
        if turn != shared.turn:
            return
        self._serve(direction, shared)
        for pipeline, (end, arrived) in sorted(shared.heads.items(), key=lambda one: one[0]):
            if end > shared.served + ROUNDING_BYTES:
                continue
            self.clock.after(self._model.wires[direction].one_way_ns, arrived)
            behind = shared.behind.get(pipeline)
            if behind:
                shared.heads[pipeline] = shared.served + self._model.message_bytes, behind.popleft()
            else:
                del shared.heads[pipeline]
        self._plan(direction, shared)

    def predict(self, pipeline: int, direction: Direction, ready_ns: int) -> Prediction | None:
        return None

    def use(self) -> dict[Direction, list[tuple[int, int]]]:
        return {direction: shared.busy.stretches for direction, shared in self._wires.items()}
