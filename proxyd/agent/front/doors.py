"""The front's doors: what comes in is passed on to a worker, as it is, before anything is said.

A connection of a trainer stays for no moment. One of a peer is looked at until it is clear whether it begins with a
preamble; the places, the descriptors and the time that strangers may take meanwhile are bounded as at any door
(:mod:`proxyd.runtime.limits`). What they do with a worker, its own doors bound.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence

from proxyd.agent.front.placing import Placing
from proxyd.agent.front.workers import Worker
from proxyd.agent.local import SO_PEERPIDFD, user_of
from proxyd.agent.passing import Passage
from proxyd.runtime.limits import Descriptors, Dismiss, Door, Listening
from proxyd.wire import routing

SILENT_S = 3.0
"""Who says nothing for so long isn't going to say a preamble: a peer sends it at once, and TCP repeats it after one
second. It waits for a challenge, as one does that knows nothing of workers; worker 0 sends it one."""
PREAMBLE_S = 10.0
_UCRED = struct.Struct("=iII")

_log = logging.getLogger("proxyd.agent.front")


class TrainerDoor:
    """Passes trainers on, from the Unix socket or the gateway's port."""

    def __init__(
        self,
        sock: Listening,
        name: str,
        passages: Callable[[Worker], Passage | None],
        workers: Sequence[Worker],
        placing: Placing,
        places: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._passage_of = passages
        self._workers = workers
        self._placing = placing
        self._watched: dict[int, int] = {}
        """Processes that have a worker, and the descriptors by which their end is known."""
        unix = sock.family == socket.AF_UNIX
        if unix:
            self.door = Door(sock, name, self._arrived, _log, places=places, whose=user_of)
        else:
            self.door = Door(sock, name, self._arrived, _log, places=places)
        self._unix = unix

    def _arrived(self, sock: socket.socket, address: object, leave: Callable[[], None]) -> Dismiss:
        pid = self._process_of(sock) if self._unix else 0
        number = self._placing.place(pid, [worker.number for worker in self._workers if worker.up])
        if pid and not self._placing.knows(pid) and self.watch(pid, sock):
            self._placing.keep(pid, number)
        passage = self._passage_of(self._workers[number])
        if passage is None or not passage.pass_on(sock):
            self.door.refuse("worker", f"closed a trainer's connection: worker {number} has too many waiting")
        leave()
        return lambda reason: None

    @staticmethod
    def _process_of(sock: socket.socket) -> int:
        """0: of another pid namespace."""
        pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return int(pid)

    def watch(self, pid: int, sock: socket.socket | None = None) -> bool:
        """Forget about the process when it ends. False: that can't be known, so it must not be remembered."""
        if pid in self._watched:
            return True
        try:
            fd: int = os.pidfd_open(pid) if sock is None else self._pidfd_of(pid, sock)
        except OSError:
            return False
        if Descriptors.here().scarce(fd):
            os.close(fd)
            return False
        self._watched[pid] = fd
        self._loop.add_reader(fd, self._ended, pid)
        return True

    @staticmethod
    def _pidfd_of(pid: int, sock: socket.socket) -> int:
        try:
            return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError:
            return os.pidfd_open(pid)  # before Linux 6.5

    def _ended(self, pid: int) -> None:
        self._unwatch(pid)
        self._placing.ended(pid)

    def _unwatch(self, pid: int) -> None:
        fd = self._watched.pop(pid)
        self._loop.remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        """Accept no more."""
        self.door.close()
        for pid in list(self._watched):
            self._unwatch(pid)


class PeerDoor:
    """Passes peers on to the worker that they name."""

    def __init__(self, sock: Listening, workers: Sequence[Worker], places: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers = workers
        self._greeted: set[_Newcomer] = set()
        self.door = Door(sock, "data", self._arrived, _log, places=places)

    def _arrived(self, sock: socket.socket, address: object, leave: Callable[[], None]) -> Dismiss:
        newcomer = _Newcomer(sock, self._known, self._refused)
        self._greeted.add(newcomer)

        def gone() -> None:
            self._greeted.discard(newcomer)
            leave()

        newcomer.gone = gone
        newcomer.begin()
        return lambda reason: newcomer.hang_up()

    def _known(self, sock: socket.socket, worker: int) -> None:
        if worker >= len(self._workers):
            sock.close()
            text = f"closed a connection for worker {worker}; this agent has {len(self._workers)}"
            self.door.refuse("worker", text)
        elif not self._workers[worker].data.pass_on(sock):
            self.door.refuse("worker", f"closed a peer's connection: worker {worker} has too many waiting")

    def _refused(self, reason: str, text: str) -> None:
        self.door.refuse(reason, text)

    def close(self) -> None:
        """Accept no more, and hang up on who has said nothing yet."""
        self.door.close()
        for newcomer in list(self._greeted):
            newcomer.hang_up()


class _Newcomer:
    """A connection of which it isn't known for whom it is.

    :param known: takes the socket and the worker's number.
    :param refused: counts one that is closed, by reason and words.
    """

    def __init__(
        self,
        sock: socket.socket,
        known: Callable[[socket.socket, int], None],
        refused: Callable[[str, str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._known = known
        self._refused = refused
        self.gone: Callable[[], None] = lambda: None
        self._begun = False
        self._timer = self._loop.call_later(SILENT_S, self._late)

    def begin(self) -> None:
        """Look at what it says."""
        self._loop.add_reader(self._sock, self._look)

    def _look(self) -> None:
        try:
            data = self._sock.recv(routing.PREAMBLE_BYTES, socket.MSG_PEEK)
            if data and not routing.may_be_preamble(data):
                self._leave_to(0)
            elif len(data) == routing.PREAMBLE_BYTES:
                worker = routing.read_preamble(self._sock.recv(routing.PREAMBLE_BYTES))
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                self._leave_to(worker)
            elif not data or self._begun:
                # Less than was asked for wakes nobody but at the end.
                self._refuse("hello", "a connection ended before it had said for whom it is")
            else:
                self._begun = True
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, routing.PREAMBLE_BYTES)
                self._timer.cancel()
                self._timer = self._loop.call_later(PREAMBLE_S, self._late)
        except BlockingIOError:
            pass
        except OSError as error:
            self._refuse("hello", f"a connection ended before it had said for whom it is: {error.strerror or error}")

    def _late(self) -> None:
        if self._begun:
            self._refuse("silent", f"closed a connection whose preamble wasn't whole after {PREAMBLE_S:g} s")
        else:
            self._leave_to(0)

    def _leave_to(self, worker: int) -> None:
        self._let_go()
        self._known(self._sock, worker)

    def _refuse(self, reason: str, text: str) -> None:
        self.hang_up()
        self._refused(reason, text)

    def hang_up(self) -> None:
        """Close it."""
        self._let_go()
        self._sock.close()

    def _let_go(self) -> None:
        self._loop.remove_reader(self._sock)
        self._timer.cancel()
        self.gone()
