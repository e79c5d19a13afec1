"""What names a message and a transfer, on every wire and in the core."""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

from proxyd.wire.codec import i64, text, u8, u32, u64, u64_list
from proxyd.wire.values import value

MAX_JOB_BYTES = 128
MAX_GROUP_BYTES = 255
MAX_DTYPE_BYTES = 63
MAX_NDIM = 64  # numpy's own limit since 2.0
MAX_TRANSFER_BYTES = 1 << 44  # 16 TiB: far above any tensor, low enough that sums of a few never overflow 63 bits


class TrafficClass(enum.IntEnum):
    """Order of urgency: a lower value goes first."""

    PIPELINE = 0
    """Activations and their gradients: one transfer at a time at full rate (halves the mean completion time)."""
    SYNC = 1
    """Gradients and parameters of a barrier: all members at once, at 1/N each."""
    BULK = 2
    """Checkpoints, data: what is left over."""

    @property
    def label(self) -> str:
        """The name used in the API, in configuration and in metric labels."""
        return _LABELS[self]

    @classmethod
    def parse(cls, name: str) -> TrafficClass:
        """``"pipeline"`` -> PIPELINE. Raises ValueError naming the choices."""
        try:
            return cls[name.upper()]
        except KeyError:
            raise ValueError(f"traffic class {name!r} is unknown; use one of {[c.label for c in cls]}") from None


_LABELS = {cls: cls.name.lower() for cls in TrafficClass}


class TransferId(NamedTuple):
    """One message of one sender life: what "exactly once" is counted by.

    ``incarnation`` is drawn at random by each endpoint process at start; ``sequence`` counts its messages from 1.
    """

    incarnation: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.incarnation:016x}-{self.sequence}"

    @classmethod
    def parse(cls, value: str) -> TransferId:
        """Inverse of ``str``. Raises ValueError."""
        incarnation, _, sequence = value.partition("-")
        return cls(int(incarnation, 16), int(sequence))


class ErrorCode(enum.IntEnum):
    """Why a transfer or a session ended; the client library maps each to an exception class."""

    INTERNAL = 1
    CONFIG = 2
    AGENT_UNAVAILABLE = 3
    PEER_LOST = 4
    TIMEOUT = 5
    MISMATCH = 6
    CLOSED = 7
    CANCELLED = 8
    UNKNOWN_DESTINATION = 9
    CORRUPT = 10
    RESOURCE = 11
    REFUSED = 12
    PROTOCOL = 13
    CONTROL_LOST = 14
    AGENT_STOPS = 15
    """Of a session: its agent ends in order, and the next life of it goes on with what is under way."""


class EndpointName(NamedTuple):
    """One trainer process as a sender and receiver: ``job/rank``. A tuple: it is the key of most tables."""

    job: str
    rank: int

    def __str__(self) -> str:
        return f"{self.job}/{self.rank}"


@value(frozen=True, slots=False)
class Envelope:
    """What a message says of itself; matched by the receiver, never by the network between."""

    job: str = text(MAX_JOB_BYTES)
    src_rank: int = u32()
    dst_rank: int = u32()
    group: str = text(MAX_GROUP_BYTES)
    tag: int = i64()
    traffic: int = u8()
    nbytes: int = u64()
    dtype: str = text(MAX_DTYPE_BYTES)
    shape: tuple[int, ...] = u64_list(MAX_NDIM)

    @functools.cached_property
    def source(self) -> EndpointName:
        """The sending endpoint."""
        return EndpointName(self.job, self.src_rank)

    @functools.cached_property
    def destination(self) -> EndpointName:
        """The receiving endpoint."""
        return EndpointName(self.job, self.dst_rank)

    @property
    def traffic_class(self) -> TrafficClass:
        """The class as an enum. Raises ValueError for a byte that names none."""
        return TrafficClass(self.traffic)

    def describe(self) -> str:
        """One line for error messages: who, to whom, which tag, how much."""
        group = f", group {self.group!r}" if self.group else ""
        return (
            f"{self.source} -> {self.destination}, tag {self.tag}{group}, "
            f"{self.dtype or 'bytes'}{list(self.shape)} ({self.nbytes} bytes)"
        )
