"""Policies on a link that nobody configured, with TCP below the grants and agents that are their own selves."""

from __future__ import annotations

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig
from proxyd.core.events import LocalTime, PolicyChanged
from proxyd.core.ids import AgentName, EndpointName, LinkName
from proxyd.core.policy import JobPolicy, LinkPolicy, Policy, parse_window
from proxyd.core.traces import RateTrace, synthetic
from proxyd.sim.checks import check_coordinator
from proxyd.sim.link import LinkModel
from proxyd.sim.workloads import Backlog, Pair
from proxyd.sim.world import CoordinatorHost, World
from proxyd.wire.envelope import TrafficClass

THERE, BACK = LinkName("a", "b"), LinkName("b", "a")
ADDRESS = "coordinator:7600"
RATE = 50_000_000
SECOND = 1_000_000_000
RTT_NS = 60_000_000
MESSAGE = 2 << 20


class Site:
    """Jobs with agents of their own at both ends of one live link of 400 Mbit/s, 60 ms, a buffer of 1 BDP."""

    def __init__(self, policy: Policy, agents: dict[str, int], seed: int = 1, trace: RateTrace | None = None) -> None:
        there = LinkModel(RATE, RTT_NS // 2, RATE * RTT_NS // SECOND, trace=trace)
        back = LinkModel(RATE, RTT_NS // 2, RATE * RTT_NS // SECOND)
        self.world = World(seed, {THERE: there, BACK: back}, eager_bytes=256 << 20, stream_capacity_bytes=16 << 20)
        self.world.check_coordinator = check_coordinator
        settings = tuple(LinkSettings(name, mtu_bytes=9000, live=True) for name in (THERE, BACK))
        self.coordinator: CoordinatorHost = self.world.start_coordinator(ADDRESS, CoordinatorConfig(links=settings), 1)
        self.coordinator.handle(PolicyChanged(policy))
        self.pairs: dict[str, list[Pair]] = {}
        number = 0
        for job, count in agents.items():
            for _ in range(count):
                for site, rank in (("a", 2 * number), ("b", 2 * number + 1)):
                    host = self.world.start_agent(AgentName(site, f"host{number}"), (ADDRESS,), 1 << 40)
                    self.world.start_trainer(host, EndpointName(job, rank))
                pair = Pair(EndpointName(job, 2 * number), EndpointName(job, 2 * number + 1))
                self.pairs.setdefault(job, []).append(pair)
                number += 1
        self.world.clock.run(SECOND // 2)

    def run(self, traffic: dict[str, TrafficClass], seconds: float) -> None:
        """Keep so many messages posted for so long."""
        until_ns = self.world.clock.now_ns + int(seconds * SECOND)
        for job, one in traffic.items():
            Backlog(self.world, self.pairs[job], MESSAGE, one, depth=12, until_ns=until_ns).start()

    def rates(self, from_s: float, to_s: float) -> dict[str, float]:
        """Payload bytes per second that arrived for each job in a stretch of time (from the first moment on)."""
        self.world.clock.run(int(to_s * SECOND))
        got: dict[str, float] = {}
        for fate in self.world.fates.values():
            if from_s * SECOND <= fate.landed_ns < to_s * SECOND:
                job = fate.envelope.job
                got[job] = got.get(job, 0) + fate.envelope.nbytes / (to_s - from_s)
        return got


@pytest.mark.parametrize("traffic", list(TrafficClass))
@pytest.mark.parametrize("kind", ["constant", "moderate"])
def test_weights_hold_within_5_percent_over_10_seconds(traffic: TrafficClass, kind: str) -> None:
    trace = None if kind == "constant" else synthetic(kind, RATE, 30 * SECOND, 3)
    site = Site(Policy({"x": JobPolicy(3)}), {"x": 2, "y": 2}, trace=trace)
    site.run(dict.fromkeys("xy", traffic), 16)
    rates = site.rates(4, 14)
    # One message more or less in a stretch is 2 % of the lighter job's.
    assert rates["x"] / (rates["x"] + rates["y"]) == pytest.approx(0.75, rel=0.05)
    assert rates["y"] / (rates["x"] + rates["y"]) == pytest.approx(0.25, rel=0.07)
    if kind == "constant":
        assert rates["x"] + rates["y"] > 0.9 * RATE


def test_floors_caps_and_calendars_hold_on_a_live_link() -> None:
    policy = Policy(
        {"low": JobPolicy(1, 6_250_000), "capped": JobPolicy(9, 0, 5_000_000)},
        {THERE: LinkPolicy(0, (parse_window("mon 09:00-10:00 200Mbit"),))},
    )
    site = Site(policy, {"low": 1, "capped": 1, "high": 2})
    site.coordinator.handle(LocalTime(0))
    site.run({"low": TrafficClass.BULK, "capped": TrafficClass.PIPELINE, "high": TrafficClass.PIPELINE}, 30)
    rates = site.rates(4, 14)
    assert rates["low"] > 0.95 * 6_250_000
    assert rates["capped"] == pytest.approx(5_000_000, rel=0.07)
    assert rates["high"] > 0.6 * RATE
    site.coordinator.handle(LocalTime(9 * 60))
    rates = site.rates(15, 25)
    assert 0.9 * 25_000_000 < sum(rates.values()) < 25_000_000
    assert rates["low"] > 0.95 * 6_250_000
    assert rates["capped"] < 1.05 * 5_000_000


def test_a_small_urgent_message_passes_a_saturating_bulk_job() -> None:
    """p99 of 256 KiB messages: at most two round trips and one slot (20 ms)."""
    site = Site(Policy(), {"bulk": 2, "urgent": 1})
    site.run({"bulk": TrafficClass.BULK}, 25)
    site.world.clock.run(4 * SECOND)
    (pair,) = site.pairs["urgent"]
    sender = site.world.trainers[pair.sender]
    sent = []
    for index in range(160):
        sent.append(sender.send(pair.receiver.rank, 256 << 10, TrafficClass.PIPELINE))
        site.world.clock.run(4 * SECOND + (index + 1) * 120_000_000)
    # The first ones find TCP's windows cold.
    times = sorted(site.world.fates[transfer].fct_ns for transfer in sent[10:])
    assert times[0] > 0
    assert times[int(0.99 * 150)] <= 2 * RTT_NS + 20_000_000, [ns // 1_000_000 for ns in times[-8:]]
