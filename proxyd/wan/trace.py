"""Service lines: how many bytes a link can have carried by a given instant.

A *line* is a non-decreasing step function from time to bytes and its inverse. The two are a Galois pair:
``time_for(p)`` is the first nanosecond at which ``bytes_by`` is at least ``p``. The bottleneck needs nothing else, so a
fixed rate, a series of rates and a recorded trace behave alike.

Trace files are in mahimahi's format: one integer per line, the millisecond at which the link can carry one more packet
of 1504 bytes; the same millisecond may occur often; the file repeats with a period of its last entry.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

from proxyd.core.traces import RateTrace
from proxyd.wan.errors import WanError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
OPPORTUNITY_BYTES = 1504


class Line(Protocol):
    """How many bytes can have left by when; pure."""

    def bytes_by(self, time_ns: int) -> int:
        """Bytes that a never-idle link has carried by ``time_ns``, counted from the line's origin."""
        ...

    def time_for(self, position_bytes: int) -> int:
        """The first instant, in ns, by which ``position_bytes`` have been carried."""
        ...

    def restarted(self, origin_ns: int) -> Line:
        """The same line with its origin (0 bytes carried) at ``origin_ns``."""
        ...


class FixedRate:
    """A constant rate from ``origin_ns`` on, in integer arithmetic: no drift however long it runs."""

    __slots__ = ("origin_ns", "rate_bytes_per_s")

    def __init__(self, rate_bytes_per_s: int, origin_ns: int) -> None:
        if rate_bytes_per_s <= 0:
            raise WanError(f"a rate must be > 0 bytes/s, got {rate_bytes_per_s}")
        self.rate_bytes_per_s = rate_bytes_per_s
        self.origin_ns = origin_ns

    def bytes_by(self, time_ns: int) -> int:
        return max(0, time_ns - self.origin_ns) * self.rate_bytes_per_s // NS_PER_S

    def time_for(self, position_bytes: int) -> int:
        return self.origin_ns - (-position_bytes * NS_PER_S // self.rate_bytes_per_s)

    def restarted(self, origin_ns: int) -> FixedRate:
        return FixedRate(self.rate_bytes_per_s, origin_ns)


class TraceLine:
    """A repeating list of delivery opportunities, each worth ``opportunity_bytes``.

    Bytes of one packet may span opportunities and several packets may share one, as in a link of small cells.
    """

    __slots__ = ("opportunity_bytes", "origin_ns", "period_ns", "times_ns")

    def __init__(self, times_ms: Sequence[int], origin_ns: int, opportunity_bytes: int = OPPORTUNITY_BYTES) -> None:
        if not times_ms or times_ms[-1] <= 0:
            raise WanError("a trace needs at least one opportunity after millisecond 0: its last entry is its period")
        if any(b < a for a, b in pairwise(times_ms)) or times_ms[0] < 0:
            raise WanError("the milliseconds of a trace must be >= 0 and must not decrease; sort the file")
        self.times_ns = [ms * NS_PER_MS for ms in times_ms]
        self.period_ns = self.times_ns[-1]
        self.origin_ns = origin_ns
        self.opportunity_bytes = opportunity_bytes

    def bytes_by(self, time_ns: int) -> int:
        since_ns = time_ns - self.origin_ns
        if since_ns < 0:
            return 0
        cycles, within_ns = divmod(since_ns, self.period_ns)
        # An entry at millisecond 0 of a cycle coincides with the last entry of the cycle before; both count.
        return (cycles * len(self.times_ns) + bisect_right(self.times_ns, within_ns)) * self.opportunity_bytes

    def time_for(self, position_bytes: int) -> int:
        if position_bytes <= 0:
            return self.origin_ns
        cycles, index = divmod((position_bytes - 1) // self.opportunity_bytes, len(self.times_ns))
        return self.origin_ns + cycles * self.period_ns + self.times_ns[index]

    def restarted(self, origin_ns: int) -> TraceLine:
        line = TraceLine.__new__(TraceLine)
        line.times_ns, line.period_ns = self.times_ns, self.period_ns
        line.origin_ns, line.opportunity_bytes = origin_ns, self.opportunity_bytes
        return line


@dataclass(frozen=True)
class RateSteps:
    """A rate that changes at given times: ``(duration_ns, rate_bytes_per_s)`` pieces, one after another.

    ``repeat``: from the beginning again after the last one; else the last rate holds for ever. A rate of 0 is an
    outage; it may not last for ever. Raises :class:`WanError` for pieces that no link can follow.
    """

    pieces: tuple[tuple[int, int], ...]
    repeat: bool = True

    def __post_init__(self) -> None:
        if not self.pieces or any(duration_ns <= 0 or rate < 0 for duration_ns, rate in self.pieces):
            raise WanError("rate steps need at least one piece, each with a duration > 0 ns and a rate >= 0 bytes/s")
        if self.repeat and all(duration_ns * rate < NS_PER_S for duration_ns, rate in self.pieces):
            raise WanError("rate steps that repeat must carry something: give one piece a rate > 0")
        if not self.repeat and self.pieces[-1][1] == 0:
            raise WanError("the last rate holds for ever, so it must be > 0; use set_link(down=True) for a cut")

    @classmethod
    def of(cls, trace: RateTrace) -> RateSteps:
        """A rate trace, as the simulator plays it."""
        starts_ns = trace.starts_ns
        ends_ns = [*starts_ns[1:], trace.period_ns or starts_ns[-1] + NS_PER_S]
        lengths_ns = (end - start for start, end in zip(starts_ns, ends_ns, strict=True))
        return cls(tuple(zip(lengths_ns, trace.rates_bytes_per_s, strict=True)), repeat=bool(trace.period_ns))

    def line(self, origin_ns: int) -> RateTrace:
        """The service line that begins at ``origin_ns``."""
        starts_ns = [0, *accumulate(duration_ns for duration_ns, _ in self.pieces)]
        period_ns = starts_ns.pop()
        return RateTrace(starts_ns, [rate for _, rate in self.pieces], period_ns if self.repeat else 0, origin_ns)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"pieces": [list(piece) for piece in self.pieces], "repeat": self.repeat}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RateSteps:
        """The inverse of :meth:`to_json`."""
        return cls(tuple((duration_ns, rate) for duration_ns, rate in fields["pieces"]), fields["repeat"])


def read_trace(path: Path) -> list[int]:
    """The milliseconds of a trace file. Raises :class:`WanError` naming the line that is not a whole number."""
    times_ms: list[int] = []
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise WanError(f"cannot read the trace {path}: {error}; give the path of a text file") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            times_ms.append(int(line))
        except ValueError as error:
            raise WanError(f"{path}:{number}: {line.strip()!r} is not a whole number of milliseconds") from error
    return times_ms


def opportunities(rates_bytes_per_s: Iterable[float], step_ms: int) -> list[int]:
    """A trace from a series of rates, each held for ``step_ms`` milliseconds: what :func:`write_trace` writes."""
    times_ms: list[int] = []
    credit_bytes = 0.0
    now_ms = 0
    for rate in rates_bytes_per_s:
        for _ in range(step_ms):
            now_ms += 1
            credit_bytes += rate / 1000
            count = int(credit_bytes // OPPORTUNITY_BYTES)
            credit_bytes -= count * OPPORTUNITY_BYTES
            times_ms.extend([now_ms] * count)
    # The period is the last entry, so a series that ends in silence needs one opportunity at its very end.
    if now_ms > 0 and (not times_ms or times_ms[-1] != now_ms):
        times_ms.append(now_ms)
    return times_ms


def write_trace(path: Path, rates_bytes_per_s: Iterable[float], step_ms: int) -> None:
    """Write a series of rates, each held for ``step_ms`` milliseconds, as a trace file."""
    path.write_text("".join(f"{ms}\n" for ms in opportunities(rates_bytes_per_s, step_ms)), encoding="ascii")
