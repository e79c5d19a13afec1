"""What strangers may take of a daemon: places in front of a listener, and descriptors.

Theory. Whoever has not proven who it is costs as little as possible, for as short as possible, and must not keep out
who can prove it. A fixed number of places alone does the opposite: as many silent connections as there are places lock
everybody out. So a full :class:`WaitingRoom` sends *somebody who waits* away and takes the newcomer: the one that has
waited longest, from the address that holds the most places. An honest hello takes a round trip or two; to push it out,
strangers have to come from as many addresses as there are places, or faster than places turn over in that time.
OpenSSH's MaxStartups and the kernel's SYN queue drop at random for the same reason; here the addresses are known, so no
dice.

Descriptors are the other thing that runs out, for everybody at once. The kernel gives the lowest free number, so a new
descriptor's own number tells how full the table is, without counting: one among the last :attr:`Descriptors.reserved`
says that what is left is for those who are in already (arenas, connections to peers, the coordinator). Should they run
out all the same, a :class:`Door` waits a second and goes on; the connections that stand don't notice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from proxyd.runtime.logs import Throttle

STRANGERS = 1024
"""Places of a waiting room. At 20 KiB for each (measured: 3 to 10) that is 20 MiB."""
ACCEPTS_PER_TURN = 64
"""Then the loop serves others: accepting and greeting 64 takes some 5 ms."""
PAUSE_S = 1.0
"""After accept failed for want of descriptors (or kernel memory). New ones wait in the kernel's queue meanwhile."""
REASONS = ("crowded", "descriptors", "hello", "limit", "silent", "worker")
"""Pushed out by others; no descriptors to spare; a hello that is none, or is refused; enough of that kind are here;
nothing said in time; for a worker that is not there, or that takes none."""
LEAST_RESERVED, MOST_RESERVED = 8, 256


class Listening(Protocol):
    """What connections come from: a listening socket, or what another process passes on."""

    @property
    def family(self) -> int: ...

    def fileno(self) -> int: ...

    def getsockname(self) -> Any: ...

    def accept(self) -> tuple[socket.socket, Any]: ...

    def close(self) -> None: ...


Dismiss = Callable[[str], None]
"""Ends a stranger's connection, for this reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptors:
    """How many this process may have, and how many of them are kept from strangers."""

    limit: int
    reserved: int

    @classmethod
    def here(cls) -> Descriptors:
        """Of this process, now: an eighth is kept back."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return cls(limit, max(LEAST_RESERVED, min(MOST_RESERVED, limit // 8)))

    def scarce(self, fd: int) -> bool:
        """Whether a descriptor that was made just now is one of the last."""
        return fd >= self.limit - self.reserved


def raise_descriptor_limit() -> int:
    """Take all descriptors that this process may have; answers how many. A login shell's soft limit is 1024, which is
    there for programs that use select(): none of ours does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft  # forbidden here (seccomp), or hard is "unlimited" beyond fs.nr_open
    return hard


def _nothing(reason: str) -> None:
    pass


class Visitor:
    """One who waits, until it is known or gone: then ``leave``. Leaving twice is harmless."""

    __slots__ = ("_room", "address", "dismiss", "number")

    def __init__(self, room: WaitingRoom, address: str, number: int) -> None:
        self._room = room
        self.address = address
        self.number = number
        self.dismiss: Dismiss = _nothing

    def leave(self) -> None:
        """It needs its place no longer."""
        self._room._left(self)
        self.dismiss = _nothing  # it refers to the connection, which refers to this


class WaitingRoom:
    """Strangers, by address. See the module's text."""

    def __init__(self, places: int = STRANGERS) -> None:
        if places < 1:
            raise ValueError(f"a waiting room with {places} places")
        self.places = places
        self._by_address: dict[str, dict[int, Visitor]] = {}
        self._numbers = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whoever enters now pushes somebody out."""
        return self._count >= self.places

    def enter(self, address: str) -> Visitor:
        """Take a place, somebody else's if there is no other. The caller sets how to dismiss it."""
        if self.is_full:
            self.push_out(f"{self.places} others wait to say who they are")
        visitor = Visitor(self, address, next(self._numbers))
        self._by_address.setdefault(address, {})[visitor.number] = visitor
        self._count += 1
        return visitor

    def push_out(self, reason: str) -> bool:
        """Dismiss the most tiresome one; False when nobody is here."""
        visitor = self.most_tiresome()
        if visitor is None:
            return False
        dismiss = visitor.dismiss
        visitor.leave()
        dismiss(reason)
        return True

    def most_tiresome(self) -> Visitor | None:
        """The oldest from the address that has the most places; among equal addresses, from the one here longest."""
        crowd = max(self._by_address.values(), key=len, default=None)
        return None if crowd is None else next(iter(crowd.values()))

    def _left(self, visitor: Visitor) -> None:
        crowd = self._by_address.get(visitor.address)
        if crowd is not None and crowd.pop(visitor.number, None) is not None:
            self._count -= 1
            if not crowd:
                del self._by_address[visitor.address]


def fair_address(address: object) -> str:
    """Whom a place is charged to: a host; with IPv6 its network (/64), whose addresses one host can use up."""
    host = str(address[0]) if isinstance(address, tuple) else str(address)
    return ":".join(host.split(":")[:4]) if host.count(":") > 4 else host


def cancel(task: asyncio.Task[None]) -> None:
    """A :data:`Dismiss` for who is greeted by a task."""
    task.cancel()


class Door:
    """Accepts on one listening socket, and keeps those who come in a waiting room until they are known.

    :param name: what refusals are counted and logged under.
    :param arrived: greets a connection; takes the socket, the peer's address, and ``leave`` (to be called once it is
        known or gone); answers how to dismiss it meanwhile. It may raise OSError: the connection was gone already.
    :param whose: whom a place is charged to; by default the remote host.
    :param descriptors: what it goes by; by default this process's, an eighth kept back.
    """

    def __init__(
        self,
        sock: Listening,
        name: str,
        arrived: Callable[[socket.socket, object, Callable[[], None]], Dismiss],
        log: logging.Logger,
        *,
        places: int = STRANGERS,
        whose: Callable[[socket.socket, object], str] = lambda _, address: fair_address(address),
        descriptors: Descriptors | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self.name = name
        self._arrived = arrived
        self._whose = whose
        self._throttle = Throttle(log)
        self._descriptors = Descriptors.here() if descriptors is None else descriptors
        self.room = WaitingRoom(places)
        self.neighbours: Sequence[Door] = (self,)
        """All doors of this process, for what runs out for all of them: descriptors."""
        self._refused: Counter[str] = Counter()
        self._closed = False
        self._pause: asyncio.TimerHandle | None = None
        self._resume()

    def _resume(self) -> None:
        self._pause = None
        if not self._closed:
            self._loop.add_reader(self._sock, self._on_acceptable)

    def _on_acceptable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                for _ in range(self._descriptors.reserved):
                    self._push_out_any()
                self._throttle.warning(
                    "accept",
                    f"cannot accept connections ({self.name}): {error.strerror or error}; those that stand go on",
                    open_files_limit=self._descriptors.limit,
                )
                self._loop.remove_reader(self._sock)
                self._pause = self._loop.call_later(PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            if self._descriptors.scarce(sock.fileno()):
                self.refuse("descriptors", f"closed a stranger: few of {self._descriptors.limit} descriptors are left")
                if self._push_out_any():
                    self._let_in(sock, address)
                else:
                    sock.close()
                return  # whoever was pushed out closes its descriptors in this turn of the loop
            self._let_in(sock, address)

    def _push_out_any(self) -> bool:
        """Make a stranger leave, at the door that has most of them; False when there is none."""
        return max((door.room for door in self.neighbours), key=len).push_out("the descriptors are needed for others")

    def _let_in(self, sock: socket.socket, address: object) -> None:
        if self.room.is_full:
            self.refuse("crowded", f"closed a connection that had said nothing: {self.room.places} wait to be known")
        try:
            visitor = self.room.enter(self._whose(sock, address))
        except OSError:
            sock.close()
            return
        try:
            visitor.dismiss = self._arrived(sock, address, visitor.leave)
        except OSError as error:
            visitor.leave()
            self._throttle.warning("gone", f"a connection ({self.name}) was gone already: {error.strerror or error}")
            sock.close()

    def refuse(self, reason: str, text: str, *, kind: str = "") -> None:
        """Count a connection that is refused or closed, and say so (at most once a second; each of few kinds of one
        reason may be said by itself)."""
        self._refused[reason] += 1
        self._throttle.warning(kind or reason, text, door=self.name)

    def refusals(self) -> list[tuple[str, int]]:
        """How many connections were refused or closed before they were known, by reason (:data:`REASONS`)."""
        return [(reason, self._refused[reason]) for reason in REASONS]

    def close(self) -> None:
        """Accept no more, and close the listening socket. Those who wait are the owner's business."""
        if not self._closed:
            self._closed = True
            if self._pause is not None:
                self._pause.cancel()
            else:
                self._loop.remove_reader(self._sock)
            self._sock.close()
