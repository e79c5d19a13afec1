"""``proxyd bench torch-allreduce``: sums over the ranks of two sites, through proxyd and over gloo.

What is measured, and how: docs/pytorch.md.
"""

from __future__ import annotations

import argparse
import sys

from proxyd.core.errors import EXIT_OK

SIZES = "8MiB,64MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from proxyd.cli.torch_bench.options import add_path_arguments

    parser.add_argument("--sizes", default=SIZES, help=f"of the tensors (default: {SIZES})")
    parser.add_argument("--ranks", type=int, default=4, help="at each site, on one host (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="of each size and way (default: 5)")
    add_path_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from proxyd.cli.demo.session import write_json
    from proxyd.cli.torch_bench.allreduce import measure
    from proxyd.cli.torch_bench.options import line_of, prepare, ways_of
    from proxyd.cli.torch_bench.table import print_allreduce
    from proxyd.core.units import parse_size

    prepare(args)
    line, ways, sizes = line_of(args), ways_of(args), [parse_size(text) for text in args.sizes.split(",")]
    result = measure(
        line, args.ranks, sizes, args.rounds, ways, lambda text: print(f"proxyd bench: {text}", file=sys.stderr)
    )
    if args.out is not None:
        write_json(args.out, result)
    print_allreduce(Console(), line.describe(), result)
    return EXIT_OK
