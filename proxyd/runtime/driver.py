"""The loop around a pure machine: event -> ``handle`` -> effects -> timer.

The machine decides and never acts; the driver's owner acts (``perform``) and never decides. What happens while effects
are carried out (a peer hangs up while we write to it) is a new event that waits its turn: the machine is never entered
twice at once, and effects of one event are never split by those of another.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from proxyd.core.events import TimePassed
from proxyd.runtime.timer import DeadlineTimer

EventT = TypeVar("EventT")
EventT_contra = TypeVar("EventT_contra", contravariant=True)
EffectT = TypeVar("EffectT")
EffectT_co = TypeVar("EffectT_co", covariant=True)


class Machine(Protocol[EventT_contra, EffectT_co]):
    """What both machines offer."""

    def handle(self, event: EventT_contra, now_ns: int) -> Sequence[EffectT_co]:
        """Take one event in; say what is to be done."""

    def next_deadline_ns(self) -> int | None:
        """When TimePassed is due; None: not before another event."""


class Timer(Protocol):
    """What the driver needs of :class:`proxyd.runtime.timer.DeadlineTimer`."""

    def set(self, deadline_ns: int | None) -> None:
        """Fire once at (or before) the deadline."""

    def close(self) -> None:
        """Never fire again."""


TimerFactory = Callable[[Callable[[], None]], Timer]


def loop_timer(loop: asyncio.AbstractEventLoop) -> TimerFactory:
    """The timer of a daemon: a timerfd on ``loop``."""
    return lambda callback: DeadlineTimer(loop, callback)


class Driver(Generic[EventT, EffectT]):
    """Runs one machine. All calls come from one thread: that of the loop.

    :param perform: carries out the effects of one event, in order; may call :meth:`handle`.
    :param timer: see :func:`loop_timer`.
    :param record: told of every event with its time, before the machine is; a recording replays to the same effects.
    :param on_failure: told when the machine or ``perform`` raised. The state is not to be trusted after that: the
        driver takes no more events, and the daemon must end (it is restarted with fresh, soft state). Without it the
        exception goes to the caller.
    """

    def __init__(
        self,
        machine: Machine[EventT | TimePassed, EffectT],
        perform: Callable[[Sequence[EffectT]], None],
        *,
        timer: TimerFactory,
        clock: Callable[[], int] = time.monotonic_ns,
        record: Callable[[int, EventT | TimePassed], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.machine = machine
        self._perform = perform
        self._clock = clock
        self._record = record
        self._on_failure = on_failure
        self._waiting: deque[EventT | TimePassed] = deque()
        self._busy = False
        self._closed = False
        self._timer = timer(self._on_timer)

    @property
    def closed(self) -> bool:
        """Closed, or failed: events are dropped."""
        return self._closed

    def now_ns(self) -> int:
        """The clock that the machine sees."""
        return self._clock()

    def start(self) -> None:
        """Set the timer for what the machine wants from the beginning."""
        self._timer.set(self.machine.next_deadline_ns())

    def handle(self, event: EventT | TimePassed) -> None:
        """Feed one event; when effects are being carried out right now, after them."""
        if self._closed:
            return
        self._waiting.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting and not self._closed:
                self._step(self._waiting.popleft())
            if not self._closed:
                self._timer.set(self.machine.next_deadline_ns())
        except Exception as error:
            # Not hidden: the machine's state is lost, and whoever runs the daemon is told or gets the exception.
            self.close()
            if self._on_failure is None:
                raise
            self._on_failure(error)
        finally:
            self._busy = False

    def _step(self, event: EventT | TimePassed) -> None:
        now_ns = self._clock()
        if self._record is not None:
            self._record(now_ns, event)
        effects = self.machine.handle(event, now_ns)
        if effects:
            self._perform(effects)

    def _on_timer(self) -> None:
        deadline_ns = self.machine.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= self._clock():
            self.handle(TimePassed())
        elif not self._closed:
            self._timer.set(deadline_ns)

    def close(self) -> None:
        """Take no more events and let the timer go."""
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self._timer.close()
