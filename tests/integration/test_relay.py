"""Messages through two agents and a coordinator: real daemons, real sockets, every byte compared."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import proxyd_client
from proxyd.cli.cluster import Cluster, LinkFigures
from tests.integration.relay_rig import Counters, alive, content, endpoints, exchange, script, until

MIB = 1 << 20
SLOW = LinkFigures(capacity="200Mbit", rtt="10ms", estimate="fixed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster({"a": 1, "b": 1}) as running:
        yield running


@pytest.fixture
def slow() -> Iterator[Cluster]:
    """A link that holds a message long enough to break something in its middle."""
    # A broken connection is waited for; here not for long.
    links = {("a", "b"): SLOW, ("b", "a"): SLOW}
    with Cluster({"a": 1, "b": 1}, links=links, agent={"peer_timeout": "2s"}) as running:
        yield running


def test_every_size_both_ways_under_grants(cluster: Cluster) -> None:
    sizes = [0, 1, 64 << 10, (64 << 10) + 1, 3 * MIB, 300 * MIB]
    there = Counters(cluster.agent("a"), cluster.agent("b"))
    back = Counters(cluster.agent("b"), cluster.agent("a"))
    with endpoints((cluster.agent("a"), 0), (cluster.agent("b"), 1)) as (one, two):
        for seed, nbytes in enumerate(sizes):
            exchange(one, two, content(nbytes, seed), src=0, dst=1, tag=7)
            exchange(two, one, content(nbytes, seed + 100), src=1, dst=0, tag=7)
    small = sum(nbytes for nbytes in sizes if nbytes <= 64 << 10)
    for counters in (there, back):
        assert counters.since() == {
            "granted": sum(sizes) - small,
            "unscheduled": small,
            "fallback": 0,
            "received": sum(sizes),
        }
    assert alive(cluster)


def test_order_within_a_tag_and_freedom_between_tags(cluster: Cluster) -> None:
    with endpoints((cluster.agent("a"), 0), (cluster.agent("b"), 1)) as (one, two):
        handles = [one.isend(content(nbytes, nbytes), dst=1, tag=tag) for tag, nbytes in [(1, 5), (2, 70_000), (3, 9)]]
        for tag, nbytes in [(3, 9), (1, 5), (2, 70_000)]:
            assert np.array_equal(two.recv(src=0, tag=tag, timeout_s=10).array, content(nbytes, nbytes))
        # Whatever the connections do: the large one comes first, as posted.
        sizes = [64 * MIB, 1, 2 * MIB, 0, 300_000, 17]
        handles += [one.isend(content(nbytes, seed), dst=1, tag=9) for seed, nbytes in enumerate(sizes)]
        for seed, nbytes in enumerate(sizes):
            message = two.recv(src=0, tag=9, timeout_s=20)
            assert np.array_equal(message.array, content(nbytes, seed))
        for handle in handles:
            handle.wait(timeout_s=10)


def test_both_directions_at_once(cluster: Cluster) -> None:
    with endpoints((cluster.agent("a"), 0), (cluster.agent("b"), 1)) as (one, two):
        handles = []
        for number in range(8):
            handles.append(one.isend(content(16 * MIB, number), dst=1, tag=number))
            handles.append(two.isend(content(16 * MIB, number + 50), dst=0, tag=number))
        for number in range(8):
            assert np.array_equal(two.recv(src=0, tag=number, timeout_s=30).array, content(16 * MIB, number))
            assert np.array_equal(one.recv(src=1, tag=number, timeout_s=30).array, content(16 * MIB, number + 50))
        for handle in handles:
            handle.wait(timeout_s=10)


def test_more_than_the_eager_budget_waits_for_receives_and_all_arrives(cluster: Cluster) -> None:
    with endpoints((cluster.agent("a"), 0), (cluster.agent("b"), 1)) as (one, two):
        sends: list[proxyd_client.Handle[None]] = []
        poster = threading.Thread(
            target=lambda: sends.extend(one.isend(content(24 * MIB, number), dst=1, tag=0) for number in range(8))
        )
        poster.start()
        time.sleep(0.5)
        for number in range(8):
            out = np.zeros(24 * MIB, np.uint8)
            two.recv_into(out, src=0, tag=0, timeout_s=30)
            assert np.array_equal(out, content(24 * MIB, number))
        poster.join(30)
        for handle in sends:
            handle.wait(timeout_s=10)


def test_an_unknown_destination_is_named_in_bounded_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {"resolve_timeout": "1s"}
    with Cluster({"a": 1}, agent=settings) as cluster, endpoints((cluster.agent("a"), 0)) as (one,):
        began_s = time.monotonic()
        with pytest.raises(proxyd_client.PeerLost, match="job/5") as caught:
            one.isend(b"x" * 100, dst=5, tag=3).wait(timeout_s=10)
        assert 0.9 < time.monotonic() - began_s < 3
        assert caught.value.peer == 5
        assert caught.value.tag == 3


def knows(endpoint: proxyd_client.Endpoint, rank: int) -> bool:
    """Whether a rank is registered, as this endpoint's agent knows."""
    try:
        endpoint.link_state(rank)
    except proxyd_client.ProxydError:
        return False
    return True


def test_the_receiving_agent_dies_in_the_middle(slow: Cluster) -> None:
    with endpoints((slow.agent("a"), 0), (slow.agent("b"), 1)) as (one, two):
        handle = one.isend(content(64 * MIB, 1), dst=1, tag=3)
        receive = two.irecv(src=0, tag=3)
        counters = Counters(slow.agent("a"), slow.agent("b"))
        until(lambda: counters.since()["received"] > 2 * MIB)
        slow.kill(slow.agent("b"))
        began_s = time.monotonic()
        with pytest.raises(proxyd_client.PeerLost) as caught:
            handle.wait(timeout_s=20)
        assert time.monotonic() - began_s < 8
        assert caught.value.peer == 1
        assert caught.value.tag == 3
        with pytest.raises(proxyd_client.ProxydError):
            receive.wait(timeout_s=5)
        two.close(linger_s=0)
        slow.restart_agent("b")
        with endpoints((slow.agent("b"), 1)) as (again,):
            exchange(one, again, content(2 * MIB, 4), src=0, dst=1, tag=3)


def test_the_sending_agent_dies_in_the_middle(slow: Cluster) -> None:
    with endpoints((slow.agent("a"), 0), (slow.agent("b"), 1)) as (one, two):
        handle = one.isend(content(64 * MIB, 1), dst=1, tag=3)
        receive = two.irecv(src=0, tag=3)
        counters = Counters(slow.agent("a"), slow.agent("b"))
        until(lambda: counters.since()["received"] > 2 * MIB)
        slow.kill(slow.agent("a"))
        with pytest.raises(proxyd_client.PeerLost):
            receive.wait(timeout_s=8)
        with pytest.raises(proxyd_client.AgentUnavailable):
            handle.wait(timeout_s=5)
        one.close(linger_s=0)
        slow.restart_agent("a")
        slow.await_sessions()
        with endpoints((slow.agent("a"), 0)) as (again,):
            until(lambda: knows(two, 0))
            exchange(again, two, content(2 * MIB, 4), src=0, dst=1, tag=3)


SENDER = """
import sys, time, numpy as np, proxyd_client
ep = proxyd_client.connect("job", 0, socket=sys.argv[1])
ep.isend(np.arange(64 << 20, dtype=np.uint8), dst=1, tag=3)
print("sent", flush=True)
time.sleep(60)
"""


def test_the_sending_trainer_is_killed_in_the_middle(slow: Cluster) -> None:
    with endpoints((slow.agent("b"), 1)) as (two,):
        receive = two.irecv(src=0, tag=3)
        with script(SENDER, slow.agent("a").socket) as sender:
            assert sender.stdout is not None
            assert sender.stdout.readline() == b"sent\n"
            counters = Counters(slow.agent("a"), slow.agent("b"))
            until(lambda: counters.since()["received"] > 2 * MIB)
            sender.send_signal(signal.SIGKILL)
            began_s = time.monotonic()
            with pytest.raises(proxyd_client.PeerLost) as caught:
                receive.wait(timeout_s=20)
        assert time.monotonic() - began_s < 3
        assert caught.value.bytes_done > 0
        with endpoints((slow.agent("a"), 0)) as (again,):
            exchange(again, two, content(2 * MIB, 4), src=0, dst=1, tag=3)
    assert alive(slow)


RECEIVER = """
import sys, time, proxyd_client
ep = proxyd_client.connect("job", 1, socket=sys.argv[1])
handle = ep.irecv(src=0, tag=3)
print("posted", flush=True)
time.sleep(60)
"""


def test_the_receiving_trainer_is_killed_in_the_middle(slow: Cluster) -> None:
    with endpoints((slow.agent("a"), 0)) as (one,):
        with script(RECEIVER, slow.agent("b").socket) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == b"posted\n"
            handle = one.isend(content(64 * MIB, 1), dst=1, tag=3)
            counters = Counters(slow.agent("a"), slow.agent("b"))
            until(lambda: counters.since()["received"] > 2 * MIB)
            receiver.send_signal(signal.SIGKILL)
            began_s = time.monotonic()
            with pytest.raises(proxyd_client.PeerLost):
                handle.wait(timeout_s=20)
        assert time.monotonic() - began_s < 3
        with endpoints((slow.agent("b"), 1)) as (again,):
            exchange(one, again, content(2 * MIB, 4), src=0, dst=1, tag=3)
    assert alive(slow)


def test_an_agent_that_is_asked_to_stop_says_so_and_exits_with_0(slow: Cluster) -> None:
    with endpoints((slow.agent("a"), 0), (slow.agent("b"), 1)) as (one, two):
        handle = one.isend(content(64 * MIB, 1), dst=1, tag=3)
        receive = two.irecv(src=0, tag=3)
        counters = Counters(slow.agent("a"), slow.agent("b"))
        until(lambda: counters.since()["received"] > MIB)
        began_s = time.monotonic()
        assert slow.kill(slow.agent("a"), signal.SIGTERM) == 0
        assert time.monotonic() - began_s < 3
        with pytest.raises(proxyd_client.ProxydError, match="stops"):
            handle.wait(timeout_s=5)
        with pytest.raises(proxyd_client.ProxydError, match=r"stops|cancelled|ended"):
            receive.wait(timeout_s=5)
