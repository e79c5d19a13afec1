"""Bursts over plain TCP: every host of one site sends one tensor to the other site at the same moment.

This is what a pipeline stage or a gradient exchange does to a shared link without proxyd, and the baseline of the demo.
FCT and CCT run from the moment at which a transfer was due to the receiver's last byte, on one clock.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from proxyd.wan.crew import Crew, Member
from proxyd.wan.errors import WanError
from proxyd.wan.topology import Wan

TCP_HEADERS_BYTES = 52
"""IPv4 (20) + TCP (20) + timestamps (12)."""
PORT = 5201
LEAD_NS = 20_000_000
"""How far ahead a start is ordered, so that every sender has heard of it in time."""
WORKER = str(Path(__file__).with_name("_worker.py"))


def summarise(values: Iterable[float]) -> dict[str, float]:
    """``mean, p50, p95, p99, max`` of some seconds; percentiles interpolate linearly between the two nearest values.

    Raises :class:`WanError` without values.
    """
    ordered = sorted(values)
    if not ordered:
        raise WanError("nothing to summarise: no transfer was measured; give bursts >= 1")

    def percentile(share: float) -> float:
        rank = share * (len(ordered) - 1)
        low = math.floor(rank)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)

    return {
        "mean": math.fsum(ordered) / len(ordered),
        "p50": percentile(0.50),
        "p95": percentile(0.95),
        "p99": percentile(0.99),
        "max": ordered[-1],
    }


def wire_bytes(tensor_bytes: int, mtu: int) -> int:
    """Bytes of IP packets that carry a tensor in full-sized TCP segments."""
    packets = -(-tensor_bytes // (mtu - TCP_HEADERS_BYTES))
    return tensor_bytes + packets * TCP_HEADERS_BYTES


def payload_rate(rate_bytes_per_s: float, mtu: int) -> int:
    """Payload bytes/s of TCP that fill a link of this rate; SO_MAX_PACING_RATE counts these, not headers."""
    return int(rate_bytes_per_s * (mtu - TCP_HEADERS_BYTES) / mtu)


def ideal_cct_seconds(senders: int, tensor_bytes: int, rate_bytes_per_s: int, one_way_delay_ns: int, mtu: int) -> float:
    """The shortest possible burst: time on the link with headers, plus one way. No protocol can finish sooner."""
    return senders * wire_bytes(tensor_bytes, mtu) / rate_bytes_per_s + one_way_delay_ns / 1e9


@dataclass(frozen=True)
class BurstResult:
    """One run. Warm-up bursts are in none of the figures.

    ``goodput_mbps`` is payload in Mbit/s over the time in which at least one measured burst was under way.
    ``drops`` are packets that found the bottleneck's buffer full, ``retransmits`` segments that TCP sent again.
    """

    fct_seconds: list[float]
    cct_seconds: list[float]
    retransmits: int
    drops: int
    goodput_mbps: float
    warmup_drops: int = 0
    drops_per_burst: list[int] = field(default_factory=list)
    """Of all bursts in order, warm-up first; closed loop only."""


def busy_seconds(intervals_ns: Sequence[tuple[int, int]]) -> float:
    """Length of the union of intervals."""
    total_ns, end_ns = 0, 0
    for start, stop in sorted(intervals_ns):
        total_ns += max(0, stop - max(start, end_ns))
        end_ns = max(end_ns, stop)
    return total_ns / 1e9


class Burst:
    """Senders on one site, receivers on the other, connected; the runs below and the oracle direct it."""

    def __init__(
        self,
        wan: Wan,
        crew: Crew,
        *,
        senders: int,
        tensor_bytes: int,
        congestion_control: str,
        notsent_lowat_bytes: int | None = None,
        sites: tuple[str, str] = ("a", "b"),
    ) -> None:
        src, dst = sites
        if senders > wan.sites[src]:
            raise WanError(f"{senders} senders need {senders} hosts on site {src}, it has {wan.sites[src]}")
        self.wan = wan
        self.crew = crew
        self.link = f"{src}->{dst}"
        self.tensor_bytes = tensor_bytes
        hosts = [wan.host(dst, number) for number in range(min(senders, wan.sites[dst]))]
        for host in hosts:
            self._start(wan, host.name, "receive", PORT)
        crew.gather("listening", len(hosts), 30.0)
        self.senders = [self._start(wan, wan.host(src, number).name, "send", number) for number in range(senders)]
        for number, sender in enumerate(self.senders):
            sender.command(
                op="connect",
                address=hosts[number % len(hosts)].address,
                port=PORT,
                congestion=congestion_control,
                notsent_lowat_bytes=notsent_lowat_bytes,
            )
        crew.gather("connected", senders, 30.0)

    def _start(self, wan: Wan, name: str, role: str, argument: int) -> Member:
        site, _, number = name.rpartition("-")
        argv = [sys.executable, "-I", "-S", WORKER, role, str(argument)]
        return self.crew.start(wan.host(site, int(number)), f"{role}r on {name}", argv)

    def send(self, sender: int, sequence: int, at_ns: int, **options: Any) -> None:
        """Order one transfer."""
        self.senders[sender].command(op="send", sequence=sequence, bytes=self.tensor_bytes, at_ns=at_ns, **options)

    def drops(self) -> int:
        """Packets that the bottleneck has dropped so far."""
        return self.wan.counters()[self.link].dropped_packets

    def retransmits(self) -> int:
        """Segments that all senders have sent again so far. Call it while nobody sends."""
        for sender in self.senders:
            sender.command(op="info")
        return sum(info["retransmits"] for _, info in self.crew.gather("info", len(self.senders), 60.0))


def run_plain_burst(
    wan: Wan,
    *,
    senders: int,
    tensor_bytes: int,
    bursts: int,
    warmup_bursts: int,
    congestion_control: str,
    gap_s: float = 0.35,
    open_load: float | None = None,
    sites: tuple[str, str] = ("a", "b"),
    timeout_s: float = 120.0,
) -> BurstResult:
    """All senders at once over plain TCP, on persistent connections.

    Closed loop: the next burst is due ``gap_s`` after the last arrival. Open loop: bursts are due at a fixed period, so
    that payload is offered at ``open_load`` of the link's rate, ready or not. ``timeout_s`` bounds one burst.
    Raises :class:`WanError` if a host is missing, a process dies, or a burst does not end.
    """
    with Crew() as crew:
        burst = Burst(
            wan,
            crew,
            senders=senders,
            tensor_bytes=tensor_bytes,
            congestion_control=congestion_control,
            sites=sites,
        )
        if open_load is None:
            return _closed_loop(burst, bursts, warmup_bursts, gap_s, timeout_s)
        return _open_loop(burst, bursts, warmup_bursts, open_load, timeout_s)


def _closed_loop(burst: Burst, bursts: int, warmup_bursts: int, gap_s: float, timeout_s: float) -> BurstResult:
    senders = len(burst.senders)
    fct: list[float] = []
    cct: list[float] = []
    drops = [burst.drops()]
    retransmits_before = 0
    due_ns = time.monotonic_ns() + LEAD_NS
    for number in range(warmup_bursts + bursts):
        for sender in range(senders):
            burst.send(sender, number, due_ns)
        arrivals = [event["last_ns"] for _, event in burst.crew.gather("received", senders, timeout_s)]
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
        goodput_mbps=bursts * senders * burst.tensor_bytes * 8 / 1e6 / math.fsum(cct),
        warmup_drops=drops[warmup_bursts] - drops[0],
        drops_per_burst=[after - before for before, after in pairwise(drops)],
    )


def _open_loop(burst: Burst, bursts: int, warmup_bursts: int, load: float, timeout_s: float) -> BurstResult:
    senders = len(burst.senders)
    spec = burst.wan.links[tuple(burst.link.split("->", 1))]  # type: ignore[index]
    if spec.rate_bytes_per_s is None:
        raise WanError("an open load needs a link with a fixed rate; this one follows a trace")
    period_ns = int(senders * burst.tensor_bytes * 1e9 / (load * spec.rate_bytes_per_s))
    first_ns = time.monotonic_ns() + LEAD_NS
    total = warmup_bursts + bursts
    due = [first_ns + number * period_ns for number in range(total)]
    arrivals: list[list[int]] = [[] for _ in range(total)]
    drops_before = burst.drops()
    drops_warm = drops_before
    # A sender works its orders off one after another; the order after the last warm-up asks for its retransmits.
    for number in range(total):
        if number == warmup_bursts:
            for member in burst.senders:
                member.command(op="info")
        for sender in range(senders):
            burst.send(sender, number, due[number])
    retransmits_before = 0
    waiting = total * senders
    while waiting:
        left_s = max(0.0, due[-1] - time.monotonic_ns()) / 1e9 + timeout_s
        _, event = burst.crew.next_event(left_s)
        if event["event"] == "info":
            retransmits_before += event["retransmits"]
        elif event["event"] == "received":
            arrivals[event["sequence"]].append(event["last_ns"])
            waiting -= 1
            if event["sequence"] < warmup_bursts:
                drops_warm = burst.drops()
    last = [max(times) for times in arrivals]
    intervals = list(zip(due, last, strict=True))[warmup_bursts:]
    return BurstResult(
        fct_seconds=[
            (arrival - due[number]) / 1e9 for number in range(warmup_bursts, total) for arrival in arrivals[number]
        ],
        cct_seconds=[(stop - start) / 1e9 for start, stop in intervals],
        retransmits=burst.retransmits() - retransmits_before,
        drops=burst.drops() - drops_warm,
        goodput_mbps=bursts * senders * burst.tensor_bytes * 8 / 1e6 / busy_seconds(intervals),
        warmup_drops=drops_warm - drops_before,
    )
