"""What the status page shows of the last minutes: who was granted which stretch of a link, and each link's figures.

Bounded in all directions, so that a page that nobody looks at costs the same few hundred kilobytes for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from proxyd.core.coordinator_status import CoordinatorStatus
from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Grant, Request

NANOS = 1_000_000_000
SAMPLE_NS = NANOS
MAX_SAMPLES = 300
"""Five minutes: what somebody who was called wants to see first."""
MAX_SLOTS = 4096
MAX_LINKS = 64
SHOWN_NS = 20 * NANOS
"""Of the slots: more than that is a smear on a screen."""
JOINED_NS = 2_000_000
"""Grants of one transfer follow each other: what is not further apart than this is drawn as one slot."""


class _Slot:
    """A stretch of a link that one transfer had."""

    __slots__ = ("agent", "end_ns", "link", "nbytes", "start_ns", "traffic", "transfer")

    def __init__(self, link: LinkName, agent: str, transfer: TransferId, traffic: str, start_ns: int) -> None:
        self.link = link
        self.agent = agent
        self.transfer = transfer
        self.traffic = traffic
        self.start_ns = self.end_ns = start_ns
        self.nbytes = 0


class _Sample(NamedTuple):
    """A link at one moment; totals since the coordinator began."""

    at_ns: int
    pace_bytes_per_s: int
    granted_bytes: int
    delivered_bytes: int
    queue_ns: int
    outstanding_bytes: int
    waiting: int


class History:
    """Fed beside the machine; never asked by it."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque(maxlen=MAX_SLOTS)
        self._last: dict[LinkName, _Slot] = {}
        self._agents: dict[int, AgentName] = {}
        """By session."""
        self._traffic: dict[TransferId, str] = {}
        self._samples: dict[LinkName, deque[_Sample]] = {}

    def saw(self, event: CoordinatorEvent | TimePassed) -> None:
        """An event."""
        if isinstance(event, SessionOpened) and isinstance(event.message, AgentHello):
            self._agents[event.session] = event.message.agent
        elif isinstance(event, SessionClosed):
            self._agents.pop(event.session, None)
        elif isinstance(event, SessionMessage) and isinstance(event.message, Request):
            if len(self._traffic) >= MAX_SLOTS:
                self._traffic.pop(next(iter(self._traffic)))
            self._traffic[event.message.transfer] = event.message.traffic.label

    def performed(self, now_ns: int, effects: Iterable[CoordinatorEffect]) -> None:
        """Effects of the machine."""
        for effect in effects:
            if isinstance(effect, ToAgent) and isinstance(effect.message, Grant):
                self._granted(now_ns, effect.session, effect.message)

    def _granted(self, now_ns: int, session: int, grant: Grant) -> None:
        start_ns = now_ns + grant.start_in_ns
        slot = self._last.get(grant.link)
        if slot is None or slot.transfer != grant.transfer or start_ns > slot.end_ns + JOINED_NS:
            if slot is None and len(self._last) >= MAX_LINKS:
                del self._last[min(self._last, key=lambda link: self._last[link].end_ns)]
            agent = self._agents.get(session)
            slot = _Slot(
                grant.link, str(agent or session), grant.transfer, self._traffic.get(grant.transfer, ""), start_ns
            )
            self._last[grant.link] = slot
            self._slots.append(slot)
        slot.nbytes += grant.nbytes
        slot.end_ns = max(slot.end_ns, start_ns) + grant.nbytes * NANOS // max(1, grant.rate_bytes_per_s)

    def sample(self, now_ns: int, status: CoordinatorStatus) -> None:
        """Each link as it is now; to be called every :data:`SAMPLE_NS`."""
        for link in status.links[:MAX_LINKS]:
            samples = self._samples.setdefault(link.link, deque(maxlen=MAX_SAMPLES))
            samples.append(
                _Sample(
                    now_ns,
                    link.pace_bytes_per_s,
                    link.totals.granted_bytes,
                    link.totals.delivered_bytes,
                    link.queue_ns,
                    link.outstanding_bytes,
                    link.waiting,
                )
            )
        for gone in self._samples.keys() - {link.link for link in status.links}:
            del self._samples[gone]

    def plain(self, now_ns: int) -> dict[str, Any]:
        """Everything as JSON values; times are nanoseconds before now (after it: negative)."""
        begin_ns = now_ns - SHOWN_NS
        return {
            "samples": {
                str(link): [[now_ns - one.at_ns, *one[1:]] for one in samples]
                for link, samples in sorted(self._samples.items())
            },
            "slots": [
                {
                    "link": str(slot.link),
                    "agent": slot.agent,
                    "transfer": str(slot.transfer),
                    "traffic": slot.traffic,
                    "begin_ago_ns": now_ns - slot.start_ns,
                    "end_ago_ns": now_ns - slot.end_ns,
                    "bytes": slot.nbytes,
                }
                for slot in self._slots
                if slot.end_ns > begin_ns
            ],
        }
