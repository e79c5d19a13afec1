"""Enter a host's namespaces, then become the command. Run by path (``python -I -S``): it may import nothing of proxyd.

Arguments: user namespace fd or -1, network namespace fd, pid of the parent, ``--``, the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def main() -> int:
    """Set the namespaces, ask the kernel to end us with our parent, exec. Returns only on failure."""
    user_fd, net_fd, parent = (int(text) for text in sys.argv[1:4])
    command = sys.argv[5:]
    libc = ctypes.CDLL(None, use_errno=True)
    for fd, kind in ((user_fd, 0x10000000), (net_fd, 0x40000000)):
        if fd < 0:
            continue
        if libc.setns(fd, kind) != 0:
            sys.stderr.write(f"cannot enter the host's namespace: {os.strerror(ctypes.get_errno())}\n")
            return 126
        os.close(fd)
    # After setns: entering a user namespace changes credentials, and that clears the signal.
    libc.prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return 126  # the parent died before the signal was set
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main())
