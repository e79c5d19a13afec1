"""How long this trainer stands still for messages: what a GPU that waits for the network costs, told to the agent.

Counted is the time in which at least one thread of the trainer is blocked in ``recv``, in ``wait`` of a receive, or
(with torch) in ``wait`` of a collective across sites; several threads at once count once, so a rank waits at most a
second per second. The library's own threads don't count: what they wait for overlaps with the trainer's work. Nor does
a loop around ``done()``, or a wait for a future.

The agent hears of it about twice a second, by a frame that goes along with the next one that leaves anyway; a thread
that waits for longer looks up for it. So a trainer that hangs shows while it hangs. What a trainer waited while its
agent was away is told to the agent's next life.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from proxyd.wire.client import Waited, encode

if TYPE_CHECKING:
    from proxyd_client.core import SessionCore

TELL_EVERY_NS = 500_000_000

_library_threads: set[int] = set()


@contextmanager
def library_thread() -> Iterator[None]:
    """The calling thread is the library's: while it waits, the trainer may be computing."""
    _library_threads.add(threading.get_ident())
    try:
        yield
    finally:
        _library_threads.discard(threading.get_ident())


class Waiting:
    """One session's. As a context manager: the calling thread, without the session's lock, is blocked for a message.

    All figures are under that lock: a small message is a matter of microseconds, and another lock would cost some.
    """

    def __init__(self, core: SessionCore, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._core = core
        self._clock = clock
        self._blocked = 0
        self._since_ns = 0
        self._untold_ns = 0
        self._told_at_ns = clock()

    def __enter__(self) -> None:
        if threading.get_ident() not in _library_threads:
            with self._core.lock:
                self._begin(self._clock())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.get_ident() not in _library_threads:
            with self._core.lock:
                self._count(self._clock())
                self._blocked -= 1

    def wait_for(self, ready: Callable[[], bool], deadline_ns: int | None) -> bool:
        """As :meth:`Progress.wait_for`, counted; with the session's lock held."""
        counts = threading.get_ident() not in _library_threads
        now_ns = self._clock()
        if counts:
            self._begin(now_ns)
        try:
            while True:
                until_ns = now_ns + TELL_EVERY_NS
                last = deadline_ns is not None and deadline_ns <= until_ns
                done = self._core.progress.wait_for(ready, deadline_ns if last else until_ns)
                now_ns = self._clock()
                if done or last or now_ns < until_ns:  # the latter: the session has ended
                    return done
                self.tell()
        finally:
            if counts:
                self._count(self._clock())
                self._blocked -= 1
            if now_ns - self._told_at_ns >= TELL_EVERY_NS:
                self.tell()

    def tell(self, *, now: bool = False) -> None:
        """Tell the agent, if that is due, or ``now``; with the session's lock held."""
        core, at_ns = self._core, self._clock()
        if core.away or core.failure is not None or (at_ns - self._told_at_ns < TELL_EVERY_NS and not now):
            return
        self._count(at_ns)
        waited_ns, self._untold_ns = self._untold_ns, 0
        self._told_at_ns = at_ns
        if not waited_ns:
            return
        frame = Waited(waited_ns=waited_ns)
        if now:
            core.link.send(frame)  # what goes along with the next frame goes behind it, and this may be the good-bye
        else:
            core.link.send_with_next(encode(frame))

    def _begin(self, now_ns: int) -> None:
        if not self._blocked:
            self._since_ns = now_ns
        self._blocked += 1

    def _count(self, now_ns: int) -> None:
        if self._blocked:
            self._untold_ns += now_ns - self._since_ns
            self._since_ns = now_ns
