"""What the workers say of themselves, put together for those who ask the agent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from proxyd.runtime.metrics import MetricFamily, Sample, counter, gauge
from proxyd.v1 import admin_pb2
from proxyd.wire.routing import configured_name, worker_name

WORKER = "worker"
"""The label that tells workers' series apart; the front's own have FRONT."""
FRONT = "front"


class WorkerSeen(NamedTuple):
    """A worker as the front sees it."""

    number: int
    up: bool
    restarts: int
    passed: Mapping[str, int]
    """Connections, by door."""


def families_of(answer: bytes, worker: str) -> list[MetricFamily]:
    """A worker's answer to "metrics", each series labelled with the worker."""
    found = []
    for name, help_text, kind, samples in json.loads(answer):
        full = f"{name}_total" if kind == "counter" else name
        values = [Sample({**labels, WORKER: worker}, value, one.removeprefix(full)) for one, labels, value in samples]
        found.append(MetricFamily(full, help_text, kind, values))
    return found


def worker_families(workers: Iterable[WorkerSeen]) -> list[MetricFamily]:
    """What the front says of the workers."""
    numbered = [({WORKER: str(worker.number)}, worker) for worker in workers]
    return [
        gauge(
            "proxyd_worker_up", "1 while the worker process serves.", [(label, int(one.up)) for label, one in numbered]
        ),
        counter(
            "proxyd_worker_restarts_total",
            "How often the worker process was started again, because it had died.",
            [(label, one.restarts) for label, one in numbered],
        ),
        counter(
            "proxyd_passed_connections_total",
            "Connections that were passed on to the worker, by the door that they came in at.",
            [({**label, "door": door}, count) for label, one in numbered for door, count in one.passed.items()],
        ),
    ]


def labelled(families: Iterable[MetricFamily], worker: str) -> list[MetricFamily]:
    """The same families with the label."""
    return [
        MetricFamily(
            one.name,
            one.help,
            one.type,
            [Sample({**sample.labels, WORKER: worker}, sample.value, sample.suffix) for sample in one.samples],
        )
        for one in families
    ]


def merged_families(parts: Iterable[Iterable[MetricFamily]]) -> list[MetricFamily]:
    """Each family once, with the series of all parts: a scrape may not name one twice."""
    found: dict[str, MetricFamily] = {}
    for part in parts:
        for one in part:
            known = found.get(one.name)
            samples = one.samples if known is None else [*known.samples, *one.samples]
            found[one.name] = MetricFamily(one.name, one.help, one.type, samples)
    return list(found.values())


def merged_status(
    front: admin_pb2.AgentStatusResponse, workers: Mapping[int, admin_pb2.AgentStatusResponse], expected: int
) -> admin_pb2.AgentStatusResponse:
    """One agent's status.

    :param front: what is the front's to say: names, addresses, times.
    :param workers: the answers of those that serve, by number.
    :param expected: how many there are to be. A coordinator counts as connected when all of them have a session.
    """
    told = [workers[number] for number in sorted(workers)]
    whole = admin_pb2.AgentStatusResponse()
    whole.CopyFrom(front)
    whole.draining = bool(told) and all(one.draining for one in told)
    for name in ("held_transfers", "outgoing_transfers", "arriving_transfers"):
        setattr(whole, name, sum(getattr(one, name) for one in told))
    whole.trainers.extend(sorted((t for one in told for t in one.trainers), key=lambda t: (t.job, t.rank)))
    whole.certificate = next((one.certificate for one in told), "")
    whole.congestion_control = next((one.congestion_control for one in told), "")
    for address in dict.fromkeys(session.address for one in told for session in one.coordinators):
        up = sum(session.connected for one in told for session in one.coordinators if session.address == address)
        whole.coordinators.add(address=address, connected=up == expected)
    _merge_peers(whole, told)
    _merge_links(whole, told)
    for number in range(expected):
        if number in workers:
            whole.workers.append(workers[number])
        else:
            missing = whole.workers.add()
            missing.agent.site = front.agent.site
            missing.agent.name = worker_name(front.agent.name, number)
    return whole


def _merge_peers(whole: admin_pb2.AgentStatusResponse, told: Sequence[admin_pb2.AgentStatusResponse]) -> None:
    found: dict[tuple[str, str], admin_pb2.PeerStatus] = {}
    for one in told:
        for peer in one.peers:
            sibling = peer.agent.site == whole.agent.site and configured_name(peer.agent.name) == whole.agent.name
            if sibling and not peer.connected:
                continue  # it is this very agent, and two of its trainers have yet to meet
            known = found.get((peer.agent.site, peer.agent.name))
            if known is None:
                known = found[peer.agent.site, peer.agent.name] = admin_pb2.PeerStatus()
                known.CopyFrom(peer)
                continue
            known.connected = known.connected or peer.connected
            known.streams += peer.streams
            known.delivery_rate_bytes_per_s += peer.delivery_rate_bytes_per_s
            known.rtt_ns = _least(known.rtt_ns, peer.rtt_ns)
            known.path_mtu = _least(known.path_mtu, peer.path_mtu)
    whole.peers.extend(found[name] for name in sorted(found))


def _merge_links(whole: admin_pb2.AgentStatusResponse, told: Sequence[admin_pb2.AgentStatusResponse]) -> None:
    found: dict[tuple[str, str], admin_pb2.AgentLink] = {}
    for one in told:
        for link in one.links:
            name = link.link.src_site, link.link.dst_site
            known = found.get(name)
            if known is None:
                known = found[name] = admin_pb2.AgentLink()
                known.CopyFrom(link)
                continue
            known.fallback = known.fallback or link.fallback
            for figure in ("backlog_bytes", "waiting_transfers", "granted_bytes", "fallback_bytes"):
                setattr(known, figure, getattr(known, figure) + getattr(link, figure))
            # What the coordinator says of the link is the same for all; one may not have heard it yet.
            known.rate_bytes_per_s = known.rate_bytes_per_s or link.rate_bytes_per_s
            known.rtt_ns = known.rtt_ns or link.rtt_ns
            known.source = known.source or link.source
            known.coordinator = known.coordinator or link.coordinator
    whole.links.extend(found[name] for name in sorted(found))


def _least(one: int, other: int) -> int:
    """Of two figures of which 0 means that there is none."""
    return min(one, other) if one and other else one or other


def merged_drain(answers: Sequence[admin_pb2.DrainResponse]) -> admin_pb2.DrainResponse:
    """Of all workers."""
    figures: dict[str, Any] = {
        name: sum(getattr(one, name) for one in answers)
        for name in ("under_way_transfers", "held_transfers", "arriving_transfers")
    }
    return admin_pb2.DrainResponse(draining=all(one.draining for one in answers), **figures)
