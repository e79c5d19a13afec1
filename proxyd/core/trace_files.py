"""Rate traces from files, in two forms. Pure: the text comes in, a trace or an error with the line comes out.

*Opportunities*, as mahimahi has them: one whole number of milliseconds a line, each worth 1504 bytes
(:func:`proxyd.core.traces.parse_opportunities`).

*A series of rates*: ``seconds, bit/s`` on each line, separated by a comma or by space; what follows ``#`` doesn't
count. From that time on the link has that rate, until the next line. The first line is the trace's beginning, whatever
its time; the last rate lasts as long as most do, and then the trace repeats. A rate of 0 is an outage. A gap, which is
a line that comes more than ten times later than half of the others do, is no outage: nothing is known of it, so the
rate before it is taken to hold, and :class:`TraceFile` counts it, for whoever reads the file to say so.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from itertools import pairwise

from proxyd.core.errors import ConfigError
from proxyd.core.traces import MAX_TRACE_MS, NANOS, RateTrace, from_opportunities, parse_opportunities

GAP_TIMES = 10
"""A line so many times later than the median is behind a gap."""
MAX_RATE_BIT_PER_S = 1e15
_FIELDS = re.compile(r"\s*,\s*|\s+")


@dataclasses.dataclass(frozen=True, slots=True)
class TraceFile:
    """What a file holds."""

    trace: RateTrace
    gaps: int = 0
    longest_gap_ns: int = 0

    @property
    def remark(self) -> str:
        """What its reader should know; empty: nothing."""
        if not self.gaps:
            return ""
        many = "a gap of" if self.gaps == 1 else f"{self.gaps} gaps, the longest of"
        return f"{many} {self.longest_gap_ns / NANOS:g} s: the rate before it is taken to hold"


def parse_trace(text: str, source: str) -> TraceFile:
    """A file of either form, by its first line. Raises ConfigError naming ``source`` and the line."""
    first = next((line for line in map(_bare, text.splitlines()) if line), "")
    if len(_FIELDS.split(first)) == 1:
        return TraceFile(from_opportunities(parse_opportunities(text, source)))
    return _series(text, source)


def _bare(line: str) -> str:
    return line.partition("#")[0].strip()


def _series(text: str, source: str) -> TraceFile:
    times_ns: list[int] = []
    rates: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        bare = _bare(line)
        if not bare:
            continue
        where = f"{source}:{number}"
        time_s, rate = _two_numbers(where, bare)
        if not 0 <= time_s <= MAX_TRACE_MS / 1000:
            raise ConfigError(
                f"{where}: {time_s:g} s is no time of a trace", why="it is negative, not finite, or more than a day"
            )
        if not 0 <= rate <= MAX_RATE_BIT_PER_S:
            raise ConfigError(f"{where}: {rate:g} bit/s is no rate", why="it is negative, not finite, or absurd")
        time_ns = round(time_s * NANOS)
        if times_ns and time_ns <= times_ns[-1]:
            raise ConfigError(f"{where}: {time_s:g} s isn't after the line above it; sort the file")
        times_ns.append(time_ns)
        rates.append(math.ceil(rate / 8))
    if len(times_ns) < 2:
        raise ConfigError(f"{source}: {len(times_ns)} lines of time and rate; two at least are needed")
    if not any(rates):
        raise ConfigError(f"{source}: every rate is 0; a trace must carry something")
    steps_ns = [later - earlier for earlier, later in pairwise(times_ns)]
    usual_ns = statistics.median_low(steps_ns)
    gaps_ns = [step for step in steps_ns if step > GAP_TIMES * usual_ns]
    starts = [time_ns - times_ns[0] for time_ns in times_ns]
    trace = RateTrace(starts, rates, starts[-1] + usual_ns)
    return TraceFile(trace, len(gaps_ns), max(gaps_ns, default=0))


def _two_numbers(where: str, line: str) -> tuple[float, float]:
    fields = _FIELDS.split(line)
    try:
        time_s, rate = (float(field) for field in fields)
    except ValueError:
        raise ConfigError(
            f"{where}: {line[:40]!r} is not a time and a rate",
            next_step="Write seconds and bit/s on each line, as in 0.1, 4.2e9",
        ) from None
    return time_s, rate
