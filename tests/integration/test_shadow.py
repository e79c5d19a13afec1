"""Shadow mode with real daemons: agents send at once, and the coordinator reckons what it would have granted."""

from __future__ import annotations

import numpy as np

from proxyd.cli.cluster import Cluster, LinkFigures
from proxyd.cli.scrape import scrape
from tests.integration.relay_rig import alive, content, endpoints, until

NBYTES = 4 << 20
ROUNDS = 5


def test_it_moves_every_byte_without_a_grant_and_judges_every_transfer() -> None:
    # Believed: a live estimate would find out that loopback is no such link (tests/sim/test_shadow.py has live ones).
    figures = LinkFigures(capacity="1Gbit", rtt="2ms", buffer="1bdp", estimate="fixed")
    links = {("a", "b"): figures, ("b", "a"): figures}
    with Cluster({"a": 2, "b": 1}, links=links, coordinator={"mode": "observe"}) as cluster:
        places = [(cluster.agent("a", number % 2), number) for number in range(3)]
        with endpoints((cluster.agent("b"), 9), *places) as (receiver, *senders):
            for tag in range(ROUNDS):
                handles = [sender.isend(content(NBYTES, rank), dst=9, tag=tag) for rank, sender in enumerate(senders)]
                for rank in range(3):
                    message = receiver.recv(src=rank, tag=tag, timeout_s=30)
                    assert np.array_equal(message.array, content(NBYTES, rank))
                    del message
                for handle in handles:
                    handle.wait(timeout_s=30)

        def judged(way: str) -> float:
            found = scrape(cluster.coordinator.metrics)
            return found.total("proxyd_shadow_completion_seconds_count", link="a->b", way=way)

        until(lambda: judged("shadow") == ROUNDS * 3)
        found = scrape(cluster.coordinator.metrics)
        assert judged("real") == ROUNDS * 3
        assert found.total("proxyd_grants_total") == 0
        assert found.total("proxyd_link_observed", link="a->b") == 1
        assert found.total("proxyd_transfer_bytes_total", link="a->b") == ROUNDS * 3 * NBYTES
        # Loopback is faster than the 1 Gbit/s that was configured: in the shadow they stand in line, 34 ms each.
        seconds = found.total("proxyd_shadow_completion_seconds_sum", link="a->b", way="shadow") / (ROUNDS * 3)
        assert 0.03 < seconds < ROUNDS * 3 * 0.04
        fallback = sum(scrape(agent.metrics).total("proxyd_fallback_bytes_total") for agent in cluster.agents)
        assert fallback == 0
        assert alive(cluster)
