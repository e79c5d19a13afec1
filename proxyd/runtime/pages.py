"""The status page of a daemon: a document, its script and style, and what they show as JSON. Beside ``/metrics``.

Read only, and for people on this host only, as the admin questions are: whoever is elsewhere is told so (``ssh -L``
brings the page to him). A browser on this host may be led to it by a foreign page under a name that resolves to
127.0.0.1; so the name it asks for must be one of this host's own. The page loads nothing from anywhere else, and its
policy says so.
"""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("proxyd.pages")

PLACE = Path(__file__).with_name("page")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Answer(NamedTuple):
    """Of an HTTP request."""

    status: str
    body: bytes
    content_type: str
    headers: Mapping[str, str] = {}


class Pages:
    """What one daemon shows.

    :param document: the file of :data:`PLACE` that ``/`` is.
    :param data: what ``/status.json`` is, made of plain values; called on the daemon's loop.
    """

    def __init__(self, document: str, data: Callable[[], object]) -> None:
        self._document = document
        self._data = data
        self._files = {f"/{path.name}": path for path in sorted(PLACE.iterdir()) if path.suffix in (".js", ".css")}
        self._files["/"] = PLACE / document

    def answer(self, path: str, host: str, peer: str) -> Answer | None:
        """None: not ours.

        :param host: the header of that name.
        :param peer: the address that asks; empty for a Unix socket.
        """
        if path != "/status.json" and path not in self._files:
            return None
        if peer and not is_loopback(peer):
            why = b"this page is for the daemon's own host only; from elsewhere: ssh -L 9600:127.0.0.1:9600 HOST\n"
            return Answer("403 Forbidden", why, "text/plain")
        if not _is_own_name(host):
            return Answer("421 Misdirected Request", b"ask for localhost or its address\n", "text/plain")
        if path in self._files:
            file = self._files[path]
            return Answer("200 OK", file.read_bytes(), TYPES[file.suffix], HEADERS)
        try:
            body = json.dumps(self._data(), separators=(",", ":")).encode()
        except Exception:
            # A page that fails must not end a daemon that works.
            log.exception("the status page's data could not be made")
            return Answer("500 Internal Server Error", b"failed; see the log\n", "text/plain")
        return Answer("200 OK", body, "application/json", HEADERS)


def is_loopback(host: str) -> bool:
    """Whether an address is this host's own."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip.is_loopback or (mapped is not None and mapped.is_loopback)


def _is_own_name(header: str) -> bool:
    """Of a Host header: ``localhost``, or an address. A name could be anybody's; an address leads where it says."""
    name = header.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
