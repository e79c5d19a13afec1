"""A file through ``proxyd forward`` beside tensors: is the file whole and paced, and do the tensors notice?

A sender at site a hands a tensor to its agent at fixed times, as a pipeline does; a receiver at site b takes it. Then
the same again while curl uploads a file from a to b through two stations, in class ``bulk``, on the tensors' own link.
Phases take turns, so that a machine that slows down slows both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import proxyd_client
from proxyd.cli.cluster import Cluster, LinkFigures
from proxyd.cli.link_bench.figures import percentile
from proxyd.cli.scrape import scrape
from proxyd.core.errors import ConfigError, ProxydError
from proxyd.wan import LinkSpec, Wan

JOB = "forward-bench"
READY_TIMEOUT_S = 30.0
TIMEOUT_S = 60.0
COPY_TIMEOUT_S = 1800
WARM_TENSORS = 10
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ForwardScenario:
    """One link, tensors and a file."""

    rate_bytes_per_s: int
    rtt_ns: int
    buffer_bytes: int
    mtu: int
    file_bytes: int
    tensor_bytes: int
    period_s: float
    """Between two tensors."""
    tensors: int
    """In each phase without the file."""
    rounds: int

    def describe(self) -> str:
        """For people."""
        load = self.tensor_bytes / self.period_s / self.rate_bytes_per_s
        mib = 1 << 20
        return (
            f"{self.rate_bytes_per_s * 8 / 1e6:g} Mbit/s, {self.rtt_ns / 1e6:g} ms, buffer {self.buffer_bytes} bytes; "
            f"a tensor of {self.tensor_bytes / mib:g} MiB each {self.period_s * 1000:g} ms ({load:.0%} of the link), "
            f"a file of {self.file_bytes / mib:g} MiB by curl"
        )


class _Tensors:
    """One sender and one receiver, at fixed times."""

    def __init__(self, cluster: Cluster, scenario: ForwardScenario, ending: ExitStack) -> None:
        self._scenario = scenario
        self._sender = ending.enter_context(proxyd_client.connect(JOB, 0, socket=cluster.agent("a").socket))
        self._receiver = ending.enter_context(proxyd_client.connect(JOB, 1, socket=cluster.agent("b").socket))

    def run(self, count: int | None, until: threading.Event) -> list[float]:
        """Completion times in seconds, from the call of isend to the end of the receive; ``count`` None: until told."""
        data, out = bytes(self._scenario.tensor_bytes), bytearray(self._scenario.tensor_bytes)
        took, due_s, number = [], time.monotonic(), 0
        while not until.is_set() if count is None else number < count:
            time.sleep(max(0.0, due_s - time.monotonic()))
            due_s += self._scenario.period_s
            begun_s = time.monotonic()
            sent = self._sender.isend(data, dst=1, tag=7)
            self._receiver.recv_into(out, src=0, tag=7, timeout_s=TIMEOUT_S)
            took.append(time.monotonic() - begun_s)
            sent.wait(TIMEOUT_S)
            number += 1
        return took


class _Taker:
    """A server at site b: takes what is uploaded (HTTP PUT) and says its SHA-256."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with contextlib.closing(sock), contextlib.suppress(OSError):
                    self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        head, rest = b"", b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(65536)
        head, _, rest = head.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
        left = int(fields["Content-Length"]) - len(rest)
        if fields.get("Expect"):
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        digest, block = hashlib.sha256(rest), bytearray(BLOCK_BYTES)
        while left:
            got = sock.recv_into(block, min(left, len(block)))
            if not got:
                return
            digest.update(memoryview(block)[:got])
            left -= got
        said = digest.hexdigest().encode()
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(said) + said)

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def _station(agent: str, *options: str) -> Iterator[list[str]]:
    """A running ``proxyd forward``; the addresses of its doors."""
    reading, writing = os.pipe()
    command = [
        sys.executable,
        "-m",
        "proxyd.cli.main",
        "forward",
        "--socket",
        agent,
        "--ready-fd",
        str(writing),
        *options,
    ]
    with subprocess.Popen(command, pass_fds=[writing], stderr=subprocess.PIPE) as process:
        os.close(writing)
        try:
            with os.fdopen(reading, "rb") as ready:
                line = ready.readline()
            if not line.startswith(b"READY "):
                raise ProxydError(
                    "a station could not be started", why=(process.communicate()[1] or b"").decode()[-500:]
                )
            drained = threading.Thread(target=process.stderr.read if process.stderr else None, daemon=True)
            drained.start()
            yield json.loads(line[6:])["doors"]
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(READY_TIMEOUT_S)
            process.kill()


def measure(scenario: ForwardScenario, say: Any = print) -> dict[str, Any]:
    """Run it. Raises ProxydError; ConfigError without curl."""
    curl = shutil.which("curl")
    if curl is None:
        raise ConfigError("curl is missing", next_step="Install it (apt-get install curl)")
    spec = LinkSpec(scenario.rate_bytes_per_s, None, scenario.rtt_ns // 2, scenario.buffer_bytes)
    figures = LinkFigures(
        f"{scenario.rate_bytes_per_s * 8}bit", f"{scenario.rtt_ns}ns", f"{scenario.buffer_bytes}B", mtu=scenario.mtu
    )
    links = {("a", "b"): figures, ("b", "a"): figures}
    with ExitStack() as ending:
        # As deploy/sysctl has it. Else the agents go by bbr, which cuts its window to four packets for 0.2 s whenever a
        # connection was never idle for ten seconds: two tensors in a hundred would meet that beside a file.
        sites = {"a": 1, "b": 1}
        wan = ending.enter_context(
            Wan(sites, dict.fromkeys(links, spec), mtu=scenario.mtu, slow_start_after_idle=False)
        )
        cluster = ending.enter_context(Cluster({"a": 1, "b": 1}, links=links, wan=wan, log_level="warning"))
        tensors = _Tensors(cluster, scenario, ending)
        taker = ending.enter_context(contextlib.closing(_Taker()))
        ending.enter_context(_station(cluster.agent("b").socket, "--allow", f"127.0.0.1/32:{taker.port}"))
        [door] = ending.enter_context(
            _station(
                cluster.agent("a").socket, "--listen", "127.0.0.1:0", "--to", "b", "--target", f"127.0.0.1:{taker.port}"
            )
        )
        directory = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="proxyd-forward-")))
        file, digest = _file(directory / "file", scenario.file_bytes)
        never = threading.Event()
        tensors.run(WARM_TENSORS, never)
        alone: list[float] = []
        beside: list[float] = []
        copies: list[dict[str, Any]] = []
        for number in range(scenario.rounds):
            say(f"round {number + 1} of {scenario.rounds}: tensors alone")
            alone += tensors.run(scenario.tensors, never)
            say(f"round {number + 1} of {scenario.rounds}: beside the file")
            granted = _granted_bytes(cluster)
            done = threading.Event()
            copy: dict[str, Any] = {}
            uploader = threading.Thread(target=_upload, args=(curl, file, door, digest, copy, done))
            uploader.start()
            beside += tensors.run(None, done)
            uploader.join()
            copy["granted_bytes"] = _granted_bytes(cluster) - granted
            copies.append(copy)
        bad = [copy for copy in copies if not copy.get("equal")]
        if bad:
            raise ProxydError("a copy is not what was sent", why=str(bad[0]))
        return {
            "description": scenario.describe(),
            "alone": _spread(alone),
            "beside": _spread(beside),
            "copies": copies,
            "p99_ratio": percentile(beside, 0.99) / percentile(alone, 0.99),
            "p50_ratio": percentile(beside, 0.5) / percentile(alone, 0.5),
        }


def _granted_bytes(cluster: Cluster) -> float:
    return scrape(cluster.agent("a").metrics).total("proxyd_granted_bytes_total", link="a->b")


def _spread(took_s: list[float]) -> dict[str, float]:
    return {
        "tensors": len(took_s),
        "p50_s": percentile(took_s, 0.5),
        "p90_s": percentile(took_s, 0.9),
        "p99_s": percentile(took_s, 0.99),
        "most_s": max(took_s),
    }


def _file(path: Path, nbytes: int) -> tuple[Path, str]:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        left = nbytes
        while left:
            block = os.urandom(min(left, BLOCK_BYTES))
            digest.update(block)
            left -= file.write(block)
    return path, digest.hexdigest()


def _upload(curl: str, file: Path, door: str, digest: str, copy: dict[str, Any], done: threading.Event) -> None:
    begun_s = time.monotonic()
    command = [curl, "-sS", "--max-time", str(COPY_TIMEOUT_S), "--noproxy", "*", "-T", str(file), f"http://{door}/file"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        took_s = time.monotonic() - begun_s
        nbytes = file.stat().st_size
        copy.update(
            equal=said.stdout == digest,
            seconds=took_s,
            bytes=nbytes,
            rate_bytes_per_s=nbytes / took_s,
            error=said.stderr,
        )
    finally:
        done.set()
