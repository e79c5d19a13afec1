"""A TUN device: a network interface whose packets are read from and written to a file descriptor."""

from __future__ import annotations

import fcntl
import os
import struct

from proxyd.wan.errors import WanError

TUN_PATH = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000


def open_tun(name: str) -> int:
    """Make the interface ``name`` in this thread's network namespace; bare IP packets, non-blocking.

    Raises :class:`WanError` if the device node is missing or closed to this user.
    """
    try:
        fd = os.open(TUN_PATH, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WanError(
            f"cannot open {TUN_PATH}: {error.strerror}; "
            "load the tun module and let this user open the device (mode 0666)"
        ) from error
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH14x", name.encode("ascii"), _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        os.close(fd)
        raise WanError(f"cannot make the TUN device {name!r}: {error.strerror}") from error
    return fd
