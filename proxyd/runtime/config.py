"""The configuration file: TOML in, frozen models with integer bytes and nanoseconds out.

What a person writes keeps its text (``rtt = "60ms"``); beside each such field stands a property with the unit in its
name (``rtt_ns``), and code uses only those. A wrong file gives one :class:`ConfigError` that lists every problem as
``file:line: what, why, what to do``; an unknown key is refused with the nearest right one.

The verdict of :func:`load_config` needs nothing of this host; what does (is the token readable?) is
:func:`read_token`, which the daemons call at start.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field, StrictBool, StrictStr, ValidationError, model_validator

from proxyd.core.errors import ConfigError
from proxyd.core.policy import Policy
from proxyd.core.units import parse_duration, parse_size
from proxyd.runtime.addresses import Address, parse_address
from proxyd.runtime.config_fields import (
    ADMIN_SUFFIX,
    AdminText,
    AdvertisedText,
    ArenaText,
    ChunkText,
    ClientLimit,
    CongestionControlText,
    ConnectTexts,
    DurationOrZeroText,
    DurationText,
    Flag,
    InterfaceText,
    ListenText,
    ListenTexts,
    LockText,
    MetricsText,
    Name,
    OwnedTexts,
    Percent,
    Places,
    SizeText,
    SocketText,
    Streams,
    TimeZoneText,
    Workers,
)
from proxyd.runtime.config_forward import ForwardConfig
from proxyd.runtime.config_links import (
    BottleneckConfig,
    ClassConfig,
    JobConfig,
    LinkConfig,
    Section,
    policy_of,
    policy_problems,
)
from proxyd.runtime.config_problems import ConfigProblem, explain, raise_problems
from proxyd.runtime.environment import check_environment
from proxyd.runtime.limits import STRANGERS
from proxyd.runtime.tls import TlsPaths
from proxyd.runtime.toml_lines import key_lines

MAX_FILE_BYTES = 1 << 20
MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096

_log = logging.getLogger("proxyd.config")


def _metrics_address(text: str) -> Address | None:
    return None if text in ("", "off") else parse_address(text, fd_ok=True)


def _tls_paths(certificate: str | None, key: str | None, ca: str | None) -> TlsPaths | None:
    """None without any. Raises ValueError for some of the three."""
    named = {"tls_certificate": certificate, "tls_key": key, "tls_ca": ca}
    missing = [name for name, value in named.items() if value is None]
    if len(missing) == len(named):
        return None
    if certificate is None or key is None or ca is None:
        raise ValueError(f"TLS needs tls_certificate, tls_key and tls_ca; {' and '.join(missing)} is not here")
    return TlsPaths(certificate, key, ca)


def _own_name() -> str:
    """The host's name without its domain, cut to what a name may be."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node().partition(".")[0]).lstrip("._-")[:63]
    return name or "agent"


class FallbackConfig(Section):
    """``[agent] fallback_percent``: what each class may have of the fallback rate while a coordinator is silent."""

    pipeline: Percent = 100
    sync: Percent = 100
    bulk: Percent = 100


class AgentConfig(Section):
    """``[agent]``: the daemon on a trainer's host or on a gateway."""

    site: Name
    name: Name = Field(default_factory=_own_name)
    socket: SocketText = "/run/proxyd/agent.sock"
    admin: AdminText | None = None
    """Where proxyd status, ping and drain ask this agent; None: beside ``socket``."""
    data_listen: ListenText = "127.0.0.1:7601"
    data_address: AdvertisedText | None = None
    data_interface: InterfaceText | None = None
    """Whose address peers are told, instead."""
    gateway_listen: ListenText | None = None
    coordinators: ConnectTexts = ("127.0.0.1:7600",)
    metrics: MetricsText = "127.0.0.1:9601"
    token_file: StrictStr | None = None
    tls_certificate: StrictStr | None = None
    tls_key: StrictStr | None = None
    tls_ca: StrictStr | None = None
    memory: SizeText = "8GiB"
    arena: ArenaText = "256MiB"
    eager: SizeText = "64MiB"
    congestion_control: CongestionControlText = "auto"
    chunk: ChunkText = "auto"
    streams: Streams = "auto"
    peer_timeout: DurationText = "30s"
    resolve_timeout: DurationText = "10s"
    linger: DurationOrZeroText = "5s"
    fallback_percent: FallbackConfig = FallbackConfig()
    jobs: Literal["any", "proven"] = "any"
    """Whose trainers may attach: any, or those of jobs with a token of their own only."""
    strangers: Places = STRANGERS
    clients: ClientLimit = "auto"
    sends: Places = 16384
    workers: Workers = 1
    """Processes that share the work behind the same addresses, for a gateway with several cores."""
    warm: StrictBool = True
    """Pad fresh connections while nobody has anything to send, so that first slots aren't spent in slow start."""

    @property
    def admin_path(self) -> str | None:
        """None: there is none."""
        if self.admin is None:
            return self.socket + ADMIN_SUFFIX
        return None if self.admin in ("", "off") else self.admin

    @property
    def data_listen_address(self) -> Address:
        return parse_address(self.data_listen)

    @property
    def advertised_address(self) -> Address | None:
        """What peers are told to connect to; None: derive it from where ``data_listen`` is bound."""
        if self.data_address is not None:
            return parse_address(self.data_address)
        return None if self.data_listen_address.is_unspecified else self.data_listen_address

    @property
    def gateway_listen_address(self) -> Address | None:
        return None if self.gateway_listen is None else parse_address(self.gateway_listen)

    @property
    def coordinator_addresses(self) -> tuple[Address, ...]:
        return tuple(parse_address(text, unix_ok=True) for text in self.coordinators)

    @property
    def metrics_address(self) -> Address | None:
        """None: no metrics listener."""
        return _metrics_address(self.metrics)

    @property
    def memory_bytes(self) -> int:
        """The most that all arenas of all clients may take together."""
        return parse_size(self.memory)

    @property
    def arena_bytes(self) -> int:
        """The first arena of each kind (send, receive) for each client."""
        return parse_size(self.arena)

    @property
    def eager_bytes(self) -> int:
        """What one source may have on its way to one destination before a receive was posted."""
        return parse_size(self.eager)

    @property
    def chunk_bytes(self) -> int | None:
        """None: the agent derives it from the link."""
        return None if self.chunk == "auto" else parse_size(self.chunk)

    @property
    def max_clients(self) -> int | None:
        """Trainers that may be attached; None: derived from the descriptors that the agent may have."""
        return self.clients if isinstance(self.clients, int) else None

    @property
    def stream_count(self) -> int | None:
        """TCP streams for each peer; None: derived from the link and the kernel's buffers."""
        return self.streams if isinstance(self.streams, int) else None

    @property
    def peer_timeout_ns(self) -> int:
        """Silence of a peer after which it counts as lost."""
        return parse_duration(self.peer_timeout)

    @property
    def resolve_timeout_ns(self) -> int:
        """How long a send waits for its destination to appear."""
        return parse_duration(self.resolve_timeout)

    @property
    def fallback_percents(self) -> tuple[int, int, int]:
        """By traffic class."""
        percent = self.fallback_percent
        return percent.pipeline, percent.sync, percent.bulk

    @property
    def linger_ns(self) -> int:
        """How long a closed client's unacknowledged sends are still tried."""
        return parse_duration(self.linger, zero_ok=True)

    @property
    def tls(self) -> TlsPaths | None:
        """None: no TLS."""
        return _tls_paths(self.tls_certificate, self.tls_key, self.tls_ca)

    @model_validator(mode="after")
    def _fits(self) -> AgentConfig:
        _ = self.tls
        if 2 * self.arena_bytes > self.memory_bytes:
            raise ValueError(
                f"memory = {self.memory!r} cannot hold the send and the receive arena of one client"
                f" (2 x arena = {self.arena!r}); raise memory or lower arena"
            )
        if 2 * self.arena_bytes * self.workers > self.memory_bytes:
            raise ValueError(
                f"memory = {self.memory!r} is divided among workers = {self.workers}, and a part cannot hold the send"
                f" and the receive arena of one client (2 x arena = {self.arena!r}); raise memory, or lower arena or"
                " workers"
            )
        if self.max_clients is not None and self.max_clients < self.workers:
            raise ValueError(
                f"clients = {self.max_clients} is less than workers = {self.workers}: a worker could take none; raise"
                " clients or lower workers"
            )
        if self.data_address is not None and self.data_interface is not None:
            raise ValueError("data_address and data_interface both say what peers dial; keep one")
        if len(set(self.coordinators)) != len(self.coordinators):
            raise ValueError("coordinators names one address twice")
        return self


class CoordinatorConfig(Section):
    """``[coordinator]``: the daemon that owns links and grants slots on them."""

    name: Name = "coordinator"
    listen: ListenTexts = ("127.0.0.1:7600",)
    metrics: MetricsText = "127.0.0.1:9600"
    owns: OwnedTexts = ("*->*",)
    token_file: StrictStr | None = None
    tls_certificate: StrictStr | None = None
    tls_key: StrictStr | None = None
    tls_ca: StrictStr | None = None
    beat: DurationText = "150ms"
    lease: DurationText = "2s"
    peer_timeout: DurationText = "30s"
    rtt_control: DurationText = "1ms"
    reflection: Flag = True
    lock: LockText | None = None
    """Where coordinators of one name agree on which of them is active; None: there is one coordinator."""
    lock_ttl: DurationText = "3s"
    lock_ca: StrictStr | None = None
    """Of etcd's members; None: etcd is spoken to in the clear."""
    lock_certificate: StrictStr | None = None
    lock_key: StrictStr | None = None
    address: AdvertisedText | None = None
    time_zone: TimeZoneText = ""
    """What the links' calendars count in; "": the host's own."""
    jobs: Literal["any", "named"] = "any"
    """Which may use its links: any, or those with a [[job]] only."""
    mode: Literal["grant", "observe"] = "grant"
    """For links that say nothing themselves. "observe": agents send at once, and what would have been granted is only
    reckoned (shadow mode)."""
    grant_log: StrictStr | None = None
    grant_log_size: SizeText = "256MiB"
    strangers: Places = STRANGERS

    @property
    def listen_addresses(self) -> tuple[Address, ...]:
        return tuple(parse_address(text, unix_ok=True) for text in self.listen)

    @property
    def metrics_address(self) -> Address | None:
        """None: no metrics listener."""
        return _metrics_address(self.metrics)

    @property
    def beat_ns(self) -> int:
        """Between two beats to an agent; after some missed ones it goes on at its fallback rate."""
        return parse_duration(self.beat)

    @property
    def lease_ns(self) -> int:
        """How long a silent agent's grants stay reserved."""
        return parse_duration(self.lease)

    @property
    def peer_timeout_ns(self) -> int:
        """How long an agent of which nobody hears keeps its trainers in the directory."""
        return parse_duration(self.peer_timeout)

    @property
    def lock_ttl_ns(self) -> int:
        """How long the lock outlives its holder."""
        return parse_duration(self.lock_ttl)

    @property
    def told_address(self) -> str:
        """Where the active one says that agents reach it; a standby hands it on, for people to read."""
        return self.address or self.listen[0]

    @property
    def rtt_control_ns(self) -> int:
        """Round trip from an agent to this coordinator, before one was measured."""
        return parse_duration(self.rtt_control)

    @property
    def grant_log_bytes(self) -> int:
        """The most that the grant log may take on disk, older parts included."""
        return parse_size(self.grant_log_size)

    @property
    def tls(self) -> TlsPaths | None:
        """None: no TLS."""
        return _tls_paths(self.tls_certificate, self.tls_key, self.tls_ca)

    @model_validator(mode="after")
    def _fits(self) -> CoordinatorConfig:
        _ = self.tls
        if self.lease_ns < 2 * self.beat_ns:
            raise ValueError(f"lease = {self.lease!r} must be at least two beats (beat = {self.beat!r})")
        if self.lock_ttl_ns < 1_000_000_000:
            raise ValueError(f"lock_ttl = {self.lock_ttl!r} must be at least 1s: locks count in whole seconds")
        if (self.lock_certificate is None) != (self.lock_key is None):
            raise ValueError("lock_certificate and lock_key belong together; one of them is not here")
        if self.lock_certificate is not None and self.lock_ca is None:
            raise ValueError("lock_certificate needs lock_ca: TLS to etcd begins with whom we believe to be etcd")
        if self.lock_ca is not None and not (self.lock or "").startswith("etcd://"):
            raise ValueError('lock_ca is for lock = "etcd://..."; Kubernetes brings its own CA')
        return self


class LogConfig(Section):
    """``[log]``: what goes to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Config(Section):
    """One file. A daemon takes its own section and the links; sections of other daemons may stand beside it."""

    agent: AgentConfig | None = None
    coordinator: CoordinatorConfig | None = None
    links: tuple[LinkConfig, ...] = Field(default=(), alias="link")
    jobs: tuple[JobConfig, ...] = Field(default=(), alias="job")
    classes: tuple[ClassConfig, ...] = Field(default=(), alias="class")
    bottlenecks: tuple[BottleneckConfig, ...] = Field(default=(), alias="bottleneck")
    forwards: tuple[ForwardConfig, ...] = Field(default=(), alias="forward")
    """Read by proxyd forward."""
    log: LogConfig = LogConfig()

    @property
    def policy(self) -> Policy:
        """What it says about sharing, for the coordinator's machine."""
        only_named = self.coordinator is not None and self.coordinator.jobs == "named"
        return policy_of(self.links, self.jobs, self.classes, only_named=only_named)

    def require_agent(self) -> AgentConfig:
        """``[agent]``; ConfigError when the file has none."""
        if self.agent is None:
            raise ConfigError("the configuration has no [agent] section", next_step='Add [agent] with site = "..."')
        return self.agent

    def require_coordinator(self) -> CoordinatorConfig:
        """``[coordinator]``; ConfigError when the file has none."""
        if self.coordinator is None:
            raise ConfigError(
                "the configuration has no [coordinator] section", next_step="Add [coordinator]; it may be empty"
            )
        return self.coordinator


Daemon = Literal["agent", "coordinator"]


def config_schema() -> dict[str, Any]:
    """The file as a JSON schema (2020-12): what :func:`load_config` accepts, it accepts; forms of values and what
    depends on several keys it leaves to that."""
    schema = Config.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "proxyd configuration file"}


def load_config(path: str | os.PathLike[str], section: Daemon | None = None) -> Config:
    """Read and check a file, with the environment's overrides.

    :param section: the section that the caller needs; without it a file with neither daemon's section is refused.
    :raises ConfigError: unreadable, not TOML, unknown or wrong keys, unknown ``PROXYD_*`` variables.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {name}",
            why=error.strerror or str(error),
            next_step="Check the path and its permissions",
        ) from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(
            f"the configuration {name} is larger than {MAX_FILE_BYTES} bytes", why="that is no config file"
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text", why=f"byte {raw[error.start]:#04x}") from error
    return parse_config(text, name, section, os.environ)


def parse_config(
    text: str, name: str, section: Daemon | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """:func:`load_config` of a text; *name* stands for the file in messages."""
    environ = {} if environ is None else environ
    check_environment(environ)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line = int(match[1]) if match else text.count("\n") + 1
        what = re.sub(r"\s*\(at .*\)$", "", str(error))
        raise ConfigError(
            f"{name}:{line}: not valid TOML", why=what, next_step="Keys are written key = value"
        ) from error
    lines = key_lines(text)
    overridden = _override(data, environ)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise_problems(name, [explain(detail, Config, lines, overridden) for detail in error.errors()])
    raise_problems(name, _cross_checks(config, lines, section))
    return config


def _override(data: dict[str, Any], environ: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Put the environment's values over the file's; answers which key came from which variable."""
    targets = {
        "PROXYD_SITE": [("agent", "site")],
        "PROXYD_NAME": [("agent", "name")],
        "PROXYD_SOCKET": [("agent", "socket")],
        "PROXYD_TOKEN_FILE": [("agent", "token_file"), ("coordinator", "token_file")],
        "PROXYD_LOG_LEVEL": [("log", "level")],
        "PROXYD_LOG_FORMAT": [("log", "format")],
    }
    overridden = {}
    for variable, keys in targets.items():
        value = environ.get(variable, "")
        for table, key in keys:
            present = data.setdefault(table, {}) if value and table == "log" else data.get(table)
            if value and isinstance(present, dict):
                present[key] = value
                overridden[(table, key)] = variable
    return overridden


def _cross_checks(
    config: Config, lines: Mapping[tuple[str | int, ...], int], section: Daemon | None
) -> list[ConfigProblem]:
    """What no single section can see."""
    problems: list[ConfigProblem] = []

    def add(path: tuple[str | int, ...], text: str) -> None:
        problems.append(ConfigProblem.at(lines, path, text))

    wanted = [section] if section else []
    if not wanted and config.agent is None and config.coordinator is None:
        add((), "neither [agent] nor [coordinator] is here; a daemon would have nothing to run")
    for name in wanted:
        if getattr(config, name) is None:
            add((), f"no [{name}] section, and proxyd {name} needs one")
    for table, key, address, proofs in _listeners(config):
        if not address.is_loopback and not proofs:
            tls = "" if key == "gateway_listen" else " or tls_certificate, tls_key and tls_ca (docs/security.md),"
            neither = "no token_file" if not tls else "neither token_file nor TLS"
            add(
                (table, key),
                f"[{table}] {key} = {str(address)!r} can be reached from other hosts, and there is {neither}:"
                f" anybody could use it. Set token_file (openssl rand -hex 32 > FILE; the same on every host),{tls}"
                " or listen on 127.0.0.1",
            )
    if config.agent is not None and config.agent.jobs == "proven" and not any(job.token_file for job in config.jobs):
        text = "no [[job]] has a token_file, so that no trainer could attach: add some, or leave jobs out"
        add(("agent", "jobs"), f'[agent] jobs = "proven": {text}')
    for path, text in policy_problems(config.links, config.jobs, config.classes, config.bottlenecks, lines):
        add(path, text)
    return problems


def _listeners(config: Config) -> list[tuple[str, str, Address, bool]]:
    """Section, key and address of everything that would be listened on, and whether a stranger is kept out there."""
    found: list[tuple[str, str, Address | None, bool]] = []
    if (agent := config.agent) is not None:
        proofs = agent.token_file is not None or agent.tls is not None
        found.append(("agent", "data_listen", agent.data_listen_address, proofs))
        # Trainers speak no TLS.
        trainers = agent.token_file is not None or agent.jobs == "proven"
        found.append(("agent", "gateway_listen", agent.gateway_listen_address, trainers))
        found.append(("agent", "metrics", agent.metrics_address, proofs))
    if (coordinator := config.coordinator) is not None:
        proofs = coordinator.token_file is not None or coordinator.tls is not None
        found.extend(("coordinator", "listen", one, proofs) for one in coordinator.listen_addresses)
        found.append(("coordinator", "metrics", coordinator.metrics_address, proofs))
    return [(table, key, address, proofs) for table, key, address, proofs in found if address is not None]


def read_token(token_file: str | None, whose: str = "") -> bytes | None:
    """The shared secret in *token_file* without surrounding white space; None when no file is configured.

    :param whose: a job's name, for messages; "": the site's.
    :raises ConfigError: unreadable, shorter than 16 bytes or longer than 4096, or writable by everybody. The message
        never holds the content.
    """
    if token_file is None:
        return None
    what = f"token_file {token_file}" + (f" of job {whose}" if whose else "")
    where = "its trainers" if whose else "every host"
    try:
        with open(token_file, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read {what}",
            why=error.strerror or str(error),
            next_step=f"Make one with: openssl rand -hex 32 > {token_file}; the same content for {where}",
        ) from error
    if mode & 0o002:
        raise ConfigError(f"{what} can be written by everybody", next_step=f"chmod o-w {token_file}")
    if whose and mode & 0o004:
        # No refusal: secrets that Kubernetes mounts look like that, in a directory of the pod's own.
        _log.warning("%s can be read by every user of this host, who may then speak for it; chmod o-r it", what)
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise ConfigError(
            f"{what} holds {len(token)} bytes",
            why=f"a token has {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}",
            next_step=f"Make one with: openssl rand -hex 32 > {token_file}",
        )
    return token


def read_job_tokens(jobs: Iterable[JobConfig]) -> dict[str, bytes]:
    """The tokens of those jobs that have one, by job. Raises ConfigError as :func:`read_token` does."""
    tokens = {job.name: read_token(job.token_file, job.name) for job in jobs}
    return {name: token for name, token in tokens.items() if token is not None}


def token_files(config: Config) -> list[tuple[str, str]]:
    """The token files that daemons will read, each once, and of which job it is ("": the site's)."""
    sections = (section for section in (config.agent, config.coordinator) if section is not None)
    found = [(section.token_file, "") for section in sections]
    if config.agent is not None:
        found += [(job.token_file, job.name) for job in config.jobs]
    return sorted({(token_file, job) for token_file, job in found if token_file is not None})
