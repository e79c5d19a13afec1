"""What it costs to split a backward into B and W: the table of docs/scheduling.md, "On real modules".

    python tools/split_cost.py

A stage of four transformer blocks, one thread, both ways in turns; processor time, so that neighbours on the machine
don't count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

ROUNDS = 15
SIZES = ((64, 4, 64), (128, 4, 64), (256, 8, 64), (512, 8, 128))
"""Width, sequences, tokens."""


def timed_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time of a call, and what it gave."""
    begun_s = time.process_time()
    result = work()
    return 1e3 * (time.process_time() - begun_s), result


def measure(width: int, sequences: int, tokens: int) -> None:
    """One row."""
    stage = nn.Sequential(
        *[
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(4)
        ]
    )
    values, gradient = torch.randn(sequences, tokens, width), torch.randn(sequences, tokens, width)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = values.clone().requires_grad_()
        return leaf, stage(leaf)

    took: dict[str, list[float]] = {"whole": [], "B": [], "W": []}
    for _ in range(ROUNDS):
        leaf, output = forward()
        took["whole"].append(timed_ms(lambda: stage_backward((output,), (gradient,), [leaf]))[0])  # noqa: B023
        leaf, output = forward()
        b_ms, (_, groups) = timed_ms(
            lambda: stage_backward_input([output], [gradient], [leaf], stage.parameters())  # noqa: B023
        )
        took["B"].append(b_ms)
        took["W"].append(timed_ms(lambda: stage_backward_weight(stage.parameters(), groups))[0])  # noqa: B023
        stage.zero_grad()
    whole, b, w = (statistics.median(took[name]) for name in ("whole", "B", "W"))
    print(f"| {width} | {whole:.1f} ms | {b:.1f} + {w:.1f} ms | {100 * ((b + w) / whole - 1):+.0f} % |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    print("| width | whole | B + W | split costs |\n|---|---|---|---|")
    for size in SIZES:
        measure(*size)
