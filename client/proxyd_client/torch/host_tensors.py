"""What a collective works on: contiguous tensors in host memory, for whatever tensors torch was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from proxyd_client.torch.devices import Copies, copies_for
from proxyd_client.torch.tensors import check_kind

_NO_BLOCK = np.empty(0, np.uint8)


class HostTensor:
    """One of the trainer's tensors as a collective sees it.

    A contiguous one of host memory is itself; others are brought here, and taken back by :meth:`give_back`.
    """

    def __init__(self, tensor: torch.Tensor, copies: Copies | None = None) -> None:
        """In the trainer's thread. Raises TensorError for sparse and quantised tensors.

        :param copies: how its device's memory is reached; default: by its device.
        """
        check_kind(tensor)
        self.tensor = tensor.detach()
        self._copies = copies_for(tensor.device) if copies is None else copies
        # What the trainer had queued on its stream so far comes first.
        self._posted = self._copies.mark(self.tensor) if self._copies is not None and tensor.numel() else None
        self._host: torch.Tensor | None = None

    @property
    def dtype(self) -> Any:
        """Of its elements."""
        return self.tensor.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(self.tensor.numel())

    def values(self) -> torch.Tensor:
        """Its elements, flat. In the group's thread."""
        if self._host is None:
            tensor = self.tensor
            if self._copies is None:
                self._host = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
            else:
                self._host = self.room()
                if self.numel:
                    self._copies.to_host(self._host.view(tensor.shape), tensor, self._posted, _NO_BLOCK)
        return self._host

    def room(self) -> torch.Tensor:
        """Memory for its elements, flat: its own where possible. What is there before doesn't count."""
        if self._host is None:
            tensor = self.tensor
            own = self._copies is None and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
            self._host = tensor.reshape(-1) if own else torch.empty(tensor.numel(), dtype=tensor.dtype)
        return self._host

    def give_back(self) -> None:
        """Put what :meth:`values` or :meth:`room` holds into the tensor. In the group's thread."""
        host, tensor = self._host, self.tensor
        if host is None or not self.numel or (self._copies is None and host.data_ptr() == tensor.data_ptr()):
            return
        if self._copies is None:
            tensor.copy_(host.view(tensor.shape))
        else:
            self._copies.to_device(tensor, host.view(tensor.shape), self._posted, _NO_BLOCK)
