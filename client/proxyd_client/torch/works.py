"""``Work``s: what torch waits on. One per operation, over a handle of the client's.

A send is done, as torch means it and as gloo and nccl do it, when its tensor may change: when the snapshot is taken.
That it has arrived is another matter, and who waits for it waits a round trip more than is needed: torch's 1F1B waits
for each activation that it sent before it computes the next gradient. What keeps a message from arriving is raised by
the next send to that rank; ``get_future`` of a send ends with the delivery.

``wait`` lets the calling thread do the work (read the socket, copy): no hand-off between threads for a small message. A
future is made when somebody asks for one, and set by the client's callback thread.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from proxyd_client.errors import ProxydError
from proxyd_client.handle import Handle
from proxyd_client.torch.errors import for_torch
from proxyd_client.torch.outbox import wait_taken

NO_TIMEOUT = datetime.timedelta(0)
"""What torch passes for "the group's own"."""


class TensorWork(dist.Work):
    """One send or receive.

    :param handle: of the client, or one that works like it.
    :param tensors: kept until the operation is done, and the value of its future.
    :param what: the operation in words, for errors.
    :param timeout_s: the group's.
    :param source: gives the group rank that a finished operation is from.
    """

    def __init__(
        self,
        handle: Handle[Any],
        tensors: Sequence[torch.Tensor],
        what: Callable[[], str],
        timeout_s: float,
        source: Callable[[int | None], int],
    ) -> None:
        super().__init__()
        self._handle = handle
        self._tensors = list(tensors)
        self._what = what
        self._timeout_s = timeout_s
        self._source = source
        self._error: ProxydError | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Block until it is done. Raises what ended it: a :class:`ProxydError` that is a RuntimeError too."""
        timeout_s = self._timeout_s if timeout == NO_TIMEOUT else timeout.total_seconds()
        if not self._finish(timeout_s) and self._error is not None:
            raise self._error.again()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. Makes progress itself."""
        return bool(self._handle.done())

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> ProxydError | None:
        """What ended it; None while it is under way, and when it ended well."""
        if self.is_completed():
            self._finish(0)
        return self._error

    def synchronize(self) -> None:
        """The same as :meth:`wait`: when it is done its tensors are ready for every stream."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as :meth:`wait`."""
        self.wait()

    def source_rank(self) -> int:
        """Group rank of the sender."""
        return self._source(self._handle.source)

    def _source_rank(self) -> int:
        return self.source_rank()

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def eta_s(self) -> float | None:
        """Predicted seconds until it is done; 0.0 when it is, None when nothing is predicted."""
        return self._handle.eta_s()

    def cancel(self) -> bool:
        """Give it up: nothing is written to the tensors from now on. False: it has ended already."""
        return self._handle.cancel()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
        self._handle.call_when_done(self._set_future)
        return future

    def _set_future(self) -> None:
        future = self._future
        if future is None:
            return
        if self._finish(0):
            future.set_result(self._tensors)
        elif self._error is not None:
            future.set_exception(self._error)

    @property
    def handle(self) -> Handle[Any]:
        """The client's."""
        return self._handle

    def _finish(self, timeout_s: float | None) -> bool:
        """Whether it has ended well; its error is kept. A timeout is raised: it ends nothing."""
        try:
            self._handle.wait(timeout_s)
        except ProxydError as error:
            told = for_torch(error, self._what())
            if isinstance(error, TimeoutError):
                raise told from None
            self._error = told
            return False
        return True


class Fate:
    """How a send ends, after its work is done: kept until it is known, and told once if it is bad."""

    __slots__ = ("handle", "told")

    def __init__(self, handle: Handle[None]) -> None:
        self.handle = handle
        self.told = False

    def error(self) -> ProxydError | None:
        """What ended it, if nobody has heard yet; to be asked when it has ended."""
        if self.told:
            return None
        self.told = True
        try:
            self.handle.wait(0)
        except ProxydError as error:
            return error
        return None


class SendWork(TensorWork):
    """A send: done when its tensor may change."""

    def __init__(self, fate: Fate, *arguments: Any) -> None:
        super().__init__(fate.handle, *arguments)
        self._fate = fate

    def is_completed(self) -> bool:
        """Whether the tensor may change, or the send has failed."""
        try:
            return self._finish(0) or self._error is not None
        except TimeoutError:
            return False

    def _finish(self, timeout_s: float | None) -> bool:
        try:
            if wait_taken(self._handle, timeout_s).done():
                self._fate.told = True
                self._handle.wait(0)
        except ProxydError as error:
            told = for_torch(error, self._what())
            if isinstance(error, TimeoutError):
                raise told from None
            self._error = told
            return False
        return True
