"""``proxyd simulate link``: one link under load on modelled links, with the figures of :mod:`proxyd.sim.experiment`."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd.cli.trace_option import read_trace
from proxyd.core.errors import EXIT_OK, ConfigError
from proxyd.core.traces import (
    TRACE_CLASSES,
    RateTrace,
    constant,
    steps,
    synthetic,
)
from proxyd.core.units import (
    NS_PER_S,
    format_rate,
    parse_buffer,
    parse_duration,
    parse_rate,
    parse_size,
)

if TYPE_CHECKING:
    from proxyd.sim.experiment import LinkExperiment, LinkResult
    from proxyd.sim.link import CrossTraffic, Policer

DEFAULT_RATE = "1Gbit"
STEPS = {"halves": 0.5, "doubles": 2.0}
WORKLOADS = ("backlog", "burst", "pipeline", "mixed", "checkpoint")
TRAFFIC = ("pipeline", "sync", "bulk")
COLUMNS = (
    "time_s",
    "rate_bytes_per_s",
    "estimate_bytes_per_s",
    "pace_bytes_per_s",
    "queue_bytes",
    "outstanding_bytes",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = ", ".join(("constant", *STEPS, *TRACE_CLASSES))
    parser.add_argument(
        "--trace", default="constant", metavar="KIND|FILE", help=f"rate over time: {kinds}, or a mahimahi-style file"
    )
    parser.add_argument(
        "--rate", metavar="RATE", help=f"mean rate, before a step (default: {DEFAULT_RATE}; of a file: its own)"
    )
    parser.add_argument("--rtt", default="60ms", metavar="TIME", help="round trip (default: 60ms)")
    parser.add_argument(
        "--buffer", default="0.1bdp", metavar="SIZE", help="drop-tail buffer, as 300kB or 0.1bdp (default: 0.1bdp)"
    )
    parser.add_argument("--senders", type=int, default=8, help="one per host (default: 8)")
    parser.add_argument("--seconds", type=float, default=60.0, help="from the first message on (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="where chance begins (default: 1)")
    parser.add_argument("--workload", choices=WORKLOADS, default="backlog", help="(default: backlog)")
    parser.add_argument("--message", default="8MiB", metavar="SIZE", help="size of a message (default: 8MiB)")
    parser.add_argument("--traffic", choices=TRAFFIC, default="pipeline", help="class of backlog and bursts")
    parser.add_argument("--hint", metavar="RATE", help="capacity that the coordinator is told (default: none)")
    parser.add_argument("--fixed", action="store_true", help="the hint is believed for ever, whatever is measured")
    parser.add_argument("--told", action="store_true", help="the coordinator is told round trip and buffer as well")
    parser.add_argument(
        "--cross",
        metavar="RATE[:ON:OFF]|tcp[:N]",
        help="traffic that isn't ours: constant, on and off (200Mbit:2s:3s), or N TCP connections",
    )
    parser.add_argument("--policer", metavar="RATE:BURST", help="token bucket in front of the link, as 300Mbit:2MB")
    parser.add_argument(
        "--loss", type=float, default=0.0, metavar="P", help="chance that a packet is lost (default: 0)"
    )
    parser.add_argument(
        "--control-rtt", default="1ms", metavar="TIME", help="round trip between agents and coordinator (default: 1ms)"
    )
    parser.add_argument("--mtu", type=int, default=1500, help="(default: 1500)")
    parser.add_argument(
        "--slow-start-after-idle", action="store_true", help="the kernels shrink idle TCP windows, as Linux does it"
    )
    parser.add_argument(
        "--congestion-control",
        choices=("cubic", "bbr"),
        default="cubic",
        help="of the agents' TCP streams, below their grants (default: cubic)",
    )
    parser.add_argument("--out", metavar="FILE", help="write figures and inputs as JSON")
    parser.add_argument("--series", metavar="FILE", help="write rate, estimate, pace and queue over time as CSV")
    parser.add_argument("--picture", metavar="FILE", help="draw them (PNG; needs the 'report' extra)")


def run(args: argparse.Namespace) -> int:
    from proxyd.sim.experiment import run_link

    if args.picture:
        import matplotlib  # noqa: F401  # missing: said before the run, not after it
    experiment = experiment_of(args)
    begin_s = time.perf_counter()
    result = run_link(experiment)
    took_s = time.perf_counter() - begin_s
    report = {**result.figures(), "inputs": inputs_of(args, experiment)}
    print(json.dumps(report, indent=2))
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.series:
        write_series(Path(args.series), result)
    if args.picture:
        from proxyd.cli.simulate_picture import draw

        draw(Path(args.picture), title_of(args, experiment), experiment, result)
    print(f"{result.events} events in {took_s:.1f} s", file=sys.stderr)
    return EXIT_OK


# -------------------------------------------------------------------------------------------------- inputs


def experiment_of(args: argparse.Namespace) -> LinkExperiment:
    """What the options mean. Raises ConfigError for what they can't."""
    from proxyd.sim.experiment import LinkExperiment
    from proxyd.wire.envelope import TrafficClass

    if args.seconds <= 0:
        raise ConfigError(f"--seconds {args.seconds:g} is no time; give some, as in --seconds 60")
    duration_ns = round(args.seconds * NS_PER_S)
    rtt_ns = parse_duration(args.rtt)
    trace, nominal, step_ns = trace_of(args.trace, args.rate, duration_ns, args.seed)
    hint = parse_rate(args.hint) if args.hint else 0
    if args.fixed and not hint:
        raise ConfigError("--fixed needs a --hint: what should be believed?")
    cross, cross_tcp = cross_of(args.cross)
    return LinkExperiment(
        trace=trace,
        rtt_ns=rtt_ns,
        buffer_bytes=parse_buffer(args.buffer, nominal, rtt_ns),
        senders=args.senders,
        duration_ns=duration_ns,
        seed=args.seed,
        nominal_bytes_per_s=nominal,
        step_ns=step_ns,
        workload=args.workload,
        message_bytes=parse_size(args.message),
        traffic=TrafficClass.parse(args.traffic),
        hint_bytes_per_s=hint,
        fixed=args.fixed,
        told=args.told,
        cross=cross,
        cross_tcp=cross_tcp,
        policer=policer_of(args.policer),
        loss=args.loss,
        control_rtt_ns=parse_duration(args.control_rtt),
        mtu_bytes=args.mtu,
        slow_start_after_idle=args.slow_start_after_idle,
        congestion_control=args.congestion_control,
    )


def trace_of(kind: str, rate: str | None, duration_ns: int, seed: int) -> tuple[RateTrace, int, int]:
    """(trace, its rate, time of its step or 0)."""
    mean = parse_rate(rate or DEFAULT_RATE)
    if kind == "constant":
        return constant(mean), mean, 0
    if kind in STEPS:
        return steps(mean, [(duration_ns // 2, STEPS[kind])]), mean, duration_ns // 2
    if kind in TRACE_CLASSES:
        return synthetic(kind, mean, duration_ns, seed), mean, 0
    trace = read_trace(kind, ("constant", *STEPS, *TRACE_CLASSES))
    if rate is not None:
        trace = trace.scaled(mean)
    return trace, trace.mean_bytes_per_s, 0


def cross_of(text: str | None) -> tuple[CrossTraffic | None, int]:
    """What ``--cross`` asks for: (rate, on and off) or a number of TCP connections."""
    from proxyd.sim.link import CrossTraffic

    if text is None:
        return None, 0
    first, *rest = text.split(":")
    if first == "tcp" and len(rest) <= 1:
        number = rest[0] if rest else "1"
        if not number.isdecimal() or not 1 <= int(number) <= 100:
            raise ConfigError(f"--cross {text}: {number!r} is not a number of connections", next_step="Write tcp:4")
        return None, int(number)
    if len(rest) not in (0, 2):
        raise ConfigError(f"--cross {text} is neither RATE, RATE:ON:OFF nor tcp:N", next_step="Write 200Mbit:2s:3s")
    on_ns, off_ns = (parse_duration(one) for one in rest) if rest else (0, 0)
    return CrossTraffic(parse_rate(first), on_ns, off_ns), 0


def policer_of(text: str | None) -> Policer | None:
    """What ``--policer`` asks for."""
    from proxyd.sim.link import Policer

    if text is None:
        return None
    rate, colon, burst = text.partition(":")
    if not colon:
        raise ConfigError(f"--policer {text}: a bucket needs a size", next_step="Write RATE:BURST, as in 300Mbit:2MB")
    return Policer(parse_rate(rate), parse_size(burst))


def inputs_of(args: argparse.Namespace, experiment: LinkExperiment) -> dict[str, Any]:
    """What the figures depend on, as given and as understood."""
    return {
        "trace": args.trace,
        "rate_bytes_per_s": experiment.rate_bytes_per_s,
        "rtt_ns": experiment.rtt_ns,
        "buffer_bytes": experiment.buffer_bytes,
        "senders": experiment.senders,
        "seconds": args.seconds,
        "seed": experiment.seed,
        "workload": experiment.workload,
        "message_bytes": experiment.message_bytes,
        "traffic": args.traffic,
        "hint_bytes_per_s": experiment.hint_bytes_per_s,
        "fixed": experiment.fixed,
        "told": experiment.told,
        "cross": args.cross,
        "policer": args.policer,
        "loss": experiment.loss,
        "control_rtt_ns": experiment.control_rtt_ns,
        "mtu_bytes": experiment.mtu_bytes,
        "slow_start_after_idle": experiment.slow_start_after_idle,
        "congestion_control": experiment.congestion_control,
    }


def title_of(args: argparse.Namespace, experiment: LinkExperiment) -> str:
    """One line for a picture."""
    buffer_bdp = experiment.buffer_bytes / experiment.bdp_bytes
    return (
        f"{args.trace}, {format_rate(experiment.rate_bytes_per_s)}, RTT {args.rtt}, buffer {buffer_bdp:.2g} BDP, "
        f"{experiment.senders} senders, {experiment.workload}, seed {experiment.seed}"
    )


# ------------------------------------------------------------------------------------------------- outputs


def write_series(path: Path, result: LinkResult) -> None:
    """One line per sample."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for one in result.series:
            writer.writerow(
                [
                    f"{one.time_ns / NS_PER_S:.3f}",
                    one.rate_bytes_per_s,
                    one.estimate_bytes_per_s,
                    one.pace_bytes_per_s,
                    one.queue_bytes,
                    one.outstanding_bytes,
                ]
            )
