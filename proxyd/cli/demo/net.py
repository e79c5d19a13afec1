"""What the bursts run over: the emulated WAN, or loopback behind a userspace bottleneck where there are no namespaces.

Both offer the same: places to start processes at, the address under which site a's hosts reach a listener at site b,
what the bottleneck saw, and a cluster of daemons laid over it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from proxyd.cli.cluster import Cluster, LinkFigures
from proxyd.cli.demo.activity import total_segments
from proxyd.cli.demo.scenario import Scenario
from proxyd.wan import Wan
from proxyd.wan.crew import Place
from proxyd.wan.loopback import LoopbackWan

ARENA = "32MiB"
"""Of the demo's agents: a tensor or two at a time; the default would cost start-up time for nothing."""


class Net(Protocol):
    """One scenario's network. ``kind`` is what reports call it."""

    kind: str

    def place(self, site: str, number: int) -> Place:
        """Host ``number`` of a site."""

    def listen_address(self, site: str, number: int) -> str:
        """The IP address to listen on there."""

    def path_to(self, src: str, dst: str, address: str, port: int) -> tuple[str, int]:
        """What a host of ``src`` connects to in order to reach a listener of ``dst`` over the link."""

    def slow_start_after_idle(self, on: bool) -> None:
        """Set it for everybody, where that can be done."""

    def drops(self, src: str, dst: str) -> int:
        """Packets that found the buffer full so far."""

    def retransmits(self, pids: Sequence[int]) -> int:
        """Segments that the hosts of these processes sent again so far."""

    def queue(self, src: str, dst: str) -> tuple[array[int], array[int]]:
        """The queue over time: CLOCK_MONOTONIC in ns, and bytes; a gap means an empty queue."""

    def late_p99_ns(self) -> int:
        """How late the emulator handed packets over so far, against its own clock (99th percentile)."""

    def cluster(self, ending: ExitStack) -> Cluster:
        """Coordinator and agents, started and ready; ``ending`` closes them."""


def told(scenario: Scenario) -> dict[tuple[str, str], LinkFigures | None]:
    """What the coordinator's configuration says of the links: the truth, or nothing."""
    if not scenario.configured:
        return dict.fromkeys(scenario.links())
    figures = LinkFigures(
        capacity=f"{scenario.rate_bytes_per_s * 8}bit",
        rtt=f"{scenario.rtt_ns}ns",
        buffer=f"{scenario.buffer_bytes}B",
        mtu=scenario.mtu,
    )
    return dict.fromkeys(scenario.links(), figures)


class NetnsNet:
    """Network namespaces, real packets, the kernel's own TCP."""

    kind = "netns"

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.wan = Wan(
            scenario.sites,
            scenario.links(),
            mtu=scenario.mtu,
            slow_start_after_idle=False,
            tcp_buffer_max_bytes=scenario.tcp_buffer_max_bytes,
            shared=scenario.shared,
        )

    def __enter__(self) -> NetnsNet:
        return self

    def __exit__(self, *_: object) -> None:
        self.wan.close()

    def place(self, site: str, number: int) -> Place:
        return self.wan.host(site, number)

    def listen_address(self, site: str, number: int) -> str:
        return self.wan.host(site, number).address

    def path_to(self, src: str, dst: str, address: str, port: int) -> tuple[str, int]:
        return address, port

    def slow_start_after_idle(self, on: bool) -> None:
        self.wan.set_slow_start_after_idle(on)

    def drops(self, src: str, dst: str) -> int:
        return self.wan.counters()[f"{src}->{dst}"].dropped_packets

    def retransmits(self, pids: Sequence[int]) -> int:
        return total_segments(pids)[1]

    def queue(self, src: str, dst: str) -> tuple[array[int], array[int]]:
        return self.wan.queue_samples(src, dst)

    def late_p99_ns(self) -> int:
        return self.wan.fidelity().late_p99_ns

    def cluster(self, ending: ExitStack) -> Cluster:
        links = told(self._scenario)
        return ending.enter_context(
            Cluster(self._scenario.sites, links=links, wan=self.wan, agent={"arena": ARENA}, log_level="warning")
        )


class LocalPlace:
    """This machine. What is started here dies with us."""

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> subprocess.Popen[Any]:
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                os._exit(126)

        return subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            pass_fds=tuple(pass_fds),
            preexec_fn=die_with_parent,
            **options,
        )


class LoopbackNet:
    """Everything on 127.0.0.1; what goes from site to site passes a proxy that holds it to the link's rate and delay.

    No packets, so no drops and no retransmits, and TCP's congestion control sees no delay.
    """

    kind = "loopback"

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._wan = LoopbackWan(scenario.links())

    def __enter__(self) -> LoopbackNet:
        return self

    def __exit__(self, *_: object) -> None:
        self._wan.close()

    def place(self, site: str, number: int) -> Place:
        return LocalPlace()

    def listen_address(self, site: str, number: int) -> str:
        return "127.0.0.1"

    def path_to(self, src: str, dst: str, address: str, port: int) -> tuple[str, int]:
        return self._wan.front(src, dst, (address, port))

    def slow_start_after_idle(self, on: bool) -> None:
        pass  # the host's own setting: not ours to change, and without delay it matters little

    def drops(self, src: str, dst: str) -> int:
        return 0

    def retransmits(self, pids: Sequence[int]) -> int:
        return 0

    def queue(self, src: str, dst: str) -> tuple[array[int], array[int]]:
        return array("q"), array("q")

    def late_p99_ns(self) -> int:
        return 0

    def cluster(self, ending: ExitStack) -> Cluster:
        scenario = self._scenario
        listens = {}
        for site, count in scenario.sites.items():
            other = "a" if site == "b" else "b"
            for number in range(count):
                port = free_port()
                host, front = self.path_to(other, site, "127.0.0.1", port)
                # Every peer is told the front. Within a site that would be a detour; the demo sends nothing there.
                listens[(site, number)] = {"data_listen": f"127.0.0.1:{port}", "data_address": f"{host}:{front}"}
        links = told(scenario)
        return ending.enter_context(
            Cluster(scenario.sites, links=links, agent={"arena": ARENA}, each_agent=listens, log_level="warning")
        )


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def may_use(congestion_control: str) -> bool:
    """Whether this user may ask this machine's TCP for an algorithm."""
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
        except OSError:
            return False
    return sys.platform == "linux"
