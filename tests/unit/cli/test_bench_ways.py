from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

import pytest

from proxyd.cli import bench_ways
from proxyd.cli.link_bench.backlog import Flow
from proxyd.cli.link_bench.watch import Look
from proxyd.cli.link_bench.ways import ThreeSites, at_once, granted_together, ratio, urgent_figures
from proxyd.core.errors import ConfigError, ProxydError

MS = 1_000_000


def args_of(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_ways.add_arguments(parser)
    return parser.parse_args(options)


def test_three_sites_of_which_one_is_far() -> None:
    scenario = bench_ways.scenario_of(args_of("--senders", "3", "--control-rtt", "80ms"))
    # An agent for each sender and one for urgent messages; the last host is a coordinator's.
    assert scenario.agents == {"a": 4, "b": 4}
    assert scenario.sites == {"a": 5, "b": 5, "c": 1}
    links = scenario.links()
    assert links[("a", "c")].one_way_delay_ns == links[("c", "b")].one_way_delay_ns == 40 * MS
    assert links[("a", "b")].one_way_delay_ns == 30 * MS
    assert not scenario.configured


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--parts", "far,near"], "no part 'near'"),
        (["--senders", "0"], "--senders must be 1 to 50"),
        (["--out", "/nowhere/at/all.json"], "no directory"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        bench_ways.run(args_of(*options))


def test_urgent_messages_are_held_to_two_round_trips_and_a_slot() -> None:
    scenario = bench_ways.scenario_of(args_of())
    flows = [Flow(0, number, 0, (40 + number) * MS) for number in range(100)]
    looks = [Look(0, "estimated", 1, 25_000_000, 1, 1, 1, 1, 1, slot) for slot in (100_000, 250_000)]
    figures = urgent_figures(scenario, flows, looks, 0.98)
    assert figures["messages"] == 100
    assert (figures["p50_seconds"], figures["p99_seconds"]) == (0.089, 0.138)
    assert (figures["slot_seconds"], figures["bound_seconds"]) == (0.01, 0.13)


def test_what_runs_at_once_fails_when_all_have_ended() -> None:
    ended = []

    def fails() -> None:
        raise ProxydError("the second one")

    with pytest.raises(ProxydError, match="the second one"):
        at_once([lambda: ended.append(1), fails, lambda: ended.append(3)])
    assert sorted(ended) == [1, 3]
    assert at_once([lambda: 1, lambda: 2]) == [1, 2]


def test_a_ratio_of_nothing_is_nothing() -> None:
    assert ratio(0.9, 0.0) == 0
    assert ratio(0.9, 1.0) == 0.9


def test_three_sites_have_one_line_out() -> None:
    plain = bench_ways.scenario_of(args_of("--senders", "2", "--hint"))
    three = ThreeSites(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    assert three.agents == {"a": 4, "b": 1, "c": 1}
    assert three.links()[("a", "c")].one_way_delay_ns == 30 * MS
    [line] = three.shared.values()
    assert set(line.links) == {("a", "b"), ("a", "c")}
    assert 'direction = "egress"' in three.told_of_egress
    assert 'capacity = "200000000bit"' in three.told_of_egress
    assert "capacity" not in replace(three, configured=False).told_of_egress


def test_what_is_granted_together_is_summed_at_the_same_moments() -> None:
    def looks(*values: tuple[int, int]) -> list[Look]:
        return [Look(ms * MS, "estimated", 1, 1, granted, 1, 1, 1, 1, 1) for ms, granted in values]

    both = looks((0, 5), (0, 1), (100, 10), (100, 2), (200, 20), (200, 2), (300, 30), (300, 3))
    assert granted_together(both, 50 * MS, 250 * MS) == [12, 22]
    assert granted_together(both[::2], 0, 300 * MS) == [5, 10, 20, 30]
