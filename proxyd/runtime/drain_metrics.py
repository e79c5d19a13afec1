"""Whether a daemon drains, for a scrape; the same two families for agents and coordinators."""

from __future__ import annotations

from proxyd.runtime.metrics import MetricFamily, gauge


def drain_families(*, draining: bool, held: int) -> list[MetricFamily]:
    """Of either daemon."""
    return [
        gauge("proxyd_draining", "1: no new transfer begins here (proxyd drain).", [({}, int(draining))]),
        gauge("proxyd_held_transfers", "Transfers that wait until the draining is over.", [({}, held)]),
    ]
