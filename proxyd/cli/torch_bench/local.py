"""Two ranks on one host: what a tensor's way through shared memory and an agent costs, beside gloo's loopback TCP."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from proxyd.cli.cluster import Cluster
from proxyd.cli.demo.net import LocalPlace
from proxyd.cli.torch_bench.sites import Ranks, quantile
from proxyd.wan.topology import module_environment

MESSAGE_BYTES = 64 << 20
PING_BYTES = 4 << 10
ELEMENT_BYTES = 4
LOCAL_WAYS = ("gloo", "proxyd")


def measure(rounds: int, count: int, pings: int, report: Callable[[str], None]) -> dict[str, Any]:
    """``rounds`` of ``count`` messages each way, taking turns, and round trips of a small tensor."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in LOCAL_WAYS}
    times_us: dict[str, list[float]] = {way: [] for way in LOCAL_WAYS}
    with (
        tempfile.TemporaryDirectory(prefix="proxyd-torch-") as scratch,
        Cluster({"a": 1}, log_level="warning") as cluster,
    ):
        environment = {
            **module_environment(),
            "PROXYD_SOCKET": cluster.agent("a").socket,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        launches = [(LocalPlace(), environment)] * 2
        daemons = [member.pid for member in cluster.members]
        with Ranks(launches, {"store": str(Path(scratch) / "store"), "pipelines": 0}) as ranks:
            for way in LOCAL_WAYS:
                ranks.ask("open", way=way, backend=way)
            for number in range(rounds + 1):
                for way in LOCAL_WAYS:
                    before_s = cpu_seconds(daemons)
                    # The first round only touches all memory.
                    answers = ranks.ask("bulk", way=way, elements=MESSAGE_BYTES // ELEMENT_BYTES, count=count)
                    daemons_s = cpu_seconds(daemons) - before_s
                    elapsed_s = (answers[1]["end_ns"] - answers[0]["at_ns"]) / 1e9
                    giga = count * MESSAGE_BYTES / 1e9
                    one = {
                        "gb_per_s": giga / elapsed_s,
                        "cpu_s_per_gb": (sum(answer["cpu_s"] for answer in answers) + daemons_s) / giga,
                    }
                    report(f"{way} {number}/{rounds}: {one['gb_per_s']:.2f} GB/s, {one['cpu_s_per_gb']:.2f} CPU s/GB")
                    asked = ranks.ask("pings", way=way, elements=PING_BYTES // ELEMENT_BYTES, count=pings)
                    if number:
                        runs[way].append(one)
                        times_us[way] += [value / 1e3 for value in asked[0]["times_ns"]]
    return {
        "message_bytes": MESSAGE_BYTES,
        "ping_bytes": PING_BYTES,
        "ways": {
            way: {
                "gb_per_s": statistics.median(run["gb_per_s"] for run in runs[way]),
                "cpu_s_per_gb": statistics.median(run["cpu_s_per_gb"] for run in runs[way]),
                "ping_p50_us": quantile(times_us[way], 0.5),
                "ping_p99_us": quantile(times_us[way], 0.99),
                "rounds": runs[way],
            }
            for way in LOCAL_WAYS
        },
    }


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time that living processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
