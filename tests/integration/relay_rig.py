"""What the relay's tests share: recognisable content, raw clients, and proof by counters."""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import proxyd_client
from proxyd.cli.cluster import AgentMember, Cluster
from proxyd.cli.scrape import scrape
from proxyd.wire import client as wire
from proxyd.wire.envelope import Envelope

Bytes = npt.NDArray[np.uint8]
ROOT = Path(__file__).parents[2]


def content(nbytes: int, seed: int) -> Bytes:
    """Different at every word and for every seed, so that a shifted, stale or missing byte shows."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.view(np.uint8)[:nbytes].copy()


@contextmanager
def endpoints(*places: tuple[AgentMember, int], job: str = "job") -> Iterator[list[proxyd_client.Endpoint]]:
    """Endpoints of one job at these agents, by rank; closed at the end."""
    opened: list[proxyd_client.Endpoint] = []
    try:
        for agent, rank in places:
            opened.append(proxyd_client.connect(job, rank, socket=agent.socket))
        _await_each_other(opened)
        yield opened
    finally:
        for endpoint in opened:
            endpoint.close(linger_s=0)


def _await_each_other(opened: list[proxyd_client.Endpoint]) -> None:
    """Until each has heard of the others' present lives: those of the test before have ended a moment ago, and what is
    sent before that news is sent to them, and fails with them."""
    lives = {one._session.core.identity.rank: one._session.core.identity.incarnation for one in opened}

    def all_know() -> bool:
        heard = [(rank, one._session.receiver._here) for rank, one in zip(lives, opened, strict=True)]
        return all(here.get(other) == lives[other] for rank, here in heard for other in lives if other != rank)

    until(all_know)


def exchange(sender: proxyd_client.Endpoint, receiver: proxyd_client.Endpoint, data: Bytes, **how: Any) -> None:
    """Send and receive one message and compare every byte. ``how``: src, dst, tag."""
    handle = sender.isend(data, dst=how["dst"], tag=how["tag"])
    deadline_s = time.monotonic() + 30
    while True:
        try:
            message = receiver.recv(src=how["src"], tag=how["tag"], timeout_s=30)
            break
        except proxyd_client.PeerLost:
            # Where the sender's earlier life has just ended, that news may come before those of the new one.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
    assert message.nbytes == len(data)
    assert np.array_equal(message.array, data)
    del message  # on one host the sender's block is handed over: it is done when the receiver lets go
    handle.wait(timeout_s=30)


class Counters:
    """What two agents counted since this was made."""

    def __init__(self, sender: AgentMember, receiver: AgentMember) -> None:
        self._agents = (sender, receiver)
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        sender, receiver = (scrape(agent.metrics) for agent in self._agents)
        return {
            "granted": sender.total("proxyd_granted_bytes_total"),
            "unscheduled": sender.total("proxyd_unscheduled_bytes_total"),
            "fallback": sender.total("proxyd_fallback_bytes_total"),
            "received": receiver.total("proxyd_received_bytes_total"),
        }

    def since(self) -> dict[str, int]:
        """By name; each since the beginning."""
        return {name: int(value - self._before[name]) for name, value in self._read().items()}


def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    """Wait for something that another process does."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def script(text: str, *args: str) -> subprocess.Popen[bytes]:
    """A child process that runs ``text`` with this package in reach; it talks over stdout."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    return subprocess.Popen(
        [sys.executable, "-c", text, *args], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )


class RawClient:
    """A client that speaks frames itself, also those that the library never would."""

    def __init__(self, agent: AgentMember, rank: int, *, job: str = "job", incarnation: int = 0) -> None:
        self.job, self.rank = job, rank
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(agent.socket)
        self.decoder = wire.Decoder(allow_payload=False)
        self.fds: list[int] = []
        self.arenas: list[wire.ArenaGranted] = []
        self.expect(wire.Challenge)
        incarnation = incarnation or int.from_bytes(os.urandom(7), "little") + 1
        self.send(wire.Hello(wire.PROTOCOL_VERSION, job, rank, incarnation, os.getpid(), bytes(32), b"", True))
        self.welcome = self.expect(wire.Welcome)
        while len(self.arenas) < 2:
            self.arenas.append(self.expect(wire.ArenaGranted))

    def send(self, *frames: wire.Frame) -> None:
        self.sock.sendall(b"".join(wire.encode(frame) for frame in frames))

    def envelope(self, dst: int, nbytes: int, *, src: int | None = None) -> Envelope:
        return Envelope(self.job, self.rank if src is None else src, dst, "", 7, 0, nbytes, "uint8", (nbytes,))

    def next_frame(self) -> wire.Frame | None:
        """None at the end of the connection."""
        while (item := self.decoder.next_frame()) is None:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(65536, socket.CMSG_SPACE(64))
            except ConnectionResetError:
                return None
            if not data:
                return None
            for _, _, raw in ancillary:
                fds = array.array("i")
                fds.frombytes(raw)
                self.fds += fds
            self.decoder.feed(data)
        return item[0]

    def expect(self, kind: type[Any]) -> Any:
        """The next frame of this kind; others are skipped."""
        while (frame := self.next_frame()) is not None:
            if isinstance(frame, kind):
                return frame
        raise AssertionError(f"the connection ended before a {kind.__name__}")

    def last_words(self) -> wire.Bye | None:
        """Read to the end; the Bye that came, if any."""
        bye = None
        while (frame := self.next_frame()) is not None:
            bye = frame if isinstance(frame, wire.Bye) else bye
        return bye

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def alive(cluster: Cluster) -> bool:
    """Nobody died."""
    return not cluster.deaths()
