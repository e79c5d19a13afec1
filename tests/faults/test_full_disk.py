"""No room where logs go: transfers go on, it is said once, and writing goes on when there is room."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxyd.cli.cluster import Cluster
from tests.e2e.rig import Health, Net, end_well, pattern, until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_no_room_for_the_grant_log(small_disk: Path, start: Callable[..., Net]) -> None:
    filler = small_disk / "filler"
    log = small_disk / "grants.log"
    net = start(coordinator={"grant_log": str(log)})
    sender, receiver = net.pair()
    health = Health(net)
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    coordinator = net.cluster.coordinator

    def told() -> int:
        return coordinator.log_path.read_text().count("No space left on device")

    for number in range(300):
        handle = sender.isend(pattern(200_000, 0, number), dst=1)
        receiver.recv(src=0, timeout_s=10)
        handle.wait(10)
        if told():
            break
    until(lambda: told() == 1, "the full disk is told")
    health.recovered()
    assert told() == 1, "once"
    assert log.stat().st_size > 0


class NoRoomForLogs(Cluster):
    """Whatever its daemons write to stderr fails with ENOSPC."""

    @staticmethod
    def _popen(daemon: list[str], host: Any, log: Any, options: dict[str, Any]) -> subprocess.Popen[bytes]:
        with open("/dev/full", "wb") as full:
            return Cluster._popen(daemon, host, full, options)


def test_no_room_for_the_log() -> None:
    """Not even a line of it can be written, from the first moment on."""
    with NoRoomForLogs({"a": 1, "b": 1}, log_level="debug") as cluster:
        net = Net(cluster, "full")
        sender, receiver = net.pair()
        health = Health(net)
        for number in range(50):
            handle = sender.isend(pattern(100_000, 0, number), dst=1)
            receiver.recv(src=0, timeout_s=10)
            handle.wait(10)
        health.recovered()
        net.prove()
        net.close()
        end_well(cluster)
        assert not any(member.log_path.read_bytes() for member in cluster.members)
