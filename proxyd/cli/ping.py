"""``proxyd ping SITE/NAME``: from this host's agent to another one and back: round trip, rate, MTU.

The pings are frames of the agents' own, over the connection that transfers use (or one that is dialled for it, with the
same proofs), so an answer says more than one of the kernel's: token, certificates and names fit, and the other agent's
loop runs. The last ping fills full packets.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import TYPE_CHECKING

from proxyd.cli.asking import add_agent, add_coordinator, ask_agent, ask_coordinator
from proxyd.core.errors import EXIT_DEGRADED, EXIT_FAILED, EXIT_OK, ConfigError, RemoteError
from proxyd.core.units import format_duration, format_rate, format_size
from proxyd.runtime.json_values import as_plain

if TYPE_CHECKING:
    from proxyd.v1 import admin_pb2

ANSWER_S = 2.0
DIAL_S = 12.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("peer", metavar="SITE/NAME", help="the agent to ping, as proxyd status prints it")
    add_agent(parser)
    add_coordinator(parser)
    parser.add_argument("--address", metavar="HOST:PORT", help="where it is, if no trainer has made it known yet")
    parser.add_argument(
        "--count", type=int, default=5, metavar="N", help="small pings, 1 to 100 (default: %(default)s)"
    )
    parser.add_argument(
        "--interval-ms", type=int, default=200, metavar="MS", help="between them (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 without an answer, 3 when some were lost or full packets don't pass."""
    site, slash, name = args.peer.partition("/")
    if not (site and slash and name):
        raise ConfigError(f"{args.peer!r} names no agent", next_step="Write it as SITE/NAME; proxyd status lists them")
    if not 1 <= args.count <= 100 or not 0 <= args.interval_ms <= 10_000:
        raise ConfigError("--count goes from 1 to 100 and --interval-ms from 0 to 10000")
    if args.address is not None:
        from proxyd.runtime.addresses import parse_address

        parse_address(args.address, port_zero_ok=False)
    address = args.address or _address_of(args.peer, args.coordinator)
    from proxyd.v1 import admin_pb2, coordination_pb2

    request = admin_pb2.PingRequest(
        peer=coordination_pb2.AgentName(site=site, name=name),
        address=address,
        count=args.count,
        interval_ms=args.interval_ms,
    )
    timeout_s = DIAL_S + args.count * (ANSWER_S + args.interval_ms / 1000)
    answer: admin_pb2.PingResponse = ask_agent(args.agent, lambda stub: stub.Ping(request, timeout=timeout_s))
    if args.json:
        print(json.dumps(as_plain(answer), indent=2))
    elif answer.error:
        raise RemoteError(
            f"no answer from {args.peer}", why=answer.error, next_step="proxyd doctor looks at what may be in the way"
        )
    else:
        print("\n".join(lines(args.peer, answer)))
    if not answer.rtt_ns:
        return EXIT_FAILED
    return EXIT_OK if len(answer.rtt_ns) == answer.sent and answer.large_rtt_ns else EXIT_DEGRADED


def _address_of(peer: str, coordinator: str | None) -> str:
    """Where a coordinator says that it is; "" when none was named, or it doesn't know."""
    if coordinator is None:
        return ""
    from proxyd.v1 import admin_pb2

    status: admin_pb2.StatusResponse = ask_coordinator(
        coordinator, lambda stub: stub.Status(admin_pb2.StatusRequest(), timeout=ANSWER_S)
    )
    found = {f"{one.agent.site}/{one.agent.name}": one.data_address for one in status.agents}
    if peer not in found:
        raise RemoteError(
            f"the coordinator knows no agent {peer}",
            why=f"it has {', '.join(sorted(found)) or 'none'}",
            next_step="Is that agent running? Or give its address: --address HOST:PORT",
        )
    return found[peer]


def lines(peer: str, answer: admin_pb2.PingResponse) -> list[str]:
    """For people."""
    rtts = list(answer.rtt_ns)
    how = "dialled for this" if answer.dialled else f"over its link, {answer.streams} streams"
    found = [f"{peer} at {answer.address} ({how})"]
    lost = answer.sent - len(rtts)
    if not rtts:
        return [*found, f"none of {answer.sent} pings was answered"]
    middle = round(statistics.median(rtts))
    found.append(
        f"{len(rtts)} of {answer.sent} answered{f', {lost} lost' if lost else ''}: round trip min "
        f"{format_duration(min(rtts))}, median {format_duration(middle)}, max {format_duration(max(rtts))}"
    )
    mtu = f"path MTU {answer.path_mtu}, {answer.segment_bytes} bytes of payload a packet"
    if answer.large_rtt_ns:
        large = format_duration(answer.large_rtt_ns)
        found.append(f"{mtu}; {format_size(answer.large_bytes)} in full packets and back in {large}")
    else:
        found.append(
            f"{mtu}; {format_size(answer.large_bytes)} in full packets had no answer: a box on the path may drop large "
            "packets. fix: sudo sysctl -w net.ipv4.tcp_mtu_probing=1 on both hosts, or a smaller MTU"
        )
    if answer.HasField("link") and answer.link.rate_bytes_per_s:
        link = answer.link
        name = f"{link.link.src_site}->{link.link.dst_site}"
        found.append(
            f"link {name}: {format_rate(link.rate_bytes_per_s)} ({link.source}), rtt {format_duration(link.rtt_ns)}"
            f"{', at the fallback rate: its coordinator is silent' if link.fallback else ''}"
        )
    if answer.delivery_rate_bytes_per_s:
        found.append(f"its streams delivered {format_rate(answer.delivery_rate_bytes_per_s)} when they sent last")
    return found
