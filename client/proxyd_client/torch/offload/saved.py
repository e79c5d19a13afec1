"""Saved tensors that can be emptied and filled again: what autograd holds instead of them.

Theory. Autograd packs a tensor when an operation saves it, and unpacks it when the backward needs it; with dI and dW
apart it unpacks twice. We pack an *alias*: the same storage, the same version counter, no graph (with it, a saved
output would hold the node that holds it). Then

* **moving** is emptying: once all aliases of a storage let it go, and nobody else has it, the allocator gets it.
  Filling puts a new storage under them, with the same strides and offset.
* **who else has it** is told by the storage's reference count: a stage's input or output, or what the module keeps for
  itself, has more references than our aliases. Moving that would free nothing, so it stays, and counts as on the
  device.
* **changed in place**: torch compares versions only for tensors that aren't packed by hooks. An emptied alias keeps the
  version counter that it shares with the tensor, so the comparison is made here, in the words of torch, whether the
  tensor is on the device, outside, or has come back. A copy that was made while somebody wrote is never used.

Nothing here keeps an activation alive: the graph holds the aliases, these hold their storage, and the store looks at
them through weak references. A graph that dies (the backward ran, an exception, a caller who lost interest) frees the
memory at once, and the account follows by :class:`Ledger`.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from proxyd_client.torch.offload.rooms import Extent

# Private, and in torch since 2.1; without it a storage counts as shared, and nothing moves.
_use_count = getattr(torch._C, "_storage_Use_Count", None)


class Ledger:
    """Bytes of saved storages on the device."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.peak_bytes = 0
        self._bytes = 0
        self._freed: deque[int] = deque()

    def add(self, nbytes: int) -> None:
        """They are there."""
        with self.lock:
            self._settle()
            self._bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def subtract(self, nbytes: int) -> None:
        """They are gone. Takes no lock: it is called when an object dies, which may be in the midst of :meth:`add`."""
        self._freed.append(nbytes)

    @property
    def bytes(self) -> int:
        """Now."""
        with self.lock:
            self._settle()
            return self._bytes

    def reset_peak(self) -> None:
        """The peak is what is there now."""
        with self.lock:
            self._settle()
            self.peak_bytes = self._bytes

    def _settle(self) -> None:
        freed = self._freed
        while freed:
            self._bytes -= freed.popleft()


class Place(enum.Enum):
    """Where the activation of a micro-batch is."""

    HERE = "on the device"
    LEAVING = "being copied out"
    COPIED = "copied out, and still on the device"
    OUT = "outside the device"
    RETURNING = "on its way back"
    LOST = "dropped while it was outside the device"


class MicroBatch:
    """What one micro-batch saved. Its fields are guarded by the store's lock."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.place = Place.HERE
        self.saving = True
        """Its forward runs."""
        self.void = False
        """The move under way is not wanted any more."""
        self.dropped = False
        self.helds: dict[weakref.ref[Held], int] = {}
        """Its storages, with their addresses when they were saved."""
        self.moved: list[tuple[weakref.ref[Held], int]] = []
        """Which storages are outside, and where in the extent each begins."""
        self.extent: Extent | None = None


class Held:
    """One storage that was saved, however many tensors of it were."""

    __slots__ = ("__weakref__", "_ledger", "aliases", "device", "nbytes", "on_device", "owner", "shared")

    def __init__(self, owner: MicroBatch, nbytes: int, device: Any, ledger: Ledger) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.device = device
        self.on_device = True
        self.shared = False
        """Saved by several micro-batches: it moves with none of them."""
        self.aliases: list[weakref.ref[Saved]] = []
        self._ledger = ledger
        ledger.add(nbytes)

    def __del__(self) -> None:
        if self.on_device:
            self._ledger.subtract(self.nbytes)

    def live(self) -> list[Saved]:
        """The aliases that a graph still has."""
        return [saved for ref in self.aliases if (saved := ref()) is not None]

    def has(self, key: int) -> bool:
        """The storage at this address is this one. Once it has let its first one go, the address may be another's."""
        for ref in self.aliases:
            saved = ref()
            if saved is not None:
                return bool(saved.view is None and saved.alias.untyped_storage()._cdata == key)
        return False

    def own(self) -> bool:
        """Nobody but our aliases has the storage: emptying them frees it."""
        live = self.live()
        if not live or self.shared or not self.on_device or _use_count is None:
            return False
        storage = live[0].alias.untyped_storage()
        # Each alias has one, and so has the object that asks.
        return bool(storage.nbytes() == self.nbytes and _use_count(storage._cdata) == len(live) + 1)

    def flat(self) -> torch.Tensor | None:
        """All bytes of the storage; None: it is free already."""
        live = self.live()
        return (
            torch.empty(0, dtype=torch.uint8, device=self.device).set_(live[0].alias.untyped_storage())
            if live
            else None
        )

    def empty(self) -> None:
        """Let the storage go."""
        for saved in self.live():
            saved.empty()
        self.on_device = False
        self._ledger.subtract(self.nbytes)

    def room(self) -> torch.Tensor:
        """Memory on the device to come back to. Raises what torch raises when there is none."""
        fresh = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.on_device = True
        self._ledger.add(self.nbytes)
        return fresh

    def no_room(self) -> None:
        """What :meth:`room` gave was let go again."""
        self.on_device = False
        self._ledger.subtract(self.nbytes)

    def fill(self, flat: torch.Tensor) -> None:
        """Put this storage under the aliases."""
        for saved in self.live():
            saved.fill(flat.untyped_storage())


class View(NamedTuple):
    """How an alias looks at its storage."""

    size: Any
    stride: Any
    offset: int
    conjugated: bool
    negated: bool


class Saved:
    """What autograd holds for one saved tensor."""

    __slots__ = ("__weakref__", "alias", "held", "version", "view")

    def __init__(self, alias: torch.Tensor, version: int, held: Held | None) -> None:
        self.alias = alias
        self.version = version
        self.held = held
        """None: it never moves, and isn't counted."""
        self.view: View | None = None
        """While it is empty."""

    def empty(self) -> None:
        """Let the storage go; the version counter stays."""
        alias = self.alias
        self.view = View(alias.size(), alias.stride(), alias.storage_offset(), alias.is_conj(), alias.is_neg())
        alias.data = torch.empty(0, dtype=alias.dtype, device=alias.device)

    def fill(self, storage: Any) -> None:
        """Look at this storage, which holds the same bytes."""
        view = self.view
        assert view is not None, "only what was emptied is filled"
        alias = self.alias
        fresh = torch.empty(0, dtype=alias.dtype, device=alias.device)
        fresh.set_(storage, view.offset, view.size, view.stride)
        if view.conjugated:
            fresh = torch._conj(fresh)
        if view.negated:
            fresh = torch._neg_view(fresh)
        alias.data = fresh
        self.view = None

    def check_version(self) -> None:
        """Raises RuntimeError, as torch does, for a tensor that was changed in place since."""
        now = self.alias._version
        if now != self.version:
            view = self.view
            shape = list(self.alias.size() if view is None else view.size)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.alias.type()} {shape}] is at version {now}; expected version {self.version} instead. "
                "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )
