"""The grant log: what a machine was told and did replays to the same effects."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from proxyd import __version__
from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect
from proxyd.core.events import CoordinatorEvent, SessionOpened
from proxyd.core.ids import AgentName, LinkName
from proxyd.core.messages import AgentHello
from proxyd.runtime.grant_log import GrantLogError, Part, Recorder, freeze, open_log, part_path, thaw
from proxyd.runtime.replay import replay
from proxyd.runtime.snapshot import take
from proxyd.sim.fluid import FluidSender, FluidWorld
from proxyd.wire.envelope import TrafficClass

AB = LinkName("a", "b")
RTT_NS = 40_000_000
START_NS = 77_000_000_000_000
CONFIG = CoordinatorConfig(links=(LinkSettings(AB, 50_000_000, RTT_NS, 250_000),))


class Recorded:
    """A burst of fluid senders, recorded into parts."""

    def __init__(self, path: Path, part_after: int = 0, *, observe: bool = False) -> None:
        self.path = path
        links = tuple(dataclasses.replace(link, observe=observe) for link in CONFIG.links)
        self.machine = CoordinatorMachine(dataclasses.replace(CONFIG, links=links), epoch=5)
        self.lines: list[bytes] = []
        self.recorder = Recorder(self.lines.append)
        self.events = 0
        self.part = 0
        self.part_after = part_after
        senders = [FluidSender(AgentName("a", f"host{n}"), AB, RTT_NS) for n in range(4)]
        self.world = FluidWorld(self.machine, senders, handle=self._handle)
        for session in self.world.senders:
            for size in (8 << 20, 300_000):
                transfer = self.world.send(session, size, TrafficClass(session % 3))
                self.world.at(900_000_000, lambda s=session, t=transfer, z=size: self._done(s, t, z))
        self.world.run(2_000_000_000)
        self.recorder.flush()
        self._end_part()

    def _done(self, session: int, transfer: object, size: int) -> None:
        self.world.done(session, transfer, size, TrafficClass(session % 3))  # type: ignore[arg-type]

    def _handle(self, event: CoordinatorEvent, now_ns: int) -> list[CoordinatorEffect]:
        now_ns += START_NS
        if self.part == 0 or (self.part_after and self.events % self.part_after == 0):
            self._new_part(now_ns)
        self.events += 1
        self.recorder.saw(now_ns, event)
        effects = self.machine.handle(event, now_ns)
        if effects:
            self.recorder.performed(effects)
        return effects

    def _new_part(self, now_ns: int) -> None:
        self.recorder.flush()
        if self.part:
            self._end_part()
            for age in range(self.part - 1, -1, -1):
                part_path(self.path, age).rename(part_path(self.path, age + 1))
        self.recorder.begun(now_ns)
        self.part += 1
        self.lines[:] = [self.recorder.header(self.machine, 5, "life", self.part, 1, checkpoint=self.part > 1)]

    def _end_part(self) -> None:
        self.path.write_bytes(b"".join(self.lines))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "grants.log"


def test_a_run_replays_to_identical_effects(path: Path) -> None:
    run = Recorded(path)
    # FluidWorld starts at 0, the machine's clock does not: the log keeps what the machine saw.
    result = replay(open_log(path))
    assert result.difference is None
    assert result.events == run.events
    assert result.grants == len(run.world.grants) > 20


def test_parts_are_found_and_joined(path: Path) -> None:
    run = Recorded(path, part_after=100)
    parts = open_log(path)
    assert [part.header.part for part in parts] == list(range(1, run.part + 1))
    result = replay(parts)
    assert (result.difference, result.events, result.notes) == (None, run.events, [])


def test_a_later_part_replays_from_its_checkpoint(path: Path) -> None:
    run = Recorded(path, part_after=100)
    part_path(path, run.part - 1).unlink()
    result = replay(open_log(path))
    assert result.difference is None
    assert result.events == run.events - 100


def test_a_shadow_replays_and_is_part_of_a_checkpoint(path: Path) -> None:
    run = Recorded(path, part_after=7, observe=True)
    assert run.part > 2
    [link] = [link for link in run.machine.links_status(START_NS + 2_000_000_000) if link.link == AB]
    assert link.shadow is not None
    assert sum(one.shadow.count for one in link.shadow.classes) == 8
    part_path(path, run.part - 1).unlink()
    machines = []
    result = replay(open_log(path), lambda machine, now_ns, event: machines.append(machine))
    assert result.difference is None
    [again] = [link for link in machines[-1].links_status(START_NS + 2_000_000_000) if link.link == AB]
    assert again == link


def test_a_torn_end_is_skipped_with_a_word(path: Path) -> None:
    run = Recorded(path)
    path.write_bytes(path.read_bytes()[:-7])
    result = replay(open_log(path))
    assert result.difference is None
    assert result.events == run.events - 1
    assert "torn" in result.notes[0]


def test_a_broken_middle_ends_the_reading(path: Path) -> None:
    Recorded(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[20] = b'[12, ["Nonsense", []]]\n'
    path.write_bytes(b"".join(lines))
    result = replay(open_log(path))
    assert result.events == 19
    assert "grants.log:21: not a record" in result.notes[0]


def test_a_broken_part_is_bridged_by_the_checkpoint_of_the_next(path: Path) -> None:
    run = Recorded(path, part_after=100)
    second = part_path(path, run.part - 2)
    lines = second.read_bytes().splitlines(keepends=True)
    second.write_bytes(b"".join(lines[:50]) + b"[[[\n" + b"".join(lines[50:]))
    result = replay(open_log(path))
    assert result.difference is None
    assert result.events == run.events - 51
    assert any("checkpoint" in note for note in result.notes)


def test_the_first_difference_is_shown(path: Path) -> None:
    Recorded(path)
    text = path.read_text()
    changed = text.replace("pipeline: first in line, whole link", "for no reason", 1)
    assert changed != text
    path.write_text(changed)
    difference = replay(open_log(path)).difference
    assert difference is not None
    assert "for no reason" in str(difference.recorded)
    assert "first in line" in str(difference.replayed)
    assert difference.number == next(i for i, line in enumerate(changed.splitlines()) if "for no reason" in line)


def test_the_machine_s_failure_is_a_difference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Recorded(path)
    handle = CoordinatorMachine.handle
    calls = 0

    def fails(machine: CoordinatorMachine, event: CoordinatorEvent, now_ns: int) -> list[CoordinatorEffect]:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyError("a bug")
        return handle(machine, event, now_ns)

    monkeypatch.setattr(CoordinatorMachine, "handle", fails)
    difference = replay(open_log(path)).difference
    assert difference is not None
    assert difference.number == 30
    assert "KeyError: 'a bug'" in str(difference)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty"), (b"hello\n", "no grant log"), (b"{}\n", "no grant log"), (b'{"proxyd_grant_log": 9}\n', "9")],
)
def test_what_is_no_log_is_told(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(GrantLogError, match=words):
        Part(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("part", []), ("epoch", "x"), ("start_ns", None), ("wall_ns", {}), ("fields", 7), ("config", 7), ("config", [[]])],
)
def test_a_header_with_a_value_of_a_wrong_type_is_told(path: Path, key: str, value: object) -> None:
    Recorded(path)
    first, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps({**json.loads(first), key: value}).encode() + b"\n" + rest)
    with pytest.raises(GrantLogError, match="is no grant log"):
        open_log(path)


@pytest.mark.parametrize(("old", "new"), [(b"50000000", b"0"), (b"50000000", b"1e999"), (b"{", b"[" * 100_000)])
def test_a_header_that_makes_no_sense_is_told(path: Path, old: bytes, new: bytes) -> None:
    """What the core refuses, what is beyond every number, what is too deep for a parser: nobody gets a traceback."""
    Recorded(path)
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(GrantLogError):
        replay(open_log(path))


def test_a_record_that_makes_no_sense_ends_the_reading(path: Path) -> None:
    Recorded(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for line in (b"[1e999]\n", b"[" * 100_000 + b"\n", b'[1,["SessionMessage",[1,5]]]\n', b"[null]\n", b"7\n"):
        path.write_bytes(b"".join([*lines[:5], line, *lines[5:]]))
        (part,) = open_log(path)
        assert len(list(part.records())) == 4
        assert "not a record" in part.torn


def test_a_missing_file_is_told(path: Path) -> None:
    with pytest.raises(GrantLogError, match="cannot read"):
        open_log(path)


def test_a_checkpoint_is_the_whole_machine() -> None:
    machine = CoordinatorMachine(CONFIG, epoch=5)
    hello = SessionOpened(1, AgentHello(AgentName("a", "one"), 1, "127.0.0.1:7601"))
    machine.handle(hello, 1000)
    plain = freeze(machine)
    assert plain is not None
    again = thaw(json.loads(json.dumps(plain)), __version__)
    assert again.status(2000) == machine.status(2000)
    with pytest.raises(GrantLogError, match=r"0\.0\.0"):
        thaw(plain, "0.0.0")


def test_a_checkpoint_of_something_else_is_told() -> None:
    with pytest.raises(GrantLogError, match="holds a LinkName"):
        thaw(take(AB), __version__)
    with pytest.raises(GrantLogError, match="can't be read"):
        thaw({"classes": []}, __version__)


def test_a_machine_that_cannot_be_written_down_has_no_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    machine = CoordinatorMachine(CONFIG, epoch=5)
    machine.extra = lambda: None  # type: ignore[attr-defined]
    assert freeze(machine) is None
    assert "no checkpoint: a builtins.function" in caplog.text
