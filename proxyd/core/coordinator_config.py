"""What a coordinator is told at start, and which requests it therefore refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from proxyd.core.allocation import CLASSES
from proxyd.core.bandwidth import LinkSettings
from proxyd.core.errors import ConfigError
from proxyd.core.ids import AgentName, LinkName, owns_link
from proxyd.core.messages import Request
from proxyd.core.permissions import Permissions
from proxyd.core.policy import BottleneckSettings
from proxyd.wire.envelope import MAX_TRANSFER_BYTES

MAX_TRANSFERS_PER_SESSION = 100_000
MAX_UNCONFIGURED_LINKS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """What a coordinator is told at start. Raises ConfigError for values that make no sense together."""

    name: str = "coordinator"
    owns: tuple[str, ...] = ("*->*",)
    links: tuple[LinkSettings, ...] = ()
    beat_ns: int = 150_000_000
    lease_ns: int = 2_000_000_000
    absent_ns: int = 30_000_000_000
    """How long the trainers of an agent that nobody sees stay in the directory: a stopped host, or one that is cut off
    for a while, is not gone. What an agent takes for lost by itself is its own ``peer_timeout``."""
    control_rtt_ns: int = 1_000_000
    """Round trip between an agent and this coordinator, as far as is known."""
    observe: bool = False
    """Links that aren't configured are only observed."""
    bottlenecks: tuple[BottleneckSettings, ...] = ()
    """Lines that several links share."""

    def __post_init__(self) -> None:
        if self.beat_ns <= 0 or self.lease_ns < 2 * self.beat_ns or self.control_rtt_ns < 0:
            raise ConfigError(
                f"coordinator {self.name}: beat {self.beat_ns} ns, lease {self.lease_ns} ns and control round trip "
                f"{self.control_rtt_ns} ns don't fit together",
                why="a lease must be at least two beats",
            )
        seen: set[LinkName] = set()
        for settings in self.links:
            if settings.link.is_local or settings.link in seen:
                raise ConfigError(
                    f"coordinator {self.name}: link {settings.link} "
                    + ("stays within one site" if settings.link.is_local else "is configured twice")
                )
            seen.add(settings.link)
        names = [one.name for one in self.bottlenecks]
        if len(set(names)) < len(names):
            raise ConfigError(f"coordinator {self.name}: a bottleneck stands twice among {', '.join(names)}")


def refusal(
    config: CoordinatorConfig,
    permissions: Permissions,
    agent: AgentName,
    message: Request,
    links: Collection[LinkName],
    open_transfers: int,
) -> str:
    """Why a new request of ``agent`` can't be served; "" when it can.

    :param links: those that are known, configured or not.
    :param open_transfers: what the agent has requested and not ended.
    """
    link = message.link
    if link.is_local or link.src_site != agent.site:
        site = agent.site
        return f"agent {agent} can't ask for link {link}: it must lead from site {site} to another"
    if link not in links and not owns_link(config.owns, link):
        owns = ", ".join(config.owns)
        return f"coordinator {config.name} does not own link {link} (it owns {owns}); ask the one that does"
    if link not in links and len(links) >= len(config.links) + MAX_UNCONFIGURED_LINKS:
        return f"link {link} is not configured, and there are already {MAX_UNCONFIGURED_LINKS} such links"
    if not 0 < message.wanted_bytes <= MAX_TRANSFER_BYTES:
        return f"{message.wanted_bytes} bytes can't be granted (1 to {MAX_TRANSFER_BYTES})"
    if message.traffic not in CLASSES:
        return f"traffic class {message.traffic} is unknown"
    if open_transfers >= MAX_TRANSFERS_PER_SESSION:
        return f"agent {agent} already has {MAX_TRANSFERS_PER_SESSION} transfers open"
    return permissions.denial(message.job, link, message.traffic)
