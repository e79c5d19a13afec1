"""Where something listens or is reached: ``host:port``, ``[::1]:port``, ``unix:/path`` or ``fd:N``."""

from __future__ import annotations

import dataclasses
import fcntl
import ipaddress
import os
import re
import socket
import struct
from pathlib import Path

from proxyd.core.errors import ConfigError

MAX_UNIX_PATH_BYTES = 107
"""``sun_path`` holds 108 bytes with the closing NUL; a longer path is cut or refused by the kernel."""

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")

_HOSTNAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """One of: TCP (*host* and *port*), a Unix socket (*path*), an inherited descriptor (*fd*)."""

    host: str = ""
    port: int = 0
    path: str = ""
    fd: int = -1

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_fd(self) -> bool:
        return self.fd >= 0

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can reach it. A name other than ``localhost`` counts as reachable."""
        if self.is_unix or self.is_fd or self.host.lower().rstrip(".") == "localhost":
            return True
        ip = _ip(self.host)
        return ip is not None and ip.is_loopback

    @property
    def is_unspecified(self) -> bool:
        """``0.0.0.0`` or ``[::]``: good to listen on, useless to be told about."""
        ip = _ip(self.host)
        return ip is not None and ip.is_unspecified

    @property
    def is_link_local(self) -> bool:
        ip = _ip(self.host)
        return ip is not None and ip.is_link_local

    def with_port(self, port: int) -> Address:
        return dataclasses.replace(self, port=port)

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.path}"
        if self.is_fd:
            return f"fd:{self.fd}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def parse_address(text: str, *, unix_ok: bool = False, fd_ok: bool = False, port_zero_ok: bool = True) -> Address:
    """Read an address.

    :param port_zero_ok: port 0 means "any free port"; an address to connect to cannot have it.
    :raises ConfigError: names the text and the form that was expected.
    """
    if text.startswith("unix:") and unix_ok:
        return Address(path=check_unix_path(text.removeprefix("unix:")))
    if text.startswith("fd:") and fd_ok:
        number = text.removeprefix("fd:")
        if not number.isascii() or not number.isdigit() or int(number) > 1 << 20:
            raise ConfigError(f"{text!r} is not an inherited descriptor", next_step='Write it like "fd:3"')
        return Address(fd=int(number))
    forms = '"127.0.0.1:7600", "[::1]:7600"' + (', "unix:/run/proxyd/x.sock"' if unix_ok else "")

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{text!r} is not an address", why=why, next_step=f"Write it like {forms}")

    host, colon, port_text = text.rpartition(":")
    if not colon:
        raise refuse("the port is missing")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ip = _ip(host)
        if ip is None or ip.version != 6:
            raise refuse(f"{host!r} is not an IPv6 address")
    elif ":" in host:
        raise refuse(f"an IPv6 address stands in brackets, like [{host}]:{port_text or 7600}")
    elif not host:
        raise refuse("the host is missing; 0.0.0.0 means every interface")
    elif _ip(host) is None and (not _HOSTNAME.fullmatch(host) or host.replace(".", "").isdigit()):
        raise refuse(f"{host!r} is neither an IP address nor a host name")
    if not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise refuse(f"the port must be a number from {0 if port_zero_ok else 1} to 65535, not {port_text!r}")
    if int(port_text) == 0 and not port_zero_ok:
        raise refuse("port 0 is no place to connect to")
    return Address(host=host, port=int(port_text))


def check_unix_path(path: str) -> str:
    """*path*, if the kernel can bind it.

    :raises ConfigError: empty, contains NUL, or longer than the kernel's 107 bytes; the message has limit and length.
    """
    if not path or "\0" in path:
        raise ConfigError(
            f"{path!r} is not the path of a Unix socket", next_step='Write it like "/run/proxyd/agent.sock"'
        )
    length = len(os.fsencode(path))
    if length > MAX_UNIX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path!r} is {length} bytes long",
            why=f"the kernel's limit for a Unix socket is {MAX_UNIX_PATH_BYTES} bytes",
            next_step=f"Choose one at least {length - MAX_UNIX_PATH_BYTES} bytes shorter, like /run/proxyd/agent.sock",
        )
    return path


def interface_address(name: str, *, ipv6: bool = False) -> Address:
    """The address of this host's network interface of exactly that name (``eth0`` is not ``eth0.100``), without a port.

    :param ipv6: its global IPv6 address, not the IPv4 one.
    :raises ConfigError: there is no such interface (the message lists the real ones), or it has no such address.
    """
    names = [present for _, present in socket.if_nameindex()]
    if name not in names:
        raise ConfigError(
            f"this host has no network interface {name!r}",
            next_step=f"It has {', '.join(sorted(names))}; names are exact",
        )
    host = _ipv6_of(name) if ipv6 else _ipv4_of(name)
    if not host:
        kind = "global IPv6" if ipv6 else "IPv4"
        raise ConfigError(
            f"the network interface {name!r} has no {kind} address",
            next_step='Say what peers shall dial: data_address = "HOST:PORT"',
        )
    return Address(host=host)


def _ipv4_of(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("=16s24x", name.encode()))
        except OSError:
            return ""
    return socket.inet_ntop(socket.AF_INET, answer[20:24])  # struct ifreq: name, then a sockaddr_in


def _ipv6_of(name: str) -> str:
    """Lines there: address, index, prefix length, scope (00: global), flags, name."""
    try:
        lines = _IF_INET6.read_text().splitlines()
    except OSError:
        return ""  # no IPv6 on this host
    for address, _, _, scope, _, owner in (line.split() for line in lines):
        if owner == name and scope == "00":
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    return ""
