from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxyd.wan import LinkSpec, PolicerSpec, RateSteps, Wan, WanError

GOOD: dict[str, Any] = {"rate_bytes_per_s": 1, "trace": None, "one_way_delay_ns": 0, "buffer_bytes": 1}


def test_a_spec_survives_json() -> None:
    steps = RateSteps(((5, 10**9), (7, 0)))
    for spec in (
        LinkSpec(**GOOD),
        LinkSpec(None, Path("x.trace"), 5, 6, 0.5, 9),
        LinkSpec(None, None, 5, 6, rates=steps, policer=PolicerSpec(1, 2)),
    ):
        assert LinkSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trace": Path("x")}, "exactly one"),
        ({"rate_bytes_per_s": None}, "exactly one"),
        ({"rates": RateSteps(((1, 10**9),))}, "exactly one"),
        ({"rate_bytes_per_s": 0}, "rate_bytes_per_s must be > 0"),
        ({"one_way_delay_ns": -1}, "one_way_delay_ns"),
        ({"buffer_bytes": 0}, "buffer_bytes"),
        ({"loss": 1.0}, "loss"),
    ],
)
def test_a_bad_spec_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(WanError, match=said):
        LinkSpec(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("sites", "link", "mtu", "said"),
    [
        ({}, ("a", "b"), 9000, "1 to 250 sites"),
        ({"a": 0, "b": 1}, ("a", "b"), 9000, "site 'a' has 0 hosts"),
        ({"a": 1, "b": 1}, ("a", "c"), 9000, "a->c"),
        ({"a": 1, "b": 1}, ("a", "a"), 9000, "a->a"),
        ({"a": 1, "b": 1}, ("a", "b"), 100, "mtu"),
    ],
)
def test_a_bad_topology_is_refused_before_anything_is_built(
    sites: dict[str, int], link: tuple[str, str], mtu: int, said: str
) -> None:
    with pytest.raises(WanError, match=said):
        Wan(sites, {link: LinkSpec(**GOOD)}, mtu=mtu)
