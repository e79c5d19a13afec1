#!/usr/bin/env python3
"""What checksums, acknowledgements and tokens cost on `proxyd bench relay`: the row "overhead" of docs/reliability.md.

    tools/overhead.py                        all three, as it is and changed in turns (some 10 minutes)
    tools/overhead.py checksums --turns 30

None of them can be switched off in proxyd, so a copy of the source is changed and runs in turns with one that isn't:

checksums           the copy neither computes nor checks those of chunks
acknowledgements    the copy sends each of them twice (without, no sender would ever be done); the second one is ignored
tokens              the copy's coordinator and agents prove a token to each other; `bench relay` has none by itself

Says, for each, the way *with* it over the one without: speed, processor time, latency; medians and quartiles of pairs.
The relay's speed is taken over plain TCP's of the same run, because the machine has slow minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BENCH = "import sys; from proxyd.cli.main import main; sys.exit(main(sys.argv[1:]))"


class Change(NamedTuple):
    """One place of the source."""

    path: str
    old: str
    new: str


class Feature(NamedTuple):
    """What is measured."""

    changes: tuple[Change, ...]
    present_in_copy: bool
    """Whether the changed copy has it (once more), rather than the source as it is."""


FEATURES = {
    "checksums": Feature(
        (
            Change("proxyd/agent/streams.py", "xxhash.xxh3_64_intdigest(payload)", "0"),
            Change("proxyd/agent/streams.py", "self._hash.update(target[: min(got, rest)])", "pass"),
            Change(
                "proxyd/wire/peer.py",
                "Header(DATA_TYPE, 0, ChecksumAlgorithm.XXH3_64, length",
                "Header(DATA_TYPE, 0, ChecksumAlgorithm.NONE, length",
            ),
        ),
        present_in_copy=False,
    ),
    "acknowledgements": Feature(
        (
            Change(
                "proxyd/core/receiving.py",
                "        self._answer(incoming.peer, incoming.transfer, wire.Ack(incoming.nbytes, span_ns))\n",
                "        self._answer(incoming.peer, incoming.transfer, wire.Ack(incoming.nbytes, span_ns))\n" * 2,
            ),
        ),
        present_in_copy=True,
    ),
    "tokens": Feature(
        (
            Change(
                "proxyd/cli/bench_relay.py",
                'with Cluster({"a": 1, "b": 1}, links=links, each_agent=each) as cluster:',
                '(Path(scratch) / "token").write_text("ab" * 32 + "\\n")\n'
                '        (Path(scratch) / "token").chmod(0o600)\n'
                '        token = {"token_file": f"{scratch}/token"}\n'
                '        with Cluster({"a": 1, "b": 1}, links=links, each_agent=each, coordinator=token, agent=token)'
                " as cluster:",
            ),
        ),
        present_in_copy=True,
    ),
}


class Figures(NamedTuple):
    """Of one run."""

    speed: float
    """Of the relay over plain TCP."""
    cpu_s_per_gb: float
    p50_us: float


def copy_of(changes: tuple[Change, ...], into: Path) -> Path:
    """The source, changed. Raises SystemExit where a place isn't there, or more than once: the source has moved on."""
    shutil.copytree(ROOT / "proxyd", into / "proxyd", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "client" / "proxyd_client", into / "proxyd_client", ignore=shutil.ignore_patterns("__pycache__")
    )
    for path, old, new in changes:
        text = (into / path).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"{path} has {text.count(old)} places like {old.strip()!r}, 1 is expected: adapt FEATURES")
        (into / path).write_text(text.replace(old, new), encoding="utf-8")
    return into


def run(tree: Path, arguments: list[str]) -> Figures:
    """`proxyd bench relay` of a tree; all its daemons and trainers are of that tree, too."""
    out = tree / "relay.json"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", BENCH, "bench", "relay", *arguments, "--out", str(out)]
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    told = json.loads(out.read_text(encoding="utf-8"))
    return Figures(told["ratio_to_direct"], told["relay_cpu_s_per_gb"], told["latency_1kib_us"]["p50"])


def measure(name: str, turns: int, arguments: list[str]) -> None:
    """One feature."""
    feature = FEATURES[name]
    with tempfile.TemporaryDirectory(prefix="proxyd-overhead-") as scratch:
        plain = copy_of((), Path(scratch, "as-it-is"))
        changed = copy_of(feature.changes, Path(scratch, "changed"))
        pairs: list[tuple[Figures, Figures]] = []
        for turn in range(turns):
            # The second of two runs meets another machine: each way goes first as often.
            order = (plain, changed) if turn % 2 else (changed, plain)
            figures = {tree: run(tree, arguments) for tree in order}
            with_it, without = (changed, plain) if feature.present_in_copy else (plain, changed)
            pairs.append((figures[with_it], figures[without]))
    for field, label in (("speed", "speed"), ("cpu_s_per_gb", "processor time"), ("p50_us", "1 KiB p50")):
        ratios = [getattr(with_it, field) / getattr(without, field) for with_it, without in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        print(f"{name:18} {label:15} {middle:5.3f} times (quartiles {low:.3f} and {high:.3f})", flush=True)


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="*", metavar="FEATURE", help=f"of {', '.join(FEATURES)}; all without any")
    parser.add_argument("--turns", type=int, default=12, help="pairs of runs (default: 12)")
    parser.add_argument("--rounds", default="3", help="of each run (default: 3)")
    parser.add_argument("--messages", default="8", help="of 64 MiB, per way and round (default: 8)")
    args = parser.parse_args()
    if unknown := set(args.features) - set(FEATURES):
        parser.error(f"no such feature: {', '.join(sorted(unknown))}; there are {', '.join(FEATURES)}")
    if args.turns < 2:
        parser.error("--turns must be 2 at least: quartiles need more than one")
    for name in args.features or FEATURES:
        measure(name, args.turns, ["--rounds", args.rounds, "--messages", args.messages])
    return 0


if __name__ == "__main__":
    sys.exit(main())
