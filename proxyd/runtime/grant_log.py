"""The grant log: everything a coordinator's machine was told and did, in a form that replays.

A log is a sequence of *parts* (files). Each part is text, one JSON value a line: a header, then one record for each
event, with the effects that came of it::

    {"proxyd_grant_log": 1, "life": "...", "part": 3, "start_ns": ..., "wall_ns": ..., "fields": {...}, ...}
    [at_ns, ["SessionMessage", [3, ["Request", [...]]]], [["ToAgent", [3, ["Grant", [...]]]], ...]]
    [at_ns, ["TimePassed", []]]

Times are monotonic nanoseconds since the machine's first event; the header says which wall-clock time that was.

A machine is a pure function of its events, so feeding them to a fresh one gives the same effects: the first part of a
life replays from nothing. Later parts hold the machine's state as it was when they were begun (a *checkpoint*), so that
old parts may be deleted. A checkpoint is plain JSON too (:mod:`proxyd.runtime.snapshot`): nothing of it is ever run. It
belongs to one version of proxyd and is not read by another.

A process that is killed leaves a torn last line. That is expected and is skipped; a line that is broken elsewhere ends
the reading of its part.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proxyd import __version__
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect
from proxyd.core.errors import OperatorError, ProxydError
from proxyd.core.events import CoordinatorEvent, TimePassed
from proxyd.runtime.plain import Plain, PlainError
from proxyd.runtime.snapshot import SnapshotError, make, take

FORMAT = 1
MAX_LINE_BYTES = 256 << 20
_CONFIG = CoordinatorConfig
_EFFECTS = tuple[CoordinatorEffect, ...]
log = logging.getLogger("proxyd.coordinator")
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class GrantLogError(OperatorError):
    """A grant log that can't be read. The message names the file, and the line where there is one."""

    exit_code = 1
    code = "grant-log"


class Recorder:
    """Turns what a machine is told and does into lines; knows nothing of files.

    Call :meth:`saw` before the machine handles an event, :meth:`performed` with its effects, :meth:`flush` at the end
    (also when the machine failed: the event that it failed at is then the last line).

    :param sink: takes each line as bytes, with its line feed.
    """

    def __init__(self, sink: Callable[[bytes], None]) -> None:
        plain = Plain()
        self._event = plain.encoder(CoordinatorEvent)
        self._effects = plain.encoder(_EFFECTS)
        self._config = plain.encoder(_CONFIG)
        self._schema = plain.schema()
        self._sink = sink
        self._pending: tuple[int, Any] | None = None
        self._start_ns: int | None = None

    def begun(self, now_ns: int) -> None:
        """The machine's first event comes: times count from here. Later calls change nothing."""
        if self._start_ns is None:
            self._start_ns = now_ns

    def header(
        self, machine: CoordinatorMachine, first_epoch: int, life: str, part: int, wall_ns: int, *, checkpoint: bool
    ) -> bytes:
        """A part's first line. Between two events only: what is pending belongs to the part before.

        :param first_epoch: what the machine was made with; it may have raised its epoch since.
        :param life: names this life of the coordinator, so that parts of several lives can be told apart.
        :param wall_ns: the wall clock's time of the machine's first event.
        """
        value = {
            "proxyd_grant_log": FORMAT,
            "version": __version__,
            "life": life,
            "part": part,
            "epoch": first_epoch,
            "start_ns": self._start_ns or 0,
            "wall_ns": wall_ns,
            "fields": self._schema,
            "config": self._config(machine.config),
            "checkpoint": freeze(machine) if checkpoint else None,
        }
        return _to_json(value).encode() + b"\n"

    def saw(self, now_ns: int, event: CoordinatorEvent | TimePassed) -> None:
        """An event, before the machine has it."""
        if self._pending is not None:
            self._write(())
        self._pending = (now_ns, event)

    def performed(self, effects: Sequence[CoordinatorEffect]) -> None:
        """What the machine made of it."""
        self._write(effects)

    def flush(self) -> None:
        """Write the last event, if it had no effects (yet)."""
        if self._pending is not None:
            self._write(())

    def drop(self) -> None:
        """Forget the last event: nothing can be written."""
        self._pending = None

    def _write(self, effects: Sequence[CoordinatorEffect]) -> None:
        if self._pending is None:
            return
        now_ns, event = self._pending
        self._pending = None
        at_ns = now_ns - (self._start_ns or 0)
        record = (at_ns, self._event(event), self._effects(effects)) if effects else (at_ns, self._event(event))
        self._sink(_to_json(record).encode() + b"\n")


_UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, ProxydError)
"""What reading raises for lines that nobody wrote: the plain form trusts its values' types, and the core refuses what
makes no sense together."""


class Record(NamedTuple):
    """One event and its effects."""

    at_ns: int
    """Since the machine's first event."""
    event: CoordinatorEvent
    effects: tuple[CoordinatorEffect, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What a part says of itself."""

    version: str
    life: str
    part: int
    epoch: int
    start_ns: int
    wall_ns: int
    config: CoordinatorConfig
    checkpoint: Any
    """What :func:`thaw` reads; None: there is none."""
    fields: dict[str, list[str]]

    def machine(self) -> CoordinatorMachine:
        """The machine as it was when the part was begun. Raises GrantLogError."""
        if self.checkpoint is not None:
            return thaw(self.checkpoint, self.version)
        if self.part != 1:
            raise GrantLogError(
                f"part {self.part} of the log holds no checkpoint", next_step="Replay it together with the parts before"
            )
        try:
            return CoordinatorMachine(self.config, self.epoch)
        except _UNREADABLE as error:
            raise GrantLogError(f"part {self.part} of the log has no usable configuration", why=str(error)) from error


class Part:
    """One file of a log. The header is read at once, records as they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = ""
        """What was skipped at its end, in words; known after :meth:`records`."""
        with self._open() as file:
            self.header = _header(path, file.readline(MAX_LINE_BYTES))

    def _open(self) -> io.BufferedReader:
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise GrantLogError(f"cannot read the grant log {self.path}", why=error.strerror or str(error)) from error

    def records(self) -> Iterator[Record]:
        """In order, up to the end or the first line that isn't whole."""
        plain = Plain(self.header.fields)
        event, effects = plain.decoder(CoordinatorEvent), plain.decoder(_EFFECTS)
        with self._open() as file:
            file.readline(MAX_LINE_BYTES)
            number = 1
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("the line has no end")
                    parts = json.loads(line)
                    record = Record(int(parts[0]), event(parts[1]), effects(parts[2]) if len(parts) > 2 else ())
                except (*_UNREADABLE, PlainError) as error:
                    last = not file.readline(1)
                    self.torn = (
                        f"{self.path}:{number}: the last line is torn (the process was killed while it was written)"
                        if last
                        else f"{self.path}:{number}: not a record ({error}); what follows was left out"
                    )
                    return
                yield record


def _header(path: Path, line: bytes) -> Header:
    if not line:
        raise GrantLogError(f"the grant log {path} is empty", why="its coordinator has not heard of any agent yet")
    try:
        value = json.loads(line)
        found = value["proxyd_grant_log"]
        if found != FORMAT:
            raise GrantLogError(f"{path} has format {found}", why=f"this version reads {FORMAT}")
        config = Plain(value["fields"]).decoder(_CONFIG)(value["config"])
        return Header(
            str(value["version"]),
            str(value["life"]),
            int(value["part"]),
            int(value["epoch"]),
            int(value["start_ns"]),
            int(value["wall_ns"]),
            config,
            value["checkpoint"],
            value["fields"],
        )
    except GrantLogError:
        raise
    except (*_UNREADABLE, PlainError) as error:
        raise GrantLogError(f"{path} is no grant log", why=f"its first line is no header ({error})") from error


def part_path(path: Path, age: int) -> Path:
    """Where the part lies that is ``age`` parts older than the present one (``grants.log``, ``grants.log.1``...)."""
    return path if age == 0 else path.with_name(f"{path.name}.{age}")


def open_log(path: Path) -> list[Part]:
    """The parts of the life that ``path`` belongs to, oldest first. Raises GrantLogError."""
    newest = Part(path)
    parts = [newest]
    age = 1
    while (older := part_path(path, age)).exists():
        part = Part(older)
        if part.header.life != newest.header.life or part.header.part >= parts[0].header.part:
            break
        parts.insert(0, part)
        age += 1
    return parts


# -- checkpoints -------------------------------------------------------------------------------------------------------


def freeze(machine: CoordinatorMachine) -> dict[str, Any] | None:
    """A machine's whole state as plain values; None when it holds something that can't be kept."""
    try:
        return take(machine)
    except SnapshotError as error:
        log.warning("grant log: no checkpoint: %s; this part can't be replayed without the one before", error)
        return None


def thaw(checkpoint: Any, version: str) -> CoordinatorMachine:
    """Inverse of :func:`freeze`. Raises GrantLogError."""
    if version != __version__:
        raise GrantLogError(
            f"the log's checkpoint was made by proxyd {version}, this is {__version__}",
            next_step="Replay it with that version; `proxyd why --log` reads the messages all the same",
        )
    try:
        machine = make(checkpoint)
    except SnapshotError as error:
        raise GrantLogError("the log's checkpoint can't be read", why=str(error)) from error
    if not isinstance(machine, CoordinatorMachine):
        raise GrantLogError(f"the log's checkpoint holds a {type(machine).__name__}, not a machine")
    return machine
