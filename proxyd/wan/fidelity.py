"""How exact is the emulated WAN here? ``python -m proxyd.wan.fidelity`` measures it; docs/wan.md keeps figures.

Rate: two bbr senders keep a deep buffer busy; the link's own counter over the middle of the run, against the asked one.
Delay: datagrams that carry the sender's clock, against delay plus time on the link. Loss: datagrams counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from proxyd.wan.burst import LEAD_NS, WORKER, Burst
from proxyd.wan.crew import Crew
from proxyd.wan.spec import LinkSpec
from proxyd.wan.topology import Wan, available

PING_PORT = 5301
PING_BYTES = 200
IP_UDP_HEADER_BYTES = 28


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one_way_delays(wan: Wan, count: int, gap_ns: int) -> list[int]:
    """Sorted one-way delays in ns of ``count`` datagrams from a-0 to b-0; lost ones are missing."""
    worker = [sys.executable, "-I", "-S", WORKER]
    with Crew() as crew:
        crew.start(wan.host("b", 0), "pong", [*worker, "pong", str(PING_PORT)])
        crew.gather("listening", 1, 30.0)
        arguments = [wan.host("b", 0).address, PING_PORT, count, PING_BYTES, gap_ns]
        crew.start(wan.host("a", 0), "ping", [*worker, "ping", *map(str, arguments)])
        ((_, event),) = crew.gather("delays", 1, count * gap_ns / 1e9 + 30.0)
    return sorted(event["delays_ns"])


def delay_report(delays_ns: list[int], spec: LinkSpec) -> dict[str, float]:
    """Median and 99th percentile of what a delay exceeds the description by, in microseconds."""
    assert spec.rate_bytes_per_s is not None, "measured on links of a fixed rate"
    ideal_ns = spec.one_way_delay_ns + (PING_BYTES + IP_UDP_HEADER_BYTES) * 1_000_000_000 // spec.rate_bytes_per_s
    return {
        "error_p50_us": (delays_ns[len(delays_ns) // 2] - ideal_ns) / 1000,
        "error_p99_us": (delays_ns[len(delays_ns) * 99 // 100] - ideal_ns) / 1000,
    }


def measure(rate_bytes_per_s: int, delay_ns: int, mtu: int, seconds: float) -> dict[str, object]:
    """All figures at one rate."""
    # Deep, so that the link never runs dry; the delay is measured while it is empty.
    buffer_bytes = max(1_000_000, 4 * rate_bytes_per_s * 2 * delay_ns // 1_000_000_000)
    spec = LinkSpec(rate_bytes_per_s, None, delay_ns, buffer_bytes)
    back = LinkSpec(rate_bytes_per_s, None, delay_ns, buffer_bytes, seed=2)
    report: dict[str, object] = {"rate_mbit_per_s": rate_bytes_per_s * 8 / 1e6, "mtu": mtu}
    with Wan({"a": 2, "b": 2}, {("a", "b"): spec, ("b", "a"): back}, mtu=mtu, tcp_buffer_max_bytes=32 << 20) as wan:
        report["idle_delay"] = delay_report(one_way_delays(wan, int(seconds * 500), 2_000_000), spec)
        with Crew() as crew:
            burst = Burst(
                wan,
                crew,
                senders=2,
                tensor_bytes=int(rate_bytes_per_s * (seconds + 3.0) / 2),
                congestion_control="bbr",
            )
            for sender in range(2):
                burst.send(sender, 0, time.monotonic_ns() + LEAD_NS)
            time.sleep(2.0)
            before, before_ns, cpu = wan.counters()["a->b"], time.monotonic_ns(), cpu_seconds(wan.emulator_pid)
            time.sleep(seconds)
            after, after_ns = wan.counters()["a->b"], time.monotonic_ns()
            elapsed_s = (after_ns - before_ns) / 1e9
            report["rate_share"] = (after.passed_bytes - before.passed_bytes) / elapsed_s / rate_bytes_per_s
            report["emulator_cpu_share"] = (cpu_seconds(wan.emulator_pid) - cpu) / elapsed_s
        fidelity = wan.fidelity()
        report["emulator_late_us"] = {
            "p50": fidelity.late_p50_ns / 1000,
            "p99": fidelity.late_p99_ns / 1000,
            "max": fidelity.late_max_ns / 1000,
        }
        report["realtime"] = fidelity.realtime
        wan.set_link("a", "b", loss=0.01)
        count = int(seconds * 1000)
        report["loss_share_of_0.01"] = 1 - len(one_way_delays(wan, count, 1_000_000)) / count
    return report


def main() -> int:
    """One line of JSON per rate."""
    parser = argparse.ArgumentParser(prog="python -m proxyd.wan.fidelity", description=__doc__)
    parser.add_argument("--mbit", type=float, nargs="*", default=[400.0, 1000.0], help="link rates in Mbit/s")
    parser.add_argument("--rtt-ms", type=float, default=60.0)
    parser.add_argument("--mtu", type=int, default=9000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    options = parser.parse_args()
    reason = available()
    if reason is not None:
        sys.stderr.write(f"no emulated WAN here: {reason}\n")
        return 1
    for mbit in options.mbit:
        report = measure(int(mbit * 1e6 / 8), int(options.rtt_ms * 1e6 / 2), options.mtu, options.seconds)
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
