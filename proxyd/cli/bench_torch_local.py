"""``proxyd bench torch-local``: send and recv between two ranks on one host, through an agent and over gloo.

What is measured, and how: docs/pytorch.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from proxyd.core.errors import EXIT_OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the two ways take turns (default: 5)")
    parser.add_argument("--messages", type=int, default=16, help="of 64 MiB per way and round (default: 16)")
    parser.add_argument("--pings", type=int, default=500, help="round trips of 4 KiB per way and round (default: 500)")
    parser.add_argument("--out", metavar="FILE.json", type=Path, help="write all figures there")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from proxyd.cli.demo.session import write_json
    from proxyd.cli.torch_bench.local import measure
    from proxyd.cli.torch_bench.options import require_torch
    from proxyd.cli.torch_bench.table import print_local

    require_torch()
    result = measure(
        args.rounds, args.messages, args.pings, lambda text: print(f"proxyd bench: {text}", file=sys.stderr)
    )
    if args.out is not None:
        write_json(args.out, result)
    print_local(Console(), result)
    return EXIT_OK
