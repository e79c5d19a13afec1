"""The client's example scripts on two sites: the same command for every way, one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from proxyd.cli.torch_bench.options import WAYS, Line
from proxyd.cli.torch_bench.sites import TwoSites
from proxyd.core.errors import ProxydError

PORT = 29_500
"""Of the ranks' meeting place, on rank 0's host; each way takes the next one."""
TIMEOUT_S = 300.0
LOG_TAIL_CHARACTERS = 2000


def compare(
    module: str,
    line: Line,
    ranks_per_site: int,
    options: Sequence[str],
    ways: Sequence[str],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Run ``python -m MODULE OPTIONS`` on every rank, once per way. Raises ProxydError if one fails."""
    world, results = 2 * ranks_per_site, {}
    with TwoSites(line, ranks_per_site) as sites:
        for number, way in enumerate(ways):
            report(f"{way}, {world} ranks ...")
            backend, control = WAYS[way]
            sites.wan.set_congestion_control(control)
            before = sites.wan.counters()
            file = sites.directory / f"report-{number}.json"
            argv = [sys.executable, "-m", module, "--backend", backend, "--report", str(file), *options]
            meeting = {
                "MASTER_ADDR": sites.wan.host(*sites.place(0, world)).address,
                "MASTER_PORT": str(PORT + number),
                "WORLD_SIZE": str(world),
            }
            train(sites, argv, meeting, world)
            figures = json.loads(file.read_text(encoding="utf-8"))
            figures["wan_bytes"], figures["dropped_packets"] = sites.crossed(before)
            results[way] = figures
        late_s = sites.wan.fidelity().late_p99_ns / 1e9
    return {
        "line": line.to_json(),
        "ranks_per_site": ranks_per_site,
        "emulator_late_p99_seconds": late_s,
        "ways": results,
    }


def train(sites: TwoSites, argv: Sequence[str], meeting: Mapping[str, str], world: int) -> None:
    """All ranks to their end, as torchrun would start them."""
    processes: list[subprocess.Popen[bytes]] = []
    logs = [sites.directory / f"rank-{rank}.log" for rank in range(world)]
    try:
        for rank, log in enumerate(logs):
            environment = {**sites.environment(rank, world), **meeting, "RANK": str(rank)}
            with log.open("wb") as output:
                host = sites.wan.host(*sites.place(rank, world))
                processes.append(host.popen(argv, env=environment, stdout=output, stderr=output))
        deadline_s = time.monotonic() + TIMEOUT_S
        while living := [process for process in processes if process.poll() is None]:
            failed = [rank for rank, process in enumerate(processes) if process.returncode]
            if failed or time.monotonic() > deadline_s:
                raise ProxydError(
                    f"rank {failed[0]} ended with status {processes[failed[0]].returncode}"
                    if failed
                    else f"{len(living)} of {world} ranks still train after {TIMEOUT_S:g} s",
                    why=last_words(logs[failed[0] if failed else 0]),
                )
            time.sleep(0.05)
        if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
            raise ProxydError(
                f"rank {failed[0]} ended with status {processes[failed[0]].returncode}",
                why=last_words(logs[failed[0]]),
            )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def last_words(log: Path) -> str:
    """The end of what a rank said."""
    return log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:].strip()
