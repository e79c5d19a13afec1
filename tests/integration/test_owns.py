"""`owns`: several coordinators, each with links of its own, as processes. Each one's counters say what it granted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import proxyd_client
from proxyd.cli.cluster import AgentMember, Cluster, CoordinatorMember, LinkFigures
from proxyd.cli.scrape import scrape

MIB = 1 << 20
SLOW = LinkFigures(capacity="200Mbit", rtt="10ms", estimate="fixed")
LINKS = {("a", "b"): SLOW, ("b", "a"): SLOW}
PER_SITE = {"left": ["a->*"], "right": ["b->*"]}
AB, BA = "a->b", "b->a"


def content(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Different for every seed and at every place."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.view(np.uint8)[:nbytes].copy()


def granted(member: CoordinatorMember | AgentMember, link: str) -> float:
    """By a coordinator, or used by an agent."""
    return scrape(member.metrics).total("proxyd_granted_bytes_total", link=link)


def fallback(agent: AgentMember) -> float:
    return scrape(agent.metrics).total("proxyd_fallback_bytes_total")


def until(condition: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Seconds until it was so."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - begun_s


@contextlib.contextmanager
def trainers(cluster: Cluster) -> Iterator[dict[int, proxyd_client.Endpoint]]:
    """Rank 0 at site a, rank 1 at site b."""
    with (
        proxyd_client.connect("job", 0, socket=cluster.agent("a").socket) as left,
        proxyd_client.connect("job", 1, socket=cluster.agent("b").socket) as right,
    ):
        yield {0: left, 1: right}


class Flow:
    """One direction, message after message, on two threads, each byte compared."""

    def __init__(self, ends: dict[int, proxyd_client.Endpoint], src: int, nbytes: int = 2 * MIB) -> None:
        self.sent = self.received = 0
        self.longest_s = 0.0
        self.error: BaseException | None = None
        self._nbytes = nbytes
        self._stop = threading.Event()
        self._ends, self._src, self._dst = ends, src, 1 - src
        self._threads = [threading.Thread(target=self._guard, args=(run,)) for run in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except (proxyd_client.ProxydError, AssertionError) as error:
            self.error = self.error or error
            self._stop.set()

    def _send(self) -> None:
        under_way: list[proxyd_client.Handle[None]] = []
        while not self._stop.is_set():
            under_way.append(self._ends[self._src].isend(content(self._nbytes, self.sent), dst=self._dst, tag=5))
            self.sent += 1
            if len(under_way) > 2:
                under_way.pop(0).wait(timeout_s=20)
        for handle in under_way:
            handle.wait(timeout_s=20)

    def _receive(self) -> None:
        while not self._stop.is_set() or self.received < self.sent:
            begun_s = time.monotonic()
            message = self._ends[self._dst].recv(src=self._src, tag=5, timeout_s=20)
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            assert np.array_equal(message.array, content(self._nbytes, self.received)), f"message {self.received}"
            self.received += 1

    def end(self) -> None:
        """Wait for all that was sent. Raises what a thread died of."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        if self.error is not None:
            raise self.error
        assert not any(thread.is_alive() for thread in self._threads), "it hangs"
        assert self.received == self.sent


@contextlib.contextmanager
def flow(ends: dict[int, proxyd_client.Endpoint], src: int) -> Iterator[Flow]:
    one = Flow(ends, src)
    try:
        yield one
    finally:
        one.end()


@pytest.fixture
def per_site() -> Iterator[Cluster]:
    with Cluster({"a": 1, "b": 1}, links=LINKS, coordinators=PER_SITE) as cluster:
        yield cluster
        assert not cluster.deaths()


def test_each_coordinator_grants_on_its_own_links_only(per_site: Cluster) -> None:
    left, right = per_site.coordinators["left"], per_site.coordinators["right"]
    assert per_site.coordinator is left
    with trainers(per_site) as ends, flow(ends, 0) as there, flow(ends, 1) as back:
        until(lambda: min(there.received, back.received) >= 6, "six messages each way", 20)
        for coordinator in (left, right):
            seen = scrape(coordinator.metrics)
            assert seen.total("proxyd_agent_sessions") == 2, "agents have a session with each"
            assert seen.total("proxyd_endpoints") == 2, "trainers are registered with each"
    # One reads what was granted in all, the other what a link has: nothing else may have been granted.
    for coordinator, link, nbytes in ((left, AB, there.sent * 2 * MIB), (right, BA, back.sent * 2 * MIB)):
        assert granted(coordinator, link) == nbytes
        assert scrape(coordinator.metrics).total("proxyd_granted_bytes_total") == nbytes
        assert scrape(coordinator.metrics).total("proxyd_window_violations_total") == 0
        assert scrape(coordinator.metrics).total("proxyd_denied_total") == 0
    for site, link, nbytes in (("a", AB, there.sent * 2 * MIB), ("b", BA, back.sent * 2 * MIB)):
        assert granted(per_site.agent(site), link) == nbytes
        assert fallback(per_site.agent(site)) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_when_one_dies_its_link_falls_back_and_the_others_do_not_notice(per_site: Cluster, how: signal.Signals) -> None:
    left, right = per_site.coordinators["left"], per_site.coordinators["right"]
    a, b = per_site.agent("a"), per_site.agent("b")
    with trainers(per_site) as ends, flow(ends, 0) as there, flow(ends, 1) as back:
        until(lambda: min(there.received, back.received) >= 3, "three messages each way", 20)
        back.longest_s = 0.0
        if how == signal.SIGKILL:
            per_site.kill(left)
        else:
            left.process.send_signal(how)
        silent_s = until(lambda: fallback(a) > 0, "a->b at the fallback rate", 5)
        assert 0.3 < silent_s < 2, "half a second after the last beat, which may be 0.15 s old"
        before = there.received, back.received, granted(right, BA)
        until(lambda: there.received >= before[0] + 5, "a->b goes on without its coordinator", 10)
        until(lambda: back.received >= before[1] + 5, "b->a goes on as before", 2)
        assert granted(right, BA) >= before[2] + 4 * 2 * MIB
        assert fallback(b) == 0
        assert back.longest_s < 1.5, "nobody there waited for the coordinator that is away"

        if how == signal.SIGKILL:
            left = per_site.start_coordinator("left")
            assert granted(left, AB) == 0
        used = granted(a, AB)
        if how == signal.SIGSTOP:
            left.process.send_signal(signal.SIGCONT)
        until(lambda: granted(a, AB) > used + MIB, "fresh grants on a->b", 5)
        until(lambda: scrape(a.metrics).total("proxyd_link_fallback") == 0, "the fallback has ended", 2)
        own = fallback(a)
        before = there.received, back.received, 0.0
        until(lambda: there.received >= before[0] + 4, "a->b under grants again", 10)
        assert fallback(a) - own <= 2 * MIB, "a slice that was under way, and no more"
    assert fallback(b) == 0
    assert scrape(right.metrics).total("proxyd_granted_bytes_total") == back.sent * 2 * MIB
    assert scrape(left.metrics).total("proxyd_granted_bytes_total", link=BA) == 0


def test_a_link_that_nobody_owns_is_a_clear_error() -> None:
    with (
        Cluster({"a": 1, "b": 1}, coordinators={"left": ["a->*"]}, agent={"resolve_timeout": "1500ms"}) as cluster,
        trainers(cluster) as ends,
    ):
        begun_s = time.monotonic()
        handle = ends[1].isend(content(MIB, 1), dst=0, tag=1)
        with pytest.raises(proxyd_client.TransferFailed) as caught:
            handle.wait(timeout_s=10)
        assert 1.4 < time.monotonic() - begun_s < 5
        text = str(caught.value)
        assert f"no coordinator owns {BA}" in text
        assert f"{cluster.coordinator_socket} owns a->*" in text
        # After it the next message is right: one that needs no grant, and one on the link that has an owner.
        for src, nbytes in ((1, 60_000), (0, MIB)):
            handle = ends[src].isend(content(nbytes, src), dst=1 - src, tag=2)
            assert np.array_equal(ends[1 - src].recv(src=src, tag=2, timeout_s=10).array, content(nbytes, src))
            handle.wait(timeout_s=10)
        assert not cluster.deaths()


def test_of_two_that_own_a_link_each_agent_asks_the_one_that_it_has_first(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    turned = [f"unix:{directory / name}.sock" for name in ("second", "first")]
    with (
        Cluster(
            {"a": 1, "b": 1},
            coordinators={"first": ["*->*"], "second": ["*->b", "b->*"]},
            each_agent={("b", 0): {"coordinators": turned}},
            directory=directory,
        ) as cluster,
        trainers(cluster) as ends,
    ):
        for src in (0, 1):
            handle = ends[src].isend(content(3 * MIB, src), dst=1 - src, tag=1)
            assert np.array_equal(ends[1 - src].recv(src=src, tag=1, timeout_s=10).array, content(3 * MIB, src))
            handle.wait(timeout_s=10)
        for name, link, other in (("first", AB, BA), ("second", BA, AB)):
            # At least: padding that warms fresh connections is granted too.
            assert granted(cluster.coordinators[name], link) >= 3 * MIB
            assert granted(cluster.coordinators[name], other) == 0
        assert not cluster.deaths()


def test_dev_with_a_coordinator_per_site(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "proxyd.cli.main", "dev", "--coordinator-per-site", "--ready-file", str(ready)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: ready.exists() or process.poll() is not None, "dev is ready", 30)
        assert process.poll() is None, process.communicate()[0]
        facts = json.loads(ready.read_text())
        assert set(facts) == {"coordinator", "coordinators", "agents"}
        assert set(facts["coordinator"]) == {"address", "pid", "metrics"}
        first = facts["coordinators"][0]
        assert facts["coordinator"] == {key: first[key] for key in ("address", "pid", "metrics")}
        assert [(one["name"], one["owns"]) for one in facts["coordinators"]] == [
            ("coordinator-a", ["a->*"]),
            ("coordinator-b", ["b->*"]),
        ]
        for one in facts["coordinators"]:
            assert scrape(one["metrics"]).total("proxyd_agent_sessions") == 2
        for agent in facts["agents"]:
            assert scrape(agent["metrics"]).total("proxyd_coordinator_up") == 2
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 0, output
    assert "owns a->*" in output
    for one in [*facts["coordinators"], *facts["agents"]]:
        with pytest.raises(ProcessLookupError):
            os.kill(one["pid"], 0)
