"""``proxyd why --log`` and ``proxyd replay``: the story and the proof from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxyd.cli.main import main
from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect
from proxyd.core.events import CoordinatorEvent
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.runtime.grant_log import Recorder
from proxyd.sim.fluid import FluidSender, FluidWorld
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000
AB = LinkName("a", "b")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two senders of 10 MB each at 400 Mbit/s, recorded."""
    machine = CoordinatorMachine(CoordinatorConfig(links=(LinkSettings(AB, 50_000_000, 40 * MS, 200_000),)), epoch=2)
    lines: list[bytes] = []
    recorder = Recorder(lines.append)

    def handle(event: CoordinatorEvent, now_ns: int) -> list[CoordinatorEffect]:
        if not lines:
            recorder.begun(now_ns)
            lines.append(recorder.header(machine, 2, "test", 1, 0, checkpoint=False))
        recorder.saw(now_ns, event)
        effects = machine.handle(event, now_ns)
        recorder.performed(effects)
        return effects

    world = FluidWorld(machine, [FluidSender(AgentName("a", f"host{n}"), AB, 40 * MS) for n in range(2)], handle=handle)
    world.run(10 * MS)
    sent = [world.send(session, 10_000_000) for session in (1, 2)]
    for session, at_ns in ((1, 260 * MS), (2, 470 * MS)):
        world.at(at_ns, lambda s=session: world.done(s, sent[s - 1], 10_000_000, TrafficClass.PIPELINE))
    world.run(1000 * MS)
    recorder.flush()
    path = tmp_path / "grants.log"
    path.write_bytes(b"".join(lines))
    return path


def test_a_story_for_people(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(TransferId(2, 1)), "--log", str(log)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == ("0000000000000002-1: 9.537 MiB, pipeline, job 'job', from a/host1 to b/gw over a->b")
    assert "1 transfers" in lines[2]
    assert "others went first" in text
    assert "on its way" in lines[-1]


def test_a_story_for_programs(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(TransferId(2, 1)), "--log", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["over"] is True
    assert told["wanted_bytes"] == told["granted_bytes"] == 10_000_000
    assert told["total_seconds"] == pytest.approx(0.46, abs=0.01)
    waits = {wait["cause"]: wait["seconds"] for wait in told["waits"]}
    assert waits["turn"] == pytest.approx(told["waited_seconds"], rel=0.2)
    assert told["waited_seconds"] == pytest.approx(0.2, rel=0.15)
    assert [step["what"] for step in told["timeline"]][:2] == ["requested", "queued"]
    assert told["timeline"][-1]["what"] == "done"


def test_the_first_in_line_waited_for_nothing(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(TransferId(1, 1)), "--log", str(log)]) == 0
    assert "waited for nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("0000000000000009-1", 1, "is not in"), ("nonsense", 2, "names no transfer"), ("12-", 2, "names no transfer")],
)
def test_what_is_not_known(log: Path, name: str, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", name, "--log", str(log)]) == code
    assert words in capsys.readouterr().err


def test_without_a_transfer_those_that_waited_longest(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "--log", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 transfers")
    assert "0000000000000002-1" in lines[1]
    assert "others went first" in lines[1]
    assert main(["why"]) == 2
    assert "which transfer" in capsys.readouterr().err


def test_replay_says_how_much_was_identical(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log)]) == 0
    assert capsys.readouterr().out.endswith("1 part: identical\n")


def test_replay_shows_the_first_difference(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text(log.read_text().replace("whole link", "half of it", 1))
    assert main(["replay", str(log)]) == 1
    text = capsys.readouterr().out
    assert "half of it" in text
    assert "whole link" in text
    assert main(["why", str(TransferId(1, 1)), "--log", str(log)]) == 0
    assert "does not replay beyond" in capsys.readouterr().err


def test_a_missing_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert "cannot read the grant log" in capsys.readouterr().err
