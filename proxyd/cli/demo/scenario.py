"""What the demo sends over what, as plain values: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from proxyd.core.units import NS_PER_S, bdp_bytes, format_duration, format_rate, format_size
from proxyd.wan import LinkSpec, SharedSpec
from proxyd.wan.burst import ideal_cct_seconds, payload_rate, wire_bytes

MIB = 1 << 20
WARMUP_BURSTS = 2
"""Of every mode, in none of its figures: connections find their windows, arenas their pages."""
GAP_NS = 350_000_000


@dataclass(frozen=True)
class Scenario:
    """A link and the bursts that meet on it. Every sender has a host of its own; the receivers share one.

    ``buffer_bytes`` is the drop-tail queue in front of the link. ``open_load``: bursts are due at a fixed period, so
    that payload is offered at this share of the link's rate; None: the next burst is due ``gap_ns`` after the last
    arrival of the one before. ``both_directions``: the same bursts run the other way at the same time.
    """

    name: str = "default"
    rate_bytes_per_s: int = 50_000_000
    rtt_ns: int = 60_000_000
    buffer_bytes: int = 300_000
    mtu: int = 9000
    senders: int = 8
    tensor_bytes: int = 8 * MIB
    gap_ns: int = GAP_NS
    loss: float = 0.0
    open_load: float | None = None
    both_directions: bool = False
    configured: bool = True
    """Whether the coordinator is told of the links' capacity, round trip and buffer."""

    @property
    def bdp_bytes(self) -> int:
        """Bandwidth-delay product of the link."""
        return bdp_bytes(self.rate_bytes_per_s, self.rtt_ns)

    @property
    def ideal_cct_seconds(self) -> float:
        """The shortest possible burst: time on the link with headers, plus one way."""
        return ideal_cct_seconds(self.senders, self.tensor_bytes, self.rate_bytes_per_s, self.rtt_ns // 2, self.mtu)

    @property
    def ideal_mean_fct_seconds(self) -> float:
        """The mean FCT of a perfect one-at-a-time order."""
        one_s = wire_bytes(self.tensor_bytes, self.mtu) / self.rate_bytes_per_s
        return one_s * (self.senders + 1) / 2 + self.rtt_ns / 2e9

    @property
    def receiving_hosts(self) -> int:
        """Hosts at the receivers' site."""
        return self.senders if self.both_directions else 1

    @property
    def tcp_buffer_max_bytes(self) -> int | None:
        """The ceiling of TCP's automatic buffers that lets one stream fill the link; None: Linux' own do.

        Generous: half of a receive buffer is window, and two thirds of a send buffer are data.
        """
        return None if self.bdp_bytes <= 3_000_000 else 8 * self.bdp_bytes

    def links(self) -> dict[tuple[str, str], LinkSpec]:
        """Both directions, alike."""
        return {
            pair: LinkSpec(
                rate_bytes_per_s=self.rate_bytes_per_s,
                trace=None,
                one_way_delay_ns=self.rtt_ns // 2,
                buffer_bytes=self.buffer_bytes,
                loss=self.loss,
                seed=seed,
            )
            for seed, pair in enumerate((("a", "b"), ("b", "a")), start=1)
        }

    @property
    def shared(self) -> dict[str, SharedSpec]:
        """Lines that several links share; none here."""
        return {}

    @property
    def sites(self) -> dict[str, int]:
        """Hosts by site."""
        return {"a": self.senders, "b": self.receiving_hosts}

    def payload_rate_bytes_per_s(self) -> int:
        """What the link carries without headers."""
        return payload_rate(self.rate_bytes_per_s, self.mtu)

    def describe(self) -> str:
        """One line for a person."""
        bdp = self.buffer_bytes / self.bdp_bytes
        parts = [
            f"{self.senders} senders x {format_size(self.tensor_bytes)}",
            format_rate(self.rate_bytes_per_s),
            f"RTT {format_duration(self.rtt_ns)}",
            f"buffer {self.buffer_bytes // 1000} kB ({bdp:.2g} BDP)",
        ]
        if self.loss:
            parts.append(f"random loss {self.loss:g}")
        if self.both_directions:
            parts.append("both directions at once")
        if not self.configured:
            parts.append("no capacity configured")
        parts.append(
            f"next burst {format_duration(self.gap_ns)} after the last arrival"
            if self.open_load is None
            else f"open loop at {self.open_load:.0%} load"
        )
        return ", ".join(parts)


@dataclass(frozen=True)
class Mode:
    """One way to send the bursts. ``congestion_control`` None: through proxyd."""

    name: str
    congestion_control: str | None
    bursts: int
    slow_start_after_idle: bool = False
    note: str = ""

    @property
    def label(self) -> str:
        """For tables and pictures."""
        return self.name.replace("plain-", "plain ").replace("-ssai-on", ", ssai on")


def main_modes(bursts: int) -> list[Mode]:
    """The three that are compared, under the same kernel settings."""
    note = "slow start after idle off: the better setting for both"
    return [
        Mode("plain-cubic", "cubic", bursts, note=note),
        Mode("plain-bbr", "bbr", bursts, note=note),
        Mode("proxyd", None, bursts),
    ]


def idle_restart_modes(bursts: int) -> list[Mode]:
    """The baselines as Linux ships: a connection forgets its window when it was idle for a retransmission timeout."""
    note = "slow start after idle on: Linux' default"
    return [
        Mode("plain-cubic-ssai-on", "cubic", bursts, slow_start_after_idle=True, note=note),
        Mode("plain-bbr-ssai-on", "bbr", bursts, slow_start_after_idle=True, note=note),
    ]


def extra_scenarios(base: Scenario) -> list[Scenario]:
    """The variations that ``--full`` runs after the main scenario."""
    rate, rtt = base.rate_bytes_per_s, base.rtt_ns
    fast = 125_000_000
    far_ns = 90_000_000
    return [
        replace(base, name="80 % open load", open_load=0.8),
        replace(base, name="both directions", both_directions=True),
        replace(base, name="1 Gbit/s", rate_bytes_per_s=fast, buffer_bytes=bdp_bytes(fast, rtt) // 10),
        replace(base, name="RTT 90 ms", rtt_ns=far_ns, buffer_bytes=bdp_bytes(rate, far_ns) // 10),
        replace(base, name="2 MiB", tensor_bytes=2 * MIB),
        replace(base, name="32 MiB", tensor_bytes=32 * MIB),
        replace(base, name="loss 1e-4", loss=1e-4),
        replace(base, name="1 BDP buffer", buffer_bytes=base.bdp_bytes),
    ]


def open_period_ns(scenario: Scenario) -> int:
    """Time between bursts at the scenario's open load."""
    assert scenario.open_load is not None, "closed-loop scenarios have no period"
    return int(scenario.senders * scenario.tensor_bytes * NS_PER_S / (scenario.open_load * scenario.rate_bytes_per_s))
