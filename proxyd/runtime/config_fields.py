"""The texts that a configuration field may hold, each checked where it stands so that a mistake has its line.

ConfigError is no ValueError, and pydantic collects only those: the validators hand its message on as one.
"""

from __future__ import annotations

import re
import zoneinfo
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictInt, StrictStr, WithJsonSchema

from proxyd.core.errors import ConfigError, UnitError
from proxyd.core.units import parse_buffer, parse_duration, parse_rate, parse_size
from proxyd.runtime.addresses import check_unix_path, parse_address
from proxyd.wire.routing import MAX_WORKERS

MIN_ARENA_BYTES = 1 << 20
MIN_CHUNK_BYTES = 16 << 10
MAX_CHUNK_BYTES = 16 << 20
MAX_STREAMS = 256
ADMIN_SUFFIX = ".admin"
MAX_PLACES = 1_000_000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_PATTERN = re.compile(r"[A-Za-z0-9._*-]{1,64}->[A-Za-z0-9._*-]{1,64}", re.ASCII)
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_INTERFACE = re.compile(r"[^\s/]{1,15}")
_CONGESTION_CONTROL = re.compile(r"[a-z0-9_]{1,15}", re.ASCII)


def _own_error(error: ConfigError) -> ValueError:
    return error if isinstance(error, UnitError) else ValueError(str(error))


def _rate(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} is not a rate: write it with its unit, like "400Mbit"')
    parse_rate(value)
    return value


def _duration(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} is not a duration: write it with its unit, like "60ms"')
    parse_duration(value)
    return value


def _duration_or_zero(value: object) -> object:
    if value == 0 and not isinstance(value, bool):
        return "0s"
    if not isinstance(value, str):
        raise ValueError(f'{value!r} is not a duration: write it with its unit, like "5s"')
    parse_duration(value, zero_ok=True)
    return value


def _size(value: object) -> str:
    if not isinstance(value, str | int):
        raise ValueError(f'{value!r} is not a size: write it like "64MiB"')
    parse_size(value)
    return str(value)


def _arena(value: object) -> str:
    text = _size(value)
    if parse_size(text) < MIN_ARENA_BYTES:
        raise ValueError(f"{value!r} is less than the smallest arena, 1MiB")
    return text


def _chunk(value: object) -> str:
    text = value if value == "auto" else _size(value)
    if text != "auto" and not MIN_CHUNK_BYTES <= parse_size(str(text)) <= MAX_CHUNK_BYTES:
        raise ValueError(f'{value!r} must be from 16KiB to 16MiB, or "auto"')
    return str(text)


def _streams(value: object) -> object:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value != "auto" and not (whole and 1 <= int(str(value)) <= MAX_STREAMS):
        raise ValueError(f'{value!r} is no number of streams: from 1 to {MAX_STREAMS}, or "auto"')
    return value


def _percent(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 100:
        raise ValueError(f"{value!r} is no percentage: a whole number from 0 to 100")
    return value


def _clients(value: object) -> object:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value != "auto" and not (whole and 1 <= int(str(value)) <= MAX_PLACES):
        raise ValueError(f'{value!r} is no number of trainers: from 1 to {MAX_PLACES}, or "auto"')
    return value


def _buffer(value: object) -> object:
    if not isinstance(value, str | int):
        raise ValueError(f'{value!r} is not a buffer: write it like "300kB" or "0.1bdp"')
    # Any link will do to see whether the text is right; the real one multiplies in buffer_bytes.
    parse_buffer(value, 1 << 40, 1 << 30)
    return str(value)


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a name: letters, digits, '.', '_', '-', at most 63, first a letter or digit"
        )
    return value


def _owned(value: str) -> str:
    if not _PATTERN.fullmatch(value):
        raise ValueError(f'{value!r} does not name links: write it like "hami->shenzhen", "hami->*" or "*->*"')
    return value


def _congestion_control(value: str) -> str:
    if not _CONGESTION_CONTROL.fullmatch(value):
        raise ValueError(f'{value!r} is not a congestion control: write "auto" or one the kernel has, like "bbr"')
    return value


def _flag(value: object) -> object:
    """A boolean; ``"false"`` means false. Numbers and other words are refused, not taken for true."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def listed(value: object) -> object:
    """One text where a list may stand."""
    return [value] if isinstance(value, str) else value


def _address(value: str, **allowed: bool) -> str:
    try:
        parse_address(value, **allowed)
    except ConfigError as error:
        raise _own_error(error) from error
    return value


def _listen(value: str) -> str:
    return _address(value)


def _listen_or_unix(value: str) -> str:
    return _address(value, unix_ok=True)


def _connect(value: str) -> str:
    return _address(value, unix_ok=True, port_zero_ok=False)


def _metrics(value: str) -> str:
    return value if value in ("", "off") else _address(value, fd_ok=True)


def _admin(value: str) -> str:
    if value in ("", "off"):
        return value
    if not value.endswith(ADMIN_SUFFIX):
        raise ValueError(
            f"{value!r} must end in {ADMIN_SUFFIX!r}: by that commands tell it from the socket of trainers"
        )
    return _socket(value)


def _advertised(value: str) -> str:
    address = parse_address(_address(value))
    if address.is_unspecified or address.is_link_local:
        raise ValueError(f"{value!r} cannot be told to peers: write an address that they can reach, like 10.0.0.5:7601")
    return value


def _lock(value: str) -> str:
    parse_lock(value)
    return value


def parse_lock(text: str) -> tuple[str, list[str], str]:
    """(kind, hosts or [namespace], key or ""): ``etcd://HOST:PORT,HOST:PORT[/KEY]``, ``kubernetes://NAMESPACE[/NAME]``.

    Raises ValueError.
    """
    kind, found, rest = text.partition("://")
    where, _, key = rest.partition("/")
    if not found or kind not in ("etcd", "kubernetes") or not where:
        raise ValueError(
            f'{text!r} is no lock: write it like "etcd://10.0.0.1:2379,10.0.0.2:2379" or "kubernetes://NAMESPACE"'
        )
    if kind == "etcd":
        places = where.split(",")
        for place in places:
            _connect(place)
        return kind, places, key
    for name in (where, key):
        if name and not _DNS_LABEL.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a Kubernetes object: small letters, digits and '-', at most 63")
    return kind, [where], key


def _interface(value: str) -> str:
    if not _INTERFACE.fullmatch(value):
        raise ValueError(f"{value!r} is not the name of a network interface, like eth0")
    return value


def _time_zone(value: str) -> str:
    try:
        if value:
            zoneinfo.ZoneInfo(value)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(
            f'{value!r} is not a time zone of this host: write it like "Asia/Shanghai" or "UTC", or leave it out for'
            " the host's own"
        ) from error
    return value


def _socket(value: str) -> str:
    try:
        return check_unix_path(value)
    except ConfigError as error:
        raise _own_error(error) from error


def _text(*examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": list(examples)})


def _text_or_number(*examples: str | int, least: int = 1) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": least}], "examples": list(examples)}
    )


def _auto_or(least: int, most: int) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": least, "maximum": most}]})


def texts(*examples: str, least: int = 0) -> WithJsonSchema:
    """One text, or a list of them."""
    several = {"type": "array", "items": {"type": "string"}, "minItems": least}
    return WithJsonSchema({"anyOf": [{"type": "string"}, several], "examples": list(examples)})


Name = Annotated[StrictStr, AfterValidator(_name)]
RateText = Annotated[str, BeforeValidator(_rate), _text("400Mbit", "50MB/s")]
DurationText = Annotated[str, BeforeValidator(_duration), _text("60ms", "5s")]
DurationOrZeroText = Annotated[str, BeforeValidator(_duration_or_zero), _text_or_number("5s", 0, least=0)]
SizeText = Annotated[str, BeforeValidator(_size), _text_or_number("64MiB")]
BufferText = Annotated[str, BeforeValidator(_buffer), _text_or_number("0.1bdp", "300kB")]
Flag = Annotated[
    bool,
    BeforeValidator(_flag),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^(?i:true|false)$"}]}),
]
ListenText = Annotated[StrictStr, AfterValidator(_listen)]
MetricsText = Annotated[StrictStr, AfterValidator(_metrics)]
ListenTexts = Annotated[
    tuple[Annotated[StrictStr, AfterValidator(_listen_or_unix)], ...],
    BeforeValidator(listed),
    Field(min_length=1),
    texts(least=1),
]
ConnectTexts = Annotated[
    tuple[Annotated[StrictStr, AfterValidator(_connect)], ...],
    BeforeValidator(listed),
    Field(min_length=1),
    texts(least=1),
]
LinkTexts = Annotated[
    tuple[Annotated[StrictStr, AfterValidator(_owned)], ...], BeforeValidator(listed), texts("hami->*")
]
OwnedTexts = Annotated[
    tuple[Annotated[StrictStr, AfterValidator(_owned)], ...],
    BeforeValidator(listed),
    Field(min_length=1),
    texts(least=1),
]
ArenaText = Annotated[str, BeforeValidator(_arena), _text_or_number("256MiB", least=MIN_ARENA_BYTES)]
ChunkText = Annotated[str, BeforeValidator(_chunk), _text_or_number("auto", "1MiB", least=MIN_CHUNK_BYTES)]
Percent = Annotated[int, BeforeValidator(_percent), WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 100})]
Workers = Annotated[StrictInt, Field(ge=1, le=MAX_WORKERS)]
Places = Annotated[StrictInt, Field(ge=1, le=MAX_PLACES)]
ClientLimit = Annotated[int | Literal["auto"], BeforeValidator(_clients), _auto_or(1, MAX_PLACES)]
Streams = Annotated[int | Literal["auto"], BeforeValidator(_streams), _auto_or(1, MAX_STREAMS)]
CongestionControlText = Annotated[StrictStr, AfterValidator(_congestion_control)]
AdvertisedText = Annotated[StrictStr, AfterValidator(_advertised)]
LockText = Annotated[StrictStr, AfterValidator(_lock)]
InterfaceText = Annotated[StrictStr, AfterValidator(_interface)]
TimeZoneText = Annotated[StrictStr, AfterValidator(_time_zone)]
SocketText = Annotated[StrictStr, AfterValidator(_socket)]
AdminText = Annotated[StrictStr, AfterValidator(_admin)]
