"""Every scenario file under many seeds: more than 200 runs of both machines on modelled links.

A failure names its seed; ``python -m proxyd.sim tests/scenarios/NAME.toml --seed N`` runs it again, event by event the
same.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from proxyd.core.errors import ConfigError
from proxyd.sim.scenario import InvariantError, Result, Run, load_scenario, run_scenario

SCENARIOS = Path(__file__).parents[1] / "scenarios"
SEEDS = {
    "agent_dies": 20,
    "barrier": 8,
    "burst": 4,
    "busy_hosts": 3,
    "cancellations": 16,
    "checkpoints": 5,
    "cold_windows": 10,
    "coordinator_restarts": 16,
    "far_coordinator": 18,
    "full_receiver": 16,
    "lossy": 16,
    "mixed_classes": 12,
    "moving_link": 3,
    "others_on_the_link": 2,
    "pipeline_both_ways": 8,
    "policed": 2,
    "small_messages": 25,
    # Three to eight seconds of processor time each, and the links themselves depend little on the seed: two seeds.
    "three_sites": 2,
    "three_sites_known": 2,
    "three_sites_turns": 2,
    "two_way": 14,
    "two_way_full": 2,
}

LINK = """description = "x"
duration = "1s"
[[link]]
from = "a"
to = "b"
capacity = "10Mbit"
rtt = "10ms"
buffer = "0.5bdp"
"""


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


def test_a_link_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text(
        LINK
        + """trace = "wild"
cross = "1Mbit"
cross_on = "1s"
cross_off = "2s"
policer = "5Mbit"
policer_burst = "30kB"
live = true
[[link]]
from = "b"
to = "a"
capacity = "10Mbit"
rtt = "10ms"
buffer = "20kB"
steps = [["500ms", 0.5]]
[[agents]]
site = "a"
count = 1
first_rank = 0
"""
    )
    there, back = load_scenario(path).links
    first, same, other = (there.model(seed, 10_000_000_000) for seed in (1, 1, 2))
    assert first.trace is not None
    assert same.trace is not None
    assert other.trace is not None
    assert first.trace.mean_bytes_per_s == pytest.approx(1_250_000, rel=0.001)
    assert first.trace.rate_at(0) == same.trace.rate_at(0) != other.trace.rate_at(0)
    assert first.buffer_bytes == 6_250
    assert first.cross is not None
    assert first.policer is not None
    assert (first.cross.off_ns, first.policer.burst_bytes) == (2_000_000_000, 30_000)
    assert (there.settings().capacity_bytes_per_s, there.settings().live) == (0, True)
    assert (back.settings().capacity_bytes_per_s, back.settings().live) == (1_250_000, False)
    halved = back.model(1, 10_000_000_000).trace
    assert halved is not None
    assert halved.rate_at(600_000_000) == 625_000


THREE_SITES = """description = "two links out of one site, each as fast as the line that they share"
duration = "60s"
[[line]]
site = "a"
direction = "egress"
capacity = "100Mbit"
buffer = "200kB"
[[agents]]
site = "a"
count = 2
first_rank = 0
"""


def test_links_out_of_a_site_share_its_access_line(tmp_path: Path) -> None:
    """The coordinator is not told of the line here: both links are granted in full, and the line drops."""
    text = THREE_SITES
    for src, dst in permutations("abc", 2):
        text += f'[[link]]\nfrom = "{src}"\nto = "{dst}"\n'
        text += 'capacity = "100Mbit"\nrtt = "20ms"\nbuffer = "1bdp"\n'
    for number, site in enumerate("bc"):
        text += f'[[agents]]\nsite = "{site}"\ncount = 1\nfirst_rank = {2 + number}\n'
        text += f'[[backlog]]\nat = "1s"\nfor = "4s"\nfrom = [{number}, {number}]\nto = [{2 + number}, {2 + number}]\n'
        text += 'size = "1MiB"\ntraffic = "pipeline"\n'
    path = tmp_path / "three_sites.toml"
    path.write_text(text)
    run = Run(load_scenario(path), 1)
    result = run.result()
    (line,) = run.world.access.values()
    assert result.delivered == result.messages > 20
    assert line.dropped > 20
    assert result.drops == line.dropped  # nothing is left to drop behind it
    seconds = result.simulated_ns / 1e9 - 1
    assert result.delivered * (1 << 20) / seconds < 12_500_000


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
        (LINK + 'trace = "stormy"\n[[agents]]', "'stormy' is no class"),
        (LINK + 'cross = "1Mbit"\ncross_on = "1s"\n[[agents]]', "cross_off"),
        (LINK + 'policer = "1Mbit"\n[[agents]]', "policer_burst"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_scenario(path)
