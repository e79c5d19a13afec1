"""``proxyd bench torch-schedule``: the schedule that is chosen at run time, beside 1F1B, on a link whose rate steps.

What is measured, and how: docs/pytorch.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd.core.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from proxyd.cli.torch_bench.schedule import Scenario

RATE = "200Mbit"
SWEPT_RTTS_NS = (5_000_000, 60_000_000)
SWEPT = {2: [(0.25, True), (0.5, False), (0.5, True), (1.0, False), (1.0, True), (2.0, True)], 4: [(1.0, True)]}
"""By stages: communication / computation, and whether the rate steps."""
SWEPT_WAYS = "1f1b,run-time"
KNOWN = ("gloo-cubic", "gloo-bbr", "1f1b", "run-time", "few", "offload")
DEFAULT = tuple(way for way in KNOWN if way != "few")
"""``few``: the schedule at run time with 60 % of the activations, as ``offload`` has them, and nothing outside."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from proxyd.cli.torch_bench.options import add_line_arguments, add_step_arguments

    parser.add_argument("--ratio", type=float, default=1.0, help="communication / computation (default: 1)")
    parser.add_argument("--stages", type=int, default=2, help="half of them at each site (default: 2)")
    parser.add_argument("--microbatches", type=int, default=16, help="of an iteration (default: 16)")
    parser.add_argument("--activations", type=int, default=8, help="held on each device at most (default: 8)")
    parser.add_argument("--task", help="what F, B and W take each (default: 20ms; 10ms in a sweep)")
    parser.add_argument("--real", action="store_true", help="layers that compute, in place of tasks that wait")
    parser.add_argument("--iterations", type=int, help="of each way, after two (default: 6; 4 in a sweep)")
    parser.add_argument("--ways", help=f"some of {','.join(KNOWN)} (default: {','.join(DEFAULT)})")
    parser.add_argument(
        "--offload-to", default="", metavar="DIR", help="activations move to a file there, not to memory"
    )
    parser.add_argument("--hint", action="store_true", help="configure the link's mean rate, round trip and buffer")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="1f1b and run-time in 14 settings: ratios 0.25 to 2, 2 and 4 stages, RTT 5 and 60 ms, steady or not",
    )
    parser.add_argument("--rate", default=RATE, help=f"of the link, each way, in the mean (default: {RATE})")
    add_step_arguments(parser)
    add_line_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from proxyd.cli.demo.session import write_json
    from proxyd.cli.torch_bench.options import line_of, prepare, rate_steps_of
    from proxyd.cli.torch_bench.schedule import WAYS, Scenario, measure
    from proxyd.cli.torch_bench.table import print_schedules
    from proxyd.core.units import parse_duration

    if args.stages < 2 or args.stages % 2:
        raise ConfigError(f"--stages {args.stages}: both sites need the same number, one at least")
    if args.microbatches < args.stages:
        raise ConfigError(f"--microbatches {args.microbatches}: 1F1B needs one for each of {args.stages} stages")
    ways = [name.strip() for name in (args.ways or (SWEPT_WAYS if args.sweep else ",".join(DEFAULT))).split(",")]
    if unknown := [name for name in ways if name not in WAYS]:
        raise ConfigError(f"there is no way {unknown[0]!r}", next_step=f"Known: {', '.join(WAYS)}")
    if args.offload_to and not Path(args.offload_to).is_dir():
        raise ConfigError(f"--offload-to {args.offload_to}: there is no such directory")
    prepare(args)
    line = line_of(args)
    scenario = Scenario(
        line,
        rate_steps_of(args, line.rate_bytes_per_s),
        args.ratio,
        stages=args.stages,
        microbatches=args.microbatches,
        forward_ns=parse_duration(args.task or ("10ms" if args.sweep else "20ms")),
        iterations=args.iterations or (4 if args.sweep else 6),
        real=args.real,
        activations=args.activations,
        offload_to=args.offload_to,
        told=args.hint,
    )

    def report(text: str) -> None:
        print(f"proxyd bench torch-schedule: {text}", file=sys.stderr)

    results = sweep(scenario, ways, report) if args.sweep else [measure(scenario, ways, report)]
    if args.out is not None:
        write_json(args.out, {"runs": results})
    print_schedules(Console(), line.describe(), results)
    return EXIT_OK


def sweep(scenario: Scenario, ways: list[str], report: Callable[[str], None]) -> list[dict[str, Any]]:
    """All settings; a WAN and its ranks serve those that differ in ratio and rate only."""
    from proxyd.cli.torch_bench.schedule import measure_on, opened

    results = []
    for rtt_ns in SWEPT_RTTS_NS:
        for stages, settings in SWEPT.items():
            place = replace(scenario, line=replace(scenario.line, rtt_ns=rtt_ns), stages=stages)
            with opened(place, ways) as (sites, ranks):
                for ratio, moves in settings:
                    setting = replace(place, ratio=ratio, steps=scenario.steps if moves else None)
                    results.append(measure_on(sites, ranks, setting, ways, report))
    return results
