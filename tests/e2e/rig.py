"""What the end-to-end tests share: a cluster of real daemons, endpoints whose messages are counted, and the proof.

Positive proof, always: a test that moves data asserts at its end, from the daemons' own counters, that exactly these
bytes were sent by one agent, taken in by another, and, where they cross between sites, that every byte of a message
above the unscheduled limit went out under a coordinator's grant and none at the fallback rate.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import proxyd_client
from proxyd.cli.cluster import AgentMember, Cluster, Member
from proxyd.cli.scrape import scrape
from proxyd_client import Endpoint, Handle

KIB, MIB = 1 << 10, 1 << 20
UNSCHEDULED_BYTES = 64 * KIB
"""Messages up to this size ask for no grant."""

STOP_TIMEOUT_S = 5.0

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


def pattern(nbytes: int, sender: int = 0, number: int = 0) -> Bytes:
    """Content that no other sender or message has at any place: a counter times an odd number, per 8 bytes."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15 ^ (sender << 40) ^ (number << 17) | 1)
    words += np.uint64(sender * 1_000_003 + number)
    return words.view(np.uint8)[:nbytes]


def until(condition: Callable[[], T], what: str, timeout_s: float = 10.0) -> T:
    """Poll until ``condition()`` is true; its value. A hang is a failure with words."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {timeout_s:g} s: {what}")
        time.sleep(0.01)
    return value


@dataclasses.dataclass(frozen=True)
class Counters:
    """What the daemons of a cluster have counted so far; agents' values are sums over agents."""

    transferred: dict[str, float]
    """Per link: payload acknowledged, as the senders count it."""
    taken: dict[str, float]
    """Per link: payload sent under grants."""
    unscheduled: dict[str, float]
    fallback: float
    received: float
    """Payload that arrived at an agent from another one, verified."""
    corrupt: float
    granted: dict[str, float]
    """Per link: payload granted, as the coordinator counts it."""
    violations: float

    @staticmethod
    def of(cluster: Cluster) -> Counters:
        """Scrape everybody who lives."""
        agents = [scrape(agent.metrics) for agent in cluster.agents if agent.process.poll() is None]
        coordinator = scrape(cluster.coordinator.metrics)
        sites = list(cluster.sites)
        links = [f"{a}->{b}" for a in sites for b in sites]

        def per_link(name: str) -> dict[str, float]:
            return {link: sum(agent.total(name, link=link) for agent in agents) for link in links}

        return Counters(
            transferred=per_link("proxyd_transfer_bytes_total"),
            taken=per_link("proxyd_granted_bytes_total"),
            unscheduled=per_link("proxyd_unscheduled_bytes_total"),
            fallback=sum(agent.total("proxyd_fallback_bytes_total") for agent in agents),
            received=sum(agent.total("proxyd_received_bytes_total") for agent in agents),
            corrupt=sum(agent.total("proxyd_corrupt_chunks_total") for agent in agents),
            granted={link: coordinator.total("proxyd_granted_bytes_total", link=link) for link in links},
            violations=coordinator.total("proxyd_window_violations_total"),
        )


def crossed_under_grants(before: Counters, after: Counters, nbytes: dict[str, int], large: dict[str, int]) -> None:
    """Assert that, per link, ``nbytes`` of payload crossed two agents, ``large`` of them under grants, none otherwise.

    ``large``: the part in messages above the unscheduled limit. Messages that were cancelled may have moved more.
    """
    assert after.violations == 0, "more was granted than the window holds"
    assert after.fallback == before.fallback, "bytes went out at the fallback rate, and no fault was injected"
    for link, wanted in nbytes.items():
        moved = after.transferred[link] - before.transferred[link]
        assert moved >= wanted, f"{link}: {moved:g} bytes were acknowledged of {wanted} that the test sent"
        taken = after.taken[link] - before.taken[link]
        assert taken >= large[link], f"{link}: {taken:g} bytes went out under grants of {large[link]} that had to"
        granted = after.granted[link] - before.granted[link]
        assert granted >= large[link], f"{link}: the coordinator granted {granted:g} of {large[link]} bytes"
        free = after.unscheduled[link] - before.unscheduled[link]
        assert taken + free >= wanted, f"{link}: {taken + free:g} bytes left the agent of {wanted}"
    received = after.received - before.received
    assert received >= sum(nbytes.values()), f"{received:g} bytes arrived at the agents of {sum(nbytes.values())}"


class CountedEndpoint(Endpoint):
    """An endpoint whose sends are remembered, so that the proof knows what has to have crossed."""

    net: Net
    place: tuple[str, int]

    def isend(self, buffer: Any, dst: int, tag: int = 0, **options: Any) -> Handle[None]:
        handle = super().isend(buffer, dst, tag, **options)
        self.net.sent(self, dst, memoryview(buffer).nbytes, handle)
        return handle

    def knows(self, rank: int, link: str = "") -> None:
        """Wait until this endpoint's agent knows a (new) life of a rank, at the end of ``link`` if one is named.

        Between the end of one life and the news of the next it knows none.
        """

        def found() -> bool:
            try:
                state = self.link_state(rank)
            except proxyd_client.PeerLost:
                return False
            return not link or state.link == link

        until(found, f"rank {rank} is registered" + (f", over {link}" if link else ""))


class Net:
    """One test's view of a cluster: connects endpoints of a job of its own and, at the end, gives the proof."""

    def __init__(self, cluster: Cluster, job: str) -> None:
        self.cluster = cluster
        self.job = job
        self.fault = ""
        self._endpoints: list[CountedEndpoint] = []
        self._place_of: dict[int, tuple[str, int]] = {}
        self._sent: list[tuple[tuple[str, int], tuple[str, int] | int, int, Handle[None]]] = []
        self._extra: list[tuple[str, int, int]] = []
        self._at_end: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._before = Counters.of(cluster)

    def agent(self, site: str = "a", number: int = 0) -> AgentMember:
        """One of the cluster's agents."""
        return self.cluster.agent(site, number)

    def connect(
        self, rank: int, site: str = "a", number: int = 0, *, socket: str | None = None, job: str | None = None
    ) -> CountedEndpoint:
        """``job/rank`` at an agent; closed at the end of the test. ``socket``: another way to it (tcp://)."""
        agent = self.agent(site, number)
        plain = proxyd_client.connect(job or self.job, rank, socket=socket or agent.socket, timeout_s=10)
        endpoint = CountedEndpoint(plain._session, plain.job, plain.rank)
        endpoint.net, endpoint.place = self, (site, number)
        with self._lock:
            self._endpoints.append(endpoint)
            self._place_of[rank] = (site, number)
        return endpoint

    def pair(self, src: str = "a", dst: str = "b") -> tuple[CountedEndpoint, CountedEndpoint]:
        """Rank 0 at one site, rank 1 at another."""
        return self.connect(0, src), self.connect(1, dst)

    def sent(self, source: CountedEndpoint, dst: int, nbytes: int, handle: Handle[None]) -> None:
        """Called for each send of a counted endpoint."""
        with self._lock:
            # Where it lives now: a rank may move.
            self._sent.append((source.place, self._place_of.get(dst, dst), nbytes, handle))

    def also_sent(self, link: str, *sizes: int) -> None:
        """Messages of another process, which were delivered."""
        self._extra += [(link, nbytes, nbytes if nbytes > UNSCHEDULED_BYTES else 0) for nbytes in sizes]

    def injects_fault(self, what: str) -> None:
        """The test breaks something on purpose: bytes may be lost or go out at the fallback rate."""
        self.fault = what
        self.cluster.deaths()

    def place_of(self, rank: int, site: str, number: int = 0) -> None:
        """A rank lives there, though not in this process."""
        self._place_of[rank] = (site, number)

    def on_close(self, call: Callable[[], None]) -> None:
        """Do this at the end of the test."""
        self._at_end.append(call)

    def close(self) -> None:
        """End the endpoints, without waiting."""
        while self._at_end:
            self._at_end.pop()()
        for endpoint in self._endpoints:
            endpoint.close(0.0)

    def expected(self) -> tuple[dict[str, int], dict[str, int]]:
        """Per link between different agents: bytes of delivered messages, and of the large ones among them."""
        nbytes: dict[str, int] = collections.defaultdict(int)
        large: dict[str, int] = collections.defaultdict(int)
        for place, dst, size, handle in self._sent:
            target = self._place_of.get(dst) if isinstance(dst, int) else dst
            if target is None or target == place or not _delivered(handle):
                continue
            link = f"{place[0]}->{target[0]}"
            nbytes[link] += size
            large[link] += size if size > UNSCHEDULED_BYTES and place[0] != target[0] else 0
        for link, size, scheduled in self._extra:
            nbytes[link] += size
            large[link] += scheduled
        return nbytes, large

    def prove(self) -> None:
        """The proof; see :func:`crossed_under_grants`. Within a site there are no grants to ask for."""
        nbytes, large = self.expected()
        between = {link: size for link, size in nbytes.items() if link.split("->")[0] != link.split("->")[1]}
        dead = self.cluster.deaths()
        assert not dead, f"daemons died: {[(member.label, code, member.last_words()) for member, code in dead]}"
        if self.fault:
            return
        after = Counters.of(self.cluster)
        crossed_under_grants(self._before, after, between, large)
        assert after.corrupt == self._before.corrupt, "chunks failed their checksum, and no fault was injected"

    def moved(self) -> Counters:
        """The counters' growth since the test began."""
        now, before = Counters.of(self.cluster), self._before
        values: dict[str, Any] = {}
        for field in dataclasses.fields(Counters):
            new, old = getattr(now, field.name), getattr(before, field.name)
            values[field.name] = {key: new[key] - old[key] for key in new} if isinstance(new, dict) else new - old
        return Counters(**values)


def _delivered(handle: Handle[None]) -> bool:
    """Whether a send was acknowledged. One that still runs is waited for: the test has received it by now."""
    try:
        handle.wait(10.0)
    except proxyd_client.TransferTimeout:
        raise AssertionError(f"{handle!r} has not ended 10 s after the end of its test") from None
    except proxyd_client.ProxydError:
        return False
    return True


def end_well(cluster: Cluster) -> None:
    """End all daemons that live and assert that they end by themselves, soon, with 0, and without a cry in any log."""
    living = [member for member in cluster.members if member.process.poll() is None]
    for member in living:
        member.process.send_signal(signal.SIGTERM)
        member.process.send_signal(signal.SIGCONT)
    for member in living:
        try:
            code = member.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            member.process.send_signal(signal.SIGABRT)  # faulthandler says where it hangs
            member.process.wait()
            raise AssertionError(f"{member.label} ignores SIGTERM: {member.last_words()}") from None
        assert code == 0, f"{member.label} ended with {code}: {member.last_words()}"
    for member in cluster.members:
        log = member.log_path.read_text(errors="replace")
        for cry in ("Traceback", " ERROR ", "Exception ignored", "never awaited", "never retrieved"):
            assert cry not in log, (
                f"{member.label} logged {cry.strip()!r}: {log[max(0, log.index(cry) - 500) :][:3000]}"
            )


@contextlib.contextmanager
def standing_still(*members: Member | Trainer) -> Iterator[None]:
    """Processes get no CPU within the block (SIGSTOP, SIGCONT), whatever happens in it."""
    for member in members:
        member.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for member in members:
            member.process.send_signal(signal.SIGCONT)


def fd_count(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class Health:
    """What has to be so before a fault and again after it: a message of each size each way, byte by byte; nothing
    granted and not delivered; nothing waiting; as many descriptors as before.

    The endpoints are connected anew for each look, so that it doesn't matter whom the fault has hit.
    """

    SIZES = (1, 3 * KIB, 1 * MIB + 17)

    def __init__(self, net: Net, places: tuple[tuple[str, int], tuple[str, int]] = (("a", 0), ("b", 0))) -> None:
        self._net = net
        self._places = places
        self._looks = 0
        self.check()
        self._fds = {member.label: fd_count(member.pid) for member in net.cluster.members}

    def check(self, timeout_s: float = 20.0) -> None:
        """Look once."""
        self._looks += 1
        job, ranks = f"{self._net.job}-health{self._looks}", (9000, 9001)
        sockets = [self._net.agent(*place).socket for place in self._places]
        ends = [proxyd_client.connect(job, rank, socket=at) for rank, at in zip(ranks, sockets, strict=True)]
        try:
            for source, target in ((0, 1), (1, 0)):
                for number, nbytes in enumerate(self.SIZES):
                    data = pattern(nbytes, source, number)
                    handle = ends[source].isend(data, dst=ranks[target], tag=number)
                    got = ends[target].recv(src=ranks[source], tag=number, timeout_s=timeout_s)
                    assert np.array_equal(got.array, data), f"message {number} of {job} was changed"
                    handle.wait(timeout_s)
                    del got
        finally:
            for end in ends:
                end.close(0.0)
        self.nothing_left()

    def nothing_left(self, timeout_s: float = 10.0) -> None:
        """No grant is out that nobody will use, and the link is free."""

        def left() -> dict[str, float]:
            page = scrape(self._net.cluster.coordinator.metrics)
            names = ("outstanding_bytes", "waiting_transfers", "waiting_bytes")
            values = {name: page.total(f"proxyd_link_{name}") for name in names}
            return {name: value for name, value in values.items() if value}

        until(lambda: not left(), f"something is left on the links: {left()}", timeout_s)

    def recovered(self, timeout_s: float = 20.0) -> None:
        """It is as it was, descriptors of daemons that live on included (a few come and go with scrapes)."""
        self.check(timeout_s)

        def grown() -> list[str]:
            members = self._net.cluster.members
            now = {member.label: fd_count(member.pid) for member in members}
            return [f"{label}: {now[label]}, it had {old}" for label, old in self._fds.items() if now[label] > old + 2]

        until(lambda: not grown(), f"descriptors are left: {grown()}", timeout_s)


def rss_bytes(pid: int, what: str = "VmRSS") -> int:
    """Memory of a process from /proc: ``VmRSS``, ``VmHWM``, ``RssShmem``, ``RssAnon``."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {what} for process {pid}")


@contextlib.contextmanager
def threads(*targets: Callable[[], object]) -> Iterator[None]:
    """Run functions beside the block; the first error of any of them is raised at its end."""
    pool = ThreadPoolExecutor(len(targets))
    futures = [pool.submit(target) for target in targets]
    yield
    for future in futures:
        future.result(90)
    pool.shutdown()


class Trainer:
    """A trainer in a process of its own, so that it can be stopped, killed or ruined.

    :param body: Python, with ``ep`` (its endpoint), ``np``, ``pattern``, ``proxyd_client``, ``say(text)`` (a line for
        :meth:`hear`) and ``hear()`` (a line from :meth:`say`) at hand.
    """

    _PRELUDE = (
        "import sys, numpy as np, proxyd_client\n"
        "from tests.e2e.rig import pattern, MIB\n"
        "say = lambda text: print(text, flush=True)\n"
        "hear = sys.stdin.readline\n"
        "ep = proxyd_client.connect(sys.argv[1], int(sys.argv[2]), socket=sys.argv[3])\n"
        "say('connected')\n"
    )

    def __init__(self, net: Net, rank: int, site: str, body: str, *, number: int = 0) -> None:
        root = str(Path(__file__).resolve().parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-c", self._PRELUDE + body, net.job, str(rank), net.agent(site, number).socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([root, f"{root}/client"])},
        )
        net.place_of(rank, site, number)
        net.on_close(self.kill)
        assert self.hear() == "connected"

    def hear(self) -> str:
        """Its next line; fails with its error output when it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            self.process.wait(10)
            assert self.process.stderr is not None
            raise AssertionError(f"the trainer ended: {self.process.stderr.read()[-2000:]}")
        return line

    def say(self, text: str = "go") -> None:
        """A line for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def forked(run: Callable[[], int]) -> int:
    """Run in a forked child; answers the child's exit code (99: it raised)."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = run()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
