"""Reading a daemon's metrics, as Prometheus would."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 5.0


class Scrape:
    """All samples of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def _matching(self, name: str, labels: dict[str, str]) -> Iterator[float]:
        for found, has, value in self._samples:
            if found == name and labels.items() <= has.items():
                yield value

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of ``name`` that have these labels (and maybe more); 0 when there is none."""
        return sum(self._matching(name, labels))

    def names(self) -> set[str]:
        """Every sample name."""
        return {name for name, _, _ in self._samples}

    def series(self) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        """Every series: its name and labels."""
        return {(name, frozenset(labels.items())) for name, labels, _ in self._samples}


def scrape(url: str) -> Scrape:
    """Fetch and parse. Raises OSError when nobody answers."""
    # No proxy from the environment: these are loopback addresses.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=TIMEOUT_S) as response:
        return Scrape(response.read().decode())
