"""Tell systemd how we are: sd_notify(3) and its watchdog, in the standard library. Without systemd a silent no-op.

A daemon says READY=1 only once its sockets accept, and pings from its event loop: a loop that hangs stops pinging, and
systemd restarts the daemon.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """The socket that systemd gave us, if any.

    :param environ: where ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID`` are looked for.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        path = environ.get("NOTIFY_SOCKET", "")
        # "@name" is the abstract namespace; anything but these two forms is not for us.
        self._path = "\0" + path[1:] if path.startswith("@") else path if path.startswith("/") else ""
        self._watchdog_ns = self._read_watchdog(environ) if self._path else None
        self._socket: socket.socket | None = None
        if self._path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @staticmethod
    def _read_watchdog(environ: Mapping[str, str]) -> int | None:
        period = environ.get("WATCHDOG_USEC", "")
        pid = environ.get("WATCHDOG_PID", "")
        if not period.isascii() or not period.isdigit() or int(period) == 0:
            return None
        return int(period) * 1000 if pid in ("", str(os.getpid())) else None

    @property
    def ping_interval_ns(self) -> int | None:
        """How often to call :meth:`watchdog`: a third of systemd's limit, at least 100 ms; None: it expects none."""
        return None if self._watchdog_ns is None else max(self._watchdog_ns // 3, 100_000_000)

    def ready(self, status: str = "") -> bool:
        return self._send("READY=1", status)

    def stopping(self, status: str = "") -> bool:
        return self._send("STOPPING=1", status)

    def watchdog(self) -> bool:
        return self._send("WATCHDOG=1")

    def status(self, status: str) -> bool:
        """One line that ``systemctl status`` shows."""
        return self._send("", status)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, state: str, status: str = "") -> bool:
        """Whether systemd took it. A full or vanished socket must not stop a daemon that works."""
        if self._socket is None:
            return False
        lines = [state] if state else []
        if status:
            lines.append("STATUS=" + " ".join(status.split()))
        try:
            self._socket.sendto("\n".join(lines).encode(), self._path)
        except OSError:
            return False
        return True
