"""What is simulated: stages on workers at sites, the WAN between the sites, and the presets of published settings.

What the model leaves out: collectives within a site, data-parallel synchronisation and the optimizer (they are the same
for all systems), and time within a site, but for a constant per hop. All pipelines are alike and start at once.

A message's *delay* is one way. Published settings name one delay and don't say which; the presets take it as one way,
as the first study did (FACTS, section 5), and ``rtt`` halves it. The figures differ by 10 to 40 %.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping

from proxyd.core.errors import ConfigError
from proxyd.core.traces import RateTrace, constant, synthetic
from proxyd_client.schedule.tasks import Stage

NANOS = 1_000_000_000
TRACE_NS = 600 * NANOS
"""Length of a synthetic trace. It has the nominal mean over this length, so a step of half a minute sees a mean of its
own: that is what a trainer meets."""
ACTIVATION_BYTES = 1 << 30
"""Of one micro-batch on one GPU: ten layers of a 70B model with sequence 4096, in bf16, split over 8 GPUs."""
BUS_BYTES_PER_S = 24_000_000_000
"""PCIe 4.0 x16, as copies from pinned memory reach it; both ways at once."""
SSD_BYTES_PER_S = 3_000_000_000
"""One drive with PCIe 4.0, as it writes for long; it reads faster, and each GPU has to have one of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wire:
    """One direction between two sites."""

    rate: RateTrace
    one_way_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineModel:
    """Figures of one experiment."""

    stages: tuple[Stage, ...]
    sites: tuple[str, ...]
    """Of each stage."""
    pipelines: int
    micro_batches: int
    message_bytes: int
    wires: Mapping[tuple[str, str], Wire]
    activations: int = 8
    """Room for so many on each worker."""
    offload: int = 0
    """Room for so many more in host memory."""
    bus_bytes_per_s: int = BUS_BYTES_PER_S
    ssd: int = 0
    """Room for so many more on an SSD, used when host memory is full."""
    ssd_bytes_per_s: int = SSD_BYTES_PER_S
    """Of each worker, written and read."""
    loss_penalty: float = 0.15
    """Fair sharing: n busy connections together get ``1 / (1 + penalty * (n - 1))`` of the rate."""
    local_ns: int = 0
    """From stage to stage within a site."""
    jitter: float = 0.0
    """Of compute times, half width, as a share."""
    seed: int = 1

    def __post_init__(self) -> None:
        if len(self.stages) < 2 or len(self.sites) != len(self.stages):
            raise ConfigError(
                f"{len(self.stages)} stages at {len(self.sites)} sites: two stages at least, each somewhere"
            )
        if min(self.pipelines, self.micro_batches, self.message_bytes, self.bus_bytes_per_s) < 1:
            raise ConfigError("pipelines, micro-batches, message and bus must be above zero")
        if self.activations < 1 or self.offload < 0:
            raise ConfigError(
                f"memory for {self.activations} activations and {self.offload} more outside is impossible: a stage "
                f"holds one at least"
            )
        if self.ssd < 0 or self.ssd_bytes_per_s < 1 or (self.ssd and not self.offload):
            raise ConfigError(
                f"room for {self.ssd} activations on an SSD at {self.ssd_bytes_per_s} bytes/s is impossible: neither "
                f"may be below zero, nor the rate zero, and it needs room for one in host memory"
            )
        if not 0 <= self.loss_penalty <= 10 or not 0 <= self.jitter < 1:
            raise ConfigError(f"loss penalty {self.loss_penalty} or jitter {self.jitter} is out of range (0..10, 0..1)")
        if any(min(s.forward_ns, s.backward_ns, s.weight_ns) <= 0 for s in self.stages):
            raise ConfigError("F, B and W of each stage take time; one of them is not above zero")
        for src, dst in self.crossings:
            if (src, dst) not in self.wires or (dst, src) not in self.wires:
                raise ConfigError(f"stages at {src} and {dst} are neighbours, and there is no wire between them")

    @property
    def crossings(self) -> list[tuple[str, str]]:
        """Neighbouring stages at different sites, in the forward direction."""
        return [(a, b) for a, b in zip(self.sites, self.sites[1:], strict=False) if a != b]

    @property
    def compute_ns(self) -> int:
        """Of the busiest stage."""
        return self.micro_batches * max(stage.period_ns for stage in self.stages)

    def mean_message_ns(self, src: str, dst: str) -> int:
        """Time of one message at the wire's mean rate, alone."""
        return self.message_bytes * NANOS // self.wires[src, dst].rate.mean_bytes_per_s

    def transfer_ns(self, stage: int) -> int:
        """One activation across the bus, one way."""
        return self.stages[stage].activation_bytes * NANOS // self.bus_bytes_per_s

    @property
    def outside(self) -> int:
        """Room for so many activations in host memory and on the SSD."""
        return self.offload + self.ssd


@dataclasses.dataclass(frozen=True, slots=True)
class Preset:
    """A link of a published setting."""

    delay_ns: int
    rate_bytes_per_s: int
    delay_is_rtt: bool
    """The delay given is the round trip; else, one way."""


PRESETS: Mapping[str, Preset] = {
    "L1": Preset(60_000_000, 12_380_000_000 // 8, False),
    "L2": Preset(180_000_000, 5_530_000_000 // 8, False),
    "L3": Preset(30_000_000, 1_630_000_000 // 8, False),
    "10G60": Preset(60_000_000, 10_000_000_000 // 8, True),
    "4G90": Preset(90_000_000, 4_000_000_000 // 8, True),
}
MICRO_BATCHES = 128
COMPUTE_NS = 24 * NANOS
MESSAGE_BYTES = 64 << 20
STAGES = 8
PIPELINES = 2
MOST_TASKS = 3_000_000
"""Of all pipelines in a step; a published one has 12,288."""
WEIGHT_PARTS = 4
"""Of a W, where a schedule is chosen at run time: ten layers in four pieces. Static orders have W in one piece."""


def rate_trace(kind: str | RateTrace, mean_bytes_per_s: int, seed: int) -> RateTrace:
    """A trace of a class, a constant one, or one of one's own from a place that the seed draws, with this mean.

    Raises ConfigError for another word.
    """
    if isinstance(kind, RateTrace):
        shape = kind.turned(random.Random(f"place {seed}").randrange(kind.period_ns)) if kind.period_ns else kind
        return shape.scaled(mean_bytes_per_s)
    if kind == "constant":
        return constant(mean_bytes_per_s)
    return synthetic(kind, mean_bytes_per_s, TRACE_NS, seed)


def preset_model(
    name: str,
    *,
    trace: str | RateTrace = "moderate",
    seed: int = 1,
    activations: int = 8,
    offload: int = 24,
    loss_penalty: float = 0.15,
    delay: str = "",
    stages: int = STAGES,
    pipelines: int = PIPELINES,
    micro_batches: int = MICRO_BATCHES,
    speeds: tuple[float, ...] = (),
    weight_parts: int = WEIGHT_PARTS,
    ssd: int = 0,
    ssd_bytes_per_s: int = SSD_BYTES_PER_S,
    message_bytes: int = MESSAGE_BYTES,
    period_ns: int = COMPUTE_NS // MICRO_BATCHES,
) -> PipelineModel:
    """Half the stages at site a, half at b; LLaMA2-70B-like; each direction has a trace of its own.

    :param trace: a class, "constant", or a trace with a period: its shape, with the preset's rate as its mean.
    :param delay: "one-way" or "rtt": what the preset's delay is taken for; empty: as published (see :class:`Preset`).
    :param speeds: of the sites' GPUs, relative; empty: all alike.
    :param period_ns: compute time of a micro-batch on a stage: F, B and W take a third each.
    :param weight_parts: so many pieces W has where the next task is chosen at run time.

    Raises ConfigError for unknown names and impossible figures.
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"there is no preset {name!r}", next_step=f"Known: {', '.join(PRESETS)}")
    if delay not in ("", "one-way", "rtt"):
        raise ConfigError(f"a delay is one-way or rtt, not {delay!r}")
    if stages < 2 or stages % 2:
        raise ConfigError(f"{stages} stages can't be halved between two sites")
    if speeds and (len(speeds) != 2 or not all(math.isfinite(one) and 1e-3 <= one <= 1e3 for one in speeds)):
        raise ConfigError(f"speeds {speeds}: one between 0.001 and 1000 for each of the two sites is needed")
    tasks = (2 + weight_parts) * stages * pipelines * micro_batches
    if tasks > MOST_TASKS:
        raise ConfigError(
            f"{stages} stages, {pipelines} pipelines and {micro_batches} micro-batches are {tasks:,} tasks",
            why=f"more than {MOST_TASKS:,} are no step that anybody trains, and would fill the memory",
        )
    is_rtt = preset.delay_is_rtt if not delay else delay == "rtt"
    one_way_ns = preset.delay_ns // 2 if is_rtt else preset.delay_ns
    task_ns = period_ns // 3
    built = []
    for index in range(stages):
        speed = speeds[2 * index // stages] if speeds else 1.0
        took_ns = round(task_ns / speed)
        built.append(
            Stage(index, index == 0, index == stages - 1, took_ns, took_ns, took_ns, ACTIVATION_BYTES, weight_parts)
        )
    return PipelineModel(
        stages=tuple(built),
        sites=tuple("a" if 2 * index < stages else "b" for index in range(stages)),
        pipelines=pipelines,
        micro_batches=micro_batches,
        message_bytes=message_bytes,
        wires={
            ("a", "b"): Wire(rate_trace(trace, preset.rate_bytes_per_s, 2 * seed), one_way_ns),
            ("b", "a"): Wire(rate_trace(trace, preset.rate_bytes_per_s, 2 * seed + 1), one_way_ns),
        },
        activations=activations,
        offload=offload,
        ssd=ssd,
        ssd_bytes_per_s=ssd_bytes_per_s,
        loss_penalty=loss_penalty,
        seed=seed,
    )
