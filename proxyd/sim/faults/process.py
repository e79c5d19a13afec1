"""What runs on a host: a process that can be stopped and has a clock of its own, and one life of a machine in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxyd.core.agent import AgentMachine
from proxyd.core.coordinator import CoordinatorMachine
from proxyd.sim.clock import Alarm

if TYPE_CHECKING:
    from proxyd.sim.faults.world import World


class Process:
    """Something that runs on a host: it can be stopped, and reads what came meanwhile when it goes on."""

    def __init__(self, world: World, offset_ns: int) -> None:
        self.world = world
        self._ahead_ns = offset_ns
        self._stands_ns: int | None = None
        self._stops = 0
        self.unread: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.on_resume: Callable[[], None] = lambda: None

    @property
    def now_ns(self) -> int:
        """Of its own monotonic clock."""
        clock_ns = self.world.clock.now_ns if self._stands_ns is None else self._stands_ns
        return clock_ns + self._ahead_ns

    def world_ns(self, own_ns: int) -> int:
        """When its clock will show ``own_ns``, should it go on running."""
        return own_ns - self._ahead_ns

    @property
    def stopped(self) -> bool:
        """It doesn't get to run."""
        return self._stops > 0

    @property
    def suspended(self) -> bool:
        """Its whole host stands still."""
        return self._stands_ns is not None

    def stop(self, for_ns: int, *, with_clock: bool) -> None:
        """It runs no more until then; ``with_clock``: nor does its clock."""
        self._stops += 1
        clock = with_clock and self._stands_ns is None
        if clock:
            self._stands_ns = self.world.clock.now_ns
        self.world.clock.after(for_ns, self._go_on, clock)

    def _go_on(self, clock: bool) -> None:
        self._stops -= 1
        if clock and self._stands_ns is not None:
            self._ahead_ns -= self.world.clock.now_ns - self._stands_ns
            self._stands_ns = None
        if self._stops:
            return
        # Which of the things that are ready a loop looks at first is anybody's guess.
        resume_first = self.world.rng.random() < 0.5
        if resume_first:
            self.on_resume()
        while self.unread and not self._stops:
            do, args = self.unread.popleft()
            do(*args)
        if not resume_first:
            self.on_resume()


class Life:
    """One life of a process: as long as it is alive, its machine is driven as the daemon's driver does it."""

    machine: AgentMachine | CoordinatorMachine

    def __init__(self, world: World, host: Process) -> None:
        self.world = world
        self.host = host
        self.alive = True
        self._alarm = Alarm(world.clock, self._ring)

    def process(self, do: Callable[..., object], *args: Any) -> None:
        """Do something in this process, when it runs."""
        if not self.alive:
            return
        if self.host.stopped:
            self.host.unread.append((self.process, (do, *args)))
        else:
            do(*args)

    def _ring(self) -> None:
        if self.alive and not self.host.stopped:
            deadline_ns = self.machine.next_deadline_ns()
            if deadline_ns is not None and deadline_ns <= self.host.now_ns:
                self.pass_time()
            else:
                self.set_alarm()

    def set_alarm(self) -> None:
        """As the driver does after each event."""
        deadline_ns = self.machine.next_deadline_ns()
        self._alarm.set(None if deadline_ns is None or not self.alive else self.host.world_ns(deadline_ns))

    def pass_time(self) -> None:
        """The machine's deadline has come."""
        raise NotImplementedError

    def die(self) -> None:
        """Nothing of it runs any more."""
        self.alive = False
        self._alarm.set(None)
