"""The timerfd: fires, moves forward, never early."""

from __future__ import annotations

import asyncio
import time

import uvloop

from proxyd.runtime.timer import DeadlineTimer


def run(main):  # type: ignore[no-untyped-def]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_it_fires_after_the_deadline_and_once() -> None:
    async def main() -> list[int]:
        fired: list[int] = []
        done = asyncio.Event()
        timer = DeadlineTimer(asyncio.get_running_loop(), lambda: (fired.append(time.monotonic_ns()), done.set()))
        deadline_ns = time.monotonic_ns() + 3_000_000
        timer.set(deadline_ns)
        await asyncio.wait_for(done.wait(), 5)
        timer.close()
        return [at_ns - deadline_ns for at_ns in fired]

    late = run(main)
    assert len(late) == 1
    assert late[0] >= 0


def test_an_earlier_deadline_takes_over_and_none_disarms() -> None:
    async def main() -> int:
        fired = asyncio.Event()
        timer = DeadlineTimer(asyncio.get_running_loop(), fired.set)
        begun_ns = time.monotonic_ns()
        timer.set(begun_ns + 3_600_000_000_000)
        timer.set(begun_ns + 1_000_000)
        await asyncio.wait_for(fired.wait(), 5)
        fired.clear()
        timer.set(time.monotonic_ns() + 20_000_000)
        timer.set(None)
        try:
            await asyncio.wait_for(fired.wait(), 0.06)
        except TimeoutError:
            return 1
        finally:
            timer.close()
        return 0

    assert run(main) == 1


def test_a_deadline_in_the_past_fires_at_once() -> None:
    async def main() -> None:
        fired = asyncio.Event()
        timer = DeadlineTimer(asyncio.get_running_loop(), fired.set)
        timer.set(1)
        await asyncio.wait_for(fired.wait(), 5)
        timer.close()

    run(main)
