"""Suites as commands and as tests: the daemons, the workers, and what came out."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from proxyd.cli.cluster import Cluster, LinkFigures

ROOT = Path(__file__).parents[3]
WORLD_SIZE = 4
"""Of torch's suite: the smallest with two ranks at each of two sites."""
MODES = ("gloo", "proxyd", "opened", "opened-mpi")
GATES = Path(__file__).with_name("gates.json")
"""What the suite's gates skip in each mode, and why; written by ``--write-gates``."""


@contextlib.contextmanager
def agents(ranks: int, sites: int) -> Iterator[list[str]]:
    """The agent's socket of each rank: the first half of them at one site, the others at another if there are two."""
    links = {("a", "b"): LinkFigures(), ("b", "a"): LinkFigures()}
    with Cluster({"a": 1, "b": 1}, links=links) as cluster:
        near, far = cluster.agent("a").socket, cluster.agent("b" if sites == 2 else "a").socket
        yield [near if 2 * rank < ranks else far for rank in range(ranks)]


def _environment(mode: str, sockets: Sequence[str], directory: str) -> dict[str, str]:
    # The name that gates see while torch's module is imported. "opened-mpi" opens what only MPI runs on CPUs.
    backend = {"opened": "gloo", "opened-mpi": "mpi"}.get(mode, mode)
    return {
        **os.environ,
        "BACKEND": backend,
        "WORLD_SIZE": str(WORLD_SIZE),
        "TEMP_DIR": directory,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PROXYD_TEST_MODE": mode,
        "PROXYD_TEST_SOCKETS": ":".join(sockets),
        # A rank that hangs is given up for lost after this long, with its stack; torch's own default is 300.
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",  # gates print sets
    }


def _start(suite: str, names: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[str]:
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.torch.suites.worker", suite, *names],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )


def run(
    suite: str,
    mode: str,
    *,
    sites: int = 1,
    jobs: int = 1,
    only: Sequence[str] = (),
    timeout_s: float = 1200.0,
    log_directory: Path | None = None,
) -> list[dict[str, str]]:
    """Run a suite, or those of its tests that are named; each test's result, sorted by name.

    A worker that dies or is out of time leaves its tests as failed, with the end of what it printed.
    """
    ranks = WORLD_SIZE if suite == "distributed" else 3
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="proxyd-suite-"))
        logs = log_directory or Path(directory)
        logs.mkdir(parents=True, exist_ok=True)
        sockets = [] if mode == "gloo" else stack.enter_context(agents(ranks, sites))
        environment = _environment(mode, sockets, directory)
        chosen = list(only) or names(suite)
        results: dict[str, dict[str, str]] = {}
        workers = []
        for job in range(jobs):
            mine = chosen[job::jobs]
            log = logs / f"{suite}-{mode}-{job}.txt"
            workers.append((mine, log, _start(suite, mine, environment, log)))
        for mine, log, worker in workers:
            try:
                output, _ = worker.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(worker.pid, signal.SIGKILL)
                output, _ = worker.communicate()
            found = {result["name"]: result for result in map(json.loads, output.splitlines())}
            for name in mine:
                words = f"no result; the worker said\n{log.read_text()[-3000:]}"
                lost = {"name": name, "outcome": "failed", "why": words}
                results[name] = found.get(name, lost)
    return [results[name] for name in sorted(results)]


NAMES_ASSERTED = frozenset(
    f"test_{what}_{profiler}_profiler"
    for what in ("isend", "send_recv", "send_recv_any_source", "send_recv_with_tag")
    for profiler in ("autograd", "torch")
)
"""What fails under the name "gloo": it looks for events called ``gloo:send`` and ``gloo:recv`` in a profile."""


@functools.cache
def names(suite: str = "distributed") -> tuple[str, ...]:
    """The tests of a suite; of torch's, those that need no DistributedDataParallel."""
    with tempfile.TemporaryDirectory(prefix="proxyd-suite-") as directory:
        environment = _environment("gloo", ("none",) * 3, directory)
        with _start(suite, (), environment, Path(directory, "names.txt")) as worker:
            return tuple(worker.communicate(timeout=120.0)[0].split())


def gates() -> dict[str, dict[str, str]]:
    """The checked-in list: the reason of each test that is skipped, by mode."""
    listed: dict[str, dict[str, list[str]]] = json.loads(GATES.read_text()) if GATES.exists() else {}
    return {mode: {name: why for why, names in by.items() for name in names} for mode, by in listed.items()}


def write_gates(mode: str, results: Sequence[dict[str, str]]) -> None:
    """What was skipped in this mode, and why, into the list."""
    skipped = {one["name"]: one["why"] for one in results if one["outcome"] == "skipped"}
    listed: dict[str, dict[str, list[str]]] = {}
    for known, reasons in {**gates(), mode: skipped}.items():
        for name in sorted(reasons):
            listed.setdefault(known, {}).setdefault(reasons[name], []).append(name)
    GATES.write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n")
