"""What every test shares: the order of the run, and what the machine must offer.

A test that needs namespaces or torch says so with a mark. Where the machine lacks them it skips with the reason, except
under ``CI=true``: there a silent skip would look like a pass, so the test runs and fails.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.groups import GROUPS, group_of, may_hold, room_of

# Where a container sets it, each of the thousands of daemons and trainers started here would compile all of proxyd
# again: half a second of one core each, which doubles a start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

IN_CI = os.environ.get("CI") == "true"
# Cheap and telling first.
_ORDER = ("unit", "property", "sim", "e2e", "wan")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--group", choices=list(GROUPS), help="only the tests of this group (tests/groups.py); all without it"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of the group; those that the command line names are collected all the same."""
    group = config.getoption("--group")
    if group is None or not collection_path.is_file() or not collection_path.name.startswith("test_"):
        return None
    return True if not may_hold(collection_path, group) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        room = room_of(item.path)
        return _ORDER.index(room) if room in _ORDER else len(_ORDER)

    items.sort(key=rank)  # stable: the order inside a room stays
    group = config.getoption("--group")
    if group is None:
        return
    grouped: dict[str, list[pytest.Item]] = {name: [] for name in GROUPS}
    for item in items:
        grouped[group_of(item.path, [mark.name for mark in item.iter_markers()])].append(item)
    inside = grouped.pop(group)
    config.hook.pytest_deselected(items=[item for others in grouped.values() for item in others])
    items[:] = spread(inside) if group == "together" else inside


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """The slow ones at even distances, the first at the start: each worker begins with a stretch of this order, and a
    minute that comes last is one for which all others wait."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    rest = [item for item in items if not item.get_closest_marker("slow")]
    step = -(-len(rest) // max(1, len(slow)))
    parts = [[one, *rest[number * step : (number + 1) * step]] for number, one in enumerate(slow)] or [rest]
    return [item for part in parts for item in part]


@functools.cache
def _without_netns() -> str | None:
    """Why network namespaces cannot be had here, or None."""
    from proxyd.wan.topology import available

    return available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the conditions of ``skipif``, which may need what isn't here."""
    if IN_CI:
        return
    if item.get_closest_marker("netns") and (reason := _without_netns()):
        pytest.skip(f"needs network namespaces: {reason}")
    if item.get_closest_marker("needs_torch") and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install 'proxyd[torch]', or make test WITH_TORCH=1")


@pytest.fixture(autouse=True)
def _no_proxyd_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's PROXYD_* variables must not reach a test."""
    for name in [name for name in os.environ if name.startswith("PROXYD_")]:
        monkeypatch.delenv(name)
