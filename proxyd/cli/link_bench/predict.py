"""How well arrivals are predicted: what a receiver believes at given moments, beside what came true.

Each sender, a trainer at a host of its own at site a, does what a pipeline's stage does: it announces a tensor,
computes (sleeps) about as long as it said, sends, and waits until it is acknowledged. Its receiver at site b writes
down, every 2 ms, when it expects the tensor; the last byte's arrival is what is true. All of them share one link.

Moments, as the receiver knows them:

* ``announce``: the first prediction that it has, a one-way delay after the announcement;
* ``grant``: what it believes once the word of the first grant has had time to arrive;
* ``half-way``: in the middle between that grant and the arrival.
"""

from __future__ import annotations

import bisect
import random
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import proxyd_client
from proxyd.cli.cluster import Cluster, LinkFigures
from proxyd.cli.link_bench.figures import percentile
from proxyd.core.errors import ProxydError
from proxyd.wan import LinkSpec, Wan

MOMENTS = ("announce", "grant", "half-way")
LOOK_S = 0.002
WORD_NS = 5_000_000
"""Beside the one-way delay: what agents and processes take to hand on the word of a grant."""
WARM_MESSAGES = 3
"""Of each sender and case, in no figure: they open TCP's windows, and find a link's rate where it isn't configured."""
TIMEOUT_S = 60.0
ARENA = "64MiB"
"""Room for the largest tensors that are worth a prediction; their senders have one under way."""


@dataclass(frozen=True)
class PredictScenario:
    """One direction between two sites, and what is sent over it."""

    rate_bytes_per_s: int
    rtt_ns: int
    buffer_bytes: int
    mtu: int
    configured: bool
    messages: int
    """Of each sender and case."""
    compute_s: float
    """What a sender computes before it sends, on average; from half of it to one and a half."""
    jitter: float
    """How far off its own estimate of that is, at most, as a share of it."""
    seed: int = 1

    def describe(self) -> str:
        """For people."""
        return (
            f"{self.rate_bytes_per_s * 8 / 1e6:g} Mbit/s, {self.rtt_ns / 1e6:g} ms, buffer {self.buffer_bytes} bytes; "
            f"{self.messages} messages per sender, computed for {self.compute_s * 1000:g} ms, announced to within "
            f"{self.jitter:.0%}"
        )


@dataclass(frozen=True)
class Told:
    """One message: what was believed when, and what came true; nanoseconds of one clock."""

    announced_ns: int
    posted_ns: int
    granted_ns: int
    arrived_ns: int
    beliefs: Sequence[tuple[int, int]]
    """(when, predicted arrival)."""

    def errors_ns(self, one_way_ns: int) -> dict[str, int | None]:
        """Predicted minus true arrival at each moment; None: nothing was predicted then."""
        known_ns = self.granted_ns + one_way_ns + WORD_NS
        first = self.beliefs[0][1] if self.beliefs and self.beliefs[0][0] < self.posted_ns else None
        return {
            "announce": None if first is None else first - self.arrived_ns,
            "grant": self._at(known_ns),
            "half-way": self._at((known_ns + self.arrived_ns) // 2),
        }

    def _at(self, when_ns: int) -> int | None:
        place = bisect.bisect_right(self.beliefs, (when_ns, 1 << 62))
        return self.beliefs[place - 1][1] - self.arrived_ns if place else None


class _Flow:
    """One sender and its receiver."""

    def __init__(self, number: int, cluster: Cluster, scenario: PredictScenario, ending: ExitStack) -> None:
        self._number = number
        self._scenario = scenario
        self._random = random.Random(scenario.seed * 1000 + number)
        self._sender = ending.enter_context(
            proxyd_client.connect("predict", number, socket=cluster.agent("a", number).socket)
        )
        self._receiver = ending.enter_context(
            proxyd_client.connect("predict", 100 + number, socket=cluster.agent("b").socket)
        )
        self._tag = 0
        self.told: list[Told] = []
        self.error: BaseException | None = None

    def run(self, nbytes: int) -> None:
        """All messages of one case, one after the other; in a thread of its own."""
        try:
            data, out = bytes(nbytes), bytearray(nbytes)
            for count in range(WARM_MESSAGES + self._scenario.messages):
                told = self._one(data, out)
                if count >= WARM_MESSAGES:
                    self.told.append(told)
        except Exception as error:  # noqa: BLE001 - whatever it is, who joins this thread raises it
            self.error = error

    def _one(self, data: bytes, out: bytearray) -> Told:
        scenario, tag, beliefs = self._scenario, self._tag, []
        self._tag += 1
        takes_s = scenario.compute_s * self._random.uniform(0.5, 1.5)
        says_s = takes_s * (1 + scenario.jitter * self._random.uniform(-1, 1))
        arrived = threading.Event()
        times: list[int] = []

        def landed() -> None:
            times.append(time.monotonic_ns())
            arrived.set()

        receive = self._receiver.irecv_into(out, self._number, tag)
        receive.call_when_done(landed)

        def look() -> None:
            eta_s = receive.eta_s()
            if eta_s is None:
                eta_s = self._receiver.eta(self._number, tag)
            if eta_s is not None and not times:
                now_ns = time.monotonic_ns()
                beliefs.append((now_ns, now_ns + round(eta_s * 1e9)))

        announced_ns = time.monotonic_ns()
        self._sender.announce(100 + self._number, tag, nbytes=len(data), ready_in_s=says_s)
        ready_ns = announced_ns + round(takes_s * 1e9)
        while time.monotonic_ns() < ready_ns:
            look()
            time.sleep(LOOK_S)
        posted_ns = time.monotonic_ns()
        send = self._sender.isend(data, 100 + self._number, tag)
        granted_ns = 0
        while not arrived.wait(LOOK_S):
            if not granted_ns and (": granted" in repr(send) or ": sending" in repr(send)):
                granted_ns = time.monotonic_ns()
            look()
            if time.monotonic_ns() - posted_ns > TIMEOUT_S * 1e9:
                raise ProxydError(f"message {tag} of sender {self._number} did not arrive within {TIMEOUT_S:g} s")
        receive.wait(TIMEOUT_S)
        send.wait(TIMEOUT_S)
        return Told(announced_ns, posted_ns, granted_ns or posted_ns, times[0], beliefs)


def measure(scenario: PredictScenario, cases: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
    """Build the WAN, run each case (senders, bytes), answer its figures."""
    wanted = list(cases)
    senders = max(count for count, _ in wanted)
    spec = LinkSpec(scenario.rate_bytes_per_s, None, scenario.rtt_ns // 2, scenario.buffer_bytes)
    figures = None
    if scenario.configured:
        figures = LinkFigures(
            f"{scenario.rate_bytes_per_s * 8}bit",
            f"{scenario.rtt_ns}ns",
            f"{scenario.buffer_bytes}B",
            mtu=scenario.mtu,
        )
    pairs = {("a", "b"): spec, ("b", "a"): spec}
    results = []
    with ExitStack() as ending:
        wan = ending.enter_context(Wan({"a": senders, "b": 1}, pairs, mtu=scenario.mtu))
        cluster = ending.enter_context(
            Cluster(
                {"a": senders, "b": 1},
                links=dict.fromkeys(pairs, figures),
                wan=wan,
                agent={"arena": ARENA},
                log_level="warning",
            )
        )
        for count, nbytes in wanted:
            with ExitStack() as case:
                flows = [_Flow(number, cluster, scenario, case) for number in range(count)]
                threads = [threading.Thread(target=flow.run, args=(nbytes,), name="flow") for flow in flows]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                for flow in flows:
                    if flow.error is not None:
                        raise flow.error
                told = [one for flow in flows for one in flow.told]
            results.append(case_figures(count, nbytes, told, scenario.rtt_ns // 2))
    return results


def case_figures(senders: int, nbytes: int, told: Sequence[Told], one_way_ns: int) -> dict[str, Any]:
    """Errors at each moment, in seconds and as a share of what the transfer took from being posted until it arrived."""
    took_s = sorted((one.arrived_ns - one.posted_ns) / 1e9 for one in told)
    case: dict[str, Any] = {
        "senders": senders,
        "bytes": nbytes,
        "messages": len(told),
        "took_p50_s": percentile(took_s, 0.5),
        "moments": {},
    }
    every = [(one.errors_ns(one_way_ns), (one.arrived_ns - one.posted_ns) / 1e9) for one in told]
    for moment in MOMENTS:
        found = [(error / 1e9, span_s) for errors, span_s in every if (error := errors[moment]) is not None]
        absolute = sorted(abs(error_s) for error_s, _ in found)
        relative = sorted(abs(error_s) / span_s for error_s, span_s in found)
        signed = sorted(error_s for error_s, _ in found)
        case["moments"][moment] = {
            "predicted": len(found),
            "error_p50_s": percentile(absolute, 0.5) if found else None,
            "error_p95_s": percentile(absolute, 0.95) if found else None,
            "relative_p50": percentile(relative, 0.5) if found else None,
            "relative_p95": percentile(relative, 0.95) if found else None,
            "bias_p50_s": percentile(signed, 0.5) if found else None,
        }
    return case
