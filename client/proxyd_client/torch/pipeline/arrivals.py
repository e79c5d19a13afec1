"""Receives of one step: which inputs are here, and waiting for the next one.

Three kinds, by what the group's works can do:

* proxyd's: the computing thread waits for the next input of either kind itself, and so drives the socket;
* gloo's works don't know whether they are done until somebody waits for them: a thread for each neighbour does, in the
  order in which they were posted, and ends with the step;
* others (nccl) are asked, at intervals of :data:`POLL_S`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from proxyd_client.endpoint import Endpoint
from proxyd_client.schedule.tasks import Kind
from proxyd_client.torch.group import ProcessGroupProxyd
from proxyd_client.torch.pipeline.errors import PipelineError

POLL_S = 0.0005

Input = tuple[int, list[Any]]
"""A micro-batch, and the works that bring its tensors."""


class Arrivals(Protocol):
    """The receives of one stage in one step."""

    reason: str
    """Why nothing but arrivals is known; empty where predictions are to be had."""

    def post(self, kind: Kind, inputs: Sequence[Input]) -> None:
        """Works that have been posted, in the order of the micro-batches."""

    def here(self) -> list[tuple[Kind, int]]:
        """Inputs that have come since the last call. Raises what has ended a receive."""

    def wait(self, timeout_s: float | None) -> None:
        """Until the next input is here (of either kind), or :meth:`wake` is called, or the time is up."""

    def wake(self) -> None:
        """End a wait; from any thread."""

    def give_up(self) -> None:
        """Cancel what has not come: nothing is written to its tensors any more, as far as the group can do that."""

    def awaits(self) -> list[tuple[Kind, int]]:
        """The next input of each kind that has not come."""


class Watched:
    """proxyd's."""

    reason = ""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._waiting: dict[Kind, deque[Input]] = {}
        self._woken = False

    def post(self, kind: Kind, inputs: Sequence[Input]) -> None:
        self._waiting[kind] = deque(inputs)

    def here(self) -> list[tuple[Kind, int]]:
        found = []
        for kind, waiting in self._waiting.items():
            while waiting and all(work.is_completed() for work in waiting[0][1]):
                number, works = waiting.popleft()
                for work in works:
                    work.wait()
                found.append((kind, number))
        return found

    def wait(self, timeout_s: float | None) -> None:
        heads = []
        for waiting in self._waiting.values():
            if waiting:
                missing = next((work.handle for work in waiting[0][1] if not work.is_completed()), None)
                if missing is None:
                    return
                heads.append(missing)
        self._endpoint.wait_any(heads, timeout_s, interrupted=self._is_woken)
        self._woken = False

    def _is_woken(self) -> bool:
        return self._woken

    def wake(self) -> None:
        self._woken = True
        self._endpoint.wake()

    def give_up(self) -> None:
        for waiting in self._waiting.values():
            for _, works in waiting:
                for work in works:
                    work.cancel()
            waiting.clear()

    def awaits(self) -> list[tuple[Kind, int]]:
        return [(kind, waiting[0][0]) for kind, waiting in self._waiting.items() if waiting]


class Waited:
    """gloo's."""

    def __init__(self, backend: str) -> None:
        self.reason = f"the group's backend is {backend}, which predicts nothing: inputs are known when they are here"
        self._there = threading.Condition()
        self._arrived: deque[tuple[Kind, int, Exception | None]] = deque()
        self._left: dict[Kind, deque[int]] = {}
        self._woken = False

    def post(self, kind: Kind, inputs: Sequence[Input]) -> None:
        self._left[kind] = deque(number for number, _ in inputs)
        if inputs:
            name = f"proxyd-pipeline-{kind.name}"
            threading.Thread(target=self._run, args=(kind, list(inputs)), name=name, daemon=True).start()

    def _run(self, kind: Kind, inputs: list[Input]) -> None:
        for number, works in inputs:
            error: Exception | None = None
            try:
                for work in works:
                    work.wait()
            except Exception as caught:  # noqa: BLE001 - of another library: it is raised where the step runs
                error = caught
            with self._there:
                self._arrived.append((kind, number, error))
                self._there.notify()
            if error is not None:
                return

    def here(self) -> list[tuple[Kind, int]]:
        found = []
        with self._there:
            while self._arrived:
                kind, number, error = self._arrived.popleft()
                if error is not None:
                    raise PipelineError(
                        f"the input of {kind.name}{number} did not come", why=f"{type(error).__name__}: {error}"
                    ) from error
                self._left[kind].popleft()
                found.append((kind, number))
        return found

    def wait(self, timeout_s: float | None) -> None:
        with self._there:
            self._there.wait_for(lambda: self._arrived or self._woken, timeout_s)
            self._woken = False

    def wake(self) -> None:
        with self._there:
            self._woken = True
            self._there.notify()

    def give_up(self) -> None:
        """gloo's receives can't be taken back: their threads end with the group."""

    def awaits(self) -> list[tuple[Kind, int]]:
        return [(kind, left[0]) for kind, left in self._left.items() if left]


class Asked:
    """Others."""

    def __init__(self, backend: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self.reason = f"the group's backend is {backend}, which predicts nothing and has to be asked what is here"
        self._sleep = sleep
        self._waiting: dict[Kind, deque[Input]] = {}
        self._woken = threading.Event()

    def post(self, kind: Kind, inputs: Sequence[Input]) -> None:
        self._waiting[kind] = deque(inputs)

    def _next_is_here(self, waiting: deque[Input]) -> bool:
        return bool(waiting) and all(work.is_completed() for work in waiting[0][1])

    def here(self) -> list[tuple[Kind, int]]:
        found = []
        for kind, waiting in self._waiting.items():
            while self._next_is_here(waiting):
                number, works = waiting.popleft()
                for work in works:
                    work.wait()  # of nccl: this stream comes after it
                found.append((kind, number))
        return found

    def wait(self, timeout_s: float | None) -> None:
        left_s = float("inf") if timeout_s is None else timeout_s
        while left_s > 0 and not self._woken.is_set() and not any(map(self._next_is_here, self._waiting.values())):
            self._sleep(min(POLL_S, left_s))
            left_s -= POLL_S
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def give_up(self) -> None:
        """Other backends' receives can't be taken back."""

    def awaits(self) -> list[tuple[Kind, int]]:
        return [(kind, waiting[0][0]) for kind, waiting in self._waiting.items() if waiting]


def arrivals_for(group: Any) -> Arrivals:
    """Those that suit a group."""
    if isinstance(group, ProcessGroupProxyd):
        return Watched(group.membership.endpoint)
    backend = dist.get_backend(group)
    return Waited(backend) if backend == "gloo" else Asked(backend)
