"""``proxyd simulate faults``: agents and coordinators with crashes, cuts and partitions, seed by seed."""

from __future__ import annotations

import argparse
import time

from proxyd.core.errors import EXIT_FAILED, EXIT_OK, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=1000, help="how many runs (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first run's seed (default: 0)")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--faults", metavar="NAME,NAME", help="of the seed's faults only these; none: without any")
    parser.add_argument("--trace", action="store_true", help="print every event and effect (with --seed)")
    parser.add_argument("--shrink", action="store_true", help="leave faults out of a failing seed while it still fails")
    parser.add_argument("--list", action="store_true", help="print the faults that there are")


def run(args: argparse.Namespace) -> int:
    from proxyd.sim.faults.plan import FAULTS, draw
    from proxyd.sim.faults.runs import play, shrink

    if args.list:
        for name, text in FAULTS.items():
            print(f"{name:<18} {text}")
        return EXIT_OK
    if args.faults is not None and args.seed is None:
        raise ConfigError("--faults needs --seed", why="it picks some of that seed's faults")
    seeds = range(args.first, args.first + args.seeds) if args.seed is None else [args.seed]
    failed = messages = done = events = 0
    began_s = time.monotonic()
    for seed in seeds:
        plan = draw(seed)
        if args.faults is not None:
            plan = plan.only(args.faults.split(","))
        outcome = play(plan, print if args.trace and args.seed is not None else None)
        messages, done, events = messages + outcome.messages, done + outcome.done, events + outcome.events
        if outcome.problem:
            failed += 1
            print((shrink(plan) if args.shrink else outcome).text(), flush=True)
    seconds = time.monotonic() - began_s
    print(f"{len(seeds)} runs, {failed} failed: {messages} messages ({done} done), {events} events, {seconds:.1f} s")
    return EXIT_FAILED if failed else EXIT_OK
