"""Who reads the socket.

Theory. Exactly one thread at a time, the *driver*, polls and reads the socket and hands frames to the session under its
lock. A thread that waits for something drives itself: the frame that it waits for then wakes nobody else, and a small
message costs no thread hand-off. Other waiters sleep on a condition; when the driver's own wait is over, one of them
takes the wheel.

A background thread drives while nobody waits, so that posted receives are matched, blocks come back and the agent never
finds a full socket. It stands back for STAND_BACK_S after any waiter has driven: in a loop of small sends and receives
it would otherwise take the wheel, or at least the interpreter, between any two of them. Nobody spins: idle, the
background thread blocks in poll().

While the agent is away (:meth:`Progress.pause`) there is nothing to drive: waiters sleep until their time is up or a
next connection is there, and the background thread copies what there is.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable

from proxyd_client.link import Link

STAND_BACK_S = 0.005
IDLE_S = 1.0
_STAND_BACK_NS = int(STAND_BACK_S * 1e9)


class _Driver(enum.Enum):
    NOBODY = 0
    WAITER = 1
    BACKGROUND = 2


def _nothing() -> None:
    pass


def _no_work() -> bool:
    return False


class Progress:
    """The driving of one session.

    :param link: what is polled.
    :param pump: reads and dispatches without waiting; called with :attr:`lock` held.
    :param idle: called with the lock held when nothing has happened for IDLE_S.
    :param work: work that is due and nobody waits for (copies of posted receives): called by the background thread with
        the lock held, may let go of it in between; returns whether it did something.
    """

    def __init__(
        self, link: Link, pump: Callable[[], None], work: Callable[[], bool], idle: Callable[[], None]
    ) -> None:
        self.lock = threading.Lock()
        self._link = link
        self._pump = pump
        self._work = work
        self._idle = idle
        self._idle_is_due = True
        self._changed = threading.Condition(self.lock)
        self._background_turn = threading.Condition(self.lock)
        self._local = threading.Condition(self.lock)
        self._driver = _Driver.NOBODY
        self._waiters = 0
        self._local_waiters = 0
        self._background_sleeps = False
        self._last_drive_ns = 0
        self._paused = False
        self._ended = False
        self._thread = threading.Thread(target=self._run_background, name="proxyd-client", daemon=True)

    def start(self) -> None:
        """Start the background thread."""
        self._thread.start()

    def pause(self) -> None:
        """The connection is gone; with the lock held, and by the driver itself: nobody polls it."""
        self._paused = True
        self._changed.notify_all()

    def go_on(self, link: Link) -> None:
        """Another connection stands; with the lock held."""
        self._link = link
        self._paused = False
        self._idle_is_due = True
        self._changed.notify_all()
        self._background_turn.notify_all()

    def stop(self) -> None:
        """No more reading; with the lock held. Waiters look at their condition once more and return."""
        self._ended = True
        # They are the session's, which holds this: without the collector the two would keep each other for ever.
        self._pump, self._work, self._idle = _nothing, _no_work, _nothing
        self._link.wake()
        self._changed.notify_all()
        self._background_turn.notify_all()

    def stop_and_wait(self) -> None:
        """Like :meth:`stop`, and wait until no thread polls the socket any more; with the lock held."""
        self.stop()
        while self._driver is not _Driver.NOBODY:
            self._changed.wait()

    def notify(self) -> None:
        """Something changed other than by a frame; with the lock held."""
        if self._waiters:
            self._changed.notify_all()
            if self._driver is _Driver.WAITER:
                self._link.wake()  # it may be the one whose wait is over, and sleeps in poll()
        if self._local_waiters:
            self._local.notify_all()

    @property
    def undriven(self) -> bool:
        """No thread polls the socket; one will in a moment."""
        return self._driver is _Driver.NOBODY and not self._paused and not self._ended

    def wait_locally(self, ready: Callable[[], bool]) -> None:
        """Wait for another thread of this process to do something short, whatever becomes of the session."""
        self._local_waiters += 1
        try:
            while not ready():
                self._local.wait()
        finally:
            self._local_waiters -= 1

    def call_background(self) -> None:
        """There is work that nobody waits for; with the lock held."""
        if self._driver is not _Driver.BACKGROUND:
            self._background_turn.notify()

    def wait_for(self, ready: Callable[[], bool], deadline_ns: int | None) -> bool:
        """Wait, with the lock held, until ``ready()`` or the deadline (monotonic_ns; None: no limit).

        ``ready`` is called with the lock held. Returns its last value; False also after :meth:`stop`.
        """
        if ready():
            return True
        self._waiters += 1
        try:
            while not self._ended:
                remaining_s = None if deadline_ns is None else (deadline_ns - time.monotonic_ns()) / 1e9
                if remaining_s is not None and remaining_s <= 0:
                    # A last look at the socket: with a timeout of 0, or after a long stall of this process, the answer
                    # may be there already.
                    if self._driver is _Driver.NOBODY and not self._paused:
                        self._drive(_Driver.WAITER, 0)
                    break
                if self._paused:
                    self._changed.wait(remaining_s)
                elif self._driver is _Driver.NOBODY:
                    self._drive(_Driver.WAITER, remaining_s)
                else:
                    if self._driver is _Driver.BACKGROUND:
                        self._link.wake()
                    self._changed.wait(remaining_s)
                if ready():
                    return True
            return ready()
        finally:
            self._waiters -= 1
            self._hand_over()

    def poll_now(self) -> None:
        """Handle what is there, without waiting; with the lock held."""
        if self._driver is _Driver.NOBODY and not self._ended and not self._paused:
            self._drive(_Driver.WAITER, 0)
            self._hand_over()

    def _drive(self, driver: _Driver, timeout_s: float | None) -> None:
        """One turn: poll without the lock, read and dispatch with it."""
        happened = True
        self._driver = driver
        self.lock.release()
        try:
            happened = self._link.poll(timeout_s)
        finally:
            self.lock.acquire()
            self._driver = _Driver.NOBODY
            if driver is _Driver.WAITER:
                self._last_drive_ns = time.monotonic_ns()
        if self._ended:
            self._changed.notify_all()
            return
        if happened:
            self._idle_is_due = True
            self._pump()
        elif driver is _Driver.BACKGROUND:
            self._idle_is_due = False
            self._idle()
        # Also when nothing happened: a waiter may have come, and called, just as the time was up.
        if self._waiters > (driver is _Driver.WAITER):
            self._changed.notify_all()

    def _hand_over(self) -> None:
        """The driver leaves: another waiter takes over, or the background thread (after its pause)."""
        if self._driver is not _Driver.NOBODY:
            return
        if self._waiters:
            self._changed.notify()
        elif self._background_sleeps:
            self._background_sleeps = False
            self._background_turn.notify()

    def _run_background(self) -> None:
        with self.lock:
            while not self._ended:
                if self._work():
                    continue
                idle_ns = time.monotonic_ns() - self._last_drive_ns
                if idle_ns < _STAND_BACK_NS and not self._paused:
                    # Also while a waiter drives: it has only just begun, and to call this thread at the end of its wait
                    # would cost it more than this look.
                    self._background_turn.wait((_STAND_BACK_NS - idle_ns) / 1e9)
                    continue
                if self._paused or self._driver is not _Driver.NOBODY or self._waiters:
                    self._background_sleeps = True
                    self._background_turn.wait()
                    self._background_sleeps = False
                    continue
                self._drive(_Driver.BACKGROUND, IDLE_S if self._idle_is_due else None)
