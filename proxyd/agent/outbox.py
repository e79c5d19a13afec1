"""What is on its way to one local client: frames, descriptors that ride along, payload (TCP clients only).

Nothing here waits for a client: what the socket doesn't take is kept, up to a bound. Payload isn't copied; it is kept
as views of the arena that holds it anyway.

What the socket (a Unix one) has taken, the client reads even if this process dies the moment after; what is kept here
dies with it. So whoever tells others that the client has something waits with it until then (:meth:`Outbox.then`).
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

MAX_FRAME_BYTES = 64 << 20
"""Frames kept for a client that doesn't read: a stopped process is not dead, and each of its senders may have
``[agent] sends`` small messages (16,384) under way to it, at some hundred bytes here: this is for 40 such senders. What
is only of interest now (states, predictions) is left out long before."""
ADVICE_LIMIT_BYTES = 64 << 10
_BUFFERS_PER_CALL = 256
_NOTHING = memoryview(b"")


class _Item:
    __slots__ = ("call", "data", "fd", "is_payload")

    def __init__(self, data: memoryview, fd: int, is_payload: bool, call: Callable[[], None] | None = None) -> None:
        self.data = data
        self.fd = fd
        self.is_payload = is_payload
        self.call = call
        """Set, and nothing else, where somebody waits for what stands before it."""


class Outbox:
    """Queue in front of a non-blocking socket. ``failed(reason)`` is called at most once, never from within a put."""

    def __init__(self, sock: socket.socket, failed: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._failed = failed
        self._items: deque[_Item] = deque()
        self._tail = bytearray()
        """Frames behind the items, in one piece: as items of their own they would take four times their size."""
        self._frame_bytes = 0
        self._flush_due = False
        self._writing = False
        self._open = True

    def frame(self, data: bytes, fd: int | None = None) -> None:
        """Queue a frame; ``fd`` rides along (a duplicate is taken). Those of one tick of the loop leave together."""
        if self._open:
            self._frame_bytes += len(data)
            if fd is None:
                self._tail += data
            else:
                self._seal()
                self._items.append(_Item(memoryview(data), os.dup(fd), False))
            self._flush_soon()

    def advice(self, data: bytes) -> None:
        """A frame that only matters now: left out while the client lags."""
        if self._frame_bytes < ADVICE_LIMIT_BYTES:
            self.frame(data)

    def payload(self, view: memoryview) -> None:
        """Queue payload behind its frame."""
        if self._open:
            self._seal()
            self._items.append(_Item(view, -1, True))
            self._flush_soon()

    def then(self, call: Callable[[], None]) -> None:
        """Call when all that is queued now is in the socket: at once, where nothing is."""
        self._seal()
        if self._items and self._open:
            self._items.append(_Item(_NOTHING, -1, False, call))
        else:
            call()

    def _seal(self) -> None:
        """What comes from now on is behind the frames that are there."""
        if self._tail:
            self._items.append(_Item(memoryview(self._tail), -1, False))
            self._tail = bytearray()

    def _flush_soon(self) -> None:
        # A socket that never gets writable calls nobody: the bound is looked at all the same.
        if not self._flush_due and (not self._writing or self._frame_bytes > MAX_FRAME_BYTES):
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if not self._open:
            return
        try:
            self._send_all()
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        if self._frame_bytes > MAX_FRAME_BYTES:
            self._fail(f"it has not read its last {self._frame_bytes} bytes of frames")
            return
        if bool(self._items) != self._writing:
            self._writing = bool(self._items)
            if self._writing:
                self._loop.add_writer(self._sock, self._flush)
            else:
                self._loop.remove_writer(self._sock)

    def _send_all(self) -> None:
        """Until nothing is left, what those who waited for it say at that included. Raises BlockingIOError."""
        self._seal()
        while self._items:
            self._send_some()
            if not self._items:
                self._seal()

    def _send_some(self) -> None:
        """One system call. A descriptor travels with the first byte of its frame, so such a frame starts a call."""
        first = self._items[0]
        if first.call is not None:
            self._items.popleft()
            first.call()
            return
        ancillary: list[tuple[int, int, array.array[int]]] = []
        if first.fd >= 0:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [first.fd]))]
        buffers: list[memoryview] = []
        for item in self._items:
            fresh = item.fd >= 0 and item is not first
            if fresh or item.call is not None or len(buffers) == _BUFFERS_PER_CALL:
                break
            buffers.append(item.data)
        sent = self._sock.sendmsg(buffers, ancillary, socket.MSG_NOSIGNAL)
        if first.fd >= 0:
            os.close(first.fd)
            first.fd = -1
        while sent:
            item = self._items[0]
            taken = min(sent, len(item.data))
            sent -= taken
            if not item.is_payload:
                self._frame_bytes -= taken
            if taken == len(item.data):
                self._items.popleft()
            else:
                item.data = item.data[taken:]

    def _fail(self, reason: str) -> None:
        failed = self._failed
        self.close()
        failed(reason)

    def close(self, *, lives_on: bool = False) -> None:
        """Try once more to get rid of what is queued, then drop it. The socket stays open.

        :param lives_on: the client goes on elsewhere: who waits for frames that it doesn't get is never called. With
            the end of the session nothing more will be asked of it, and they are called all the same.
        """
        if not self._open:
            return
        self._open = False
        if self._writing:
            self._loop.remove_writer(self._sock)
        try:
            self._send_all()
        except OSError:
            pass  # full or broken: the client finds out by the end of the connection
        items, self._items = self._items, deque()
        for item in items:
            if item.fd >= 0:
                os.close(item.fd)
            if item.call is not None and not lives_on:
                item.call()
        self._failed = _nothing  # its owner's: nothing may keep that alive any more


def _nothing(reason: str) -> None:
    pass
