"""What the coordinator counts at its door: waits for the first grant, ends of transfers, messages.

The machine keeps the totals of its links; what only metrics need is counted here, so that the machine stays free of it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable

from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import LinkName, TransferId
from proxyd.core.messages import Beat, CancelRequest, Denied, Grant, LinkInfo, Request, TransferDone, Welcome
from proxyd.core.units import format_rate
from proxyd.runtime.metrics import Histogram, MetricFamily, counter

WAIT_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MAX_WAITING = 100_000
"""Requests whose first grant is awaited; the oldest are forgotten first."""
MAX_LINKS = 256
"""Links with series of their own; an agent that invents site names must not fill the memory."""
OTHER_LINK = "other"

log = logging.getLogger("proxyd.coordinator")


class Observer:
    """Totals over the life of this process."""

    def __init__(self) -> None:
        self._links: dict[LinkName, str] = {}
        """Links with series of their own, as labels."""
        self._unknown: set[str] = set()
        self._links_told: dict[int, int] = {}
        """Session -> how many links its agent was told of."""
        self._transfers: Counter[tuple[str, str, str]] = Counter()
        self._transfer_bytes: Counter[tuple[str, str]] = Counter()
        self._messages: Counter[str] = Counter()
        self._denied = 0
        self._sessions_opened = 0
        self._asked: OrderedDict[TransferId, tuple[int, str]] = OrderedDict()
        self._waits: dict[str, Histogram] = {}

    def saw(self, now_ns: int, event: CoordinatorEvent | TimePassed) -> None:
        """An event, before the machine has it."""
        if isinstance(event, SessionMessage):
            message = event.message
            self._messages[type(message).__name__] += 1
            if isinstance(message, Request):
                self._saw_request(now_ns, message)
            elif isinstance(message, TransferDone):
                self._saw_done(message)
            elif isinstance(message, CancelRequest):
                self._asked.pop(message.transfer, None)
        elif isinstance(event, SessionOpened):
            self._sessions_opened += 1
        elif isinstance(event, SessionClosed):
            self._links_told.pop(event.session, None)

    def performed(self, now_ns: int, effects: Iterable[CoordinatorEffect]) -> None:
        """Effects of the machine."""
        for effect in effects:
            if not isinstance(effect, ToAgent):
                continue
            message = effect.message
            if isinstance(message, Grant):
                asked = self._asked.pop(message.transfer, None)
                if asked is not None:
                    histogram = self._waits.get(asked[1])
                    if histogram is None:
                        histogram = self._waits[asked[1]] = Histogram(WAIT_BOUNDS_S)
                    # Until the first byte may leave: the wait for the grant and its start delay.
                    histogram.observe((now_ns - asked[0] + message.start_in_ns) / 1e9)
            elif isinstance(message, Denied):
                self._denied += 1
                self._asked.pop(message.transfer, None)
            elif isinstance(message, (Beat, Welcome)) and self._links_told.get(effect.session) != len(message.links):
                # Only when there are new ones: beats are many.
                self._links_told[effect.session] = len(message.links)
                self._say_what_is_unknown(message.links)

    def _say_what_is_unknown(self, links: Iterable[LinkInfo]) -> None:
        """Once per link: nobody has told us of it and nothing was measured yet."""
        for link in links:
            name = str(link.link)
            if link.source == "default" and name not in self._unknown and len(self._unknown) < MAX_LINKS:
                self._unknown.add(name)
                log.warning(
                    "%s: no capacity is configured and none was measured yet; starting from %s (source=default). "
                    "Nothing needs to be done: the first transfers show what the link carries",
                    name,
                    format_rate(link.rate_bytes_per_s),
                )

    def _saw_request(self, now_ns: int, request: Request) -> None:
        if request.transfer not in self._asked:
            self._asked[request.transfer] = (now_ns, request.traffic.label)
            if len(self._asked) > MAX_WAITING:
                self._asked.popitem(last=False)

    def _saw_done(self, done: TransferDone) -> None:
        link, traffic = self._label(done.link), done.traffic.label
        self._transfers[link, traffic, "ok" if done.ok else "failed"] += 1
        self._transfer_bytes[link, traffic] += done.nbytes if done.ok else 0
        self._asked.pop(done.transfer, None)

    def _label(self, link: LinkName) -> str:
        name = self._links.get(link)
        if name is None:
            if len(self._links) >= MAX_LINKS:
                return OTHER_LINK
            name = self._links[link] = str(link)
        return name

    def families(self) -> Iterable[MetricFamily]:
        """Everything counted so far."""
        yield counter(
            "proxyd_transfers_total",
            "Transfers that crossed a link and ended, as their senders saw it.",
            [
                ({"link": link, "traffic_class": traffic, "outcome": outcome}, value)
                for (link, traffic, outcome), value in sorted(self._transfers.items())
            ],
        )
        yield counter(
            "proxyd_transfer_bytes_total",
            "Payload bytes of transfers acknowledged end to end.",
            [
                ({"link": link, "traffic_class": traffic}, value)
                for (link, traffic), value in sorted(self._transfer_bytes.items())
            ],
        )
        yield counter("proxyd_denied_total", "Requests that will never be granted.", [({}, self._denied)])
        yield counter("proxyd_sessions_opened_total", "Sessions of agents begun.", [({}, self._sessions_opened)])
        yield counter(
            "proxyd_messages_total",
            "Messages from agents, by kind.",
            [({"kind": kind}, value) for kind, value in sorted(self._messages.items())],
        )
        yield MetricFamily(
            "proxyd_grant_wait_seconds",
            "From a transfer's request until its first granted byte may leave.",
            "histogram",
            [s for traffic, h in sorted(self._waits.items()) for s in h.samples({"traffic_class": traffic})],
        )
