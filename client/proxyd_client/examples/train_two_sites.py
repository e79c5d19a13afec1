"""A small GPT whose halves live at two sites, trained in several ways that take turns in the same two ranks.

    python client/proxyd_client/examples/train_two_sites.py         # both ranks, on an emulated WAN
    proxyd example two-sites                                        # the same
    PROXYD_SOCKET=... torchrun --nnodes 2 --nproc-per-node 1 ... -m proxyd_client.examples.train_two_sites

Ways (``--ways``): torch's own 1F1B over gloo, with cubic and with bbr below it; the same 1F1B through proxyd's agents;
the schedule that proxyd chooses at run time; and that with activations in host memory. Each way has its own copy of the
model, its own optimizer and its own process group; all see the same text. So what differs from one turn to the next is
who carries the bytes, and who says which task comes next.

Every step is checked: losses and gradients have to be those of the whole model in one process, bit by bit.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and "RANK" not in os.environ:  # nobody says which rank this is: it shall be both
    os.execv(sys.executable, [sys.executable, "-m", "proxyd.cli.main", "example", "two-sites", *sys.argv[1:]])

import argparse
import contextlib
import json
import socket
import stat
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import proxyd_client.torch  # noqa: F401 # makes "proxyd" a backend of torch.distributed
from proxyd_client.examples import two_sites_table
from proxyd_client.examples.gpt import Blocks, add_model_arguments, batches, loss_of
from proxyd_client.torch.pipeline import ScheduleRunTime
from proxyd_client.torch.pipeline.compute import Gauge

WARMUPS = 2
"""Steps that are in no figure: torch agrees on shapes, TCP finds its window, the schedule learns what tasks take."""
HOPELESS = 3.0
PATIENCE = 2
"""A way that takes so many times what the fastest one takes stops after so many steps that count: everybody waits for
it, and more steps say nothing new."""
SETTLE_S = 0.2
"""Between turns, so that what is queued of one way doesn't meet the next one's first bytes."""


@dataclass(frozen=True)
class Way:
    """Who carries the bytes, and who says which task comes next."""

    backend: str
    schedule: str = "1f1b"
    congestion_control: str = ""


HOST_BYTES = 1 << 30
"""For activations that wait: more than this model has."""
WAYS = {
    "gloo-cubic": Way("gloo", congestion_control="cubic"),
    "gloo-bbr": Way("gloo", congestion_control="bbr"),
    "1f1b": Way("proxyd"),
    "run-time": Way("proxyd", "run-time"),
    "offload": Way("proxyd", "offload"),
}


@dataclass
class Record:
    """Of one way, on this rank."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Means of the micro-batches', on the last stage."""
    gradients_equal: bool = True
    losses_equal: bool = True


class Halves:
    """Both halves of the model, the same ones each time."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.halves = [Blocks(options, options.layers // 2, first=first, last=not first) for first in (True, False)]

    def optimizer(self, half: int) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.halves[half].parameters(), self.options.learning_rate)


class OneProcess(Halves):
    """The whole model in this process, its sums in the order of the micro-batches: what all ways have to agree with."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._optimizers = [self.optimizer(half) for half in range(2)]

    def step(self, inputs: Any, targets: Any) -> list[Any]:
        """The losses of the micro-batches."""
        count = self.options.microbatches
        losses = []
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for tokens, expected in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = loss_of(self.halves[1](self.halves[0](tokens)), expected)
            loss.backward()
            losses.append(loss.detach())
        for half in self.halves:
            for parameter in half.parameters():
                parameter.grad /= count
        for optimizer in self._optimizers:
            optimizer.step()
        return losses


class Pipeline(Halves):
    """One way: this rank's half, its schedule and its group."""

    def __init__(self, options: argparse.Namespace, way: Way, rank: int) -> None:
        super().__init__(options)
        self.rank, self.model = rank, self.halves[rank]
        before = set(connections())
        group = dist.new_group(backend=way.backend)
        if way.congestion_control:
            use(way.congestion_control, [fd for fd in connections() if fd not in before])
        tokens = torch.zeros(options.sequences, options.context, dtype=torch.long)
        activations = torch.zeros(options.sequences, options.context, options.width, requires_grad=True)
        logits = torch.zeros(options.sequences, options.context, 256, requires_grad=True)
        stage = PipelineStage(
            self.model,
            rank,
            2,
            torch.device("cpu"),
            input_args=(activations if rank else tokens,),
            output_args=(logits if rank else activations,),
            group=group,
        )
        self.schedule: Any
        if way.schedule == "1f1b":
            self.schedule = Schedule1F1B(stage, options.microbatches, loss_of)
        elif way.schedule == "run-time":
            self.schedule = ScheduleRunTime(stage, options.microbatches, loss_of, activations=options.activations)
        else:
            places = max(2, options.activations // 2)  # the others wait in host memory
            self.schedule = ScheduleRunTime(
                stage, options.microbatches, loss_of, activations=places, offload=HOST_BYTES
            )
        self._optimizer = self.optimizer(rank)

    def step(self, inputs: Any, targets: Any) -> list[Any]:
        """The losses of the micro-batches, on the last stage."""
        losses: list[Any] = []
        self._optimizer.zero_grad()
        if self.rank == 0:
            self.schedule.step(inputs, return_outputs=False)
        else:
            self.schedule.step(target=targets, losses=losses, return_outputs=False)
        self._optimizer.step()
        return losses

    def report(self) -> dict[str, Any]:
        """What the schedule says of its last step."""
        if isinstance(self.schedule, Schedule1F1B):
            # It has as many micro-batches under way as there are stages from here to the last.
            under_way = min(self.options.microbatches, 2 - self.rank)
            return {"peak_activation_bytes": under_way * kept_bytes(self.options, self.model, self.rank)}
        said = self.schedule.report
        assert said is not None
        moves = said.offload
        return {
            # With offload it is counted, without it is reckoned: so many micro-batches of so many bytes.
            "peak_activation_bytes": said.peak_bytes
            if moves is None
            else max(said.peak_bytes, moves.device_peak_bytes),
            "moved_out": 0 if moves is None else moves.moved_out,
            "moved_bytes": 0 if moves is None else moves.moved_bytes,
            "waits_seconds": dict(said.waits_s),
            "decision_p50_seconds": said.decision_p50_us / 1e6,
            "decision_p99_seconds": said.decision_p99_us / 1e6,
            "decisions": said.decisions_made,
            "predictions": said.predictions,
            "prediction_error_seconds": said.prediction_error_s,
            "split_backwards": said.split_backwards,
            "whole_backwards": said.whole_backwards,
            "fallback": said.fallback,
        }


def kept_bytes(options: argparse.Namespace, model: Any, rank: int) -> int:
    """What one micro-batch's backward needs of its forward."""
    with Gauge(model) as gauge:
        model(inputs_of(options, rank))
    return int(gauge.nbytes)


def inputs_of(options: argparse.Namespace, rank: int) -> Any:
    """As a stage gets them for one micro-batch."""
    if rank == 0:
        return torch.zeros(options.sequences, options.context, dtype=torch.long)
    return torch.zeros(options.sequences, options.context, options.width, requires_grad=True)


def compute_seconds(options: argparse.Namespace, rank: int, repeats: int = 12) -> float:
    """Forward and backward of one micro-batch on one rank, no communication. The shortest of some: on a busy machine
    all others have waited for a processor too."""
    model, times = Halves(options).halves[rank], []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        output = model(inputs_of(options, rank))
        output.backward(torch.ones_like(output))
        times.append(time.perf_counter() - begin_s)
    return min(times)


def message_bytes(options: argparse.Namespace) -> int:
    """Of one micro-batch's activations, and of their gradients."""
    return int(options.sequences * options.context * options.width * 4)


def connections() -> list[int]:
    """Descriptors of this process's TCP connections to other hosts."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it may have been closed meanwhile, or have no peer
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                inet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if inet and sock.getsockname()[0] != sock.getpeername()[0]:
                    found.append(fd)
    return found


def use(congestion_control: str, descriptors: Sequence[int]) -> None:
    """Give connections a congestion control of the kernel's. Raises OSError where it has none of that name."""
    for fd in descriptors:
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())


def bits(tensors: Sequence[Any]) -> list[bytes]:
    """Of tensors, to compare."""
    return [tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def gradients(model: Any) -> list[bytes]:
    """Of a module."""
    return bits([parameter.grad for parameter in model.parameters()])


def train(options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """All steps of all ways; the figures, the same on both ranks."""
    rank, ways = dist.get_rank(), options.ways
    alone = OneProcess(options)
    pipelines = {name: Pipeline(options, WAYS[name], rank) for name in ways}
    records = {name: Record() for name in ways}
    text = batches(options, options.microbatches * options.sequences, part=0)
    dist.barrier()
    compute = [0.0, 0.0]
    dist.all_gather_object(compute, compute_seconds(options, rank))
    hopeless: set[str] = set()
    for step in range(WARMUPS + options.steps):
        inputs, targets = next(text)
        expected = alone.step(inputs, targets)
        for name, pipeline in pipelines.items():
            record = records[name]
            if name in hopeless:
                continue
            time.sleep(SETTLE_S)
            dist.barrier()
            begin_s = time.perf_counter()
            losses = pipeline.step(inputs, targets)
            took = [0.0, 0.0]
            dist.all_gather_object(took, time.perf_counter() - begin_s)
            record.gradients_equal &= gradients(pipeline.model) == gradients(alone.halves[rank])
            if losses:
                record.losses_equal &= bits(losses) == bits(expected)
                record.losses.append(float(torch.stack(losses).detach().mean()))
            if step >= WARMUPS:
                record.seconds.append(max(took))
            if rank == 0:
                say("turn", step=step, way=name, seconds=max(took), counts=step >= WARMUPS)
        if step == WARMUPS + PATIENCE - 1:
            hopeless = too_slow({name: record.seconds for name, record in records.items()})
    mine = {name: {**vars(records[name]), **pipelines[name].report()} for name in ways}
    both: list[Any] = [None, None]
    dist.all_gather_object(both, mine)
    first, last = both
    return {
        "iterations": options.steps,
        "warmups": WARMUPS,
        "microbatches": options.microbatches,
        "message_bytes": message_bytes(options),
        "compute_seconds": max(compute) * options.microbatches,
        "ways": {
            name: {
                **first[name],
                "iteration_median_seconds": statistics.median(first[name]["seconds"]),
                "losses": last[name]["losses"],
                "losses_equal": last[name]["losses_equal"],
                "gradients_equal": first[name]["gradients_equal"] and last[name]["gradients_equal"],
            }
            for name in ways
        },
    }


def too_slow(seconds: dict[str, list[float]]) -> set[str]:
    """Ways that need not be tried again."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {name for name, median in medians.items() if median > HOPELESS * min(medians.values())}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Checked: a pipeline of two stages needs two layers, and a way has to exist."""
    parser = argparse.ArgumentParser(description="A GPT's halves at two sites, several ways in turns.")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {','.join(WAYS)} (default: all)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each way, after warm-up (default: 6)")
    parser.add_argument("--microbatches", type=int, default=20, help="of a step (default: 20)")
    parser.add_argument("--sequences", type=int, default=8, help="of a micro-batch (default: 8)")
    parser.add_argument("--activations", type=int, default=8, help="held at most by run-time schedules (default: 8)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (default: 3e-3)")
    parser.add_argument("--report", metavar="FILE.json", type=Path, help="write the figures there at the end")
    parser.add_argument("--events", action="store_true", help="JSON lines on stdout, for whoever directs this")
    parser.add_argument(
        "--compute", type=int, choices=(0, 1), help="only say what that rank's micro-batch takes, alone"
    )
    add_model_arguments(parser, width=128, context=64)
    options = parser.parse_args(argv)
    options.ways = [name.strip() for name in options.ways.split(",")]
    if unknown := [name for name in options.ways if name not in WAYS]:
        parser.error(f"there is no way {unknown[0]!r}; known: {', '.join(WAYS)}")
    if options.layers < 2 or options.layers % 2:
        parser.error(f"--layers {options.layers}: both halves need the same number of layers, one at least")
    if min(options.steps, options.sequences) < 1 or options.microbatches < 2:
        parser.error("a step needs two micro-batches of one sequence at least, and there must be one step")
    return options


def main() -> None:
    options = arguments()

    def say(event: str, **fields: Any) -> None:
        if options.events:
            print(json.dumps({"event": event, **fields}), flush=True)
        elif event == "turn":
            print(f"step {fields['step'] + 1}, {fields['way']}: {fields['seconds']:.3f} s", file=sys.stderr, flush=True)

    if options.compute is not None:
        seconds = compute_seconds(options, options.compute)
        print(json.dumps({"seconds_per_microbatch": seconds, "message_bytes": message_bytes(options)}))
        return
    dist.init_process_group("gloo")  # to meet, and to begin each turn together; never used in one
    if dist.get_world_size() != 2:
        raise SystemExit(f"two ranks, one at each site: there are {dist.get_world_size()}")
    figures = train(options, say)
    if dist.get_rank() == 0:
        if options.report is not None:
            options.report.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        if not options.events:
            print(two_sites_table.text(figures))
        say("result", figures=figures)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # torch's own threads of several ranks on one machine would wait for each other.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
