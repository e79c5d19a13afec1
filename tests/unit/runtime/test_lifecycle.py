"""What a daemon sets up before it serves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from proxyd.runtime.lifecycle import GC_THRESHOLDS, Stop, run_daemon


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_a_daemon_serves_with_a_calm_collector_that_still_finds_cycles() -> None:
    seen: list[object] = []

    async def main(stop: Stop) -> None:
        seen.append(gc.get_threshold())
        seen.append(gc.get_freeze_count() > 10_000)
        ended = weakref.ref(Cycle())
        keep = []
        for number in range(GC_THRESHOLDS[0] * 2):
            keep.append([number])
        seen.append(ended())
        stop.ask("done", 3)

    assert run_daemon(main) == 3
    assert seen == [GC_THRESHOLDS, True, None]
