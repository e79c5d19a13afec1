"""What an agent tells its peers to dial."""

from __future__ import annotations

import pytest

from proxyd.agent import daemon
from proxyd.agent.daemon import advertised_address
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

    monkeypatch.setattr(daemon, "_address_towards", towards)
    everywhere = Address("0.0.0.0", 7777)
    listen = {"data_listen": "0.0.0.0:7777", "token_file": "/nowhere"}
    facing = section(**listen, coordinators=["10.9.9.9:7600", "10.1.0.9:7600"])
    assert str(advertised_address(facing, everywhere)) == "10.1.0.5:7777"
    beside = section(**listen, coordinators=["unix:/run/x.sock"])
    assert str(advertised_address(beside, everywhere)) == "10.2.0.5:7777", "the way out"


def test_loopback_is_never_told_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_address_towards", lambda host: Address("127.0.0.1"))
    with pytest.raises(ConfigError, match="data_address"):
        advertised_address(section(data_listen="0.0.0.0:0", token_file="/nowhere"), Address("0.0.0.0", 7777))
