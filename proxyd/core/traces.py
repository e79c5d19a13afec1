"""A link's rate over time: the synthetic trace classes, steps, and mahimahi-style files. Pure.

A :class:`RateTrace` is a piecewise constant rate and its integral: how many bytes a never-idle link has carried by an
instant (``bytes_by``), and when it has carried so many (``time_for``). The two are exact inverses in integers:
``time_for(p)`` is the first nanosecond at which ``bytes_by`` is at least ``p``. So a packet's service may cross any
number of steps, and nothing drifts however long a run takes. The simulator's links and the emulated WAN's play the same
object.

Trace classes
-------------
No public series of a multi-Gbit/s path was found when these were chosen, so they are synthetic: a lognormal AR(1)
process (coefficient of variation CV, correlation time tau: the correlation over a lag d is ``exp(-d / tau)``), times
Poisson dips (each multiplies the rate while it lasts; dips don't stack), sampled every 0.1 s, rescaled to the mean.

======== ============================= ======================================
class    lognormal                     dips
======== ============================= ======================================
calm     CV 0.08, tau 2 s              none
moderate CV 0.25, tau 2 s              every 30 s, for 2 s, to 40 %
wild     CV 0.5, tau 3 s               every 20 s, for 3 s, to 25 %
drift    CV 0.5, tau 120 s, times      none
         CV 0.15, tau 2 s
real     CV 0.115, tau 60 s, times     every 36 s, for 1.5 s, to 35 %
         CV 0.105, tau 2 s
======== ============================= ======================================

``real`` imitates the shape of a public set of iperf3 runs from London to Sydney, of which three figures are kept: CV
0.19 at one second, 0.12 within ten seconds, 2.6 % of the seconds under half the median. It is modelled as a slow level
(tau 60 s: what differs from one ten-second stretch to the next), fast noise (tau 2 s: what differs within one), and
short deep dips. Its three figures over a long series are held by a test.

Rescaling is over the generated length: a 60 s ``drift`` has the asked mean in those 60 s, though its level alone would
take minutes to come round.
"""

from __future__ import annotations

import dataclasses
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from proxyd.core.errors import ConfigError

NANOS = 1_000_000_000
SAMPLE_NS = 100_000_000
"""Of synthetic traces."""
OPPORTUNITY_BYTES = 1504
"""What one line of a mahimahi-style file is worth."""
NS_PER_MS = 1_000_000
MIN_RATE_BYTES_PER_S = 10_000_000 // 8
MAX_RATE_BYTES_PER_S = 100_000_000_000 // 8
FOREVER_NS = 1 << 62


class RateTrace:
    """A piecewise constant rate from ``origin_ns`` on.

    :param starts_ns: when each piece begins, relative to the origin; the first is 0, they rise.
    :param rates_bytes_per_s: of each piece; 0 is an outage.
    :param period_ns: the trace repeats with this period; 0: its last rate (which is not 0 then) holds for ever.

    Raises ConfigError for what is no trace. An answer depends on its arguments alone; a remembered piece only
    makes the next answer near it quick.
    """

    __slots__ = (
        "_before",
        "_bytes_per_period",
        "_piece",
        "_place",
        "_rates",
        "_starts",
        "origin_ns",
        "period_ns",
    )

    def __init__(
        self, starts_ns: Sequence[int], rates_bytes_per_s: Sequence[int], period_ns: int = 0, origin_ns: int = 0
    ) -> None:
        if not starts_ns or len(starts_ns) != len(rates_bytes_per_s) or starts_ns[0] != 0:
            raise ConfigError("a rate trace needs as many starts as rates, at least one, and the first start at 0")
        if any(b <= a for a, b in pairwise(starts_ns)) or (period_ns and period_ns <= starts_ns[-1]):
            raise ConfigError("the pieces of a rate trace must begin one after the other, all within its period")
        if min(rates_bytes_per_s) < 0 or not (any(rates_bytes_per_s) if period_ns else rates_bytes_per_s[-1]):
            raise ConfigError("rates must not be negative, and a trace must not end in silence for ever")
        self._starts = tuple(starts_ns)
        self._rates = tuple(rates_bytes_per_s)
        self.period_ns = period_ns
        self.origin_ns = origin_ns
        before = [0]
        for (start, end), rate in zip(pairwise(self._starts), self._rates, strict=False):
            before.append(before[-1] + (end - start) * rate // NANOS)
        self._before = tuple(before)
        """Bytes carried before each piece."""
        self._bytes_per_period = (
            before[-1] + (period_ns - self._starts[-1]) * self._rates[-1] // NANOS if period_ns else 0
        )
        if period_ns and not self._bytes_per_period:
            raise ConfigError("a rate trace must carry at least one byte in a period")
        self._piece = (0, 0, 0, 0)
        """Of the latest ``bytes_by``: from, to, bytes before, rate."""
        self._place = (0, 0, 0, 1)
        """Of the latest ``time_for``: more than, up to (bytes), time of the first, rate."""

    def restarted(self, origin_ns: int) -> RateTrace:
        """The same trace with its beginning at ``origin_ns``."""
        trace = RateTrace.__new__(RateTrace)
        trace._starts, trace._rates, trace._before = self._starts, self._rates, self._before
        trace._bytes_per_period, trace.period_ns, trace.origin_ns = self._bytes_per_period, self.period_ns, origin_ns
        trace._piece, trace._place = (0, 0, 0, 0), (0, 0, 0, 1)
        return trace

    def scaled(self, mean_bytes_per_s: int) -> RateTrace:
        """The same shape with another mean over its period. Raises ConfigError for a trace without one."""
        if not self.period_ns:
            raise ConfigError("only a trace with a period has a mean")
        return RateTrace(
            self._starts,
            rescaled(self._rates, self._lengths(), mean_bytes_per_s),
            self.period_ns,
            self.origin_ns,
        )

    def turned(self, by_ns: int) -> RateTrace:
        """The same round, begun so much later in it. Raises ConfigError for a trace that doesn't repeat."""
        if not self.period_ns:
            raise ConfigError("only a trace with a period can begin elsewhere")
        by_ns %= self.period_ns
        cut = bisect_right(self._starts, by_ns) - 1
        later = range(cut + 1, len(self._starts))
        # The piece that is cut comes last as well, with what of it was before.
        earlier = [place for place in range(cut + 1) if self._starts[place] < by_ns]
        starts = [0, *(self._starts[place] - by_ns for place in later)]
        starts += [self._starts[place] + self.period_ns - by_ns for place in earlier]
        rates = [self._rates[place] for place in (cut, *later, *earlier)]
        return RateTrace(starts, rates, self.period_ns, self.origin_ns)

    def _lengths(self) -> list[int]:
        return [end - start for start, end in pairwise((*self._starts, self.period_ns))]

    @property
    def mean_bytes_per_s(self) -> int:
        """Over a period; of a trace without one the last rate, which is what it comes to."""
        return self._bytes_per_period * NANOS // self.period_ns if self.period_ns else self._rates[-1]

    @property
    def starts_ns(self) -> tuple[int, ...]:
        """When each piece begins, from the origin."""
        return self._starts

    @property
    def rates_bytes_per_s(self) -> tuple[int, ...]:
        """Of each piece."""
        return self._rates

    @property
    def constant(self) -> bool:
        """It never changes."""
        return len(self._rates) == 1

    # ------------------------------------------------------------------------------------- answers

    def _find(self, since_ns: int) -> tuple[int, int, int, int]:
        cycle_ns = cycle_bytes = 0
        if self.period_ns:
            cycles, since_ns = divmod(since_ns, self.period_ns)
            cycle_ns, cycle_bytes = cycles * self.period_ns, cycles * self._bytes_per_period
        index = bisect_right(self._starts, since_ns) - 1
        end_ns = self._starts[index + 1] if index + 1 < len(self._starts) else self.period_ns or FOREVER_NS
        return (
            cycle_ns + self._starts[index],
            cycle_ns + end_ns,
            cycle_bytes + self._before[index],
            self._rates[index],
        )

    def rate_at(self, time_ns: int) -> int:
        """Bytes per second at an instant; before the origin that of the first piece."""
        since_ns = max(0, time_ns - self.origin_ns)
        piece = self._piece
        if not piece[0] <= since_ns < piece[1]:
            piece = self._piece = self._find(since_ns)
        return piece[3]

    def bytes_by(self, time_ns: int) -> int:
        """Bytes that a never-idle link has carried by ``time_ns``, counted from the origin."""
        since_ns = time_ns - self.origin_ns
        if since_ns <= 0:
            return 0
        piece = self._piece
        if not piece[0] <= since_ns < piece[1]:
            piece = self._piece = self._find(since_ns)
        return piece[2] + (since_ns - piece[0]) * piece[3] // NANOS

    def time_for(self, position_bytes: int) -> int:
        """The first instant by which ``position_bytes`` have been carried."""
        if position_bytes <= 0:
            return self.origin_ns
        place = self._place
        if not place[0] < position_bytes <= place[1]:
            place = self._place = self._locate(position_bytes)
        return self.origin_ns + place[2] - (-(position_bytes - place[0]) * NANOS // place[3])

    def _locate(self, position_bytes: int) -> tuple[int, int, int, int]:
        cycle_ns = cycle_bytes = 0
        if self.period_ns:
            cycles = (position_bytes - 1) // self._bytes_per_period
            cycle_ns, cycle_bytes = cycles * self.period_ns, cycles * self._bytes_per_period
        index = bisect_left(self._before, position_bytes - cycle_bytes) - 1
        if index + 1 < len(self._before):
            end_bytes = self._before[index + 1]
        else:
            end_bytes = self._bytes_per_period or FOREVER_NS * self._rates[-1]
        return (
            cycle_bytes + self._before[index],
            cycle_bytes + end_bytes,
            cycle_ns + self._starts[index],
            self._rates[index],
        )

    def mean_between(self, start_ns: int, end_ns: int) -> int:
        """Mean rate between two instants, the second one later."""
        return (self.bytes_by(end_ns) - self.bytes_by(start_ns)) * NANOS // (end_ns - start_ns)

    def series(self, step_ns: int, duration_ns: int) -> list[int]:
        """Mean rates of consecutive steps from the origin on: what a mahimahi-style file can be written from."""
        begin_ns = self.origin_ns
        return [self.mean_between(begin_ns + at, begin_ns + at + step_ns) for at in range(0, duration_ns, step_ns)]


def rescaled(rates: Sequence[float], lengths_ns: Sequence[int], mean_bytes_per_s: int) -> list[int]:
    """The rates times one factor, such that their mean over their lengths is the one asked for."""
    total_ns = sum(lengths_ns)
    mean = sum(rate * length for rate, length in zip(rates, lengths_ns, strict=True)) / total_ns
    return [max(1 if rate else 0, round(rate * mean_bytes_per_s / mean)) for rate in rates]


def constant(rate_bytes_per_s: int) -> RateTrace:
    """A rate that never changes."""
    return RateTrace((0,), (rate_bytes_per_s,))


def steps(rate_bytes_per_s: int, changes: Iterable[tuple[int, float]]) -> RateTrace:
    """A rate that changes at given times: ``(time_ns, factor)``, each factor of the first rate. The last one stays."""
    starts, rates = [0], [rate_bytes_per_s]
    for time_ns, factor in changes:
        starts.append(time_ns)
        rates.append(round(rate_bytes_per_s * factor))
    return RateTrace(starts, rates)


# ------------------------------------------------------------------------------------------- synthetic


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """One lognormal AR(1) factor of mean 1."""

    cv: float
    tau_s: float

    def samples(self, count: int, step_s: float, rng: random.Random) -> list[float]:
        """A stationary series."""
        sigma = math.sqrt(math.log1p(self.cv * self.cv))
        keep = math.exp(-step_s / self.tau_s)
        fresh = math.sqrt(1 - keep * keep) * sigma
        level = rng.gauss(0.0, sigma)
        samples = []
        for _ in range(count):
            samples.append(math.exp(level - sigma * sigma / 2))
            level = keep * level + fresh * rng.gauss(0.0, 1.0)
        return samples


@dataclasses.dataclass(frozen=True, slots=True)
class Dips:
    """Times of a lower rate, as a Poisson process."""

    every_s: float
    length_s: float
    to: float
    """Factor while one lasts."""

    def factors(self, count: int, step_s: float, rng: random.Random) -> list[float]:
        """1 outside dips. A dip that begins within another one prolongs it."""
        factors = [1.0] * count
        at_s = rng.expovariate(1 / self.every_s)
        while at_s < count * step_s:
            first = int(at_s / step_s)
            for index in range(first, min(count, first + max(1, round(self.length_s / step_s)))):
                factors[index] = self.to
            at_s += rng.expovariate(1 / self.every_s)
        return factors


@dataclasses.dataclass(frozen=True, slots=True)
class TraceClass:
    """One row of the module's table."""

    noises: tuple[Noise, ...]
    dips: Dips | None = None


TRACE_CLASSES: Mapping[str, TraceClass] = {
    "calm": TraceClass((Noise(0.08, 2.0),)),
    "moderate": TraceClass((Noise(0.25, 2.0),), Dips(30.0, 2.0, 0.4)),
    "wild": TraceClass((Noise(0.5, 3.0),), Dips(20.0, 3.0, 0.25)),
    "drift": TraceClass((Noise(0.5, 120.0), Noise(0.15, 2.0))),
    "real": TraceClass((Noise(0.115, 60.0), Noise(0.105, 2.0)), Dips(36.0, 1.5, 0.35)),
}


def synthetic(kind: str, mean_bytes_per_s: int, duration_ns: int, seed: int) -> RateTrace:
    """A trace of one of :data:`TRACE_CLASSES`, of this mean over this duration, after which it repeats.

    Raises ConfigError for an unknown class, or one too short for a single sample.
    """
    found = TRACE_CLASSES.get(kind)
    if found is None:
        raise ConfigError(f"there is no trace class {kind!r}", next_step=f"Known: {', '.join(TRACE_CLASSES)}")
    count = duration_ns // SAMPLE_NS
    if count < 1:
        raise ConfigError(f"a trace of {duration_ns} ns is shorter than one sample of {SAMPLE_NS} ns")
    rng = random.Random(f"{kind} {seed}")
    step_s = SAMPLE_NS / NANOS
    rates = [1.0] * count
    for noise in found.noises:
        rates = [rate * sample for rate, sample in zip(rates, noise.samples(count, step_s, rng), strict=True)]
    if found.dips is not None:
        factors = found.dips.factors(count, step_s, rng)
        rates = [rate * factor for rate, factor in zip(rates, factors, strict=True)]
    return RateTrace(
        [index * SAMPLE_NS for index in range(count)],
        rescaled(rates, [SAMPLE_NS] * count, mean_bytes_per_s),
        count * SAMPLE_NS,
    )


# ------------------------------------------------------------------------------------------- mahimahi


MAX_TRACE_MS = 24 * 3600 * 1000
"""A longer period is a mistake (times in another unit), and its steps would fill the memory."""


def parse_opportunities(text: str, source: str) -> list[int]:
    """The milliseconds of a mahimahi-style file: one whole number a line, not decreasing; blank lines don't count.

    Raises ConfigError naming ``source`` and the line.
    """
    times_ms: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            time_ms = int(line)
        except ValueError:
            raise ConfigError(
                f"{source}:{number}: {line.strip()[:40]!r} is not a whole number of milliseconds",
                next_step="A mahimahi-style trace has one on each line: when the link can carry 1504 bytes more",
            ) from None
        if time_ms < 0:
            raise ConfigError(f"{source}:{number}: {time_ms} ms is before the trace's start")
        if times_ms and time_ms < times_ms[-1]:
            raise ConfigError(f"{source}:{number}: {time_ms} ms is before the line above it; sort the file")
        if time_ms > MAX_TRACE_MS:
            raise ConfigError(
                f"{source}:{number}: {time_ms} ms is more than a day",
                why="times are milliseconds since the trace's start",
            )
        times_ms.append(time_ms)
    if not times_ms or times_ms[-1] <= 0:
        raise ConfigError(f"{source}: no opportunity after millisecond 0; its last line is the trace's period")
    return times_ms


def from_opportunities(times_ms: Sequence[int], step_ms: int = 100) -> RateTrace:
    """The mean rate of each step of a mahimahi-style trace; it repeats with the period of its last entry.

    Steps of 0.1 s as in the synthetic classes: what a link does within one is then no matter of the rate, and is what a
    buffer is for.
    """
    period_ms = times_ms[-1]
    starts = list(range(0, period_ms, step_ms))
    counts = [0] * len(starts)
    for time_ms in times_ms:
        counts[min(max(0, time_ms - 1) // step_ms, len(counts) - 1)] += 1
    rates = [
        count * OPPORTUNITY_BYTES * 1000 // (min(period_ms, start + step_ms) - start)
        for start, count in zip(starts, counts, strict=True)
    ]
    return RateTrace([start * NS_PER_MS for start in starts], rates, period_ms * NS_PER_MS)
