"""A real etcd of one member, for tests. Not a fake: the server that Debian ships (package etcd-server)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxyd.runtime.tls import TlsPaths

START_S = 15.0


def etcd_or_skip() -> str:
    """The server's binary; without it the test skips, but not where CI promises it."""
    binary = shutil.which("etcd")
    if binary is None:
        if os.environ.get("CI") == "true":
            pytest.fail("etcd is not installed: tools/prepare.sh tests should have done that")
        pytest.skip("etcd is not installed (Debian: apt-get install etcd-server)")
    return binary


class Etcd:
    """One server; :meth:`stop` and :meth:`go_on` freeze it.

    :param tls: its own certificate, and the CA of those that it takes from clients; None: in the clear.
    """

    def __init__(self, directory: Path, tls: TlsPaths | None = None) -> None:
        url = "http" if tls is None else "https"
        self.port, peer_port = _free_port(), _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._log = (directory / "etcd.log").open("wb")
        self.process = subprocess.Popen(
            [
                etcd_or_skip(),
                *("--name", "one", "--data-dir", str(directory / "etcd")),
                *(
                    "--listen-client-urls",
                    f"{url}://{self.address}",
                    "--advertise-client-urls",
                    f"{url}://{self.address}",
                ),
                *(() if tls is None else ("--cert-file", tls.certificate, "--key-file", tls.key)),
                *(() if tls is None else ("--client-cert-auth", "--trusted-ca-file", tls.ca)),
                *("--listen-peer-urls", f"http://127.0.0.1:{peer_port}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer_port}"),
                *("--initial-cluster", f"one=http://127.0.0.1:{peer_port}"),
                # A leader is there sooner, and leases may be as short as two seconds.
                *("--heartbeat-interval", "100", "--election-timeout", "1000"),
            ],
            stdout=self._log,
            stderr=self._log,
        )
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.process.poll() is None, (directory / "etcd.log").read_text()[-2000:]
            assert time.monotonic() < deadline_s, "etcd does not listen"
            time.sleep(0.05)

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """The end."""
        self.process.kill()
        self.process.wait(10)
        self._log.close()


@contextlib.contextmanager
def running_etcd(directory: Path, tls: TlsPaths | None = None) -> Iterator[Etcd]:
    """An etcd that listens."""
    etcd = Etcd(directory, tls)
    try:
        yield etcd
    finally:
        etcd.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
