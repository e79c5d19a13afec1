"""A small pipeline under the run-time schedule and under torch's own, on ranks of a world."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.torch.pipes import pipe_group

WIDTH = 32
ROWS = 24
MICRO_BATCHES = 6
STEPS = 3


def module_of(index: int, dtype: Any) -> Any:
    """One stage: two layers with a norm and a residual; its parameters depend on the index alone."""
    import torch
    from torch import nn

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.wide = nn.Linear(WIDTH, 4 * WIDTH)
            self.narrow = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any, scale: float = 1.0) -> Any:
            return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x)))) * scale

    state = torch.random.get_rng_state()
    torch.manual_seed(1000 + index)
    made = Part().to(dtype)
    torch.random.set_rng_state(state)
    return made


def loss_of(output: Any, target: Any) -> Any:
    import torch

    return torch.nn.functional.mse_loss(output.float(), target.float())


def data(dtype: Any, micro_batches: int = MICRO_BATCHES, seed: int = 7) -> Iterator[tuple[Any, Any]]:
    """Endless batches and targets."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    while True:
        shape = (ROWS * micro_batches, WIDTH)
        yield torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)


def to_bytes(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())


@contextmanager
def late(stage: Any, seed: int) -> Iterator[None]:
    """Sends of a stage wait for a random while, up to 8 ms, before they are posted: its peers hear in odd moments."""
    rng = random.Random(seed)
    forward, backward = stage.get_fwd_send_ops, stage.get_bwd_send_ops

    def slow(make: Any) -> Any:
        def ops(number: int) -> Any:
            time.sleep(rng.random() * 0.008)
            return make(number)

        return ops

    stage.get_fwd_send_ops, stage.get_bwd_send_ops = slow(forward), slow(backward)
    try:
        yield
    finally:
        stage.get_fwd_send_ops, stage.get_bwd_send_ops = forward, backward


def make_stage(index: int, count: int, dtype: Any, group: Any, module: Any = None) -> Any:
    import torch
    from torch.distributed.pipelining import PipelineStage

    example = torch.empty((ROWS, WIDTH), dtype=dtype)
    return PipelineStage(
        module_of(index, dtype) if module is None else module,
        index,
        count,
        torch.device("cpu"),
        input_args=example.clone().requires_grad_(index > 0),
        output_args=example.clone().requires_grad_(),
        group=group,
    )


def train(
    rank: int,
    backend: str,
    kind: str,
    dtype_name: str,
    ranks: Sequence[int],
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    seed: int = 0,
    steps: int = STEPS,
    evaluates: bool = False,
) -> dict[str, Any]:
    """Some steps with an optimiser. All ranks of the world call this.

    :param kind: ``1F1B`` (torch's) or ``run-time``.
    :param options: of the run-time schedule; of all stages, or one for each.
    :param seed: of the delays before sends; 0: none.
    """
    import torch
    from torch.distributed.pipelining import Schedule1F1B

    from proxyd_client.torch.pipeline import ScheduleRunTime

    group = pipe_group(backend, ranks)
    if rank not in ranks:
        return {}
    dtype = getattr(torch, dtype_name)
    index, count = ranks.index(rank), len(ranks)
    stage = make_stage(index, count, dtype, group)
    mine = options if isinstance(options, Mapping) else (options[index] if options else {})
    schedule: Any
    if kind == "1F1B":
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    else:
        schedule = ScheduleRunTime(stage, MICRO_BATCHES, loss_fn=loss_of, **mine)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.05)
    told: dict[str, Any] = {"losses": [], "gradients": [], "outputs": [], "evaluated": [], "reports": []}
    batches = data(dtype)
    for step in range(steps):
        batch, target = next(batches)
        optimizer.zero_grad()
        got: list[Any] = []
        arguments = ((batch,) if index == 0 else ()), ({"target": target, "losses": got} if index == count - 1 else {})
        if seed:
            with late(stage, 100 * seed + 10 * step + index):
                output = schedule.step(*arguments[0], **arguments[1])
        else:
            output = schedule.step(*arguments[0], **arguments[1])
        told["losses"] += [to_bytes(loss) for loss in got]
        told["gradients"] += [to_bytes(p.grad) for p in stage.submod.parameters()]
        told["outputs"] += [] if output is None else [to_bytes(output)]
        if kind != "1F1B":
            told["reports"].append(dataclasses.asdict(schedule.report))
        optimizer.step()
        if evaluates:
            output = schedule.eval(*arguments[0], **arguments[1])
            told["evaluated"] += [] if output is None else [to_bytes(output)]
            told["evaluated"] += [to_bytes(loss) for loss in got]
    if kind != "1F1B":
        schedule.close()
    return told


def alone(rank: int, dtype_name: str, count: int, steps: int = STEPS) -> list[dict[str, Any]]:
    """The same in one process: micro-batch after micro-batch through all stages; told as by :func:`train`, by stage."""
    import torch

    dtype = getattr(torch, dtype_name)
    modules = [module_of(index, dtype) for index in range(count)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in modules]
    told: list[dict[str, Any]] = [{"losses": [], "gradients": [], "outputs": []} for _ in modules]
    batches = data(dtype)
    for _ in range(steps):
        batch, target = next(batches)
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = []
        for part, wanted in zip(batch.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True):
            values = part
            for module in modules:
                values = module(values)
            loss = loss_of(values, wanted)
            loss.backward()
            told[-1]["losses"].append(to_bytes(loss))
            outputs.append(values.detach())
        told[-1]["outputs"].append(to_bytes(torch.cat(outputs)))
        for module, optimizer, mine in zip(modules, optimizers, told, strict=True):
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(MICRO_BATCHES)
            mine["gradients"] += [to_bytes(parameter.grad) for parameter in module.parameters()]
            optimizer.step()
    return told
