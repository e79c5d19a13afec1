"""The loop that does what a policy says, for one step of one worker.

Theory. One thread computes. Whenever it is between two tasks it hears what has happened (inputs that are here, moves
that are over), asks what is predicted, lets the offload policy start what should move, and asks the policy. Then it
computes, or waits until something happens. All that waits and computes is behind :class:`Surroundings`: no clock, no
thread and no tensor is in here, so that the same loop runs against a fake network with a fake clock.

*Order.* Inputs may arrive in any order; a worker hears of them in the order of the micro-batches, as each kind runs.
So does what is predicted, and so does W: sums of gradients have one order.

*Whole backwards.* A split costs a second walk of the graph: most of a small backward, 3 % of one of half a second. It
buys that the gradient leaves before W has run, and that W can wait. Both are worth nothing while other work is ready
here: then this worker is what the pipeline waits for, and a backward in one piece is the shorter way. When nothing else
is ready, the worker has time, and the stage before may be waiting for this very gradient: then it is split. A worker
whose splits cost more than its pauses sees its inputs queue up, and stops splitting: the rule holds its own balance.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from proxyd_client.schedule.offload import Move, Offload
from proxyd_client.schedule.policy import Policy
from proxyd_client.schedule.tasks import Decision, Kind, Task
from proxyd_client.schedule.worker import Place, StageProgress, Worker

MOST_KEPT = 1024
"""Decisions that a report names; a step of 128 micro-batches has some 600."""
ERROR_SHIFT = 3
"""The error of predictions is an average over about eight."""
UNSURE_SHARE = 0.25
"""Before it is known how wrong predictions are: so large a share of the time that is left."""

NOTHING_HERE = "nothing has arrived"
MEMORY_FULL = "memory is full"
QUOTA = "quota in flight"
HELD_BACK = "held back for what is predicted"
SENDS = "sends under way at the end"


class Arrived(NamedTuple):
    """The input of an F or a B is here."""

    kind: Kind
    stage: int
    micro_batch: int


class Moved(NamedTuple):
    """A move to host memory, or back, is over."""

    outwards: bool
    stage: int
    micro_batch: int


Event = Arrived | Moved


class Foreseen(NamedTuple):
    """A prediction."""

    eta_ns: int
    """On the surroundings' clock."""
    confidence: float
    """0 (a guess) to 1."""


class Surroundings(Protocol):
    """What computes, what brings, and what tells the time."""

    def now_ns(self) -> int:
        """The one clock of this worker."""

    def heard(self) -> Iterable[Event]:
        """What has happened since the last call. Raises what ends the step."""

    def wait(self, until_ns: int) -> None:
        """Until something has happened, or it is ``until_ns`` (0: no such time). Raises what ends the step."""

    def foresee(self, kind: Kind, stage: int, micro_batch: int) -> Foreseen | None:
        """When an input will be here; None: nothing is known."""

    def can_split(self, stage: int, micro_batch: int) -> bool:
        """Its backward can be had in two pieces, B and W."""

    def compute(self, task: Task, whole: bool) -> None:
        """Run a task, and send its result on its way. ``whole``: this B is the W too."""

    def move(self, move: Move) -> None:
        """Start it; :class:`Moved` is heard when it is over."""

    def settle(self, stage: int, micro_batch: int, keep: bool) -> bool:
        """At the end of a move out: free the device's copy, or ``keep`` it, for the activation was used meanwhile.
        Answers whether it is free."""


class Taken(NamedTuple):
    """One decision of a step."""

    at_ns: int
    """Since the step began."""
    task: Task | None
    reason: str
    held: int
    """Activation bytes on the device by then (or activations, where their size isn't known)."""


@dataclasses.dataclass(slots=True)
class Record:
    """What is counted while a step runs."""

    decisions: deque[Taken] = dataclasses.field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    decided_ns: list[int] = dataclasses.field(default_factory=list)
    """What each decision took."""
    waits_ns: dict[str, int] = dataclasses.field(default_factory=dict)
    busy_ns: list[int] = dataclasses.field(default_factory=lambda: [0, 0, 0])
    """By kind; a whole backward is B."""
    predictions: int = 0
    """Decisions before which one was there."""
    held_back: int = 0
    whole: int = 0
    split: int = 0
    moves_out: int = 0
    moves_failed: int = 0
    """After the first one none is tried any more in this step."""
    host_peak_bytes: int = 0
    error_ns: int = 0
    """By how much predictions were off, lately."""


class Step:
    """One step of a worker; :meth:`run` it once.

    :param splits: True and False: always, never; None: as the module's text says.
    :param error_ns: how wrong predictions were in earlier steps; 0: not known.
    """

    def __init__(
        self,
        worker: Worker,
        policy: Policy,
        around: Surroundings,
        *,
        offload: Offload | None = None,
        splits: bool | None = None,
        error_ns: int = 0,
    ) -> None:
        self.worker = worker
        self.record = Record(error_ns=error_ns)
        self._policy = policy
        self._around = around
        self._offload = offload
        self._splits = splits
        self._landed: dict[tuple[Kind, int], set[int]] = {}
        """Inputs that came before their turn."""
        self._said: dict[tuple[Kind, int, int], int] = {}
        """When an input was last said to come."""
        self._held_for: set[tuple[Kind, int, int]] = set()
        """Inputs that were waited for by choice: what is said of them later extends no wait, else one that is put off
        again and again would be waited for without end."""
        self._listened = False
        """It has waited since the last task."""
        self._returned: set[tuple[int, int]] = set()
        """Stage and micro-batch of activations that have been outside."""
        self._ways_busy = [False, False]
        """Out of the device, back."""
        self._begun_ns = around.now_ns()

    def run(self) -> None:
        """Until all tasks have run. Raises what the surroundings raise."""
        worker, around, record = self.worker, self._around, self.record
        while not worker.done:
            self.hear()
            self._foresee()
            due_ns = self._move()
            begun_ns = around.now_ns()
            decision = self._policy.decide(worker, begun_ns)
            now_ns = around.now_ns()
            record.decided_ns.append(now_ns - begun_ns)
            record.decisions.append(Taken(begun_ns - self._begun_ns, decision.task, decision.reason, worker.held_bytes))
            task, whole = self._plan(decision.task) if decision.task is not None else (None, False)
            if task is None:
                if not self._rescue():
                    self._wait(decision, due_ns, now_ns)
            else:
                self._do(task, whole)

    # ------------------------------------------------------------------------------------------- what happened

    def hear(self) -> None:
        """Take in what has happened."""
        for event in self._around.heard():
            if isinstance(event, Moved):
                self._moved(event)
            else:
                self._landed.setdefault((event.kind, event.stage), set()).add(event.micro_batch)
        for (kind, stage), landed in self._landed.items():
            progress = self.worker.stages[stage]
            while (number := progress.arrived[kind]) in landed:
                if kind == Kind.B and number not in progress.forward_done_ns:
                    break  # outputs that need no gradient: their "gradient" is here from the start
                landed.remove(number)
                now_ns = self._around.now_ns()
                said_ns = self._said.pop((kind, stage, number), 0)
                if said_ns and (self._listened or now_ns < said_ns):
                    self._learn(abs(now_ns - said_ns))  # else it may have come at any time while a task ran
                self._held_for.discard((kind, stage, number))
                self.worker.arrived(kind, stage, number, now_ns)

    def _learn(self, error_ns: int) -> None:
        known_ns = self.record.error_ns
        self.record.error_ns = known_ns + ((error_ns - known_ns) >> ERROR_SHIFT) if known_ns else max(1, error_ns)

    def _moved(self, event: Moved) -> None:
        worker = self.worker
        self._ways_busy[0 if event.outwards else 1] = False
        if not event.outwards:
            self._returned.add((event.stage, event.micro_batch))
            worker.came_back(event.stage, event.micro_batch)
            return
        wanted = worker.stages[event.stage].places.get(event.micro_batch) == Place.LEAVING
        if self._around.settle(event.stage, event.micro_batch, keep=not wanted):
            worker.left(event.stage, event.micro_batch)
            self.record.host_peak_bytes = max(self.record.host_peak_bytes, worker.out_bytes)
        elif wanted:
            worker.stayed(event.stage, event.micro_batch)
            self.record.moves_failed += 1

    def _foresee(self) -> None:
        """The next B, and where a W could run, the next F: nothing else is decided by a prediction."""
        told = False
        for index, progress in self.worker.stages.items():
            number = progress.next[1]
            # Before its F has run no gradient can be on its way, and once it is here nothing is left to say.
            if not progress.stage.last and number == progress.arrived[1] and number in progress.forward_done_ns:
                told |= self._ask(progress, Kind.B, number)
            number = progress.next[0]
            idle = number == progress.arrived[0] < self.worker.micro_batches
            if idle and not progress.stage.first and self.worker.ready(Kind.W, index):
                told |= self._ask(progress, Kind.F, number)
        self.record.predictions += told

    def _ask(self, progress: StageProgress, kind: Kind, number: int) -> bool:
        """Tell the worker what is predicted of one input; whether anything is."""
        index, around = progress.stage.index, self._around
        said = around.foresee(kind, index, number)
        if said is None:
            progress.foretold[kind].pop(number, None)  # what was known is withdrawn
            return False
        key = kind, index, number
        eta_ns = self._said[key] if key in self._held_for else said.eta_ns
        left_ns = max(0, eta_ns - around.now_ns())
        error_ns = 2 * self.record.error_ns or int(UNSURE_SHARE * left_ns)
        uncertainty_ns = int(error_ns / min(1.0, max(0.1, said.confidence)))
        self.worker.foretell(kind, index, number, eta_ns, uncertainty_ns)
        self._said[key] = eta_ns
        return True

    # -------------------------------------------------------------------------------------------- what is done

    def _move(self) -> int:
        """Start what should move; when to look again though nothing happens (0: no need)."""
        if self._offload is None:
            return 0
        worker, now_ns, due_ns = self.worker, self._around.now_ns(), 0
        if not self._ways_busy[1]:
            move = self._offload.back(worker, now_ns)
            if move is not None:
                worker.come_back(move.stage, move.micro_batch)
                self._begin(move)
            else:
                due_ns = self._offload.next_ns(worker, now_ns)
        if not self._ways_busy[0] and not self.record.moves_failed:
            move = self._offload.out(worker, now_ns)
            if move is not None and self._may_leave(move):
                worker.leave(move.stage, move.micro_batch)
                self.record.moves_out += 1
                self._begin(move)
        return due_ns

    def _may_leave(self, move: Move) -> bool:
        """What has come back stays, but where the next B or W could not come in else. On a fast bus the same activation
        would go out, for memory is short, and come back, for it is needed soon, in turns and without end."""
        if (move.stage, move.micro_batch) not in self._returned:
            return True
        progress = self.worker.stages[move.stage]
        needed = (progress.next[1], progress.next[2], progress.next_whole_weight)
        full = self.worker.free_bytes < progress.stage.activation_bytes
        return full and any(progress.places.get(number) == Place.OUT for number in needed)

    def _rescue(self) -> bool:
        """When nothing can run, for what is next lies outside, and nothing can make room for it: bring it back over the
        limit. A move that failed costs memory, and never the step."""
        if not self.record.moves_failed or self._ways_busy[1]:
            return False
        for index, progress in self.worker.stages.items():
            for number in (progress.next[2], progress.next[1]):
                if progress.places.get(number) == Place.OUT:
                    self.worker.come_back(index, number, beyond_limit=True)
                    self._begin(Move(False, index, number, "it is the next one, and nothing can make room for it"))
                    return True
        return False

    def _begin(self, move: Move) -> None:
        self._ways_busy[0 if move.outwards else 1] = True
        self._around.move(move)

    def _do(self, task: Task, whole: bool) -> None:
        worker, around, record = self.worker, self._around, self.record
        if task.kind == Kind.B:
            record.whole += whole
            record.split += not whole and not worker.stages[task.stage].stage.first
        start_ns = around.now_ns()
        worker.start(task, start_ns)
        if self._offload is not None:
            self._move()
        around.compute(task, whole)
        self._listened = False
        end_ns = around.now_ns()
        record.busy_ns[task.kind] += end_ns - start_ns
        if not whole:
            worker.finish(end_ns)
            return
        # Which part of it was W isn't known; half of it is what it is for layers that multiply matrices.
        middle_ns = start_ns + (end_ns - start_ns) // 2
        worker.finish(middle_ns)
        parts = worker.stages[task.stage].stage.weight_parts
        for part in range(parts):
            worker.start(worker.upcoming(Kind.W, task.stage), middle_ns + (end_ns - middle_ns) * part // parts)
            worker.finish(middle_ns + (end_ns - middle_ns) * (part + 1) // parts)

    def _plan(self, task: Task) -> tuple[Task | None, bool]:
        """What to run now, and whether it is a B that is one piece with its W.

        W runs in order: where a B is to be whole, those that are left over come first. None: the next of them has to
        come back from host memory before.
        """
        worker, stage = self.worker, task.stage
        progress = worker.stages[stage]
        if task.kind != Kind.B or progress.stage.first:
            return task, False  # of the first stage B is nothing at all: nobody waits for it
        busy = worker.ready(Kind.F, stage) or progress.arrived[1] > task.micro_batch + 1
        wanted = busy if self._splits is None else not self._splits
        must = not self._around.can_split(stage, task.micro_batch) if not wanted else False
        if not wanted and not must:
            return task, False
        if progress.next[2] == task.micro_batch:
            return task, True
        if worker.ready(Kind.W, stage):
            return worker.upcoming(Kind.W, stage), False
        return (None, False) if must else (task, False)

    def _wait(self, decision: Decision, due_ns: int, now_ns: int) -> None:
        around = self._around
        times = [time_ns for time_ns in (decision.until_ns, due_ns) if time_ns > now_ns]
        if decision.until_ns > now_ns:
            why = HELD_BACK
            self.record.held_back += 1
            self._held_for.update(self._said)
        elif "memory is full" in decision.reason:
            why = MEMORY_FULL
        else:
            why = QUOTA if "quota" in decision.reason else NOTHING_HERE
        around.wait(min(times, default=0))
        self._listened = True
        self.record.waits_ns[why] = self.record.waits_ns.get(why, 0) + around.now_ns() - now_ns
