"""``proxyd example two-sites``: 1F1B over gloo and through the agents, and the schedule chosen at run time, in turns.

The script is ``proxyd_client.examples.train_two_sites``; here it runs on two emulated sites, and the link's rate steps
while it does. docs/pytorch.md says what is measured.
"""

from __future__ import annotations

import argparse
import sys

from proxyd.core.errors import EXIT_FAILED, EXIT_OK, ConfigError

WAYS = "gloo-cubic,gloo-bbr,1f1b,run-time,offload"
"""The script's; reading them from it would load torch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from proxyd.cli.torch_bench.options import add_line_arguments, add_step_arguments

    parser.add_argument("--ways", default=WAYS, help=f"some of {WAYS} (default: all)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each way, after two (default: 6)")
    parser.add_argument(
        "--ratio", type=float, default=1.0, help="communication / computation, sets the link's mean rate (default: 1)"
    )
    parser.add_argument("--rate", help="of the link, each way, instead of --ratio")
    add_step_arguments(parser)
    add_line_arguments(parser, mtu=1500)
    parser.add_argument("script", nargs="*", metavar="-- OPTION", help="options of the script itself")


def run(args: argparse.Namespace) -> int:
    """Train, print the ways side by side."""
    from proxyd.cli.demo.session import write_json
    from proxyd.cli.torch_bench.options import prepare
    from proxyd.cli.torch_bench.two_sites import compare
    from proxyd_client.examples import two_sites_table

    if not 0 < args.ratio < 100:
        raise ConfigError(f"--ratio {args.ratio:g}: the link must have something to carry, and not for ever")
    if unknown := [name for name in args.ways.split(",") if name not in WAYS.split(",")]:
        raise ConfigError(f"there is no way {unknown[0]!r}", next_step=f"Known: {WAYS}")
    prepare(args)
    figures = compare(args, lambda text: print(f"proxyd example: {text}", file=sys.stderr))
    if args.out is not None:
        write_json(args.out, figures)
    print(figures["description"])
    print(two_sites_table.text(figures))
    same = all(one["gradients_equal"] and one["losses_equal"] for one in figures["ways"].values())
    return EXIT_OK if same else EXIT_FAILED
