"""The wire under proxyd's own machines: agents, coordinator, TCP and a drop-tail buffer, all of them modelled.

What :mod:`proxyd.sim.world` simulates for single links carries the pipelines' messages here: each pipeline has an agent
at each site, messages are asked for, granted slots by the coordinator's core, sent by modelled TCP, and the rate is
what the core has estimated from reports, a round trip late. Nobody tells it the trace, nor the rate.

A trainer runs for weeks and is measured in the midst of it, so before the measured step the wire carries messages for
:func:`warm_up_ns`, at its mean rate: by then connections and estimate are as earlier steps have left them. The search
for a rate of which nothing is known takes some 20 round trips, and windows of fresh connections as many. The trace
begins with the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from functools import partial

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig
from proxyd.core.ids import AgentName, EndpointName, LinkName
from proxyd.core.traces import RateTrace, constant
from proxyd.sim.link import LinkModel
from proxyd.sim.pipeline.model import NANOS, PipelineModel
from proxyd.sim.pipeline.wan import Direction, Prediction, estimate
from proxyd.sim.trainer import Fate, Trainer
from proxyd.sim.world import World
from proxyd.wire.envelope import TrafficClass

JOB = "pipelines"
COORDINATOR = "coordinator:7600"
WARM_NS = 4 * NANOS
WARM_ROUND_TRIPS = 40
CONNECT_NS = NANOS
MTU_BYTES = 9000
BUFFER_BDP = 0.5
"""Of each wire's buffer, in what it holds at its mean rate: shallow, as long links have it."""
CONTROL_RTT_NS = 1_000_000
BUSY_GAP_NS = 5_000_000
WARM_BDP = 1.5
"""In flight and waiting before the step, in what the wire holds: so that it is full."""


def warm_up_ns(model: PipelineModel) -> int:
    """How long the wires carry messages before the step, unless told otherwise."""
    round_trip_ns = max(wire.one_way_ns + model.wires[dst, src].one_way_ns for (src, dst), wire in model.wires.items())
    return max(WARM_NS, WARM_ROUND_TRIPS * round_trip_ns)


def delayed(trace: RateTrace, by_ns: int) -> RateTrace:
    """The trace's first round, after so long at its mean; then its last rate."""
    if trace.constant:
        return constant(trace.mean_bytes_per_s)
    starts = [0, *(start + by_ns for start in trace.starts_ns)]
    rates = [trace.mean_bytes_per_s, *trace.rates_bytes_per_s]
    return RateTrace(starts, rates, trace.period_ns + by_ns if trace.period_ns else 0)


@dataclasses.dataclass(slots=True)
class _Sent:
    """A message under way."""

    arrived: Callable[[], None]
    landed: bool = False


class GrantedWan:
    """Messages through proxyd's machines.

    :param buffer_bdp: of each wire, in what it holds at its mean rate.
    :param warm_ns: how long it carries messages before the step; None: :func:`warm_up_ns`.
    """

    def __init__(self, model: PipelineModel, buffer_bdp: float = BUFFER_BDP, warm_ns: int | None = None) -> None:
        self._model = model
        self._start_ns = CONNECT_NS + (warm_up_ns(model) if warm_ns is None else warm_ns)
        sites = sorted({site for pair in model.wires for site in pair})
        links = {}
        for (src, dst), wire in model.wires.items():
            rate = wire.rate.mean_bytes_per_s
            back = model.wires[dst, src]
            bdp = rate * (wire.one_way_ns + back.one_way_ns) // NANOS
            links[LinkName(src, dst)] = LinkModel(
                rate,
                wire.one_way_ns,
                max(10 * MTU_BYTES, round(buffer_bdp * bdp)),
                mtu_bytes=MTU_BYTES,
                trace=delayed(wire.rate, self._start_ns),
            )
        most = max(link.rate_bytes_per_s * 2 * link.one_way_ns // NANOS for link in links.values())
        self._world = World(
            model.seed,
            links,
            control_ns=CONTROL_RTT_NS // 2 - 100_000,
            control_jitter_ns=200_000,
            eager_bytes=max(64 << 20, 4 * most, 4 * model.message_bytes),
            stream_capacity_bytes=max(4 << 20, most // 2),
            reopen_windows=True,
        )
        self.clock = self._world.clock
        settings = tuple(
            LinkSettings(name, 0, 0, 0, mtu_bytes=MTU_BYTES, source="default", live=True) for name in links
        )
        config = CoordinatorConfig(links=settings, control_rtt_ns=CONTROL_RTT_NS)
        self._world.start_coordinator(COORDINATOR, config, 1)
        self._rank = {}
        for pipeline in range(model.pipelines):
            for place, site in enumerate(sites):
                self._rank[pipeline, site] = rank = pipeline * len(sites) + place
                host = self._world.start_agent(AgentName(site, f"host{pipeline}"), (COORDINATOR,), 1 << 50)
                self._world.start_trainer(host, EndpointName(JOB, rank))
        self._waiting: dict[tuple[int, Direction], deque[_Sent]] = {}
        """Messages in the order of their sends."""
        self._queued = dict.fromkeys(model.wires, 0)
        self._busy: dict[Direction, list[tuple[int, int]]] = {direction: [] for direction in model.wires}

    def start(self) -> None:
        """Connect, and carry messages until the step begins."""
        self.clock.run(CONNECT_NS)
        model = self._model
        for (src, dst), wire in model.wires.items():
            pipe_bytes = wire.rate.mean_bytes_per_s * (wire.one_way_ns + model.wires[dst, src].one_way_ns) // NANOS
            each = max(2, math.ceil(WARM_BDP * pipe_bytes / (model.pipelines * model.message_bytes)))
            # What is posted last arrives before the step: it waits for all that is posted, and crosses.
            busy_ns = each * model.pipelines * model.mean_message_ns(src, dst)
            until_ns = self._start_ns - busy_ns - 2 * wire.one_way_ns
            for pipeline in range(model.pipelines):
                for _ in range(each):
                    self._warm(pipeline, (src, dst), until_ns)
        self.clock.run(self._start_ns)

    def _warm(self, pipeline: int, direction: Direction, until_ns: int) -> None:
        if self.clock.now_ns < until_ns:
            self.send(pipeline, direction, partial(self._warm, pipeline, direction, until_ns))

    def _trainer(self, pipeline: int, site: str) -> Trainer:
        return self._world.trainers[EndpointName(JOB, self._rank[pipeline, site])]

    def send(self, pipeline: int, direction: Direction, arrived: Callable[[], None]) -> None:
        """A message goes out; whatever order they land in, they arrive in the order of their sends."""
        waiting = self._waiting.setdefault((pipeline, direction), deque())
        entry = _Sent(arrived)
        waiting.append(entry)
        self._queued[direction] += self._model.message_bytes
        begin_ns = self.clock.now_ns
        self._trainer(pipeline, direction[0]).send(
            self._rank[pipeline, direction[1]],
            self._model.message_bytes,
            TrafficClass.PIPELINE,
            on_landed=partial(self._landed, waiting, entry, direction, begin_ns),
        )

    def _landed(self, waiting: deque[_Sent], entry: _Sent, direction: Direction, begin_ns: int, fate: Fate) -> None:
        entry.landed = True
        self._queued[direction] -= self._model.message_bytes
        stretches = self._busy[direction]
        end_ns = self.clock.now_ns - self._model.wires[direction].one_way_ns
        if stretches and begin_ns <= stretches[-1][1] + BUSY_GAP_NS:
            begin_ns, end_ns = stretches[-1][0], max(stretches.pop()[1], end_ns)
        stretches.append((begin_ns, end_ns))
        while waiting and waiting[0].landed:
            waiting.popleft().arrived()

    def predict(self, pipeline: int, direction: Direction, ready_ns: int) -> Prediction | None:
        """From the rate of a round trip ago and what is queued."""
        wire = self._world.link(*direction).model
        now_ns = self.clock.now_ns
        rate, moved = estimate(wire.service, wire.one_way_ns, now_ns)
        free_ns = now_ns + self._queued[direction] * NANOS // rate
        left_ns = max(ready_ns, free_ns) + self._model.message_bytes * NANOS // rate
        return Prediction(left_ns + wire.one_way_ns, round(moved * (left_ns - now_ns)))

    def use(self) -> dict[Direction, list[tuple[int, int]]]:
        """Stretches in which messages were on their way out."""
        return self._busy
