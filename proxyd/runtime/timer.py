"""A timer that fires on time: an absolute CLOCK_MONOTONIC deadline in a timerfd.

uvloop and asyncio round timers to whole milliseconds. A grant's start is a place in a queue that must neither overflow
nor run dry: at 10 Gbit/s one millisecond is 1.2 MB. A timerfd wakes the loop within some tens of microseconds, and its
absolute deadline is the very clock that the machines live on (``time.monotonic_ns``), so nothing is converted.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

from proxyd.core.units import NS_PER_S

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1


class _Itimerspec(ctypes.Structure):
    _fields_ = [
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    ]


_libc = ctypes.CDLL(None, use_errno=True)


class DeadlineTimer:
    """Calls ``callback()`` on ``loop`` once after the deadline that was set last. One of these per driver.

    Raises OSError where the kernel gives no timerfd (descriptors used up).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._spec = _Itimerspec(0, 0, 0, 0)
        self._armed_ns: int | None = None
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"timerfd_create: {os.strerror(code)}")
        loop.add_reader(self._fd, self._on_readable)

    def set(self, deadline_ns: int | None) -> None:
        """Fire at ``deadline_ns`` (``time.monotonic_ns`` time; a past one: at once). None: don't fire."""
        if deadline_ns == self._armed_ns or self._fd < 0:
            return
        # An earlier one that is already armed may fire: the driver looks at the deadline again and sets it anew. That
        # saves a system call for each event that moves a deadline back.
        if deadline_ns is not None and self._armed_ns is not None and self._armed_ns < deadline_ns:
            return
        self._arm(deadline_ns)

    def _arm(self, deadline_ns: int | None) -> None:
        self._armed_ns = deadline_ns
        # All zero would disarm; a deadline in the past fires at once.
        at_ns = 0 if deadline_ns is None else max(1, deadline_ns)
        self._spec.value_s, self._spec.value_ns = divmod(at_ns, NS_PER_S)
        if _libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None) < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"timerfd_settime: {os.strerror(code)}")

    def _on_readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was set anew between the wake-up and here
        self._armed_ns = None
        self._callback()

    def close(self) -> None:
        """Never fire again."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
