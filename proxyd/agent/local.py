"""Where local trainers connect: the Unix socket, and the TCP port for trainers on other hosts of the site (gateway
use)."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import struct

from proxyd.agent.client_session import ClientSession, Credentials
from proxyd.agent.clients import ClientHub
from proxyd.core.errors import ListenError
from proxyd.runtime.addresses import Address
from proxyd.runtime.logs import Throttle
from proxyd.runtime.unix_path import UnixPathClaim

SO_PEERPIDFD = 77
SOCKET_MODE = 0o660
_BACKLOG = 512
_ACCEPTS_PER_TURN = 64
_EMFILE_PAUSE_S = 1.0
_UCRED = struct.Struct("=iII")

_log = logging.getLogger(__name__)


def listen_unix(path: str) -> tuple[UnixPathClaim, socket.socket]:
    """Claim ``path`` and listen there, for owner and group only. Raises ListenError."""
    claim = UnixPathClaim(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.bind(path)
        # Before listen: nobody connects between the two.
        os.chmod(path, SOCKET_MODE)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        claim.release()
        raise ListenError(f"cannot listen on the socket {path}", why=error.strerror or str(error)) from error
    return claim, sock


def credentials_of(sock: socket.socket) -> Credentials:
    """Who connected to a Unix socket, with a pidfd that tells the end of that process (not of its children).

    Raises OSError when the process is gone already, or descriptors are used up.
    """
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pidfd = os.pidfd_open(pid)  # before Linux 6.5; a process of another pid namespace can't be watched so
    return Credentials(uid, pid, pidfd, f"pid {pid}, uid {uid}")


class ClientListener:
    """Accepts trainers on one listening socket, Unix or TCP."""

    def __init__(self, sock: socket.socket, hub: ClientHub) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._hub = hub
        self._unix = sock.family == socket.AF_UNIX
        self._throttle = Throttle(_log)
        self._closed = False
        self._limit = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._resume()

    @property
    def address(self) -> Address:
        """Where it listens (TCP)."""
        name = self._sock.getsockname()
        return Address(path=name) if self._unix else Address(host=name[0], port=name[1])

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._on_acceptable)

    def _on_acceptable(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Descriptors used up: the connections that stand go on; new ones wait in the kernel's queue.
                self._throttle.error("accept", f"cannot accept clients: {error.strerror or error}")
                self._loop.remove_reader(self._sock)
                self._loop.call_later(_EMFILE_PAUSE_S, self._resume)
                return
            self._take(sock, address)

    def _take(self, sock: socket.socket, address: object) -> None:
        sock.setblocking(False)
        # Each client holds several descriptors (socket, pidfd, two for each arena), hence an eighth.
        if self._hub.connection_count >= self._limit:
            self._throttle.error("limit", f"closed a connection: {self._limit} clients are connected already")
            sock.close()
            return
        try:
            if self._unix:
                who = credentials_of(sock)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                host, port = address[:2] if isinstance(address, tuple) else ("?", 0)
                who = Credentials(-1, 0, -1, f"{host}:{port}")
        except OSError as error:
            self._throttle.warning("who", f"a client was gone before it was greeted: {error.strerror or error}")
            sock.close()
            return
        self._hub.greet(ClientSession(self._hub, sock, who, shared_memory=self._unix))

    def close(self) -> None:
        """Accept no more."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock)
            self._sock.close()
