"""Fixed orders in the engine at a constant delay and without a network: what public packages can be compared with."""

from __future__ import annotations

from collections.abc import Sequence

from proxyd.sim.pipeline.engine import Engine, Plant, StepResult
from proxyd.sim.pipeline.model import PipelineModel
from proxyd.sim.pipeline.wan import SerialWan
from proxyd_client.schedule import Order, Stage, Task, fixed
from proxyd_client.schedule.policy import peak_activations

Durations = tuple[int, int, int]
"""Of F, B and W of each stage, in ns."""


def step(rows: Sequence[Sequence[Task]], durations: Durations, delay_ns: int = 0, *, fused: bool = False) -> StepResult:
    """One step of workers with these orders; every way from one worker to another takes so long."""
    count = 1 + max(task.stage for row in rows for task in row)
    batches = 1 + max(task.micro_batch for row in rows for task in row)
    stages = tuple(Stage(index, index == 0, index == count - 1, *durations) for index in range(count))
    made = [Order(tuple(row), peak_activations(row)) for row in rows]
    held = tuple(order.peak_activations for order in made)
    placed = tuple(tuple(sorted({task.stage for task in row})) for row in rows)
    model = PipelineModel(stages, ("a",) * count, 1, batches, 1, {}, activations=max(held), local_ns=delay_ns)
    plant = Plant(placed, lambda place, worker: fixed(made[place], worker), held, fused=fused)
    return Engine(model, plant, SerialWan(model), stages).run()
