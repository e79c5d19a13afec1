"""What shadow mode found, as metrics: both ways side by side, told apart by the label ``way``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from proxyd.core.coordinator_status import LinkStatus
from proxyd.core.shadow import STEPS, Distribution, ShadowStatus, bound_ns
from proxyd.runtime.metrics import Labels, MetricFamily, Sample, counter, gauge

MAX_LINKS = 7
"""Observed links with series of their own; the others are added up as ``other``, so that a family stays readable."""
OTHER = "other"
BOUNDS = range(0, 16 * STEPS + 1, STEPS)
"""Every doubling from 1 ms to 65 s."""

_Gauge = tuple[str, str, Callable[[ShadowStatus], int]]
GAUGES: tuple[_Gauge, ...] = (
    ("proxyd_shadow_open_transfers", "Transfers under way on an observed link.", lambda found: found.open),
    (
        "proxyd_shadow_behind_transfers",
        "Transfers of an observed link that have ended, and would not have ended yet under grants.",
        lambda found: found.behind,
    ),
)


def shadow_families(links: Sequence[LinkStatus]) -> Iterable[MetricFamily]:
    """The families of shadow mode; without series where no link is observed."""
    observed = [(link.link, link.shadow) for link in links if link.shadow is not None]
    named = [(str(name) if place < MAX_LINKS else OTHER, found) for place, (name, found) in enumerate(observed)]
    yield gauge(
        "proxyd_link_observed",
        "1 where the link is only observed, 0 where grants are given.",
        [({"link": str(link.link)}, int(link.shadow is not None)) for link in links],
    )
    yield MetricFamily(
        "proxyd_shadow_completion_seconds",
        "Request until end, of transfers on observed links: as it was (real), and as it would have been (shadow).",
        "histogram",
        [
            sample
            for (link, traffic, way), found in sorted(_completions(named).items())
            for sample in _samples(found, {"link": link, "traffic_class": traffic, "way": way})
        ],
    )
    yield MetricFamily(
        "proxyd_shadow_wait_seconds",
        "Request until the first granted byte would have left, of transfers on observed links.",
        "histogram",
        [
            sample
            for (link, traffic), found in sorted(_waits(named).items())
            for sample in _samples(found, {"link": link, "traffic_class": traffic})
        ],
    )
    yield MetricFamily(
        "proxyd_shadow_queue_seconds",
        "Queueing delay in front of an observed link at each report: as it was, and as it would have been.",
        "histogram",
        [
            sample
            for (link, way), found in sorted(_queues(named).items())
            for sample in _samples(found, {"link": link, "way": way})
        ],
    )
    for name, text, read in GAUGES:
        yield gauge(name, text, _sums((link, read(found)) for link, found in named))
    yield counter(
        "proxyd_shadow_abandoned_total",
        "Transfers of observed links that were not judged because the shadow was too far behind.",
        _sums((link, found.abandoned) for link, found in named),
    )


def _sums(values: Iterable[tuple[str, int]]) -> list[tuple[Labels, float]]:
    sums: dict[str, int] = {}
    for link, value in values:
        sums[link] = sums.get(link, 0) + value
    return [({"link": link}, value) for link, value in sums.items()]


def _completions(named: Iterable[tuple[str, ShadowStatus]]) -> dict[tuple[str, str, str], Distribution]:
    sums: dict[tuple[str, str, str], Distribution] = {}
    for link, status in named:
        for one in status.classes:
            for way, found in (("real", one.real), ("shadow", one.shadow)):
                sums.setdefault((link, one.traffic.label, way), Distribution()).merge(found)
    return sums


def _waits(named: Iterable[tuple[str, ShadowStatus]]) -> dict[tuple[str, str], Distribution]:
    sums: dict[tuple[str, str], Distribution] = {}
    for link, status in named:
        for one in status.classes:
            sums.setdefault((link, one.traffic.label), Distribution()).merge(one.wait)
    return sums


def _queues(named: Iterable[tuple[str, ShadowStatus]]) -> dict[tuple[str, str], Distribution]:
    sums: dict[tuple[str, str], Distribution] = {}
    for link, status in named:
        for way, found in (("real", status.real_queue), ("shadow", status.shadow_queue)):
            sums.setdefault((link, way), Distribution()).merge(found)
    return sums


def _samples(found: Distribution, labels: Labels) -> Iterator[Sample]:
    """As Prometheus wants it; its bounds are some of the distribution's own, so nothing is estimated."""
    cumulative = list(itertools.accumulate(found.counts))
    for place in BOUNDS:
        yield Sample({**labels, "le": f"{bound_ns(place) / 1e9:g}"}, cumulative[place], "_bucket")
    yield Sample({**labels, "le": "+Inf"}, found.count, "_bucket")
    yield Sample(labels, found.count, "_count")
    yield Sample(labels, found.sum_ns / 1e9, "_sum")
