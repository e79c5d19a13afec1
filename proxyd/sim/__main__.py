"""``python -m proxyd.sim SCENARIO [--seed N]``: run one scenario file; the way to replay a seed that failed."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from proxyd.core.errors import EXIT_FAILED, EXIT_OK, ProxydError
from proxyd.sim.scenario import InvariantError, Result, run_scenario


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proxyd.sim", description="Run a scenario on modelled links.")
    parser.add_argument("scenario", type=Path, help="scenario file (TOML)")
    parser.add_argument("--seed", type=int, default=0, help="where chance begins (default: 0)")
    parser.add_argument("--seeds", type=int, default=1, help="run so many seeds, from --seed on")
    args = parser.parse_args()
    worst = EXIT_OK
    for seed in range(args.seed, args.seed + args.seeds):
        begin_s = time.perf_counter()
        try:
            result = run_scenario(args.scenario, seed)
        except (InvariantError, ProxydError) as error:
            sys.stderr.write(f"seed {seed}: {error}\n")
            worst = EXIT_FAILED
            continue
        sys.stdout.write(describe(result, time.perf_counter() - begin_s) + "\n")
        if result.problems:
            worst = EXIT_FAILED
    return worst


def describe(result: Result, took_s: float) -> str:
    """One line."""
    ideal_ns = result.ideal_cct_ns
    mean_ns = sum(result.fct_ns) / max(1, len(result.fct_ns))
    p99_ns = result.percentile_ns(0.99)
    parts = (
        f"{result.scenario} seed {result.seed}: {result.delivered}/{result.messages} delivered",
        f"{result.failed} failed, {result.cancelled} cancelled",
        f"FCT mean {mean_ns / 1e9:.3f} s" + (f" ({mean_ns / ideal_ns:.2f} x ideal CCT)" if ideal_ns else ""),
        f"p99 {p99_ns / 1e9:.3f} s" + (f" ({p99_ns / ideal_ns:.2f} x)" if ideal_ns else ""),
        *([f"{result.utilisation:.1%} of the link used"] if result.utilisation else []),
        f"{result.drops} drops, queue {result.peak_queue_bytes / 1000:.0f} kB, fallback {result.fallback_bytes} bytes",
        f"{result.simulated_ns / 1e9:.1f} s, {result.events} events in {took_s:.2f} s",
    )
    text = "; ".join(parts)
    return text + "".join(f"\n  FAILED: {problem}" for problem in result.problems)


if __name__ == "__main__":
    sys.exit(main())
