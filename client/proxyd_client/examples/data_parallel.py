"""Data parallel across two sites: every rank holds the whole GPT, DistributedDataParallel sums up the gradients.

    proxyd example data-parallel                # on an emulated WAN, side by side with gloo
    torchrun --nproc-per-node 4 -m proxyd_client.examples.data_parallel --backend gloo
    PROXYD_SOCKET=... torchrun ... -m proxyd_client.examples.data_parallel --backend proxyd

Through proxyd the gradients are summed inside each site first, so that the WAN carries them once per site and not once
per rank.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import proxyd_client.torch  # noqa: F401 # makes "proxyd" a backend of torch.distributed
from proxyd_client.examples.gpt import Blocks, add_model_arguments, batches, loss_of
from proxyd_client.examples.report import Report, add_training_arguments


def main() -> None:
    parser = argparse.ArgumentParser(description="A GPT, data parallel across two sites.")
    add_training_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--sequences", type=int, default=8, help="of a step and rank (default: 8)")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    # The only line that says who carries the bytes.
    dist.init_process_group(options.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Blocks(options, options.layers, first=True, last=True))
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
    text = batches(options, options.sequences, part=rank)
    report = Report(options, options.sequences * options.context * world, speaks=rank == 0)

    for _ in range(options.steps):
        inputs, targets = next(text)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        report.step(float(loss.detach()))
    report.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    # torch's own threads of several ranks on one machine would wait for each other.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
