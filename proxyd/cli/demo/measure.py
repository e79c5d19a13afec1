"""Runs one mode: orders bursts, waits for arrivals, reads the counters around them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from proxyd.cli.demo.activity import ActivityRecorder
from proxyd.cli.demo.net import Net
from proxyd.cli.demo.results import Activity, Arrival, RunResult, make_result
from proxyd.cli.demo.scenario import WARMUP_BURSTS, Mode, Scenario, open_period_ns
from proxyd.cli.demo.traffic import DemoError, Traffic
from proxyd.wan.burst import LEAD_NS

BURST_TIMEOUT_S = 120.0
"""Most time for one burst in a closed loop."""

OnBurst = Callable[[], None]


def measure(
    net: Net,
    scenario: Scenario,
    mode: Mode,
    traffic: Traffic,
    *,
    link: tuple[str, str] = ("a", "b"),
    warmup: int = WARMUP_BURSTS,
    on_burst: OnBurst = lambda: None,
) -> RunResult:
    """All bursts of a mode, warm-up first. ``on_burst`` is called after each."""
    run = _Run(net, scenario, mode, traffic, link, warmup, on_burst)
    return run.closed_loop() if scenario.open_load is None else run.open_loop()


class _Run:
    def __init__(
        self,
        net: Net,
        scenario: Scenario,
        mode: Mode,
        traffic: Traffic,
        link: tuple[str, str],
        warmup: int,
        on_burst: OnBurst,
    ) -> None:
        self.net = net
        self.scenario = scenario
        self.mode = mode
        self.traffic = traffic
        self.link = link
        self.warmup = warmup
        self.on_burst = on_burst
        self.total = warmup + mode.bursts
        self.due_ns: list[int] = []
        self.arrivals: list[list[Arrival]] = [[] for _ in range(self.total)]
        self.pids = traffic.pids()
        self.drops_before = self.drops_warm = self.drops()
        self.retransmits_warm = self.net.retransmits(self.pids)

    def drops(self) -> int:
        return self.net.drops(*self.link)

    def warm(self) -> None:
        """The warm-up is over: what is counted from here on counts."""
        self.drops_warm = self.drops()
        self.retransmits_warm = self.net.retransmits(self.pids)

    def closed_loop(self) -> RunResult:
        """The next burst is due ``gap_ns`` after the last arrival."""
        recorder: ActivityRecorder | None = None
        due_ns = time.monotonic_ns() + max(LEAD_NS, self.scenario.gap_ns)
        for number in range(self.total):
            if number == self.warmup:
                self.warm()
            if number == self.total - 1 and self.net.kind == "netns":
                recorder = ActivityRecorder(self.pids)
            due_ns = self.one_burst(number, due_ns)
        return self.result(recorder.stop() if recorder is not None else None)

    def one_burst(self, number: int, due_ns: int) -> int:
        """Order a burst and wait for its end; answers when the next is due."""
        self.due_ns.append(due_ns)
        self.traffic.order(number, due_ns)
        while len(self.arrivals[number]) < self.scenario.senders:
            self.take(self.traffic.next_arrival(BURST_TIMEOUT_S))
        self.on_burst()
        last_ns = max(arrival.end_ns for arrival in self.arrivals[number])
        return max(last_ns + self.scenario.gap_ns, time.monotonic_ns() + LEAD_NS)

    def open_loop(self) -> RunResult:
        """Bursts are due at a fixed period, ready or not; but for the warm-up, whose backlog would be counted."""
        first_ns = time.monotonic_ns() + max(LEAD_NS, self.scenario.gap_ns)
        for number in range(self.warmup):
            first_ns = self.one_burst(number, first_ns)
        self.warm()
        period_ns = open_period_ns(self.scenario)
        for number in range(self.warmup, self.total):
            self.due_ns.append(first_ns + (number - self.warmup) * period_ns)
            self.traffic.order(number, self.due_ns[-1])
        for _ in range(self.mode.bursts * self.scenario.senders):
            wait_ns = max(0, self.due_ns[-1] - time.monotonic_ns())
            number = self.take(self.traffic.next_arrival(wait_ns / 1e9 + BURST_TIMEOUT_S))
            if len(self.arrivals[number]) == self.scenario.senders:
                self.on_burst()
        return self.result(None)

    def take(self, arrival: Arrival) -> int:
        """File an arrival; answers its burst."""
        burst = self.arrivals[arrival.number]
        if any(other.sender == arrival.sender for other in burst):
            raise DemoError(f"rank {arrival.sender}'s message of burst {arrival.number} arrived twice")
        burst.append(arrival)
        return arrival.number

    def result(self, activity: Activity | None) -> RunResult:
        """Everything has arrived."""
        drops = (self.drops_before, self.drops_warm, self.drops())
        retransmits = self.net.retransmits(self.pids) - self.retransmits_warm
        counters = self.traffic.finish(self.total * self.scenario.senders)
        result = make_result(
            self.scenario,
            self.mode,
            self.due_ns,
            self.arrivals,
            warmup=self.warmup,
            drops=drops,
            retransmits=retransmits,
        )
        result.counters = counters
        result.late_p99_ns = self.net.late_p99_ns()
        trace = result.trace
        trace.activity = activity
        times, queue = self.net.queue(*self.link)
        kept = [pair for pair in zip(times, queue, strict=True) if pair[0] >= trace.due_ns[0]]
        trace.queue_times_ns = array("q", (time_ns for time_ns, _ in kept))
        trace.queue_bytes = array("q", (queue_bytes for _, queue_bytes in kept))
        return result
