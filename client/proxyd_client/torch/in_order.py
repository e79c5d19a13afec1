"""Collectives one after another, in the order of the calls, in a thread of the group's own.

torch starts a collective and goes on; the ranks of a group start theirs in the same order. So each group that spans
sites has one thread, which does them in that order. Futures are set by other threads: what torch has chained to them
runs there, and may itself start a collective of this group and wait for it.
"""

from __future__ import annotations

import datetime
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from proxyd_client.errors import ClosedError, ProxydError, TransferFailed, TransferTimeout
from proxyd_client.torch.errors import for_torch
from proxyd_client.torch.works import NO_TIMEOUT
from proxyd_client.waiting import library_thread

JOIN_TIMEOUT_S = 5.0
"""How long the end of a group waits for its thread: what that waits for was ended, so it takes milliseconds."""


class CollectiveWork(dist.Work):
    """One collective; ``tensors`` is the value of its future."""

    def __init__(self, tensors: Sequence[torch.Tensor], what: str, waiting: AbstractContextManager[None]) -> None:
        super().__init__()
        self._waiting = waiting
        self._tensors = list(tensors)
        self._what = what
        self._ended = threading.Event()
        self._error: ProxydError | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def end(self, error: ProxydError | None = None) -> None:
        """It is over. Called once, by the group's thread."""
        with self._lock:
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            try:
                threading.Thread(target=self._set, args=(future,), name="proxyd-future", daemon=True).start()
            except RuntimeError:  # no more threads at interpreter exit
                self._set(future)

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Block until it is done. Raises what ended it, or TransferTimeout: then it goes on, until its own timeout."""
        # torch's "no timeout" is 0 here and -1 ms in options: the collective's own limit ends it.
        limit_s = timeout.total_seconds() if timeout > NO_TIMEOUT else None
        if not self._ended.is_set():
            with self._waiting:
                self._ended.wait(limit_s)
        if not self._ended.is_set():
            raise for_torch(TransferTimeout(f"{self._what} timed out after {limit_s:g} s"), "")
        if self._error is not None:
            raise self._error.again()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> ProxydError | None:
        """What ended it, if that was an error."""
        return self._error

    def synchronize(self) -> None:
        """The same as :meth:`wait`: when it is done its tensors are ready for every stream."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as :meth:`wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            ended = self._ended.is_set()
        if ended:
            self._set(future)
        return future

    def _set(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)


class Together(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Block until all are done."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        """The same as :meth:`wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Their tensors."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of their tensors."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(
            lambda done: [tensor for future in done.value() for tensor in future.value()]
        )


class InOrder:
    """The thread of a group, and what it has to do.

    :param waiting: entered by whoever stands still until a collective has ended.
    """

    def __init__(self, name: str, waiting: AbstractContextManager[None]) -> None:
        self._name = name
        self._waiting = waiting
        self._process = os.getpid()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], CollectiveWork] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed: ProxydError | None = None
        self._unfinished = 0

    def submit(self, body: Callable[[], None], tensors: Sequence[torch.Tensor], what: str) -> CollectiveWork:
        """Have ``body`` run after all that came before.

        :raises ClosedError: the group has ended, or belongs to the parent process.
        """
        work = CollectiveWork(tensors, what, self._waiting)
        if os.getpid() != self._process:
            raise for_torch(
                ClosedError(
                    f"{what}: this group belongs to process {self._process}",
                    why="a forked child can't use it",
                    next_step="Use torch.distributed in the process that called init_process_group",
                ),
                "",
            )
        with self._lock:
            if self._closed is not None:
                raise self._closed.again()
            self._unfinished += 1
            self._queue.put((body, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_apart, name=self._name, daemon=True)
                self._thread.start()
        return work

    @property
    def busy(self) -> bool:
        """Whether something isn't done yet."""
        return self._unfinished > 0

    def close(self, error: ProxydError) -> None:
        """Nothing more is taken: it raises ``error``. What runs is ended by whoever closes this."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = for_torch(error, "")
            self._queue.put(None)
            thread = self._thread
        if thread is not None and os.getpid() == self._process and thread is not threading.current_thread():
            thread.join(JOIN_TIMEOUT_S)

    def _run_apart(self) -> None:
        with library_thread():
            self._run()

    def _run(self) -> None:
        while (order := self._queue.get()) is not None:
            body, work = order
            error: ProxydError | None = None
            try:
                # The tensors are the trainer's: parameters that need gradients, results of inference mode.
                with torch.inference_mode():
                    body()
            except ProxydError as failure:
                error = for_torch(failure, "")
            except Exception as failure:  # noqa: BLE001 - it is the work's, not the thread's
                error = for_torch(TransferFailed(f"failed: {type(failure).__name__}: {failure}"), "")
            with self._lock:
                self._unfinished -= 1
            work.end(error)
            del body, work, order, error  # else the last one's tensors would live until the next
