"""A coordinator and its standby, with a lock in a real etcd: who takes over when, and what trainers see of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proxyd.cli.cluster import Cluster, CoordinatorMember, LinkFigures
from proxyd.cli.scrape import scrape
from proxyd.v1 import admin_pb2
from proxyd.v1.admin_pb2_grpc import AdminStub
from tests.e2e.arrivals import Arrivals, received
from tests.e2e.rig import MIB, Net, pattern, until
from tests.fakes.etcd import Etcd, running_etcd

pytest.importorskip("aetcd", reason="needs the ha extra")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]

FIGURES = LinkFigures("80Mbit", "10ms", "1bdp", estimate="fixed")
SLOW = {("a", "b"): FIGURES, ("b", "a"): FIGURES}
SIZE = 12 * MIB
TAKEN_OVER_S = 5.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def pair(start: Callable[..., Net], etcd: Etcd, request: pytest.FixtureRequest) -> Net:
    """Two coordinators named hub, and an agent at each site."""
    lock = f"etcd://{etcd.address}/{request.node.name}"
    net = start(
        links=SLOW,
        coordinators={"one": ("*->*",), "two": ("*->*",)},
        coordinator={"name": "hub", "lock": lock, "lock_ttl": "2s"},
    )
    active, _ = roles(net.cluster)
    # The first holder can't know that there was none before it: for one lease it hands nothing out.
    rate = "proxyd_link_fallback_rate_bytes_per_second"
    until(lambda: scrape(active.metrics).total(rate, link="a->b") > 7_000_000, "agents were told their fallback rates")
    return net


def is_active(member: CoordinatorMember) -> bool:
    return member.process.poll() is None and scrape(member.metrics).total("proxyd_active") == 1


def roles(cluster: Cluster) -> tuple[CoordinatorMember, CoordinatorMember]:
    """(active, standby)."""
    members = list(cluster.coordinators.values())
    (active,) = [member for member in members if is_active(member)]
    (standby,) = [member for member in members if member is not active]
    return active, standby


def fallback(cluster: Cluster) -> float:
    return sum(scrape(agent.metrics).total("proxyd_fallback_bytes_total") for agent in cluster.agents)


def sessions(member: CoordinatorMember) -> float:
    return scrape(member.metrics).total("proxyd_agent_sessions")


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGSTOP"])
def test_the_standby_takes_over_in_five_seconds_and_no_data_waits_for_it(pair: Net, how: str) -> None:
    cluster = pair.cluster
    pair.injects_fault(f"the active coordinator gets {how}")
    active, standby = roles(cluster)
    sender, receiver = pair.pair()
    handles = [sender.isend(pattern(SIZE, 0, number), dst=1, tag=number) for number in range(4)]
    until(lambda: received(cluster) > MIB, "payload is under way")
    with Arrivals(cluster, 4 * SIZE) as arrivals:
        begun_s = time.monotonic()
        active.process.send_signal(getattr(signal, how))
        until(lambda: is_active(standby) and sessions(standby) == 2, "the standby has all agents", 15)
        took_s = time.monotonic() - begun_s
        for number in range(4):
            assert np.array_equal(receiver.recv(src=0, tag=number, timeout_s=30).array, pattern(SIZE, 0, number))
        for handle in handles:
            handle.wait(10)
    # The bar is the idle machine's; a busy one may take half as long again.
    assert took_s <= 1.5 * TAKEN_OVER_S, f"{took_s:.2f} s"
    assert arrivals.longest_stall_s <= 2.0, f"{arrivals.longest_stall_s:.2f} s"
    print(f"\n{how}: taken over in {took_s:.2f} s, longest stall {arrivals.longest_stall_s:.2f} s")
    if how == "SIGSTOP":
        assert fallback(cluster) > 0
        active.process.send_signal(signal.SIGCONT)
        assert active.process.wait(10) == 1, "it ends, to stand by anew"
        assert "the lock is lost" in active.last_words()
    else:
        assert active.process.wait(10) == (0 if how == "SIGTERM" else -9)
    cluster.deaths()
    # From here on all goes under the new one's grants.
    before, granted = fallback(cluster), scrape(standby.metrics).total("proxyd_granted_bytes_total")
    handle = sender.isend(pattern(2 * MIB, 8, 8), dst=1, tag=8)
    assert np.array_equal(receiver.recv(src=0, tag=8, timeout_s=20).array, pattern(2 * MIB, 8, 8))
    handle.wait(10)
    assert fallback(cluster) == before
    assert scrape(standby.metrics).total("proxyd_granted_bytes_total") - granted >= 2 * MIB
    # And the old one comes back as the standby.
    again = cluster.start_coordinator("one" if active is cluster.coordinators["one"] else "two")
    until(lambda: "stands by for hub" in _log_of(cluster, "a-0"), "the agent waits at the standby")
    assert not is_active(again)
    assert is_active(standby)


def _log_of(cluster: Cluster, name: str) -> str:
    return (cluster.directory / f"{name}.log").read_text()


def test_a_standby_says_whom_to_ask(pair: Net) -> None:
    active, standby = roles(pair.cluster)
    states = health_pb2.HealthCheckResponse
    for member, wanted in ((active, states.SERVING), (standby, states.NOT_SERVING)):
        with grpc.insecure_channel(member.address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == wanted
    with grpc.insecure_channel(standby.address) as channel, pytest.raises(grpc.RpcError) as caught:
        AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]
    assert "stands by for hub" in caught.value.details()  # type: ignore[attr-defined]
    assert "127.0.0.1:0" in caught.value.details()  # type: ignore[attr-defined]  # as its `listen` says
    standby.process.send_signal(signal.SIGHUP)
    standby.process.send_signal(signal.SIGTERM)
    assert standby.process.wait(10) == 0, "a standby stops like any daemon"
    pair.injects_fault("the standby ended")
    assert is_active(active)


def test_etcd_that_is_gone_costs_the_coordinator_and_no_data(pair: Net, etcd: Etcd) -> None:
    """Nobody knows then who is active, so nobody is: agents go on at their fallback rates until it is back."""
    cluster = pair.cluster
    pair.injects_fault("etcd is stopped")
    active, standby = roles(cluster)
    sender, receiver = pair.pair()
    handles = [sender.isend(pattern(SIZE, 0, number), dst=1, tag=number) for number in range(3)]
    until(lambda: received(cluster) > MIB, "payload is under way")
    etcd.stop()
    try:
        assert active.process.wait(10) == 1
        cluster.deaths()
        for number in range(3):
            assert np.array_equal(receiver.recv(src=0, tag=number, timeout_s=30).array, pattern(SIZE, 0, number))
        for handle in handles:
            handle.wait(10)
        assert fallback(cluster) > MIB
        assert not is_active(standby)
    finally:
        etcd.go_on()
    until(lambda: is_active(standby) and sessions(standby) == 2, "the standby takes over", 15)
