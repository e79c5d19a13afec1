"""Two sites of trainers on the emulated WAN: hosts, agents, ranks that obey one director."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from proxyd.cli.cluster import Cluster, LinkFigures
from proxyd.cli.scrape import scrape
from proxyd.cli.torch_bench.options import Line
from proxyd.wan import LinkSpec, Wan, WanError
from proxyd.wan.counters import LinkCounters
from proxyd.wan.crew import Crew, Member, Place
from proxyd.wan.topology import module_environment

SITES = ("a", "b")
TCP_BUFFER_MAX_BYTES = 16 << 20
START_TIMEOUT_S = 180.0
STEP_TIMEOUT_S = 300.0
START_IN_NS = 60_000_000
"""Commands go out that long before the moment at which all ranks begin."""
SETTLE_S = 0.15
"""Between turns, so that acknowledgements and what is queued of one way don't meet the next one's first bytes."""


class Ranks:
    """The processes of one job, as one. A context manager.

    :param launches: where each rank runs, and its environment.
    :param args: what every worker is told beside its rank and the size of the world.
    """

    def __init__(self, launches: Sequence[tuple[Place, Mapping[str, str]]], args: Mapping[str, Any]) -> None:
        self.world = len(launches)
        self._crew = Crew()
        self._launches, self._args = list(launches), dict(args)
        self._members: list[Member] = []

    def __enter__(self) -> Ranks:
        try:
            for rank, (place, environment) in enumerate(self._launches):
                args = json.dumps({**self._args, "rank": rank, "world": self.world})
                argv = [sys.executable, "-m", "proxyd.cli.torch_bench.worker", args]
                self._members.append(self._crew.start(place, f"rank {rank}", argv, env=environment))
            self._crew.gather("ready", self.world, START_TIMEOUT_S)
        except BaseException:
            self._crew.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._crew.close()

    def ask(self, op: str, **fields: Any) -> list[dict[str, Any]]:
        """All ranks do the same, from one moment on; their answers by rank. Raises WanError if one fails."""
        at_ns = time.monotonic_ns() + START_IN_NS
        for member in self._members:
            member.command(op=op, at_ns=at_ns, **fields)
        answers = self._crew.gather("done", self.world, STEP_TIMEOUT_S)
        found = {answer["rank"]: {**answer, "at_ns": at_ns} for _, answer in answers}
        return [found[rank] for rank in range(self.world)]


class TwoSites:
    """The emulated WAN, a coordinator, an agent on every host. A context manager.

    :param hosts: at each site; ranks are spread over them, the first half at site a.
    :param told: the coordinator is configured with what the link can carry; else it finds that out.
    """

    def __init__(self, line: Line, hosts: int, *, told: bool = False) -> None:
        self.line, self.hosts, self.told = line, hosts, told
        self._ending = ExitStack()
        self.directory = Path(tempfile.mkdtemp(prefix="proxyd-torch-"))
        self._ending.callback(shutil.rmtree, self.directory, ignore_errors=True)

    def __enter__(self) -> TwoSites:
        spec = LinkSpec(
            rate_bytes_per_s=self.line.rate_bytes_per_s,
            trace=None,
            one_way_delay_ns=self.line.rtt_ns // 2,
            buffer_bytes=self.line.buffer_bytes,
        )
        links = {("a", "b"): spec, ("b", "a"): spec}
        sites = dict.fromkeys(SITES, self.hosts)
        try:
            self.wan = self._ending.enter_context(
                Wan(
                    sites,
                    links,
                    mtu=self.line.mtu,
                    slow_start_after_idle=False,
                    tcp_buffer_max_bytes=TCP_BUFFER_MAX_BYTES,
                )
            )
            figures = None
            if self.told:
                line = self.line
                figures = LinkFigures(
                    f"{line.rate_bytes_per_s * 8}bit", f"{line.rtt_ns}ns", f"{line.buffer_bytes}B", mtu=line.mtu
                )
            self.cluster = self._ending.enter_context(
                Cluster(sites, links=dict.fromkeys(links, figures), wan=self.wan, log_level="warning")
            )
        except BaseException:
            self._ending.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def place(self, rank: int, world: int) -> tuple[str, int]:
        """Site and number of the host of a rank."""
        half = world // 2
        return SITES[rank // half], rank % half % self.hosts

    def environment(self, rank: int, world: int) -> dict[str, str]:
        """What a rank's process needs; the kernel's loopback has no part in it."""
        return {
            **module_environment(),
            "PROXYD_SOCKET": self.cluster.agent(*self.place(rank, world)).socket,
            "GLOO_SOCKET_IFNAME": "eth0",
            # Each rank has less than a core: threads of one rank would only wait for each other.
            "OMP_NUM_THREADS": "1",
        }

    def ranks(self, world: int, **args: Any) -> Ranks:
        """``world`` ranks on the hosts, not started yet."""
        launches = [(self.wan.host(*self.place(rank, world)), self.environment(rank, world)) for rank in range(world)]
        return Ranks(launches, {"store": str(self.directory / "store"), **args})

    def open_way(self, ranks: Ranks, way: str, backend: str, control: str | None) -> None:
        """Make a way's process groups; its connections across the sites get the way's congestion control.

        Raises WanError if they did not.
        """
        self.wan.set_congestion_control(control)
        for answer in ranks.ask("open", way=way, backend=backend):
            others = set(answer["controls"]) - {control}
            if backend == "gloo" and (others or not answer["controls"]):
                raise WanError(f"rank {answer['rank']}: gloo's connections for {way} use {others or 'no TCP'}")
        self.wan.set_congestion_control(None)

    def crossed(self, before: Mapping[str, LinkCounters]) -> tuple[int, int]:
        """Bytes that have crossed the WAN since, both ways together, and packets that found a buffer full."""
        added = [now.since(before[link]) for link, now in self.wan.counters().items()]
        return sum(one.passed_bytes for one in added), sum(one.dropped_packets for one in added)

    def believed_rates(self) -> dict[str, float]:
        """Payload rate that the coordinator would grant now, bytes/s, by link: what it makes of a rate that moves."""
        now = scrape(self.cluster.coordinator.metrics)
        links = [f"{src}->{dst}" for src, dst in (SITES, SITES[::-1])]
        return {link: now.total("proxyd_link_rate_bytes_per_second", link=link) for link in links}


def quantile(values: Sequence[float], share: float) -> float:
    """Of a list that need not be sorted: the value that ``share`` of them don't exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
