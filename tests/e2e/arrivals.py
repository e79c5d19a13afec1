"""Whether payload goes on arriving while something else is broken."""

from __future__ import annotations

import threading
import time

from proxyd.cli.cluster import Cluster
from proxyd.cli.scrape import scrape


def received(cluster: Cluster) -> float:
    """Payload that has arrived at agents."""
    return sum(scrape(agent.metrics).total("proxyd_received_bytes_total") for agent in cluster.agents)


class Arrivals:
    """What has arrived, 20 times a second, until everything has."""

    def __init__(self, cluster: Cluster, nbytes: int) -> None:
        self._cluster, self._end = cluster, received(cluster) + nbytes
        self._stop = threading.Event()
        self.longest_stall_s = 0.0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Arrivals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before, moved_s = received(self._cluster), time.monotonic()
        while not self._stop.wait(0.05) and before < self._end:
            now = received(self._cluster)
            self.longest_stall_s = max(self.longest_stall_s, time.monotonic() - moved_s)
            if now > before:
                before, moved_s = now, time.monotonic()
