"""A link that changes and the senders that fill it, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proxyd.cli.demo.scenario import MIB, Scenario
from proxyd.core import traces
from proxyd.core.errors import ConfigError
from proxyd.core.units import NS_PER_S, bdp_bytes, format_duration, format_rate
from proxyd.wan import LinkSpec, PolicerSpec, RateSteps

WARMUP_RTTS = 10
"""Left out of a backlogged link's figures: start-up."""
STEPS = {"halve": (1.0, 0.5), "double": (0.5, 1.0)}
"""Factors of the rate before and after."""
MESSAGE_S = 0.17
"""How long a message of the default size takes at the link's rate."""


@dataclass(frozen=True)
class LinkScenario(Scenario):
    """One direction, ``a->b``, is looked at; the other has the mean rate throughout.

    ``rate_bytes_per_s`` is the mean of a trace, and the higher rate of a step. ``bdp_bytes`` and the buffer are those
    of that rate.
    """

    seconds: float = 20.0
    trace: str = ""
    """A class of :data:`proxyd.core.traces.TRACE_CLASSES`, the path of a mahimahi-style file, "": a constant rate."""
    step: str = ""
    """"halve", "double" or "" (none)."""
    step_at_s: float = 0.0
    seed: int = 1
    depth: int = 2
    """Messages that a sender has under way at any time."""
    cross_flood_bytes_per_s: int = 0
    """Datagrams of somebody else on the same link, from a quarter of the time to three quarters."""
    cross_tcp: str = ""
    """Congestion control of a plain TCP flow of somebody else, in the same stretch of time; "": none."""
    policer: PolicerSpec | None = None
    configured: bool = False

    @property
    def warmup_ns(self) -> int:
        """Start-up, in none of the figures."""
        return WARMUP_RTTS * self.rtt_ns

    @property
    def has_cross(self) -> bool:
        """Somebody else sends too."""
        return bool(self.cross_flood_bytes_per_s or self.cross_tcp)

    @property
    def sites(self) -> dict[str, int]:
        """One host for each sender and one for all receivers; the last of each for somebody else."""
        extra = int(self.has_cross)
        return {"a": self.senders + extra, "b": self.receiving_hosts + extra}

    @property
    def tcp_buffer_max_bytes(self) -> int | None:
        """Room for one stream to fill link and buffer, for all modes alike."""
        return max(16 * MIB, 4 * (self.bdp_bytes + self.buffer_bytes))

    def links(self) -> dict[tuple[str, str], LinkSpec]:
        """At first the link has the rate that it will begin with."""
        rate = self.rate_trace().rate_at(0)
        delay_ns = self.rtt_ns // 2
        forward = LinkSpec(
            rate, None, delay_ns, self.buffer_bytes, loss=self.loss, seed=self.seed, policer=self.policer
        )
        back = LinkSpec(self.rate_bytes_per_s, None, delay_ns, self.buffer_bytes, seed=self.seed + 1)
        return {("a", "b"): forward, ("b", "a"): back}

    def rate_trace(self) -> traces.RateTrace:
        """The link's rate from the first send on. Raises ConfigError for a trace that can't be had."""
        if self.step:
            before, after = STEPS[self.step]
            first = round(self.rate_bytes_per_s * before)
            return traces.steps(first, [(int(self.step_at_s * NS_PER_S), after / before)])
        if not self.trace:
            return traces.constant(self.rate_bytes_per_s)
        if self.trace in traces.TRACE_CLASSES:
            duration_ns = int(self.seconds * NS_PER_S)
            return traces.synthetic(self.trace, self.rate_bytes_per_s, duration_ns, self.seed)
        return traces.from_opportunities(read_opportunities(self.trace)).scaled(self.rate_bytes_per_s)

    def rate_steps(self) -> RateSteps:
        """The same for the emulator."""
        return RateSteps.of(self.rate_trace())

    def describe(self) -> str:
        """One line for a person."""
        parts = [
            f"{self.senders} backlogged senders",
            f"{format_rate(self.rate_bytes_per_s)} {self.step or self.trace or 'constant'}",
            f"RTT {format_duration(self.rtt_ns)}",
            f"buffer {self.buffer_bytes / self.bdp_bytes:.2g} BDP",
            f"{self.seconds:g} s",
            f"seed {self.seed}",
        ]
        if self.loss:
            parts.append(f"random loss {self.loss:g}")
        if self.policer is not None:
            burst = self.policer.burst_bytes
            parts.append(f"policed to {format_rate(self.policer.rate_bytes_per_s)}, burst {burst // 1000} kB")
        if self.cross_flood_bytes_per_s:
            parts.append(f"cross traffic {format_rate(self.cross_flood_bytes_per_s)}")
        if self.cross_tcp:
            parts.append(f"a plain {self.cross_tcp} flow beside")
        parts.append("capacity configured" if self.configured else "no capacity configured")
        return ", ".join(parts)


def message_bytes(rate_bytes_per_s: int, most: int = 8 * MIB) -> int:
    """The default size of a message: what the link carries in :data:`MESSAGE_S`, from 128 KiB to ``most``."""
    return min(most, max(128 << 10, int(rate_bytes_per_s * MESSAGE_S) >> 10 << 10))


def read_opportunities(path: str) -> list[int]:
    """A mahimahi-style file. Raises ConfigError naming what is wrong with it, and the classes there are."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the trace {path}: {error}",
            next_step=f"Give a mahimahi-style file, or one of {', '.join(traces.TRACE_CLASSES)}",
        ) from error
    return traces.parse_opportunities(text, path)


def shallow_buffer(rate_bytes_per_s: int, rtt_ns: int, mtu: int) -> int:
    """The least buffer that a link of this kind may have: two packets."""
    return max(2 * mtu, bdp_bytes(rate_bytes_per_s, rtt_ns) // 100)
