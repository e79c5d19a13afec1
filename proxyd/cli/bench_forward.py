"""``proxyd bench forward``: a file by curl through ``proxyd forward``, beside tensors, on the emulated WAN."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from proxyd.core.errors import EXIT_OK, ConfigError
from proxyd.core.units import format_rate, parse_buffer, parse_duration, parse_rate, parse_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="400Mbit", help="of each direction (default: 400Mbit)")
    parser.add_argument("--rtt", default="60ms", help="between the sites (default: 60ms)")
    parser.add_argument("--buffer", default="0.1bdp", help="drop-tail queue, a size or like 0.1bdp (default: 0.1bdp)")
    parser.add_argument("--mtu", type=int, default=9000, help="bytes of the largest packet (default: 9000)")
    parser.add_argument("--file", default="1GiB", help="size of the file (default: 1GiB)")
    parser.add_argument("--tensor", default="4MiB", help="size of a tensor (default: 4MiB)")
    parser.add_argument("--every", default="300ms", help="between two tensors (default: 300ms)")
    parser.add_argument("--tensors", type=int, default=100, help="of each phase without the file (default: 100)")
    parser.add_argument("--rounds", type=int, default=1, help="of both phases (default: 1)")
    parser.add_argument("--out", metavar="FILE.json", type=Path, help="write the figures there")


def run(args: argparse.Namespace) -> int:
    """Raises WanError where no emulated WAN can be made."""
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise ConfigError(f"cannot write {args.out}", why=f"there is no directory {args.out.parent}")
    if args.tensors < 1 or args.rounds < 1:
        raise ConfigError("--tensors and --rounds must be at least 1")
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from proxyd.cli.bench_link import require_wan
    from proxyd.cli.demo.session import write_json
    from proxyd.cli.link_bench.forward import ForwardScenario, measure

    rate, rtt_ns = parse_rate(args.rate), parse_duration(args.rtt)
    scenario = ForwardScenario(
        rate_bytes_per_s=rate,
        rtt_ns=rtt_ns,
        buffer_bytes=max(2 * args.mtu, parse_buffer(args.buffer, rate, rtt_ns)),
        mtu=args.mtu,
        file_bytes=parse_size(args.file),
        tensor_bytes=parse_size(args.tensor),
        period_s=parse_duration(args.every) / 1e9,
        tensors=args.tensors,
        rounds=args.rounds,
    )
    require_wan()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    console.print(scenario.describe(), highlight=False, soft_wrap=True)
    found = measure(scenario, lambda text: print(f"proxyd bench forward: {text}", file=sys.stderr))
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("tensors", "number", "p50", "p90", "p99", "most"):
        table.add_column(name, justify="left" if name == "tensors" else "right")
    for name in ("alone", "beside"):
        one = found[name]
        times = (f"{one[key] * 1000:.0f} ms" for key in ("p50_s", "p90_s", "p99_s", "most_s"))
        table.add_row("alone" if name == "alone" else "beside the file", str(int(one["tensors"])), *times)
    console.print(table)
    console.print(
        f"p99 beside the file / alone: {found['p99_ratio']:.2f}; p50: {found['p50_ratio']:.2f}", highlight=False
    )
    for copy in found["copies"]:
        console.print(
            f"the file: {copy['seconds']:.1f} s, {format_rate(int(copy['rate_bytes_per_s']))}, SHA-256 equal; "
            f"{copy['granted_bytes'] / (1 << 20):.0f} MiB went out under grants, tensors included",
            highlight=False,
        )
    if args.out is not None:
        write_json(args.out, found)
    return EXIT_OK
