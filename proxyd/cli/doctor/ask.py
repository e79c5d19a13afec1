"""Questions to running daemons, each with a time limit. None where nobody answers: other checks say why."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from proxyd.cli.asking import ask_agent
from proxyd.cli.doctor.subject import LinkPath, Subject
from proxyd.core.errors import ConfigError, ProxydError

if TYPE_CHECKING:
    import grpc

    from proxyd.v1 import admin_pb2, coordination_pb2


@dataclasses.dataclass(frozen=True)
class Answers:
    """What running daemons said."""

    status: admin_pb2.StatusResponse | None = None
    coordinator: str = ""
    """Where that came from."""
    agent: admin_pb2.AgentStatusResponse | None = None
    agent_problem: str = ""
    """Why there is no word of the agent."""

    @property
    def peers(self) -> list[tuple[str, str]]:
        """Other agents and where they are dialled, by name."""
        found = {}
        if self.agent is not None:
            found = {f"{one.agent.site}/{one.agent.name}": one.address for one in self.agent.peers}
        if self.status is not None:
            found |= {f"{one.agent.site}/{one.agent.name}": one.data_address for one in self.status.agents}
        if self.agent is not None:
            found.pop(f"{self.agent.agent.site}/{self.agent.agent.name}", None)
        return sorted((name, address) for name, address in found.items() if address)

    @property
    def paths(self) -> list[LinkPath]:
        """Links as they were measured, by the coordinator or as the agent heard of them."""
        found = {}
        if self.agent is not None:
            found = {
                name_of(link.link): LinkPath(name_of(link.link), link.rate_bytes_per_s, link.rtt_ns, link.source)
                for link in self.agent.links
            }
        if self.status is not None:
            found |= {
                name_of(link.link): LinkPath(name_of(link.link), link.bottleneck_bytes_per_s, link.rtt_ns, link.source)
                for link in self.status.links
            }
        return [path for path in found.values() if path.bdp_bytes and path.source not in ("", "default")]


def name_of(link: coordination_pb2.LinkName) -> str:
    """A link as people write it."""
    return f"{link.src_site}->{link.dst_site}"


def ask_daemons(subject: Subject) -> Answers:
    """A coordinator of this host, and its agent."""
    status, coordinator = ask_coordinator(subject)
    try:
        agent = ask_agent(admin_socket(subject), lambda stub: _agent_status(stub, subject.connect_s))
    except ProxydError as error:
        return Answers(status, coordinator, None, str(error))
    return Answers(status, coordinator, agent)


def admin_socket(subject: Subject) -> str | None:
    """The agent's, by its configuration; None: as $PROXYD_SOCKET says, or the usual one."""
    if subject.agent is None or os.environ.get("PROXYD_SOCKET"):
        return None
    return subject.agent.admin_path or subject.agent.socket


def _agent_status(stub: Any, timeout_s: float) -> admin_pb2.AgentStatusResponse:
    from proxyd.v1 import admin_pb2

    status: admin_pb2.AgentStatusResponse = stub.AgentStatus(admin_pb2.AgentStatusRequest(), timeout=timeout_s)
    return status


@contextmanager
def channel_to(subject: Subject, address: str) -> Iterator[grpc.Channel]:
    """A channel to a coordinator, with the agent's certificate where there is one."""
    import grpc

    from proxyd.runtime.grpc_options import channel_options
    from proxyd.runtime.tls import COORDINATOR_NAME, agent_tls

    keeper = None
    if subject.agent is not None and not address.startswith("unix:"):
        try:
            keeper = agent_tls(subject.agent.tls, subject.agent.site, subject.agent.name)
        except ConfigError:
            keeper = None  # the certificate has a finding of its own
    if keeper is None:
        channel = grpc.insecure_channel(address, options=channel_options())
    else:
        identity = keeper.current()
        credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.chain_pem)
        options = [*channel_options(), ("grpc.ssl_target_name_override", COORDINATOR_NAME)]
        channel = grpc.secure_channel(address, credentials, options=options)
    with channel:
        yield channel


def ask_coordinator(subject: Subject) -> tuple[admin_pb2.StatusResponse | None, str]:
    """The status of a coordinator on this host, by any of the ways there are, and which that was."""
    import grpc

    from proxyd.v1 import admin_pb2
    from proxyd.v1.admin_pb2_grpc import AdminStub

    for address in _local_coordinators(subject):
        try:
            with channel_to(subject, address) as channel:
                status = AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=subject.connect_s)
        except grpc.RpcError:
            continue
        return status, address
    return None, ""


def _local_coordinators(subject: Subject) -> list[str]:
    """Where a coordinator of this host may be asked. Those on other hosts answer no such questions."""
    from proxyd.runtime.addresses import parse_address

    found = [] if subject.coordinator_address is None else [subject.coordinator_address]
    if subject.coordinator is not None:
        addresses = sorted(subject.coordinator.listen_addresses, key=lambda one: not one.is_unix)
        found += [str(one.with_port(one.port)) if one.is_unix else _loopback(str(one)) for one in addresses]
    if subject.agent is not None:
        found += [one for one in subject.agent.coordinators if parse_address(one, unix_ok=True).is_loopback]
    if not found and not subject.paths:
        found.append("127.0.0.1:7600")
    return list(dict.fromkeys(found))[:3]


def _loopback(address: str) -> str:
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": f"127.0.0.1:{port}", "[::]": f"[::1]:{port}"}.get(host, address)
