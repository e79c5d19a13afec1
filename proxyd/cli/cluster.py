"""Coordinators and agents as child processes, for ``dev``, the demo, benchmarks and tests.

    with Cluster({"a": 2, "b": 1}) as cluster:                      # everything on 127.0.0.1
        cluster.agent("a", 0).socket                                # what a trainer connects to
        cluster.coordinator.address                                 # what `proxyd status` connects to

    with Wan({"a": 1, "b": 1}, {("a", "b"): spec, ("b", "a"): spec}) as wan:
        with Cluster({"a": 1, "b": 1}, links=figures, wan=wan) as cluster: ...   # agent i of a site on its host i

    with Cluster({"a": 1, "b": 1}, coordinators={"left": ["a->*"], "right": ["b->*"]}) as cluster:
        cluster.coordinators["right"].metrics                       # each agent has a session with each coordinator

The children are the real daemons with real configuration files (in ``cluster.directory``, with their logs and sockets),
a token, and metrics. They die with this process and are never restarted behind your back: :meth:`Cluster.deaths` tells.

Coordinators and agents meet at Unix sockets, which network namespaces do not separate. On an emulated WAN that
is as good as one coordinator in each sender's site: asking costs no WAN round trip. Payload and the agents' own frames
do cross the WAN. Metrics listen on this process' own loopback, also for agents inside a namespace.

A coordinator that is given a host of the WAN (``coordinator_hosts``) is reached over the WAN by its address instead,
and by its Unix socket from here.

Start and close a Cluster on a thread that outlives it: Linux ties "die with the parent" to the parent's thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from proxyd.cli.scrape import scrape
from proxyd.core.errors import ProxydError

if TYPE_CHECKING:
    from proxyd.wan import Wan

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
COORDINATOR_PORT = 7600
"""On a host of its own on the WAN."""
LOG_TAIL_BYTES = 4000

# Runs before the daemon, in a few milliseconds: the kernel ends us with our parent. Exec keeps that.
_LAUNCHER = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)\n"
    "sys.exit(126) if os.getppid() != int(sys.argv[1]) else os.execv(sys.argv[2], sys.argv[2:])\n"
)


class ClusterError(ProxydError):
    """The cluster could not be started; the text holds the last words of the child that failed."""

    code = "cluster"


@dataclasses.dataclass(frozen=True)
class LinkFigures:
    """What the coordinator is told of one link, as in ``[[link]]``; what is None it has to find out."""

    capacity: str | None = "20Gbit"
    rtt: str | None = "1ms"
    buffer: str | None = "1bdp"
    mtu: int = 1500
    estimate: str | None = None
    """"fixed": the capacity is believed for ever."""


@dataclasses.dataclass
class Member:
    """One child."""

    label: str
    process: subprocess.Popen[bytes]
    log_path: Path
    metrics: str
    """URL, reachable from here."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What it said when it was ready."""
    ready_fd: int = -1
    told_dead: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def last_words(self) -> str:
        """The end of its log."""
        with contextlib.suppress(FileNotFoundError), self.log_path.open("rb") as file:
            file.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace").strip()
        return ""


@dataclasses.dataclass
class CoordinatorMember(Member):
    """A coordinator."""

    name: str = ""
    owns: tuple[str, ...] = ()
    socket: str = ""
    """Where agents reach it: ``unix:/path``, the same over restarts."""

    @property
    def address(self) -> str:
        """``host:port``, for ``proxyd status --coordinator``."""
        return str(self.facts["address"])


@dataclasses.dataclass
class AgentMember(Member):
    """One agent."""

    site: str = ""
    name: str = ""
    socket: str = ""

    @property
    def data_address(self) -> str:
        """What its peers dial."""
        return str(self.facts["data_address"])


class Cluster:
    """See the module's text.

    :param sites: agents per site.
    :param links: figures of each directed pair of sites; pairs that are left out get ``LinkFigures()``; None: the
        coordinator is told nothing. Every coordinator is told of all of them, and takes those that it owns.
    :param coordinators: name -> ``owns``, in the order in which the agents are configured with them.
    :param coordinator_hosts: name -> ``(site, number)`` of the WAN's host that a coordinator runs on; only one on each.
    :param coordinator_extra, agent_extra: more TOML for each of their files, like ``[[job]]`` tables.
    :param wan: the emulated WAN whose hosts carry the agents; None: everything on 127.0.0.1.
    :param agent, coordinator: more keys for each ``[agent]`` and ``[coordinator]`` section.
    :param each_agent: the same for single agents, by ``(site, number)``; they replace any other.
    :param directory: for configurations, sockets and logs; None: a temporary one, removed at the end.
    """

    def __init__(
        self,
        sites: Mapping[str, int],
        *,
        links: Mapping[tuple[str, str], LinkFigures | None] | None = None,
        coordinators: Mapping[str, Sequence[str]] | None = None,
        coordinator_hosts: Mapping[str, tuple[str, int]] | None = None,
        coordinator_extra: str = "",
        agent_extra: str = "",
        wan: Wan | None = None,
        agent: Mapping[str, object] | None = None,
        each_agent: Mapping[tuple[str, int], Mapping[str, object]] | None = None,
        coordinator: Mapping[str, object] | None = None,
        log_level: str = "info",
        directory: Path | None = None,
    ) -> None:
        self.sites = dict(sites)
        self.links: dict[tuple[str, str], LinkFigures | None] = {
            (a, b): LinkFigures() for a in sites for b in sites if a != b
        }
        self.links |= dict(links or {})
        self._coordinator_hosts = dict(coordinator_hosts or {})
        self._coordinator_extra = coordinator_extra
        self._agent_extra = agent_extra
        self._wan = wan
        self._agent_settings = dict(agent or {})
        self._each_agent = dict(each_agent or {})
        self._coordinator_settings = dict(coordinator or {})
        self._log_level = log_level
        self._own_directory = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="proxyd-")) if directory is None else directory
        self._owns = {name: tuple(owns) for name, owns in (coordinators or {"coordinator": ("*->*",)}).items()}
        self.coordinators: dict[str, CoordinatorMember] = {}
        """By name, once they are started."""
        self._metrics_listeners: dict[str, socket.socket] = {}
        self.agents: list[AgentMember] = []

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def coordinator(self) -> CoordinatorMember:
        """The first coordinator."""
        if not self.coordinators:
            raise ClusterError("the cluster is not started")
        return self.coordinators[next(iter(self._owns))]

    @property
    def members(self) -> list[Member]:
        """All children."""
        return [*self.coordinators.values(), *self.agents]

    @property
    def coordinator_socket(self) -> str:
        """The first coordinator's Unix socket."""
        return f"unix:{self.directory / next(iter(self._owns))}.sock"

    @property
    def _coordinator_addresses(self) -> list[str]:
        """Where agents reach each of them."""
        hosts = {name: self._host_of(*place) for name, place in self._coordinator_hosts.items()}
        return [
            f"{hosts[name].address}:{COORDINATOR_PORT}" if name in hosts else f"unix:{self.directory / name}.sock"
            for name in self._owns
        ]

    def _host_of(self, site: str, number: int) -> Any:
        if self._wan is None:
            raise ClusterError(f"there is no host {site}-{number}", why="this cluster runs on 127.0.0.1")
        return self._wan.host(site, number)

    @property
    def token_file(self) -> Path:
        """The token that all share."""
        return self.directory / "token"

    def agent(self, site: str, number: int = 0) -> AgentMember:
        """Agent ``number`` of ``site``."""
        for agent in self.agents:
            if (agent.site, agent.name) == (site, f"{site}-{number}"):
                return agent
        raise ClusterError(f"no agent {number} at site {site!r}; the cluster has {self.sites}")

    def start(self) -> Cluster:
        """Start all and wait until all are ready. Raises ClusterError after closing everything again."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.token_file.touch(mode=0o600)
            self.token_file.write_text(os.urandom(32).hex())
            for name in self._owns:
                self.start_coordinator(name, wait=False)
            for site, count in self.sites.items():
                for number in range(count):
                    self.agents.append(self._start_agent(site, number))
            self._await_ready(self.members)
            self.await_sessions()
        except BaseException:
            self.close()
            raise
        return self

    def await_sessions(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until every living agent has its session with every living coordinator that is no standby.

        Raises ClusterError.
        """
        wanted = sum(agent.process.poll() is None for agent in self.agents)
        deadline_s = time.monotonic() + timeout_s
        living = [one for one in self.coordinators.values() if one.process.poll() is None]
        for coordinator in living:
            while True:
                scraped = scrape(coordinator.metrics)
                found = scraped.total("proxyd_agent_sessions")
                standing_by = scraped.total("proxyd_active") < 1 and any(
                    scrape(one.metrics).total("proxyd_active") for one in living
                )
                if found >= wanted or standing_by:
                    break
                if time.monotonic() > deadline_s:
                    words = self.agents[0].last_words()
                    text = f"{found:g} of {wanted} agents reached {coordinator.label} in {timeout_s:g} s"
                    raise ClusterError(text, why=words)
                time.sleep(0.02)

    def facts(self) -> dict[str, object]:
        """What ``proxyd dev`` writes to its ready file: the first coordinator, all of them, and the agents."""
        first = self.coordinator
        return {
            "coordinator": {"address": first.address, "pid": first.pid, "metrics": first.metrics},
            "coordinators": [
                {
                    "name": coordinator.name,
                    "owns": list(coordinator.owns),
                    "address": coordinator.address,
                    "pid": coordinator.pid,
                    "metrics": coordinator.metrics,
                }
                for coordinator in self.coordinators.values()
            ],
            "agents": [
                {
                    "site": agent.site,
                    "name": agent.name,
                    "socket": agent.socket,
                    "data_address": agent.data_address,
                    "metrics": agent.metrics,
                    "pid": agent.pid,
                }
                for agent in self.agents
            ],
        }

    def deaths(self) -> list[tuple[Member, int]]:
        """Children that ended since the last call, with their exit codes (negative: the signal)."""
        dead = []
        for member in self.members:
            code = member.process.poll()
            if code is not None and not member.told_dead:
                member.told_dead = True
                dead.append((member, code))
        return dead

    def start_coordinator(self, name: str | None = None, *, wait: bool = True) -> CoordinatorMember:
        """Start a coordinator (None: the first), at first or again after :meth:`kill`; on the same Unix socket, on a
        new port."""
        if name is None:
            name = next(iter(self._owns))
        owns = self._owns[name]
        where = f"unix:{self.directory / name}.sock"
        host = self._host_of(*self._coordinator_hosts[name]) if name in self._coordinator_hosts else None
        settings = {
            "name": name,
            "owns": owns,
            "listen": ["127.0.0.1:0" if host is None else f"{host.address}:{COORDINATOR_PORT}", where],
            "token_file": str(self.token_file),
            **self._coordinator_settings,
        }
        config = ["[coordinator]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
        for (src, dst), figures in self.links.items():
            if figures is not None:
                config += ["[[link]]", f"from = {json.dumps(src)}", f"to = {json.dumps(dst)}"]
                told = {key: value for key, value in dataclasses.asdict(figures).items() if value is not None}
                config += [f"{key} = {json.dumps(value)}" for key, value in told.items()]
        config.append(self._coordinator_extra)
        process, ready_fd, log_path, url = self._spawn("coordinator", name, config, host)
        label = "coordinator" if name == "coordinator" else f"coordinator {name}"
        member = CoordinatorMember(label, process, log_path, url, {}, ready_fd, name=name, owns=owns, socket=where)
        self.coordinators[name] = member
        if wait:
            self._await_ready([member])
        return member

    def restart_agent(self, site: str, number: int = 0) -> AgentMember:
        """Start an agent again after :meth:`kill`, with the same configuration."""
        old = self.agent(site, number)
        new = self._start_agent(site, number)
        self.agents[self.agents.index(old)] = new
        self._await_ready([new])
        return new

    def kill(self, member: Member, signal_number: int = signal.SIGKILL) -> int:
        """Signal a child and wait for its end; answers its exit code."""
        member.process.send_signal(signal_number)
        code = member.process.wait(STOP_TIMEOUT_S)
        member.told_dead = True
        return code

    def close(self) -> None:
        """End all children (SIGTERM, then SIGKILL) and remove the temporary directory."""
        living = [member for member in self.members if member.process.poll() is None]
        # A stopped process takes no SIGTERM.
        for member in living:
            member.process.send_signal(signal.SIGTERM)
            member.process.send_signal(signal.SIGCONT)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for member in living:
            try:
                member.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        for member in self.members:
            self._close_ready(member)
        for listener in self._metrics_listeners.values():
            listener.close()
        self._metrics_listeners.clear()
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    # -- children ----------------------------------------------------------------------------------------------------

    def _start_agent(self, site: str, number: int) -> AgentMember:
        name = f"{site}-{number}"
        host = None if self._wan is None else self._host_of(site, number)
        path = str(self.directory / f"{name}.sock")
        settings = {
            "site": site,
            "name": name,
            "socket": path,
            "data_listen": f"{'127.0.0.1' if host is None else host.address}:0",
            "coordinators": self._coordinator_addresses,
            "token_file": str(self.token_file),
            **self._agent_settings,
            **self._each_agent.get((site, number), {}),
        }
        config = ["[agent]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items()), self._agent_extra]
        process, ready_fd, log_path, url = self._spawn("agent", name, config, host)
        return AgentMember(f"agent {name}", process, log_path, url, {}, ready_fd, site=site, name=name, socket=path)

    def _spawn(
        self, role: str, name: str, config: Sequence[str], host: Any
    ) -> tuple[subprocess.Popen[bytes], int, Path, str]:
        """Start one daemon; answers process, the pipe that it says READY on, its log, its metrics' URL."""
        listener = self._metrics_listeners.get(name)
        if listener is None:
            # Made here and passed on: it stays on this process' loopback wherever the daemon runs, also over restarts.
            listener = self._metrics_listeners[name] = socket.create_server(("127.0.0.1", 0), backlog=32)
        lines = [*config, "[log]", f"level = {json.dumps(self._log_level)}"]
        lines.insert(1, f'metrics = "fd:{listener.fileno()}"')
        path = self.directory / f"{name}.toml"
        path.write_text("\n".join(lines) + "\n")
        log_path = self.directory / f"{name}.log"
        read_fd, write_fd = os.pipe()
        daemon = [sys.executable, "-m", "proxyd.cli.main", role, "--config", str(path), "--ready-fd", str(write_fd)]
        options: dict[str, Any] = {
            "pass_fds": (listener.fileno(), write_fd),
            "stdin": subprocess.DEVNULL,
            "env": _environment(),
            # A terminal's Ctrl-C is for us: the children are ended in order, not all at once.
            "start_new_session": True,
        }
        try:
            with log_path.open("ab") as log:
                process = self._popen(daemon, host, log, options)
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        return process, read_fd, log_path, f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"

    @staticmethod
    def _popen(daemon: list[str], host: Any, log: IO[bytes], options: dict[str, Any]) -> subprocess.Popen[bytes]:
        if host is not None:
            process: subprocess.Popen[bytes] = host.popen(daemon, stdout=log, stderr=log, **options)
            return process
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *daemon]
        return subprocess.Popen(launcher, stdout=log, stderr=log, **options)

    def _await_ready(self, members: Iterable[Member]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            waiting = {member.ready_fd: (member, bytearray()) for member in members}
            for fd in waiting:
                selector.register(fd, selectors.EVENT_READ)
            while waiting:
                found = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not found:
                    late = ", ".join(member.label for member, _ in waiting.values())
                    words = next(iter(waiting.values()))[0].last_words()
                    raise ClusterError(f"not ready within {START_TIMEOUT_S:g} s: {late}", why=words)
                for key, _ in found:
                    member, data = waiting[key.fd]
                    data += (piece := os.read(key.fd, 65536))
                    if piece:
                        continue
                    selector.unregister(key.fd)
                    del waiting[key.fd]
                    self._close_ready(member)
                    self._take_facts(member, bytes(data))

    @staticmethod
    def _take_facts(member: Member, data: bytes) -> None:
        word, _, facts = data.partition(b" ")
        if word != b"READY":
            code = member.process.wait(STOP_TIMEOUT_S)
            raise ClusterError(f"{member.label} ended with exit code {code} at start", why=member.last_words())
        member.facts = json.loads(facts)

    @staticmethod
    def _close_ready(member: Member) -> None:
        if member.ready_fd >= 0:
            os.close(member.ready_fd)
            member.ready_fd = -1


def _environment() -> dict[str, str]:
    """Ours, with the very package that runs now in reach, and without settings that are meant for another daemon."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PROXYD_")}
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    return environment
