"""Trainers on another host of the site use the agent over TCP: no shared memory, the token speaks for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import proxyd_client
from proxyd.cli.cluster import Cluster
from tests.integration.relay_rig import Counters, alive, content, until

MIB = 1 << 20
SIZES = [0, 1, 64 << 10, (64 << 10) + 1, 3 * MIB, 40 * MIB]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster({"a": 1, "b": 1}, agent={"gateway_listen": "127.0.0.1:0"}) as running:
        yield running


@pytest.fixture
def token(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(cluster.token_file))


def gateway(cluster: Cluster, site: str) -> str:
    return f"tcp://{cluster.agent(site).facts['gateway_address']}"


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(("from_tcp", "to_tcp"), [(True, True), (True, False), (False, True)])
def test_every_size_through_two_agents(cluster: Cluster, from_tcp: bool, to_tcp: bool) -> None:
    counters = Counters(cluster.agent("a"), cluster.agent("b"))
    source = gateway(cluster, "a") if from_tcp else cluster.agent("a").socket
    target = gateway(cluster, "b") if to_tcp else cluster.agent("b").socket
    with (
        proxyd_client.connect("job", 0, socket=source) as one,
        proxyd_client.connect("job", 1, socket=target) as two,
    ):
        handles = [one.isend(content(nbytes, seed), dst=1, tag=2) for seed, nbytes in enumerate(SIZES)]
        for seed, nbytes in enumerate(SIZES):
            out = np.zeros(nbytes, np.uint8)
            assert two.recv_into(out, src=0, tag=2, timeout_s=30) == nbytes
            assert np.array_equal(out, content(nbytes, seed))
        for handle in handles:
            handle.wait(timeout_s=10)
    since = counters.since()
    assert since["received"] == sum(SIZES)
    assert since["fallback"] == 0
    assert alive(cluster)


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(("from_tcp", "to_tcp"), [(True, True), (True, False), (False, True)])
def test_every_size_through_one_agent(cluster: Cluster, from_tcp: bool, to_tcp: bool) -> None:
    place = {True: gateway(cluster, "a"), False: cluster.agent("a").socket}
    with (
        proxyd_client.connect("job", 0, socket=place[from_tcp]) as one,
        proxyd_client.connect("job", 1, socket=place[to_tcp]) as two,
    ):
        for seed, nbytes in enumerate(SIZES):
            handle = one.isend(content(nbytes, seed), dst=1, tag=2)
            out = np.zeros(nbytes, np.uint8)
            two.recv_into(out, src=0, tag=2, timeout_s=30)
            assert np.array_equal(out, content(nbytes, seed))
            handle.wait(timeout_s=10)
    until(lambda: alive(cluster))


def test_without_the_token_nobody_gets_in(cluster: Cluster) -> None:
    with pytest.raises(proxyd_client.ProxydError, match="token"):
        proxyd_client.connect("job", 0, socket=gateway(cluster, "a"), timeout_s=3)
    assert alive(cluster)
