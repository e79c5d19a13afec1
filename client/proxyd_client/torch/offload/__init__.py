"""Saved activations of a stage move to host memory and back while they wait for their backward.

:class:`ActivationStore` has the mechanism; what moves, and when, is decided by
:class:`proxyd_client.schedule.offload.Offload`. docs/pytorch.md, "Offload", has what it costs and when it doesn't help.
"""

from __future__ import annotations

from proxyd_client.torch.offload.rooms import OffloadError
from proxyd_client.torch.offload.store import ActivationStore, OffloadReport

__all__ = ["ActivationStore", "OffloadError", "OffloadReport"]
