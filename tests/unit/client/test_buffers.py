"""Buffers, dtype names and shapes."""

from __future__ import annotations

import array
import ctypes

import numpy as np
import pytest

from proxyd_client import ArgumentError
from proxyd_client.buffers import dtype_name, itemsize_of, misfit, payload_of


@pytest.mark.parametrize(
    ("buffer", "dtype", "shape", "nbytes"),
    [
        (b"abc", "uint8", (3,), 3),
        (b"", "uint8", (0,), 0),
        (bytearray(2), "uint8", (2,), 2),
        (array.array("d", [1, 2]), "float64", (2,), 16),
        ((ctypes.c_int32 * 3)(), "int32", (3,), 12),
        (memoryview(b"abcd").cast("B", (2, 2)), "uint8", (4,), 4),
        (np.zeros((2, 0, 3), np.float32), "float32", (2, 0, 3), 0),
        (np.float64(1.5).reshape(()), "float64", (), 8),
        (np.zeros(3, bool), "bool", (3,), 3),
        (np.zeros(2, np.complex64), "complex64", (2,), 16),
    ],
)
def test_what_a_buffer_says_of_itself(buffer: object, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    payload = payload_of(buffer)
    assert (payload.dtype, payload.shape, payload.nbytes) == (dtype, shape, nbytes)


def test_the_payload_shares_memory() -> None:
    x = np.zeros((2, 3), np.int16)
    payload_of(x, writable=True).data[:] = 255
    assert (x == -1).all()


def test_names_and_shapes_given_by_the_caller() -> None:
    raw = np.zeros(8, np.uint8)
    assert payload_of(raw, "bfloat16")[1:3] == ("bfloat16", (4,))
    assert payload_of(raw, "bfloat16", (2, 2))[1:3] == ("bfloat16", (2, 2))
    assert payload_of(raw, np.float32)[1:3] == ("float32", (2,))
    assert payload_of(raw, "my_float3", (5,))[1:3] == ("my_float3", (5,))
    assert payload_of(raw, None, (4, 2))[1:3] == ("uint8", (4, 2))
    assert payload_of(np.zeros((2, 2), np.uint16), "bfloat16")[1:3] == ("bfloat16", (2, 2))
    assert payload_of(b"", "bfloat16", (0, 7))[1:3] == ("bfloat16", (0, 7))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((np.zeros(8)[::2],), "not C-contiguous"),
        ((np.zeros((3, 2)).T,), "not C-contiguous"),
        ((memoryview(bytes(8))[::2],), "not C-contiguous"),
        ((np.zeros(2, object),), "don't travel"),
        ((np.zeros(2, "i4,f4"),), "don't travel"),
        ((np.zeros(2, ">f4"),), "byte order"),
        ((b"abc", "float16"), "no whole number"),
        ((b"abcd", "float16", (3,)), "needs 6 bytes, but the buffer has 4"),
        ((b"abcd", "float16", (-1, 2)), "none negative"),
        ((b"abcd", None, (1,) * 65), "at most 64"),
        ((b"abcd", "x" * 64), "1 to 63 bytes"),
        ((b"abcd", ""), "1 to 63 bytes"),
        ((b"abcd", 3.5), "neither a name nor"),
    ],
)
def test_what_cannot_travel(arguments: tuple[object, ...], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        payload_of(*arguments)  # type: ignore[arg-type]


def test_no_buffer_at_all_is_a_type_error() -> None:
    class Tensor:
        def data_ptr(self) -> int:
            return 0

    with pytest.raises(TypeError, match=r"Tensor has no buffer.*numpy\(\)"):
        payload_of(Tensor())
    with pytest.raises(TypeError, match="int has no buffer"):
        payload_of(5)


def test_names_of_extension_dtypes() -> None:
    assert itemsize_of("bfloat16") == 2
    assert itemsize_of("float8_e5m2") == 1
    assert itemsize_of("float64") == 8
    assert itemsize_of("no such") is None
    assert dtype_name("anything") == "anything"
    assert dtype_name(np.dtype(np.int8)) == "int8"


def test_misfit_names_both_sides() -> None:
    into = payload_of(np.zeros((2, 2), np.float32))
    assert misfit(into, "float32", (4,), 16) == ""
    assert misfit(payload_of(bytearray(16)), "float32", (4,), 16) == ""
    assert misfit(into, "int32", (4,), 16) == (
        "the message is int32[4] (16 bytes), the buffer is float32[2, 2] (16 bytes)"
    )
    assert "12 bytes" in misfit(payload_of(bytearray(16)), "uint8", (12,), 12)
