"""``proxyd bench predict``: how well a receiver knows when a tensor will be there, on the emulated WAN."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd.core.errors import EXIT_OK, ConfigError
from proxyd.core.units import parse_buffer, parse_duration, parse_rate, parse_size

if TYPE_CHECKING:
    from proxyd.cli.link_bench.predict import PredictScenario

DEFAULT_CASES = "1x1MiB,1x8MiB,1x32MiB,2x8MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="400Mbit", help="of each direction (default: 400Mbit)")
    parser.add_argument("--rtt", default="60ms", help="between the sites (default: 60ms)")
    parser.add_argument("--buffer", default="0.1bdp", help="drop-tail queue, a size or like 0.1bdp (default: 0.1bdp)")
    parser.add_argument("--mtu", type=int, default=9000, help="bytes of the largest packet (default: 9000)")
    parser.add_argument(
        "--cases", default=DEFAULT_CASES, help=f"senders x size of their tensors (default: {DEFAULT_CASES})"
    )
    parser.add_argument("--messages", type=int, default=30, help="of each sender and case (default: 30)")
    parser.add_argument("--compute", default="100ms", help="before each, on average (default: 100ms)")
    parser.add_argument("--jitter", type=float, default=0.1, help="by which that is misjudged, a share (default: 0.1)")
    parser.add_argument("--find", action="store_true", help="let the coordinator find the link's rate by itself")
    parser.add_argument("--out", metavar="FILE.json", type=Path, help="write the figures there")


def run(args: argparse.Namespace) -> int:
    """Raises WanError where no emulated WAN can be made."""
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise ConfigError(f"cannot write {args.out}", why=f"there is no directory {args.out.parent}")
    scenario, cases = scenario_of(args), cases_of(args.cases)
    from rich.console import Console

    from proxyd.cli.bench_link import require_wan
    from proxyd.cli.demo.session import write_json
    from proxyd.cli.link_bench.predict import measure

    require_wan()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    console.print(scenario.describe(), highlight=False, soft_wrap=True)
    results = measure(scenario, cases)
    print_table(console, results)
    if args.out is not None:
        write_json(args.out, {"description": scenario.describe(), "cases": results})
    return EXIT_OK


def scenario_of(args: argparse.Namespace) -> PredictScenario:
    """What the options ask for. Raises ConfigError naming the one that is wrong."""
    from proxyd.cli.link_bench.predict import PredictScenario

    rate, rtt_ns = parse_rate(args.rate), parse_duration(args.rtt)
    if args.messages < 1 or not 0 <= args.jitter < 1:
        raise ConfigError("--messages must be at least 1, and --jitter from 0 to below 1")
    return PredictScenario(
        rate_bytes_per_s=rate,
        rtt_ns=rtt_ns,
        buffer_bytes=max(2 * args.mtu, parse_buffer(args.buffer, rate, rtt_ns)),
        mtu=args.mtu,
        configured=not args.find,
        messages=args.messages,
        compute_s=parse_duration(args.compute) / 1e9,
        jitter=args.jitter,
    )


def cases_of(text: str) -> list[tuple[int, int]]:
    """``2x8MiB,1x1MiB`` as (senders, bytes)."""
    cases = []
    for case in text.split(","):
        count, cross, size = case.strip().partition("x")
        if not cross or not count.isdigit() or not 1 <= int(count) <= 16:
            raise ConfigError(
                f"{case.strip()!r} is no case", next_step=f"Give 1 to 16 senders and a size: {DEFAULT_CASES}"
            )
        cases.append((int(count), parse_size(size)))
    return cases


def print_table(console: Any, results: list[dict[str, Any]]) -> None:
    """One line for each case and moment."""
    from rich import box
    from rich.table import Table

    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("senders", "size", "took", "moment", "known", "error", "p95", "share", "p95", "bias"):
        table.add_column(name, justify="left" if name == "moment" else "right", no_wrap=True)
    for case in results:
        for moment, figures in case["moments"].items():
            row = [str(case["senders"]), f"{case['bytes'] / (1 << 20):g} MiB", f"{case['took_p50_s'] * 1000:.0f} ms"]
            row += [moment, f"{figures['predicted']}/{case['messages']}"]
            if figures["predicted"]:
                row += [f"{figures[name] * 1000:.1f} ms" for name in ("error_p50_s", "error_p95_s")]
                row += [f"{figures[name]:.1%}" for name in ("relative_p50", "relative_p95")]
                row += [f"{figures['bias_p50_s'] * 1000:+.1f} ms"]
            table.add_row(*row)
    console.print(table)
