"""Claiming the path of a Unix socket.

asyncio, uvloop and gRPC all unlink whatever stands at the path, also the socket of a *live* server, whose clients then
go to the newcomer. So a path is claimed first: a lock file beside it, then a knock at the door.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from proxyd.core.errors import ListenError

_PROBE_TIMEOUT_S = 1.0


class UnixPathClaim:
    """The right to listen at ``path``, until :meth:`release` or the end of the process.

    A stale socket that a dead process left is removed. Raises ListenError: a live server is there (its text says "in
    use"), something else than a socket is, or the directory is missing or closed to us.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock_fd = self._lock()
        try:
            self._clear()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _lock(self) -> int:
        lock_path = f"{self.path}.lock"
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            parent = Path(self.path).parent
            raise ListenError(
                f"cannot listen on the socket {self.path}",
                why=f"{lock_path}: {error.strerror}",
                next_step=f"Create {parent} and let this user write there, or choose another path",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise self._in_use("another process holds its lock") from error
        return fd

    def _in_use(self, why: str) -> ListenError:
        return ListenError(
            f"the socket {self.path} is in use",
            why=why,
            next_step="Stop that process, or give this one another path",
        )

    def _clear(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ListenError(
                f"cannot listen on the socket {self.path}",
                why="something that is no socket stands there",
                next_step="Move it away, or choose another path",
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_TIMEOUT_S)
            try:
                probe.connect(self.path)
            except OSError as error:
                # Refused: nobody listens. A full backlog or a time-out: somebody does, and is busy.
                if error.errno not in (errno.ECONNREFUSED, errno.ENOENT):
                    raise self._in_use(f"a server is there ({error})") from error
            else:
                raise self._in_use("a live server answers there")
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ListenError(
                f"cannot remove the stale socket {self.path}", why=error.strerror or str(error), next_step="Remove it"
            ) from error

    def release(self) -> None:
        """Remove the socket and let the path go. The lock file stays: removing it would race with the next claimant."""
        if self._lock_fd < 0:
            return
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        os.close(self._lock_fd)
        self._lock_fd = -1
