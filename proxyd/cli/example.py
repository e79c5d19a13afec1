"""``proxyd example pipeline`` and ``proxyd example data-parallel``: the client's training scripts on an emulated WAN.

The scripts are in ``proxyd_client.examples`` and run anywhere; here they run once per way on two emulated sites. What
comes behind ``--`` goes to the script.
"""

from __future__ import annotations

import argparse
import sys

from proxyd.core.errors import EXIT_OK


def add_example_arguments(parser: argparse.ArgumentParser) -> None:
    """The same for both."""
    from proxyd.cli.torch_bench.options import add_path_arguments

    parser.add_argument("--ranks", type=int, default=2, help="at each site, each on a host of its own (default: 2)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of each way (default: 10)")
    add_path_arguments(parser, rate="100Mbit")
    parser.add_argument("script", nargs="*", metavar="-- OPTION", help="options of the script itself")


def run_example(name: str, args: argparse.Namespace) -> int:
    """Train once per way, print them side by side."""
    from rich.console import Console

    from proxyd.cli.demo.session import write_json
    from proxyd.cli.torch_bench.example import compare
    from proxyd.cli.torch_bench.options import line_of, prepare, ways_of
    from proxyd.cli.torch_bench.table import print_example

    prepare(args)
    line = line_of(args)
    result = compare(
        f"proxyd_client.examples.{name}",
        line,
        args.ranks,
        ["--steps", str(args.steps), *args.script],
        ways_of(args),
        lambda text: print(f"proxyd example: {text}", file=sys.stderr),
    )
    if args.out is not None:
        write_json(args.out, result)
    print_example(Console(), line.describe(), result)
    return EXIT_OK
