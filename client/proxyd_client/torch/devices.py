"""How the memory of a device is reached: copies on a stream of our own, ordered after what the trainer had queued.

Theory. A device runs its work in order *per stream*, later than the host that queued it. Two rules follow:

* before a tensor is read (sent) or overwritten (received into), what the trainer had queued on its own stream when it
  posted the operation must be over: :meth:`Copies.mark` notes that point, and our stream waits for it, not the host;
* an operation is done when the bytes are where they belong, so the copying thread waits for our stream. Whoever then
  waits for the Work finds the tensor ready for any stream: a later kernel is queued after that.

The copies run in threads of the library, so neither the trainer's stream nor its thread waits for them. Arenas are
registered with the driver (pinned) the first time that a device copies from or to them: a copy from pageable memory
would be staged once more by the driver.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from proxyd_client.buffers import Bytes

_READ_ONLY = 0x08
"""cudaHostRegisterReadOnly: arenas of received messages are mapped for reading."""


class Copies(Protocol):
    """Copies between a device and blocks of host memory."""

    def mark(self, tensor: torch.Tensor) -> Any:
        """Note where the trainer's current stream stands. Called in the trainer's thread."""

    def to_host(self, host: torch.Tensor, tensor: torch.Tensor, after: Any, block: Bytes) -> None:
        """Copy to ``host``, a tensor over ``block``, once ``after`` is reached; done when this returns."""

    def to_device(self, tensor: torch.Tensor, host: torch.Tensor, after: Any, block: Bytes) -> None:
        """Copy from ``host``, a tensor over ``block``, once ``after`` is reached; done when this returns."""


class StreamCopies:
    """Copies by one stream of a device.

    :param api: the module with ``Stream``, ``stream``, ``current_stream``: ``torch.cuda``, or one that works like it.
    :param keep: tells the allocator that a stream uses a tensor.
    """

    def __init__(
        self, api: Any, device: torch.device, keep: Callable[[torch.Tensor, Any], None] = torch.Tensor.record_stream
    ) -> None:
        self._api = api
        self._keep = keep
        self._stream = api.Stream(device)
        self._device = device
        self._registered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def mark(self, tensor: torch.Tensor) -> Any:
        """See :class:`Copies`."""
        return self._api.current_stream(self._device).record_event()

    def to_host(self, host: torch.Tensor, tensor: torch.Tensor, after: Any, block: Bytes) -> None:
        """See :class:`Copies`."""
        self._copy(host, tensor, tensor, after, block, writable=True)

    def to_device(self, tensor: torch.Tensor, host: torch.Tensor, after: Any, block: Bytes) -> None:
        """See :class:`Copies`."""
        self._copy(tensor, host, tensor, after, block, writable=False)

    def _copy(
        self, to: torch.Tensor, source: torch.Tensor, tensor: torch.Tensor, after: Any, block: Bytes, *, writable: bool
    ) -> None:
        self._register(block, writable=writable)
        with self._api.stream(self._stream):
            self._stream.wait_event(after)
            to.copy_(source, non_blocking=True)
            # The allocator must not hand the memory to another stream before this copy has ended.
            self._keep(tensor, self._stream)
        self._stream.synchronize()

    def _register(self, block: Bytes, *, writable: bool) -> None:
        """Pin the arena that a block lies in. Best effort: an unregistered copy is slower, and right."""
        arena = block.base
        if arena is None or id(arena) in self._registered or not hasattr(self._api, "cudart"):
            return
        flags = 0 if writable else _READ_ONLY
        self._api.cudart().cudaHostRegister(arena.ctypes.data, arena.nbytes, flags)
        self._registered[id(arena)] = arena


_cuda: dict[int, StreamCopies] = {}


def copies_for(device: torch.device) -> Copies | None:
    """How ``device`` is reached; None: its memory is the host's."""
    if device.type == "cpu":
        return None
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index not in _cuda:
        _cuda[index] = StreamCopies(torch.cuda, torch.device("cuda", index))
    return _cuda[index]
