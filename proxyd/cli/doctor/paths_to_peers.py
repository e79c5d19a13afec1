"""The ways to other agents: through this host's agent where it answers, else as far as a connection tells."""

from __future__ import annotations

import os
import socket
import time
from functools import partial

from proxyd.cli.asking import ask_agent
from proxyd.cli.doctor.ask import Answers, admin_socket
from proxyd.cli.doctor.findings import Finding, Task, fail, ok, skip
from proxyd.cli.doctor.kernel import persistent
from proxyd.cli.doctor.network import foreign_namespace, listener, socket_path, unreachable
from proxyd.cli.doctor.subject import Subject
from proxyd.core.errors import RemoteError
from proxyd.core.units import format_duration, format_size

MOST_PEERS = 16
"""At most so many are tried; with hundreds of agents one run would be a burst at all of them."""
_IP_MTU = 14
_IPV6_MTU = 24


def tasks(subject: Subject, answers: Answers) -> list[Task]:
    """A check for each peer that a daemon of this host told of."""
    own = "" if subject.agent is None else f"{subject.agent.site}/{subject.agent.name}"
    found = [(name, address) for name, address in answers.peers if name != own]
    name = "reach peers"
    if not found:
        return [(name, partial(_skip, name, "no daemon of this host told of one"))]
    if answers.agent is not None:
        checks = [(f"reach peer {peer}", partial(_through_agent, subject, peer, address)) for peer, address in found]
    else:
        path = socket_path(subject)
        if path is not None and foreign_namespace(listener(path, subject.connect_s)):
            return [(name, partial(_skip, name, "the agent is in another network namespace, and can't be asked"))]
        checks = [(f"reach peer {peer}", partial(_from_here, subject, peer, address)) for peer, address in found]
    more: list[Task] = []
    if len(checks) > MOST_PEERS:
        text = f"{len(checks) - MOST_PEERS} more; proxyd ping SITE/NAME looks at one"
        more.append((name, partial(_skip, name, text)))
    return [*checks[:MOST_PEERS], *more]


def _skip(name: str, why: str) -> list[Finding]:
    return [skip(name, why)]


def _through_agent(subject: Subject, peer: str, address: str) -> list[Finding]:
    """A small ping and one in full packets, agent to agent: tokens, certificates and names are proven with it."""
    from proxyd.v1 import admin_pb2, coordination_pb2

    name = f"reach peer {peer}"
    site, _, agent = peer.partition("/")
    request = admin_pb2.PingRequest(
        peer=coordination_pb2.AgentName(site=site, name=agent), address=address, count=1, interval_ms=0
    )
    timeout_s = 0.9 * subject.timeout_s
    try:
        answer: admin_pb2.PingResponse = ask_agent(
            admin_socket(subject), lambda stub: stub.Ping(request, timeout=timeout_s)
        )
    except RemoteError as error:
        return [fail(name, f"{address}: {error}", f"proxyd ping {peer}")]
    if answer.error or not answer.rtt_ns:
        fix = f"proxyd ping {peer}; on its host: proxyd doctor, journalctl -u proxyd-agent"
        return [fail(name, answer.error or f"{address}: the agent there does not answer", fix)]
    rtt = format_duration(answer.rtt_ns[0])
    mtu = f"path MTU {answer.path_mtu}"
    if not answer.large_rtt_ns:
        text = (
            f"{address}: small messages pass ({rtt}), {format_size(answer.large_bytes)} in full packets do not ({mtu}):"
        )
        text += " a box on the path drops large packets without a word"
        return [fail(name, text, persistent("net.ipv4.tcp_mtu_probing = 1"))]
    return [ok(name, f"{address}: answers in {rtt}, also in full packets ({mtu})")]


def _from_here(subject: Subject, peer: str, text: str) -> list[Finding]:
    from proxyd.runtime.addresses import parse_address

    name = f"reach peer {peer}"
    address = parse_address(text)
    begun_ns = time.monotonic_ns()
    try:
        with socket.create_connection((address.host, address.port), subject.connect_s) as probe:
            took_ns = time.monotonic_ns() - begun_ns
            mtu = _path_mtu(probe)
    except OSError as error:
        return [unreachable(name, text, error, "journalctl -u proxyd-agent, on its host")]
    path = f"; path MTU {mtu}" if mtu else ""
    text = f"{text}: connected in {format_duration(took_ns)}{path}"
    if os.getuid() != 0:
        return [ok(name, f"{text} (as the agent's user proxyd doctor pings it too)")]
    return [ok(name, text)]


def _path_mtu(sock: socket.socket) -> int:
    try:
        if sock.family == socket.AF_INET6:
            return sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
        return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return 0
