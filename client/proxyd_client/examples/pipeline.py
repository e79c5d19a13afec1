"""A small GPT whose two halves live at two sites, trained with torch's own pipeline schedules.

    proxyd example pipeline                     # on an emulated WAN, side by side with gloo
    torchrun --nproc-per-node 4 -m proxyd_client.examples.pipeline --backend gloo
    PROXYD_SOCKET=... torchrun ... -m proxyd_client.examples.pipeline --backend proxyd

Half of the ranks hold the first half of the model, the others the second; rank ``i`` and rank ``i + half`` are one
pipeline. The pipelines see different text and average their gradients, each stage within its own site. Across the WAN
go activations and their gradients, nothing else.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import proxyd_client.torch  # noqa: F401 # makes "proxyd" a backend of torch.distributed
from proxyd_client.examples.gpt import Blocks, add_model_arguments, batches, loss_of
from proxyd_client.examples.report import Report, add_training_arguments

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def main() -> None:
    parser = argparse.ArgumentParser(description="A GPT's two halves at two sites.")
    add_training_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="torch's (default: 1f1b)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--sequences", type=int, default=8, help="of a micro-batch (default: 8)")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    # The only line that says who carries the bytes.
    dist.init_process_group(options.backend)
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    stage, pipeline = rank // half, rank % half
    pairs = [dist.new_group([first, first + half]) for first in range(half)]
    replicas = [dist.new_group(range(site * half, (site + 1) * half)) for site in range(2)]

    # Every rank makes both halves, so that all pipelines start with the same weights.
    halves = [Blocks(options, options.layers // 2, first=first, last=not first) for first in (True, False)]
    model = halves[stage]
    tokens = torch.zeros(options.sequences, options.context, dtype=torch.long)
    activations = torch.zeros(options.sequences, options.context, options.width, requires_grad=True)
    logits = torch.zeros(options.sequences, options.context, 256, requires_grad=True)
    schedule = SCHEDULES[options.schedule](
        PipelineStage(
            model,
            stage,
            2,
            torch.device("cpu"),
            input_args=(activations if stage else tokens,),
            output_args=(logits if stage else activations,),
            group=pairs[pipeline],
        ),
        options.microbatches,
        loss_of,
    )
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
    sequences = options.microbatches * options.sequences
    text = batches(options, sequences, part=pipeline)
    report = Report(options, sequences * options.context * half, speaks=rank == half)

    for _ in range(options.steps):
        inputs, targets = next(text)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if stage == 0:
            schedule.step(inputs, return_outputs=False)
        else:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        average(model, replicas[stage], half)
        optimizer.step()
        report.step(float(torch.stack(losses).mean()) if losses else 0.0)
    report.close()
    dist.destroy_process_group()


def average(model: torch.nn.Module, group: dist.ProcessGroup, members: int) -> None:
    """Of the replicas' gradients, in one message."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= members
    for gradient, mean in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


if __name__ == "__main__":
    # torch's own threads of several ranks on one machine would wait for each other.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
