"""Connections as TCP makes them, without TCP: bytes keep their order, are delayed, held up, or die with the connection.

A :class:`Pipe` is one direction of one connection. While its direction is blocked (a partition, a host without power)
what is due waits at the end of the line, as TCP's retransmissions would; when the direction opens again all of it
comes, in order. A :class:`Connection` has pipes both ways and two ends, which learn of its end at different times: by a
word of the other end, or by silence.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from proxyd.sim.clock import Clock
from proxyd.sim.faults.plan import MS

LATE_NS = 300 * MS
FOUND_DEAD = 1.5
"""A silent connection is found dead between one and so many timeouts."""


class Network:
    """Delays, blocked directions, and who has to be told when they open.

    :param delay_ns: of one direction, without jitter.
    """

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        delay_ns: Callable[[Hashable, Hashable], int],
        silence_ns: int,
        late: float,
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.late = late
        self._delay_ns = delay_ns
        self.silence_ns = silence_ns
        self._blocked: dict[tuple[Hashable, Hashable], int] = {}
        """How many faults block it now."""
        self._pipes: dict[tuple[Hashable, Hashable], dict[Pipe, None]] = {}
        self._blocks = 0

    def delay_ns(self, src: Hashable, dst: Hashable) -> int:
        """Of one message now."""
        delay = self._delay_ns(src, dst) + self.rng.randrange(20_000, 300_000)
        if self.late and self.rng.random() < self.late:
            delay += self.rng.randrange(LATE_NS)
        return delay

    def is_blocked(self, src: Hashable, dst: Hashable) -> bool:
        """Nothing arrives."""
        return (src, dst) in self._blocked

    def reaches(self, one: Hashable, other: Hashable) -> bool:
        """Both ways are open."""
        return (one, other) not in self._blocked and (other, one) not in self._blocked

    def block(self, src: Hashable, dst: Hashable) -> None:
        """From now on nothing arrives; once more if it was blocked already."""
        key = (src, dst)
        before = self._blocked.get(key, 0)
        self._blocked[key] = before + 1
        if not before:
            for pipe in self._pipes.get(key, ()):
                pipe.blocked_again()
                after_ns = int(self.silence_ns * self.rng.uniform(1.0, FOUND_DEAD))
                self.clock.after(after_ns, pipe.still_blocked, pipe.blocks)

    def unblock(self, src: Hashable, dst: Hashable) -> None:
        """One of the faults that block it is over."""
        key = (src, dst)
        left = self._blocked.get(key, 0) - 1
        if left > 0:
            self._blocked[key] = left
        elif left == 0:
            del self._blocked[key]
            for pipe in self._pipes.get(key, ()):
                pipe.opened()

    def join(self, pipe: Pipe) -> None:
        self._pipes.setdefault(pipe.key, {})[pipe] = None

    def leave(self, pipe: Pipe) -> None:
        self._pipes[pipe.key].pop(pipe, None)


class Pipe:
    """One direction of a connection.

    :param deliver: told of each thing that arrives, in order.
    :param silent: told when the direction was blocked for too long.
    """

    __slots__ = ("_closed", "_deliver", "_held", "_last_ns", "_net", "_silent", "blocks", "key")

    def __init__(
        self,
        net: Network,
        src: Hashable,
        dst: Hashable,
        deliver: Callable[[Any], None],
        silent: Callable[[], None] | None = None,
    ) -> None:
        self.key = (src, dst)
        self.blocks = 0
        self._net = net
        self._deliver = deliver
        self._silent = silent
        self._last_ns = 0
        self._held: deque[Any] = deque()
        self._closed = False
        net.join(self)

    def send(self, item: Any, leaves_ns: int = 0) -> None:
        """Arrives after the delay, and after all before it."""
        net = self._net
        due_ns = max(net.clock.now_ns, leaves_ns) + net.delay_ns(*self.key)
        self._last_ns = due_ns = max(self._last_ns, due_ns)
        net.clock.at(due_ns, self._due, item)

    def _due(self, item: Any) -> None:
        if self._closed:
            return
        if self._held or self._net.is_blocked(*self.key):
            self._held.append(item)
        else:
            self._deliver(item)

    def opened(self) -> None:
        """The direction is open again: a retransmission brings what was held."""
        if self._held:
            self._net.clock.after(self._net.delay_ns(*self.key), self._flush)

    def _flush(self) -> None:
        while self._held and not self._closed and not self._net.is_blocked(*self.key):
            self._deliver(self._held.popleft())

    def blocked_again(self) -> None:
        self.blocks += 1

    def still_blocked(self, blocks: int) -> None:
        """The time of silence is over: was it silent all along?"""
        if not self._closed and self.blocks == blocks and self._net.is_blocked(*self.key) and self._silent is not None:
            self._silent()

    def close(self) -> None:
        """Nothing arrives any more."""
        if not self._closed:
            self._closed = True
            self._held.clear()
            self._net.leave(self)


class Closed:
    """What the other end reads when one end has closed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Connection:
    """Two ends and what is between them. ``dialler`` and ``acceptor`` get ``connection_item`` and ``connection_ended``.

    :param forth: told of what arrives at the acceptor; ``back``: at the dialler.
    :param ended: told once per end, when the other's word or silence tells it: (is it the dialler's, reason).
    """

    def __init__(
        self,
        net: Network,
        dialler: Hashable,
        acceptor: Hashable,
        forth: Callable[[Any], None],
        back: Callable[[Any], None],
        ended: Callable[[bool, str], None],
    ) -> None:
        self.net = net
        self._on_forth = forth
        self._on_back = back
        self._ended = ended
        self.dialler_open = self.acceptor_open = True
        silence = "nothing was heard of it for too long"
        self.forth = Pipe(net, dialler, acceptor, self._came_forth, lambda: self._notice(False, silence))
        self.back = Pipe(net, acceptor, dialler, self._came_back, lambda: self._notice(True, silence))

    def _came_forth(self, item: Any) -> None:
        if isinstance(item, Closed):
            self._notice(False, item.reason)
        elif self.acceptor_open:
            self._on_forth(item)

    def _came_back(self, item: Any) -> None:
        if isinstance(item, Closed):
            self._notice(True, item.reason)
        elif self.dialler_open:
            self._on_back(item)

    def _notice(self, dialler: bool, reason: str) -> None:
        if self.dialler_open if dialler else self.acceptor_open:
            self.close(dialler, reason)
            self._ended(dialler, reason)

    def close(self, dialler: bool, reason: str, *, tell: bool = True) -> None:
        """One end closes, and isn't told. The other one hears of it behind what is under way, or by silence only."""
        if not (self.dialler_open if dialler else self.acceptor_open):
            return
        if dialler:
            self.dialler_open = False
            other_open, pipe = self.acceptor_open, self.forth
        else:
            self.acceptor_open = False
            other_open, pipe = self.dialler_open, self.back
        if not other_open:
            self.forth.close()
            self.back.close()
        elif tell:
            pipe.send(Closed(reason))
        else:
            after_ns = int(self.net.silence_ns * self.net.rng.uniform(1.0, FOUND_DEAD))
            self.net.clock.after(after_ns, self._notice, not dialler, "nothing was heard of it for too long")

    def cut(self, reason: str) -> None:
        """It breaks for both, who find out in their own time. What is under way is lost."""
        for dialler in (True, False):
            self.net.clock.after(self.net.rng.randrange(5 * MS), self._notice, dialler, reason)
