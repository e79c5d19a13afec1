"""Sends that can't be posted at once: shared memory is full, or the tensor must first come from a device.

``isend`` of torch returns at once, whatever its size; the client's waits for room. So a send that finds none goes into
a queue here and a thread of the endpoint's posts it when there is room; until then the tensor is where its bytes are,
and torch forbids to touch it before ``wait``. What is sent to a rank while others wait for it queues up behind them:
the order of a channel is the order of the calls. One destination that has no room does not hold up the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from proxyd_client.buffers import Payload
from proxyd_client.endpoint import Endpoint
from proxyd_client.errors import ClosedError, ProxydError, TransferCancelled, TransferTimeout
from proxyd_client.handle import Handle

NO_ROOM = "waiting for room in shared memory"
_TRY_S = 0.05
"""How long one destination's first send waits for room before the others' have their turn."""
_LINGER_S = 10.0
_FINISH_TIMEOUT_S = 2.0


class Later:
    """A send that is posted later; an :class:`~proxyd_client.handle.Operation`."""

    def __init__(self, payload: Payload, dst: int, arguments: dict[str, Any]) -> None:
        self.payload: Payload | None = payload
        self.dst = dst
        self.arguments = arguments
        self._changed = threading.Condition()
        self._handle: Handle[None] | None = None
        self._error: ProxydError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def posted(self, handle: Handle[None]) -> None:
        """It is under way."""
        with self._changed:
            if self._error is not None:  # cancelled just now
                handle.cancel()
                return
            self._handle, self.payload = handle, None
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            handle.call_when_done(callback)

    def failed(self, error: ProxydError) -> bool:
        """It will not be; False: its outcome is another."""
        with self._changed:
            if self._handle is not None or self._error is not None:
                return False
            self._error, self.payload = error, None
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback()
        return True

    def wait_posted(self, timeout_s: float | None) -> Handle[None]:
        """Until the tensor may change; the handle of what was posted. Raises as :meth:`wait`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._handle is not None or self._error is not None, timeout_s):
                raise TransferTimeout(
                    f"send to rank {self.dst} was not posted within {timeout_s:g} s",
                    why="shared memory is full of earlier sends that were not acknowledged",
                    next_step="Receive what was sent, or raise the agent's memory limit; it is still to be posted",
                    peer=self.dst,
                    phase=NO_ROOM,
                )
            if self._error is not None:
                raise self._error.again()
            assert self._handle is not None, "posted, or failed"
            return self._handle

    def wait(self, timeout_s: float | None) -> None:
        """See :class:`~proxyd_client.handle.Handle`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        handle = self.wait_posted(timeout_s)
        handle.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def poll(self) -> bool:
        """Whether it has ended."""
        with self._changed:
            handle, failed = self._handle, self._error is not None
        return failed or (handle is not None and handle.done())

    def eta_s(self) -> float | None:
        """Predicted seconds until it is done."""
        handle = self._handle
        return handle.eta_s() if handle is not None else None

    def cancel(self) -> bool:
        """Give it up."""
        handle = self._handle
        if handle is not None:
            return handle.cancel()
        return self.failed(TransferCancelled(f"send to rank {self.dst} was cancelled before it was posted"))

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """See :class:`~proxyd_client.handle.Handle`."""
        with self._changed:
            handle = self._handle
            if handle is None and self._error is None:
                self._callbacks.append(callback)
                return
        if handle is not None:
            handle.call_when_done(callback)
        else:
            callback()

    @property
    def source(self) -> int | None:
        """See :class:`~proxyd_client.handle.Handle`."""
        return None

    def describe(self) -> str:
        """State in one line."""
        return f"send to rank {self.dst}: {NO_ROOM}" if self._handle is None else repr(self._handle)


def wait_taken(handle: Handle[None], timeout_s: float | None) -> Handle[None]:
    """Until the tensor of a send may change, because its bytes are in shared memory; the handle of what was posted.

    ``handle``: of :meth:`Outbox.send`. Raises :class:`TransferTimeout`, or what keeps it from being posted.
    """
    operation = handle._operation
    return operation.wait_posted(timeout_s) if isinstance(operation, Later) else handle


class Outbox:
    """Posts the sends of one endpoint, at once where that is possible."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._there = threading.Condition(self._lock)
        self._queues: dict[int, deque[Later]] = {}
        self._thread: threading.Thread | None = None
        self._finishing = False

    def finish(self) -> None:
        """The endpoint is closed: what was not posted fails, and no thread is left (see :meth:`Calls.finish`)."""
        with self._lock:
            self._finishing = True
            thread = self._thread
            self._there.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_FINISH_TIMEOUT_S)

    def send(self, payload: Payload, dst: int, **arguments: Any) -> Handle[None]:
        """Post it now, or have it posted; never waits for room.

        :param arguments: ``tag``, ``group``, ``traffic`` of :meth:`Endpoint.isend`.
        """
        with self._lock:
            waits = dst in self._queues
        if not waits and payload.mover is None:
            try:
                return self.endpoint.isend(payload, dst, timeout_s=0, **arguments)
            except TransferTimeout as error:
                if error.phase != NO_ROOM:
                    raise
        later = Later(payload, dst, arguments)
        with self._lock:
            self._queues.setdefault(dst, deque()).append(later)
            self._there.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="proxyd-outbox", daemon=True)
                self._thread.start()
        return Handle(later)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queues and not self._finishing:
                    self._there.wait(_LINGER_S)
                if not self._queues:
                    self._thread = None
                    return
                heads = [queue[0] for queue in self._queues.values()]
            for later in heads:
                if self._post(later):
                    with self._lock:
                        queue = self._queues[later.dst]
                        queue.popleft()
                        if not queue:
                            del self._queues[later.dst]

    def _post(self, later: Later) -> bool:
        """Whether it is off the queue."""
        payload = later.payload
        if payload is None:
            return True  # cancelled
        try:
            later.posted(self.endpoint.isend(payload, later.dst, timeout_s=_TRY_S, **later.arguments))
        except TransferTimeout:
            return False
        except ProxydError as error:
            later.failed(error)
        except Exception as error:  # noqa: BLE001 - a device's: it is the send's, not this thread's
            later.failed(ClosedError(f"send to rank {later.dst} failed", why=f"{type(error).__name__}: {error}"))
        return True
