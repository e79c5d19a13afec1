"""The loop around a policy, on a fake pipeline with a fake clock: whatever arrives when, and whatever is predicted."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule import Kind, Offload, Online, Stage, Task, Worker
from proxyd_client.schedule.offload import Move
from proxyd_client.schedule.step import Arrived, Event, Foreseen, Moved, Step


class Line:
    """A pipeline of one real stage and an outside world that feeds it: inputs of F at any time, in any order; a
    gradient some time after each F has been sent."""

    def __init__(self, stage: Stage, micro_batches: int, rng: random.Random, *, splits: bool, lies: bool) -> None:
        self.stage = stage
        self.clock_ns = 0
        self.ran: list[tuple[Task, bool]] = []
        self.fails = 0.0
        self.longest_ns = 800
        self._rng = rng
        self._splits = splits
        self._lies = lies
        self._numbers = itertools.count()
        self._queue: list[tuple[int, int, Event]] = []
        self._sure: dict[int, int] = {}
        if not stage.first:
            for number in range(micro_batches):
                self._later(rng.randrange(1, 500), Arrived(Kind.F, stage.index, number))

    def _later(self, after_ns: int, event: Event) -> None:
        heapq.heappush(self._queue, (self.clock_ns + after_ns, next(self._numbers), event))

    def now_ns(self) -> int:
        self.clock_ns += 1  # a decision takes time too
        return self.clock_ns

    def heard(self) -> Iterable[Event]:
        while self._queue and self._queue[0][0] <= self.clock_ns:
            yield heapq.heappop(self._queue)[2]

    def wait(self, until_ns: int) -> None:
        if not self._queue and not until_ns:
            raise AssertionError("a deadlock: it waits, and nothing will come")
        next_ns = self._queue[0][0] if self._queue else until_ns
        self.clock_ns = max(self.clock_ns, min(next_ns, until_ns or next_ns))

    def foresee(self, kind: Kind, stage: int, micro_batch: int) -> Foreseen | None:
        if self._lies and self._rng.random() < 0.3:
            return Foreseen(self._rng.randrange(2 * self.clock_ns + 100), self._rng.random())
        eta_ns = self._sure.get(micro_batch)
        return Foreseen(eta_ns, 1.0) if eta_ns is not None and self._rng.random() < 0.8 else None

    def can_split(self, stage: int, micro_batch: int) -> bool:
        return self._splits or self._rng.random() < 0.5

    def compute(self, task: Task, whole: bool) -> None:
        self.clock_ns += self._rng.randrange(1, 60)
        self.ran.append((task, whole))
        if task.kind == Kind.F and not self.stage.last:
            after_ns = self._rng.randrange(1, self.longest_ns)
            self._sure[task.micro_batch] = self.clock_ns + after_ns
            self._later(after_ns, Arrived(Kind.B, self.stage.index, task.micro_batch))

    def move(self, move: Move) -> None:
        self._later(self._rng.randrange(1, 120), Moved(move.outwards, move.stage, move.micro_batch))

    def settle(self, stage: int, micro_batch: int, keep: bool) -> bool:
        return not keep and self._rng.random() >= self.fails


@given(
    seed=st.integers(0, 1 << 32),
    micro_batches=st.integers(1, 12),
    place=st.sampled_from(["first", "middle", "last"]),
    activations=st.integers(1, 5),
    parts=st.integers(1, 3),
    outside=st.sampled_from([0, 0, 2, 6]),
    splits=st.sampled_from([None, True, False]),
    lies=st.booleans(),
    quota=st.sampled_from([None, 1, 3]),
    fails=st.sampled_from([0.0, 0.0, 0.2]),
)
def test_each_task_runs_once_and_in_order_whatever_arrives_when(
    seed: int,
    micro_batches: int,
    place: str,
    activations: int,
    parts: int,
    outside: int,
    splits: bool | None,
    lies: bool,
    quota: int | None,
    fails: float,
) -> None:
    rng = random.Random(seed)
    if outside:
        activations = max(activations, 2)
    stage = Stage(
        3,
        first=place == "first",
        last=place == "last",
        activation_bytes=10,
        weight_parts=1 if place == "first" else parts,
    )
    worker = Worker([stage], micro_batches, 10 * activations)
    line = Line(stage, micro_batches, rng, splits=splits is not None, lies=lies)
    line.fails = fails
    offload = Offload(10 * outside, 40) if outside else None
    step = Step(worker, Online({3: quota} if quota else None), line, offload=offload, splits=splits)
    step.run()
    done: list[Task] = []
    for task, whole in line.ran:
        done.append(task)
        if whole:
            assert splits is not True or not line._splits
            done += [Task(Kind.W, 3, task.micro_batch, part) for part in range(stage.weight_parts)]
    for kind in (Kind.F, Kind.B):
        assert [task.micro_batch for task in done if task.kind == kind] == list(range(micro_batches))
    wanted = [(number, part) for number in range(micro_batches) for part in range(stage.weight_parts)]
    assert [(task.micro_batch, task.part) for task in done if task.kind == Kind.W] == wanted
    at = {task: place for place, task in enumerate(done)}
    for number in range(micro_batches):
        assert at[Task(Kind.F, 3, number)] < at[Task(Kind.B, 3, number)] < at[Task(Kind.W, 3, number)]
    assert worker.peak_bytes <= worker.memory_bytes or step.record.moves_failed
    assert step.record.host_peak_bytes <= 10 * outside
    assert len(step.record.decided_ns) >= len(line.ran)
    if place == "first":
        assert not step.record.whole


def test_a_busy_stage_runs_whole_and_one_that_starves_splits() -> None:
    class Fed(Line):
        """Everything is here from the start, or comes when everything before has long ended."""

        def __init__(self, pause_ns: int) -> None:
            super().__init__(Stage(1, first=False, last=True), 6, random.Random(1), splits=True, lies=False)
            self._queue = [(number * pause_ns, number, Arrived(Kind.F, 1, number)) for number in range(6)]

    counts = []
    for pause_ns in (0, 10_000):
        worker = Worker([Stage(1, first=False, last=True)], 6, 8)
        step = Step(worker, Online(), Fed(pause_ns))
        step.run()
        counts.append((step.record.whole, step.record.split))
    assert counts == [(5, 1), (0, 6)], "the last one of a busy stage has nothing behind it"


def test_leftover_weights_come_before_a_whole_backward() -> None:
    """The stage starves and splits; then work piles up, and the backward after that is whole: W stays in order."""
    line = Line(Stage(1, first=False, last=True), 0, random.Random(1), splits=True, lies=False)
    line._queue = [(0, 0, Arrived(Kind.F, 1, 0)), *((30, n, Arrived(Kind.F, 1, n)) for n in (1, 2, 3))]
    heapq.heapify(line._queue)
    line.compute = partial(_ten, line)  # type: ignore[method-assign]
    worker = Worker([Stage(1, first=False, last=True)], 4, 8)
    Step(worker, Online(), line).run()
    kinds = [f"{task.kind.name}{task.micro_batch}{'!' if whole else ''}" for task, whole in line.ran]
    assert kinds.index("W0") < kinds.index("B1!")
    assert kinds[:2] == ["F0", "B0"]


def _ten(line: Line, task: Task, whole: bool) -> None:
    line.clock_ns += 20
    line.ran.append((task, whole))


def test_predictions_are_trusted_by_how_wrong_they_were() -> None:
    """A gradient that comes when it was said to is waited for; one that is always late is not."""

    class Said(Line):
        off_ns = 0

        def foresee(self, kind: Kind, stage: int, micro_batch: int) -> Foreseen | None:
            eta_ns = self._sure.get(micro_batch)
            return None if eta_ns is None else Foreseen(max(1, eta_ns - self.off_ns), 1.0)

    held = []
    for off_ns in (0, 40):
        line = Said(Stage(0, first=True, last=False), 800, random.Random(5), splits=True, lies=False)
        line.off_ns, line.longest_ns = off_ns, 100
        worker = Worker([Stage(0, first=True, last=False)], 800, 6)
        step = Step(worker, Online(), line)
        step.run()
        held.append(step.record.held_back)
        assert step.record.predictions > 100
    assert held[0] >= 4 * held[1], held


def test_a_prediction_that_is_put_off_again_and_again_is_waited_for_once() -> None:
    class Soon(Line):
        def foresee(self, kind: Kind, stage: int, micro_batch: int) -> Foreseen | None:
            return Foreseen(self.clock_ns + 3, 1.0)

    line = Soon(Stage(1, first=False, last=True, weight_ns=400), 0, random.Random(1), splits=True, lies=False)
    line._queue = [(0, 0, Arrived(Kind.F, 1, 0)), (1_000_000, 1, Arrived(Kind.F, 1, 1))]
    worker = Worker([line.stage], 2, 8)
    step = Step(worker, Online(), line, error_ns=1)
    step.run()
    assert step.record.held_back == 1
    assert [str(task) for task, _ in line.ran][:3] == ["F0@1", "B0@1", "W0@1"]
    assert line.clock_ns > 1_000_000 > step.record.waits_ns["held back for what is predicted"] * 1000


def test_an_activation_that_came_back_does_not_leave_again_without_need() -> None:
    """On a bus that takes no time it would go out and come back in turns, as long as its gradient isn't here."""

    class Fast(Line):
        moves = 0

        def move(self, move: Move) -> None:
            self.moves += 1
            self._later(1, Moved(move.outwards, move.stage, move.micro_batch))

    for seed in range(20):
        line = Fast(Stage(0, first=True, last=False), 12, random.Random(seed), splits=True, lies=False)
        line.longest_ns = 2000
        worker = Worker([Stage(0, first=True, last=False)], 12, 4)
        Step(worker, Online(), line, offload=Offload(8, 1)).run()
        assert 0 < line.moves <= 4 * 12, "twice each at most, out and back"


def test_what_ends_the_surroundings_ends_the_step() -> None:
    class Lost(Line):
        def wait(self, until_ns: int) -> None:
            raise ArgumentError("gone")

    line = Lost(Stage(1, first=False, last=True), 2, random.Random(1), splits=True, lies=False)
    with pytest.raises(ArgumentError, match="gone"):
        Step(Worker([Stage(1, first=False, last=True)], 2, 8), Online(), line).run()
