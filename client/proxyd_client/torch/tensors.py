"""Tensors as messages: which ones travel, under which names, and how their elements get in and out of a block.

A contiguous tensor of host memory is one run of bytes: the client's ordinary copy takes it, chunk by chunk, while the
message is on its way. Everything else (strided, conjugated, a device's) is moved by torch itself in one pass, straight
between the tensor and the block, never by way of a contiguous copy.

What arrives is the tensor *by index*: a transposed or expanded tensor is sent as what it reads, a lazily conjugated one
as its values, and whatever the layout of the tensor that it is received into, equal indices hold equal values.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from proxyd_client.buffers import Bytes, Payload
from proxyd_client.errors import ArgumentError
from proxyd_client.message import Message
from proxyd_client.torch.devices import Copies, copies_for

_NOTHING: Bytes = np.empty(0, np.uint8)


class TensorError(ArgumentError, TypeError):
    """A tensor of a kind that doesn't travel: sparse, quantised, on a device without memory of its own (``meta``)."""

    code = "tensor"


def payload_of_tensor(tensor: torch.Tensor, *, writable: bool = False, copies: Copies | None = None) -> Payload:
    """What the client sends from, or receives into.

    :param tensor: any dtype, strides, 0-dim or empty; left alone until the operation is done.
    :param writable: it is received into.
    :param copies: how its device's memory is reached; default: by its device.
    :raises TensorError: a kind that doesn't travel.
    :raises ArgumentError: it is received into, and several of its elements share memory.
    """
    check_kind(tensor)
    tensor = tensor.detach()
    if writable and _overlaps(tensor):
        raise ArgumentError(
            f"can't receive into {describe(tensor)} with strides {list(tensor.stride())}: elements share memory",
            next_step="Receive into a tensor of its own, for example torch.empty_like(x).contiguous()",
        )
    name, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if not tensor.numel():
        return Payload(_NOTHING, name, shape)
    copies = copies_for(tensor.device) if copies is None else copies
    if copies is None and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return Payload(tensor.reshape(-1).view(torch.uint8).numpy(), name, shape)
    return Payload(_NOTHING, name, shape, TensorMover(tensor, copies))


class TensorMover:
    """Moves a tensor that isn't one run of host bytes; see :class:`proxyd_client.buffers.Mover`."""

    def __init__(self, tensor: torch.Tensor, copies: Copies | None) -> None:
        self.nbytes = tensor.numel() * tensor.element_size()
        self.waits = copies is not None
        self._tensor = tensor
        self._copies = copies
        # What the trainer had queued on its stream before it posted this comes first, in both directions.
        self._posted = copies.mark(tensor) if copies is not None else None

    def write_to(self, block: Bytes) -> None:
        """Tensor to block."""
        host = tensor_over(block, self._tensor.dtype, self._tensor.shape)
        if self._copies is None:
            host.copy_(self._tensor)
        else:
            self._copies.to_host(host, self._tensor, self._posted, block)

    def read_from(self, block: Bytes) -> None:
        """Block to tensor."""
        host = tensor_over(block, self._tensor.dtype, self._tensor.shape)
        if self._copies is None:
            self._tensor.copy_(host)
        else:
            self._copies.to_device(self._tensor, host, self._posted, block)


def tensor_over(block: Bytes, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    """A tensor over a block of at least one byte. It doesn't keep the block, and must not outlive it.

    Blocks of received messages are mapped for reading only, which torch can't say of a tensor: don't write into those.
    """
    # By address: torch would warn of every read-only numpy array.
    area = (ctypes.c_uint8 * block.size).from_address(block.ctypes.data)
    return torch.frombuffer(area, dtype=torch.uint8).view(dtype).view(tuple(shape))


def tensor_of(message: Message) -> torch.Tensor:
    """A tensor over a message that was received ``writable``, without a copy.

    The tensor keeps the message's block from the agent's memory until its last view dies: clone what must live long.
    Raises TensorError for a dtype that torch doesn't have.
    """
    dtype = getattr(torch, message.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TensorError(f"torch has no dtype {message.dtype!r}", next_step="Receive it with Endpoint.recv")
    if not message.nbytes:
        return torch.empty(message.shape, dtype=dtype)
    return torch.frombuffer(message.data, dtype=torch.uint8).view(dtype).view(message.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``: the same names as numpy's, where it has them."""
    return str(dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor) -> str:
    """``float32[3, 4]``, for people."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def check_kind(tensor: torch.Tensor) -> None:
    """Raises TensorError for what doesn't travel."""
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{type(tensor).__name__} is no tensor")
    if tensor.layout is not torch.strided:
        raise TensorError(
            f"tensors of layout {str(tensor.layout).removeprefix('torch.')} don't travel",
            next_step="Send x.to_dense(), or its indices and values",
        )
    if tensor.is_quantized:
        raise TensorError(
            "quantised tensors don't travel: their scale and zero point would be lost",
            next_step="Send x.int_repr() and its parameters, or x.dequantize()",
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise TensorError(f"a tensor on device {tensor.device} can't be reached", next_step="Move it to cpu or cuda")


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two indices may share memory: after sorting by stride each must step over all that the smaller ones span.

    Sufficient, not necessary, as torch's own ``is_non_overlapping_and_dense`` is: an exotic as_strided view may be
    refused although no two of its elements meet.
    """
    if not tensor.numel():
        return False
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False
