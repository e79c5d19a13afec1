"""One rank's stage in ``proxyd bench torch-schedule``, and the whole pipeline in one process to compare with.

Two kinds of stage. *Stretched*: a real small module whose forward, gradient of the input and gradient of the weights
each take a given time by waiting, as :mod:`.stages` says why. *Real*: blocks of the examples' GPT, which compute.

The waits sit where autograd runs what they stand for: one on the way of every gradient, one between a weight and its
use, which a backward of the inputs alone never visits. So a schedule that splits its backward finds two tasks, and one
that doesn't pays for both at once.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from proxyd.cli.torch_bench.stages import WIDTH, sleep_until

REPORTED = (
    "activation_bytes",
    "peak_activations",
    "memory_bytes",
    "busy_s",
    "waits_s",
    "decisions_made",
    "decision_p50_us",
    "decision_p99_us",
    "split_backwards",
    "whole_backwards",
    "whole_because",
    "predictions",
    "prediction_error_s",
    "held_back",
    "fallback",
)
"""Of a run-time schedule's report."""


_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 64 << 10
HOST_BYTES = 1 << 30
"""For activations that wait: more than any of these runs has."""
KEPT = 4
"""Times an activation's bytes that a stretched stage keeps beside it: layers keep far more than they send."""


class _Gradient(torch.autograd.Function):  # type: ignore[misc] # torch is Any
    """Passes values and their gradients on, each not before its time; keeps something large for as long as layers do.

    What is kept has to be there, unchanged, when the gradient comes: it may have been moved meanwhile.
    """

    @staticmethod
    def forward(ctx: Any, values: Any, until_ns: int, backward_ns: int) -> Any:
        ctx.backward_ns = backward_ns
        ctx.save_for_backward(values.detach().expand(KEPT, *values.shape).contiguous())
        ctx.mark_dirty(values)  # itself, and not a view of it: the schedule has to detach it when it splits a backward
        sleep_until(until_ns)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        until_ns = time.monotonic_ns() + ctx.backward_ns
        (kept,) = ctx.saved_tensors
        if not torch.equal(kept[0], kept[-1]):
            raise RuntimeError("what the forward kept is not what the backward got")
        sleep_until(until_ns)
        return gradient, None, None


class _Weight(torch.autograd.Function):  # type: ignore[misc]
    """Passes a weight on, and its gradient back not before its time."""

    @staticmethod
    def forward(ctx: Any, weight: Any, weight_ns: int) -> Any:
        ctx.weight_ns = weight_ns
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        sleep_until(time.monotonic_ns() + ctx.weight_ns)
        return gradient, None


class Stretched(torch.nn.Module):  # type: ignore[misc]
    """``spec``: ``elements`` of an activation, ``forward_ns``, ``backward_ns`` and ``weight_ns`` of a micro-batch."""

    def __init__(self, spec: dict[str, Any], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5)
        self.gain = torch.nn.Parameter(torch.tensor(0.5))
        self._spec = spec

    def forward(self, activation: Any) -> Any:
        until_ns = time.monotonic_ns() + self._spec["forward_ns"]
        activation = activation.clone()  # the stage's own: a slice of the batch is the caller's, and stays
        weight = _Weight.apply(self.weight, self._spec["weight_ns"])
        head = torch.tanh(activation[:, : WIDTH * WIDTH].reshape(-1, WIDTH) @ weight)
        rest = activation * self.gain
        mixed = rest + torch.nn.functional.pad(head.reshape(1, -1), (0, activation.shape[1] - WIDTH * WIDTH))
        return _Gradient.apply(mixed, until_ns, self._spec["backward_ns"])


def mean_square(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


class Task:
    """What all stages of a pipeline compute: modules by stage, one iteration's inputs and targets, the loss."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.count, self.stages = int(spec["microbatches"]), int(spec["stages"])
        if spec["real"]:
            from proxyd_client.examples import gpt

            options = argparse.Namespace(**spec["real"])
            self.loss: Callable[[Any, Any], Any] = gpt.loss_of
            self.inputs, self.targets = next(gpt.batches(options, self.count * options.sequences, part=0))
            torch.manual_seed(options.seed)
            self.modules: list[Any] = [
                gpt.Blocks(options, options.layers, first=stage == 0, last=stage == self.stages - 1)
                for stage in range(self.stages)
            ]
            shape = (options.sequences, options.context, options.width)
            self.edges = [self.inputs[: options.sequences], *([torch.zeros(shape)] * (self.stages - 1))]
            self.edges.append(torch.zeros(*shape[:2], gpt.VOCABULARY))
        else:
            self.loss = mean_square
            generator = torch.Generator().manual_seed(1000)
            self.inputs = torch.randn(self.count, spec["elements"], generator=generator)
            self.targets = torch.randn(self.count, spec["elements"], generator=generator)
            self.modules = [Stretched(spec, seed=stage) for stage in range(self.stages)]
            self.edges = [torch.zeros(1, spec["elements"])] * (self.stages + 1)

    def input(self, stage: int) -> Any:
        """An example; the row of a pipeline starts from values that need no gradient."""
        return self.edges[stage] if stage == 0 else self.edges[stage].clone().requires_grad_()


class ScheduleBench:
    """One way of running one stage."""

    def __init__(self, spec: dict[str, Any], schedule: str, group: Any, stage: int) -> None:
        if not spec["real"]:
            give_back_at_once()
        self._task, self._number = Task(spec), stage
        self._module = self._task.modules[stage]
        made = PipelineStage(
            self._module,
            stage,
            self._task.stages,
            torch.device("cpu"),
            input_args=(self._task.input(stage),),
            output_args=(self._task.edges[stage + 1].clone().requires_grad_(),),
            group=group,
        )
        self._schedule: Any = (
            Schedule1F1B(made, self._task.count, self._task.loss)
            if schedule == "1f1b"
            else run_time_schedule(made, self._task, spec, schedule)
        )

    def iterate(self, digest: Callable[[list[Any]], str]) -> dict[str, Any]:
        """Forwards and backwards of all micro-batches; parameters stay, so that every iteration gives the same."""
        self._module.zero_grad()
        losses: list[Any] = []
        inputs = (self._task.inputs,) if self._number == 0 else ()
        last = {"target": self._task.targets, "losses": losses} if self._number == self._task.stages - 1 else {}
        before = resident_bytes()
        self._schedule.step(*inputs, return_outputs=False, **last)
        end_ns = time.monotonic_ns()
        added_bytes = peak_resident_bytes() - before
        return {
            "end_ns": end_ns,
            "losses": [float(loss.detach()) for loss in losses],
            "digest": digest([parameter.grad for parameter in self._module.parameters()]),
            "report": {**self._report(), "peak_resident_bytes": added_bytes},
        }

    def _report(self) -> dict[str, Any]:
        """What was held, waited for and decided."""
        said = getattr(self._schedule, "report", None)
        if said is None:  # 1F1B has as many micro-batches under way as there are stages from here to the last
            held_bytes = kept_bytes(self._module, self._task.input(self._number))
            return {"peak_bytes": min(self._task.count, self._task.stages - self._number) * held_bytes}
        moves = said.offload
        return {
            **{name: getattr(said, name) for name in REPORTED},
            # With offload it is counted, without it is reckoned: so many micro-batches of so many bytes.
            "peak_bytes": said.peak_bytes if moves is None else max(said.peak_bytes, moves.device_peak_bytes),
            "offload": None if moves is None else dataclasses.asdict(moves),
        }


def give_back_at_once() -> None:
    """What is freed leaves the process: else its resident memory tells what was held once, and not now."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def resident_bytes() -> int:
    """Of this process now; the peak is counted from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most since :func:`resident_bytes`."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def kept_bytes(module: Any, values: Any) -> int:
    """What one forward keeps for its backward."""
    from proxyd_client.torch.pipeline.compute import Gauge

    with Gauge(module) as gauge:
        module(values)
    return int(gauge.nbytes)


def run_time_schedule(stage: Any, task: Task, spec: dict[str, Any], name: str) -> Any:
    """The schedule that chooses as it goes, with or without host memory for activations."""
    from proxyd_client.torch.offload import ActivationStore
    from proxyd_client.torch.pipeline import ScheduleRunTime

    places = max(2, spec["activations"] * 6 // 10)  # what offload should get by with
    if name == "few":
        return ScheduleRunTime(stage, task.count, task.loss, activations=places)
    if name == "offload":
        directory = Path(spec["offload_to"]) if spec["offload_to"] else None
        store = ActivationStore(host_bytes=HOST_BYTES, directory=directory, module=stage.submod)
        return ScheduleRunTime(stage, task.count, task.loss, activations=places, offload=store)
    return ScheduleRunTime(stage, task.count, task.loss, activations=spec["activations"])


def alone(spec: dict[str, Any], stage: int, digest: Callable[[list[Any]], str]) -> dict[str, Any]:
    """Two things without any communication: how long this stage computes in an iteration, and what comes out where all
    stages of the pipeline run in one process, micro-batch by micro-batch."""
    task = Task(spec)
    module, begin_ns = task.modules[stage], time.monotonic_ns()
    for _ in range(task.count):
        output = module(task.input(stage))
        output.backward(torch.ones_like(output))
    seconds = (time.monotonic_ns() - begin_ns) / 1e9
    losses, task = [], Task({**spec, "forward_ns": 0, "backward_ns": 0, "weight_ns": 0})
    for values, target in zip(task.inputs.chunk(task.count), task.targets.chunk(task.count), strict=True):
        for one in task.modules:
            values = one(values)
        loss = task.loss(values, target)
        loss.backward()
        losses.append(float(loss.detach()))
    parameters = list(task.modules[stage].parameters())
    for parameter in parameters:
        parameter.grad /= task.count
    return {
        "seconds": seconds,
        "message_bytes": task.edges[1].numel() * task.edges[1].element_size(),
        "losses": losses,
        "digest": digest([parameter.grad for parameter in parameters]),
    }
