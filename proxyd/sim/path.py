"""A way through several queues: a site's access line, the link between the sites, the other site's access line.

Links that leave one site share its egress, those that come into one its ingress. What a queue drops further on is known
only when the segment has got there; a flight's ``passed_bytes`` is then corrected, and its sender finds the loss from
later acknowledgements, as from any other.
"""

from __future__ import annotations

from collections.abc import Callable

from proxyd.sim.link import Link, LinkModel
from proxyd.sim.tcp import Flight


class Path:
    """Links one behind the other, as a stream's port. ``model`` is the link's between the sites."""

    def __init__(self, model: LinkModel, hops: list[Link]) -> None:
        self.model = model
        self._hops = hops

    def send(self, payload_bytes: int, arrive: Callable[[Flight], object], flight: Flight) -> int:
        """Put a segment on the way; answers what its first queue takes."""
        return self._hop(0, payload_bytes, arrive, flight)

    def _hop(self, place: int, payload_bytes: int, arrive: Callable[[Flight], object], flight: Flight) -> int:
        hop = self._hops[place]
        if place + 1 == len(self._hops):
            return hop.send(payload_bytes, arrive, flight)
        return hop.send(payload_bytes, self._on, place + 1, arrive, flight)

    def _on(self, place: int, arrive: Callable[[Flight], object], flight: Flight) -> None:
        flight.passed_bytes = self._hop(place, flight.passed_bytes, arrive, flight)
