"""What a link is: the description that a caller writes and that the emulator process reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proxyd.wan.errors import WanError
from proxyd.wan.policer import PolicerSpec
from proxyd.wan.trace import RateSteps

HOSTS_PER_SITE_MAX = 250
SITES_MAX = 250
GATEWAY_OCTET = 254
"""Of a site's router on its own LAN; hosts count from 1."""
# Between a Wan and its keeper; the kernel takes at most 253 descriptors per message.
FDS_PER_MESSAGE = 100
MESSAGE_BYTES_MAX = 1 << 20


def address(site: int, octet: int) -> str:
    """IPv4 address of a machine of the site with this index, counted from 0."""
    return f"10.77.{site + 1}.{octet}"


@dataclass(frozen=True)
class LinkSpec:
    """One direction between two sites.

    Exactly one of ``rate_bytes_per_s`` (bytes of IP packets, headers included), ``trace`` (a mahimahi-style file, see
    :mod:`proxyd.wan.trace`) and ``rates`` (a rate that changes at given times) sets the rate. ``buffer_bytes`` is the
    drop-tail queue in front of the link, ``one_way_delay_ns`` the propagation delay behind it. ``loss`` in [0, 1) is
    the chance that a packet that has crossed the link is lost; ``seed`` makes that sequence repeatable. ``policer``
    drops what exceeds a contract before it gets to the queue.
    """

    rate_bytes_per_s: int | None
    trace: Path | None
    one_way_delay_ns: int
    buffer_bytes: int
    loss: float = 0.0
    seed: int = 1
    rates: RateSteps | None = None
    policer: PolicerSpec | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.rate_bytes_per_s, self.trace, self.rates)) != 1:
            raise WanError(
                f"a link needs exactly one of rate_bytes_per_s (got {self.rate_bytes_per_s}), trace "
                f"(got {self.trace}) and rates (got {self.rates}); give one of them"
            )
        if self.rate_bytes_per_s is not None and self.rate_bytes_per_s <= 0:
            raise WanError(
                f"rate_bytes_per_s must be > 0, got {self.rate_bytes_per_s}; use set_link(down=True) for a cut"
            )
        if self.one_way_delay_ns < 0:
            raise WanError(f"one_way_delay_ns must be >= 0, got {self.one_way_delay_ns}")
        if self.buffer_bytes <= 0:
            raise WanError(f"buffer_bytes must be > 0 (at least one packet), got {self.buffer_bytes}")
        if not 0.0 <= self.loss < 1.0:
            raise WanError(f"loss must be in [0, 1), got {self.loss}; use set_link(down=True) for a cut")

    def to_json(self) -> dict[str, Any]:
        """Plain values for the emulator's configuration."""
        fields = asdict(self)
        fields["trace"] = None if self.trace is None else str(self.trace)
        fields["rates"] = None if self.rates is None else self.rates.to_json()
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LinkSpec:
        """The inverse of :meth:`to_json`."""
        trace, rates, policer = fields["trace"], fields["rates"], fields["policer"]
        return cls(
            **{
                **fields,
                "trace": None if trace is None else Path(trace),
                "rates": None if rates is None else RateSteps.from_json(rates),
                "policer": None if policer is None else PolicerSpec(**policer),
            }
        )


@dataclass(frozen=True)
class SharedSpec:
    """What several links have to pass before each goes its own way: a site's line to the outside.

    ``rate_bytes_per_s`` is of IP packets, ``buffer_bytes`` the drop-tail queue in front of it; it adds no delay.
    """

    links: tuple[tuple[str, str], ...]
    rate_bytes_per_s: int
    buffer_bytes: int

    def __post_init__(self) -> None:
        if not self.links or self.rate_bytes_per_s <= 0 or self.buffer_bytes <= 0:
            raise WanError(
                f"a shared line needs links, a rate and a buffer > 0, got {len(self.links)} links, "
                f"{self.rate_bytes_per_s} bytes/s and {self.buffer_bytes} bytes"
            )
