"""What is examined: this host, the configurations that it has, and the links that buffers are judged by."""

from __future__ import annotations

import dataclasses
import glob
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proxyd.cli.doctor.findings import Finding, fail, ok, skip
from proxyd.core.errors import ConfigError, ProxydError
from proxyd.core.units import format_duration, format_rate, parse_duration, parse_rate

if TYPE_CHECKING:
    from proxyd.runtime.config import AgentConfig, Config, CoordinatorConfig
    from proxyd.runtime.config_links import LinkConfig

USUAL_PLACES = "/etc/proxyd/*.toml"


@dataclasses.dataclass(frozen=True, slots=True)
class LinkPath:
    """One direction between two sites, as far as buffers are concerned."""

    name: str
    rate_bytes_per_s: int
    rtt_ns: int
    source: str
    """Who says so."""

    @property
    def bdp_bytes(self) -> int:
        """What is in flight when it is full."""
        return self.rate_bytes_per_s * self.rtt_ns // 1_000_000_000

    def __str__(self) -> str:
        return f"{self.name} ({format_rate(self.rate_bytes_per_s)}, {format_duration(self.rtt_ns)}, {self.source})"


@dataclasses.dataclass(frozen=True)
class Subject:
    """Everything that checks start from.

    :param root: where ``/proc`` and ``/sys`` are.
    """

    paths: tuple[str, ...] = ()
    """Configuration files that were read."""
    agent: AgentConfig | None = None
    coordinator: CoordinatorConfig | None = None
    configs: tuple[Config, ...] = ()
    links: tuple[LinkConfig, ...] = ()
    asked: LinkPath | None = None
    """The link of ``--rate`` and ``--rtt``."""
    coordinator_address: str | None = None
    """Of ``--coordinator``."""
    findings: tuple[Finding, ...] = ()
    """About the configurations themselves."""
    timeout_s: float = 5.0
    root: Path = Path("/")

    @property
    def carries_payload(self) -> bool:
        """An agent runs here, or may: a coordinator alone sees no payload."""
        return self.agent is not None or self.coordinator is None

    @property
    def connect_s(self) -> float:
        """For one connection, so that a check of several steps stays within its time."""
        return self.timeout_s / 2

    def read(self, path: str) -> str | None:
        """A small file below :attr:`root`, without white space around it; None: it is not there or not for us."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def configured_paths(self) -> list[LinkPath]:
        """Links whose size the configuration tells."""
        found = [] if self.asked is None else [self.asked]
        for link in self.links:
            if link.capacity_bytes_per_s and link.rtt_ns:
                found.append(LinkPath(link.name, link.capacity_bytes_per_s, link.rtt_ns, "configured"))
        return found


def make_subject(
    given: Sequence[str] | None,
    *,
    coordinator: str | None = None,
    rate: str | None = None,
    rtt: str | None = None,
    timeout_s: float = 5.0,
) -> Subject:
    """Read the configurations. What is wrong with them is a finding; what is wrong with the options is raised.

    :raises ConfigError: only one of ``rate`` and ``rtt``, or a time limit that is none.
    """
    if (rate is None) != (rtt is None):
        raise ConfigError("--rate and --rtt belong together", next_step="Like --rate 4Gbit --rtt 60ms")
    if not 0.1 <= timeout_s <= 600:
        raise ConfigError(f"--timeout-s {timeout_s:g}", why="it must be from 0.1 to 600 seconds")
    if coordinator is not None:
        from proxyd.runtime.addresses import parse_address

        parse_address(coordinator, unix_ok=True, port_zero_ok=False)
    asked = None
    if rate is not None and rtt is not None:
        asked = LinkPath("asked for", parse_rate(rate), parse_duration(rtt), "by --rate and --rtt")
    paths = list(given or ()) or _usual_paths()
    findings: list[Finding] = []
    configs: list[Config] = []
    if not paths:
        findings.append(skip("config", f"no --config, no PROXYD_CONFIG, and nothing at {USUAL_PLACES}"))
    for path in paths:
        finding, config = _read(path)
        findings.append(finding)
        if config is not None:
            configs.append(config)
    return Subject(
        paths=tuple(paths),
        agent=next((config.agent for config in configs if config.agent is not None), None),
        coordinator=next((config.coordinator for config in configs if config.coordinator is not None), None),
        configs=tuple(configs),
        links=tuple(link for config in configs for link in config.links),
        asked=asked,
        coordinator_address=coordinator,
        findings=tuple(findings),
        timeout_s=timeout_s,
    )


def _usual_paths() -> list[str]:
    if path := os.environ.get("PROXYD_CONFIG", ""):
        return [path]
    return sorted(glob.glob(USUAL_PLACES))


def _read(path: str) -> tuple[Finding, Config | None]:
    name = f"config {path}"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return fail(name, "it is no regular file", "Give the path of a TOML file with --config"), None
    except OSError as error:
        fix = f"sudo proxyd doctor --config {path}"
        if isinstance(error, FileNotFoundError):
            fix = f"proxyd config init > {path}"
        return fail(name, f"it can't be read: {error.strerror}", fix), None
    try:
        from proxyd.runtime.config import load_config

        config = load_config(path)
    except ModuleNotFoundError as error:
        return fail(name, f"the package {error.name} is missing", "pip install 'proxyd[daemon]'"), None
    except ProxydError as error:
        return fail(name, str(error), f"Correct it; then: proxyd config check {path}"), None
    parts = [part for part in ("agent", "coordinator") if getattr(config, part) is not None]
    return ok(name, f"valid, for {' and '.join(parts)}"), config
