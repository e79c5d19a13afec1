"""Where trainers and peers come in: what an agent listens on, and what it tells peers to dial."""

from __future__ import annotations

import dataclasses
import socket

from proxyd.agent.inbound import bound_address
from proxyd.agent.local import listen_unix
from proxyd.core.errors import ConfigError
from proxyd.runtime import config as conf
from proxyd.runtime.addresses import Address, interface_address
from proxyd.runtime.limits import Listening
from proxyd.runtime.metrics import listen_tcp
from proxyd.runtime.unix_path import UnixPathClaim

_ANYWHERE = "192.0.2.1"  # never answered, never asked: connecting a UDP socket only looks up the route


@dataclasses.dataclass(frozen=True, slots=True)
class Entrances:
    """One agent's."""

    local: Listening
    data: Listening
    gateway: Listening | None
    data_address: Address
    gateway_address: Address | None
    claim: UnixPathClaim | None = None
    """The right to the local socket's path; None: another process has it."""

    def close(self) -> None:
        """Listen no more, and let the path go."""
        for one in (self.local, self.data, self.gateway):
            if one is not None:
                one.close()
        if self.claim is not None:
            self.claim.release()


def open_entrances(section: conf.AgentConfig) -> Entrances:
    """Listen as configured. Raises ListenError, ConfigError."""
    claim, local = listen_unix(section.socket)
    opened: list[socket.socket] = [local]
    try:
        data = listen_tcp(section.data_listen_address, "data_listen")
        opened.append(data)
        gateway = None
        if section.gateway_listen_address is not None:
            gateway = listen_tcp(section.gateway_listen_address, "gateway_listen")
            opened.append(gateway)
        address = advertised_address(section, bound_address(data))
    except BaseException:
        for sock in opened:
            sock.close()
        claim.release()
        raise
    return Entrances(local, data, gateway, address, None if gateway is None else bound_address(gateway), claim)


def advertised_address(section: conf.AgentConfig, bound: Address) -> Address:
    """What peers are told to dial: as configured, else where we listen, else the address that faces the coordinator.

    Raises ConfigError when that would be an address that no other host can reach, though others are there.
    """
    found = _dialled(section, bound)
    elsewhere = [address for address in section.coordinator_addresses if not address.is_loopback]
    if found.is_link_local or (found.is_loopback and elsewhere):
        raise ConfigError(
            f"peers of this agent would be told to dial {found}, which no other host can reach",
            why=f"its coordinator is on another host ({elsewhere[0]})" if elsewhere else "it is a link-local address",
            next_step="Let data_listen be an address that faces the peers, or give data_address or data_interface",
        )
    return found


def _dialled(section: conf.AgentConfig, bound: Address) -> Address:
    if section.data_interface is not None:
        return interface_address(section.data_interface, ipv6=":" in bound.host).with_port(bound.port)
    configured = section.advertised_address
    if configured is not None:
        return configured if configured.port else configured.with_port(bound.port)
    if not bound.is_unspecified:
        return bound
    hosts = [address.host for address in section.coordinator_addresses if address.host]
    for host in [*hosts, _ANYWHERE]:
        found = _address_towards(host)
        if found is not None and not found.is_loopback and not found.is_link_local:
            return found.with_port(bound.port)
    raise ConfigError(
        f"[agent] data_listen = {section.data_listen!r} is every interface, and none of them faces a coordinator",
        next_step='Say what peers shall dial: data_address = "HOST:PORT", or data_interface = "eth0"',
    )


def _address_towards(host: str) -> Address | None:
    """The local address that packets to ``host`` leave from; None without a route."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return Address(host=probe.getsockname()[0])
    except OSError:
        return None
