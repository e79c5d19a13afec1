"""The connection to the agent: frames out, frames and descriptors in. No waiting except in :meth:`Link.poll`.

Writes never block: what the socket doesn't take is kept and written when it is writable. A thread that had to wait
there while the agent waits for us to read would never return. How much can pile up is bounded by the callers: control
frames are small and few per message, and payload (TCP) waits for :attr:`Link.backlog_bytes` to shrink.

Frames may also be written from a finalizer, which runs anywhere, even inside this module with the lock held. So it only
appends to a queue and tries the lock; whoever holds the lock looks into that queue again after letting go.
"""

from __future__ import annotations

import array
import errno
import itertools
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from proxyd.wire.client import MAX_PAYLOAD_BYTES, ArenaGranted, Decoder, Frame, RecvData, encode
from proxyd.wire.codec import WireError
from proxyd_client.dial import MAX_PASSED_FDS

_READ_BYTES = 256 << 10
_READ_FRAMES_BYTES = 16 << 10  # over a Unix socket there are only small frames
_READS_PER_TURN = 8
_PARTS_PER_WRITE = 64
_MOST_LATE = 16
_INT_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_PASSED_FDS * _INT_BYTES)


class Link:
    """One established session's socket. :meth:`poll` and :meth:`pump` are for one thread at a time (the driver)."""

    def __init__(self, sock: socket.socket, decoder: Decoder, fds: list[int], *, shared_memory: bool) -> None:
        self._sock = sock
        self._shared_memory = shared_memory
        self._decoder = decoder
        # One buffer for ever: a fresh one per read would cost more than reading a small frame.
        self._read_buffer = memoryview(bytearray(_READ_FRAMES_BYTES if shared_memory else _READ_BYTES))
        self._fds: deque[int] = deque(fds)
        self._payload: tuple[RecvData, int, memoryview | None] | None = None
        self._lock = threading.Lock()
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._late: deque[bytes] = deque()
        self._pid = os.getpid()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._polling_writes = False
        self._closed = False

    # -- out ---------------------------------------------------------------------------------------------------------

    def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        """Write a frame, or queue it. Frames leave in the order of the calls. Never blocks, never raises OSError.

        A broken connection is noticed by the reader, which sees it whatever the state of the writes.
        """
        parts = [memoryview(encode(frame, len(payload) if payload is not None else 0))]
        if payload is not None:
            parts.append(payload)
        with self._lock:
            self._write([*parts, *self._take_late()] if self._late else parts)
        self._write_late()

    def send_with_next(self, data: bytes) -> None:
        """Keep an encoded frame that nobody waits for until the next one leaves or :meth:`poll` is called: each write
        wakes the agent, and a trainer that answers what it got has a frame to send at once."""
        self._late.append(data)
        if len(self._late) >= _MOST_LATE:
            self._write_late()

    def send_from_finalizer(self, data: bytes) -> None:
        """Write an encoded frame from any thread, also inside garbage collection; in a forked child it does nothing."""
        self._late.append(data)
        self._write_late()

    def flush(self) -> None:
        """Write what is queued, as far as the socket takes it."""
        with self._lock:
            self._write([])
        self._write_late()

    @property
    def backlog_bytes(self) -> int:
        """Bytes queued because the agent didn't read."""
        return self._out_bytes

    def _write_late(self) -> None:
        while self._late and self._lock.acquire(blocking=False):
            try:
                self._write(self._take_late())
            finally:
                self._lock.release()

    def _take_late(self) -> list[memoryview]:
        parts = []
        while self._late:
            parts.append(memoryview(self._late.popleft()))
        return parts

    def _write(self, parts: list[memoryview]) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        had_backlog = bool(self._out)
        self._out.extend(parts)
        self._out_bytes += sum(map(len, parts))
        while self._out:
            try:
                sent = self._sock.sendmsg(list(itertools.islice(self._out, _PARTS_PER_WRITE)), [], socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._out.clear()  # the reader notices; nothing that is written now can matter any more
                self._out_bytes = 0
                return
            self._out_bytes -= sent
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = self._out[0][sent:]
        # What stays is copied: a caller may change or free its buffer as soon as this returns.
        for index in range(len(self._out) - 1, -1, -1):
            if isinstance(self._out[index].obj, bytes):
                if index < len(self._out) - len(parts):
                    break
            else:
                self._out[index] = memoryview(bytes(self._out[index]))
        if self._out and not had_backlog:
            self.wake()  # whoever polls must now poll for room, too

    # -- in ----------------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float | None) -> bool:
        """Wait until something can be read, queued bytes can be written, or :meth:`wake` was called.

        False: none of it within ``timeout_s``.
        """
        self._write_late()
        wants_writes = bool(self._out)
        if wants_writes != self._polling_writes:
            self._polling_writes = wants_writes
            self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if wants_writes else 0))
        ready = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        for fd, _ in ready:
            if fd == self._wake_fd:
                try:
                    os.eventfd_read(fd)
                except BlockingIOError:
                    pass
        return bool(ready)

    def wake(self) -> None:
        """Make a :meth:`poll` in another thread return."""
        if not self._closed:
            os.eventfd_write(self._wake_fd, 1)

    def pump(
        self, dispatch: Callable[[Frame, int | None], None], target: Callable[[RecvData, int], memoryview | None]
    ) -> None:
        """Read what is there and hand it on. Doesn't wait.

        :param dispatch: called with each frame and the descriptor that came with it; for RECV_DATA once its payload is
            in place.
        :param target: where the payload of a RECV_DATA goes; None throws it away.
        :raises ConnectionError: the agent closed, or the connection broke.
        :raises WireError: what came doesn't follow the protocol.
        """
        if self._out or self._late:
            self.flush()
        self._drain(dispatch, target)
        for _ in range(_READS_PER_TURN):
            more = self._read_once(dispatch)
            self._drain(dispatch, target)
            if not more:
                return

    def _read_once(self, dispatch: Callable[[Frame, int | None], None]) -> bool:
        """One read; False when the socket is empty or this read emptied it."""
        try:
            if self._payload is not None:
                return self._read_payload(self._payload, dispatch)
            if not self._shared_memory:
                size = self._sock.recv_into(self._read_buffer)
            else:
                size, ancillary, flags, _ = self._sock.recvmsg_into(
                    [self._read_buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
                if ancillary:
                    self._take_fds(ancillary)
                if flags & socket.MSG_CTRUNC:
                    raise WireError("descriptors were lost on the way (RLIMIT_NOFILE reached?)")
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise ConnectionResetError(error.errno or errno.ECONNRESET, error.strerror or str(error)) from error
        if not size:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        self._decoder.feed(self._read_buffer[:size])
        return size == len(self._read_buffer)

    def _take_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % _INT_BYTES])
                self._fds.extend(fds)

    def _drain(
        self, dispatch: Callable[[Frame, int | None], None], target: Callable[[RecvData, int], memoryview | None]
    ) -> None:
        while True:
            if self._payload is not None and not self._take_buffered(self._payload, dispatch):
                return
            taken = self._decoder.next_frame()
            if taken is None:
                return
            frame, payload_bytes = taken
            if isinstance(frame, RecvData):
                if payload_bytes:
                    self._payload = frame, 0, target(frame, payload_bytes)
                continue
            fd: int | None = None
            if isinstance(frame, ArenaGranted) and self._shared_memory:
                if not self._fds:
                    raise WireError(f"arena {frame.arena} came without its descriptor")
                fd = self._fds.popleft()
            try:
                dispatch(frame, fd)
            finally:
                if fd is not None:
                    os.close(fd)

    def _take_buffered(
        self, payload: tuple[RecvData, int, memoryview | None], dispatch: Callable[[Frame, int | None], None]
    ) -> bool:
        """Move buffered payload into place; whether the frame is complete."""
        frame, done, into = payload
        piece = self._decoder.take_payload(MAX_PAYLOAD_BYTES)
        if piece and into is not None:
            into[done : done + len(piece)] = piece
        return self._advance(frame, done + len(piece), into, dispatch)

    def _read_payload(
        self, payload: tuple[RecvData, int, memoryview | None], dispatch: Callable[[Frame, int | None], None]
    ) -> bool:
        """Read payload straight into place."""
        frame, done, into = payload
        left = self._decoder.payload_left_bytes
        area = into[done : done + left] if into is not None else memoryview(bytearray(min(left, _READ_BYTES)))
        size = self._sock.recv_into(area)
        if not size:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        self._decoder.payload_received(size)
        self._advance(frame, done + size, into, dispatch)
        return size == len(area)

    def _advance(
        self, frame: RecvData, done: int, into: memoryview | None, dispatch: Callable[[Frame, int | None], None]
    ) -> bool:
        if self._decoder.payload_left_bytes:
            self._payload = frame, done, into
            return False
        self._payload = None
        dispatch(frame, None)
        return True

    def close(self) -> None:
        """Close the socket. The driver must have stopped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._out.clear()
            self._out_bytes = 0
        self._sock.close()
        os.close(self._wake_fd)
        for fd in self._fds:
            os.close(fd)

    def abandon_in_child(self) -> None:
        """After fork, in the child: close its copies of the descriptors without a word to the agent.

        Otherwise the agent would see the end of the connection only when the last child that inherited it ends.
        """
        if self._closed:
            return
        self._closed = True
        self._sock.close()
        os.close(self._wake_fd)
