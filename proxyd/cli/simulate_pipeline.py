"""``proxyd simulate pipeline``: schedules of a training step across sites, beside what no schedule can beat."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd.cli.trace_option import read_trace
from proxyd.core.errors import EXIT_OK, ConfigError
from proxyd.core.traces import TRACE_CLASSES, RateTrace
from proxyd.core.units import parse_duration, parse_rate, parse_size

if TYPE_CHECKING:
    from proxyd.sim.pipeline.model import PipelineModel

KINDS = ("constant", *TRACE_CLASSES)
PRESET_NAMES = ("L1", "L2", "L3", "10G60", "4G90")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", choices=PRESET_NAMES, default="L1", help="link of a published setting (default: L1)"
    )
    parser.add_argument(
        "--trace",
        default="moderate",
        metavar="KIND|FILE",
        help=f"rate over time: {', '.join(KINDS)}, or a file, scaled to the preset's rate (default: moderate)",
    )
    parser.add_argument(
        "--loss-penalty", type=float, default=0.15, metavar="P", help="of n shared connections: 1/(1+P(n-1)) (0.15)"
    )
    parser.add_argument("--activations", type=int, default=8, help="held on each device (default: 8)")
    parser.add_argument("--offload", type=int, default=24, help="more of them, in host memory (default: 24)")
    parser.add_argument("--ssd", type=int, default=0, help="more of them, on an SSD of each device (default: 0)")
    parser.add_argument(
        "--ssd-rate", metavar="RATE", default="24Gbit", help="of it, written and read (default: 24Gbit, 3 GB/s)"
    )
    parser.add_argument(
        "--delay", choices=("one-way", "rtt"), default="", help="what the preset's delay is (default: as published)"
    )
    parser.add_argument("--stages", type=int, default=8, help="half of them at each site (default: 8)")
    parser.add_argument("--pipelines", type=int, default=2, help="that share the link (default: 2)")
    parser.add_argument("--micro-batches", type=int, default=128, help="of each pipeline (default: 128)")
    parser.add_argument("--message", default="64MiB", metavar="SIZE", help="each way, per micro-batch (default: 64MiB)")
    parser.add_argument(
        "--period", default="187.5ms", metavar="TIME", help="compute of a micro-batch on a stage (default: 187.5ms)"
    )
    parser.add_argument("--speeds", metavar="A,B", default="", help="of the sites' devices, relative, as 1,0.7")
    parser.add_argument("--systems", metavar="NAMES", default="", help="comma-separated (default: the usual ones)")
    parser.add_argument("--seed", type=int, default=1, help="where chance begins (default: 1)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="so many, from --seed on: means (default: 1)")
    parser.add_argument(
        "--pacing",
        choices=("ideal", "core"),
        default="ideal",
        help="of the system proxyd: one message at a time, or granted by the coordinator's core (slow; default: ideal)",
    )
    parser.add_argument(
        "--core-buffer", type=float, default=0.5, metavar="BDP", help="of each wire under the core, in BDP (0.5)"
    )
    parser.add_argument(
        "--core-warm-up",
        type=float,
        default=None,
        metavar="SECONDS",
        help="of messages before the step under the core (default: 40 round trips, 4 s at least)",
    )
    parser.add_argument("--out", metavar="FILE", help="write figures and inputs as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw 1f1b and proxyd (PNG; needs the 'report' extra)")


def run(args: argparse.Namespace) -> int:
    from proxyd.sim.pipeline.granted import GrantedWan
    from proxyd.sim.pipeline.model import NANOS
    from proxyd.sim.pipeline.report import SYSTEMS, experiment, mean_figures, table
    from proxyd_client.errors import ArgumentError

    if args.plot:
        import matplotlib  # noqa: F401  # missing: said before the run, not after it
    if args.seeds < 1:
        raise ConfigError(f"--seeds {args.seeds}: one run at least is needed")
    if not 0 < args.core_buffer <= 100:
        raise ConfigError(f"--core-buffer {args.core_buffer:g}: above 0 and at most 100 BDP")
    if args.core_warm_up is not None and not 0 <= args.core_warm_up <= 600:
        raise ConfigError(f"--core-warm-up {args.core_warm_up:g}: from 0 to 600 s")
    for option, name in (("--out", args.out), ("--plot", args.plot)):
        if name and not Path(name).absolute().parent.is_dir():
            raise ConfigError(f"{option} {name}: its directory isn't there")
    trace = args.trace if args.trace in KINDS else read_trace(args.trace, KINDS)
    model = model_of(args, trace, args.seed)
    names = tuple(name for name in args.systems.split(",") if name) or SYSTEMS
    begin_s = time.perf_counter()
    warm_ns = None if args.core_warm_up is None else round(args.core_warm_up * NANOS)
    core = partial(GrantedWan, buffer_bdp=args.core_buffer, warm_ns=warm_ns)
    wan = core if args.pacing == "core" else None
    seeds = range(args.seed, args.seed + args.seeds)
    try:
        results = [experiment(model_of(args, trace, seed), names, proxyd_wan=wan, core_wan=core) for seed in seeds]
    except ArgumentError as error:
        # Of the schedules, which are the client's: what was asked for can't be built.
        raise ConfigError(str(error)) from error
    took_s = time.perf_counter() - begin_s
    report = {**mean_figures(results), "inputs": inputs_of(args, model)}
    print(title_of(args, model))
    print(table(report))
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        from proxyd.cli.simulate_pipeline_picture import draw

        draw(Path(args.plot), title_of(args, model), results[0])
    print(f"{len(results[0].systems)} systems in {took_s:.1f} s", file=sys.stderr)
    return EXIT_OK


def model_of(args: argparse.Namespace, trace: str | RateTrace, seed: int) -> PipelineModel:
    """What the options mean. Raises ConfigError for what they can't."""
    from proxyd.sim.pipeline.model import preset_model

    try:
        speeds = tuple(float(one) for one in args.speeds.split(",")) if args.speeds else ()
    except ValueError as error:
        raise ConfigError(f"--speeds {args.speeds}: not numbers", next_step="Write 1,0.7") from error
    return preset_model(
        args.preset,
        trace=trace,
        seed=seed,
        activations=args.activations,
        offload=args.offload,
        ssd=args.ssd,
        ssd_bytes_per_s=parse_rate(args.ssd_rate),
        loss_penalty=args.loss_penalty,
        delay=args.delay,
        stages=args.stages,
        pipelines=args.pipelines,
        micro_batches=args.micro_batches,
        speeds=speeds,
        message_bytes=parse_size(args.message),
        period_ns=parse_duration(args.period),
    )


def inputs_of(args: argparse.Namespace, model: PipelineModel) -> dict[str, Any]:
    """What the figures depend on, as given and as understood."""
    from proxyd.sim.pipeline.granted import warm_up_ns

    wires = {
        f"{src}->{dst}": {"mean_rate_bytes_per_s": wire.rate.mean_bytes_per_s, "one_way_ns": wire.one_way_ns}
        for (src, dst), wire in model.wires.items()
    }
    return {
        "preset": args.preset,
        "trace": args.trace,
        "seed": args.seed,
        "seeds": args.seeds,
        "pacing": args.pacing,
        "loss_penalty": model.loss_penalty,
        "activations": model.activations,
        "offload": model.offload,
        "ssd": model.ssd,
        "ssd_bytes_per_s": model.ssd_bytes_per_s,
        "stages": len(model.stages),
        "pipelines": model.pipelines,
        "micro_batches": model.micro_batches,
        "message_bytes": model.message_bytes,
        "compute_seconds": model.compute_ns / 1e9,
        "period_ns": model.stages[0].period_ns,
        "speeds": args.speeds,
        "core_buffer_bdp": args.core_buffer,
        "core_warm_up_seconds": warm_up_ns(model) / 1e9 if args.core_warm_up is None else args.core_warm_up,
        "wires": wires,
    }


def title_of(args: argparse.Namespace, model: PipelineModel) -> str:
    """One line: what was assumed."""
    wire = model.wires["a", "b"]
    seeds = f"seeds {args.seed} to {args.seed + args.seeds - 1}" if args.seeds > 1 else f"seed {args.seed}"
    return (
        f"{args.preset}, {args.trace}, {seeds}: {wire.rate.mean_bytes_per_s * 8 / 1e9:.4g} Gbit/s, "
        f"{wire.one_way_ns / 1e6:g} ms one way, {model.pipelines} pipelines of {len(model.stages)} stages, "
        f"{model.micro_batches} micro-batches of {model.message_bytes / (1 << 20):g} MiB each way"
    )
