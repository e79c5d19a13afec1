"""What may not leave the host, and how it is found.

Two nets, since either alone has holes. A configuration's value is kept only where its key is known *and* its form shows
that it is no secret: a number, a name, a rate, an address, a path that exists or whose directory does. Everything else
becomes ``***`` (a token written where its file's path belongs, an unknown key, a URL with a password). And each text of
the report is scrubbed: of the contents of all token and key files, of every value that was masked, and of what looks
like a secret wherever it stands.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

MASK = "***"
LEAST_SECRET = 6
"""Shorter texts aren't searched for in other files: they are words, and the report would be unreadable."""
MOST_FILE_BYTES = 1 << 20

PATHS = {
    "socket",
    "admin",
    "token_file",
    "tls_certificate",
    "tls_key",
    "tls_ca",
    "lock_ca",
    "lock_certificate",
    "lock_key",
    "grant_log",
}
SECRET_FILES = ("token_file", "tls_key", "lock_key")
_NETWORK = r"[0-9a-fA-F:.]{2,45}/[0-9]{1,3}"
_FORMS = {
    "site": r"[A-Za-z0-9._-]{1,63}",
    "name": r"[A-Za-z0-9._-]{1,255}",
    "from": r"[A-Za-z0-9._-]{1,63}",
    "to": r"[A-Za-z0-9._-]{1,63}",
    "owns": r"[A-Za-z0-9._*-]{1,64}->[A-Za-z0-9._*-]{1,64}",
    "links": r"[A-Za-z0-9._*-]{1,64}->[A-Za-z0-9._*-]{1,64}",
    "calendar": r"[A-Za-z0-9 ,:./*-]{1,80}",
    "data_interface": r"[A-Za-z0-9._@:-]{1,15}",
    "congestion_control": r"[a-z0-9_]{1,15}",
    "time_zone": r"[A-Za-z0-9_+/-]{0,40}",
    "allow": rf"\[?{_NETWORK}\]?:(\*|[0-9,]{{1,80}})",
}
_WORDS = {
    "classes": ("pipeline", "sync", "bulk"),
    "estimate": ("live", "fixed"),
    "mode": ("grant", "observe"),
    "jobs": ("any", "proven", "named"),
    "share": ("one", "equal"),
    "direction": ("egress", "ingress"),
    "level": ("debug", "info", "warning", "error"),
    "format": ("text", "json"),
    "reflection": ("true", "false"),
    "kind": ("tcp", "socks5", "http", "exit"),
    "traffic": ("pipeline", "sync", "bulk"),
}
_QUANTITY = {
    *(
        "memory",
        "arena",
        "eager",
        "chunk",
        "streams",
        "clients",
        "grant_log_size",
        "buffer",
        "capacity",
        "cap",
        "floor",
    ),
    *("rtt", "peer_timeout", "resolve_timeout", "linger", "beat", "lease", "rtt_control", "lock_ttl"),
}
_AMOUNT = re.compile(r"auto|[0-9.]{1,20} ?[A-Za-z]{0,5}(/s)?")
_ADDRESSES = {"data_listen", "data_address", "gateway_listen", "coordinators", "metrics", "listen", "address", "target"}
_ADDRESS = re.compile(r"off||fd:\d{1,4}|(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9][A-Za-z0-9.-]{0,99}):\d{1,5}")
_LOCK = re.compile(r"(etcd|kubernetes)://[A-Za-z0-9.,:\[\]-]{1,300}(/[A-Za-z0-9/_.-]{0,100})?")

KNOWN_WORDS = {
    *("agent", "coordinator", "link", "job", "class", "bottleneck", "log", "fallback_percent", "weight", "pace", "mtu"),
    *("warm", "strangers", "sends", "workers", "fifo_share", "lock", "forward"),
    *(*PATHS, *_FORMS, *_WORDS, *_QUANTITY, *_ADDRESSES),
    *(word for words in _WORDS.values() for word in words),
}
"""Keys and words that a configuration consists of: they are no secrets, and reports consist of them too."""

_LOOKS_SECRET = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"),
)
_NAMED = re.compile(
    r"(?i)(\b[\w-]*(?:token|secret|passw(?:or)?d|credential|authorization|api[_-]?key|private[_-]?key)"
    r"(?![\w-]*(?:_file|_bytes|_count))[\w-]*[\"']?\s*[=:]\s*[\"']?)([^\s\"',;}\]]+)"
)


def masked(data: Mapping[str, Any], hidden: set[str]) -> dict[str, Any]:
    """A configuration's values with what may be secret replaced; those values are added to ``hidden``."""
    shown: dict[str, Any] = {}
    for key, value in data.items():
        name = key
        if key not in KNOWN_WORDS:
            hidden.add(key)
            name = f"{MASK}{len(shown)}"  # unknown keys may be several
        shown[name] = _masked(key, value, hidden)
    return shown


def _masked(key: str, value: Any, hidden: set[str]) -> Any:
    match value:
        case dict():
            return masked(value, hidden)
        case list():
            return [_masked(key, one, hidden) for one in value]
        case bool() | float():
            return value
        case int():
            return value if value < 1 << 63 else MASK
        case _:
            text = str(value)
            if _is_harmless(key, text):
                return text
            hidden.add(text)
            hidden.update(re.split(r"://|[@:\s]", text))  # messages quote parts: a host, a port
            return MASK


def _is_harmless(key: str, text: str) -> bool:
    if key in PATHS:
        return text in ("", "off") or (text.startswith("/") and _leads_somewhere(text))
    if key in _ADDRESSES:
        if text.startswith("unix:"):
            return _leads_somewhere(text.removeprefix("unix:"))
        return _ADDRESS.fullmatch(text) is not None
    if key == "clients" and re.fullmatch(_NETWORK, text):
        return True  # of a door; an agent's are a number
    if key in _QUANTITY:
        return _AMOUNT.fullmatch(text) is not None
    if key in _WORDS:
        return text.lower() in _WORDS[key]
    if key == "lock":
        return _LOCK.fullmatch(text) is not None
    return key in _FORMS and re.fullmatch(_FORMS[key], text) is not None


def _leads_somewhere(path: str) -> bool:
    """A path to a file, or to a place for one: a secret that begins with a slash is neither."""
    return os.path.exists(path) or (path.count("/") > 1 and os.path.isdir(os.path.dirname(path)))


def read_masked(text: str, hidden: set[str]) -> dict[str, Any] | None:
    """A configuration file's values, masked; None when it is no TOML. Comments are not among them.

    Of a file that can't be read as TOML every text that may be a value counts as hidden: messages quote them.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        hidden.update(word for word in re.findall(r"[^\s\"'=\[\]{},#]+", text) if word not in KNOWN_WORDS)
        return None
    return masked(data, hidden)


def secrets_in_files(data: Mapping[str, Any]) -> Iterator[str]:
    """Contents of every token and key file that a configuration names, as far as they can be read."""
    for key, value in data.items():
        match value:
            case dict():
                yield from secrets_in_files(value)
            case list():
                for one in value:
                    if isinstance(one, dict):
                        yield from secrets_in_files(one)
            case str() if key in SECRET_FILES:
                yield from secrets_of_file(value)
            case _:
                pass


def secrets_of_file(path: str) -> Iterator[str]:
    """What stands in a secret file: all of it, and each line."""
    try:
        content = Path(path).read_bytes()[:MOST_FILE_BYTES].decode("utf-8", "replace")
    except OSError:
        return
    yield content.strip()
    yield from (line.strip() for line in content.splitlines() if "-----" not in line)


def _unicode(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _written(secret: str) -> set[str]:
    """A secret as it may stand in a text: as it is, or with quotes, backslashes and letters beyond ASCII escaped, by
    Python in an error's words, by JSON in the file that quotes these, or by both."""
    forms = {secret}
    for _ in range(2):
        forms |= {write(form)[1:-1] for form in forms for write in (repr, json.dumps, _unicode)}
    return forms


class Scrubber:
    """Removes secrets from texts.

    :param secrets: literal ones; those of a few letters are passed over.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        written = {form for one in secrets if len(one) >= LEAST_SECRET for form in _written(one)}
        found = sorted(written, key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, found))) if found else None

    def clean(self, text: str) -> str:
        """``text`` without them, and without what looks like one."""
        for pattern in _LOOKS_SECRET:
            text = pattern.sub(MASK, text)
        text = _NAMED.sub(lambda match: match[1] + MASK, text)
        return text if self._literal is None else self._literal.sub(MASK, text)
