"""``[[link]]``, ``[[job]]``, ``[[class]]`` and ``[[bottleneck]]``: what a coordinator is told of lines and of sharing.

Read by the coordinator; of ``[[job]]`` an agent reads ``token_file``, and nothing else of these. What one table can see
by itself is checked in its model, so that the finding has the line of its key; what only several together show (floors
and capacities, windows that overlap) in :func:`policy_problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictStr,
    WithJsonSchema,
    model_validator,
)

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.errors import ConfigError, UnitError
from proxyd.core.ids import LinkName
from proxyd.core.permissions import JobRule, Permissions
from proxyd.core.policy import (
    DEFAULT_FIFO_SHARE,
    MAX_FIFO_SHARE,
    MAX_WEIGHT,
    MIN_WEIGHT,
    BottleneckSettings,
    CapWindow,
    JobPolicy,
    LinkPolicy,
    Policy,
    Sharing,
    floors_problem,
    parse_window,
)
from proxyd.core.units import format_rate, is_bdp, parse_buffer, parse_duration, parse_rate
from proxyd.runtime.config_fields import BufferText, DurationText, LinkTexts, Name, RateText, listed, texts
from proxyd.runtime.toml_lines import Path, line_of
from proxyd.wire.envelope import TrafficClass


class Section(BaseModel):
    """A table of the file: no unknown keys, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


def _window(value: str) -> str:
    try:
        parse_window(value)
    except UnitError:
        raise
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value


def _weight(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_WEIGHT <= value <= MAX_WEIGHT:
        raise ValueError(
            f"{value!r} is not a weight: write a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:,.0f}; without one a job"
            " counts 1"
        )
    return value


def _job_name(value: str) -> str:
    if not value or len(value) > 255 or "/" in value:
        raise ValueError(f"{value!r} is not a job: write what stands before the / in its endpoints' names")
    return value


def _rate_of(text: str | None) -> int:
    return 0 if text is None else parse_rate(text)


WindowText = Annotated[StrictStr, AfterValidator(_window)]
Weight = Annotated[
    float,
    BeforeValidator(_weight),
    WithJsonSchema({"type": "number", "minimum": MIN_WEIGHT, "maximum": MAX_WEIGHT}),
]
ClassTexts = Annotated[tuple[Literal["pipeline", "sync", "bulk"], ...], BeforeValidator(listed), texts("pipeline")]
JobName = Annotated[StrictStr, AfterValidator(_job_name)]


class LinkConfig(Section):
    """``[[link]]``: one direction between two sites."""

    from_site: Name = Field(alias="from")
    to_site: Name = Field(alias="to")
    estimate: Literal["live", "fixed"] = "live"
    """"live": the rate is found from live transfers and followed. "fixed": ``capacity`` is believed for ever."""
    capacity: RateText | None = None
    """Where a live estimate starts."""
    rtt: DurationText | None = None
    buffer: BufferText | None = None
    pace: float = Field(default=0.98, gt=0, le=1, allow_inf_nan=False)
    """Share of a fixed capacity that is granted."""
    mtu: int = Field(default=1500, strict=True, ge=576, le=65_535)
    """Largest packet on the way: it decides which share of the capacity is left for payload."""
    mode: Literal["grant", "observe"] | None = None
    """None: as [coordinator] says."""
    cap: RateText | None = None
    """The most that is granted while no window of the calendar holds."""
    calendar: tuple[WindowText, ...] = ()
    fifo_share: float = Field(default=DEFAULT_FIFO_SHARE, strict=True, ge=0, le=MAX_FIFO_SHARE, allow_inf_nan=False)
    """Part of the bytes that goes to the longest waiter."""

    @property
    def name(self) -> str:
        return f"{self.from_site}->{self.to_site}"

    @property
    def link(self) -> LinkName:
        return LinkName(self.from_site, self.to_site)

    @property
    def capacity_bytes_per_s(self) -> int:
        """What the link carries, headers included; 0 when it isn't known."""
        return _rate_of(self.capacity)

    @property
    def rtt_ns(self) -> int:
        """0 when it isn't known."""
        return 0 if self.rtt is None else parse_duration(self.rtt)

    @property
    def buffer_bytes(self) -> int:
        """The gateway's buffer in front of the link; 0 when it is not known, and nothing may count on it."""
        return 0 if self.buffer is None else parse_buffer(self.buffer, self.capacity_bytes_per_s, self.rtt_ns)

    @property
    def cap_bytes_per_s(self) -> int:
        """0: none."""
        return _rate_of(self.cap)

    @property
    def windows(self) -> tuple[CapWindow, ...]:
        return tuple(parse_window(text) for text in self.calendar)

    @property
    def settings(self) -> LinkSettings:
        """For the machine: what is known of the line."""
        return LinkSettings(
            link=self.link,
            capacity_bytes_per_s=self.capacity_bytes_per_s,
            rtt_ns=self.rtt_ns,
            buffer_bytes=self.buffer_bytes,
            pace_share=self.pace,
            mtu_bytes=self.mtu,
            source="configured" if self.capacity is not None else "default",
            live=self.estimate == "live",
        )

    @model_validator(mode="after")
    def _fits(self) -> LinkConfig:
        if self.from_site == self.to_site:
            raise ValueError(f"a link joins two sites; from and to are both {self.from_site!r}")
        if self.estimate == "fixed" and self.capacity is None:
            raise ValueError('estimate = "fixed" needs the capacity that is to be believed')
        if self.buffer is not None:
            if is_bdp(self.buffer) and (self.capacity is None or self.rtt is None):
                raise ValueError(f"buffer = {self.buffer!r} is a share of capacity x rtt: give both, or a size")
            _ = self.buffer_bytes  # a share of the BDP may round to nothing
        return self


class JobConfig(Section):
    """``[[job]]``: one job's part of each link that it uses."""

    name: JobName
    weight: Weight = 1.0
    floor: RateText | None = None
    cap: RateText | None = None
    links: LinkTexts = ()
    """Those that it may use; none: all."""
    classes: ClassTexts = ()
    """Those that it may use; none: all."""
    token_file: StrictStr | None = None
    """For agents: what its trainers must prove. None: nothing of their own."""

    @property
    def floor_bytes_per_s(self) -> int:
        """0: nothing is promised."""
        return _rate_of(self.floor)

    @property
    def cap_bytes_per_s(self) -> int:
        """0: no limit."""
        return _rate_of(self.cap)


class ClassConfig(Section):
    """``[[class]]``: how the agents of one traffic class use a link."""

    name: Literal["pipeline", "sync", "bulk"]
    share: Literal["one", "equal"]


class BottleneckConfig(Section):
    """``[[bottleneck]]``: what all links out of a site, or into it, share."""

    site: Name
    direction: Literal["egress", "ingress"]
    capacity: RateText | None = None
    """What it is believed to carry; None: it is learned."""
    cap: RateText | None = None

    @property
    def settings(self) -> BottleneckSettings:
        """For the machine."""
        return BottleneckSettings(self.site, self.direction == "egress", _rate_of(self.capacity), _rate_of(self.cap))


def policy_of(
    links: Sequence[LinkConfig], jobs: Sequence[JobConfig], classes: Sequence[ClassConfig], *, only_named: bool = False
) -> Policy:
    """What the file says about sharing, for the machine. Raises ConfigError for what :func:`policy_problems` finds.

    :param only_named: jobs that aren't named may use nothing.
    """
    rules = (JobRule(job.name, job.links, job.classes) for job in jobs if only_named or job.links or job.classes)
    return Policy(
        jobs={job.name: JobPolicy(job.weight, job.floor_bytes_per_s, job.cap_bytes_per_s) for job in jobs},
        links={link.link: LinkPolicy(link.cap_bytes_per_s, link.windows, link.fifo_share) for link in links},
        sharing={TrafficClass[one.name.upper()]: Sharing(one.share) for one in classes},
        permissions=Permissions(tuple(sorted(rules, key=lambda rule: rule.job)), only_named),
    )


def policy_problems(
    links: Sequence[LinkConfig],
    jobs: Sequence[JobConfig],
    classes: Sequence[ClassConfig],
    bottlenecks: Sequence[BottleneckConfig],
    lines: Mapping[Path, int],
) -> Iterator[tuple[Path, str]]:
    """What no single table can see: (path of the key, what is wrong)."""
    yield from _twice("link", [link.name for link in links])
    yield from _twice("job", [job.name for job in jobs])
    yield from _twice("class", [one.name for one in classes])
    yield from _twice("bottleneck", [one.settings.name for one in bottlenecks])
    for index, link in enumerate(links):
        yield from _overlaps(index, link, lambda path: line_of(dict(lines), path))
    wrong = False
    for index, job in enumerate(jobs):
        if 0 < job.cap_bytes_per_s < job.floor_bytes_per_s:
            wrong = True
            text = (
                f"[[job]] cap: {job.cap} is below the floor of job {job.name}, {job.floor}: what is promised must be"
                " allowed. Raise the cap or lower the floor"
            )
            yield ("job", index, "cap"), text
    if wrong or len({link.name for link in links}) != len(links) or any(_overlapping(link) for link in links):
        return
    policy = policy_of(links, jobs, ())
    floors = [index for index, job in enumerate(jobs) if job.floor is not None]
    for link in links:
        if text := floors_problem(policy, link.link, link.capacity_bytes_per_s):
            yield ("job", floors[-1], "floor"), f"[[job]] floor: {text}"
    for one in bottlenecks:
        limits = [rate for rate in (one.settings.capacity_bytes_per_s, one.settings.cap_bytes_per_s) if rate]
        total = sum(job.floor_bytes_per_s for job in jobs)
        if limits and total > min(limits):
            text = (
                f"[[job]] floor: the floors of all jobs sum to {format_rate(total)}, which is above what the"
                f" {one.settings.name} carries, {format_rate(min(limits))}. Lower some, so that all can be kept"
            )
            yield ("job", floors[-1], "floor"), text


def _twice(table: str, names: Sequence[str]) -> Iterator[tuple[Path, str]]:
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in seen:
            yield (table, index), f"{table} {name} stands here again; [[{table}]] number {seen[name] + 1} has it"
        seen.setdefault(name, index)


def _overlapping(link: LinkConfig) -> bool:
    windows = link.windows
    return any(a.overlaps(b) for place, a in enumerate(windows) for b in windows[:place])


def _overlaps(index: int, link: LinkConfig, line: Callable[[Path], int]) -> Iterator[tuple[Path, str]]:
    windows = link.windows
    for second, window in enumerate(windows):
        for first in range(second):
            if windows[first].overlaps(window):
                there = line(("link", index, "calendar", first))
                text = (
                    f"[[link]] calendar: {link.calendar[second]!r} overlaps {link.calendar[first]!r} on line {there}:"
                    " two rates can't hold at one time. Change the days or times of one"
                )
                yield ("link", index, "calendar", second), text
