"""What is on its way to one local client: frames, descriptors that ride along, payload (TCP clients only).

Nothing here waits for a client: what the socket doesn't take is kept, up to a bound. Payload isn't copied; it is kept
as views of the arena that holds it anyway.

What the socket (a Unix one) has taken, the client reads even if this process dies the moment after; what is kept here
dies with it. So whoever tells others that the client has something waits with it until then (:meth:`Outbox.then`).

Each write wakes a process, which is most of what a small message costs. So frames of one tick leave together, those
that nobody waits for wait for others (:meth:`Outbox.unhurried`), and what a client's frames lead to leaves at the end
of the callback that read them (:class:`Turn`), not after another round of the loop.
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
UNHURRIED_S = 0.002
"""How long a frame that nobody waits for waits for another one to leave with, and ..."""
MOST_UNHURRIED = 16
"""... how many of them do."""
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


class Turn:
    """A stretch of one callback of the loop at whose end all leaves that was put into outboxes meanwhile: in the order
    in which they got their first frame, what is said at the delivery of others included."""

    def __init__(self) -> None:
        self._begun = False
        self._due: deque[Outbox] = deque()

    def run(self, call: Callable[[], object]) -> None:
        """Call, and write."""
        self._begun = True
        try:
            call()
            self.write()
        finally:
            self._begun = False

    def write(self) -> None:
        """Write now: what follows takes a while, and nobody waits for it."""
        while self._due:
            self._due.popleft().flush()

    def takes(self, outbox: Outbox) -> bool:
        """Whether ``outbox`` will be written at the end of this turn; False: there is none."""
        if self._begun:
            self._due.append(outbox)
        return self._begun


class Outbox:
    """Queue in front of a non-blocking socket. ``failed(reason)`` is called at most once, never from within a put."""

    def __init__(self, sock: socket.socket, failed: Callable[[str], None], turn: Turn | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._failed = failed
        self._turn = Turn() if turn is None else turn
        self._items: deque[_Item] = deque()
        self._tail = bytearray()
        """Frames behind the items, in one piece: as items of their own they would take four times their size."""
        self._frame_bytes = 0
        self._flush_due = False
        self._unhurried = 0
        self._unhurried_timer: asyncio.TimerHandle | None = None
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

    def unhurried(self, data: bytes) -> None:
        """A frame that nobody waits for: it leaves with the next one, in a moment at the latest."""
        if not self._open:
            return
        self._frame_bytes += len(data)
        self._tail += data
        self._unhurried += 1
        if self._unhurried >= MOST_UNHURRIED:
            self._flush_soon()
        elif self._unhurried_timer is None:
            # Left running when they have left with others: one timer per moment, not one per frame.
            self._unhurried_timer = self._loop.call_later(UNHURRIED_S, self._on_unhurried)

    def _on_unhurried(self) -> None:
        self._unhurried_timer = None
        if self._unhurried:
            self._flush_soon()

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
            self._flush_soon()
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
            if not self._turn.takes(self):
                self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what the socket takes."""
        self._flush_due = False
        self._unhurried = 0
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
                self._loop.add_writer(self._sock, self.flush)
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
        if self._unhurried_timer is not None:
            self._unhurried_timer.cancel()
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
