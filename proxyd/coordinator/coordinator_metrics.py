"""The coordinator's metrics: the machine's status and the observer's counts, as families."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from proxyd.coordinator.observer import Observer
from proxyd.coordinator.servicer import REFUSALS, SessionServicer
from proxyd.coordinator.shadow_metrics import shadow_families
from proxyd.core.coordinator_status import CoordinatorStatus, LinkStatus
from proxyd.core.sharing import BottleneckStatus
from proxyd.runtime.metrics import JOB, MetricFamily, build_info, counter, gauge

_Read = Callable[[LinkStatus], float]
SOURCES = ("configured", "default", "estimated", "policed")

LINK_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("proxyd_grants_total", "Grants issued.", lambda link: link.totals.grants),
    ("proxyd_granted_bytes_total", "Payload bytes granted.", lambda link: link.totals.granted_bytes),
    ("proxyd_returned_bytes_total", "Granted bytes that came back unspent.", lambda link: link.totals.returned_bytes),
    (
        "proxyd_delivered_bytes_total",
        "Granted payload bytes acknowledged by TCP.",
        lambda link: link.totals.delivered_bytes,
    ),
    (
        "proxyd_fallback_bytes_total",
        "Payload bytes sent without a grant, while the coordinator was silent.",
        lambda link: link.totals.fallback_bytes,
    ),
    (
        "proxyd_unscheduled_bytes_total",
        "Payload bytes of small messages, sent at once.",
        lambda link: link.totals.unscheduled_bytes,
    ),
    ("proxyd_retransmitted_segments_total", "TCP segments sent again.", lambda link: link.totals.retransmits),
    (
        "proxyd_handovers_total",
        "Times that the link passed from one sender to another.",
        lambda link: link.totals.handovers,
    ),
    (
        "proxyd_window_violations_total",
        "Times that outstanding grants exceeded the window; always 0, or it is a bug.",
        lambda link: link.window_violations,
    ),
)

LINK_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    (
        "proxyd_link_rate_bytes_per_second",
        "Payload rate that may be granted in all.",
        lambda link: link.pace_bytes_per_s,
    ),
    (
        "proxyd_link_estimate_bytes_per_second",
        "Payload rate that the link's bottleneck is believed to carry.",
        lambda link: link.bottleneck_bytes_per_s,
    ),
    (
        "proxyd_link_estimate_age_seconds",
        "Since the estimate was last confirmed; 0 for a configured one.",
        lambda link: link.estimate_age_ns / 1e9,
    ),
    (
        "proxyd_link_segment_bytes",
        "Payload of a full packet, to turn segments into bytes.",
        lambda link: link.segment_bytes,
    ),
    (
        "proxyd_link_granted_rate_bytes_per_second",
        "Payload rate that is granted now.",
        lambda link: link.granted_rate_bytes_per_s,
    ),
    (
        "proxyd_link_window_bytes",
        "Most bytes that may be granted and not yet delivered.",
        lambda link: link.window_bytes,
    ),
    ("proxyd_link_outstanding_bytes", "Bytes granted and not yet delivered.", lambda link: link.outstanding_bytes),
    (
        "proxyd_link_limit_bytes_per_second",
        "Payload rate that the policy allows now; 0: no limit.",
        lambda link: link.limit_bytes_per_s,
    ),
    ("proxyd_link_rtt_seconds", "Smallest round trip seen.", lambda link: link.rtt_ns / 1e9),
    ("proxyd_link_queue_seconds", "Queueing delay in the network.", lambda link: link.queue_ns / 1e9),
    ("proxyd_link_buffer_bytes", "Buffer in front of the link; 0: not known.", lambda link: link.buffer_bytes),
    ("proxyd_link_waiting_transfers", "Transfers that wait for grants.", lambda link: link.waiting),
    ("proxyd_link_waiting_bytes", "Bytes that wait for grants.", lambda link: link.waiting_bytes),
    ("proxyd_link_lanes", "Agents that hold grants.", lambda link: sum(1 for lane in link.lanes if not lane.ended)),
    (
        "proxyd_link_fallback_rate_bytes_per_second",
        "Rate that agents may use by themselves when this coordinator falls silent.",
        lambda link: link.fallback_bytes_per_s,
    ),
)

BOTTLENECK_GAUGES: tuple[tuple[str, str, Callable[[BottleneckStatus], float]], ...] = (
    (
        "proxyd_bottleneck_rate_bytes_per_second",
        "Payload rate that may be granted over all links of a shared line.",
        lambda line: line.pace_bytes_per_s,
    ),
    (
        "proxyd_bottleneck_granted_rate_bytes_per_second",
        "Payload rate that is granted over all links of a shared line now.",
        lambda line: line.granted_bytes_per_s,
    ),
    (
        "proxyd_bottleneck_window_bytes",
        "Most bytes that may be granted over them and not yet delivered.",
        lambda line: line.window_bytes,
    ),
    (
        "proxyd_bottleneck_outstanding_bytes",
        "Bytes granted over them and not yet delivered.",
        lambda line: line.outstanding_bytes,
    ),
)


def standby_families() -> Iterable[MetricFamily]:
    """Those of a coordinator that has no machine yet."""
    yield build_info("coordinator")
    yield _active(0)


def _active(value: int) -> MetricFamily:
    return gauge("proxyd_active", "1 while this coordinator grants, 0 while it stands by for another.", [({}, value)])


def coordinator_families(status: CoordinatorStatus, observer: Observer) -> Iterable[MetricFamily]:
    """All of the coordinator's families."""
    yield build_info("coordinator")
    yield _active(1)
    yield gauge("proxyd_epoch", "Life of this coordinator; rises at each start.", [({}, status.epoch)])
    yield gauge("proxyd_agent_sessions", "Agents with an open session.", [({}, len(status.agents))])
    yield gauge("proxyd_endpoints", "Trainers registered.", [({}, len(status.endpoints))])
    yield counter("proxyd_protocol_errors_total", "Sessions that broke the protocol.", [({}, status.protocol_errors)])
    for name, text, read in LINK_COUNTERS:
        yield counter(name, text, [({"link": str(link.link)}, read(link)) for link in status.links])
    for name, text, read in LINK_GAUGES:
        yield gauge(name, text, [({"link": str(link.link)}, read(link)) for link in status.links])
    for name, text, of in BOTTLENECK_GAUGES:
        yield gauge(name, text, [({"bottleneck": line.name}, of(line)) for line in status.bottlenecks])
    yield counter(
        "proxyd_bottleneck_window_violations_total",
        "Times that outstanding grants exceeded a shared line's window; always 0, or it is a bug.",
        [({"bottleneck": line.name}, line.window_violations) for line in status.bottlenecks],
    )
    yield gauge(
        "proxyd_link_source",
        "1 for where the link's estimate comes from now, 0 for the other sources.",
        [
            ({"link": str(link.link), "source": source}, int(link.source == source))
            for link in status.links
            for source in SOURCES
        ],
    )
    yield counter(
        "proxyd_job_granted_bytes_total",
        "Payload bytes granted to each job.",
        [({"link": str(link.link), JOB: job.name}, job.granted_bytes) for link in status.links for job in link.jobs],
    )
    yield gauge(
        "proxyd_job_waiting_bytes",
        "Bytes of each job that wait for grants.",
        [({"link": str(link.link), JOB: job.name}, job.waiting_bytes) for link in status.links for job in link.jobs],
    )
    yield from shadow_families(status.links)
    yield from observer.families()


def session_families(servicer: SessionServicer) -> Iterable[MetricFamily]:
    """What stands in front of the machine: sessions that have not said who they are."""
    yield gauge("proxyd_strangers", "Sessions that have not said who they are.", [({}, len(servicer.strangers))])
    yield counter(
        "proxyd_refused_sessions_total",
        "Sessions that were refused, or cut off because they took nothing.",
        [({"reason": reason}, servicer.refused[reason]) for reason in REFUSALS],
    )
