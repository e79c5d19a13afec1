"""Who is connected to a port of this host, as the kernel sees it (``/proc/net/tcp``; Linux, this network namespace).

For listeners that belong to a library which doesn't say whom it turned away.
"""

from __future__ import annotations

import ipaddress
import struct
import urllib.parse
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = b"01"
_REMOTE, _STATE = 2, 3
"""Columns, proc(5): sl local_address rem_address st ..."""


class Remote(NamedTuple):
    """The other end of a connection."""

    host: str
    """As numbers; an IPv4 address that came to an IPv6 socket is an IPv4 address."""
    port: int


def connected_to(ports: Collection[int], tables: Collection[Path] = TABLES) -> set[Remote]:
    """Whoever has a connection now to one of these ports here. Empty where the kernel doesn't say."""
    endings = tuple(b":%04X" % port for port in ports)
    return {remote for table in tables for remote in _lines(table, endings)}


def remote_of(peer: str) -> Remote | None:
    """From what gRPC calls a peer (``ipv4:10.0.0.1:5``, ``ipv6:%5B::1%5D:5``); None: not TCP."""
    family, _, rest = peer.partition(":")
    host, _, port = urllib.parse.unquote(rest).rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return Remote(_plain(ipaddress.ip_address(host.strip("[]").partition("%")[0])), int(port))
    except ValueError:
        return None


def _lines(table: Path, endings: tuple[bytes, ...]) -> Iterator[Remote]:
    try:
        lines = table.read_bytes().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split(None, _STATE + 1)
        if len(fields) > _STATE and fields[_STATE] == _ESTABLISHED and fields[1].endswith(endings):
            yield _remote(fields[_REMOTE])


def _remote(field: bytes) -> Remote:
    host, _, port = field.partition(b":")
    # Words of 32 bits as they lie in memory: in this host's byte order.
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return Remote(_plain(ipaddress.ip_address(packed)), int(port, 16))


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
