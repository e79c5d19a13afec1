"""Which targets an exit connects to, and which clients a door lets in."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import NamedTuple

from proxyd.core.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_network(text: str) -> Network:
    """Raises ConfigError."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is no network", why=str(error), next_step='Write it like "10.2.0.0/16" or "10.2.0.9/32"'
        ) from error


class Rule(NamedTuple):
    """A network, and ports of it; no ports: all."""

    network: Network
    ports: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """``NETWORK:PORT[,PORT...]`` or ``NETWORK:*``. Raises ConfigError."""
        network, colon, ports = text.rpartition(":")
        if not colon:
            raise ConfigError(
                f"{text!r} allows nothing", why="it has no ports", next_step='Write it like "10.2.0.0/16:22,873"'
            )
        if ports == "*":
            return cls(parse_network(network.strip("[]")), frozenset())
        numbers = [int(one) if one.isdecimal() and one.isascii() else 0 for one in ports.split(",")]
        if not all(0 < one < 65536 for one in numbers):
            raise ConfigError(f"{text!r} has a port that is none", next_step='Write them like "22,873", or "*" for all')
        return cls(parse_network(network.strip("[]")), frozenset(numbers))

    def has(self, address: Address, port: int) -> bool:
        """Whether it covers a target."""
        return address in self.network and (not self.ports or port in self.ports)


def plain_address(text: str) -> Address:
    """An address as rules name it: IPv4 that is written as IPv6 is IPv4. Raises ValueError."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def allowed(rules: Iterable[Rule], address: Address, port: int) -> bool:
    """Whether any of them covers it."""
    return any(rule.has(address, port) for rule in rules)
