"""``proxyd bench torch-pipeline``: torch's pipeline schedules across two sites, through proxyd and over gloo.

What is measured, and how: docs/pytorch.md.
"""

from __future__ import annotations

import argparse
import sys

from proxyd.core.errors import EXIT_OK

RATIOS = "0.5,1,2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from proxyd.cli.torch_bench.options import add_path_arguments

    parser.add_argument("--ratios", default=RATIOS, help=f"communication / computation (default: {RATIOS})")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="torch's (default: 1f1b)")
    parser.add_argument("--microbatches", type=int, default=16, help="of an iteration (default: 16)")
    parser.add_argument("--forward", default="20ms", help="a stage's forward of a micro-batch (default: 20ms)")
    parser.add_argument("--iterations", type=int, default=10, help="of each way and ratio (default: 10)")
    add_path_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from proxyd.cli.demo.session import write_json
    from proxyd.cli.torch_bench.options import line_of, prepare, ways_of
    from proxyd.cli.torch_bench.pipeline import PipelineScenario, measure
    from proxyd.cli.torch_bench.table import print_pipeline
    from proxyd.core.units import parse_duration

    prepare(args)
    line, ways, forward_ns = line_of(args), ways_of(args), parse_duration(args.forward)
    results = []
    for ratio in (float(text) for text in args.ratios.split(",")):
        scenario = PipelineScenario(
            line,
            ratio,
            schedule=args.schedule,
            microbatches=args.microbatches,
            forward_ns=forward_ns,
            backward_ns=2 * forward_ns,
            iterations=args.iterations,
        )
        results.append(
            measure(scenario, ways, lambda text: print(f"proxyd bench torch-pipeline: {text}", file=sys.stderr))
        )
    if args.out is not None:
        write_json(args.out, {"runs": results})
    print_pipeline(Console(), line.describe(), results)
    return EXIT_OK
