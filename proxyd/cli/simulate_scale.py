"""``proxyd simulate scale``: how many agents, links, transfers and hours the simulator carries (proxyd.sim.scale)."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from proxyd.core.errors import EXIT_FAILED, EXIT_OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("wide", "long"), help="1,000 agents at once, or an hour of 64")
    parser.add_argument("--transfers", type=int, default=100_000, help="of the wide run (default: 100000)")
    parser.add_argument("--seconds", type=int, default=3600, help="simulated, of the long run (default: 3600)")
    parser.add_argument("--seed", type=int, default=1, help="where chance begins (default: 1)")
    parser.add_argument("--out", metavar="FILE", help="write the figures as JSON")


def run(args: argparse.Namespace) -> int:
    from proxyd.sim.scale import ScaleResult, long, wide

    results: list[ScaleResult] = []
    if args.only != "long":
        results.append(wide(transfers=args.transfers, seed=args.seed))
        print(results[-1].text(), flush=True)
    if args.only != "wide":
        results.append(long(seconds=args.seconds, seed=args.seed))
        print(results[-1].text(), flush=True)
    if args.out:
        figures = {one.name: dataclasses.asdict(one) for one in results}
        Path(args.out).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return EXIT_FAILED if any(one.violations for one in results) else EXIT_OK
