"""A coordinator's log of a simulated run replays to identical effects: nothing but its events moves the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxyd.core.effects import CoordinatorEffect
from proxyd.core.events import CoordinatorEvent
from proxyd.runtime.grant_log import Recorder, open_log
from proxyd.runtime.replay import replay
from proxyd.sim.scenario import COORDINATOR, Run, load_scenario

SCENARIOS = Path(__file__).parents[1] / "scenarios"


def record(run: Run, path: Path) -> int:
    """Run it with a log at ``path``; answers the number of events."""
    machine = run.world.coordinators[COORDINATOR].machine
    handle = machine.handle
    lines: list[bytes] = []
    recorder = Recorder(lines.append)
    epoch = machine.epoch
    events = 0

    def recorded(event: CoordinatorEvent, now_ns: int) -> list[CoordinatorEffect]:
        nonlocal events
        events += 1
        recorder.begun(now_ns)
        if not lines:
            lines.append(recorder.header(machine, epoch, "sim", 1, 0, checkpoint=False))
        recorder.saw(now_ns, event)
        effects = handle(event, now_ns)
        recorder.performed(effects)
        return effects

    machine.handle = recorded  # type: ignore[method-assign]
    run.result()
    recorder.flush()
    path.write_bytes(b"".join(lines))
    return events


@pytest.mark.parametrize("name", ["mixed_classes", "busy_hosts", "cancellations", "agent_dies", "three_sites"])
def test_a_simulated_run_replays(name: str, tmp_path: Path) -> None:
    events = record(Run(load_scenario(SCENARIOS / f"{name}.toml"), 3), tmp_path / "log")
    result = replay(open_log(tmp_path / "log"))
    assert result.difference is None
    assert result.events == events
    assert result.grants > 0
