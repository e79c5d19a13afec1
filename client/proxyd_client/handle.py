"""What ``isend``, ``irecv`` and ``irecv_into`` return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Operation(Protocol[T_co]):
    """What stands behind a handle: a send or a receive under way."""

    def wait(self, timeout_s: float | None) -> T_co:
        """Wait for the end; the result, or the typed error."""

    def poll(self) -> bool:
        """Whether it has ended, well or not."""

    def eta_s(self) -> float | None:
        """Seconds until the predicted end; None when there is no prediction."""

    def cancel(self) -> bool:
        """Give it up; False when it has ended already."""

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once it has ended, in a thread of the library's own."""

    @property
    def source(self) -> int | None:
        """Rank that the message is from, where it is known."""

    def describe(self) -> str:
        """One line for a person."""


class Handle(Generic[T_co]):
    """One message under way. Thread-safe. Dropping it cancels nothing."""

    __slots__ = ("_operation",)

    def __init__(self, operation: Operation[T_co]) -> None:
        self._operation = operation

    def wait(self, timeout_s: float | None = None) -> T_co:
        """Wait until the message is delivered end to end (send), or is here (receive).

        :param timeout_s: seconds; None waits without limit (it still ends when the agent or the peer is lost).
        :returns: None for a send, the :class:`~proxyd_client.Message` of ``irecv``, the bytes of ``irecv_into``.
        :raises TransferTimeout: not yet. Nothing is cancelled: wait again on the same handle, or :meth:`cancel`.
        :raises ProxydError: what ended it, see :mod:`proxyd_client.errors`. Waiting again raises the same.
        """
        return self._operation.wait(timeout_s)

    def done(self) -> bool:
        """Whether it has ended, well or not; :meth:`wait` then returns or raises at once. Makes progress itself."""
        return self._operation.poll()

    def eta_s(self) -> float | None:
        """Predicted seconds until the end; 0.0 when it has ended, None when nothing is predicted yet."""
        return self._operation.eta_s()

    def cancel(self) -> bool:
        """Give it up. A send may still be delivered if it was under way; ``wait`` then tells which. False: too late.

        A cancelled receive is as if never posted: the message, if one was there, goes to the next receive.
        """
        return self._operation.cancel()

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` called once it has ended, well or not; :meth:`wait` then returns or raises at once.

        It is called soon, in a thread that all callbacks of the endpoint share. It must be short, and may call the
        library. What it raises goes to :func:`threading.excepthook`.
        """
        self._operation.call_when_done(callback)

    @property
    def source(self) -> int | None:
        """Rank that the message is from: of a receive from any source known once a message was matched to it."""
        return self._operation.source

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._operation.describe()}>"
