"""What an operator wants of the links: who gets how much of them, and when.

Plain values without a clock: the configuration makes them (:mod:`proxyd.runtime.config_policy`), an event carries them
into the coordinator (:class:`proxyd.core.events.PolicyChanged`), and :mod:`proxyd.core.plan` decides by them.

* A **job** has a floor (served first, whatever its class), a weight (splits among the jobs of one traffic class what
  the floors leave) and a cap, on each link that it uses.
* A **link** has a cap and a *calendar*: windows of the week, each with the rate that holds in it *instead of* the cap.
  Times are local to the coordinator's host (or its ``time_zone``). The daemon tells the machine which minute of the
  week it is; until it has, the strictest of all rates holds.
* A **class** is served one agent at a time, or all agents at once at equal shares.

Rates here are what the line carries, headers included, like a link's capacity.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from proxyd.core.errors import ConfigError
from proxyd.core.ids import LinkName
from proxyd.core.permissions import EVERYTHING, Permissions
from proxyd.core.units import format_rate, parse_rate
from proxyd.wire.envelope import TrafficClass

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
MIN_WEIGHT = 0.001
MAX_WEIGHT = 1_000_000.0
DEFAULT_FIFO_SHARE = 0.05
MAX_FIFO_SHARE = 0.2
WINDOW_FORMS = '"weekdays 09:00-18:00 100Mbit", "sat,sun 00:00-24:00 2Gbit", "mon-thu 22:00-24:00 1Gbit"'

_DAY_GROUPS = {
    "weekdays": (0, 1, 2, 3, 4),
    "weekends": (5, 6),
    "weekend": (5, 6),
    "daily": (0, 1, 2, 3, 4, 5, 6),
}
_TIME = re.compile(r"(\d{1,2}):(\d{2})", re.ASCII)


class Sharing(enum.Enum):
    """How the agents of one traffic class use a link."""

    ONE = "one"
    """One at a time at the whole rate: halves the mean completion time of a burst."""
    EQUAL = "equal"
    """All at once at equal shares: what a barrier waits for is its last member, and there is no hand-over."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobPolicy:
    """One job's part of each link that it uses. Raises ConfigError for values that contradict each other."""

    weight: float = 1.0
    """Its part of what floors leave, beside the weights of the others that have something to send."""
    floor_bytes_per_s: int = 0
    """What it gets before all others while it has something to send; 0: nothing is promised."""
    cap_bytes_per_s: int = 0
    """The most that it gets, even of an idle link; 0: no limit."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and MIN_WEIGHT <= self.weight <= MAX_WEIGHT):
            raise ConfigError(
                f"weight {self.weight:g} is not possible",
                why=f"a weight is from {MIN_WEIGHT:g} to {MAX_WEIGHT:,.0f}",
                next_step="To give a job next to nothing, say weight = 0.01 or a cap",
            )
        if self.floor_bytes_per_s < 0 or self.cap_bytes_per_s < 0:
            raise ConfigError("a floor or cap must not be negative")
        if 0 < self.cap_bytes_per_s < self.floor_bytes_per_s:
            raise ConfigError(
                f"cap {format_rate(self.cap_bytes_per_s)} is below floor {format_rate(self.floor_bytes_per_s)}",
                why="what is promised must be allowed",
                next_step="Raise the cap or lower the floor",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class CapWindow:
    """Some days of the week from one time to another, and the rate that a link may use then."""

    days: tuple[int, ...]
    """0 is Monday; sorted."""
    start_minute: int
    """Of the day."""
    end_minute: int
    """Of the day, not included; 1440 is midnight at its end."""
    rate_bytes_per_s: int

    def __post_init__(self) -> None:
        if not self.days or any(not 0 <= day < len(DAYS) for day in self.days):
            raise ConfigError(f"days {self.days} are not days of a week")
        if not (0 <= self.start_minute < DAY_MINUTES and 0 < self.end_minute <= DAY_MINUTES):
            raise ConfigError(f"{self.start_minute} to {self.end_minute} are not minutes of a day")
        if self.end_minute <= self.start_minute:
            start, end = _clock(self.start_minute), _clock(self.end_minute)
            raise ConfigError(
                f"the window {start}-{end} ends before it starts",
                next_step=f"Over midnight write two: one {start}-24:00, and one 00:00-{end} for the days after",
            )
        if self.rate_bytes_per_s <= 0:
            raise ConfigError("the rate of a window must be more than zero")

    def covers(self, minute_of_week: int) -> bool:
        """Whether it holds in that minute; 0 is Monday 00:00."""
        day, minute = divmod(minute_of_week, DAY_MINUTES)
        return day in self.days and self.start_minute <= minute < self.end_minute

    def overlaps(self, other: CapWindow) -> bool:
        """Whether both hold in some minute."""
        common = set(self.days) & set(other.days)
        return bool(common) and self.start_minute < other.end_minute and other.start_minute < self.end_minute

    def __str__(self) -> str:
        days = ",".join(DAYS[day] for day in self.days)
        return f"{days} {_clock(self.start_minute)}-{_clock(self.end_minute)} {format_rate(self.rate_bytes_per_s)}"


def parse_window(text: str) -> CapWindow:
    """``"weekdays 09:00-18:00 100Mbit"`` as a value.

    Days are ``mon`` to ``sun``, ranges of them (``mon-thu``), ``weekdays``, ``weekends``, ``daily``, or several of
    those with commas; the end may be 24:00.

    :raises ConfigError: what can't be read, an unknown day, a window that ends before it starts.
    """
    parts = text.split()
    if len(parts) < 3:
        raise ConfigError(f"{text!r} is not a window", next_step=f"Write days, times and rate, like {WINDOW_FORMS}")
    start, separator, end = parts[1].partition("-")
    if not separator:
        raise ConfigError(f"{parts[1]!r} in {text!r} are not two times", next_step="Write them like 09:00-18:00")
    return CapWindow(_days(parts[0]), _minute(start, text), _minute(end, text), parse_rate(" ".join(parts[2:])))


def _days(text: str) -> tuple[int, ...]:
    days: set[int] = set()
    for part in text.lower().split(","):
        if part in _DAY_GROUPS:
            days.update(_DAY_GROUPS[part])
            continue
        first, separator, last = part.partition("-")
        for name in (first, last) if separator else (first,):
            if name not in DAYS:
                raise ConfigError(
                    f"{name!r} is not a day",
                    next_step=f"Days are {', '.join(DAYS)}, mon-fri, weekdays, weekends, daily, or a list with commas",
                )
        start, end = DAYS.index(first), DAYS.index(last or first)
        # sat-mon goes over the end of the week.
        days.update((start + step) % 7 for step in range((end - start) % 7 + 1))
    return tuple(sorted(days))


def _minute(text: str, window: str) -> int:
    match = _TIME.fullmatch(text)
    minute = int(match[1]) * 60 + int(match[2]) if match and int(match[2]) < 60 else -1
    if not 0 <= minute <= DAY_MINUTES:
        raise ConfigError(f"{text!r} in {window!r} is not a time", next_step="Times are 00:00 to 24:00")
    return minute


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def overlap_of(windows: Sequence[CapWindow]) -> tuple[int, int] | None:
    """The first two windows (their places, in order) that hold at one time; None: no two do."""
    for second, window in enumerate(windows):
        for first in range(second):
            if windows[first].overlaps(window):
                return first, second
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class LinkPolicy:
    """What one link may be used for. Raises ConfigError for overlapping windows."""

    cap_bytes_per_s: int = 0
    """The most that is granted when no window holds; 0: what the link carries."""
    calendar: tuple[CapWindow, ...] = ()
    fifo_share: float = DEFAULT_FIFO_SHARE
    """Part of the bytes that goes to the longest waiter whatever its class, so that nothing starves."""

    def __post_init__(self) -> None:
        if self.cap_bytes_per_s < 0:
            raise ConfigError("a link's cap must not be negative")
        if not 0 <= self.fifo_share <= MAX_FIFO_SHARE:
            raise ConfigError(f"fifo_share {self.fifo_share:g} must be from 0 to {MAX_FIFO_SHARE:g}")
        if (places := overlap_of(self.calendar)) is not None:
            first, second = (self.calendar[place] for place in places)
            raise ConfigError(f"the windows {first} and {second} overlap")

    def limit_bytes_per_s(self, minute_of_week: int | None) -> int:
        """What may be granted in that minute of the week (0: Monday 00:00); 0: no limit.

        None means that the local time isn't known: then the strictest of all rates holds.
        """
        if minute_of_week is None:
            return self.strictest_bytes_per_s
        for window in self.calendar:
            if window.covers(minute_of_week):
                return window.rate_bytes_per_s
        return self.cap_bytes_per_s

    @property
    def strictest_bytes_per_s(self) -> int:
        """The lowest limit of the week; 0: none at all."""
        rates = [window.rate_bytes_per_s for window in self.calendar]
        if self.cap_bytes_per_s:
            rates.append(self.cap_bytes_per_s)
        return min(rates, default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class BottleneckSettings:
    """What all links out of a site, or into it, share: its access line. Raises ConfigError for negative rates."""

    site: str
    egress: bool
    """Out of the site; False: into it."""
    capacity_bytes_per_s: int = 0
    """On the wire, headers included: what is believed; 0: not known, it is learned."""
    cap_bytes_per_s: int = 0
    """The most that is granted over all its links; 0: what it carries."""

    def __post_init__(self) -> None:
        if self.capacity_bytes_per_s < 0 or self.cap_bytes_per_s < 0:
            raise ConfigError(f"{self.name}: a capacity or cap must not be negative")

    @property
    def name(self) -> str:
        """For people: ``"hami egress"``."""
        return f"{self.site} {'egress' if self.egress else 'ingress'}"

    def has(self, link: LinkName) -> bool:
        """Whether a link crosses it."""
        return (link.src_site if self.egress else link.dst_site) == self.site


_DEFAULT_SHARING: Mapping[TrafficClass, Sharing] = {
    TrafficClass.PIPELINE: Sharing.ONE,
    TrafficClass.SYNC: Sharing.EQUAL,
    TrafficClass.BULK: Sharing.ONE,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Everything an operator said about sharing. The mappings are not changed."""

    jobs: Mapping[str, JobPolicy] = dataclasses.field(default_factory=dict)
    links: Mapping[LinkName, LinkPolicy] = dataclasses.field(default_factory=dict)
    sharing: Mapping[TrafficClass, Sharing] = dataclasses.field(default_factory=lambda: dict(_DEFAULT_SHARING))
    default_job: JobPolicy = JobPolicy()
    """Of a job that isn't named."""
    default_link: LinkPolicy = LinkPolicy()
    permissions: Permissions = EVERYTHING
    """Which job may use what."""

    def job(self, name: str) -> JobPolicy:
        """What holds for a job."""
        return self.jobs.get(name, self.default_job)

    def link(self, name: LinkName) -> LinkPolicy:
        """What holds for a link."""
        return self.links.get(name, self.default_link)

    def sharing_of(self, traffic: TrafficClass) -> Sharing:
        """How a class is served."""
        return self.sharing.get(traffic, _DEFAULT_SHARING[traffic])

    @property
    def has_calendar(self) -> bool:
        """Somewhere the time of the week matters."""
        return any(link.calendar for link in self.links.values())

    def minutes_to_boundary(self, minute_of_week: int) -> int:
        """Whole minutes until the next window begins or ends somewhere; a week when there is none."""
        return min(((edge - minute_of_week - 1) % WEEK_MINUTES + 1 for edge in self._edges()), default=WEEK_MINUTES)

    def _edges(self) -> Iterable[int]:
        for link in self.links.values():
            for window in link.calendar:
                for day in window.days:
                    yield (day * DAY_MINUTES + window.start_minute) % WEEK_MINUTES
                    yield (day * DAY_MINUTES + window.end_minute) % WEEK_MINUTES


def floors_problem(policy: Policy, link: LinkName, capacity_bytes_per_s: int) -> str:
    """Why the floors can't all hold on one link, in words; "" when they can (or its capacity isn't known).

    Any job may use any link, so all floors together must fit into what the link carries and into its strictest limit.
    """
    floors = sum(job.floor_bytes_per_s for job in policy.jobs.values())
    strictest = policy.link(link).strictest_bytes_per_s
    for name, limit in (("capacity", capacity_bytes_per_s), ("strictest cap", strictest)):
        if limit and floors > limit:
            return (
                f"the floors of all jobs sum to {format_rate(floors)}, which is above the {name} of link {link}, "
                f"{format_rate(limit)}. Lower some, so that all of them can be kept"
            )
    return ""
