"""Memory that a group uses again: a fresh megabyte costs a page fault per 4 KiB, more than adding it up."""

from __future__ import annotations

from typing import Any

import torch

Tensor = Any

KEPT_BYTES = 64 << 20
"""The most that a group keeps between its collectives."""


class Scratch:
    """Blocks that were used and will be wanted again, by size. One thread's: the group's."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._kept_bytes = 0

    def take(self, count: int, dtype: Any) -> Tensor:
        """A flat tensor; its contents are anybody's."""
        nbytes = count * dtype.itemsize
        blocks = self._free.get(nbytes)
        if not blocks:
            return torch.empty(count, dtype=dtype)
        self._kept_bytes -= nbytes
        return blocks.pop().view(dtype)

    def give(self, tensor: Tensor) -> None:
        """Nobody uses this tensor, made by :meth:`take`, any more."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes and self._kept_bytes + nbytes <= KEPT_BYTES:
            self._kept_bytes += nbytes
            self._free.setdefault(nbytes, []).append(tensor.view(torch.uint8))
