"""``proxyd simulate targets``: what a live link must show, run by run with its bounds (:mod:`proxyd.sim.targets`)."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from proxyd.core.errors import EXIT_FAILED, EXIT_OK
from proxyd.core.units import NS_PER_S, parse_duration, parse_rate

TRACES = ("constant", "calm", "moderate", "drift", "wild", "halves", "doubles")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", action="append", choices=TRACES, help="only this one; may be given again")
    parser.add_argument("--rate", default="1Gbit", metavar="RATE", help="(default: 1Gbit)")
    parser.add_argument("--rtt", default="60ms", metavar="TIME", help="(default: 60ms)")
    parser.add_argument("--senders", type=int, default=8, help="(default: 8)")
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated, of each run (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="the first one (default: 1)")
    parser.add_argument("--seeds", type=int, default=1, help="so many, from --seed on (default: 1)")
    parser.add_argument("--out", metavar="FILE", help="write the table as JSON")


def run(args: argparse.Namespace) -> int:
    from proxyd.sim.targets import Target, TargetLink, run_targets

    link = TargetLink(parse_rate(args.rate), parse_duration(args.rtt), args.senders, round(args.seconds * NS_PER_S))
    targets: list[Target] = []
    for found in run_targets(link, range(args.seed, args.seed + args.seeds), tuple(args.trace or ())):
        targets += found
        print("\n".join(one.text() for one in found), flush=True)
    missed = sum(not one.met for one in targets)
    print(f"{len(targets) - missed} of {len(targets)} bounds hold")
    if args.out:
        table = [{**dataclasses.asdict(one), "met": one.met} for one in targets]
        Path(args.out).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return EXIT_FAILED if missed else EXIT_OK
