"""``proxyd bench ways``: where the coordinator stands, both directions at once, urgent messages, jobs by weight,
and sites that share a line.

On the emulated WAN, with real agents; docs/evaluation.md says what each part shows.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd.core.errors import EXIT_OK, ConfigError
from proxyd.core.units import parse_buffer, parse_duration, parse_rate, parse_size

if TYPE_CHECKING:
    from proxyd.cli.link_bench.ways import WaysScenario

PARTS = ("far", "two-way", "urgent", "weights", "three-sites")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)} (default: all)")
    parser.add_argument("--rate", default="200Mbit", help="of each direction (default: 200Mbit)")
    parser.add_argument("--rtt", default="60ms", help="between a and b (default: 60ms)")
    parser.add_argument("--control-rtt", default="90ms", help="to a coordinator far away (default: 90ms)")
    parser.add_argument("--buffer", default="1bdp", help="drop-tail queue, a size or like 0.1bdp (default: 1bdp)")
    parser.add_argument("--mtu", type=int, default=9000, help="bytes of the largest packet (default: 9000)")
    parser.add_argument("--senders", type=int, default=2, help="agents that send, in each direction (default: 2)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each figure (default: 5)")
    parser.add_argument("--urgent", metavar="SIZES", default="1KiB,64KiB,256KiB", help="of small messages")
    parser.add_argument("--hint", action="store_true", help="configure the links' capacity, round trip and buffer")
    parser.add_argument("--out", metavar="FILE.json", type=Path, help="write the figures there")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a part could not be run to its end."""
    wanted = [part.strip() for part in args.parts.split(",")]
    if unknown := [part for part in wanted if part not in PARTS]:
        raise ConfigError(f"there is no part {unknown[0]!r}", next_step=f"Known: {', '.join(PARTS)}")
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise ConfigError(f"cannot write {args.out}", why=f"there is no directory {args.out.parent}")
    scenario = scenario_of(args)
    sizes = [parse_size(size.strip()) for size in args.urgent.split(",")]
    from rich.console import Console

    from proxyd.cli.bench_link import require_wan
    from proxyd.cli.demo.session import write_json
    from proxyd.cli.link_bench import ways

    require_wan()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "far": lambda: ways.far(scenario),
        "two-way": lambda: ways.two_way(scenario),
        "urgent": lambda: ways.urgent(scenario, sizes),
        "weights": lambda: ways.weights(scenario),
        "three-sites": lambda: ways.three_sites(scenario),
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console, errors = Console(), Console(stderr=True)
    console.print(scenario.describe(), highlight=False, soft_wrap=True)
    report: dict[str, Any] = {"description": scenario.describe()}
    for part in wanted:
        errors.print(f"proxyd bench ways: {part} ...", highlight=False)
        report[part] = parts[part]()
        console.print_json(data={part: report[part]})
        if args.out is not None:
            # After each part: the next one may fail.
            write_json(args.out, report)
    return EXIT_OK


def scenario_of(args: argparse.Namespace) -> WaysScenario:
    """What the options ask for. Raises ConfigError naming the one that is wrong."""
    from proxyd.cli.link_bench.scenario import message_bytes
    from proxyd.cli.link_bench.ways import WaysScenario

    rate, rtt_ns = parse_rate(args.rate), parse_duration(args.rtt)
    if not 1 <= args.senders <= 50 or args.seconds <= 0:
        raise ConfigError("--senders must be 1 to 50 and --seconds above 0")
    return WaysScenario(
        name="ways",
        rate_bytes_per_s=rate,
        rtt_ns=rtt_ns,
        buffer_bytes=max(2 * args.mtu, parse_buffer(args.buffer, rate, rtt_ns)),
        mtu=args.mtu,
        senders=args.senders,
        tensor_bytes=message_bytes(rate),
        seconds=args.seconds,
        configured=args.hint,
        control_rtt_ns=parse_duration(args.control_rtt),
    )
