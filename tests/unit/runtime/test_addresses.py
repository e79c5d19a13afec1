from __future__ import annotations

import pytest

from proxyd.core.errors import ConfigError
from proxyd.runtime.addresses import Address, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:7600", "127.0.0.1", 7600), ("[::1]:7600", "::1", 7600), ("gw-1.example.org:1", "gw-1.example.org", 1)]
    + [("0.0.0.0:0", "0.0.0.0", 0), ("[fe80::1%eth0]:5", "fe80::1%eth0", 5)],
)
def test_tcp_addresses_read_and_print_alike(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "7600", "host", "host:", ":7600", "host:70000", "host:-1", "host:http", "::1:7600", "[::1]", "[::1]7600"]
    + ["[127.0.0.1]:1", "999.1.1.1:1", "ho st:1", "unix:/x", "-x:1", "host:²"],
)
def test_what_is_no_tcp_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        parse_address(text)


def test_unix_and_descriptors_only_where_allowed() -> None:
    assert parse_address("unix:/run/x.sock", unix_ok=True) == Address(path="/run/x.sock")
    assert parse_address("fd:3", fd_ok=True) == Address(fd=3)
    assert str(Address(fd=0)) == "fd:0"
    assert str(Address(path="/x")) == "unix:/x"
    with pytest.raises(ConfigError, match="107 bytes"):
        parse_address("unix:/" + "x" * 107, unix_ok=True)
    with pytest.raises(ConfigError, match="inherited descriptor"):
        parse_address("fd:", fd_ok=True)


def test_who_can_be_reached() -> None:
    quiet = ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/x", "fd:3"]
    assert all(parse_address(text, unix_ok=True, fd_ok=True).is_loopback for text in quiet)
    open_ones = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "localhost.example.org:1"]
    assert not any(parse_address(text).is_loopback for text in open_ones)
    assert parse_address("[::]:1").is_unspecified
    assert parse_address("169.254.1.1:1").is_link_local
    assert parse_address("[fe80::1%eth0]:1").is_link_local
    assert parse_address("10.0.0.1:0").with_port(5) == Address(host="10.0.0.1", port=5)
