"""A small pipeline, the same over any backend: what it computes depends on nothing but its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

SCHEDULES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
SINGLE = ("1F1B", "GPipe")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
FEATURES = 64
ROWS = 1152
"""Of a micro-batch: with either dtype a tensor is larger than what may go without a grant."""
STEPS = 2
"""The first one learns how long a stage takes."""

_groups: dict[tuple[int, str, tuple[int, ...], str], Any] = {}


def pipe_group(backend: str, ranks: Sequence[int], modes: Sequence[str] = ()) -> Any:
    """These ranks, with this backend; made once, by all ranks of the world. ``modes``: of pipelining, by rank."""
    import torch.distributed as dist

    from proxyd_client.torch import Options

    world = dist.group.WORLD
    key = id(world), backend, tuple(ranks), str(modes)
    if key not in _groups:
        options = Options(pipelining=modes[dist.get_rank()]) if modes else None
        _groups[key] = dist.new_group(list(ranks), backend=backend, pg_options=options)
    return _groups[key]


def stages_of(schedule: str, rank: int, size: int) -> list[int]:
    """Indexes of the stages of one rank."""
    if schedule in SINGLE:
        return [rank]
    return [rank, 2 * size - 1 - rank] if schedule in V_SHAPED else [rank, size + rank]


def _twice(real: Any, direction: Any) -> Iterator[tuple[int, int]]:
    for peer, nbytes in real(direction):
        yield peer, 2 * nbytes


def build_stage(index: int, dtype: Any) -> Any:
    """One stage's module; its parameters depend on the index alone."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(1000 + index)
            weight = torch.randn(FEATURES, FEATURES, generator=generator) / 8
            self.weight = torch.nn.Parameter(weight.to(dtype))
            self.scale = torch.nn.Parameter(torch.rand(FEATURES, generator=generator).to(dtype))

        def forward(self, x: Any) -> Any:
            return torch.tanh(x @ self.weight) * self.scale + x

    return Block()


def run(
    rank: int,
    backend: str,
    schedule: str,
    dtype_name: str,
    static: bool,
    ranks: Sequence[int],
    microbatches: int,
    modes: Sequence[str] = (),
    wrong_plan: bool = False,
) -> dict[str, Any]:
    """Train for some steps; losses and gradients as bytes, and what proxyd made of the stages.

    :param ranks: of the pipeline; all ranks of the world call this.
    :param wrong_plan: what is announced is larger than what is sent.
    """
    import torch
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    from proxyd_client.torch import pipelining

    dtype = getattr(torch, dtype_name)
    group = pipe_group(backend, ranks, modes)
    if rank not in ranks:
        return {}
    size = len(ranks)
    indexes = stages_of(schedule, ranks.index(rank), size)
    count = size * len(indexes)
    stages = []
    for index in indexes:
        shape = (ROWS, FEATURES)
        kwargs: dict[str, Any] = {}
        if static:
            first = torch.empty(shape, dtype=dtype, requires_grad=index > 0)
            kwargs = {"input_args": first, "output_args": torch.empty(shape, dtype=dtype, requires_grad=True)}
        module = build_stage(index, dtype)
        stages.append(PipelineStage(module, index, count, torch.device("cpu"), group=group, **kwargs))

    def loss_of(output: Any, target: Any) -> Any:
        return torch.nn.functional.mse_loss(output.float(), target.float())

    made = get_schedule_class(schedule)
    job = made(stages[0] if schedule in SINGLE else stages, microbatches, loss_fn=loss_of)
    losses: list[bytes] = []
    if wrong_plan:
        for stage in stages:
            found = pipelining.hints_of(stage)
            assert found is not None
            found._will_send = partial(_twice, found._will_send)  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        batch = torch.randn(ROWS * microbatches, FEATURES, generator=generator).to(dtype)
        target = torch.randn(ROWS * microbatches, FEATURES, generator=generator).to(dtype)
        has_first, has_last = 0 in indexes, count - 1 in indexes
        got: list[Any] = []
        job.step(*((batch,) if has_first else ()), **({"target": target, "losses": got} if has_last else {}))
        losses += [loss.detach().numpy().tobytes() for loss in got]
    gradients = [
        parameter.grad.view(torch.uint8).numpy().tobytes()
        for stage in stages
        for parameter in stage.submod.parameters()
        if parameter.grad is not None
    ]
    hints = [found for stage in stages if (found := pipelining.hints_of(stage)) is not None]
    return {
        "losses": losses,
        "gradients": gradients,
        "attached": len(hints),
        "tags": any(found.tags for found in hints),
        "announced": sum(found.announced for found in hints),
        "fulfilled": sum(found.fulfilled for found in hints),
        "resized": sum(found.resized for found in hints),
        "unsent": sum(found.unsent for found in hints),
    }
