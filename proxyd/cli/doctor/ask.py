"""Questions to running daemons, each with a time limit. None where nobody answers: other checks say why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from proxyd.cli.doctor.subject import LinkPath, Subject
from proxyd.core.errors import ConfigError

if TYPE_CHECKING:
    import grpc

    from proxyd.v1 import admin_pb2


@dataclasses.dataclass(frozen=True)
class Answers:
    """What running daemons said."""

    status: admin_pb2.StatusResponse | None = None
    coordinator: str = ""
    """Where that came from."""

    @property
    def peers(self) -> list[tuple[str, str]]:
        """Agents and where they are dialled."""
        agents = () if self.status is None else self.status.agents
        return [(f"{one.agent.site}/{one.agent.name}", one.data_address) for one in agents]

    @property
    def paths(self) -> list[LinkPath]:
        """Links as they were measured."""
        links = () if self.status is None else self.status.links
        return [
            LinkPath(
                f"{link.link.src_site}->{link.link.dst_site}", link.bottleneck_bytes_per_s, link.rtt_ns, link.source
            )
            for link in links
            if link.bottleneck_bytes_per_s and link.rtt_ns and link.source != "default"
        ]


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


def ask_coordinator(subject: Subject) -> Answers:
    """The status of a coordinator on this host, by any of the ways there are."""
    import grpc

    from proxyd.v1 import admin_pb2
    from proxyd.v1.admin_pb2_grpc import AdminStub

    for address in _local_coordinators(subject):
        try:
            with channel_to(subject, address) as channel:
                status = AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=subject.connect_s)
        except grpc.RpcError:
            continue
        return Answers(status, address)
    return Answers()


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
