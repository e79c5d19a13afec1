"""What a message may be, and what happens when it isn't what the receiver expects (cases 2, 14, 30)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from proxyd_client import ArgumentError, Endpoint, MismatchError, TransferTimeout
from tests.e2e.rig import KIB, MIB, Net, pattern, until

pytestmark = pytest.mark.timeout(60)


# -- sizes and dtypes that differ -----------------------------------------------------------------------------------

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
MISFITS: dict[str, tuple[Any, str | None, Any, str | None, tuple[str, str]]] = {
    "shorter": (np.arange(3, dtype=F32), None, np.full(5, 9, F32), None, ("float32[3] (12 bytes)", "float32[5] (20")),
    "longer": (np.arange(5, dtype=F32), None, np.full(3, 9, F32), None, ("float32[5] (20 bytes)", "float32[3] (12")),
    "dtype": (np.arange(2, dtype=I32), None, np.full(2, 9, F32), None, ("int32[2]", "float32[2]")),
    "named dtype": (
        np.arange(4, dtype=np.uint16),
        "bfloat16",
        np.full(4, 9, np.float16),
        None,
        ("bfloat16[4]", "float16[4]"),
    ),
    "named on both sides": (
        np.arange(4, dtype=np.uint16),
        "bfloat16",
        np.full(4, 9, np.uint16),
        "float16",
        ("bfloat16[4]", "float16[4]"),
    ),
    "empty into something": (np.empty((0, 7), F32), None, np.full(2, 9, F32), None, ("float32[0, 7] (0", "float32[2]")),
    "large": (np.zeros(MIB, F32), None, np.full(MIB + 1, 9, F32), None, (f"float32[{MIB}]", f"float32[{MIB + 1}]")),
    "raw bytes of another size": (np.zeros(9, np.uint8), None, np.full(8, 9, np.uint8), None, ("(9 b", "(8 b")),
}


@pytest.mark.parametrize("which", MISFITS)
@pytest.mark.parametrize("posted", ["before", "after"])
def test_a_message_that_does_not_fit_is_refused_and_stays(net: Net, which: str, posted: str) -> None:
    data, dtype, buffer, into_dtype, words = MISFITS[which]
    sender, receiver = net.pair()
    receive = receiver.irecv_into(buffer, src=0, tag=7, dtype=into_dtype) if posted == "before" else None
    sender.isend(data, dst=1, tag=7, dtype=dtype)
    if receive is None:
        until(lambda: receiver.eta(src=0, tag=7) is not None or data.nbytes < 64 * KIB, "the message was offered")
        receive = receiver.irecv_into(buffer, src=0, tag=7, dtype=into_dtype)
    begun_s = time.monotonic()
    with pytest.raises(MismatchError) as caught:
        receive.wait(timeout_s=20)
    assert time.monotonic() - begun_s < 3  # at once, on a machine that does other things too
    text = str(caught.value)
    for part in (*words, "tag 7", f"{net.job}/0"):
        assert part in text, text
    assert (caught.value.peer, caught.value.tag) == (0, 7)
    assert np.all(buffer == 9), "the buffer must stay as it was"
    # It stays queued, and the next one is right.
    kept = receiver.recv(src=0, tag=7, timeout_s=5)
    assert bytes(kept.data) == data.tobytes()
    assert kept.dtype == (dtype or data.dtype.name)
    sender.isend(np.arange(5, dtype=F32), dst=1, tag=7)
    out = np.full(5, 9, F32)
    assert receiver.recv_into(out, src=0, tag=7, timeout_s=5) == 20
    assert np.array_equal(out, np.arange(5, dtype=F32))


def test_shapes_may_differ_and_raw_bytes_take_anything_of_their_size(net: Net) -> None:
    sender, receiver = net.pair()
    data = np.arange(12, dtype=np.int64).reshape(3, 4)
    other = np.zeros((2, 6), np.int64)
    sender.isend(data, dst=1)
    receiver.recv_into(other, src=0, timeout_s=5)
    assert np.array_equal(other.reshape(-1), data.reshape(-1))
    raw = bytearray(96)
    sender.isend(data, dst=1)
    receiver.recv_into(raw, src=0, timeout_s=5)
    assert raw == data.tobytes()


# -- encodings ------------------------------------------------------------------------------------------------------

_NAN_PAYLOADS = np.array([0x7FF8_0000_0000_0001, 0xFFF0_0000_DEAD_BEEF, 0x7FF0_0000_0000_0001], np.uint64)
ENCODINGS: dict[str, tuple[Any, str | None, tuple[int, ...] | None]] = {
    "empty (0, 7) bf16": (b"", "bfloat16", (0, 7)),
    "bf16[2]": (bytes(range(4)), "bfloat16", (2,)),
    "empty (7, 0)": (np.empty((7, 0), np.float32), None, None),
    "0-dim bf16": (b"\x80\x3f", "bfloat16", ()),
    "0-dim float64": (np.array(-0.0), None, None),
    "float8": (bytes(range(256)), "float8_e4m3fn", (16, 16)),
    "bool": (np.array([True, False, True]), None, None),
    "int64": (np.array([-(2**63), 2**63 - 1]), None, None),
    "complex64": (np.array([1 + 2j, -0.0 - 0.0j], np.complex64), None, None),
    "minus zero": (np.array([-0.0, 0.0, -np.inf, 5e-324]), None, None),
    "nan payloads": (_NAN_PAYLOADS.view(np.float64), None, None),
    "nan payloads of float32": (np.array([0x7FC0_0001, 0xFF80_DEAD], np.uint32).view(np.float32), None, None),
    "many dimensions": (np.arange(2 * 3 * 4 * 5 * 6, dtype=np.int16).reshape(2, 3, 4, 5, 6), None, None),
    "large bf16": (pattern(3 * MIB).tobytes(), "bfloat16", (1024, 1536)),
}


def test_every_encoding_arrives_with_shape_dtype_and_bytes_in_order(net: Net) -> None:
    """All on one tag: an empty one is delivered in its place and waits for no bandwidth."""
    sender, receiver = net.pair()
    for data, dtype, shape in ENCODINGS.values():
        sender.isend(data, dst=1, tag=3, dtype=dtype, shape=shape)
    for name, (data, dtype, shape) in ENCODINGS.items():
        message = receiver.recv(src=0, tag=3, timeout_s=10)
        array = np.asarray(data) if isinstance(data, np.ndarray) else None
        assert message.dtype == (dtype or (array.dtype.name if array is not None else "")), name
        assert message.shape == (shape if shape is not None else np.shape(data)), name
        assert bytes(message.data) == (array.tobytes() if array is not None else data), name
        if array is not None:
            assert message.array.tobytes() == array.tobytes()
            assert message.array.dtype == array.dtype


def test_a_dtype_that_numpy_lacks_is_said_so(net: Net) -> None:
    sender, receiver = net.pair()
    sender.isend(b"\x00\x01", dst=1, dtype="float8_e4m3fn", shape=(2,))
    message = receiver.recv(src=0, timeout_s=5)
    with pytest.raises(ArgumentError, match="float8_e4m3fn"):
        _ = message.array
    assert bytes(message.data) == b"\x00\x01"


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (np.arange(12).reshape(3, 4).T, ArgumentError),
        (np.arange(10)[::2], ArgumentError),
        (np.array([object()]), ArgumentError),
        (np.zeros(2, [("a", "i4")]), ArgumentError),
        (np.arange(3, dtype=">i4"), ArgumentError),
        (object(), TypeError),
        ("text", TypeError),
    ],
)
def test_what_cannot_travel_is_refused_before_a_byte_leaves(net: Net, buffer: Any, error: type[Exception]) -> None:
    sender, receiver = net.pair()
    with pytest.raises(error):
        Endpoint.isend(sender, buffer, dst=1, tag=1)
    sender.isend(np.arange(3), dst=1, tag=1)
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=5).array, np.arange(3))


def test_a_read_only_or_strided_buffer_is_no_place_to_receive_into(net: Net) -> None:
    sender, receiver = net.pair()
    sender.isend(np.arange(3), dst=1, tag=1)
    for buffer in (b"12345678" * 3, np.zeros(6, np.int64)[::2]):
        with pytest.raises(ArgumentError):
            receiver.recv_into(buffer, src=0, tag=1, timeout_s=5)
    assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=5).array, np.arange(3))


# -- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [5, 3 * MIB])
def test_values_follow_tags_not_arrival(net: Net, nbytes: int) -> None:
    sender, receiver = net.pair()
    for tag in (1, 2, 3):
        sender.isend(pattern(nbytes, 0, tag), dst=1, tag=tag)
    for tag in (3, 1, 2):
        assert np.array_equal(receiver.recv(src=0, tag=tag, timeout_s=10).array, pattern(nbytes, 0, tag))


def test_groups_are_channels_of_their_own(net: Net) -> None:
    sender, receiver = net.pair()
    for number, group in enumerate(("", "dp", "pp")):
        sender.isend(pattern(100_000, 0, number), dst=1, tag=1, group=group)
    for number, group in ((2, "pp"), (0, ""), (1, "dp")):
        message = receiver.recv(src=0, tag=1, group=group, timeout_s=10)
        assert message.group == group
        assert np.array_equal(message.array, pattern(100_000, 0, number))
    with pytest.raises(TransferTimeout):
        receiver.recv(src=0, tag=1, group="tp", timeout_s=0.1)


def test_one_tag_is_first_in_first_out_however_large_the_first_is(net: Net) -> None:
    sender, receiver = net.pair()
    sizes = (64 * MIB, 1, 70_000, 0, 2 * MIB, 3)
    for number, nbytes in enumerate(sizes):
        sender.isend(pattern(nbytes, 0, number), dst=1, tag=1)
    for number, nbytes in enumerate(sizes):
        assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(nbytes, 0, number))


def test_order_holds_over_many_streams(start: Any) -> None:
    """Chunks of one message travel over four connections and overtake each other; messages do not."""
    net: Net = start(agent={"streams": 4})
    sender, receiver = net.pair()
    sizes = (64 * MIB, 1, 9 * MIB + 1, 65 * KIB, 0)
    for number, nbytes in enumerate(sizes):
        sender.isend(pattern(nbytes, 0, number), dst=1, tag=1)
    for number, nbytes in enumerate(sizes):
        assert np.array_equal(receiver.recv(src=0, tag=1, timeout_s=20).array, pattern(nbytes, 0, number))
    peer = net.agent("b").data_address.rpartition(":")[2]
    hex_port = f"{int(peer):04X}"
    with open("/proc/net/tcp") as table:
        to_b = [line for line in table if line.split()[2].endswith(f":{hex_port}") and line.split()[3] == "01"]
    assert len(to_b) == 5, "one control and four data connections"
