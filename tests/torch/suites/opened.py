"""The backend under the name "gloo", in a test process only.

torch's suite has gates that go by the name: "only gloo supports timeouts". Behind them are tests that our backend has
to pass as well. ``register_backend("gloo", ...)`` is not refused, and has no effect: whoever makes groups compares with
``Backend.GLOO`` first. So while a group is made, that constant is a name that equals no other.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from proxyd_client.torch import group


class _Nobody(str):
    """ "gloo" to everybody but another one of these."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return not isinstance(other, _Nobody) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def register_as_gloo() -> None:
    """From now on, groups with the backend "gloo" are proxyd's."""
    dist.Backend.register_backend("gloo", group._create, extended_api=True, devices=["cpu", "cuda"])
    make = distributed_c10d._new_process_group_helper

    def helper(*arguments: Any, **options: Any) -> Any:
        dist.Backend.GLOO = _Nobody("gloo")
        try:
            return make(*arguments, **options)
        finally:
            dist.Backend.GLOO = "gloo"

    distributed_c10d._new_process_group_helper = helper
