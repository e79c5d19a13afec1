"""How the next task is chosen. Two kinds of policy: a fixed order, and a choice at run time. Pure.

A policy is asked whenever its worker is idle and something has happened, or a time that it named has come. It looks at
its :class:`~proxyd_client.schedule.worker.Worker` and answers with a task or with "wait", and why, in words.

At run time
-----------
**B if one is ready**: another stage waits for it, and it brings the end of an activation nearer. **Else F if memory
allows**: it feeds the stages behind. **Else W**: nobody waits for it, but it frees memory. All waiting W run when
nothing else can: they fill the bubbles that the network tears open.

*Memory allows* means: after this F there is still room for one activation of each later stage of this worker (their F
of the same micro-batch will come here, and if it couldn't run, neither could its B, ever), and, while activations are
out in host memory, for one that comes back. With these two no order of arrivals can end in a deadlock.

*Holding back*: before a task that nobody waits for (W, and F while enough micro-batches are ahead), look whether the
input of a B is predicted to arrive soon; before a W, that of an F too, if memory allows that F. If the wait is shorter
than the share :data:`HOLD_SHARE` of the time by which the task would delay the other, waiting wins. A prediction that
isn't sure enough is no reason to wait, nor is one that is overdue: without predictions the policy never idles by
choice.

The predictions that matter most are those from next door: a neighbour at the same site has begun a task and knows how
long it takes. Tasks are about as long as each other, so results arrive just when a stage has become idle, or a moment
later; a W begun in that moment delays the row by a whole task, and with little memory each such delay is one of the
first stage too, for its next F waits for the end of the oldest micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule.tasks import Decision, Kind, Order, Task
from proxyd_client.schedule.worker import Place, StageProgress, Worker

HOLD_SHARE = 0.25
"""An idle stage costs for sure, a late task only where others have nothing else to do; so a wait must be much shorter
than what it saves."""

UNTOLD = (-1, 0)
"""In place of a prediction: long overdue, so it counts for nothing."""

NOTHING_READY = "nothing is ready: no input has arrived that isn't used"
ALL_DONE = "everything has run"
FIRST_B = "B first: after it only W holds the activation"
OTHER_B = "B first: the stage before waits for it"


class Policy(Protocol):
    """Chooses for one worker."""

    def decide(self, worker: Worker, now_ns: int) -> Decision:
        """The next task of an idle worker, or to wait. Changes nothing in ``worker``."""


class FixedOrder:
    """Runs a list from front to end, whatever has arrived meanwhile: what static schedules do.

    Raises ArgumentError when the order needs more memory than the worker has; said before the run, for in the midst of
    it that would be a deadlock.
    """

    def __init__(self, order: Order) -> None:
        self._tasks = order.tasks
        self._place = 0
        self._peak = order.peak_activations

    def decide(self, worker: Worker, now_ns: int) -> Decision:
        while self._place < len(self._tasks):
            task = self._tasks[self._place]
            progress = worker.stages[task.stage]
            if task.kind == Kind.W:
                begun = (progress.next[2], progress.weight_part) > (task.micro_batch, task.part)
            else:
                begun = progress.next[task.kind] > task.micro_batch
            if not begun:
                break
            self._place += 1
        else:
            return Decision(None, ALL_DONE)
        if not worker.ready(task.kind, task.stage):
            return Decision(None, f"the order says {task}, and its input is not here")
        if task.kind == Kind.F and worker.free_bytes < progress.stage.activation_bytes:
            return Decision(None, f"the order says {task}, and there is no memory for it")
        return Decision(task, "next in the order")


class Online:
    """The choice at run time.

    :param quotas: by stage, how many micro-batches may be between F and B at once; empty: memory alone decides.
    :param holds_back: wait for a predicted B rather than start a long task shortly before it.
    """

    def __init__(self, quotas: Mapping[int, int] | None = None, *, holds_back: bool = True) -> None:
        if quotas and min(quotas.values()) < 1:
            raise ArgumentError(f"quotas {dict(quotas)}: each stage needs one micro-batch in flight at least")
        self.quotas = dict(quotas or {})
        self.holds_back = holds_back

    def decide(self, worker: Worker, now_ns: int) -> Decision:
        found: StageProgress | None = None
        for index, progress in worker.stages.items():
            # The oldest micro-batch first; of one micro-batch the later stage, whose result goes back earlier.
            if worker.ready(Kind.B, index) and (found is None or progress.next[1] <= found.next[1]):
                found = progress
        if found is not None:
            why = FIRST_B if found.stage.first else OTHER_B
            return Decision(worker.upcoming(Kind.B, found.stage.index), why)
        forward, refused = self._forward(worker)
        if forward is not None:
            held = self._held_back(worker, forward.durations_ns[0], now_ns) if forward.in_flight > 1 else None
            return held or Decision(
                worker.upcoming(Kind.F, forward.stage.index), "F: its input is here and memory allows"
            )
        for index, progress in reversed(worker.stages.items()):
            if worker.ready(Kind.W, index):
                held = self._held_back(worker, progress.durations_ns[2], now_ns, forward_too=True)
                if held is not None:
                    return held
                why = f"W: no B is ready, and {refused}" if refused else "W: nothing else is ready"
                return Decision(worker.upcoming(Kind.W, index), why)
        if worker.done:
            return Decision(None, ALL_DONE)
        return Decision(None, f"waiting: no B is ready, no W is left, and {refused}" if refused else NOTHING_READY)

    def _forward(self, worker: Worker) -> tuple[StageProgress | None, str]:
        """A stage whose F may run (the latest one), else why one that is ready may not."""
        refused = ""
        for index, progress in reversed(worker.stages.items()):
            if worker.ready(Kind.F, index):
                refused = self._refused(worker, progress)
                if not refused:
                    return progress, ""
        return None, refused

    def _refused(self, worker: Worker, progress: StageProgress) -> str:
        """Why the next F of a stage may not run, its input aside; empty: it may."""
        stage = progress.stage
        quota = self.quotas.get(stage.index)
        if quota is not None and progress.in_flight >= quota:
            return f"stage {stage.index} has its quota of {quota} in flight"
        needed_bytes = stage.activation_bytes
        if len(worker.stages) > 1:
            needed_bytes += sum(p.stage.activation_bytes for i, p in worker.stages.items() if i > stage.index)
        if worker.out_bytes:
            needed_bytes += max(p.stage.activation_bytes for p in worker.stages.values())
        if worker.free_bytes < needed_bytes:
            return f"memory is full ({worker.held_bytes} of {worker.memory_bytes} bytes)"
        return ""

    def _held_back(self, worker: Worker, task_ns: int, now_ns: int, *, forward_too: bool = False) -> Decision | None:
        if not self.holds_back:
            return None
        for index, progress in worker.stages.items():
            for kind in (Kind.B, Kind.F)[: 1 + forward_too]:
                number = progress.next[kind]
                eta_ns, uncertainty_ns = progress.foretold[kind].get(number, UNTOLD)
                wait_ns = eta_ns - now_ns
                if wait_ns < 0 or wait_ns + uncertainty_ns >= HOLD_SHARE * (task_ns - wait_ns):
                    continue
                if kind == Kind.B:
                    possible = progress.places.get(number, Place.OUT) <= Place.LEAVING
                else:
                    possible = not self._refused(worker, progress)
                if possible:
                    said = f"{kind.name}{number}@{index} is predicted in {wait_ns / 1e6:.1f} ms"
                    # Of two events at the same instant either may be seen first: so a moment later, at the earliest.
                    until_ns = max(now_ns + 1, eta_ns + uncertainty_ns)
                    return Decision(None, f"{said}: a task now would delay it", until_ns)
        return None


def fixed(order: Order, worker: Worker) -> FixedOrder:
    """A fixed order for this worker. Raises ArgumentError when it needs more than the worker's memory."""
    largest = max(progress.stage.activation_bytes for progress in worker.stages.values())
    needed = order.peak_activations * largest
    if needed > worker.memory_bytes:
        raise ArgumentError(
            f"the order holds {order.peak_activations} activations at once, {needed} bytes; the limit is "
            f"{worker.memory_bytes} bytes",
            next_step="Take an order with fewer warm-up steps, or raise the limit",
        )
    return FixedOrder(order)


def peak_activations(tasks: Sequence[Task], weight_parts: int = 1) -> int:
    """Most activations that an order holds at once: from the start of F to the end of W."""
    held = peak = 0
    for task in tasks:
        if task.kind == Kind.F:
            held += 1
            peak = max(peak, held)
        elif task.kind == Kind.W and task.part == weight_parts - 1:
            held -= 1
    return peak
