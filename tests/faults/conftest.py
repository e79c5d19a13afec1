"""The fault suite: real daemons, broken on purpose. Everything here carries the mark ``faults``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import _faulthandler, pytest_runtest_makereport, start
from tests.faults.proxy import FlakyProxy

__all__ = ["_faulthandler", "proxy", "pytest_runtest_makereport", "start"]

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)


@pytest.fixture
def proxy() -> Iterator[FlakyProxy]:
    """A proxy without a target yet."""
    with FlakyProxy() as one:
        yield one
