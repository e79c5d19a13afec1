"""Who sends the bursts: plain TCP, or trainers through their agents. Both obey the same two calls.

A traffic is *ordered* ahead of time (so that every sender has heard of a burst before it is due) and then tells of
*arrivals*. FCT runs from the instant at which a burst was due to the receiver's last byte: the same clock, the same
start and the same end for both. No sender calls ``isend`` earlier than due.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol, Self

import proxyd.wan
from proxyd.cli.cluster import Cluster
from proxyd.cli.cluster import Member as Daemon
from proxyd.cli.demo.counters import Counters, read_counters
from proxyd.cli.demo.net import Net
from proxyd.cli.demo.results import Arrival
from proxyd.cli.demo.scenario import Mode, Scenario
from proxyd.core.errors import ProxydError
from proxyd.wan.crew import Crew, Member
from proxyd.wan.topology import module_environment

READY_TIMEOUT_S = 60.0
JOB = "demo"
PLAIN_PORT = 5201
PLAIN_WORKER = str(Path(proxyd.wan.__file__).with_name("_worker.py"))


class DemoError(ProxydError):
    """The demo could not be run to its end, or what it saw contradicts what it should prove."""

    code = "demo"


class Traffic(Protocol):
    """One mode, connected and ready."""

    def order(self, number: int, due_ns: int) -> None:
        """Every sender sends its tensor of this burst at this time."""

    def order_one(self, sender: int, number: int, due_ns: int) -> None:
        """One sender sends its message of this number at this time; numbers of a sender must not leave one out."""

    def next_arrival(self, timeout_s: float) -> Arrival:
        """The next transfer that is complete. Raises if a process ended or nothing arrives in time."""

    def pids(self) -> list[int]:
        """The senders' processes, in order; on the emulated WAN each lives in its host's network namespace."""

    def finish(self, messages: int) -> dict[str, Any] | None:
        """After the last arrival: proof, by counters, of how the bytes of all messages went; None if there is none."""


class PlainTraffic:
    """Persistent TCP connections, everybody at once; one receiving process per receiving host."""

    def __init__(self, net: Net, scenario: Scenario, mode: Mode, sites: tuple[str, str]) -> None:
        assert mode.congestion_control is not None, "a plain mode names its congestion control"
        src, dst = sites
        self._tensor_bytes = scenario.tensor_bytes
        self._crew = Crew()
        try:
            address = net.listen_address(dst, 0)
            self._start(net, dst, 0, "receive", PLAIN_PORT)
            self._crew.gather("listening", 1, READY_TIMEOUT_S)
            self._senders = [self._start(net, src, number, "send", number) for number in range(scenario.senders)]
            target, port = net.path_to(src, dst, address, PLAIN_PORT)
            for sender in self._senders:
                sender.command(op="connect", address=target, port=port, congestion=mode.congestion_control)
            self._crew.gather("connected", len(self._senders), READY_TIMEOUT_S)
        except BaseException:
            self._crew.close()
            raise

    def _start(self, net: Net, site: str, host: int, role: str, argument: int) -> Member:
        argv = [sys.executable, "-I", "-S", PLAIN_WORKER, role, str(argument)]
        return self._crew.start(net.place(site, host), f"plain {role} on {site}-{host}", argv)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.close()

    def order(self, number: int, due_ns: int) -> None:
        for sender in range(len(self._senders)):
            self.order_one(sender, number, due_ns)

    def order_one(self, sender: int, number: int, due_ns: int) -> None:
        self._senders[sender].command(op="send", sequence=number, bytes=self._tensor_bytes, at_ns=due_ns)

    def next_arrival(self, timeout_s: float) -> Arrival:
        _, event = self._crew.gather("received", 1, timeout_s)[0]
        return Arrival(event["sender"], event["sequence"], event["last_ns"])

    def pids(self) -> list[int]:
        return [member.process.pid for member in self._senders]

    def finish(self, messages: int) -> dict[str, Any] | None:
        return None


class ProxydTraffic:
    """One trainer per sending host, one process for all receivers, each at the agent of its host.

    ``job`` keeps several of them apart; ``traffic`` is the class of all messages; ``first_host`` is sender 0's.
    """

    def __init__(
        self,
        net: Net,
        scenario: Scenario,
        cluster: Cluster,
        sites: tuple[str, str],
        *,
        job: str = JOB,
        traffic: str = "pipeline",
        first_host: int = 0,
    ) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._src, self._dst = sites
        self._job, self._traffic = job, traffic
        self._crew = Crew()
        self._digests: dict[tuple[int, int], str] = {}
        try:
            # Together: on two cores most of the start is Python's imports.
            receiver = self._start(net, self._dst, 0, "receive", {})
            self._senders = [
                self._start(net, self._src, first_host + n, "send", {"rank": n}) for n in range(scenario.senders)
            ]
            self._await_ready([receiver, *self._senders])
            self._before = self._counters()
        except BaseException:
            self._crew.close()
            raise

    def _start(self, net: Net, site: str, host: int, role: str, more: dict[str, Any]) -> Member:
        args = {
            "socket": self._cluster.agent(site, host).socket,
            "job": f"{self._job}-{self._src}-{self._dst}",
            "traffic": self._traffic,
            "senders": self._scenario.senders,
            "tensor_bytes": self._scenario.tensor_bytes,
            **more,
        }
        argv = [sys.executable, "-m", "proxyd.cli.burst_worker", role, json.dumps(args)]
        return self._crew.start(
            net.place(site, host), f"trainer ({role}) on {site}-{host}", argv, env=module_environment()
        )

    def _await_ready(self, members: list[Member]) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        waiting = len(members)
        while waiting:
            waiting -= self._next_event(deadline_s)["event"] == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.close()

    def order(self, number: int, due_ns: int) -> None:
        for sender in range(len(self._senders)):
            self.order_one(sender, number, due_ns)

    def order_one(self, sender: int, number: int, due_ns: int) -> None:
        self._senders[sender].command(op="send", number=number, at_ns=due_ns)

    def next_arrival(self, timeout_s: float) -> Arrival:
        deadline_s = time.monotonic() + timeout_s
        while True:
            event = self._next_event(deadline_s)
            if event["event"] == "received":
                return Arrival(event["sender"], event["number"], event["end_ns"])

    def _next_event(self, deadline_s: float) -> dict[str, Any]:
        _, event = self._crew.next_event(max(0.0, deadline_s - time.monotonic()))
        if event["event"] == "failed":
            words = "; ".join(f"{daemon.label}: {line}" for daemon in self._cluster.members for line in tail(daemon))
            raise DemoError(f"a trainer failed: {event['error']}", why=f"last words of the daemons: {words}")
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
                    next_step="This must never happen: please report it, with the daemons' logs",
                )
        return event

    def pids(self) -> list[int]:
        return [member.process.pid for member in self._senders]

    def finish(self, messages: int) -> dict[str, Any]:
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
        payload = messages * self._scenario.tensor_bytes
        problems = added.problems(payload)
        if problems:
            raise DemoError(
                "the daemons' counters don't prove that the bytes went under grants", why="; ".join(problems)
            )
        return {"payload_bytes": payload, **added.to_json()}

    def _counters(self) -> Counters:
        try:
            return read_counters(self._cluster, self._src, self._dst)
        except OSError as error:
            gone = ", ".join(f"{daemon.label} (exit code {code})" for daemon, code in self._cluster.deaths())
            raise DemoError(
                f"a daemon does not answer for its metrics: {error}",
                why=f"ended: {gone}" if gone else "all daemons live",
            ) from error


def tail(daemon: Daemon, lines: int = 3) -> list[str]:
    """The last lines of a daemon's log that say something."""
    return [line for line in daemon.last_words().splitlines() if line.strip()][-lines:]
