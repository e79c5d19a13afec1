"""Who could not prove who he is, counted by port and kind of proof. Labels are from two short lists, whatever comes in.

(What else strangers are turned away for, each listener counts itself: :mod:`proxyd.runtime.limits`.)
"""

from __future__ import annotations

from proxyd.runtime.metrics import Labels, MetricFamily, counter

PORTS = ("control", "data", "client")
PROOFS = (
    "certificate",
    "certificate_expired",
    "certificate_foreign",
    "certificate_missing",
    "certificate_name",
    "job_token",
    "tls",
    "token",
)
"""``certificate`` and ``tls`` are what no other name fits; ``certificate_name``: a good one, of somebody else."""


class Refusals:
    """Counts of one daemon."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, port: str, proof: str) -> None:
        """One more. Raises ValueError for a label that is not in the lists: that is a bug of ours."""
        if port not in PORTS or proof not in PROOFS:
            raise ValueError(f"no such refusal: {port}, {proof}")
        self._counts[port, proof] = self._counts.get((port, proof), 0) + 1

    def count(self, port: str, proof: str) -> int:
        """So far."""
        return self._counts.get((port, proof), 0)

    def families(self) -> list[MetricFamily]:
        """For a scrape."""
        samples: list[tuple[Labels, float]] = [
            ({"port": port, "proof": proof}, number) for (port, proof), number in sorted(self._counts.items())
        ]
        return [
            counter(
                "proxyd_failed_proofs_total", "Connections that were refused for their certificate or token.", samples
            )
        ]
