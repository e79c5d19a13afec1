"""``proxyd health``: do this host's daemons work, for probes and for people?

``serving``, or a word for why that isn't all: ``draining``, ``standby`` (another coordinator is active), ``degraded``
(an agent without a coordinator, or one that goes at its fallback rate), ``down``. ``proxyd healthcheck`` is the probe
that loads and asks nothing, for containers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from proxyd.cli.asking import add_agent, add_coordinator
from proxyd.core.errors import EXIT_DEGRADED, EXIT_FAILED, EXIT_OK, ProxydError

SERVING = "serving"
DOWN = "down"
ACCEPT_TIMEOUT_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """Of one daemon."""

    daemon: str
    address: str
    state: str
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="ask the daemons of this configuration (default: $PROXYD_CONFIG)"
    )
    add_agent(parser)
    add_coordinator(parser)
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when all serve, 3 when one does so only in part, 1 when one is down."""
    found = [look() for look in _questions(args)]
    if args.json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
    else:
        for one in found:
            where = sys.stdout if one.state == SERVING else sys.stderr
            print(f"{one.daemon} {one.address}: {one.state}{f', {one.detail}' if one.detail else ''}", file=where)
    states = {one.state for one in found}
    if DOWN in states:
        return EXIT_FAILED
    return EXIT_OK if states == {SERVING} else EXIT_DEGRADED


def _questions(args: argparse.Namespace) -> list[_Question]:
    if args.agent is not None or args.coordinator is not None:
        agents = [] if args.agent is None else [_Question("agent", args.agent)]
        return agents + ([] if args.coordinator is None else [_Question("coordinator", args.coordinator)])
    from proxyd.cli.check import config_path
    from proxyd.runtime.config import load_config

    config = load_config(config_path(args.config))
    found = []
    if config.agent is not None:
        # Without an admin socket all there is to see is whether it lets trainers in.
        path = config.agent.admin_path
        found.append(_Question("agent", config.agent.socket if path is None else path, asks=path is not None))
    if config.coordinator is not None:
        addresses = sorted(config.coordinator.listen_addresses, key=lambda one: not one.is_unix)
        first = addresses[0]
        if first.is_unspecified:
            first = dataclasses.replace(first, host="::1" if ":" in first.host else "127.0.0.1")
        found.append(_Question("coordinator", str(first)))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Question:
    daemon: str
    address: str
    asks: bool = True

    def __call__(self) -> Health:
        if not self.asks:
            return listens(self.address)
        try:
            return agent_health(self.address) if self.daemon == "agent" else coordinator_health(self.address)
        except ProxydError as error:
            return Health(self.daemon, self.address, DOWN, str(error))


def listens(socket: str) -> Health:
    """Of an agent with ``admin = "off"``: whether it accepts trainers, and no more."""
    from proxyd.cli.healthcheck import accepts
    from proxyd.runtime.addresses import Address

    reason = accepts(Address(path=socket), ACCEPT_TIMEOUT_S)
    if reason is not None:
        return Health("agent", socket, DOWN, f"nobody accepts there: {reason}")
    return Health("agent", socket, SERVING, 'it accepts trainers; admin = "off" tells no more')


def agent_health(socket: str) -> Health:
    """Of the agent at a socket. Raises ProxydError when it can't be asked."""
    from proxyd.cli.agent_status import fetch

    status = fetch(socket)
    lost = [one.address for one in status.coordinators if not one.connected]
    silent = [f"{one.link.src_site}->{one.link.dst_site}" for one in status.links if one.fallback]
    if status.draining:
        detail = f"{status.outgoing_transfers} under way, {status.held_transfers} held"
        return Health("agent", status.socket, "draining", detail)
    if silent:
        return Health("agent", status.socket, "degraded", f"at the fallback rate on {', '.join(silent)}")
    if len(lost) == len(status.coordinators):
        return Health("agent", status.socket, "degraded", f"no session with {', '.join(lost)}")
    return Health("agent", status.socket, SERVING, f"no session with {', '.join(lost)}" if lost else "")


def coordinator_health(address: str) -> Health:
    """Of the coordinator at an address of this host. Raises ProxydError when it can't be asked."""
    from proxyd.cli.asking import TIMEOUT_S, ask_coordinator
    from proxyd.core.errors import RemoteError
    from proxyd.v1 import admin_pb2

    try:
        status: admin_pb2.StatusResponse = ask_coordinator(
            address, lambda stub: stub.Status(admin_pb2.StatusRequest(), timeout=TIMEOUT_S)
        )
    except RemoteError as error:
        if "stands by" in error.why:  # it answers, and says who is active
            return Health("coordinator", address, "standby", error.why)
        raise
    if status.draining:
        under_way = sum(agent.transfers for agent in status.agents)
        detail = f"{under_way} under way, {status.held_transfers} held"
        return Health("coordinator", address, "draining", detail)
    return Health("coordinator", address, SERVING, f"{len(status.agents)} agents")
