"""What perfect coordination would reach: plain TCP, directed by hand by somebody who knows the link.

An upper bound for a granting policy (no control latency, exact capacity), and the place to measure which TCP settings
bear it: ``python -m proxyd.wan.oracle --help``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise

from proxyd.wan.burst import (
    LEAD_NS,
    Burst,
    BurstResult,
    ideal_cct_seconds,
    payload_rate,
    run_plain_burst,
    summarise,
)
from proxyd.wan.crew import Crew
from proxyd.wan.spec import LinkSpec
from proxyd.wan.topology import Wan, available


def run_oracle(
    wan: Wan,
    *,
    senders: int,
    tensor_bytes: int,
    bursts: int,
    warmup_bursts: int,
    congestion_control: str,
    rate_bytes_per_s: int,
    pace_share: float = 0.97,
    at_once: int = 1,
    early_ns: int = 0,
    notsent_lowat_bytes: int | None = 16_384,
    gap_s: float = 0.35,
    timeout_s: float = 120.0,
) -> BurstResult:
    """Bursts in a closed loop, ``at_once`` senders at a time, each paced at ``pace_share / at_once`` of the link.

    The next sender starts when at most ``early_ns`` worth of the bytes of one that sends have not left its host.
    """
    pace = payload_rate(rate_bytes_per_s * pace_share / at_once, wan.mtu)
    leaving_bytes = pace * early_ns // 1_000_000_000
    fct: list[float] = []
    cct: list[float] = []
    with Crew() as crew:
        burst = Burst(
            wan,
            crew,
            senders=senders,
            tensor_bytes=tensor_bytes,
            congestion_control=congestion_control,
            notsent_lowat_bytes=notsent_lowat_bytes,
        )
        drops = [burst.drops()]
        retransmits_before = 0
        due_ns = time.monotonic_ns() + LEAD_NS
        for number in range(warmup_bursts + bursts):
            waiting = list(range(senders))
            arrivals: list[int] = []
            for _ in range(at_once):
                burst.send(waiting.pop(0), number, due_ns, pace_bytes_per_s=pace, leaving_bytes=leaving_bytes)
            while len(arrivals) < senders:
                _, event = crew.next_event(timeout_s)
                if event["event"] == "leaving" and waiting:
                    burst.send(waiting.pop(0), number, 0, pace_bytes_per_s=pace, leaving_bytes=leaving_bytes)
                elif event["event"] == "received":
                    arrivals.append(event["last_ns"])
            drops.append(burst.drops())
            if number >= warmup_bursts:
                fct.extend((arrival - due_ns) / 1e9 for arrival in arrivals)
                cct.append((max(arrivals) - due_ns) / 1e9)
            elif number == warmup_bursts - 1:
                retransmits_before = burst.retransmits()
            due_ns = max(max(arrivals) + int(gap_s * 1e9), time.monotonic_ns() + LEAD_NS)
        return BurstResult(
            fct_seconds=fct,
            cct_seconds=cct,
            retransmits=burst.retransmits() - retransmits_before,
            drops=drops[-1] - drops[warmup_bursts],
            goodput_mbps=bursts * senders * tensor_bytes * 8 / 1e6 / sum(cct),
            warmup_drops=drops[warmup_bursts] - drops[0],
            drops_per_burst=[after - before for before, after in pairwise(drops)],
        )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proxyd.wan.oracle", description=__doc__)
    parser.add_argument("modes", nargs="*", default=["plain", "oracle"], help="plain and/or oracle")
    parser.add_argument("--senders", type=int, default=8)
    parser.add_argument("--mib", type=float, default=8.0, help="tensor size in MiB")
    parser.add_argument("--bursts", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=400.0, help="link rate in Mbit/s")
    parser.add_argument("--rtt-ms", type=float, default=60.0)
    parser.add_argument("--bdp", type=float, default=0.1, help="buffer in bandwidth-delay products")
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--mtu", type=int, default=9000)
    parser.add_argument("--gap", type=float, default=0.35, help="seconds from the last arrival to the next burst")
    parser.add_argument("--load", type=float, default=None, help="open loop at this load (plain only)")
    parser.add_argument("--cc", default="cubic")
    parser.add_argument("--ssai", type=int, choices=(0, 1), default=1, help="TCP slow start after idle")
    parser.add_argument("--tcp-buffer-mib", type=int, default=16, help="tcp_wmem and tcp_rmem max; 0: the kernel's own")
    parser.add_argument("--share", type=float, default=0.97, help="oracle: share of the link to pace at")
    parser.add_argument("--early-ms", type=float, default=0.0, help="oracle: start the next sender this much early")
    parser.add_argument("--at-once", type=int, default=1, help="oracle: senders at a time")
    parser.add_argument("--lowat", type=int, default=16384, help="oracle: TCP_NOTSENT_LOWAT in bytes, 0 for none")
    return parser.parse_args(arguments)


def main() -> int:
    """One line of JSON per mode."""
    options = _parse(sys.argv[1:])
    reason = available()
    if reason is not None:
        sys.stderr.write(f"no emulated WAN here: {reason}\n")
        return 1
    rate = int(options.mbit * 1e6 / 8)
    tensor_bytes = int(options.mib * (1 << 20))
    delay_ns = int(options.rtt_ms * 1e6 / 2)
    buffer_bytes = int(options.bdp * rate * 2 * delay_ns / 1e9)
    forward = LinkSpec(rate, None, delay_ns, buffer_bytes, loss=options.loss)
    back = LinkSpec(rate, None, delay_ns, buffer_bytes, seed=2)
    with Wan(
        {"a": options.senders, "b": options.senders},
        {("a", "b"): forward, ("b", "a"): back},
        mtu=options.mtu,
        slow_start_after_idle=bool(options.ssai),
        tcp_buffer_max_bytes=options.tcp_buffer_mib << 20 or None,
    ) as wan:
        ideal = ideal_cct_seconds(options.senders, tensor_bytes, rate, delay_ns, options.mtu)
        for mode in options.modes:
            if mode == "plain":
                result = run_plain_burst(
                    wan,
                    senders=options.senders,
                    tensor_bytes=tensor_bytes,
                    bursts=options.bursts,
                    warmup_bursts=options.warmup,
                    congestion_control=options.cc,
                    gap_s=options.gap,
                    open_load=options.load,
                )
            else:
                result = run_oracle(
                    wan,
                    senders=options.senders,
                    tensor_bytes=tensor_bytes,
                    bursts=options.bursts,
                    warmup_bursts=options.warmup,
                    congestion_control=options.cc,
                    rate_bytes_per_s=rate,
                    pace_share=options.share,
                    at_once=options.at_once,
                    early_ns=int(options.early_ms * 1e6),
                    notsent_lowat_bytes=options.lowat or None,
                    gap_s=options.gap,
                )
            report = {
                "mode": mode,
                "ideal_cct_seconds": round(ideal, 4),
                "fct_seconds": {name: round(value, 4) for name, value in summarise(result.fct_seconds).items()},
                "cct_seconds": {name: round(value, 4) for name, value in summarise(result.cct_seconds).items()},
                "drops": result.drops,
                "retransmits": result.retransmits,
                "goodput_mbps": round(result.goodput_mbps, 1),
                "warmup_drops": result.warmup_drops,
                "drops_per_burst": result.drops_per_burst,
                "late_p99_us": wan.fidelity().late_p99_ns // 1000,
            }
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
