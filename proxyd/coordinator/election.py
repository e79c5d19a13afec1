"""Which of several coordinators of one name is active: the one that holds that name's lock.

The lock is an existing service's (:mod:`proxyd.coordinator.etcd_lock`, :mod:`proxyd.coordinator.kubernetes_lock`);
nothing here is a protocol of ours. A :class:`Lock` has three verbs; :class:`Election` calls them at the right times.

Theory of operation
-------------------
A lock is held for a *ttl* and has to be renewed before that is over; who fails to has lost it, and another one may have
it. Each holder has a higher *fence* than the one before: it is the epoch of its grants, and agents that have heard a
higher one take no word from a lower one (:mod:`proxyd.core.owners`).

**Time.** A renewal counts from the moment at which it was *asked for*, on this host's clock: the lock service has begun
its own count later, so it ends later. A tenth is taken off for clocks that run at different speeds. The clock is one
that goes on while the host sleeps (CLOCK_BOOTTIME); the wall clock has no part in it.

**Stopped processes.** A process that was stopped (SIGSTOP, a paused machine) wakes up in the middle of whatever it did,
and believes that it is active. So :meth:`Election.holds` is asked before anything is sent, and not only by a timer.
Between that question and the send the process can be stopped once more: what leaves then is of an old epoch, and agents
refuse it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from proxyd.core.errors import ProxydError
from proxyd.core.units import NS_PER_S

log = logging.getLogger("proxyd.coordinator.election")

RENEWALS = 3
"""Tries to renew within a ttl: one may be lost, and one more is late."""
MARGIN = 10
"""A tenth of the ttl is not used."""
POLLS = 10
"""How often in a ttl a standby looks whether the lock is free: the most that it adds to the time without a holder."""
LEAST_POLL_NS = 100_000_000


class LockError(ProxydError):
    """The lock service could not be asked, or answered something unexpected. To be tried again."""

    code = "lock-service"


class LockLostError(ProxydError):
    """The lock is somebody else's now, or nobody's."""

    code = "lock-lost"


class Lock(Protocol):
    """One lock of one name, in some lock service. Calls may take long; the election bounds them."""

    async def claim(self) -> int | None:
        """Take the lock if it is free; answers the fence, or None and says in ``holder`` who has it.

        :raises LockError: the service could not be asked.
        """

    async def renew(self) -> None:
        """Hold it for another ttl.

        :raises LockLostError: it isn't ours any more.
        :raises LockError: the service could not be asked.
        """

    async def release(self) -> None:
        """Let it go, so that another one needn't wait for its ttl. Raises LockError."""

    async def close(self) -> None:
        """Hang up."""

    @property
    def holder(self) -> str:
        """Where the present holder says that it is reached; "" when nobody is known."""


def boot_clock_ns() -> int:
    """Time that never steps, and goes on while the host sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Election:
    """One coordinator's part in it: stand by, hold, lose.

    :param ttl_ns: of the lock.
    :param sleep: waits so many seconds; tests have their own time.
    """

    def __init__(
        self,
        lock: Lock,
        ttl_ns: int,
        *,
        clock: Callable[[], int] = boot_clock_ns,
        sleep: Callable[[float], Awaitable[object]] | None = None,
    ) -> None:
        self._lock = lock
        self._ttl_ns = ttl_ns
        self._clock = clock
        self._sleep = sleep or asyncio.sleep
        self._valid_until_ns = 0
        self.fence = 0
        """Of the lock that is or was held; 0: never yet."""

    @property
    def holder(self) -> str:
        """Where the active one is reached, as far as is known."""
        return self._lock.holder

    def holds(self) -> bool:
        """Whether the lock is surely ours at this moment. Cheap: asked before every send."""
        return self._clock() < self._valid_until_ns

    async def _pause(self, for_ns: int) -> None:
        await self._sleep(for_ns / NS_PER_S)

    async def acquire(self) -> int:
        """Stand by until the lock is ours; answers its fence. Never raises for a lock service that is away."""
        told = ""
        poll_ns = max(LEAST_POLL_NS, self._ttl_ns // POLLS)
        while True:
            asked_ns = self._clock()
            try:
                async with asyncio.timeout(self._ttl_ns / NS_PER_S):
                    fence = await self._lock.claim()
                trouble = ""
            except (LockError, TimeoutError) as error:
                fence, trouble = None, str(error) or "no answer"
            if fence is not None:
                self.fence = fence
                self._valid_until_ns = asked_ns + self._ttl_ns - self._ttl_ns // MARGIN
                if self.holds():
                    return fence
                trouble = "it was granted too late to be of use"
            if trouble != told:
                told = trouble
                if trouble:
                    log.warning("the lock can't be had: %s; trying again", trouble)
            # Several standbys: not all at once.
            await self._pause(int(poll_ns * random.uniform(0.8, 1.2)))

    async def hold(self) -> str:
        """Renew until the lock is lost; answers why."""
        trouble = ""
        while True:
            await self._pause(self._ttl_ns // RENEWALS)
            asked_ns = self._clock()
            if asked_ns >= self._valid_until_ns:
                away_s = (asked_ns - self._valid_until_ns) / NS_PER_S
                return f"it ended {away_s:.1f} s ago and was not renewed ({trouble or 'this process did not run'})"
            try:
                # No longer than it is ours: then it is over, whatever the answer would be.
                async with asyncio.timeout(min(self._ttl_ns // RENEWALS, self._valid_until_ns - asked_ns) / NS_PER_S):
                    await self._lock.renew()
            except LockLostError as error:
                self._valid_until_ns = 0
                return str(error)
            except (LockError, TimeoutError) as error:
                if not trouble:
                    log.warning("the lock could not be renewed: %s; trying again", str(error) or "no answer")
                trouble = str(error) or "no answer in time"
            else:
                trouble = ""
                self._valid_until_ns = asked_ns + self._ttl_ns - self._ttl_ns // MARGIN

    async def resign(self) -> None:
        """An orderly end: another one may take over at once."""
        held, self._valid_until_ns = self.holds(), 0
        try:
            async with asyncio.timeout(self._ttl_ns / RENEWALS / NS_PER_S):
                if held:
                    await self._lock.release()
                await self._lock.close()
        except (LockError, TimeoutError) as error:
            log.info("the lock could not be released: %s; it ends by itself", str(error) or "no answer")
