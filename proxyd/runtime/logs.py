"""Log lines on stderr: text for people (``key=value`` at the end) or one JSON object a line.

Fields are passed apart from the message, ``log.info("peer is up", extra=fields(peer="b", rtt_ns=60_000_000))``, so that
both forms stay searchable. What looks like a secret by its name is masked, and bytes are never written, only their
length. A message keeps to its line: text from a peer cannot forge the next one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, TextIO

_ATTRIBUTE = "proxyd_fields"
_SECRET = re.compile(r"(^|_)(token|secret|password|passwd|hmac|proof|nonce|credential|authorization|private_key)(_|$)")
_PLAIN = re.compile(r"[A-Za-z0-9_.:/>@+*,%#\[\]()-]+")


def fields(**values: object) -> dict[str, dict[str, object]]:
    """For ``extra=``: what belongs to this line, by name, units last in the names."""
    return {_ATTRIBUTE: values}


_everywhere: dict[str, object] = {}


def say_everywhere(**values: object) -> None:
    """What belongs to each line of this process from now on."""
    _everywhere.update(values)


def _shown(name: str, value: object) -> object:
    if _SECRET.search(name.lower()) and not name.endswith(("_file", "_bytes", "_count")):
        return "***"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{memoryview(value).nbytes} bytes>"
    return value


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    values: dict[str, Any] = {**_everywhere, **getattr(record, _ATTRIBUTE, {})}
    return {name: _shown(name, value) for name, value in values.items()}


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _moment(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


class TextFormatter(logging.Formatter):
    """``2026-11-29T17:00:00.000Z INFO proxyd.agent: peer is up peer=b rtt_ns=60000000``"""

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_moment(record)} {record.levelname} {record.name}: {_one_line(record.getMessage())}"]
        for name, value in _fields_of(record).items():
            text = str(value)
            parts.append(f"{name}={text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)}")
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: object) -> object:
    """Names (``site/name``, ``from->to``) are tuples with words of their own: JSON would take them for lists."""
    return str(value) if isinstance(value, tuple) and type(value).__str__ is not object.__str__ else value


class JsonFormatter(logging.Formatter):
    """One object a line: ``time, level, logger, message``, the fields, and ``exception`` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((name, _plain(value)) for name, value in _fields_of(record).items() if name not in line)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _is_no_cancelled_call(record: logging.LogRecord) -> bool:
    """Drops what grpc says, with a traceback, of a call that was cancelled before its handler ran: at a server's stop
    that is how it is meant to end."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name.startswith("grpc.") and isinstance(error, asyncio.CancelledError))


def setup_logging(
    level: str = "info", style: Literal["text", "json"] = "text", stream: TextIO | None = None
) -> logging.Handler:
    """Send everything from *level* up to *stream* (stderr); replaces what an earlier call set up."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if getattr(old, "proxyd_owned", False)]:
        root.removeHandler(old)
    handler.addFilter(_is_no_cancelled_call)
    handler.proxyd_owned = True  # type: ignore[attr-defined] # our mark: leave other people's handlers alone
    root.addHandler(handler)
    root.setLevel(level.upper())
    return handler


class Throttle:
    """At most one line per key and interval, for what can come in storms (a peer that reconnects, EMFILE on accept).

    The first line of a key passes at once; the next one that passes says how many were kept back. Keys are bounded: the
    one silent for longest is forgotten first.
    """

    def __init__(
        self,
        log: logging.Logger,
        interval_ns: int = 1_000_000_000,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        max_keys: int = 256,
    ) -> None:
        self._log = log
        self._interval_ns = interval_ns
        self._clock_ns = clock_ns
        self._max_keys = max_keys
        self._keys: OrderedDict[str, tuple[int, int]] = OrderedDict()  # key -> (passed last at, kept back since)

    def emit(self, level: int, key: str, message: str, **values: object) -> bool:
        """Log *message* with *values* unless *key* had its line within the interval. Answers whether it passed."""
        now_ns = self._clock_ns()
        last_ns, kept_back = self._keys.get(key, (None, 0))
        if last_ns is not None and now_ns - last_ns < self._interval_ns:
            self._keys[key] = (last_ns, kept_back + 1)
            return False
        self._keys[key] = (now_ns, 0)
        self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)
        if kept_back:
            values["kept_back"] = kept_back
        self._log.log(level, message, extra=fields(**values))
        return True

    def warning(self, key: str, message: str, **values: object) -> bool:
        return self.emit(logging.WARNING, key, message, **values)

    def error(self, key: str, message: str, **values: object) -> bool:
        return self.emit(logging.ERROR, key, message, **values)
