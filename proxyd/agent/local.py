"""Where local trainers connect: the Unix socket, and the TCP port for trainers on other hosts of the site (gateway
use)."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable

from proxyd.agent.client_session import ClientSession, Credentials
from proxyd.agent.clients import ClientHub
from proxyd.core.errors import ListenError
from proxyd.runtime.limits import STRANGERS, Dismiss, Door, Listening
from proxyd.runtime.unix_path import UnixPathClaim

SO_PEERPIDFD = 77
SOCKET_MODE = 0o660
MIN_CLIENTS = 4
DESCRIPTORS_PER_CLIENT = 8
UNREAD_BYTES = 256 << 10
"""What the kernel holds for a trainer that doesn't read, whatever the host's default is: frames of some 2,000 messages.
A trainer remembers more (``proxyd_client.resuming``): were it fewer, its next agent could not tell what had arrived."""
_BACKLOG = 4096
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


def user_of(sock: socket.socket, _: object) -> str:
    """Whom a Unix connection is charged to: a user can have any number of processes."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return f"uid {uid}"


def client_limit(descriptors: int) -> int:
    """Trainers that so many descriptors serve. Each holds a socket, a pidfd and two arenas at least; extra arenas, and
    connections to peers, need the other half."""
    return max(MIN_CLIENTS, descriptors // DESCRIPTORS_PER_CLIENT)


class ClientListener:
    """Accepts trainers on one listening socket, Unix or TCP."""

    def __init__(self, sock: Listening, hub: ClientHub, *, places: int = STRANGERS) -> None:
        self._hub = hub
        self._unix = sock.family == socket.AF_UNIX
        if self._unix:
            self.door = Door(sock, "socket", self._greet, _log, places=places, whose=user_of)
        else:
            self.door = Door(sock, "gateway", self._greet, _log, places=places)

    def _greet(self, sock: socket.socket, address: object, leave: Callable[[], None]) -> Dismiss:
        if self._unix:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES // 2)  # the kernel doubles it
            who = credentials_of(sock)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            host, port = address[:2] if isinstance(address, tuple) else ("?", 0)
            who = Credentials(-1, 0, -1, f"{host}:{port}")
        session = ClientSession(self._hub, sock, who, shared_memory=self._unix, left=leave, refuse=self.door.refuse)
        self._hub.greet(session)
        return session.turn_away

    def close(self) -> None:
        """Accept no more."""
        self.door.close()
