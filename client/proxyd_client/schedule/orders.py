"""Static schedules: 1F1B, ZB-H1, ZB-H2, ZB-V, interleaved, and one with as much warm-up as a delay asks for. Pure.

Each function answers the order of one worker. Sources, read as descriptions: 1F1B and interleaved from the Megatron-LM
papers, ZB-H1, ZB-H2 and ZB-V from "Zero Bubble Pipeline Parallelism" (Qi et al.). Public implementations have the same
orders, task by task: ``tests/torch/test_schedule_simulators.py`` compares them.

======== =================== ============================ =================== ====================
order    warm-up of stage i  W lags B by                  activations held    bubble, no delays
======== =================== ============================ =================== ====================
1F1B     p-1-i               0 (one backward, fused)      p-i                 (p-1)(F+B+W)
ZB-H1    p-1-i               i                            p                   (p-1)(F+B-W)
ZB-H2    2(p-1-i)            2i                           2p-1                (p-1)(F+B-2W)
ZB-V     two stages each     see :func:`zb_v`             p                   0 where F = B = W
======== =================== ============================ =================== ====================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule.policy import peak_activations
from proxyd_client.schedule.tasks import Kind, Order, Task


def _checked(stages: int, index: int, micro_batches: int) -> None:
    if not 0 <= index < stages or micro_batches < 1:
        raise ArgumentError(f"stage {index} of {stages} with {micro_batches} micro-batches is no schedule")


def _order(tasks: Iterable[Task]) -> Order:
    listed = tuple(tasks)
    return Order(listed, peak_activations(listed))


def warm_up_order(stages: int, index: int, micro_batches: int, warm_up: int, lag: int) -> Order:
    """``warm_up`` times F; then F, B, and the W of ``lag`` micro-batches before; then B with W between; then W."""
    _checked(stages, index, micro_batches)
    warm = min(max(0, warm_up), micro_batches)
    tasks = [Task(Kind.F, index, number) for number in range(warm)]
    weight = 0
    for number in range(micro_batches):
        if warm + number < micro_batches:
            tasks.append(Task(Kind.F, index, warm + number))
            wanted = number + 1 - lag
        else:
            # No F is left: a W after each B fills the wait for the next one.
            wanted = max(weight + 1, number + 1 - lag)
        tasks.append(Task(Kind.B, index, number))
        while weight < min(wanted, number + 1):
            tasks.append(Task(Kind.W, index, weight))
            weight += 1
    tasks += [Task(Kind.W, index, number) for number in range(weight, micro_batches)]
    return _order(tasks)


def one_f_one_b(stages: int, index: int, micro_batches: int) -> Order:
    """1F1B. Its driver sends the gradient of the input after W, for the backward is one piece."""
    return warm_up_order(stages, index, micro_batches, stages - 1 - index, 0)


def zb_h1(stages: int, index: int, micro_batches: int) -> Order:
    """ZB-H1: W fills the bubbles; as much memory as 1F1B's first stage."""
    return warm_up_order(stages, index, micro_batches, stages - 1 - index, index)


def zb_h2(stages: int, index: int, micro_batches: int) -> Order:
    """ZB-H2: twice the warm-up, no bubble without delays, nearly twice the memory."""
    return warm_up_order(stages, index, micro_batches, 2 * (stages - 1 - index), 2 * index)


def interleaved(workers: int, index: int, chunks: int, micro_batches: int) -> Order:
    """Interleaved 1F1B: worker ``index`` has stages ``index``, ``index + workers``, ...; gradients leave after W.

    Raises ArgumentError unless the micro-batches come in whole groups of as many as there are workers.
    """
    _checked(workers, index, micro_batches)
    if micro_batches % workers or chunks < 2:
        raise ArgumentError(
            f"interleaving {chunks} chunks on {workers} workers needs two chunks at least, and micro-batches in groups "
            f"of {workers}; {micro_batches} is no multiple"
        )
    forward, backward = [], []
    for group in range(0, micro_batches, workers):
        for chunk in range(chunks):
            forward += [(chunk * workers + index, number) for number in range(group, group + workers)]
        for chunk in reversed(range(chunks)):
            backward += [(chunk * workers + index, number) for number in range(group, group + workers)]
    warm = min(len(forward), 2 * (workers - 1 - index) + (chunks - 1) * workers)
    tasks = [Task(Kind.F, *one) for one in forward[:warm]]
    for place, one in enumerate(backward):
        if warm + place < len(forward):
            tasks.append(Task(Kind.F, *forward[warm + place]))
        tasks += [Task(Kind.B, *one), Task(Kind.W, *one)]
    return _order(tasks)


def zb_v(workers: int, index: int, micro_batches: int) -> Order:
    """ZB-V: the row goes down through the workers and back up, so worker ``index`` has the stages ``index`` and
    ``2 * workers - 1 - index``, and the loss is on the first worker, where the row began.

    It is made for F = B = W: no bubble then but the way to the first input, in the memory of 1F1B's first stage. Every
    micro-batch crosses each border between workers twice each way, forward and backward.
    """
    _checked(workers, index, micro_batches)
    down, up, near = index, 2 * workers - 1 - index, workers - index
    # A shorter step is this one with the later micro-batches left out.
    enough = max(micro_batches, 2 * workers - 1)
    done: Counter[tuple[Kind, int]] = Counter()
    tasks: list[Task] = []

    def run(times: int, *steps: tuple[Kind, int]) -> None:
        for _ in range(times):
            for kind, stage in steps:
                if done[kind, stage] < micro_batches:
                    tasks.append(Task(kind, stage, done[kind, stage]))
                done[kind, stage] += 1

    whole_up = (Kind.F, up), (Kind.B, up), (Kind.W, up)
    back_down = (Kind.B, down), (Kind.W, down)
    # Until the first micro-batch has come down and back up; then its gradient is at hand at once.
    run(2 * near - 1, (Kind.F, down))
    run(index, (Kind.F, up), (Kind.F, down))
    run(near, *whole_up)
    run(enough - done[Kind.F, down], (Kind.F, down), *back_down, *whole_up)
    run(enough - done[Kind.F, up], *back_down, *whole_up)
    # No F is left: W waits, for those before need the gradients.
    run(index, (Kind.B, down), (Kind.B, up))
    run(near, *back_down)
    run(enough - done[Kind.W, up], (Kind.W, up))
    run(enough - done[Kind.W, down], (Kind.W, down))
    return _order(tasks)


def delay_aware(period_ns: int, hop_ns: Sequence[int], index: int, micro_batches: int, most_activations: int) -> Order:
    """An order with the warm-up that the delays ask for, after the idea of PipeMorph (NSDI '26).

    With as many micro-batches more of warm-up between two neighbours as a delay takes in periods, both ways, that delay
    no longer reaches the stage before: the gap between the warm-ups of neighbours absorbs it. Gaps cost memory, most of
    it on the first stage; where it doesn't suffice, the gaps at the longest delays are widened first, and what memory
    is left lets W lag. With memory for as many activations as there are stages nothing is left to widen: this is ZB-H1.

    :param period_ns: compute time of a micro-batch on one stage.
    :param hop_ns: from each stage to the next, one way.
    """
    stages = len(hop_ns) + 1
    _checked(stages, index, micro_batches)
    if most_activations < 1 or period_ns <= 0:
        raise ArgumentError(f"{most_activations} activations and a period of {period_ns} ns: nothing can be planned")
    spare = max(0, most_activations - stages)
    gaps = [1] * len(hop_ns)
    for hop in sorted(range(len(hop_ns)), key=lambda one: (-hop_ns[one], one)):
        extra = min(spare, math.ceil(2 * hop_ns[hop] / period_ns))
        gaps[hop] += extra
        spare -= extra
    warm_up = min(sum(gaps[index:]), most_activations - 1)
    return warm_up_order(stages, index, micro_batches, warm_up, most_activations - 1 - warm_up)
