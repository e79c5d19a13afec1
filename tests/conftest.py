"""What every test shares: the order of the run, and what the machine must offer.

A test that needs namespaces or torch says so with a mark. Where the machine lacks them it skips with the reason, except
under ``CI=true``: there a silent skip would look like a pass, so the test runs and fails.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import pytest

IN_CI = os.environ.get("CI") == "true"
# Cheap and telling first: a broken core shows in seconds, not after the emulated WAN has run.
_ORDER = ("unit", "property", "scenarios", "sim", "client", "agent", "coordinator", "e2e", "wan")
_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        try:
            room = item.path.relative_to(_TESTS).parts[0]
        except ValueError:
            return len(_ORDER)
        return _ORDER.index(room) if room in _ORDER else len(_ORDER)

    items.sort(key=rank)  # stable: the order inside a room stays


@functools.cache
def _without_netns() -> str | None:
    """Why network namespaces cannot be had here, or None."""
    from proxyd.wan.topology import available

    return available()


def pytest_runtest_setup(item: pytest.Item) -> None:
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
