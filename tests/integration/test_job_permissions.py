"""What a job may not use it doesn't get, whatever its size and whoever is silent: real daemons over loopback."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest

import proxyd_client
from proxyd.cli.cluster import Cluster
from proxyd.cli.scrape import scrape
from tests.integration.relay_rig import content, endpoints, exchange, until

RULES = """
[[job]]
name = "llama"
links = "a->b"
classes = ["sync", "bulk"]
[[job]]
name = "free"
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster({"a": 1, "b": 1}, coordinator={"jobs": "named"}, coordinator_extra=RULES) as one:
        yield one


def refusal(cluster: Cluster, job: str, src: int, nbytes: int, traffic: str = "sync") -> str:
    """The text of the error that a message of that job from site a (rank 0) or b (rank 1) ends in."""
    with endpoints((cluster.agent("a"), 0), (cluster.agent("b"), 1), job=job) as pair:
        handle = pair[src].isend(np.zeros(nbytes, np.uint8), dst=1 - src, traffic=traffic)
        with pytest.raises(proxyd_client.ProxydError) as caught:
            handle.wait(timeout_s=10)
        return str(caught.value)


@pytest.mark.parametrize("nbytes", [100, 3_000_000])
def test_a_job_gets_its_links_and_classes_and_no_others(cluster: Cluster, nbytes: int) -> None:
    with endpoints((cluster.agent("a"), 0), (cluster.agent("b"), 1), job="free") as (one, two):
        exchange(one, two, content(nbytes, 1), src=0, dst=1, tag=1)
        exchange(two, one, content(nbytes, 2), src=1, dst=0, tag=2)
    assert "may not use link b->a (its [[job]] allows a->b)" in refusal(cluster, "llama", 1, nbytes)
    assert "may not use class pipeline" in refusal(cluster, "llama", 0, nbytes, "pipeline")
    assert "job other is not named" in refusal(cluster, "other", 0, nbytes)
    agents = [cluster.agent("a"), cluster.agent("b")]
    assert [scrape(agent.metrics).total("proxyd_denied_total") for agent in agents] == [2, 1]
    assert "job other is not named" in agents[0].last_words()


def test_what_was_said_last_holds_while_the_coordinator_is_away(cluster: Cluster) -> None:
    with endpoints((cluster.agent("a"), 0), (cluster.agent("b"), 1), job="other") as (one, _other):
        for _ in range(2):
            handle = one.isend(np.zeros(100, np.uint8), dst=1)
            with pytest.raises(proxyd_client.ProxydError, match="job other is not named"):
                handle.wait(timeout_s=10)
            if cluster.coordinator.process.poll() is None:
                cluster.kill(cluster.coordinator, signal.SIGKILL)


def test_a_reload_changes_it_at_once(cluster: Cluster) -> None:
    assert "not named" in refusal(cluster, "other", 0, 100)
    path = cluster.directory / "coordinator.toml"
    path.write_text(path.read_text().replace('jobs = "named"', 'jobs = "any"'))
    cluster.coordinator.process.send_signal(signal.SIGHUP)
    until(lambda: "policy reloaded" in cluster.coordinator.last_words())
    with endpoints((cluster.agent("a"), 4), (cluster.agent("b"), 5), job="other") as (one, two):
        exchange(one, two, content(1000, 1), src=4, dst=5, tag=1)
        exchange(one, two, content(1_000_000, 1), src=4, dst=5, tag=2)
