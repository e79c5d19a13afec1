"""The script of several ways in one pair of ranks, on two sites whose link's rate steps under every turn alike."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxyd.cli.cluster import Cluster
from proxyd.cli.scrape import scrape
from proxyd.cli.torch_bench.example import PORT
from proxyd.cli.torch_bench.options import HEADER_BYTES, Line, line_at, rate_steps_of
from proxyd.cli.torch_bench.sites import SITES, TwoSites
from proxyd.core.errors import ProxydError
from proxyd.core.units import parse_rate
from proxyd.wan import RateSteps, Wan
from proxyd.wan.counters import LinkCounters
from proxyd.wan.crew import Crew
from proxyd.wan.topology import module_environment

MODULE = "proxyd_client.examples.train_two_sites"
EVENT_TIMEOUT_S = 180.0
WORLD = 2


def compare(args: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    """Run the script as two ranks. Raises ProxydError if it fails."""
    options = ["--steps", str(args.steps), "--ways", args.ways, *args.script]
    rate_steps_of(args, 1_000_000)  # refuses bad ones before anything starts
    if args.rate:
        rate = parse_rate(args.rate)
    else:
        alone = computation(options)
        rate = int(args.ratio * alone["message_bytes"] / alone["seconds_per_microbatch"] * args.mtu / payload(args.mtu))
        report(
            f"a micro-batch takes {alone['seconds_per_microbatch'] * 1e3:.1f} ms here and sends "
            f"{alone['message_bytes'] / 1e3:.0f} kB: the link gets {rate * 8 / 1e6:.1f} Mbit/s"
        )
    line, steps = line_at(args, rate), rate_steps_of(args, rate)
    with TwoSites(line, 1) as sites, Crew() as crew:
        start(sites, crew, options)
        figures, crossed = follow(crew, Turns(sites.wan, steps), report)
        granted = under_grants(sites.cluster)
        late_s = sites.wan.fidelity().late_p99_ns / 1e9
    for way, counted in crossed.items():
        figures["ways"][way].update(counted)
    carried_s = figures["microbatches"] * figures["message_bytes"] / line.payload_bytes_per_s
    ratio = carried_s / figures["compute_seconds"]
    return {
        "description": describe(line, steps, ratio),
        "line": line.to_json(),
        "rate_steps": steps.to_json() if steps is not None else None,
        "communication_seconds": carried_s,
        "ratio": ratio,
        "emulator_late_p99_seconds": late_s,
        "proxyd": granted,
        **figures,
    }


def payload(mtu: int) -> int:
    """Of a full packet."""
    return mtu - HEADER_BYTES


def describe(line: Line, steps: RateSteps | None, ratio: float) -> str:
    """For the table's head."""
    moves = "constant"
    if steps is not None:
        rates = ", ".join(f"{rate * 8 / 1e6:.1f}" for _, rate in steps.pieces)
        moves = f"stepping through {rates} Mbit/s every {steps.pieces[0][0] / 1e6:.0f} ms"
    return f"{line.describe()}, {moves}; communication / computation = {ratio:.2f}"


def computation(options: Sequence[str]) -> dict[str, Any]:
    """What a micro-batch takes and sends, both ranks computing at once, as they will. Raises ProxydError."""
    environment = {**os.environ, **module_environment(), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, "--compute", str(rank), *options],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(WORLD)
    ]
    answers = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise ProxydError("the training script does not start", why="its words are above")
    return max((json.loads(answer) for answer in answers), key=lambda one: float(one["seconds_per_microbatch"]))


def start(sites: TwoSites, crew: Crew, options: Sequence[str]) -> None:
    """Both ranks, as torchrun would start them. The first one is listened to; the other one dies with it."""
    meeting = {
        "MASTER_ADDR": sites.wan.host(*sites.place(0, WORLD)).address,
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(WORLD),
    }
    for rank in range(WORLD):
        environment = {**sites.environment(rank, WORLD), **meeting, "RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        argv = [sys.executable, "-m", MODULE, "--events", *options]
        crew.start(sites.wan.host(*sites.place(rank, WORLD)), f"rank {rank}", argv, env=environment)


class Turns:
    """What crosses the WAN in each turn. The rate's steps begin anew with each, so all ways see the same link."""

    def __init__(self, wan: Wan, steps: RateSteps | None) -> None:
        self._wan, self._steps = wan, steps
        self._before: Mapping[str, LinkCounters] = wan.counters()
        self.crossed: dict[str, dict[str, int]] = {}

    def ended(self, way: str, counts: bool) -> None:
        """A turn is over; the next one begins a little later."""
        now = self._wan.counters()
        if counts:
            seen = self.crossed.setdefault(way, {"wan_bytes": 0, "dropped_packets": 0})
            for link, counters in now.items():
                added = counters.since(self._before[link])
                seen["wan_bytes"] += added.passed_bytes
                seen["dropped_packets"] += added.dropped_packets
        self._before = now
        if self._steps is not None:
            for src, dst in (SITES, SITES[::-1]):
                self._wan.set_link(src, dst, rates=self._steps)


def follow(crew: Crew, turns: Turns, report: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Listen until the script has its figures. Raises WanError when a rank ends before."""
    deadline_s = time.monotonic() + EVENT_TIMEOUT_S
    while True:
        _, event = crew.next_event(deadline_s - time.monotonic())
        deadline_s = time.monotonic() + EVENT_TIMEOUT_S
        if event["event"] == "result":
            return event["figures"], turns.crossed
        turns.ended(event["way"], bool(event["counts"]))
        report(f"step {event['step'] + 1}, {event['way']}: {event['seconds']:.3f} s")


def under_grants(cluster: Cluster) -> dict[str, float]:
    """How the payload of proxyd's ways crossed, from the daemons' metrics."""
    agents = [scrape(cluster.agent(site).metrics) for site in SITES]
    coordinator = scrape(cluster.coordinator.metrics)

    def total(name: str) -> float:
        return sum(agent.total(name) for agent in agents)

    return {
        "transferred_bytes": total("proxyd_transfer_bytes_total"),
        "granted_bytes": total("proxyd_granted_bytes_total"),
        "unscheduled_bytes": total("proxyd_unscheduled_bytes_total"),
        "fallback_bytes": total("proxyd_fallback_bytes_total"),
        "window_violations": coordinator.total("proxyd_window_violations_total"),
    }
