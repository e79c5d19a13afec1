"""One sum over all ranks of two sites: how long it takes, and what crosses the WAN for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from proxyd.cli.torch_bench.options import WAYS, Line
from proxyd.cli.torch_bench.sites import SETTLE_S, TwoSites
from proxyd.core.errors import ProxydError

ELEMENT_BYTES = 4
WARMUPS = 1


def measure(
    line: Line,
    ranks_per_site: int,
    sizes: Sequence[int],
    rounds: int,
    ways: Sequence[str],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """All ways and sizes in turns, on one WAN, the ranks of a site on one host. Raises ProxydError for a wrong sum."""
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {size: {way: [] for way in ways} for size in sizes}
    with TwoSites(line, 1) as sites, sites.ranks(2 * ranks_per_site, pipelines=0) as ranks:
        for way in ways:
            sites.open_way(ranks, way, *WAYS[way])
        for number in range(-WARMUPS, rounds):
            for size in sizes:
                for way in ways:
                    elements = size // ELEMENT_BYTES
                    ranks.ask("fill", elements=elements)
                    before = sites.wan.counters()
                    answers = ranks.ask("allreduce", way=way)
                    time.sleep(SETTLE_S)
                    crossed, dropped = sites.crossed(before)
                    if not all(answer["right"] for answer in ranks.ask("check", elements=elements)):
                        raise ProxydError(f"{way}: the sum of {size} bytes is wrong", next_step="Report this")
                    seconds = (max(answer["end_ns"] for answer in answers) - answers[0]["at_ns"]) / 1e9
                    report(f"{size >> 20} MiB, {way} {number + 1}/{rounds}: {seconds:.3f} s, {crossed / 1e6:.1f} MB")
                    if number >= 0:
                        one = {"seconds": seconds, "wan_bytes": crossed, "dropped_packets": dropped}
                        runs[size][way].append(one)
        late_s = sites.wan.fidelity().late_p99_ns / 1e9
    return {
        "line": line.to_json(),
        "ranks_per_site": ranks_per_site,
        "emulator_late_p99_seconds": late_s,
        "sizes": [
            {"bytes": size, "ways": {way: figures(seen) for way, seen in by_way.items()}}
            for size, by_way in runs.items()
        ],
    }


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one way and size."""
    return {
        "seconds": [run["seconds"] for run in runs],
        "median_seconds": statistics.median(run["seconds"] for run in runs),
        "wan_bytes": statistics.median(run["wan_bytes"] for run in runs),
        "dropped_packets": statistics.median(run["dropped_packets"] for run in runs),
    }
