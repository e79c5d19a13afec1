"""Buffers in, buffers out: contiguity, sizes and dtype names. Pure.

Bytes travel with a dtype *name* and a shape; numpy need not know the dtype. That is how ``bfloat16`` and
``float8_e4m3fn`` cross: as bytes, named by the caller (``dtype="bfloat16"``) or by an array whose dtype has that name
(``ml_dtypes``). Whoever receives gets the name back and views the bytes as it likes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from proxyd.wire.envelope import MAX_DTYPE_BYTES, MAX_NDIM, MAX_TRANSFER_BYTES
from proxyd_client.errors import ArgumentError

Bytes = npt.NDArray[np.uint8]
RAW_DTYPE = "uint8"

_EXTENSION_ITEMSIZES = {
    "bfloat16": 2,
    "complex32": 4,
    "float8_e3m4": 1,
    "float8_e4m3": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Names that numpy doesn't know but trainers use, so that a shape can be derived and checked."""

_NAMES: dict[np.dtype[Any], str] = {}
"""Computing a dtype's name takes numpy longer than all other checks together."""

_CONTIGUOUS = "Pass a C-contiguous copy, for example numpy.ascontiguousarray(x)"


def view_of(data: Bytes) -> memoryview:
    """``memoryview(data)``; numpy's stubs know the buffer protocol only from Python 3.12 on."""
    return memoryview(cast(Any, data))


def array_of(data: memoryview, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """``data`` as an array, without a copy; as writable as ``data`` is.

    Raises ArgumentError when numpy has no such dtype (``ml_dtypes``, once imported, brings some).
    """
    try:
        known = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ArgumentError(
            f"numpy knows no dtype {dtype!r}",
            next_step="Use .data (for example torch.frombuffer(m.data, dtype=...)), or import ml_dtypes",
        ) from error
    array = (np.frombuffer(data, known) if len(data) else np.empty(0, known)).reshape(shape)
    array.flags.writeable = not data.readonly
    return array


class Mover(Protocol):
    """What carries a message between a block and memory that isn't one run of host bytes: strided, or a device's.

    It moves the whole message in one pass. Called without any lock of the library held, from whichever thread.
    """

    nbytes: int
    waits: bool
    """Moving it may wait for others (a device's stream): not for a thread that only looks whether it is done."""

    def write_to(self, block: Bytes) -> None:
        """Put the message into ``block``, all of it before this returns."""

    def read_from(self, block: Bytes) -> None:
        """Take the message out of ``block``, all of it before this returns."""


class Payload(NamedTuple):
    """A buffer as the wire sees it."""

    data: Bytes
    """Its bytes, one-dimensional, sharing its memory; empty where a mover has them."""
    dtype: str
    shape: tuple[int, ...]
    mover: Mover | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.data.size) if self.mover is None else self.mover.nbytes

    def write_to(self, block: Bytes) -> None:
        """Copy all of it into a block of its size. numpy copies without the GIL."""
        if self.mover is None:
            np.copyto(block, self.data)
        else:
            self.mover.write_to(block)

    def in_one_piece(self) -> Bytes:
        """Its bytes; a copy where a mover has them."""
        if self.mover is None:
            return self.data
        block: Bytes = np.empty(self.nbytes, np.uint8)
        self.mover.write_to(block)
        return block


def itemsize_of(dtype: str) -> int | None:
    """Bytes per element of a dtype name; None when it is unknown here."""
    known = _EXTENSION_ITEMSIZES.get(dtype)
    if known is not None:
        return known
    try:
        return int(np.dtype(dtype).itemsize) or None
    except (TypeError, ValueError):
        return None


def dtype_name(dtype: Any) -> str:
    """Name of ``dtype``: a string is taken as it is, a numpy(-like) dtype gives its ``name``.

    Raises ArgumentError for what can't travel as plain bytes (objects, structs, foreign byte order).
    """
    if isinstance(dtype, str):
        name = dtype
        if not name or len(name.encode("utf-8", "replace")) > MAX_DTYPE_BYTES:
            raise ArgumentError(f"dtype name {dtype!r} must have 1 to {MAX_DTYPE_BYTES} bytes")
        return name
    known = _NAMES.get(dtype) if isinstance(dtype, np.dtype) else None
    if known is not None:
        return known
    try:
        resolved = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"dtype {dtype!r} is neither a name nor a numpy dtype", why=str(error)) from error
    if resolved.hasobject or resolved.names is not None or resolved.subdtype is not None:
        raise ArgumentError(f"arrays of dtype {resolved} don't travel", next_step="Send plain numbers or raw bytes")
    if not resolved.isnative:
        raise ArgumentError(
            f"dtype {resolved.str} is not in this machine's byte order", next_step="Convert it with x.astype(native)"
        )
    return _NAMES.setdefault(resolved, str(resolved.name))


def payload_of(
    buffer: Any, dtype: Any = None, shape: Sequence[int] | None = None, *, writable: bool = False
) -> Payload:
    """Look at ``buffer`` without copying.

    :param buffer: a numpy array or anything with the buffer protocol, C-contiguous (or a :class:`Payload`).
    :param dtype: names the elements when the buffer can't (raw bytes that hold bfloat16).
    :param shape: the shape to travel along; needs ``dtype`` unless it only reshapes.
    :param writable: the buffer is to be received into.
    :raises ArgumentError: strided, read-only where it must not be, or sizes that don't agree.
    :raises TypeError: no buffer at all.
    """
    if isinstance(buffer, Payload):
        return buffer
    array = buffer if isinstance(buffer, np.ndarray) else _array_over(buffer)
    if not array.flags.c_contiguous:
        raise ArgumentError(
            f"buffer of shape {list(array.shape)} with strides {list(array.strides)} is not C-contiguous",
            next_step=_CONTIGUOUS,
        )
    if writable and not array.flags.writeable:
        raise ArgumentError("can't receive into a read-only buffer", next_step="Pass a writable one")
    if array.nbytes > MAX_TRANSFER_BYTES:
        raise ArgumentError(f"a message of {array.nbytes} bytes exceeds the limit of {MAX_TRANSFER_BYTES}")
    name = dtype_name(array.dtype if dtype is None else dtype)
    data: Bytes = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    if dtype is None and shape is None:
        return Payload(data, name, tuple(int(extent) for extent in array.shape))
    return Payload(data, name, _checked_shape(name, int(data.size), shape, array))


def _array_over(buffer: Any) -> npt.NDArray[Any]:
    try:
        view = memoryview(buffer)
    except TypeError as error:
        hint = " (for a torch tensor pass t.numpy(), or its bytes and dtype=)" if hasattr(buffer, "data_ptr") else ""
        raise TypeError(f"{type(buffer).__name__} has no buffer to send from or receive into{hint}") from error
    if not view.c_contiguous:
        raise ArgumentError(f"buffer with strides {view.strides} is not C-contiguous", next_step=_CONTIGUOUS)
    if view.format in ("B", "b", "c"):
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        return np.frombuffer(flat, np.uint8) if view.nbytes else np.empty(view.shape or (0,), np.uint8)
    try:
        return np.asarray(view)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"buffer format {view.format!r} is unknown to numpy", why=str(error)) from error


def _checked_shape(dtype: str, nbytes: int, shape: Sequence[int] | None, array: npt.NDArray[Any]) -> tuple[int, ...]:
    itemsize = itemsize_of(dtype)
    if shape is None:
        if itemsize is None or itemsize == array.dtype.itemsize:
            return tuple(int(extent) for extent in array.shape)
        if nbytes % itemsize:
            raise ArgumentError(f"{nbytes} bytes are no whole number of {dtype} ({itemsize} bytes each)")
        return (nbytes // itemsize,)
    wanted = tuple(int(extent) for extent in shape)
    if len(wanted) > MAX_NDIM or any(extent < 0 for extent in wanted):
        raise ArgumentError(f"shape {list(wanted)} must have at most {MAX_NDIM} extents, none negative")
    if itemsize is not None and math.prod(wanted) * itemsize != nbytes:
        raise ArgumentError(
            f"{dtype}{list(wanted)} needs {math.prod(wanted) * itemsize} bytes, but the buffer has {nbytes}"
        )
    return wanted


def misfit(payload: Payload, dtype: str, shape: tuple[int, ...], nbytes: int, *, strict: bool = False) -> str:
    """Why a message does not fit a receive buffer, in words; empty when it does.

    Raw bytes take any dtype of the same size, unless ``strict``; a buffer with a dtype takes only that dtype. Shapes
    may differ as long as the sizes agree.
    """
    if payload.nbytes == nbytes and (payload.dtype == dtype or (payload.dtype == RAW_DTYPE and not strict)):
        return ""
    return (
        f"the message is {dtype}{list(shape)} ({nbytes} bytes), "
        f"the buffer is {payload.dtype}{list(payload.shape)} ({payload.nbytes} bytes)"
    )
