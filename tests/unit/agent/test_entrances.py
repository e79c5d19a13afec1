"""What an agent tells its peers to dial."""

from __future__ import annotations

import pytest

from proxyd.agent import entrances
from proxyd.agent.entrances import advertised_address
from proxyd.core.errors import ConfigError
from proxyd.runtime.addresses import Address
from proxyd.runtime.config import AgentConfig


def section(**changes: object) -> AgentConfig:
    return AgentConfig.model_validate({"site": "a", "name": "one", **changes})


def test_as_configured_with_the_port_that_was_bound() -> None:
    bound = Address("0.0.0.0", 7777)
    assert str(advertised_address(section(data_address="gw.example.org:7601"), bound)) == "gw.example.org:7601"


def test_where_it_listens() -> None:
    listening = section(data_listen="127.0.0.1:0")
    assert str(advertised_address(listening, Address("127.0.0.1", 7777))) == "127.0.0.1:7777"


def test_every_interface_means_the_one_that_faces_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"10.1.0.9": "10.1.0.5", "192.0.2.1": "10.2.0.5"}

    def towards(host: str) -> Address | None:
        return Address(routes[host]) if host in routes else None

    monkeypatch.setattr(entrances, "_address_towards", towards)
    everywhere = Address("0.0.0.0", 7777)
    listen = {"data_listen": "0.0.0.0:7777", "token_file": "/nowhere"}
    facing = section(**listen, coordinators=["10.9.9.9:7600", "10.1.0.9:7600"])
    assert str(advertised_address(facing, everywhere)) == "10.1.0.5:7777"
    beside = section(**listen, coordinators=["unix:/run/x.sock"])
    assert str(advertised_address(beside, everywhere)) == "10.2.0.5:7777", "the way out"


def test_loopback_is_never_told_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrances, "_address_towards", lambda host: Address("127.0.0.1"))
    with pytest.raises(ConfigError, match="data_address"):
        advertised_address(section(data_listen="0.0.0.0:0", token_file="/nowhere"), Address("0.0.0.0", 7777))


@pytest.mark.parametrize("told", [{"data_listen": "127.0.0.1:7601"}, {"data_address": "127.0.0.1:7601"}])
def test_loopback_is_told_only_where_the_coordinator_is_on_this_host(told: dict[str, str]) -> None:
    bound = Address("127.0.0.1", 7777)
    for coordinator in ("127.0.0.1:7600", "localhost:7600", "[::1]:7600", "unix:/run/x.sock"):
        assert advertised_address(section(**told, coordinators=[coordinator]), bound).is_loopback
    for coordinator in ("10.0.0.9:7600", "coordinator.example.org:7600", "[2001:db8::1]:7600"):
        with pytest.raises(ConfigError, match="no other host can reach") as caught:
            advertised_address(section(**told, coordinators=[coordinator]), bound)
        assert coordinator in str(caught.value)


def test_a_link_local_address_is_never_told() -> None:
    for host in ("fe80::1", "169.254.1.1"):
        bound = Address(host, 7777)
        with pytest.raises(ConfigError, match="link-local"):
            advertised_address(section(data_listen=str(bound), token_file="/t"), bound)


def test_an_interface_by_its_exact_name() -> None:
    """Every host has lo; eth0 and eth0.100 may both be there, and neither stands for the other."""
    at_lo = section(data_interface="lo", data_listen="0.0.0.0:7601", token_file="/t")
    assert str(advertised_address(at_lo, Address("0.0.0.0", 7777))) == "127.0.0.1:7777"
    for name in ("l", "lo.100", "LO", "eth99"):
        with pytest.raises(ConfigError, match=r"has no network interface .*It has .*\blo\b"):
            advertised_address(section(data_interface=name), Address("127.0.0.1", 7777))
    with pytest.raises(ConfigError, match="no global IPv6 address"):
        advertised_address(section(data_interface="lo"), Address("::", 7777))
