"""What shadow mode found, as metrics, on the wire and for people."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from proxyd.cli.status import print_shadow
from proxyd.coordinator import shadow_metrics as module
from proxyd.coordinator.daemon import machine_config
from proxyd.coordinator.shadow_metrics import shadow_families
from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.coordinator_status import LinkStatus
from proxyd.core.ids import LinkName
from proxyd.core.shadow import Distribution, ShadowClass, ShadowStatus
from proxyd.runtime.config import parse_config
from proxyd.runtime.metrics import MAX_LABEL_SETS, make_registry
from proxyd.runtime.translate_admin import link_status
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000


def spread(*milliseconds: int) -> Distribution:
    found = Distribution()
    for one in milliseconds:
        found.add(one * MS)
    return found


def shadow(abandoned: int = 0) -> ShadowStatus:
    classes = tuple(ShadowClass(traffic, spread(100, 300), spread(50, 150), spread(0, 70)) for traffic in TrafficClass)
    return ShadowStatus(classes, spread(20, 40), spread(0, 2), open=3, behind=1, abandoned=abandoned)


def links(observed: int, found: ShadowStatus | None = None) -> list[LinkStatus]:
    settings = tuple(LinkSettings(LinkName("a", f"b{n}"), 50_000_000, 40 * MS) for n in range(observed + 1))
    status = CoordinatorMachine(CoordinatorConfig(links=settings), epoch=1).links_status(0)
    return [dataclasses.replace(one, shadow=found or shadow()) if n else one for n, one in enumerate(status)]


def values(found: list[LinkStatus], name: str) -> dict[tuple[str, ...], float]:
    [family] = [family for family in shadow_families(found) if family.name == name]
    return {(*sample.labels.values(), sample.suffix): sample.value for sample in family.samples}


def test_both_ways_side_by_side() -> None:
    found = values(links(1), "proxyd_shadow_completion_seconds")
    assert found["a->b1", "pipeline", "real", "_count"] == 2
    assert found["a->b1", "pipeline", "real", "_sum"] == pytest.approx(0.4)
    assert found["a->b1", "pipeline", "shadow", "_sum"] == pytest.approx(0.2)
    assert found["a->b1", "sync", "shadow", "0.064", "_bucket"] == 1
    assert found["a->b1", "sync", "shadow", "0.256", "_bucket"] == 2
    assert found["a->b1", "sync", "shadow", "+Inf", "_bucket"] == 2
    assert values(links(1), "proxyd_shadow_wait_seconds")["a->b1", "bulk", "_sum"] == pytest.approx(0.07)
    assert values(links(1), "proxyd_shadow_queue_seconds")["a->b1", "real", "_sum"] == pytest.approx(0.06)
    assert values(links(1), "proxyd_link_observed") == {("a->b0", ""): 0, ("a->b1", ""): 1}
    assert values(links(1), "proxyd_shadow_open_transfers") == {("a->b1", ""): 3}


def test_series_are_bounded_and_nothing_is_lost() -> None:
    many = links(module.MAX_LINKS + 5)
    for family in shadow_families(many):
        assert len(family.samples) <= MAX_LABEL_SETS
    completions = values(many, "proxyd_shadow_completion_seconds")
    assert completions["other", "sync", "real", "_count"] == 2 * 5
    assert values(many, "proxyd_shadow_open_transfers")["other", ""] == 15


def test_prometheus_takes_them() -> None:
    registry = make_registry(lambda: shadow_families(links(2)))
    found = registry.get_sample_value(
        "proxyd_shadow_completion_seconds_count", {"link": "a->b2", "traffic_class": "bulk", "way": "shadow"}
    )
    assert found == 2


def test_the_wire_and_the_table() -> None:
    granted, observed = links(1, shadow(abandoned=7))
    assert not link_status(granted).observe
    message = link_status(observed)
    assert message.observe
    assert message.shadow.classes[0].real.mean_ns == 200 * MS
    assert message.shadow.classes[0].shadow.most_ns == 150 * MS
    assert (message.shadow.open_transfers, message.shadow.behind_transfers) == (3, 1)
    out = io.StringIO()
    print_shadow(Console(file=out, width=200), [link_status(granted), message])
    text = out.getvalue()
    assert "-50 %" in text
    assert "a->b0" not in text
    assert "configured too low" in text


@pytest.mark.parametrize(
    ("coordinator", "link", "unconfigured", "configured"),
    [
        ("", "", False, False),
        ('mode = "observe"', "", True, True),
        ('mode = "observe"', 'mode = "grant"', True, False),
        ("", 'mode = "observe"', False, True),
    ],
)
def test_the_mode_of_a_link_and_of_all(coordinator: str, link: str, unconfigured: bool, configured: bool) -> None:
    text = f'[coordinator]\n{coordinator}\n[[link]]\nfrom = "a"\nto = "b"\n{link}\n'
    config = machine_config(parse_config(text, "test"))
    assert config.observe is unconfigured
    assert [one.observe for one in config.links] == [configured]
