"""A pipeline stage for benchmarks: a real small module whose computation is stretched to a given time by waiting.

Four ranks, five daemons and the emulated WAN share a machine of few cores, so a stage that computed for real would
measure the machine's scheduler. What is real: torch's own schedule, autograd, tensors of the activations' size, their
values and the gradients; what is not: how long the layers take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules

WIDTH = 64
"""Of the real layer; it works on ``WIDTH * WIDTH`` elements of each activation."""
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
STAGES = 2


def sleep_until(at_ns: int) -> None:
    """By CLOCK_MONOTONIC."""
    while (wait_ns := at_ns - time.monotonic_ns()) > 0:
        time.sleep(wait_ns / 1e9)


class _Stretch(torch.autograd.Function):  # type: ignore[misc] # torch is Any
    """Passes values and gradients on, each not before its time."""

    @staticmethod
    def forward(ctx: Any, values: Any, until_ns: int, backward_ns: int) -> Any:
        ctx.backward_ns = backward_ns
        sleep_until(until_ns)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        sleep_until(time.monotonic_ns() + ctx.backward_ns)
        return gradient, None, None


class Stage(torch.nn.Module):  # type: ignore[misc]
    """``spec``: ``elements`` of an activation, ``forward_ns`` and ``backward_ns`` of a micro-batch."""

    def __init__(self, spec: dict[str, Any], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.layer.weight.normal_(0, WIDTH**-0.5, generator=generator)
            self.layer.bias.zero_()
        self.gain = torch.nn.Parameter(torch.tensor(0.5))
        self._spec = spec

    def forward(self, activation: Any) -> Any:
        until_ns = time.monotonic_ns() + self._spec["forward_ns"]
        head = torch.tanh(self.layer(activation[:, : WIDTH * WIDTH].reshape(-1, WIDTH)))
        rest = activation * self.gain
        mixed = rest + torch.nn.functional.pad(head.reshape(1, -1), (0, activation.shape[1] - WIDTH * WIDTH))
        return _Stretch.apply(mixed, until_ns, self._spec["backward_ns"])


def loss_of(output: Any, target: Any) -> Any:
    """Mean square."""
    return (output - target).square().mean()


class _Arrival:
    """A posted receive whose end is noticed when it comes, not when the schedule asks."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """As a dist.Work's."""
        self._future.result()


class Watch:
    """Stands between torch's schedules and their point-to-point calls, and writes down when each began and ended."""

    def __init__(self) -> None:
        self.sends: list[int] = []
        """CLOCK_MONOTONIC at which each send was called, in order."""
        self.arrivals: list[int] = []
        """At which the n-th receive was complete."""
        patched: Any = schedules
        self._original = patched._batch_p2p
        # A receive is waited for in a thread of its own: gloo ends one only when somebody waits for it.
        self._threads = ThreadPoolExecutor(8, "watch")
        patched._batch_p2p = self._batch

    def reset(self) -> None:
        """Before an iteration."""
        self.sends, self.arrivals = [], []

    def _batch(self, ops: Sequence[Any], desc: str | None = None) -> list[Any]:
        begin_ns = time.monotonic_ns()
        works = self._original(list(ops), desc)
        if len(works) != len(ops):
            raise RuntimeError(f"{len(ops)} operations gave {len(works)} works: they can't be told apart")
        result: list[Any] = []
        for op, work in zip(ops, works, strict=True):
            if op.op is dist.isend:
                self.sends.append(begin_ns)
                result.append(work)
            else:
                number = len(self.arrivals)
                self.arrivals.append(0)
                result.append(_Arrival(self._threads.submit(self._await, work, number, self.arrivals)))
        return result

    @staticmethod
    def _await(work: Any, number: int, arrivals: list[int]) -> None:
        work.wait()
        arrivals[number] = time.monotonic_ns()


_watch: Watch | None = None


def watch() -> Watch:
    """The process's one."""
    global _watch
    if _watch is None:
        _watch = Watch()
    return _watch


class PipelineBench:
    """One rank's part of a two-stage pipeline over one way."""

    def __init__(self, spec: dict[str, Any], group: Any, stage: int, pipeline: int) -> None:
        self._spec, self._number = spec, stage
        count, elements = spec["microbatches"], spec["elements"]
        generator = torch.Generator().manual_seed(1000 + pipeline)
        self._inputs = torch.randn(count, elements, generator=generator)
        self._targets = torch.randn(count, elements, generator=generator)
        self._module = Stage(spec, seed=2 * pipeline + stage)
        example = torch.zeros(1, elements, requires_grad=True)
        self._stage = PipelineStage(
            self._module,
            stage,
            STAGES,
            torch.device("cpu"),
            input_args=(example if stage else example.detach(),),
            output_args=(torch.zeros(1, elements, requires_grad=True),),
            group=group,
        )
        self._schedule = SCHEDULES[spec["schedule"]](self._stage, count, loss_of)

    def iterate(self, digest: Callable[[list[Any]], str]) -> dict[str, Any]:
        """Forwards and backwards of all micro-batches; parameters stay, so that every iteration gives the same."""
        watching = watch()
        watching.reset()
        self._module.zero_grad()
        losses: list[Any] = []
        if self._number == 0:
            self._schedule.step(self._inputs, return_outputs=False)
        else:
            self._schedule.step(target=self._targets, losses=losses, return_outputs=False)
        end_ns = time.monotonic_ns()
        return {
            "end_ns": end_ns,
            "losses": [float(loss.detach()) for loss in losses],
            "digest": digest([parameter.grad for parameter in self._module.parameters()]),
            "sends": watching.sends,
            "arrivals": watching.arrivals,
        }


def computation_seconds(spec: dict[str, Any]) -> float:
    """Forwards and backwards of a stage for one iteration's micro-batches."""
    module = Stage(spec, seed=0)
    activation = torch.randn(1, spec["elements"], requires_grad=True)
    begin_ns = time.monotonic_ns()
    for _ in range(spec["microbatches"]):
        module(activation).backward(torch.ones(1, spec["elements"]))
    return (time.monotonic_ns() - begin_ns) / 1e9
