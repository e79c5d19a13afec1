"""Where activations lie while they are off the device: host memory, or a file.

Both hand out *chunks* of one size. An activation takes as many as it needs, and they need not be neighbours: so buffers
of any size come from one pool, nothing is ever too fragmented, and what is given back serves the next one. Chunks are
kept for the life of the room: the first touch of memory costs as much as several copies (and pinning it more), so it
happens once, in the copying thread, before the copy that is timed.

*Memory*: anonymous pages; with CUDA pinned ones, for the driver stages a copy from or to pageable memory, and waits for
it. *A file*: written and read at its offsets, never mapped. A page of a mapped file that can't be had is a signal that
ends the process; a write that fails is an error that says why. The file has no name, so nothing is left behind however
the process ends. What was written lies in the page cache until the kernel has put it to disk: there memory is lent, not
taken.
"""

from __future__ import annotations

import abc
import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from proxyd_client.buffers import Bytes
from proxyd_client.errors import ArgumentError, ProxydError
from proxyd_client.torch.devices import Copies

CHUNK_BYTES = 4 << 20
"""Large beside what a copy costs to begin (tens of us), small beside an activation, whose last chunk is half empty."""
PAGE_BYTES = 4096
_NO_BLOCK: Bytes = np.empty(0, np.uint8)
"""Pinned by torch: no arena of ours to be registered."""


class OffloadError(ProxydError, RuntimeError):
    """An activation could not be moved out (it stays on the device), or one that is out could not be brought back."""

    code = "offload"


class Piece(NamedTuple):
    """A run of bytes within one chunk."""

    chunk: int
    offset: int
    """In the chunk."""
    begin: int
    """In what is moved."""
    end: int


class Extent(NamedTuple):
    """The chunks of one activation."""

    chunks: tuple[int, ...]
    chunk_bytes: int
    nbytes: int

    def pieces(self, start: int, nbytes: int) -> Iterator[Piece]:
        """The runs that hold ``nbytes`` from ``start`` on."""
        begin = 0
        while begin < nbytes:
            number, offset = divmod(start + begin, self.chunk_bytes)
            end = min(nbytes, begin + self.chunk_bytes - offset)
            yield Piece(self.chunks[number], offset, begin, end)
            begin = end


class Room(abc.ABC):
    """Chunks outside the device. Methods may be called from any thread; those that copy wait for the copy.

    :param limit_bytes: most bytes of activations at once; what the last chunk of each leaves empty comes on top.
    """

    where: str
    """In words, for errors and reports."""

    def __init__(self, limit_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        if limit_bytes < 0:
            raise ArgumentError(f"{limit_bytes} bytes outside the device: the limit can't be below 0")
        if chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
            raise ArgumentError(f"chunks of {chunk_bytes} bytes: take a multiple of {PAGE_BYTES}")
        self.limit_bytes = limit_bytes
        self.chunk_bytes = chunk_bytes
        self.used_bytes = 0
        self.closed = False
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._chunks = 0

    @property
    def held_bytes(self) -> int:
        """All chunks, used and free."""
        return self._chunks * self.chunk_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether the limit leaves room for so many bytes now."""
        return self.used_bytes + nbytes <= self.limit_bytes

    def take(self, nbytes: int) -> Extent:
        """Chunks for an activation. Raises OffloadError when the limit or the system refuses."""
        with self._lock:
            if self.closed:
                raise OffloadError("the store is closed")
            if not self.fits(nbytes):
                raise OffloadError(
                    f"no room for {nbytes} bytes in {self.where}: {self.used_bytes} of {self.limit_bytes} are used",
                    next_step="Raise host_bytes, or let fewer activations wait",
                )
            wanted = -(-nbytes // self.chunk_bytes)
            try:
                while len(self._free) < wanted:
                    self._grow(self._chunks)
                    self._free.append(self._chunks)
                    self._chunks += 1
            except (OSError, MemoryError, RuntimeError) as error:
                raise OffloadError(
                    f"{self.where} has no {self.chunk_bytes} bytes more, beyond {self.held_bytes}",
                    why=_why(error),
                    next_step="Free some, or lower host_bytes",
                ) from error
            chunks = tuple(self._free.pop() for _ in range(wanted))
            self.used_bytes += nbytes
            return Extent(chunks, self.chunk_bytes, nbytes)

    def give_back(self, extent: Extent) -> None:
        """What was taken; nobody reads or writes it any more."""
        with self._lock:
            self.used_bytes -= extent.nbytes
            self._free.extend(extent.chunks)

    def put(self, extent: Extent, start: int, source: torch.Tensor, copies: Copies | None, after: Any) -> None:
        """Copy bytes in, from ``start`` of the extent on.

        :param source: flat, uint8, on the device.
        :param copies: of its device, and ``after``: what :meth:`Copies.mark` noted; None: its memory is the host's.
        :raises OffloadError: the bytes are not there.
        """
        for piece in extent.pieces(start, source.numel()):
            part = source[piece.begin : piece.end]
            try:
                self._put(piece, part, copies, after)
            except (OSError, RuntimeError) as error:
                raise OffloadError(f"{part.numel()} bytes can't be put into {self.where}", why=_why(error)) from error

    def get(self, extent: Extent, start: int, target: torch.Tensor, copies: Copies | None, after: Any) -> None:
        """Copy bytes out again. Raises OffloadError."""
        for piece in extent.pieces(start, target.numel()):
            part = target[piece.begin : piece.end]
            try:
                self._get(piece, part, copies, after)
            except (OSError, RuntimeError) as error:
                raise OffloadError(f"{part.numel()} bytes can't be read from {self.where}", why=_why(error)) from error

    def close(self) -> None:
        """Give everything to the system. Nothing may be under way."""
        with self._lock:
            self.closed = True
            self._free.clear()
            self._release()

    @abc.abstractmethod
    def _grow(self, number: int) -> None: ...

    @abc.abstractmethod
    def _put(self, piece: Piece, part: torch.Tensor, copies: Copies | None, after: Any) -> None: ...

    @abc.abstractmethod
    def _get(self, piece: Piece, part: torch.Tensor, copies: Copies | None, after: Any) -> None: ...

    @abc.abstractmethod
    def _release(self) -> None: ...


class MemoryRoom(Room):
    """Host memory.

    :param pinned: for a CUDA device. torch's allocator rounds each chunk up to a power of two.
    """

    where = "host memory"

    def __init__(self, limit_bytes: int, chunk_bytes: int = CHUNK_BYTES, *, pinned: bool = False) -> None:
        super().__init__(limit_bytes, chunk_bytes)
        self._pinned = pinned
        self._memory: list[torch.Tensor] = []

    def _grow(self, number: int) -> None:
        if self._pinned:
            self._memory.append(torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=True))
            return
        pages = mmap.mmap(-1, self.chunk_bytes)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        memory.numpy()[::PAGE_BYTES] = 0
        self._memory.append(memory)

    def _put(self, piece: Piece, part: torch.Tensor, copies: Copies | None, after: Any) -> None:
        host = self._window(piece)
        if copies is None:
            # Not Tensor.copy_: that would take all of torch's threads from the stage that computes meanwhile.
            np.copyto(host.numpy(), part.numpy())
        else:
            copies.to_host(host, part, after, _NO_BLOCK)

    def _get(self, piece: Piece, part: torch.Tensor, copies: Copies | None, after: Any) -> None:
        host = self._window(piece)
        if copies is None:
            np.copyto(part.numpy(), host.numpy())
        else:
            copies.to_device(part, host, after, _NO_BLOCK)

    def _window(self, piece: Piece) -> torch.Tensor:
        return self._memory[piece.chunk][piece.offset : piece.offset + piece.end - piece.begin]

    def _release(self) -> None:
        self._memory.clear()


class FileRoom(Room):
    """A file without a name in a directory: the SSD tier. Raises ArgumentError when there can't be one.

    :param pinned: for a CUDA device, whose bytes pass through one pinned chunk for each direction.
    """

    def __init__(
        self, limit_bytes: int, directory: Path, chunk_bytes: int = CHUNK_BYTES, *, pinned: bool = False
    ) -> None:
        super().__init__(limit_bytes, chunk_bytes)
        self.where = f"a file in {directory}"
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115 - lives as long as this
        except OSError as error:
            raise ArgumentError(
                f"activations can't be kept in {directory}",
                why=_why(error),
                next_step="Name a directory that exists, that you may write to, and that has room",
            ) from error
        self._pinned = pinned
        self._staging: dict[str, torch.Tensor] = {}

    def _grow(self, number: int) -> None:
        # Space now, not at the write: a disk that is full is known before anything has been copied.
        os.posix_fallocate(self._file.fileno(), number * self.chunk_bytes, self.chunk_bytes)

    def _put(self, piece: Piece, part: torch.Tensor, copies: Copies | None, after: Any) -> None:
        if copies is not None:
            host = self._stage("out", part.numel())
            copies.to_host(host, part, after, _NO_BLOCK)
            part = host
        left, place = memoryview(part.numpy()), self._place(piece)
        while left:
            done = os.pwrite(self._file.fileno(), left, place)
            left, place = left[done:], place + done

    def _get(self, piece: Piece, part: torch.Tensor, copies: Copies | None, after: Any) -> None:
        host = part if copies is None else self._stage("back", part.numel())
        left, place = memoryview(host.numpy()), self._place(piece)
        while left:
            done = os.preadv(self._file.fileno(), [left], place)
            if not done:
                raise OSError(f"the file ends at {place}")
            left, place = left[done:], place + done
        if copies is not None:
            copies.to_device(part, host, after, _NO_BLOCK)

    def _place(self, piece: Piece) -> int:
        return piece.chunk * self.chunk_bytes + piece.offset

    def _stage(self, way: str, nbytes: int) -> torch.Tensor:
        if way not in self._staging:
            self._staging[way] = torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        return self._staging[way][:nbytes]

    def _release(self) -> None:
        self._file.close()


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
