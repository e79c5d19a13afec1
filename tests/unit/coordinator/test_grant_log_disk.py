"""The grant log on disk: parts, bounds, full disks."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from proxyd.coordinator import grant_log as module
from proxyd.coordinator.grant_log import PARTS, RETRY_NS, GrantLog
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.events import CoordinatorEvent, SessionMessage, SessionOpened
from proxyd.core.ids import AgentName, EndpointName
from proxyd.core.messages import AgentHello, EndpointUp
from proxyd.runtime.grant_log import open_log, part_path
from proxyd.runtime.replay import replay

MS = 1_000_000


class Life:
    """A machine and its log."""

    def __init__(self, path: Path, size_bytes: int = 64 << 20) -> None:
        self.machine = CoordinatorMachine(CoordinatorConfig(), epoch=3)
        self.log = GrantLog(path, size_bytes, self.machine)
        self.now_ns = 1000 * MS
        self.say(SessionOpened(1, AgentHello(AgentName("a", "one"), 1, "127.0.0.1:7601")))

    def say(self, event: CoordinatorEvent) -> None:
        self.log.saw(self.now_ns, event)
        if effects := self.machine.handle(event, self.now_ns):
            self.log.performed(effects)
        self.now_ns += MS

    def register(self, count: int) -> None:
        for number in range(count):
            self.say(SessionMessage(1, EndpointUp(EndpointName("job", number % 10), self.now_ns)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log" / "grants.log"


def test_everything_is_there_after_an_orderly_end(path: Path) -> None:
    life = Life(path)
    life.register(100)
    life.log.close()
    result = replay(open_log(path))
    assert (result.difference, result.events) == (None, 101)
    assert path.stat().st_mode & 0o007 == 0, "not for everybody's eyes"


def test_it_is_bounded_and_what_is_left_replays(path: Path) -> None:
    life = Life(path, size_bytes=1)  # the least is taken
    life.register(20_000)
    life.log.close()
    parts = open_log(path)
    assert len(parts) == PARTS
    assert not part_path(path, PARTS).exists()
    assert sum(part.path.stat().st_size for part in parts) < 3 * module.MIN_SIZE_BYTES
    assert parts[0].header.part > 1
    assert replay(parts).difference is None


def test_the_life_before_is_kept_and_not_mixed_in(path: Path) -> None:
    for count in (5, 7):
        life = Life(path)
        life.register(count)
        life.log.close()
    assert replay(open_log(path)).events == 8
    assert replay(open_log(part_path(path, 1))).events == 6


def test_a_full_disk_costs_the_log_only_and_is_told_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(path)
    life.register(10)
    real_write = os.write
    full = True

    def write(file: int, data: bytes) -> int:
        if full:
            real_write(file, data[:3])
            raise OSError(28, "No space left on device")
        return real_write(file, data)

    monkeypatch.setattr(os, "write", write)
    with caplog.at_level(logging.WARNING):
        while not life.log.failed:
            life.register(1)
        life.register(1000)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
    full = False
    life.now_ns += RETRY_NS
    life.register(50)
    life.log.close()
    [part] = open_log(path)
    result = replay([part])
    assert (result.difference, result.events) == (None, 50)
    assert part.header.part == 2


def test_a_place_that_cannot_be_written_is_told_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        GrantLog(tmp_path / "file" / "grants.log", 1 << 20, CoordinatorMachine(CoordinatorConfig(), 1))
