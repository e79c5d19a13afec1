"""Holding a lock: how long it is surely ours, when it is lost, and what a stopped process finds when it wakes up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from proxyd.coordinator.election import Election, LockError, LockLostError

SECOND = 1_000_000_000
TTL_NS = 3 * SECOND


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.at: list[tuple[int, Callable[[], None]]] = []

    def clock(self) -> int:
        return self.now_ns

    async def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)
        for due_ns, do in [one for one in self.at if one[0] <= self.now_ns]:
            self.at.remove((due_ns, do))
            do()
        await asyncio.sleep(0)


class Service:
    """What all locks of one name share: who holds it until when. Its own clock is the same."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.owner: object = None
        self.until_ns = 0
        self.fence = 6
        self.away = False

    def free(self) -> bool:
        return self.owner is None or self.time.now_ns >= self.until_ns


class FakeLock:
    """Takes ``slow_ns`` for each answer."""

    def __init__(self, service: Service, slow_ns: int = 0) -> None:
        self.service, self.slow_ns = service, slow_ns
        self.holder = ""
        self.closed = False

    def _ask(self) -> None:
        self.service.time.now_ns += self.slow_ns
        if self.service.away:
            raise LockError("connection refused")

    async def claim(self) -> int | None:
        self._ask()
        service = self.service
        if not service.free():
            self.holder = "other:7600"
            return None
        service.owner, service.until_ns = self, service.time.now_ns + TTL_NS
        service.fence += 1
        return service.fence

    async def renew(self) -> None:
        self._ask()
        if self.service.owner is not self or self.service.free():
            raise LockLostError("it is another one's")
        self.service.until_ns = self.service.time.now_ns + TTL_NS

    async def release(self) -> None:
        self._ask()
        self.service.owner = None

    async def close(self) -> None:
        self.closed = True


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 10))


def made(slow_ns: int = 0, service: Service | None = None) -> tuple[Election, Service, Time]:
    service = service or Service(Time())
    time = service.time
    return Election(FakeLock(service, slow_ns), TTL_NS, clock=time.clock, sleep=time.sleep), service, time


def test_a_free_lock_is_taken_and_held_for_as_long_as_it_is_renewed() -> None:
    async def main() -> None:
        election, service, time = made()
        assert not election.holds()
        assert await election.acquire() == election.fence == 7
        assert election.holds()
        time.at.append((60 * SECOND, lambda: setattr(service, "away", True)))
        why = await election.hold()
        assert "connection refused" in why
        assert 60 * SECOND < time.now_ns <= 60 * SECOND + TTL_NS + SECOND
        assert not election.holds()
        assert service.until_ns >= time.now_ns - SECOND, "given up before the service gives it to another one"

    run(main())


def test_it_is_given_up_before_another_one_can_have_it_however_slow_the_service_answers() -> None:
    async def main() -> None:
        election, service, time = made(slow_ns=900_000_000)
        await election.acquire()
        service.away = True
        while election.holds():
            time.now_ns += 1_000_000
        assert not service.free()
        assert service.until_ns - time.now_ns >= 900_000_000 + TTL_NS // 10 - 2_000_000

    run(main())


def test_two_never_hold_it_at_once_and_the_second_has_the_higher_fence() -> None:
    async def main() -> None:
        service = Service(Time())
        first, _, time = made(service=service)
        second, _, _ = made(service=service)
        await first.acquire()
        waiting = asyncio.ensure_future(second.acquire())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done() or not first.holds()
        # The first is stopped: nothing renews, and the second looks on.
        fence = await waiting
        assert fence > first.fence
        assert second.holds()
        assert not first.holds()
        assert second.holder == "other:7600"
        assert time.now_ns <= TTL_NS + TTL_NS // 5

    run(main())


def test_a_stopped_holder_knows_at_once_when_it_wakes_up() -> None:
    """Before its timer has run, and without a word of the lock service."""

    async def main() -> None:
        election, service, time = made()
        await election.acquire()
        time.now_ns += 30 * SECOND
        assert not election.holds()
        service.away = True
        assert "did not run" in await election.hold()

    run(main())


@pytest.mark.parametrize("trouble", ["lost", "away"])
def test_a_renewal_that_fails_once_is_tried_again_and_a_lock_of_another_one_is_not(trouble: str) -> None:
    async def main() -> None:
        election, service, time = made()
        await election.acquire()
        if trouble == "away":
            service.away = True
            time.at.append((1_500_000_000, lambda: setattr(service, "away", False)))
            time.at.append((20 * SECOND, lambda: setattr(service, "owner", "another")))
            assert await election.hold() == "it is another one's"
            assert time.now_ns >= 20 * SECOND
        else:
            service.owner = "another"
            assert await election.hold() == "it is another one's"
            assert time.now_ns <= SECOND
        assert not election.holds()

    run(main())


def test_a_service_that_is_away_is_waited_for() -> None:
    async def main() -> None:
        election, service, time = made()
        service.away = True
        time.at.append((100 * SECOND, lambda: setattr(service, "away", False)))
        assert await election.acquire() == 7
        assert 100 * SECOND <= time.now_ns <= 101 * SECOND

    run(main())


def test_who_resigns_lets_the_next_one_in_at_once() -> None:
    async def main() -> None:
        service = Service(Time())
        first, _, time = made(service=service)
        second, _, _ = made(service=service)
        await first.acquire()
        await first.resign()
        assert not first.holds()
        assert await second.acquire() == first.fence + 1
        assert time.now_ns == 0
        await first.resign()
        assert not service.free(), "what is another one's isn't released"

    run(main())
