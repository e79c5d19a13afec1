"""Every scenario file under many seeds: more than 200 runs of both machines on modelled links.

A failure names its seed; ``python -m proxyd.sim tests/scenarios/NAME.toml --seed N`` runs it again, event by event the
same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from proxyd.core.errors import ConfigError
from proxyd.sim.scenario import InvariantError, Result, load_scenario, run_scenario

SCENARIOS = Path(__file__).parents[1] / "scenarios"
SEEDS = {
    "agent_dies": 30,
    "barrier": 10,
    "burst": 4,
    "busy_hosts": 4,
    "cancellations": 20,
    "cold_windows": 10,
    "coordinator_restarts": 20,
    "far_coordinator": 20,
    "full_receiver": 20,
    "lossy": 20,
    "mixed_classes": 15,
    "small_messages": 25,
    "two_way": 20,
}


def run(name: str, seed: int) -> Result:
    path = SCENARIOS / f"{name}.toml"
    replay = f"replay: python -m proxyd.sim tests/scenarios/{name}.toml --seed {seed}"
    try:
        result = run_scenario(path, seed)
    except InvariantError as error:
        pytest.fail(f"{error}\n{replay}")
    assert not result.problems, f"{result.problems}\n{replay}"
    return result


def test_every_scenario_file_is_run() -> None:
    assert {path.stem for path in SCENARIOS.glob("*.toml")} == set(SEEDS)
    assert sum(SEEDS.values()) >= 200


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name, seeds in SEEDS.items() for seed in range(seeds)])
def test_scenario(name: str, seed: int) -> None:
    result = run(name, seed)
    assert result.messages > 0


def test_a_seed_replays_exactly() -> None:
    first, second = run("cancellations", 7), run("cancellations", 7)
    assert first == second
    assert first != run("cancellations", 8)


def test_fallback_carries_on_while_the_coordinator_is_away() -> None:
    result = run("coordinator_restarts", 0)
    assert result.fallback_bytes > 1 << 20
    assert result.delivered == result.messages


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("duration = ", "Invalid value"),
        ('description = "x"\nduration = "1s"\nlinks = []', "no key 'links'"),
        ('description = "x"\nduration = "1 parsec"\nlink = []\nagents = []', "1 parsec"),
        ('description = "x"\nlink = []\nagents = []', "duration"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_scenario(path)
