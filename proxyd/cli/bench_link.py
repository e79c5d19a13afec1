"""``proxyd bench link``: backlogged senders on an emulated link that changes, beside plain TCP.

Nobody tells the coordinator what the link can carry (``--hint`` does). What is measured, and how: docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd.core.errors import EXIT_OK, ConfigError
from proxyd.core.units import bdp_bytes, parse_buffer, parse_duration, parse_rate, parse_size

if TYPE_CHECKING:
    from proxyd.cli.link_bench.scenario import LinkScenario
    from proxyd.wan import PolicerSpec

MODES = ("proxyd", "cubic", "bbr")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="400Mbit", help="mean rate; of a step the higher one (default: 400Mbit)")
    parser.add_argument("--rtt", default="60ms", help="round trip without any queue (default: 60ms)")
    parser.add_argument("--buffer", default="1bdp", help="drop-tail queue, a size or like 0.1bdp (default: 1bdp)")
    parser.add_argument("--mtu", type=int, default=9000, help="bytes of the largest packet (default: 9000)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--trace", metavar="CLASS|FILE", default="", help="calm, moderate, wild, drift, real, or a mahimahi-style file"
    )
    shape.add_argument("--step", choices=("halve", "double"), default="", help="the rate halves, or doubles, half-way")
    parser.add_argument("--senders", type=int, default=8, help="each on a host of its own (default: 8)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each mode (default: 20)")
    parser.add_argument("--message", metavar="SIZE", help="of a message (default: 0.17 s of the link, at most 8MiB)")
    parser.add_argument("--depth", type=int, default=2, help="messages that each sender has under way (default: 2)")
    parser.add_argument("--modes", default=",".join(MODES), help="some of proxyd,cubic,bbr (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the trace and of random loss (default: 1)")
    parser.add_argument("--loss", type=float, default=0.0, help="chance that a packet is lost at random")
    parser.add_argument("--policer", metavar="RATE:BURST", help="a token bucket before the queue, like 100Mbit:1MiB")
    parser.add_argument("--cross", metavar="RATE", help="somebody else's datagrams in the middle half of the time")
    parser.add_argument("--cross-tcp", choices=("cubic", "bbr"), default="", help="somebody else's TCP flow, then")
    parser.add_argument("--hint", action="store_true", help="configure the link's capacity, round trip and buffer")
    parser.add_argument("--out", metavar="FILE.json", type=Path, help="write all figures there")
    parser.add_argument("--series", action="store_true", help="with --out: the curves of the picture as well")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw them (needs the 'report' extra)")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a mode could not be run to its end."""
    modes = [mode.strip() for mode in args.modes.split(",")]
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ConfigError(f"there is no mode {unknown[0]!r}", next_step=f"Known: {', '.join(MODES)}")
    for path in (args.out, args.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"cannot write {path}", why=f"there is no directory {path.parent}")
    scenario = scenario_of(args)
    require_wan()
    from rich.console import Console

    from proxyd.cli.demo.session import write_json
    from proxyd.cli.link_bench.figures import link_figures, plot_series
    from proxyd.cli.link_bench.run import run_link
    from proxyd.cli.link_bench.table import print_link

    if args.plot is not None:
        # Now, not after minutes of measuring.
        import matplotlib  # noqa: F401

        from proxyd.cli.link_bench.picture import draw

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console, errors = Console(), Console(stderr=True)
    runs, figures = [], []
    for mode in modes:
        errors.print(f"proxyd bench link: {mode}, {scenario.seconds:g} s ...", highlight=False, soft_wrap=True)
        seen = run_link(scenario, mode)
        runs.append(seen)
        figures.append(link_figures(scenario, seen))
        if args.series:
            figures[-1]["series"] = plot_series(scenario, seen)
    if args.out is not None:
        write_json(args.out, report(scenario, figures))
    if args.plot is not None:
        draw(args.plot, scenario, runs)
    print_link(console, scenario.describe(), figures)
    for name, path in (("Figures", args.out), ("Picture", args.plot)):
        if path is not None:
            console.print(f"{name}: {path}", highlight=False, soft_wrap=True)
    return EXIT_OK


def require_wan() -> None:
    """Raises WanError where no network namespaces can be made: there is nothing to measure on loopback."""
    from proxyd.wan import WanError, available

    if (reason := available()) is not None:
        raise WanError(f"no emulated WAN here: {reason}")


def scenario_of(args: argparse.Namespace) -> LinkScenario:
    """What the options ask for. Raises ConfigError naming the one that is wrong."""
    from proxyd.cli.link_bench.scenario import LinkScenario, message_bytes

    rate = parse_rate(args.rate)
    rtt_ns = parse_duration(args.rtt)
    if rtt_ns <= 0:
        raise ConfigError(f"--rtt {args.rtt} is no round trip of a WAN", next_step="Give one like 60ms")
    if not 1 <= args.senders <= 100 or args.depth < 1 or args.seconds <= 0:
        raise ConfigError("--senders must be 1 to 100, --depth at least 1, --seconds above 0")
    scenario = LinkScenario(
        name=args.step or args.trace or "constant",
        rate_bytes_per_s=rate,
        rtt_ns=rtt_ns,
        buffer_bytes=max(2 * args.mtu, parse_buffer(args.buffer, rate, rtt_ns)),
        mtu=args.mtu,
        senders=args.senders,
        tensor_bytes=message_bytes(rate) if args.message is None else parse_size(args.message),
        loss=args.loss,
        seconds=args.seconds,
        trace=args.trace,
        step=args.step,
        step_at_s=args.seconds / 2,
        seed=args.seed,
        depth=args.depth,
        cross_flood_bytes_per_s=0 if args.cross is None else parse_rate(args.cross),
        cross_tcp=args.cross_tcp,
        policer=policer_of(args.policer),
        configured=args.hint,
    )
    if scenario.warmup_ns >= scenario.seconds * 1e9 / 2:
        raise ConfigError(
            f"--seconds {args.seconds:g} is too short",
            why=f"the first ten round trips ({scenario.warmup_ns / 1e9:g} s) are in no figure",
            next_step=f"Give at least {scenario.warmup_ns * 2.1 / 1e9:.1f}",
        )
    # Here, where the person sees which option is wrong.
    scenario.rate_trace()
    return scenario


def policer_of(text: str | None) -> PolicerSpec | None:
    """``RATE:BURST``."""
    from proxyd.wan import PolicerSpec

    if text is None:
        return None
    rate, colon, burst = text.partition(":")
    if not colon:
        raise ConfigError(f"--policer {text!r} names no burst", next_step="Write it like 100Mbit:1MiB")
    return PolicerSpec(parse_rate(rate.strip()), parse_size(burst.strip()))


def report(scenario: LinkScenario, figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Plain values."""
    return {
        "link": {
            "shape": scenario.name,
            "rate_bits_per_s": scenario.rate_bytes_per_s * 8,
            "rtt_seconds": scenario.rtt_ns / 1e9,
            "buffer_bytes": scenario.buffer_bytes,
            "bdp_bytes": bdp_bytes(scenario.rate_bytes_per_s, scenario.rtt_ns),
            "mtu": scenario.mtu,
            "senders": scenario.senders,
            "message_bytes": scenario.tensor_bytes,
            "seconds": scenario.seconds,
            "warmup_seconds": scenario.warmup_ns / 1e9,
            "seed": scenario.seed,
            "loss": scenario.loss,
            "configured": scenario.configured,
        },
        "description": scenario.describe(),
        "runs": figures,
    }
