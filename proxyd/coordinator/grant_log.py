"""Writing the grant log beside the work: the loop makes lines, a thread brings them to the disk.

**What it may cost.** A line takes some microseconds on the loop: 5 % of the grants per second through gRPC. The disk
takes what it takes, on its own thread; the loop never waits for it.

**What it may break.** Nothing. A full or slow disk costs the log, not the coordinator: one warning says so, the log
stops, and every half minute a new part is tried, which begins with a checkpoint and therefore replays by itself.

**What it may fill.** ``size_bytes`` in all: four parts of a quarter each, of which the oldest is deleted.

What was not yet written when the process is killed is lost: up to a tenth of a second. Orderly ends and failures of the
machine lose nothing.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from proxyd.core.coordinator import CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect
from proxyd.core.events import CoordinatorEvent, TimePassed
from proxyd.runtime.grant_log import Recorder, part_path

PARTS = 4
MIN_SIZE_BYTES = 1 << 20
WRITE_EVERY_S = 0.1
WRITE_BYTES = 256 << 10
MAX_BACKLOG_BYTES = 32 << 20
"""Lines that wait for the disk; more means that it doesn't keep up."""
RETRY_NS = 30_000_000_000

log = logging.getLogger("proxyd.coordinator")


class GrantLog:
    """The log of one life. All calls come from the loop's thread.

    :param size_bytes: of all parts together.
    :raises OSError: the first part can't be made: a wrong path should be told at start.
    """

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        machine: CoordinatorMachine,
        *,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._machine = machine
        self._epoch = machine.epoch
        self._part_bytes = max(size_bytes, MIN_SIZE_BYTES) // PARTS
        self._wall_clock = wall_clock
        self._wall_ns = wall_clock()
        self._life = f"{machine.epoch:x}-{secrets.token_hex(4)}"
        self._disk = _Disk(path)
        self._recorder = Recorder(self._line)
        self._part = 0
        self._written_bytes = self._limit_bytes = 0
        self._retry_ns: int | None = None
        self._disk.probe()

    @property
    def failed(self) -> bool:
        """Nothing is written at present."""
        return self._retry_ns is not None

    def saw(self, now_ns: int, event: CoordinatorEvent | TimePassed) -> None:
        """An event, before the machine has it."""
        if self._retry_ns is not None:
            if now_ns < self._retry_ns:
                return
            self._retry_ns = None
            self._begin(now_ns)
            log.info("grant log: trying again with part %d", self._part)
        elif self._part == 0:
            self._wall_ns = self._wall_clock()
            self._begin(now_ns)
        elif self._written_bytes >= self._limit_bytes:
            self._begin(now_ns)
        if self._disk.failure:
            self._give_up(now_ns, self._disk.failure)
            return
        self._recorder.saw(now_ns, event)

    def performed(self, effects: Sequence[CoordinatorEffect]) -> None:
        """What the machine made of it."""
        if self._retry_ns is None:
            self._recorder.performed(effects)

    def close(self) -> None:
        """Write what is left and end. Waits for the disk."""
        if self._retry_ns is None and self._part:
            self._recorder.flush()
        self._disk.close()

    def _begin(self, now_ns: int) -> None:
        """Go on in a new part, from the machine as it stands."""
        self._recorder.flush()
        self._recorder.begun(now_ns)
        self._part += 1
        header = self._recorder.header(
            self._machine, self._epoch, self._life, self._part, self._wall_ns, checkpoint=self._part > 1
        )
        self._written_bytes = len(header)
        # A huge machine's checkpoint must not be all that there is in a part.
        self._limit_bytes = max(self._part_bytes, 2 * len(header))
        self._disk.begin(header)

    def _give_up(self, now_ns: int, why: str) -> None:
        self._retry_ns = now_ns + RETRY_NS
        log.warning("grant log: %s; grants go on, the log doesn't; trying again every %d s", why, RETRY_NS // 10**9)
        self._disk.forget()
        self._recorder.drop()

    def _line(self, line: bytes) -> None:
        self._written_bytes += len(line)
        self._disk.add(line)


class _Disk:
    """The files, behind a thread. A failure is kept until :meth:`forget`; what comes meanwhile is thrown away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._lines: list[bytes] = []
        """``b""``: begin a new part with the line that follows."""
        self._waiting_bytes = 0
        self._file: int | None = None
        self._begun = False
        """The present file holds a whole header: it is worth keeping."""
        self._first = True
        """The present file, if there is one, is of an earlier life."""
        self._closed = False
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name="grant log", daemon=True)

    def probe(self) -> None:
        """Raises OSError when the log can't be written at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640))
        self._thread.start()

    def begin(self, header: bytes) -> None:
        """A new part from here on."""
        self._put([b"", header])

    def add(self, line: bytes) -> None:
        """One more line."""
        self._put([line])

    def _put(self, lines: list[bytes]) -> None:
        if self.failure:
            return
        with self._lock:
            self._lines += lines
            self._waiting_bytes += sum(map(len, lines))
            waiting = self._waiting_bytes
        if waiting > MAX_BACKLOG_BYTES:
            self.failure = f"the disk of {self._path} does not keep up ({waiting} bytes wait)"
        elif waiting > WRITE_BYTES:
            self._wake.set()

    def forget(self) -> None:
        """Drop what waits, and the failure."""
        with self._lock:
            self._lines.clear()
            self._waiting_bytes = 0
            self.failure = ""

    def close(self) -> None:
        """Write the rest."""
        self._closed = True
        self._wake.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(WRITE_EVERY_S)
            self._wake.clear()
            self._write()
        self._write()
        self._end_file()

    def _write(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
            self._waiting_bytes = 0
        if self.failure or not lines:
            return
        try:
            while b"" in lines:
                at = lines.index(b"")
                self._write_bytes(lines[:at])
                self._rotate()
                self._write_bytes(lines[at + 1 : at + 2])
                self._begun = True
                lines = lines[at + 2 :]
            self._write_bytes(lines)
        except OSError as error:
            self.failure = f"cannot write {self._path}: {error.strerror or error}"
            self._end_file()

    def _write_bytes(self, lines: list[bytes]) -> None:
        data = memoryview(b"".join(lines))
        while data and self._file is not None:
            data = data[os.write(self._file, data) :]

    def _rotate(self) -> None:
        self._end_file()
        path = self._path
        # What an attempt on a full disk left is no part: it must not push out those that are whole.
        keep = self._begun or self._first
        self._begun = self._first = False
        if keep and path.exists() and path.stat().st_size:
            for age in range(PARTS - 1, 0, -1):
                younger = part_path(path, age - 1)
                if younger.exists():
                    os.replace(younger, part_path(path, age))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o640)

    def _end_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
