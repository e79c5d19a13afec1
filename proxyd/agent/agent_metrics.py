"""What a scrape of an agent shows. Labels name links, classes and states, never transfers, tags or ports."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from proxyd.agent.clients import ClientHub
from proxyd.core.agent import AgentStatus
from proxyd.core.ended import BOUNDS_NS, Ended
from proxyd.runtime.limits import Door
from proxyd.runtime.metrics import JOB, Labels, MetricFamily, Sample, build_info, counter, gauge
from proxyd.wire.envelope import TrafficClass

NO_CONNECTIONS: Mapping[str, int] = {"out": 0, "in": 0}
MAX_LINKS = 12
"""Links with a histogram of their own; the others are added up as ``other``, so that a family stays below the limit."""
OTHER = "other"


def _durations(status: AgentStatus) -> Iterator[Sample]:
    names = {link: str(link) for link in dict.fromkeys(link for link, _, _ in status.ended)}
    named = dict(itertools.islice(names.items(), MAX_LINKS))
    sums: dict[tuple[str, int], list[Ended]] = {}
    for link, traffic, found in status.ended:
        sums.setdefault((named.get(link, OTHER), traffic), []).append(found)
    for (link_name, traffic), ended in sums.items():
        labels = {"link": link_name, "traffic_class": TrafficClass(traffic).label}
        counts = list(itertools.accumulate(map(sum, zip(*(one.counts for one in ended), strict=True))))
        if counts[-1]:
            for bound_ns, count in zip(BOUNDS_NS, counts, strict=False):
                yield Sample({**labels, "le": f"{bound_ns / 1e9:g}"}, count, "_bucket")
            yield Sample({**labels, "le": "+Inf"}, counts[-1], "_bucket")
            yield Sample(labels, counts[-1], "_count")
            yield Sample(labels, sum(one.took_ns for one in ended) / 1e9, "_sum")


def door_families(doors: Sequence[Door]) -> list[MetricFamily]:
    """Who waits at the doors, and who was sent away."""
    return [
        gauge(
            "proxyd_strangers",
            "Connections that have not said who they are.",
            [({"door": door.name}, len(door.room)) for door in doors],
        ),
        counter(
            "proxyd_refused_connections_total",
            "Connections that were refused, or closed before they were known.",
            [({"door": door.name, "reason": reason}, n) for door in doors for reason, n in door.refusals()],
        ),
    ]


def agent_families(
    status: AgentStatus,
    hub: ClientHub,
    coordinators: Iterable[tuple[str, bool]],
    *,
    slow_start_after_idle: bool,
    denied: int = 0,
    doors: Sequence[Door] = (),
    damaged_frames: int = 0,
    connections: Mapping[str, int] = NO_CONNECTIONS,
) -> list[MetricFamily]:
    """One scrape's families.

    :param slow_start_after_idle: the kernel takes TCP's window back during pauses.
    :param denied: messages that a coordinator, or its operator's rules, denied.
    :param connections: data connections by direction, ``out`` and ``in``.
    """
    transfers: list[tuple[Labels, float]] = []
    nbytes: list[tuple[Labels, float]] = []
    for link, traffic, found in status.ended:
        labels = {"link": str(link), "traffic_class": TrafficClass(traffic).label}
        transfers.append(({**labels, "outcome": "ok"}, found.ok))
        transfers.append(({**labels, "outcome": "failed"}, found.failed))
        nbytes.append((labels, found.ok_bytes))
    links = [({"link": str(one.link)}, one) for one in status.links]
    up = sum(connected for _, connected in status.peers)
    peers: list[tuple[Labels, float]] = [({"state": "up"}, up), ({"state": "down"}, len(status.peers) - up)]
    budget, waits = hub.budget, hub.job_waits.all()
    return [
        build_info("agent"),
        counter("proxyd_transfer_bytes_total", "Payload delivered and acknowledged, by sender.", nbytes),
        counter("proxyd_transfers_total", "Messages sent from here that ended.", transfers),
        MetricFamily(
            "proxyd_transfer_seconds",
            "From a trainer's send until the delivery was known here; messages that left this agent.",
            "histogram",
            list(_durations(status)),
        ),
        counter(
            "proxyd_granted_bytes_total",
            "Payload sent under grants.",
            [(labels, one.granted_taken_bytes) for labels, one in links],
        ),
        counter(
            "proxyd_unscheduled_bytes_total",
            "Payload of small messages, sent without a grant.",
            [(labels, one.unscheduled_bytes) for labels, one in links],
        ),
        counter(
            "proxyd_fallback_bytes_total",
            "Payload sent at the fallback rate, because the coordinator was silent.",
            [(labels, one.fallback_bytes) for labels, one in links],
        ),
        counter(
            "proxyd_observed_bytes_total",
            "Payload sent without grants, because the link is only observed.",
            [(labels, one.observed_bytes) for labels, one in links],
        ),
        counter(
            "proxyd_padding_bytes_total",
            "Bytes without meaning, sent under grants to warm connections up.",
            [(labels, one.padding_bytes) for labels, one in links],
        ),
        gauge(
            "proxyd_backlog_bytes",
            "Granted and not yet sent.",
            [(labels, one.backlog_bytes) for labels, one in links],
        ),
        gauge(
            "proxyd_waiting_transfers",
            "Messages that wait for a grant.",
            [(labels, one.waiting_transfers) for labels, one in links],
        ),
        gauge(
            "proxyd_link_fallback",
            "1 while the link's coordinator is silent and messages wait.",
            [(labels, int(one.fallback)) for labels, one in links],
        ),
        counter(
            "proxyd_received_bytes_total", "Payload of peers, in place and verified.", [({}, status.received_bytes)]
        ),
        counter(
            "proxyd_corrupt_chunks_total", "Chunks that failed their checksum here.", [({}, status.corrupt_chunks)]
        ),
        counter("proxyd_denied_total", "Messages denied by a coordinator or its operator's rules.", [({}, denied)]),
        counter("proxyd_resent_chunks_total", "Chunks sent again after a NACK.", [({}, status.resent_chunks)]),
        counter(
            "proxyd_corrupt_frames_total",
            "Frames and headers of peers that failed their checksum here; each ended its connection.",
            [({}, damaged_frames)],
        ),
        counter(
            "proxyd_resumed_transfers_total",
            "Messages that went on after their connection had broken.",
            [({}, status.resumed_transfers)],
        ),
        counter(
            "proxyd_resumed_bytes_total",
            "Payload of those that was at the receiver already, and not sent again.",
            [({}, status.resumed_bytes)],
        ),
        counter(
            "proxyd_client_reconnects_total",
            "Trainers that went on here with what an earlier life of this agent had under way.",
            [({}, status.resumed_clients)],
        ),
        counter(
            "proxyd_announcements_total",
            "How announced messages turned out: as announced, of another size, never posted.",
            [({"outcome": outcome}, count) for outcome, count in status.announced],
        ),
        gauge("proxyd_outgoing_transfers", "Messages sent from here and not yet over.", [({}, status.outgoing)]),
        gauge("proxyd_incoming_transfers", "Messages received here and not yet released.", [({}, status.incoming)]),
        gauge("proxyd_clients", "Attached trainers.", [({}, hub.client_count)]),
        gauge("proxyd_job_clients", "Attached trainers of each job.", [({JOB: name}, n) for name, n, _ in waits]),
        counter(
            "proxyd_job_wait_seconds_total",
            "Time that trainers of a job stood still for messages, as they say.",
            [({JOB: name}, waited_ns / 1e9) for name, _, waited_ns in waits],
        ),
        *door_families(doors),
        counter(
            "proxyd_refused_sends_total",
            "Sends refused because their trainer had too many under way.",
            [({}, hub.refused_sends)],
        ),
        gauge("proxyd_peers", "Peer agents that are wanted.", peers),
        gauge(
            "proxyd_data_connections",
            "Connections that carry payload, to and from peer agents.",
            [({"direction": direction}, count) for direction, count in connections.items()],
        ),
        gauge(
            "proxyd_coordinator_up",
            "1 while the control session stands.",
            [({"coordinator": address}, int(connected)) for address, connected in coordinators],
        ),
        gauge(
            "proxyd_agent_slow_start_after_idle",
            "1 when the kernel shrinks TCP's window during pauses, so that slots begin cold; set "
            "net.ipv4.tcp_slow_start_after_idle = 0.",
            [({}, int(slow_start_after_idle))],
        ),
        gauge(
            "proxyd_arena_bytes",
            "Shared memory promised to arenas, and its cap.",
            [({"kind": "used"}, budget.used_bytes), ({"kind": "limit"}, budget.limit_bytes)],
        ),
        gauge(
            "proxyd_message_bytes",
            "Shared memory that holds messages: those being sent, and those that arrive or are still in use.",
            [({"direction": direction}, total) for direction, total in hub.message_bytes().items()],
        ),
    ]
