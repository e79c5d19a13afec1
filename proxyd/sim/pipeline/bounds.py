"""What no schedule can beat, from the same model that is run: compute, WAN, and queues in a row.

*Compute*: a worker can't begin before the first input can be there, and then has so much work. Until its first gradient
can be there, it can run nothing but F, and no more of them than it has room for: what is left of that time is lost. So
it is as if it had *begun* its work at ``max(first F, first B - A * F)``, with room for A micro-batches.

*WAN*: all messages of a direction have to cross it, the first can't be there earlier than its micro-batch, and after
the last one some work is left that needs it.

*Queues in a row*: the step as a closed row of queues: stages up, wire, stages up, back down again. Let ``x(k)`` be the
time of the k-th completion at a place, counted over all pipelines, whichever micro-batch it is. At every place the k-th
completion can't come before

* the k-th completion at the place before it, and the service;
* (a stage, D pipelines, so D workers) the (k-D)-th completion of the same kind, and the service;
* (a wire) the (k-1)-th, and the bytes at the rate that the trace then has. No way of sharing the wire brings more
  messages over by any instant than one after the other;
* (a stage) the time in which D workers can have done all that is done by then: k F, k B, and as many W as memory
  forces: with room for A micro-batches, at least ``k - D * A`` activations have been released when k have been taken.
  From the first of these on it counts from when they have begun, as above;
* (memory) the k-th F of a stage starts after its ``(k - D * A)``-th W has ended.

Each rule is monotone in what it is fed, so putting lower bounds in gives lower bounds: an induction over k. The last F
must still go up the row and down again, while its stage has no more to do than what memory holds: so the end of a step
counts too. The bound doesn't know that a worker does one thing at a time, but for the sum of its work: where F and B
meet in a stage one of them waits, and this is not in it. So it is not always reachable; tests/property holds it against
all schedules there are of small steps.

Rates are the trace's true ones, jitter of compute times counts with its best case.
"""

from __future__ import annotations

import dataclasses
import math

from proxyd.sim.pipeline.model import PipelineModel, Wire
from proxyd_client.schedule.tasks import Stage


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of a step."""

    compute_ns: int
    wan_ns: int
    queue_ns: int

    @property
    def bound_ns(self) -> int:
        """The highest of them."""
        return max(self.compute_ns, self.wan_ns, self.queue_ns)


def bounds(model: PipelineModel, activations: int | None = None) -> Bounds:
    """Of this model with room for so many activations on each worker, on the device and outside; None: no limit.

    For one stage per worker, in a row. Schedules with several stages per worker have the compute bound in common, and
    cross the WAN at least as often.
    """
    return _Row(model, activations).bounds()


class _Row:
    def __init__(self, model: PipelineModel, activations: int | None) -> None:
        self.model = model
        self.stages: list[Stage] = [
            dataclasses.replace(
                stage,
                forward_ns=self._least(stage.forward_ns),
                backward_ns=self._least(stage.backward_ns),
                weight_ns=self._least(stage.weight_ns),
            )
            for stage in model.stages
        ]
        self.total = model.pipelines * model.micro_batches
        self.room = model.pipelines * activations if activations is not None else self.total

    def _least(self, nominal_ns: int) -> int:
        return math.floor(nominal_ns * (1 - self.model.jitter))

    def _wire(self, src: int, dst: int) -> Wire | None:
        one, other = self.model.sites[src], self.model.sites[dst]
        return self.model.wires[one, other] if one != other else None

    def _cross(self, wire: Wire | None, ready_ns: int, messages: int = 1) -> int:
        """When so many messages can be over that may start at ``ready_ns``."""
        if wire is None:
            return ready_ns + self.model.local_ns
        behind = wire.rate.bytes_by(ready_ns) + messages * self.model.message_bytes
        return wire.rate.time_for(behind) + wire.one_way_ns

    def bounds(self) -> Bounds:
        """All three."""
        forward_ns, backward_ns = self._earliest()
        room = self.room // self.model.pipelines
        begun_ns = [
            max(first_ns, back_ns - min(room, self.model.micro_batches) * stage.forward_ns)
            for first_ns, back_ns, stage in zip(forward_ns, backward_ns, self.stages, strict=True)
        ]
        return Bounds(self._compute(begun_ns), self._wan(forward_ns, backward_ns), self._queues(forward_ns, begun_ns))

    def _earliest(self) -> tuple[list[int], list[int]]:
        """When each stage can start its first F and its first B."""
        at_ns, forward = 0, []
        count = len(self.stages)
        for index, stage in enumerate(self.stages):
            if index:
                at_ns = self._cross(self._wire(index - 1, index), at_ns)
            forward.append(at_ns)
            at_ns += stage.forward_ns
        backward = [0] * count
        for index in reversed(range(count)):
            if index < count - 1:
                at_ns = self._cross(self._wire(index + 1, index), at_ns)
            backward[index] = at_ns
            at_ns += self.stages[index].backward_ns
        return forward, backward

    def _compute(self, begun_ns: list[int]) -> int:
        batches = self.model.micro_batches
        return max(begin_ns + batches * stage.period_ns for begin_ns, stage in zip(begun_ns, self.stages, strict=True))

    def _wan(self, forward_ns: list[int], backward_ns: list[int]) -> int:
        most_ns = 0
        for index in range(len(self.stages) - 1):
            there, back = self._wire(index, index + 1), self._wire(index + 1, index)
            if there is None:
                continue
            over_ns = self._cross(there, forward_ns[index] + self.stages[index].forward_ns, self.total)
            most_ns = max(most_ns, self._rest_up(index + 1, over_ns))
            over_ns = self._cross(back, backward_ns[index + 1] + self.stages[index + 1].backward_ns, self.total)
            most_ns = max(most_ns, self._rest_down(index, over_ns))
        return most_ns

    def _rest_up(self, index: int, at_ns: int) -> int:
        """The end, after a last input of an F of this stage."""
        for place in range(index, len(self.stages)):
            if place > index:
                at_ns = self._cross(self._wire(place - 1, place), at_ns)
            at_ns += self.stages[place].forward_ns
        return self._rest_down(len(self.stages) - 1, at_ns)

    def _rest_down(self, index: int, at_ns: int) -> int:
        """The end, after a last input of a B of this stage."""
        end_ns = 0
        for place in reversed(range(index + 1)):
            if place < index:
                at_ns = self._cross(self._wire(place + 1, place), at_ns)
            at_ns += self.stages[place].backward_ns
            end_ns = max(end_ns, at_ns + self.stages[place].weight_ns)
        return end_ns

    def _queues(self, forward_ns: list[int], begun_ns: list[int]) -> int:
        model, total, room, many = self.model, self.total, self.room, self.model.pipelines
        count = len(self.stages)
        never = [0] * total
        forward = [list(never) for _ in range(count)]
        backward = [list(never) for _ in range(count)]
        weight = [list(never) for _ in range(count)]
        up = [self._wire(index, index + 1) if index < count - 1 else None for index in range(count)]
        down = [self._wire(index + 1, index) if index < count - 1 else None for index in range(count)]
        up_taken, down_taken = [0] * count, [0] * count
        for k in range(total):
            released = k - room
            done = max(0, k + 1 - room)
            at_ns = 0
            for index, stage in enumerate(self.stages):
                if released >= 0:
                    at_ns = max(at_ns, weight[index][released])
                if k >= many:
                    at_ns = max(at_ns, forward[index][k - many])
                at_ns += stage.forward_ns
                work_ns = (k + 1) * stage.forward_ns + done * (stage.backward_ns + stage.weight_ns)
                # Before anything has been released, only F may have run, and these from the beginning.
                at_ns = max(at_ns, (begun_ns if done else forward_ns)[index] + work_ns // many)
                forward[index][k] = at_ns
                wire = up[index]
                if wire is not None:
                    up_taken[index] = max(up_taken[index], wire.rate.bytes_by(at_ns)) + model.message_bytes
                    at_ns = wire.rate.time_for(up_taken[index]) + wire.one_way_ns
                elif index < count - 1:
                    at_ns += model.local_ns
            for index in reversed(range(count)):
                stage = self.stages[index]
                wire = down[index]
                if wire is not None:
                    down_taken[index] = max(down_taken[index], wire.rate.bytes_by(at_ns)) + model.message_bytes
                    at_ns = wire.rate.time_for(down_taken[index]) + wire.one_way_ns
                elif index < count - 1:
                    at_ns += model.local_ns
                if k >= many:
                    at_ns = max(at_ns, backward[index][k - many])
                at_ns += stage.backward_ns
                work_ns = (k + 1) * (stage.forward_ns + stage.backward_ns) + done * stage.weight_ns
                at_ns = max(at_ns, begun_ns[index] + work_ns // many)
                backward[index][k] = at_ns
                ended_ns = at_ns
                if k >= many:
                    ended_ns = max(ended_ns, weight[index][k - many])
                ended_ns = max(ended_ns + stage.weight_ns, begun_ns[index] + (k + 1) * stage.period_ns // many)
                weight[index][k] = ended_ns
        return max(each[-1] for each in weight)
