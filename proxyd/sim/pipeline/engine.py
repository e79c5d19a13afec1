"""Runs one step of all pipelines: events into the workers, decisions out of their policies.

The policies are those of ``proxyd_client.schedule``, the same objects that drive real modules. The engine is what the
trainer's thread, GPU, network and bus are there: it knows how long things take, which no policy is told beforehand.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import partial

from proxyd.core.errors import ProxydError
from proxyd.sim.pipeline.model import NANOS, PipelineModel
from proxyd.sim.pipeline.wan import Direction, Wan
from proxyd_client.schedule.offload import Move, Offload, Tier
from proxyd_client.schedule.policy import Policy
from proxyd_client.schedule.tasks import Kind, Stage, Task
from proxyd_client.schedule.worker import Worker

LONGEST_NS = 24 * 3600 * NANOS
"""A step that takes longer stands still."""

LOCAL_UNCERTAIN = 0.02
"""Share of a task's time that a neighbour's word on its end may be off by, beside the jitter of the model."""


class PipelineStalledError(ProxydError):
    """The step can't end. The message says who waits for what."""

    code = "pipeline-stalled"


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One task as it ran; times since the step began."""

    pipeline: int
    worker: int
    task: Task
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plant:
    """What runs: one worker's stages, policy and offload, by place in the row; the same for all pipelines.

    ``policies`` are made anew for each pipeline's worker, for they have state.
    """

    stages: tuple[tuple[int, ...], ...]
    """Stage indices of each worker."""
    policy: Callable[[int, Worker], Policy]
    memory_bytes: tuple[int, ...]
    host_bytes: int = 0
    ssd: Tier | None = None
    """Behind the host's memory, of each worker."""
    fused: bool = False
    """Backward is one piece: the gradient of the input leaves at the end of W."""


@dataclasses.dataclass(slots=True)
class StepResult:
    """What came out of one step."""

    iteration_ns: int
    spans: list[Span]
    peak_bytes: list[int]
    """On each worker's device, the most of all pipelines."""
    host_peak_bytes: list[int]
    ssd_peak_bytes: list[int]
    memory: list[list[tuple[int, int, int]]]
    """Of the first pipeline's workers: (time, bytes on the device, bytes outside)."""
    use: dict[Direction, list[tuple[int, int]]]
    decisions: int
    moves: int
    """Activations that went out."""


class _Runner:
    """One worker of one pipeline."""

    def __init__(self, engine: Engine, pipeline: int, place: int) -> None:
        model, plant = engine.model, engine.plant
        stages = [engine.stages[index] for index in plant.stages[place]]
        self.engine = engine
        self.pipeline = pipeline
        self.place = place
        self.worker = Worker(stages, model.micro_batches, plant.memory_bytes[place])
        self.policy = plant.policy(place, self.worker)
        self.offload: Offload | None = None
        if plant.host_bytes:
            transfer_ns = stages[0].activation_bytes * NANOS // model.bus_bytes_per_s
            self.offload = Offload(plant.host_bytes, transfer_ns, plant.ssd)
        self.dead = False
        self.host_peak_bytes = self.ssd_peak_bytes = 0
        self.memory: list[tuple[int, int, int]] = [(0, 0, 0)]
        self.waits = ""
        self.moves = 0
        self._busy_ways: set[tuple[bool, bool]] = set()
        """(outwards, to or from the slower tier); each carries one activation at a time."""
        self._asked_ns = 0
        self._wake_ns = 0

    # ------------------------------------------------------------------------------------ what happens

    def arrived(self, kind: Kind, stage: int, micro_batch: int) -> None:
        if not self.dead:
            self.worker.arrived(kind, stage, micro_batch, self.engine.clock.now_ns)
            self.look()

    def foretold(self, kind: Kind, stage: int, micro_batch: int, eta_ns: int, uncertainty_ns: int) -> None:
        if not self.dead:
            self.worker.foretell(kind, stage, micro_batch, eta_ns, uncertainty_ns)
            self.look()

    def _finished(self, start_ns: int) -> None:
        if self.dead:
            return
        engine = self.engine
        task = self.worker.finish(engine.clock.now_ns)
        begin_ns, end_ns = start_ns - engine.start_ns, engine.clock.now_ns - engine.start_ns
        engine.spans.append(Span(self.pipeline, self.place, task, begin_ns, end_ns))
        engine.passed_on(self, task)
        if self.worker.done:
            engine.left -= 1
        self.look()

    def _moved(self, move: Move) -> None:
        self._busy_ways.remove((move.outwards, move.far))
        if self.dead:
            return
        worker = self.worker
        if move.outwards:
            worker.left(move.stage, move.micro_batch)
            self.host_peak_bytes = max(self.host_peak_bytes, worker.out_bytes - worker.far_bytes)
            self.ssd_peak_bytes = max(self.ssd_peak_bytes, worker.far_bytes)
        else:
            worker.came_back(move.stage, move.micro_batch)
        self.look()

    # --------------------------------------------------------------------------------- what is done then

    def look(self) -> None:
        """Moves first: one that comes back takes the room that an F would take."""
        if self.offload is not None:
            self._move(self.offload)
        if self.worker.running is None and not self.worker.done:
            self._decide()
        if self.pipeline == 0:
            now = (self.engine.clock.now_ns - self.engine.start_ns, self.worker.held_bytes, self.worker.out_bytes)
            if now[1:] != self.memory[-1][1:]:
                self.memory.append(now)

    def _decide(self) -> None:
        engine, worker = self.engine, self.worker
        now_ns = engine.clock.now_ns
        engine.decisions += 1
        decision = self.policy.decide(worker, now_ns)
        self.waits = decision.reason
        task = decision.task
        if task is not None:
            worker.start(task, now_ns)
            took_ns = engine.took_ns(task)
            engine.clock.after(took_ns, self._finished, now_ns)
            # Said is what the stage has learned: how long this one takes, nobody knows beforehand.
            engine.announce(self, task, now_ns + worker.stages[task.stage].durations_ns[task.kind])
            if self.offload is not None:
                self._move(self.offload)
        elif decision.until_ns > now_ns:
            self._wake_at(decision.until_ns)

    def _wake_at(self, time_ns: int) -> None:
        now_ns = self.engine.clock.now_ns
        if not now_ns < self._wake_ns <= time_ns:
            self._wake_ns = time_ns
            self.engine.clock.at(time_ns, self._woken)

    def _woken(self) -> None:
        if not self.dead:
            self.look()

    def _move(self, offload: Offload) -> None:
        clock, worker = self.engine.clock, self.worker
        ssd = offload.ssd
        tiers = [(False, offload.transfer_ns, offload.transfer_ns)]
        if ssd is not None:
            tiers.append((True, ssd.out_ns, ssd.back_ns))
        for far, _, back_ns in tiers:
            if (False, far) not in self._busy_ways:
                move = offload.back(worker, clock.now_ns, far=far)
                if move is not None:
                    worker.come_back(move.stage, move.micro_batch)
                    self._begin(move, back_ns)
                else:
                    due_ns = offload.next_ns(worker, clock.now_ns)
                    if due_ns:
                        self._wake_at(due_ns)
        for far, out_ns, _ in tiers:
            if (True, far) not in self._busy_ways:
                move = (offload.out_far if far else offload.out)(worker, clock.now_ns)
                if move is not None:
                    worker.leave(move.stage, move.micro_batch, far=far)
                    self.moves += 1
                    self._begin(move, out_ns)

    def _begin(self, move: Move, took_ns: int) -> None:
        self._busy_ways.add((move.outwards, move.far))
        self.engine.clock.after(took_ns, self._moved, move)


class Engine:
    """One step. :meth:`run` it once."""

    def __init__(self, model: PipelineModel, plant: Plant, wan: Wan, stages: Sequence[Stage] = ()) -> None:
        self.model = model
        self.plant = plant
        self.clock = wan.clock
        self.start_ns = 0
        self.stages = tuple(stages) or model.stages
        """Of the model, or (virtual ones) what a plant makes of them."""
        self.spans: list[Span] = []
        self.decisions = 0
        self._wan = wan
        self._rng = random.Random(f"compute {model.seed}")
        self._host = {stage: place for place, each in enumerate(plant.stages) for stage in each}
        self._sites = [
            model.sites[place * len(model.stages) // len(plant.stages)] for place in range(len(plant.stages))
        ]
        self.runners = [
            [_Runner(self, pipeline, place) for place in range(len(plant.stages))]
            for pipeline in range(model.pipelines)
        ]
        self.left = model.pipelines * len(plant.stages)
        """Workers that aren't done."""

    def run(self) -> StepResult:
        """The whole step. Raises PipelineStalledError when it can't end."""
        self._wan.start()
        self.start_ns = start_ns = self.clock.now_ns
        for row in self.runners:
            for runner in row:
                runner.look()
        self.clock.run(start_ns + LONGEST_NS, done=lambda: not self.left)
        if self.left:
            raise PipelineStalledError(self._standing())
        flat = [runner for row in self.runners for runner in row]
        places = range(len(self.plant.stages))
        return StepResult(
            iteration_ns=max(span.end_ns for span in self.spans),
            spans=self.spans,
            peak_bytes=[max(row[place].worker.peak_bytes for row in self.runners) for place in places],
            host_peak_bytes=[max(row[place].host_peak_bytes for row in self.runners) for place in places],
            ssd_peak_bytes=[max(row[place].ssd_peak_bytes for row in self.runners) for place in places],
            memory=[runner.memory for runner in self.runners[0]],
            use={
                direction: [(max(0, begin - start_ns), end - start_ns) for begin, end in stretches if end > start_ns]
                for direction, stretches in self._wan.use().items()
            },
            decisions=self.decisions,
            moves=sum(runner.moves for runner in flat),
        )

    def kill(self, pipeline: int, place: int) -> None:
        """A worker dies: it neither computes nor hears any more."""
        self.runners[pipeline][place].dead = True

    def _standing(self) -> str:
        said: list[str] = []
        for row in self.runners:
            for one in row:
                if one.dead:
                    said.insert(0, f"worker {one.place} of pipeline {one.pipeline} is dead")
                elif not one.worker.done:
                    said.append(f"worker {one.place} of pipeline {one.pipeline}: {one.waits}")
        return f"the step stands still: {'; '.join(said[:4])}" + ("; and others" if len(said) > 4 else "")

    def took_ns(self, task: Task) -> int:
        """How long a task takes now."""
        nominal_ns = self.stages[task.stage].nominal_ns(task.kind, task.part)
        if not self.model.jitter:
            return nominal_ns
        return max(1, round(nominal_ns * (1 + self.model.jitter * (2 * self._rng.random() - 1))))

    def _target(self, task: Task) -> int | None:
        """The stage that a task's result goes to; None: to nobody."""
        if task.kind == Kind.F:
            to = task.stage + 1
        else:
            # The gradient leaves with B; of a fused backward, with the end of W.
            parts = self.stages[task.stage].weight_parts
            last = task.kind == Kind.W and task.part == parts - 1
            if not (last if self.plant.fused else task.kind == Kind.B):
                return None
            to = task.stage - 1
        return to if to in self._host else None

    def passed_on(self, runner: _Runner, task: Task) -> None:
        """A task has ended: its result goes on its way."""
        to = self._target(task)
        if to is None:
            return
        kind = Kind.F if task.kind == Kind.F else Kind.B
        target = self.runners[runner.pipeline][self._host[to]]
        deliver = partial(target.arrived, kind, to, task.micro_batch)
        direction = (self._sites[runner.place], self._sites[target.place])
        if direction[0] != direction[1]:
            self._foretell(runner, target, kind, to, task.micro_batch, direction, self.clock.now_ns)
            self._wan.send(runner.pipeline, direction, deliver)
        elif target is runner or not self.model.local_ns:
            self.clock.after(0, deliver)
        else:
            self.clock.after(self.model.local_ns, deliver)

    def announce(self, runner: _Runner, task: Task, ready_ns: int) -> None:
        """A task has begun: whoever gets its result may hear when it will come."""
        to = self._target(task)
        if to is None:
            return
        target = self.runners[runner.pipeline][self._host[to]]
        direction = (self._sites[runner.place], self._sites[target.place])
        kind = Kind.F if task.kind == Kind.F else Kind.B
        if direction[0] != direction[1]:
            self._foretell(runner, target, kind, to, task.micro_batch, direction, ready_ns)
        elif target is not runner:
            local_ns = self.model.local_ns
            uncertainty_ns = round((self.model.jitter + LOCAL_UNCERTAIN) * (ready_ns - self.clock.now_ns))
            self.clock.after(local_ns, target.foretold, kind, to, task.micro_batch, ready_ns + local_ns, uncertainty_ns)

    def _foretell(
        self,
        runner: _Runner,
        target: _Runner,
        kind: Kind,
        stage: int,
        micro_batch: int,
        direction: Direction,
        ready_ns: int,
    ) -> None:
        said = self._wan.predict(runner.pipeline, direction, ready_ns)
        if said is not None:
            one_way_ns = self.model.wires[direction].one_way_ns
            self.clock.after(one_way_ns, target.foretold, kind, stage, micro_batch, said.eta_ns, said.uncertainty_ns)
