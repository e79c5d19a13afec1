"""Who sends the bursts: plain TCP, or trainers through their agents. Both obey the same two calls.

A traffic is *ordered* ahead of time (so that every sender has heard of a burst before it is due) and then tells of
*arrivals*. FCT runs from the instant at which a burst was due to the receiver's last byte: the same clock, the same
start and the same end for both. No sender calls ``isend`` earlier than due.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

from proxyd.cli.cluster import Cluster, LinkFigures
from proxyd.cli.demo.counters import Counters, read_counters
from proxyd.cli.demo.results import Arrival
from proxyd.cli.demo.scenario import Mode, Scenario
from proxyd.core.errors import ProxydError
from proxyd.wan import Wan
from proxyd.wan.burst import Burst
from proxyd.wan.crew import Crew, Member
from proxyd.wan.topology import module_environment

READY_TIMEOUT_S = 60.0
JOB = "demo"


class DemoError(ProxydError):
    """The demo could not be run to its end, or what it saw contradicts what it should prove."""


class Traffic(Protocol):
    """One mode, connected and ready."""

    def order(self, number: int, due_ns: int) -> None:
        """Every sender sends its tensor of this burst at this time."""

    def next_arrival(self, timeout_s: float) -> Arrival:
        """The next transfer that is complete. Raises if a process ended or nothing arrives in time."""

    def pids(self) -> list[int]:
        """The senders' processes, in order; each lives in its host's network namespace."""

    def finish(self, bursts: int) -> dict[str, Any] | None:
        """After the last arrival: proof, by counters, of how the bytes of all bursts went; None if there is none."""


class PlainTraffic:
    """Persistent TCP connections, everybody at once."""

    def __init__(self, wan: Wan, scenario: Scenario, mode: Mode, sites: tuple[str, str]) -> None:
        assert mode.congestion_control is not None
        self._crew = Crew()
        try:
            self._burst = Burst(
                wan,
                self._crew,
                senders=scenario.senders,
                tensor_bytes=scenario.tensor_bytes,
                congestion_control=mode.congestion_control,
                sites=sites,
            )
        except BaseException:
            self._crew.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.close()

    def order(self, number: int, due_ns: int) -> None:
        for sender in range(len(self._burst.senders)):
            self._burst.send(sender, number, due_ns)

    def next_arrival(self, timeout_s: float) -> Arrival:
        _, event = self._crew.gather("received", 1, timeout_s)[0]
        return Arrival(event["sender"], event["sequence"], event["last_ns"])

    def pids(self) -> list[int]:
        return [member.process.pid for member in self._burst.senders]

    def finish(self, bursts: int) -> dict[str, Any] | None:
        return None


class ProxydTraffic:
    """One trainer per sending host, one process for all receivers, each at the agent of its host."""

    def __init__(self, wan: Wan, scenario: Scenario, cluster: Cluster, sites: tuple[str, str]) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._src, self._dst = sites
        self._crew = Crew()
        self._arrived: list[Arrival] = []
        self._digests: dict[tuple[int, int], str] = {}
        self.lag_ns_max = 0
        """The longest time between a burst's due time and the return of an ``isend``."""
        try:
            receiver = self._start(wan, self._dst, 0, "receive", {})
            self._await_ready([receiver])
            self._senders = [
                self._start(wan, self._src, rank, "send", {"rank": rank}) for rank in range(scenario.senders)
            ]
            self._await_ready(self._senders)
            self._before = self._counters()
        except BaseException:
            self._crew.close()
            raise

    def _start(self, wan: Wan, site: str, host: int, role: str, more: dict[str, Any]) -> Member:
        args = {
            "socket": self._cluster.agent(site, host).socket,
            "job": f"{JOB}-{self._src}-{self._dst}",
            "senders": self._scenario.senders,
            "tensor_bytes": self._scenario.tensor_bytes,
            **more,
        }
        argv = [sys.executable, "-m", "proxyd.cli.burst_worker", role, json.dumps(args)]
        name = f"{role}r on {site}-{host}"
        return self._crew.start(wan.host(site, host), name, argv, env=module_environment())

    def _await_ready(self, members: list[Member]) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        waiting = len(members)
        while waiting:
            _, event = self._crew.next_event(deadline_s - time.monotonic())
            self._refuse_failure(event)
            waiting -= event["event"] == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.close()

    def order(self, number: int, due_ns: int) -> None:
        for member in self._senders:
            member.command(op="send", number=number, at_ns=due_ns)

    def next_arrival(self, timeout_s: float) -> Arrival:
        deadline_s = time.monotonic() + timeout_s
        while True:
            event = self._next_event(deadline_s)
            if event["event"] == "received":
                return Arrival(event["sender"], event["number"], event["end_ns"])

    def _next_event(self, deadline_s: float) -> dict[str, Any]:
        _, event = self._crew.next_event(deadline_s - time.monotonic())
        self._refuse_failure(event)
        if event["event"] in ("sent", "received"):
            key = (event["sender"], event["number"])
            # Whichever comes second finds the first.
            other = self._digests.pop(key, None)
            if other is None:
                self._digests[key] = event["digest"]
            elif other != event["digest"]:
                raise DemoError(
                    f"rank {key[0]}'s message of burst {key[1]} arrived with other content than it was sent with",
                    why=f"digests {other} and {event['digest']}",
                    next_step="This must never happen: please report it, with the logs",
                )
        return event

    def _refuse_failure(self, event: dict[str, Any]) -> None:
        if event["event"] != "failed":
            return
        words = "\n".join(f"  {member.label}: {line}" for member in self._cluster.members for line in tail(member))
        raise DemoError(f"a trainer failed: {event['error']}", why=f"the last words of the daemons:\n{words}")

    def pids(self) -> list[int]:
        return [member.process.pid for member in self._senders]

    def finish(self, bursts: int) -> dict[str, Any]:
        """Wait for the acknowledgements, then compare the daemons' counters with what was sent."""
        for member in self._senders:
            member.command(op="finish")
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        finished = 0
        while finished < len(self._senders):
            finished += self._next_event(deadline_s)["event"] == "finished"
        if self._digests:
            raise DemoError(f"{len(self._digests)} messages have no counterpart", why="sent and received must pair up")
        added = self._counters().since(self._before)
        payload = bursts * self._scenario.senders * self._scenario.tensor_bytes
        problems = added.problems(payload)
        if problems:
            raise DemoError(
                "the daemons' counters don't prove that the bytes went under grants", why="; ".join(problems)
            )
        return {"payload_bytes": payload, **added.to_json()}

    def _counters(self) -> Counters:
        return read_counters(self._cluster, self._src, self._dst)


def tail(member: Any, lines: int = 3) -> list[str]:
    """The last lines of a daemon's log that say something."""
    return [line for line in member.last_words().splitlines() if line.strip()][-lines:]


def start_cluster(wan: Wan, scenario: Scenario, ending: ExitStack, directory: Path | None = None) -> Cluster:
    """Coordinator and agents on the hosts, told the truth about the links."""
    figures = LinkFigures(
        capacity=f"{scenario.rate_bytes_per_s * 8}bit",
        rtt=f"{scenario.rtt_ns}ns",
        buffer=f"{scenario.buffer_bytes}B",
        mtu=scenario.mtu,
    )
    links = dict.fromkeys(scenario.links(), figures)
    return ending.enter_context(Cluster(scenario.sites, links=links, wan=wan, directory=directory))
