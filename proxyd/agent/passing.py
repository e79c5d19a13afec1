"""Connected sockets on their way from the process that accepts them to the worker that serves them.

For each kind of connection a pair of Unix sockets (SEQPACKET) carries one message with one descriptor for each
connection. The worker's end looks like a listening socket. What a worker that died has not taken waits in the pair for
its next life, so both ends live as long as the process that accepts.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
from collections import deque
from typing import Any

MAX_WAITING = 256
"""Connections that wait here for a worker that takes none, beyond some 200 that the kernel holds for it."""
_NOTE = b"c"
_FD_BYTES = array.array("i").itemsize


class Passage:
    """The end of the process that accepts. ``far`` is the worker's, to be inherited by each life of it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._near.setblocking(False)
        self._waiting: deque[socket.socket] = deque()
        self.passed = 0
        """Connections so far."""

    def pass_on(self, sock: socket.socket) -> bool:
        """Hand a connection over; it is closed here. False: the worker takes none, and too many wait for it."""
        if len(self._waiting) >= MAX_WAITING:
            sock.close()
            return False
        self.passed += 1
        self._waiting.append(sock)
        if len(self._waiting) == 1:
            self._flush()
        return True

    def _flush(self) -> None:
        self._loop.remove_writer(self._near)
        while self._waiting:
            try:
                socket.send_fds(self._near, [_NOTE], [self._waiting[0].fileno()])
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    # The kernel's limit of descriptors on their way between processes; it tells nobody when there is
                    # room again.
                    self._loop.call_later(0.1, self._flush)
                else:
                    self._loop.add_writer(self._near, self._flush)
                return
            self._waiting.popleft().close()

    def close(self) -> None:
        """Hang up on whoever still waits."""
        self._loop.remove_writer(self._near)
        for sock in (*self._waiting, self._near, self.far):
            sock.close()
        self._waiting.clear()


class PassedSockets:
    """The worker's end: a :class:`~proxyd.runtime.limits.Listening`.

    :param sock: as it was inherited.
    :param family: of the connections.
    :param name: what ``getsockname`` of the listening socket is in the process that accepts.
    """

    def __init__(self, sock: socket.socket, family: socket.AddressFamily, name: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._name = name
        self.family = family
        self.taken = 0
        """Connections so far."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def getsockname(self) -> Any:
        return self._name

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection and its other end's address. Raises BlockingIOError, and what a listening socket does."""
        data, ancillary, flags, _ = self._sock.recvmsg(1, socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise BlockingIOError  # nobody is there who could pass any
        self.taken += 1
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if flags & socket.MSG_CTRUNC or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, "no descriptor is left for a connection that was passed on")
        sock = socket.socket(fileno=fds[0])
        if self.family == socket.AF_UNIX:
            return sock, ""
        try:
            return sock, sock.getpeername()
        except OSError as error:
            sock.close()
            raise ConnectionAbortedError(error.errno, "it was gone before it was taken") from error

    def close(self) -> None:
        self._sock.close()
