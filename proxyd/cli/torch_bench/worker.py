"""One rank of a PyTorch benchmark: does what its director says, in the process groups of the way that is named.

    python -m proxyd.cli.torch_bench.worker ARGS        ARGS: JSON, {"rank", "world", "store", "pipelines"}

Commands come as JSON lines on stdin, events leave as JSON lines on stdout; times are CLOCK_MONOTONIC, which all
processes of one machine share::

    -> {"event": "ready"}
    {"op": "open", "way", "backend"}        -> {"controls": [...]}: of the new TCP connections to the other site
    {"op": "pipeline", "way", "spec"}       -> {"end_ns", "losses", "digest", "sends", "arrivals"}
    {"op": "compute", "spec"}               -> {"seconds"}: a stage's computation alone
    {"op": "schedule", "way", "spec", "schedule"}   -> {"end_ns", "losses", "digest", "report"}
    {"op": "schedule_alone", "spec"}        -> {"seconds", "message_bytes", "losses", "digest"}
    {"op": "fill", "elements"}, {"op": "allreduce", "way"}, {"op": "check", "elements"}
                                            -> {}, {"end_ns"}, {"right"}
    {"op": "bulk", "way", "elements", "count"}      -> {"end_ns", "cpu_s"}
    {"op": "pings", "way", "elements", "count"}     -> {"times_ns"}: of round trips

Every command names a moment ``at_ns`` at which all ranks begin.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from proxyd.cli.torch_bench import schedule_stages, stages


def say(**event: Any) -> None:
    """One event, in one write."""
    os.write(1, json.dumps(event).encode() + b"\n")


def digest(tensors: list[Any]) -> str:
    """Of the bytes of contiguous tensors, in order."""
    hasher = xxhash.xxh3_64()
    for tensor in tensors:
        hasher.update(tensor.detach().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def tcp_controls() -> dict[int, str]:
    """Congestion control of this process's TCP connections to another site, by descriptor."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as sock:
            if sock.family == socket.AF_INET:
                # A site is a /24.
                own, peer = (name[0].rpartition(".")[0] for name in (sock.getsockname(), sock.getpeername()))
                if own != peer:
                    control = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                    found[int(fd)] = control.rstrip(b"\0").decode()
    return found


class Rank:
    """This process: its groups by way."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.rank: int = args["rank"]
        self.world: int = args["world"]
        self.pipelines: int = args["pipelines"]
        torch.set_num_threads(1)
        # The meeting place; never used for anything that is measured.
        dist.init_process_group("gloo", init_method=f"file://{args['store']}", rank=self.rank, world_size=self.world)
        self.groups: dict[str, Any] = {}
        self.pairs: dict[str, Any] = {}
        self._benches: dict[tuple[str, str], stages.PipelineBench] = {}
        self._schedules: dict[tuple[str, str], schedule_stages.ScheduleBench] = {}
        self._tensor: Any = None

    def open(self, way: str, backend: str) -> dict[str, Any]:
        """Groups of a way: all ranks, and one pair per pipeline, its first stage at site a and its second at b."""
        if backend == "proxyd":
            import proxyd_client.torch  # noqa: F401 # registers the backend
        before = set(tcp_controls())
        self.groups[way] = dist.new_group(backend=backend)
        for first in range(self.pipelines):
            ranks = [first, first + self.world // 2]
            pair = dist.new_group(ranks, backend=backend)
            if self.rank in ranks:
                self.pairs[way] = pair
        return {"controls": sorted(control for fd, control in tcp_controls().items() if fd not in before)}

    def pipeline(self, way: str, spec: dict[str, Any]) -> dict[str, Any]:
        """One iteration."""
        bench = self._bench(way, spec)
        return bench.iterate(digest)

    def _bench(self, way: str, spec: dict[str, Any]) -> stages.PipelineBench:
        key = (way, json.dumps(spec, sort_keys=True))
        if key not in self._benches:
            stage = self.rank // (self.world // 2)
            pipeline = self.rank % (self.world // 2)
            self._benches[key] = stages.PipelineBench(spec, self.pairs.get(way), stage, pipeline)
        return self._benches[key]

    def compute(self, spec: dict[str, Any]) -> dict[str, Any]:
        """What a stage's computation of one iteration takes without any communication, all ranks at once."""
        return {"seconds": stages.computation_seconds(spec)}

    def schedule(self, way: str, spec: dict[str, Any], schedule: str) -> dict[str, Any]:
        """One iteration of a pipeline over all ranks."""
        key = (way, json.dumps(spec, sort_keys=True))
        if key not in self._schedules:
            bench = schedule_stages.ScheduleBench(spec, schedule, self.groups[way], self.rank)
            self._schedules[key] = bench
        return self._schedules[key].iterate(digest)

    def schedule_alone(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The same without communication: what it takes, and what it gives."""
        return schedule_stages.alone(spec, self.rank, digest)

    def fill(self, elements: int) -> dict[str, Any]:
        """Whole numbers to sum up: exact in any order."""
        self._tensor = torch.arange(elements, dtype=torch.float32).remainder_(1000).add_(self.rank)
        return {}

    def allreduce(self, way: str) -> dict[str, Any]:
        """The sum over all ranks of what was filled."""
        dist.all_reduce(self._tensor, group=self.groups[way])
        return {"end_ns": time.monotonic_ns()}

    def check(self, elements: int) -> dict[str, Any]:
        """Whether the sum is right."""
        expected = torch.arange(elements, dtype=torch.float32).remainder_(1000).mul_(self.world)
        expected.add_(self.world * (self.world - 1) // 2)
        return {"right": bool(torch.equal(self._tensor, expected))}

    def bulk(self, way: str, elements: int, count: int) -> dict[str, Any]:
        """Rank 0 sends to rank 1, blocking calls; the receiver's last byte ends the clock."""
        cpu_s = processor_s()
        if self._tensor is None or self._tensor.numel() != elements:
            self._tensor = torch.full((elements,), float(self.rank))
        for _ in range(count):
            if self.rank == 0:
                dist.send(self._tensor, group=self.groups[way], group_dst=1)
            else:
                dist.recv(self._tensor, group=self.groups[way], group_src=0)
        return {"end_ns": time.monotonic_ns(), "cpu_s": processor_s() - cpu_s}

    def pings(self, way: str, elements: int, count: int) -> dict[str, Any]:
        """Round trips of a small tensor, there and back."""
        tensor, times_ns = torch.zeros(elements), []
        for _ in range(count):
            begin_ns = time.monotonic_ns()
            if self.rank == 0:
                dist.send(tensor, group=self.groups[way], group_dst=1)
                dist.recv(tensor, group=self.groups[way], group_src=1)
            else:
                dist.recv(tensor, group=self.groups[way], group_src=0)
                dist.send(tensor, group=self.groups[way], group_dst=0)
            times_ns.append(time.monotonic_ns() - begin_ns)
        return {"times_ns": times_ns}


def processor_s() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Obey until stdin ends."""
    rank = Rank(json.loads(sys.argv[1]))
    say(event="ready", rank=rank.rank)
    for line in sys.stdin:
        command = json.loads(line)
        op, at_ns = command.pop("op"), command.pop("at_ns")
        stages.sleep_until(at_ns)
        answer = getattr(rank, op)(**command)
        say(event="done", rank=rank.rank, **answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
