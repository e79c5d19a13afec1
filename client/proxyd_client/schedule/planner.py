"""Plans made before the step, from constant delays: list scheduling of the whole pipeline. Pure.

After the idea of CrossPipe (ATC '25): model the pipeline with its delays, bandwidths and memory limits, and build each
stage's order greedily. Here the model is run with the run-time policy on constant figures, which every stage is told as
they are, and what it did is written down as the order. So plan and run-time choice differ in one thing only: whether
the order was fixed beforehand. That makes their difference the worth of choosing at run time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule.policy import Online, Policy, peak_activations
from proxyd_client.schedule.tasks import Kind, Order, Stage, Task
from proxyd_client.schedule.worker import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """The way between a stage and the next one, one direction: a message keeps it busy, and is under way."""

    busy_ns: int = 0
    delay_ns: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What came out."""

    orders: tuple[Order, ...]
    """By worker."""
    makespan_ns: int
    """In the model that it was planned in."""


class _Model:
    """One pipeline on constant figures."""

    def __init__(
        self,
        workers: Sequence[Sequence[Stage]],
        micro_batches: int,
        memory_bytes: Sequence[int],
        hops: Sequence[Hop],
        policies: Sequence[Policy],
    ) -> None:
        self.workers = [
            Worker(stages, micro_batches, memory) for stages, memory in zip(workers, memory_bytes, strict=True)
        ]
        self.host = {stage.index: place for place, stages in enumerate(workers) for stage in stages}
        self.tasks: list[list[Task]] = [[] for _ in workers]
        self.now_ns = 0
        self._hops = hops
        self._policies = policies
        self._wire_free_ns = [[0] * len(hops), [0] * len(hops)]
        self._heap: list[tuple[int, int, int, Task | None, tuple[Kind, int, int] | None]] = []
        self._order = 0

    def run(self) -> None:
        for place in range(len(self.workers)):
            self._next(place)
        while self._heap:
            self.now_ns, _, place, ended, arrived = heappop(self._heap)
            worker = self.workers[place]
            if ended is not None:
                worker.finish(self.now_ns)
                self._pass_on(ended)
            elif arrived is not None:
                worker.arrived(*arrived, self.now_ns)
            self._next(place)

    def _foretell(self, place: int, task: Task, end_ns: int) -> None:
        """Whoever gets a task's result is told when it will be there, as the task begins."""
        kind, hop, way = self._way(task)
        if hop is None:
            return
        to = hop + 1 - way
        self.workers[self.host[to]].foretell(kind, to, task.micro_batch, self._there_ns(hop, way, end_ns), 0)
        if self.host[to] != place:
            self._push(self.now_ns, self.host[to], None, None)

    def _there_ns(self, hop: int, way: int, ready_ns: int) -> int:
        return max(ready_ns, self._wire_free_ns[way][hop]) + self._hops[hop].busy_ns + self._hops[hop].delay_ns

    def _push(self, time_ns: int, place: int, ended: Task | None, arrived: tuple[Kind, int, int] | None) -> None:
        self._order += 1
        heappush(self._heap, (time_ns, self._order, place, ended, arrived))

    def _next(self, place: int) -> None:
        worker = self.workers[place]
        if worker.running is not None:
            return
        decision = self._policies[place].decide(worker, self.now_ns)
        if decision.task is None:
            if decision.until_ns > self.now_ns:
                self._push(decision.until_ns, place, None, None)
            return
        task = decision.task
        self.tasks[place].append(task)
        worker.start(task, self.now_ns)
        stage = worker.stages[task.stage].stage
        end_ns = self.now_ns + stage.nominal_ns(task.kind, task.part)
        self._push(end_ns, place, task, None)
        self._foretell(place, task, end_ns)

    def _way(self, task: Task) -> tuple[Kind, int | None, int]:
        """Of a task's result: what it is for, over which hop it goes (None: over none), and up (0) or down (1)."""
        way = 0 if task.kind == Kind.F else 1
        hop = task.stage - way
        return task.kind, hop if task.kind != Kind.W and 0 <= hop < len(self._hops) else None, way

    def _pass_on(self, task: Task) -> None:
        kind, hop, way = self._way(task)
        if hop is None:
            return
        there_ns = self._there_ns(hop, way, self.now_ns)
        self._wire_free_ns[way][hop] = there_ns - self._hops[hop].delay_ns
        to = hop + 1 - way
        self._push(there_ns, self.host[to], None, (kind, to, task.micro_batch))


def plan(
    workers: Sequence[Sequence[Stage]],
    micro_batches: int,
    memory_bytes: Sequence[int],
    hops: Sequence[Hop],
    quotas: Mapping[int, int] | None = None,
) -> Plan:
    """Each worker's order for constant delays.

    :param workers: the stages of each, with their durations.
    :param memory_bytes: of each worker.
    :param hops: from each stage to the next; the same both ways.
    Raises ArgumentError for memory that can't hold one micro-batch, and for stages without durations.
    """
    stages = sorted(stage.index for each in workers for stage in each)
    if stages != list(range(len(hops) + 1)):
        raise ArgumentError(
            f"stages {stages} and {len(hops)} hops: there must be one hop less than stages, none missing"
        )
    if any(stage.nominal_ns(kind) <= 0 for each in workers for stage in each for kind in Kind):
        raise ArgumentError("a plan needs the duration of F, B and W of every stage; one is not above zero")
    model = _Model(workers, micro_batches, memory_bytes, hops, [Online(quotas) for _ in workers])
    model.run()
    if not all(worker.done for worker in model.workers):
        raise ArgumentError(
            f"the plan stands still at {model.now_ns} ns: its memory limits and quotas block each other"
        )
    parts = max(stage.weight_parts for each in workers for stage in each)
    orders = tuple(Order(tuple(tasks), peak_activations(tasks, parts)) for tasks in model.tasks)
    return Plan(orders, model.now_ns)


def tapered(stage_count: int, first: int, last: int) -> dict[int, int]:
    """Quotas that fall evenly from the first stage to the last: micro-batches in flight are of use where the way to the
    gradient is long."""
    steps = max(1, stage_count - 1)
    return {index: max(1, first - (first - last) * index // steps) for index in range(stage_count)}


def best_quotas(
    workers: Sequence[Sequence[Stage]],
    micro_batches: int,
    memory_bytes: Sequence[int],
    hops: Sequence[Hop],
    candidates: Sequence[Mapping[int, int]],
) -> tuple[Mapping[int, int], int]:
    """The quotas with the shortest step in the model on constant figures, and that step. The first wins a draw."""
    best: tuple[Mapping[int, int], int] | None = None
    for quotas in candidates:
        makespan_ns = plan(workers, micro_batches, memory_bytes, hops, quotas).makespan_ns
        if best is None or makespan_ns < best[1]:
            best = quotas, makespan_ns
    if best is None:
        raise ArgumentError("no quotas to choose from")
    return best
