"""All shared bottlenecks of a coordinator: who crosses which, and the order of decisions when a rate is split anew.

After each event on a link its need is looked at again. When that splits a rate anew, links that get less decide first
and tell their lanes so; then the link itself; then those that get more. So the sum of what may be sent over a line
never exceeds its rate, in the order in which agents hear of it as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.grants import PADDING_JOB, LinkGranter
from proxyd.core.ids import LinkName
from proxyd.core.policy import BottleneckSettings
from proxyd.core.shared import SharedBottleneck
from proxyd.core.units import format_rate

PADDING_PART = 16
"""A link that only warms its connections up takes a sixteenth of the line at most."""
USES_ALL = 0.95
"""A link whose senders can't use this part of its pace needs what they use, and a quarter more, so that it may grow."""
TOLERANCE = 32
"""What isn't worth a word to agents, or a new split, may be above the pace meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class BottleneckStatus:
    """One shared bottleneck as plain values. Rates are payload."""

    name: str
    """``"hami egress"``."""
    source: str
    """``configured`` (believed), or where its estimate comes from."""
    pace_bytes_per_s: int
    """What may be granted over all its links."""
    granted_bytes_per_s: int
    """Sum of the rates of lanes that are not leaving."""
    window_bytes: int
    outstanding_bytes: int
    window_violations: int
    """Times that its links were granted more than its window: always 0, or it is a bug."""
    links: tuple[tuple[LinkName, int], ...]
    """Those that cross it, each with what it may use now; 0: not limited, it is the only one that sends."""


class SharedBottlenecks:
    """See the module's text.

    :param links: those that are configured; their packets tell how much of a line's rate is headers.
    """

    def __init__(self, settings: Sequence[BottleneckSettings], links: Sequence[LinkSettings]) -> None:
        self.lines = tuple(
            SharedBottleneck(one, min((link.mtu_bytes for link in links if one.has(link.link)), default=1500))
            for one in settings
        )
        self._granters: dict[LinkName, LinkGranter] = {}

    def join(self, granter: LinkGranter) -> None:
        """A link is new. One that is only observed takes no part: what it sends isn't granted."""
        lines = tuple(line for line in self.lines if line.settings.has(granter.link))
        if lines and not granter.settings.observe:
            self._granters[granter.link] = granter
            granter.share(lines)
            for line in lines:
                line.join(granter.link)

    def order(self, granter: LinkGranter, now_ns: int) -> Sequence[LinkName]:
        """Something happened on a link: which links should decide now, in this order. It is among them."""
        link = granter.link
        if not granter.shared:
            return (link,)
        need, stuck = _need(granter, now_ns)
        # All of them hear of it, so no any().
        if not sum([line.wants(link, need, stuck, granter.outstanding_bytes, now_ns) for line in granter.shared]):
            return (link, *self._short(granter)) if any(line.short for line in granter.shared) else (link,)
        down: list[LinkName] = []
        up: list[LinkName] = []
        for name in sorted({name for line in granter.shared for name in line.parts}):
            other = self._granters[name]
            before = other.shared_limit_bytes_per_s
            limit = min((rate for line in other.shared if (rate := line.parts[name].limit_bytes_per_s)), default=0)
            if limit != before:
                other.set_shared_limit(limit, _reason(other, limit), now_ns)
                if before and not limit:
                    carried = min(line.estimator.rate_bytes_per_s(now_ns) for line in other.shared if line.live)
                    other.lift(carried, now_ns)
                if name != link:
                    (down if limit and (not before or limit < before) else up).append(name)
        return (*down, link, *up, *(name for name in self._short(granter) if name not in up))

    def _short(self, granter: LinkGranter) -> list[LinkName]:
        """Links that found a window full which has room now."""
        found: list[LinkName] = []
        for line in granter.shared:
            for name in sorted(line.short - {granter.link}):
                if line.room_bytes >= self._granters[name].sizes.chunk_bytes:
                    line.short.discard(name)
                    found.append(name)
            line.short.discard(granter.link)
        return found

    def fallback_bytes_per_s(self, granter: LinkGranter, now_ns: int) -> int:
        """What a link's agents may share while this coordinator is silent is a part of this."""
        rate = granter.rate_bytes_per_s(now_ns)
        return min((rate, *(line.fallback_bytes_per_s(now_ns) for line in granter.shared)))

    def audit(self, now_ns: int) -> str:
        """What must always hold; "" when it does."""
        for line in self.lines:
            granters = [self._granters[name] for name in line.parts]
            held = sum(granter.outstanding_bytes for granter in granters)
            if held != line.outstanding_bytes or held > line.window_bytes or line.violations:
                return (
                    f"{line.name}: its links hold {held} bytes, {line.outstanding_bytes} are counted, "
                    f"the window is {line.window_bytes}"
                )
            rate = sum(binding_bytes_per_s(granter, now_ns) for granter in granters)
            bound = line.bound_bytes_per_s(now_ns)
            # Who can't be told anything may be sending more than a rate that has fallen since.
            stuck = sum(part.stuck_bytes_per_s for part in line.parts.values())
            if bound and rate > max(bound, stuck) + bound // TOLERANCE:
                return f"{line.name}: lanes may send {rate} bytes/s, the pace is {bound}"
        return ""

    def status(self, now_ns: int) -> tuple[BottleneckStatus, ...]:
        """All of them."""
        found: list[BottleneckStatus] = []
        for line in self.lines:
            granted = sum(binding_bytes_per_s(self._granters[name], now_ns) for name in line.parts)
            bound = line.bound_bytes_per_s(now_ns)
            found.append(
                BottleneckStatus(
                    name=line.name,
                    source=line.estimator.estimate(now_ns).source,
                    pace_bytes_per_s=bound or max(line.pace_bytes_per_s(now_ns), granted),
                    granted_bytes_per_s=granted,
                    window_bytes=line.window_bytes,
                    outstanding_bytes=line.outstanding_bytes,
                    window_violations=line.violations,
                    links=tuple((name, line.parts[name].limit_bytes_per_s) for name in sorted(line.parts)),
                )
            )
        return tuple(found)


def binding_bytes_per_s(granter: LinkGranter, now_ns: int) -> int:
    """Sum of the rates of a link's lanes that are not leaving."""
    return sum(lane.account.binding_rate(now_ns) for lane in granter.active_lanes if not lane.leaving)


def _reason(granter: LinkGranter, limit: int) -> str:
    """Why a link has no more, in words; "" where it has all that the line carries."""
    for line in granter.shared:
        others = sum(1 for name, part in line.parts.items() if part.need_bytes_per_s and name != granter.link)
        if others and line.parts[granter.link].limit_bytes_per_s == limit:
            return f"{line.name}: {format_rate(limit)} of it, {others + 1} links share it"
    return ""


def _need(granter: LinkGranter, now_ns: int) -> tuple[int, int]:
    """(what a link could use now, what agents that can't be told anything may be sending on it)."""
    stuck = tail = 0
    for lane in granter.active_lanes:
        if lane.stuck:
            stuck += lane.binding_rate(now_ns)
        elif not lane.harmless:
            tail += lane.account.binding_rate(now_ns)
    queue = granter.queue
    if not queue.count:
        return tail, stuck
    own = granter.own_pace_bytes_per_s
    padding = queue.account(PADDING_JOB)
    if padding is not None and padding.count == queue.count:
        return max(tail, own // PADDING_PART), stuck
    planned = granter.planned_bytes_per_s
    if planned and planned < USES_ALL * granter.pace_bytes_per_s(now_ns):
        return min(own, max(tail, planned + planned // 4)), stuck
    return own, stuck
