"""A graph of the core's objects comes back as it was, and nothing else ever does."""

from __future__ import annotations

import json
import types
from collections import OrderedDict, deque
from typing import Any

import pytest

from proxyd.core.bandwidth import LinkEstimator, LinkSettings
from proxyd.core.ids import AgentName, LinkName
from proxyd.core.tally import Flow
from proxyd.runtime.snapshot import SnapshotError, make, take
from proxyd.wire.envelope import TrafficClass

AB = LinkName("a", "b")


def again(value: object) -> Any:
    """Through JSON and back."""
    return make(json.loads(json.dumps(take(value))))


@pytest.mark.parametrize(
    "value",
    [
        [1, 2.5, "x", True, None, -(1 << 62)],
        (1, (2, (3, []))),
        {1, 2},
        frozenset({(1, 2), (3, 4)}),
        {AB: 1, AgentName("a", "b"): [AB], (1, 2): {}},
        OrderedDict([("b", 1), ("a", 2)]),
        b"\x00\xff",
        [TrafficClass.BULK, TrafficClass],
        Flow(1, 2, 3),
        float("inf"),
    ],
)
def test_values_come_back(value: object) -> None:
    found = again([value])[0]
    assert found == value
    assert type(found) is type(value)


def test_a_deque_keeps_its_length_and_a_mapping_stays_read_only() -> None:
    short, mapping = again([deque([1, 2, 3], 3), types.MappingProxyType({"a": 1})])
    short.append(4)
    assert list(short) == [2, 3, 4]
    assert mapping == {"a": 1}
    assert isinstance(mapping, types.MappingProxyType)


def test_what_is_one_object_stays_one_and_circles_close() -> None:
    one: list[object] = [AB]
    one += [one, {"again": one}]
    found = again([one, one])
    assert found[0] is found[1]
    assert found[0][1] is found[0]
    assert found[0][2]["again"] is found[0]


def test_objects_with_slots_and_their_methods() -> None:
    estimator = LinkEstimator(LinkSettings(AB, 1_000_000, 40_000_000, 100_000))
    [found, method] = again([estimator, estimator.min_rtt_ns])
    assert method.__self__ is found
    assert method(1) == estimator.min_rtt_ns(1)
    assert found.estimate(1) == estimator.estimate(1)


def test_a_long_chain_needs_no_deep_stack() -> None:
    chain: list[Any] = []
    for _ in range(50_000):
        chain = [chain]
    found, length = again(chain), 0
    while found:
        found, length = found[0], length + 1
    assert length == 50_000


class Stranger:
    """No class of the core."""


@pytest.mark.parametrize("value", [Stranger(), print, lambda: None, iter([]), ValueError("x"), complex(1), object])
def test_what_is_not_the_core_s_has_no_form(value: object) -> None:
    with pytest.raises(SnapshotError, match="no plain form"):
        take([value])


def graph(*nodes: list[Any], classes: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"classes": [*classes], "layouts": [[0, ["__class__"]]] if classes else [], "nodes": [*nodes]}


LINK_NAME = "proxyd.core.ids:LinkName"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (graph(["list", []], classes=("os:system",)), "holds no os:system"),
        (graph(["list", []], classes=("builtins:object",)), "holds no builtins"),
        (graph(["list", []], classes=("proxyd.core.../os:x",)), "holds no"),
        (graph(["list", []], classes=("proxyd.runtime.grant_log:Part",)), "holds no"),
        (graph(["list", []], classes=("proxyd.core.bandwidth:deque",)), "no class"),
        (graph(["list", []], classes=("proxyd.core.units:parse_rate",)), "no class"),
        (graph(["list", []], classes=("proxyd.core.not_there:X",)), "No module"),
        (graph(["method", [1], "append"], ["list", []]), "no method of the core"),
        (graph(["method", [1], "__class__"], ["named", 0, ["a", "b"]], classes=(LINK_NAME,)), "no method of the core"),
        (graph(["object", 0, ["a"]], classes=(LINK_NAME,)), "not a graph"),
        (graph(["object", 0, ["a"]], classes=("proxyd.core.window:Account",)), "not a graph"),
        (graph(["enum", 0, "x"], classes=(LINK_NAME,)), "is no Enum"),
        (graph(["named", 0, []], classes=("proxyd.core.units:Unit",)), "no class"),
        (graph(["tuple", [[0]]]), "without itself"),
        (graph(["list", [[7]]]), "not a graph"),
        (graph(["call", "print"]), "no nodes of kind call"),
        ([], "not a graph"),
        (None, "not a graph"),
    ],
)
def test_nothing_else_is_made(bad: Any, words: str) -> None:
    with pytest.raises(SnapshotError, match=words):
        make(bad)
