"""Memory to send from without a copy: blocks of a send arena that the trainer fills itself.

A :class:`Loan` is one such block, and counts the sends that read it. It goes back to the allocator when the last view
of it has died *and* the agent has ended the last of them. Views die anywhere, also inside garbage collection with the
session's lock held: such a block waits in a queue until somebody with the lock looks.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from proxyd.wire.arena import page_round_up
from proxyd_client.arena import SendArenas, SendBlock
from proxyd_client.buffers import Payload, array_of, dtype_name, itemsize_of, payload_of, view_of
from proxyd_client.core import SessionCore
from proxyd_client.errors import AgentUnavailable, ArgumentError, TransferTimeout


class Loan:
    """A block that the trainer writes to. Fields are guarded by the session's lock."""

    def __init__(self, block: SendBlock) -> None:
        self.block = block
        self.sends = 0
        """Messages that are sent from it and have not ended."""
        self.dropped = False
        """Its last view has died."""
        self.lost = False
        """A neighbour may read it for as long as it likes: the agent that would tell is gone."""


class Loans:
    """All blocks of one endpoint that are lent to its trainer. The session's lock guards it, except in public calls.

    :param allocate: a block for so many bytes, by a deadline (and its timeout, for the error's text).
    :param free: takes a block back.
    """

    def __init__(
        self,
        core: SessionCore,
        allocate: Callable[[int, int | None, float | None], SendBlock],
        free: Callable[[SendBlock], None],
    ) -> None:
        self._core = core
        self._allocate = allocate
        self._free = free
        self._loans: set[Loan] = set()
        self._dropped: deque[Loan] = deque()
        self._ended = False

    # -- calls -------------------------------------------------------------------------------------------------------

    def lend(self, shape: Shape, timeout_s: float | None) -> SendBuffer:
        """A buffer to send from. Over TCP there is no memory that the agent reads: then it is the process' own."""
        core = self._core
        core.check_process()
        deadline_ns = core.deadline_ns(timeout_s)
        if not core.address.shared_memory or not shape.nbytes:
            return SendBuffer(self, shape, None, memoryview(bytearray(shape.nbytes)))
        with core.lock:
            core.check_open()
            block = self._allocate(shape.nbytes, deadline_ns, timeout_s)
            loan = Loan(block)
            self._loans.add(loan)
        root = block.mapping.block(block.offset, shape.nbytes)  # an object of its own, whose death is told
        weakref.finalize(root, self._drop, loan).atexit = False
        return SendBuffer(self, shape, loan, view_of(root))

    def wait(self, loan: Loan, timeout_s: float | None) -> None:
        """See :meth:`SendBuffer.wait`."""
        core = self._core
        core.check_process()
        deadline_ns = core.deadline_ns(timeout_s)
        with core.lock:
            if not core.progress.wait_for(lambda: not loan.sends, deadline_ns) and loan.sends:
                raise TransferTimeout(
                    f"{loan.sends} messages are still being sent from a send buffer after {timeout_s:g} s",
                    next_step="They go on: wait again",
                    phase="waiting for a send buffer",
                )
            if loan.lost:
                raise AgentUnavailable(
                    "the agent ended before a receiver on this host let go of what was sent from a send buffer",
                    next_step="Make another buffer and write to that one",
                    phase="waiting for a send buffer",
                )

    def is_read(self, loan: Loan) -> bool:
        """See :attr:`SendBuffer.is_read`."""
        core = self._core
        core.check_process()
        with core.lock:
            if loan.sends:
                core.progress.poll_now()
            return loan.sends > 0

    # -- with the lock held ------------------------------------------------------------------------------------------

    def sent(self, loan: Loan) -> None:
        """A message of it has ended."""
        loan.sends -= 1
        self._end_if_over(loan)

    def collect(self) -> None:
        """Take back what the trainer has let go of."""
        while self._dropped:
            loan = self._dropped.popleft()
            loan.dropped = True
            self._end_if_over(loan)

    def idle_bytes(self, arenas: SendArenas) -> int:
        """What of these arenas no send will give back, however long one waits."""
        idle = (loan.block for loan in self._loans if not loan.sends)
        return sum(page_round_up(len(block.data)) for block in idle if arenas.holds(block))

    def end(self) -> None:
        """The session has ended: blocks live as long as their views, and mappings as long as those."""
        self._ended = True
        self._loans.clear()
        self._dropped.clear()
        # They are the sender's, which holds this: without the collector the two would keep each other for ever.
        self._allocate, self._free = _no_block, _nothing

    def _drop(self, loan: Loan) -> None:
        if not self._ended:
            self._dropped.append(loan)

    def _end_if_over(self, loan: Loan) -> None:
        if loan.dropped and not loan.sends and loan in self._loans:
            self._loans.remove(loan)
            self._free(loan.block)


def _no_block(nbytes: int, deadline_ns: int | None, timeout_s: float | None) -> SendBlock:
    raise RuntimeError("a session that has ended lends nothing")  # unreachable: check_open comes first


def _nothing(block: SendBlock) -> None:
    pass


class Shape(NamedTuple):
    """What a buffer is to hold."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, shape: int | Sequence[int], dtype: Any) -> Shape:
        """Checked. Raises ArgumentError."""
        name = dtype_name(dtype)
        itemsize = itemsize_of(name)
        if itemsize is None:
            raise ArgumentError(
                f"the size of an element of dtype {name!r} is unknown here",
                next_step="Ask for bytes (uint8), and name the dtype in isend(buffer, dst, dtype=..., shape=...)",
            )
        extents = (shape,) if isinstance(shape, int) else tuple(int(extent) for extent in shape)
        if any(extent < 0 for extent in extents):
            raise ArgumentError(f"shape {list(extents)} must have no negative extent")
        return cls(name, extents, math.prod(extents) * itemsize)


class SendBuffer:
    """Memory that a message is sent from as it is, without a copy. See :meth:`proxyd_client.Endpoint.send_buffer`.

    Unlike any other buffer it is *not* snapshotted: from ``isend`` on, until :meth:`wait` returns, it may be read and
    sent again (also to others), and not be written to. Who does all the same harms this message only: it arrives with
    a mixture of both, or fails its checksum. The memory goes back when the last view of it dies and nothing is sent
    from it any more.
    """

    __slots__ = ("_lender", "_loan", "data", "dtype", "nbytes", "shape")

    def __init__(self, lender: Loans, shape: Shape, loan: Loan | None, data: memoryview) -> None:
        self._lender = lender
        self._loan = loan
        self.dtype, self.shape, self.nbytes = shape
        self.data: memoryview = data
        """Its bytes, one-dimensional and writable."""

    @property
    def array(self) -> npt.NDArray[Any]:
        """It as a numpy array, writable. Raises ArgumentError when numpy has no such dtype: use :attr:`data`."""
        return array_of(self.data, self.dtype, self.shape)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no message is being sent from it: it may be written to again. That is when their handles are done,
        and within a host when their receivers have let go of them.

        Raises TransferTimeout, and AgentUnavailable where a receiver's hold on it can't be known any more."""
        if self._loan is not None:
            self._lender.wait(self._loan, timeout_s)

    @property
    def is_read(self) -> bool:
        """A message is being sent from it."""
        return self._loan is not None and self._lender.is_read(self._loan)

    def payload(self, lender: Loans, dtype: Any, shape: Sequence[int] | None) -> tuple[Payload, Loan | None]:
        """What ``isend`` sends; the loan only where ``lender`` gave it: another endpoint's agent can't read it."""
        payload = payload_of(self.data, self.dtype if dtype is None else dtype, self.shape if shape is None else shape)
        return payload, self._loan if lender is self._lender else None

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return f"<SendBuffer {self.dtype}{list(self.shape)}, {self.nbytes} bytes>"
