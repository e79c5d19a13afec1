"""The store of one stage's saved activations: counts them, moves them out of the device and back, in the background.

Theory. A micro-batch's activation is in one of these places::

    HERE --leave--> LEAVING --copied--> COPIED --settle--> OUT --come_back--> RETURNING --copied--> HERE
                       |                   |                \\________ unpack, and nobody asked ______/
                       +--- void, failed --+--> HERE

Until ``settle`` the device's copy is the valid one: nothing that goes wrong before costs more than the copy. From then
on the valid one is outside, and only it: whoever needs the activation brings it back, and waits. So predictions decide
when time is spent and never what a gradient is.

*What doesn't move*: parameters and buffers of the module and views of them, what lies on another device, storages
below a page, whatever has references that aren't ours (:mod:`.saved`), tensors without an ordinary storage (sparse,
quantised, subclasses). *Failures on the way out* (limit, full disk, IO error): the activation stays,
:attr:`ActivationStore.report` says why. On the way back: no room on the device, then the one who needs it tries again;
unreadable, then the backward raises :class:`OffloadError`.

*Threads*: one for each direction, so that the bus is used both ways at once, of an executor of Python's. Its threads
are joined before the interpreter ends: one that is inside torch at that time would abort the process. Copies run
without the GIL. *Streams*: memory to come back to is allocated by whoever asks, on his stream, and a move begins after
what was queued there; the copying thread waits for its own stream, so whoever hears that a move is over may queue
anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch

from proxyd_client.errors import ArgumentError
from proxyd_client.torch.devices import Copies, StreamCopies
from proxyd_client.torch.offload.rooms import CHUNK_BYTES, PAGE_BYTES, FileRoom, MemoryRoom, OffloadError, Room
from proxyd_client.torch.offload.saved import Held, Ledger, MicroBatch, Place, Saved

_log = logging.getLogger(__name__)
_OUT, _BACK = 0, 1
_LEARN_SHARE = 1 / 8
_LEARN_BYTES = 256 << 10
"""A shorter copy is mostly its beginning."""
_ALIGN_BYTES = 64
NEVER_BYTES_PER_S = 1.0
"""Where nothing can be moved: so slow that no wait is ever worth it."""


@dataclasses.dataclass
class OffloadReport:
    """What has happened since the store was made."""

    moved_out: int = 0
    """Activations that left the device."""
    moved_bytes: int = 0
    void: int = 0
    """Copies that were thrown away, for the backward came first, or there was nothing to free."""
    surprises: int = 0
    """Activations that a backward needed while they were out: it waited for the copy."""
    failed: int = 0
    """Moves that could not be made."""
    trouble: str = ""
    """Why the last of these failed."""


class ActivationStore:
    """Saved activations of one stage.

    :param host_bytes: most bytes of activations outside the device.
    :param directory: they lie in a file there; default: in host memory.
    :param module: the stage. Without it a saved tensor that is a Parameter, or a view of one, is still left alone, but
        not the module's buffers.
    :param device: default: the module's, else the CPU.
    :param least_bytes: smaller storages stay: beginning a copy costs more than they do.
    :param copies: how the device is reached, out and back; default: by its device.
    :raises ArgumentError: a limit or directory that can't be.
    """

    def __init__(
        self,
        *,
        host_bytes: int,
        directory: Path | None = None,
        module: torch.nn.Module | None = None,
        device: torch.device | None = None,
        least_bytes: int = PAGE_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
        copies: tuple[Copies, Copies] | None = None,
    ) -> None:
        self.host_bytes = host_bytes
        """Most bytes of activations outside the device."""
        self.device = _device_of(module, device)
        cuda = self.device.type == "cuda"
        self._room: Room
        if directory is None:
            self._room = MemoryRoom(host_bytes, chunk_bytes, pinned=cuda)
        else:
            self._room = FileRoom(host_bytes, directory, chunk_bytes, pinned=cuda)
        if copies is None and cuda:
            # Streams of its own: one that carries messages must not wait for activations, nor one way for the other.
            copies = StreamCopies(torch.cuda, self.device), StreamCopies(torch.cuda, self.device)
        self._copies: tuple[Copies | None, Copies | None] = copies or (None, None)
        self._module = module
        self._least_bytes = least_bytes
        self._ledger = Ledger()
        self._changed = threading.Condition()
        self._records: dict[int, MicroBatch] = {}
        self._by_key: dict[int, weakref.ref[Held]] = {}
        self._returning = 0
        self._closed = False
        self._speeds: list[float] = [0.0, 0.0]
        self._report = OffloadReport()
        # A thread's current device is the first one, and pinning memory there would set it up for nothing.
        begin = functools.partial(torch.cuda.set_device, self.device) if cuda else None
        self._ways = tuple(ThreadPoolExecutor(1, f"proxyd-offload-{way}", begin) for way in ("out", "back"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------- figures

    @property
    def device_bytes(self) -> int:
        """Bytes on the device that saved tensors hold now, each storage once, parameters and buffers left out."""
        return self._ledger.bytes

    @property
    def peak_device_bytes(self) -> int:
        """The most of :attr:`device_bytes` since the start, or since :meth:`reset_peak`."""
        return self._ledger.peak_bytes

    @property
    def host_bytes_used(self) -> int:
        """Bytes of activations outside the device, also of those that are on their way there or back."""
        return self._room.used_bytes

    @property
    def report(self) -> OffloadReport:
        """What has happened; a copy."""
        with self._changed:
            return dataclasses.replace(self._report)

    @property
    def transfer_bytes_per_s(self) -> float:
        """Of the slower direction, learned from the moves; before the first ones, from a trial of some ms."""
        if not all(self._speeds):
            self._try_out()
        return min(self._speeds) or NEVER_BYTES_PER_S

    def bytes_of(self, micro_batch: int) -> int:
        """Bytes that a micro-batch's saved tensors hold, wherever they are; 0: none that is known."""
        with self._changed:
            record = self._records.get(micro_batch)
            return sum(held.nbytes for held in _alive(record)) if record is not None else 0

    def movable_bytes_of(self, micro_batch: int) -> int:
        """Those of :meth:`bytes_of` that moving would free now: nothing but the graph holds them."""
        with self._changed:
            record = self._records.get(micro_batch)
            return sum(held.nbytes for held in self._movable(record)) if record is not None else 0

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        self._ledger.reset_peak()

    # ---------------------------------------------------------------------------------------------- forward

    @contextlib.contextmanager
    def saving(self, micro_batch: int) -> Iterator[None]:
        """Around a forward: what autograd saves belongs to this micro-batch. Hooks are of this thread alone.

        A forward that raises leaves nothing behind. Raises ArgumentError for a micro-batch that is still held.
        """
        with self._changed:
            if self._closed:
                raise OffloadError("the store is closed")
            if micro_batch in self._records:
                raise ArgumentError(
                    f"micro-batch {micro_batch} is {self._records[micro_batch].place.value}",
                    next_step="drop() it after its W, or when a step is given up",
                )
            record = self._records[micro_batch] = MicroBatch(micro_batch)
        constant = _constants(self._module)

        def pack(tensor: torch.Tensor) -> Saved:
            return self._pack(record, constant, tensor)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                yield
        except BaseException:
            self.drop(micro_batch)
            raise
        record.saving = False

    def _pack(self, record: MicroBatch, constant: set[int], tensor: torch.Tensor) -> Saved:
        # With its graph, a saved output would hold the node that holds it.
        held = self._held(record, constant, tensor) if type(tensor) is torch.Tensor else None
        saved = Saved(tensor.detach(), tensor._version, held)
        if held is not None:
            held.aliases.append(weakref.ref(saved))
        return saved

    def _held(self, record: MicroBatch, constant: set[int], tensor: torch.Tensor) -> Held | None:
        """The storage of a tensor; None: it isn't counted."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # what a transform wraps
            return None
        key = storage._cdata
        nbytes = storage.nbytes()
        if not nbytes or key in constant or tensor.device != self.device or type(tensor._base) is torch.nn.Parameter:
            return None
        with self._changed:
            ref = self._by_key.get(key)
            held = ref() if ref is not None else None
            if held is None or not held.has(key):
                held = Held(record, nbytes, self.device, self._ledger)
                ref = weakref.ref(held)
                self._by_key[key] = ref
                record.helds[ref] = key
            elif held.owner is not record:
                held.shared = True
        return held

    # --------------------------------------------------------------------------------------------- backward

    def _unpack(self, saved: Saved) -> torch.Tensor:
        saved.check_version()
        held = saved.held
        if held is None:
            return saved.alias
        while True:
            with self._changed:
                if saved.view is None:
                    # A tensor of its own: while the backward uses it, the storage has one more reference, and
                    # whoever settles a move just now finds that it can't be freed.
                    return saved.alias.detach()
            self._bring_back(held.owner)

    def _bring_back(self, record: MicroBatch) -> None:
        """Now, and wait for it. Raises OffloadError."""
        with self._changed:
            if record.place == Place.RETURNING:
                future = self._submit(_BACK, _nothing)
            elif record.place == Place.OUT:
                parts, after = self._start_return(record)
                self._report.surprises += 1
                future = self._submit(_BACK, self._copy_back, record, parts, after, _nothing)
            elif record.place == Place.HERE:
                return
            else:
                raise OffloadError(
                    f"the activation of micro-batch {record.number} was {record.place.value}",
                    next_step="drop() a micro-batch after the last backward that needs it",
                )
        try:
            trouble = future.result()
        except CancelledError:
            trouble = "the store was closed"
        if trouble:
            raise OffloadError(f"the activation of micro-batch {record.number} can't be brought back", why=trouble)

    # ------------------------------------------------------------------------------------------------ moves

    def leave(self, micro_batch: int, done: Callable[[], None]) -> None:
        """Start to copy an activation out. ``done`` is called in another thread when that is over, however it went.

        Frees nothing: see :meth:`settle`. Raises ArgumentError for one that isn't on the device.
        """
        with self._changed:
            record = self._record(micro_batch)
            if record.saving or record.place != Place.HERE:
                place = "being computed" if record.saving else record.place.value
                raise ArgumentError(f"micro-batch {micro_batch} can't leave: it is {place}")
            record.place = Place.LEAVING
            record.void = False
            record.moved = []
            parts: list[tuple[int, torch.Tensor]] = []
            end = 0
            for held in self._movable(record):
                flat = held.flat()
                if flat is not None:
                    record.moved.append((weakref.ref(held), end))
                    parts.append((end, flat))
                    end += -(-held.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
            copies = self._copies[_OUT]
            after = copies.mark(parts[0][1]) if copies is not None and parts else None
            self._submit(_OUT, self._copy_out, record, parts, end, after, done)

    def settle(self, micro_batch: int, keep: bool) -> bool:
        """After ``done``: let the device's copy go, or (``keep``) throw the other one away. Answers whether it is out.

        It isn't when the copy failed (:attr:`report` has the reason), or when letting it go would free nothing.
        ``keep`` may come before ``done`` too. Raises ArgumentError when it is let go before ``done``.
        """
        with self._changed:
            record = self._record(micro_batch)
            if record.place == Place.LEAVING:
                if not keep:
                    raise ArgumentError(f"micro-batch {micro_batch} is still {record.place.value}")
                record.void = True
                return False
            if record.place != Place.COPIED:
                return record.place == Place.OUT
            moved: list[tuple[weakref.ref[Held], int]] = []
            if not keep:
                for ref, start in record.moved:
                    held = ref()
                    if held is not None and held.own():
                        held.empty()
                        moved.append((ref, start))
                        self._report.moved_bytes += held.nbytes
            record.moved = moved
            if moved:
                record.place = Place.OUT
                self._report.moved_out += 1
                return True
            record.place = Place.HERE
            self._report.void += 1
            self._give_back(record)
            return False

    def come_back(self, micro_batch: int, done: Callable[[], None]) -> None:
        """Start to copy an activation in: its bytes on the device are taken now. ``done`` as for :meth:`leave`.

        One that is here already, because a backward could not wait, is fine. Without room on the device it stays out,
        and whoever needs it tries again. Raises ArgumentError for one that was not let go.
        """
        with self._changed:
            record = self._record(micro_batch)
            if record.place in (Place.LEAVING, Place.COPIED):
                raise ArgumentError(f"micro-batch {micro_batch} can't come back: it is {record.place.value}")
            if record.place == Place.OUT:
                try:
                    parts, after = self._start_return(record)
                except OffloadError as error:
                    self._failed(str(error))
                else:
                    self._submit(_BACK, self._copy_back, record, parts, after, done)
                    return
            self._submit(_BACK, self._tell, done)

    def drop(self, micro_batch: int) -> None:
        """After its W, or when the step is given up: what is outside goes back to the pool. Unknown ones are fine."""
        with self._changed:
            record = self._records.pop(micro_batch, None)
            if record is None:
                return
            for ref, key in record.helds.items():
                if self._by_key.get(key) is ref:  # another's, if the address was free meanwhile
                    del self._by_key[key]
            record.dropped = True
            if record.place in (Place.COPIED, Place.OUT):
                record.place = Place.LOST if record.place == Place.OUT else Place.HERE
                self._give_back(record)

    def drop_all(self) -> None:
        """A step is given up."""
        with self._changed:
            for number in list(self._records):
                self.drop(number)

    def close(self) -> None:
        """End the threads, after the copy that is under way, and give all memory back. What is out is lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for way in self._ways:
            way.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            for record in self._records.values():
                if record.place in (Place.OUT, Place.RETURNING):
                    record.place = Place.LOST
            self._records.clear()
            self._by_key.clear()
        self._room.close()

    # ------------------------------------------------------------------------------------- in the background

    def _copy_out(
        self,
        record: MicroBatch,
        parts: list[tuple[int, torch.Tensor]],
        nbytes: int,
        after: Any,
        done: Callable[[], None],
    ) -> None:
        extent, trouble = None, ""
        try:
            extent = self._room_for(nbytes)
            began_ns = time.perf_counter_ns()
            self._put(record, extent, parts, after)
            self._learn(_OUT, nbytes, time.perf_counter_ns() - began_ns)
        except Exception as error:  # noqa: BLE001 - a device's: it is this move's, not this thread's
            trouble = str(error) or repr(error)
        # Before anybody hears of it: each would be a reference that keeps settle() from freeing the storage.
        parts.clear()
        with self._changed:
            record.extent = extent
            if trouble or record.void or record.dropped:
                record.place = Place.HERE
                record.moved = []
                self._give_back(record)
                if trouble:
                    self._failed(f"micro-batch {record.number} stays on the device: {trouble}")
                else:
                    self._report.void += 1
            else:
                record.place = Place.COPIED
        self._tell(done)

    def _room_for(self, nbytes: int) -> Any:
        with self._changed:
            # What comes back makes room in a moment; a limit that was reckoned to the byte must not fail for that.
            self._changed.wait_for(lambda: self._room.fits(nbytes) or not self._returning or self._closed)
        return self._room.take(nbytes)

    def _put(self, record: MicroBatch, extent: Any, parts: list[tuple[int, torch.Tensor]], after: Any) -> None:
        for start, flat in parts:
            if record.void or record.dropped or self._closed:
                return
            self._room.put(extent, start, flat, self._copies[_OUT], after)

    def _start_return(self, record: MicroBatch) -> tuple[list[tuple[Held, int, torch.Tensor]], Any]:
        """Take memory of the device. Raises OffloadError when there is none; nothing has changed then."""
        parts: list[tuple[Held, int, torch.Tensor]] = []
        try:
            for ref, start in record.moved:
                held = ref()
                if held is not None:
                    parts.append((held, start, held.room()))
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and so is what the CPU's allocator raises
            for held, _, _ in parts:
                held.no_room()
            why = str(error).splitlines()[0]
            raise OffloadError(
                f"the device has no room for micro-batch {record.number} to come back", why=why
            ) from error
        record.place = Place.RETURNING
        self._returning += 1
        copies = self._copies[_BACK]
        return parts, copies.mark(parts[0][2]) if copies is not None and parts else None

    def _copy_back(
        self, record: MicroBatch, parts: list[tuple[Held, int, torch.Tensor]], after: Any, done: Callable[[], None]
    ) -> str:
        """Why it failed; empty when it didn't."""
        trouble = ""
        try:
            began_ns = time.perf_counter_ns()
            nbytes = self._get(record, parts, after)
            self._learn(_BACK, nbytes, time.perf_counter_ns() - began_ns)
        except Exception as error:  # noqa: BLE001 - a device's: it is this move's, not this thread's
            trouble = str(error) or repr(error)
        with self._changed:
            self._returning -= 1
            _fill(parts, trouble)
            if trouble and not record.dropped:
                record.place = Place.OUT
                self._failed(f"micro-batch {record.number} is still out: {trouble}")
            else:
                record.place = Place.LOST if trouble else Place.HERE
                record.moved = []
                self._give_back(record)
            self._changed.notify_all()
        self._tell(done)
        return trouble

    def _get(self, record: MicroBatch, parts: list[tuple[Held, int, torch.Tensor]], after: Any) -> int:
        assert record.extent is not None, "what is out has an extent"
        for _, start, fresh in parts:
            self._room.get(record.extent, start, fresh, self._copies[_BACK], after)
        return sum(held.nbytes for held, _, _ in parts)

    def _tell(self, done: Callable[[], None]) -> None:
        try:
            done()
        except Exception:  # noqa: BLE001
            # Its own thread will miss the news; this one has other moves to make.
            _log.exception("what was to be called after a move raised")

    # ---------------------------------------------------------------------------------------------- helpers

    def _record(self, micro_batch: int) -> MicroBatch:
        record = self._records.get(micro_batch)
        if record is None:
            raise ArgumentError(f"micro-batch {micro_batch} is not held: its forward has not run, or it was dropped")
        return record

    def _movable(self, record: MicroBatch) -> Iterator[Held]:
        return (held for held in _alive(record) if held.nbytes >= self._least_bytes and held.own())

    def _submit(self, way: int, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._closed:
            raise OffloadError("the store is closed")
        try:
            return self._ways[way].submit(work, *arguments)
        except RuntimeError as error:
            raise OffloadError("nothing moves any more", why=str(error)) from error

    def _give_back(self, record: MicroBatch) -> None:
        if record.extent is not None:
            self._room.give_back(record.extent)
            record.extent = None

    def _failed(self, trouble: str) -> None:
        if not self._report.failed:
            _log.warning("%s", trouble)
        self._report.failed += 1
        self._report.trouble = trouble

    def _learn(self, way: int, nbytes: int, took_ns: int) -> None:
        if nbytes >= _LEARN_BYTES and took_ns > 0:
            speed = nbytes * 1e9 / took_ns
            known = self._speeds[way]
            self._speeds[way] = known + (speed - known) * _LEARN_SHARE if known else speed

    def _try_out(self) -> None:
        """Move a chunk of nothing out and back."""
        nbytes = min(self._room.chunk_bytes, self._room.limit_bytes)
        copied = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        try:
            extent = self._room.take(nbytes)
        except OffloadError as error:
            with self._changed:
                self._failed(str(error))
            return
        try:
            for way, move in ((_OUT, self._room.put), (_BACK, self._room.get)):
                copies = self._copies[way]
                after = copies.mark(copied) if copies is not None else None
                took_ns = self._submit(way, _timed, move, extent, 0, copied, copies, after).result()
                if not self._speeds[way]:
                    self._speeds[way] = nbytes * 1e9 / max(1, took_ns)
        except (OffloadError, CancelledError) as error:
            with self._changed:
                self._failed(str(error))
        finally:
            self._room.give_back(extent)


def _timed(work: Callable[..., None], *arguments: Any) -> int:
    began_ns = time.perf_counter_ns()
    work(*arguments)
    return time.perf_counter_ns() - began_ns


def _nothing() -> None:
    """Of a return that nobody else asked for."""


def _fill(parts: list[tuple[Held, int, torch.Tensor]], trouble: str) -> None:
    """End a return. No reference to a storage is left: each would keep the next settle() from freeing it."""
    for held, _, fresh in parts:
        if trouble:
            held.no_room()
        else:
            held.fill(fresh)
    parts.clear()


def _alive(record: MicroBatch) -> Iterator[Held]:
    return (held for ref in record.helds if (held := ref()) is not None)


def _device_of(module: torch.nn.Module | None, device: torch.device | None) -> torch.device:
    if device is None:
        first = next(module.parameters(), None) if module is not None else None
        return first.device if first is not None else torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _constants(module: torch.nn.Module | None) -> set[int]:
    """Storages of parameters and buffers: they are on the device whatever happens, and belong to no micro-batch."""
    keys: set[int] = set()
    if module is not None:
        for tensors in (module.parameters(), module.buffers()):
            for tensor in tensors:
                with contextlib.suppress(NotImplementedError, RuntimeError):  # a subclass without a storage of its own
                    keys.add(tensor.untyped_storage()._cdata)
    return keys
