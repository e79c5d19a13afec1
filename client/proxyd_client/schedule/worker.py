"""What one worker (a process with a GPU) knows while a step runs: progress, arrivals, predictions, memory. Pure.

The driver (the simulator, or the thread that runs real modules) feeds events: an input has arrived, one is foretold, a
task has started or ended, a move to or from host memory has started or ended. Policies look at it and decide; nothing
here decides. All times are the driver's one clock.

An activation is held from the start of its F to the end of its W. Meanwhile it is on the device, on its way out, out in
host memory, or on its way back; it takes device memory in all places but ``OUT``. B and W need it on the device. One on
its way out still is, so its B or W may start: the move is then void.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule.tasks import Kind, Stage, Task

LEARN_SHIFT = 3
"""A duration is an average over about eight tasks: noise of one kernel launch doesn't move it, a slower clock does."""


class Place(enum.IntEnum):
    """Where an activation is."""

    DEVICE = 0
    LEAVING = 1
    OUT = 2
    RETURNING = 3


class StageProgress:
    """One stage of a worker."""

    __slots__ = (
        "arrived",
        "backward_done_ns",
        "durations_ns",
        "far",
        "foretold",
        "forward_done_ns",
        "learned",
        "moving",
        "next",
        "places",
        "round_trip_ns",
        "stage",
        "weight_part",
    )

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.next = [0, 0, 0]
        """By kind: the micro-batch whose task is the next to start."""
        self.weight_part = 0
        self.arrived = [0, 0]
        """F, B: so many inputs are here; they come in order."""
        self.foretold: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]] = ({}, {})
        """F, B: by micro-batch (when it is expected, give or take)."""
        self.durations_ns = [stage.forward_ns, stage.backward_ns, stage.weight_ns // stage.weight_parts]
        """By kind; of W one part."""
        self.learned = [False, False, False]
        self.places: dict[int, Place] = {}
        """By micro-batch whose activation is held."""
        self.far: set[int] = set()
        """Of those that are out, or leaving: on the slower tier."""
        self.moving: set[int] = set()
        """Being copied out; some of these copies may be void."""
        self.forward_done_ns: dict[int, int] = {}
        """By micro-batch whose gradient isn't back."""
        self.backward_done_ns = 0
        self.round_trip_ns = 0
        """Learned: from the end of an F to the arrival of its gradient; 0: none has come back yet."""

    @property
    def period_ns(self) -> int:
        """Compute time of one micro-batch."""
        forward, backward, weight = self.durations_ns
        return forward + backward + weight * self.stage.weight_parts

    @property
    def in_flight(self) -> int:
        """Micro-batches whose F has started here and whose B has not."""
        return self.next[Kind.F] - self.next[Kind.B]

    @property
    def next_whole_weight(self) -> int:
        """The micro-batch whose W is the next to start with its first part. A W that has begun is as good as run: what
        comes behind it is what must be on the device in time."""
        return self.next[Kind.W] + (self.weight_part > 0)


class Worker:
    """One worker's view. Raises ArgumentError for events that can't be: they would mean a wrong gradient."""

    def __init__(self, stages: Sequence[Stage], micro_batches: int, memory_bytes: int) -> None:
        if not stages or micro_batches < 1:
            raise ArgumentError(f"{len(stages)} stages and {micro_batches} micro-batches: a worker needs one of each")
        if len({stage.index for stage in stages}) != len(stages):
            raise ArgumentError("a worker has each of its stages once")
        self.stages = {stage.index: StageProgress(stage) for stage in sorted(stages, key=lambda one: one.index)}
        self.micro_batches = micro_batches
        self.memory_bytes = memory_bytes
        self.held_bytes = 0
        """On the device."""
        self.peak_bytes = 0
        self.out_bytes = 0
        """In host memory, and on the slower tier."""
        self.far_bytes = 0
        """Of these, on the slower tier."""
        self.running: Task | None = None
        self._started_ns = 0
        self._tasks_left = sum(2 + stage.weight_parts for stage in stages) * micro_batches
        least = sum(stage.activation_bytes for stage in stages)
        if memory_bytes < least:
            raise ArgumentError(
                f"the memory limit of {memory_bytes} bytes is impossible: one micro-batch needs {least} bytes",
                next_step="Raise the limit, or split the model into more stages",
            )

    @property
    def done(self) -> bool:
        """Everything has run."""
        return self._tasks_left == 0

    @property
    def free_bytes(self) -> int:
        """Device memory for activations that nothing holds."""
        return self.memory_bytes - self.held_bytes

    def carry_over(self, earlier: Worker) -> None:
        """Go on with what an earlier step of the same stages has learned: durations and round trips."""
        for index, progress in self.stages.items():
            known = earlier.stages[index]
            progress.durations_ns = list(known.durations_ns)
            progress.learned = list(known.learned)
            progress.round_trip_ns = known.round_trip_ns

    # ------------------------------------------------------------------------------------ events: the network

    def arrived(self, kind: Kind, stage: int, micro_batch: int, now_ns: int) -> None:
        """The input of an F or a B is here. Inputs of one stage and kind come in order."""
        progress = self.stages[stage]
        if kind == Kind.W or micro_batch != progress.arrived[kind] or micro_batch >= self.micro_batches:
            raise ArgumentError(
                f"input of {kind.name}{micro_batch} of stage {stage} came, {progress.arrived[min(kind, 1)]} is the next"
            )
        progress.arrived[kind] = micro_batch + 1
        progress.foretold[kind].pop(micro_batch, None)
        if kind == Kind.B:
            done_ns = progress.forward_done_ns.pop(micro_batch, None)
            if done_ns is None:
                raise ArgumentError(f"a gradient for micro-batch {micro_batch} came to stage {stage} before its F ran")
            took_ns = now_ns - done_ns
            known_ns = progress.round_trip_ns
            progress.round_trip_ns = known_ns + ((took_ns - known_ns) >> LEARN_SHIFT) if known_ns else max(1, took_ns)

    def foretell(self, kind: Kind, stage: int, micro_batch: int, eta_ns: int, uncertainty_ns: int) -> None:
        """An input is expected at ``eta_ns``, give or take. A later word replaces an earlier one; what says nothing (no
        time, or one of an input that is here) is left out."""
        progress = self.stages[stage]
        if kind != Kind.W and eta_ns > 0 and micro_batch >= progress.arrived[kind]:
            progress.foretold[kind][micro_batch] = (eta_ns, max(0, uncertainty_ns))

    # ------------------------------------------------------------------------------------- events: the device

    def ready(self, kind: Kind, stage: int) -> bool:
        """The next task of this kind has its input, memory aside."""
        progress = self.stages[stage]
        number = progress.next[kind]
        if number >= self.micro_batches:
            return False
        if kind == Kind.F:
            return progress.stage.first or number < progress.arrived[0]
        if kind == Kind.B:
            if number >= progress.arrived[1]:
                return False
            return progress.places.get(number, Place.OUT) <= Place.LEAVING
        return number < progress.next[1] and progress.places.get(number, Place.OUT) <= Place.LEAVING

    def upcoming(self, kind: Kind, stage: int) -> Task:
        """The next task of this kind; it may not be ready."""
        progress = self.stages[stage]
        return Task(kind, stage, progress.next[kind], progress.weight_part if kind == Kind.W else 0)

    def start(self, task: Task, now_ns: int) -> None:
        """A task begins."""
        progress = self.stages[task.stage]
        if self.running is not None or task != self.upcoming(task.kind, task.stage):
            raise ArgumentError(f"{task} can't start: {self.running or self.upcoming(task.kind, task.stage)} is first")
        if not self.ready(task.kind, task.stage):
            raise ArgumentError(f"{task} can't start: its input or its activation is not here")
        if task.kind == Kind.F:
            if progress.stage.activation_bytes > self.free_bytes:
                raise ArgumentError(f"{task} can't start: {self.free_bytes} bytes are free")
            self._hold(progress.stage.activation_bytes)
            progress.places[task.micro_batch] = Place.DEVICE
            progress.next[0] += 1
        elif task.kind == Kind.B:
            progress.places[task.micro_batch] = Place.DEVICE
            progress.next[1] += 1
        else:
            progress.places[task.micro_batch] = Place.DEVICE
            progress.weight_part += 1
            if progress.weight_part == progress.stage.weight_parts:
                progress.weight_part = 0
                progress.next[2] += 1
        self.running = task
        self._started_ns = now_ns

    def finish(self, now_ns: int) -> Task:
        """The running task ends; its duration is learned. Answers which it was."""
        task = self.running
        if task is None:
            raise ArgumentError("nothing runs that could end")
        self.running = None
        self._tasks_left -= 1
        progress = self.stages[task.stage]
        self._learn(progress, task.kind, now_ns - self._started_ns)
        if task.kind == Kind.F:
            progress.forward_done_ns[task.micro_batch] = now_ns
            if progress.stage.last:
                self.arrived(Kind.B, task.stage, task.micro_batch, now_ns)
        elif task.kind == Kind.B:
            progress.backward_done_ns = now_ns
        elif task.part == progress.stage.weight_parts - 1:
            del progress.places[task.micro_batch]
            self.held_bytes -= progress.stage.activation_bytes
        return task

    def _learn(self, progress: StageProgress, kind: Kind, took_ns: int) -> None:
        if took_ns <= 0:
            return  # a clock that didn't move says nothing
        if progress.learned[kind]:
            known_ns = progress.durations_ns[kind]
            progress.durations_ns[kind] = known_ns + ((took_ns - known_ns) >> LEARN_SHIFT)
        else:
            progress.durations_ns[kind] = took_ns
            progress.learned[kind] = True

    # -------------------------------------------------------------------------------------- events: host memory

    def leave(self, stage: int, micro_batch: int, *, far: bool = False) -> None:
        """An activation starts to move to host memory, or (far) to the slower tier."""
        self._move(stage, micro_batch, Place.DEVICE, Place.LEAVING)
        progress = self.stages[stage]
        progress.moving.add(micro_batch)
        if far:
            progress.far.add(micro_batch)

    def left(self, stage: int, micro_batch: int) -> bool:
        """The move is over. False: it is void, for its B or W has begun; what was copied is thrown away."""
        progress = self.stages[stage]
        progress.moving.discard(micro_batch)
        if progress.places.get(micro_batch) != Place.LEAVING:
            progress.far.discard(micro_batch)
            return False
        progress.places[micro_batch] = Place.OUT
        nbytes = progress.stage.activation_bytes
        self.held_bytes -= nbytes
        self.out_bytes += nbytes
        if micro_batch in progress.far:
            self.far_bytes += nbytes
        return True

    def stayed(self, stage: int, micro_batch: int) -> None:
        """The move failed: it is on the device still."""
        self._move(stage, micro_batch, Place.LEAVING, Place.DEVICE)
        progress = self.stages[stage]
        progress.moving.discard(micro_batch)
        progress.far.discard(micro_batch)

    def come_back(self, stage: int, micro_batch: int, *, beyond_limit: bool = False) -> None:
        """An activation starts to move back: from now on it takes device memory.

        ``beyond_limit``: also where there is none within the limit, for otherwise the step could not go on.
        """
        progress = self.stages[stage]
        nbytes = progress.stage.activation_bytes
        if nbytes > self.free_bytes and not beyond_limit:
            raise ArgumentError(f"activation {micro_batch} can't come back: {self.free_bytes} bytes are free")
        self._move(stage, micro_batch, Place.OUT, Place.RETURNING)
        self._hold(nbytes)
        self.out_bytes -= nbytes
        if micro_batch in progress.far:
            progress.far.remove(micro_batch)
            self.far_bytes -= nbytes

    def came_back(self, stage: int, micro_batch: int) -> None:
        """It is on the device again."""
        self._move(stage, micro_batch, Place.RETURNING, Place.DEVICE)

    def _move(self, stage: int, micro_batch: int, old: Place, new: Place) -> None:
        places = self.stages[stage].places
        if places.get(micro_batch) != old:
            raise ArgumentError(f"activation {micro_batch} of stage {stage} is not {old.name.lower()}")
        places[micro_batch] = new

    def _hold(self, nbytes: int) -> None:
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
