"""Text to numbers and back: the only place where bits exist.

People write ``"4Gbit"``, ``"60ms"``, ``"8MiB"``; everything else in proxyd holds integer bytes per second, nanoseconds
and bytes. A rate's text counts **bits** unless it says ``B``: ``"500MB"`` is 8 times as much as ``"500Mbit"``.

Arithmetic is exact (:class:`~fractions.Fraction`): ``"0.1Gbit"`` is 12,500,000 bytes/s, not one less.
"""

from __future__ import annotations

import re
from fractions import Fraction

from proxyd.core.errors import UnitError

NS_PER_S = 1_000_000_000
# Larger values than these are typing errors, and they would overflow a u64 or an i64 of nanoseconds further down.
MAX_RATE_BYTES_PER_S = 10**15
MAX_SIZE_BYTES = 2**60
MAX_DURATION_NS = 10 * 365 * 86_400 * NS_PER_S

RATE_FORMS = '"400Mbit", "1.5Gbit/s" (bits), "50MB", "50MB/s" (bytes)'
SIZE_FORMS = '"300kB", "64KiB", "8MiB", "4GiB", or a plain number of bytes'
DURATION_FORMS = '"250us", "60ms", "0.5s", "2m", "1h"'

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?)\s*(.*?)\s*", re.ASCII | re.DOTALL)
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_PREFIX = _DECIMAL | _BINARY
_RATE_SUFFIX = re.compile(r"([kKMGT]i?)?(bit|bits|b|bps|B|byte|bytes|Bps)(?:/s|ps)?")
_SIZE_SUFFIX = re.compile(r"([kKMGT]i?)?(?:B|byte|bytes)?")
_DURATION_NS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": NS_PER_S,
    "m": 60 * NS_PER_S,
    "min": 60 * NS_PER_S,
    "h": 3600 * NS_PER_S,
}


def _refuse(kind: str, text: object, why: str, forms: str) -> UnitError:
    return UnitError(f"{text!r} is not a {kind}", why=why, next_step=f"Write it like {forms}")


def _split(kind: str, text: str, forms: str) -> tuple[Fraction, str]:
    """The number and the unit of *text*, exactly."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        if text.strip().lstrip("+-").lower().startswith(("inf", "nan")):
            raise _refuse(kind, text, "it must be finite", forms)
        raise _refuse(kind, text, "it must begin with a number", forms)
    return Fraction(match[1].replace("_", "")), match[2]


def _bounded(kind: str, text: object, value: Fraction, most: int, forms: str, *, zero_ok: bool) -> int:
    if value < 0:
        raise _refuse(kind, text, "it must not be negative", forms)
    rounded = round(value)
    if rounded == 0 and (value != 0 or not zero_ok):
        why = "it must be more than zero" if value == 0 else "it rounds to zero"
        raise _refuse(kind, text, why, forms)
    if value > most:
        raise _refuse(kind, text, "it is beyond anything real", forms)
    return rounded


def parse_rate(text: str) -> int:
    """Bytes per second from ``"4Gbit"``, ``"1.5Gbit/s"``, ``"400Mbps"`` (bits) or ``"500MB"``, ``"50MiB/s"`` (bytes).

    :raises UnitError: no unit, an unknown one, zero, negative, not finite.
    """
    number, unit = _split("rate", text, RATE_FORMS)
    match = _RATE_SUFFIX.fullmatch(unit)
    prefix = (match[1] or "") if match else ""
    if match is None or prefix not in _PREFIX:
        # A bare number would be bits to one reader and bytes to the next: a factor of 8 that nobody notices.
        why = "it has no unit, and bits or bytes must be said" if not unit else f"{unit!r} is not a unit of rate"
        raise _refuse("rate", text, why, RATE_FORMS)
    value = number * _PREFIX[prefix]
    if not match[2].startswith("B") and not match[2].startswith("byte"):
        value /= 8
    return _bounded("rate", text, value, MAX_RATE_BYTES_PER_S, RATE_FORMS, zero_ok=False)


def parse_duration(text: str, *, zero_ok: bool = False) -> int:
    """Nanoseconds from ``"250us"``, ``"60ms"``, ``"0.5s"``, ``"2m"``, ``"1h"``.

    :raises UnitError: no unit, an unknown one, negative, not finite, or zero without *zero_ok*.
    """
    number, unit = _split("duration", text, DURATION_FORMS)
    if unit == "" and number == 0 and zero_ok:
        return 0
    if unit not in _DURATION_NS:
        why = "it has no unit" if not unit else f"{unit!r} is not a unit of time"
        raise _refuse("duration", text, why, DURATION_FORMS)
    return _bounded("duration", text, number * _DURATION_NS[unit], MAX_DURATION_NS, DURATION_FORMS, zero_ok=zero_ok)


def parse_size(text: str | int, *, zero_ok: bool = False) -> int:
    """Bytes from ``"300kB"`` (1000), ``"64KiB"`` (1024), ``"8MiB"``, ``"1500"`` or an int.

    :raises UnitError: an unknown unit, bits, negative, not finite, or zero without *zero_ok*.
    """
    if isinstance(text, bool):
        raise _refuse("size", text, "it is a boolean", SIZE_FORMS)
    if isinstance(text, int):
        return _bounded("size", text, Fraction(text), MAX_SIZE_BYTES, SIZE_FORMS, zero_ok=zero_ok)
    number, unit = _split("size", text, SIZE_FORMS)
    match = _SIZE_SUFFIX.fullmatch(unit)
    prefix = (match[1] or "") if match else ""
    if match is None or prefix not in _PREFIX:
        raise _refuse("size", text, f"{unit!r} is not a unit of size", SIZE_FORMS)
    return _bounded("size", text, number * _PREFIX[prefix], MAX_SIZE_BYTES, SIZE_FORMS, zero_ok=zero_ok)


def is_bdp(text: object) -> bool:
    """Whether *text* is a size given as a share of the bandwidth-delay product, like ``"0.1bdp"``."""
    return isinstance(text, str) and text.strip().lower().endswith("bdp")


def parse_buffer(text: str | int, rate_bytes_per_s: int, rtt_ns: int) -> int:
    """Bytes of a gateway's buffer: a size, or ``"0.1bdp"`` of a link of that rate and round trip.

    :raises UnitError: as :func:`parse_size`; also a share that is zero, negative or not finite.
    """
    if not isinstance(text, str) or not is_bdp(text):
        return parse_size(text)
    forms = f'"0.1bdp", {SIZE_FORMS}'
    number, unit = _split("buffer", text, forms)
    if unit.lower() != "bdp":
        raise _refuse("buffer", text, f"{unit!r} is not a unit of size", forms)
    value = number * bdp_bytes(rate_bytes_per_s, rtt_ns)
    return _bounded("buffer", text, value, MAX_SIZE_BYTES, forms, zero_ok=False)


def bdp_bytes(rate_bytes_per_s: int, rtt_ns: int) -> int:
    """The bandwidth-delay product in bytes, rounded to the nearest byte."""
    return (rate_bytes_per_s * rtt_ns + NS_PER_S // 2) // NS_PER_S


def transmit_ns(nbytes: int, rate_bytes_per_s: int) -> int:
    """How long *nbytes* occupy a link of that rate: nanoseconds, rounded up. The rate must be positive."""
    return -(-nbytes * NS_PER_S // rate_bytes_per_s)


def bytes_in(duration_ns: int, rate_bytes_per_s: int) -> int:
    """How many whole bytes a link of that rate carries in *duration_ns*."""
    return duration_ns * rate_bytes_per_s // NS_PER_S


def format_rate(rate_bytes_per_s: int) -> str:
    """For people, in bits: ``"400 Mbit/s"``, ``"1.25 Gbit/s"``, ``"0 bit/s"``."""
    return f"{_scaled(rate_bytes_per_s * 8, ('', 'k', 'M', 'G', 'T'), 1000)}bit/s"


def format_size(nbytes: int) -> str:
    """For people, in binary units: ``"8 MiB"``, ``"1.5 KiB"``, ``"512 B"``."""
    return f"{_scaled(nbytes, ('', 'Ki', 'Mi', 'Gi', 'Ti', 'Pi'), 1024)}B"


def format_duration(duration_ns: int) -> str:
    """For people: ``"60 ms"``, ``"1.5 s"``, ``"2 m"``, ``"0 s"``."""
    if duration_ns == 0:
        return "0 s"
    size = abs(duration_ns)
    steps = ("h", "m", "s", "ms", "us", "ns")
    unit = next(unit for unit in steps if size >= _DURATION_NS[unit] or unit == "ns")
    return f"{_short(Fraction(duration_ns, _DURATION_NS[unit]))} {unit}"


def _scaled(value: int, prefixes: tuple[str, ...], base: int) -> str:
    power = 0
    # 999.95 would print as 1000: step up as soon as the rounded figure reaches the next prefix.
    while power < len(prefixes) - 1 and abs(value) * 2000 >= base ** (power + 1) * 1999:
        power += 1
    return f"{_short(Fraction(value, base**power))} {prefixes[power]}"


def _short(value: Fraction) -> str:
    """At most three decimals for small numbers and one for large ones, without trailing zeros."""
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    text = f"{float(value):.{digits}f}"
    return text.rstrip("0").rstrip(".") or "0"
