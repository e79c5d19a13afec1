"""A received message: read-only, without a copy, and given back when its last view dies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from proxyd.wire.envelope import Envelope
from proxyd_client.buffers import Bytes, array_of, view_of


class Message:
    """One message. Its memory is the agent's arena; every view keeps the block, the last one to die gives it back.

    That holds for :attr:`data`, :attr:`array`, and whatever is sliced or viewed from them. A view that is kept keeps a
    whole block: copy (``bytes(m.data)``, ``m.array.copy()``) what must live long.
    """

    __slots__ = ("data", "dtype", "group", "nbytes", "shape", "src", "tag")

    def __init__(
        self, envelope: Envelope, block: Bytes, give_back: Callable[[], None] | None, *, writable: bool = False
    ) -> None:
        """``block``: an array object that nobody else holds; ``give_back`` is called once, when its last view died.

        ``writable``: its memory is this process's own to write to.
        """
        self.src: int = envelope.src_rank
        """Rank of the sender."""
        self.tag: int = envelope.tag
        self.group: str = envelope.group
        self.dtype: str = envelope.dtype
        """Name of the element type; may be one that numpy doesn't know (``bfloat16``)."""
        self.shape: tuple[int, ...] = envelope.shape
        self.nbytes: int = envelope.nbytes
        # Every memoryview and every array made from it refers to `block` as the exporter of the memory: its death is
        # the death of the last view, however deep the chain of slices.
        if give_back is not None:
            weakref.finalize(block, give_back).atexit = False
        self.data: memoryview = view_of(block) if writable else view_of(block).toreadonly()
        """The bytes, one-dimensional; read-only, unless the message was received ``writable``."""

    @property
    def array(self) -> npt.NDArray[Any]:
        """The message as a numpy array, without a copy; read-only unless it was received ``writable``.

        Raises ArgumentError when numpy has no such dtype: use :attr:`data`, or import ``ml_dtypes`` first.
        """
        return array_of(self.data, self.dtype, self.shape)

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return f"<Message {self.dtype}{list(self.shape)} from rank {self.src}, tag {self.tag}, {self.nbytes} bytes>"
