"""proxyd as a backend of torch.distributed. Importing this registers it::

    import proxyd_client.torch
    torch.distributed.init_process_group("proxyd", ...)

or, for the group of a pipeline alone: ``dist.new_group(ranks, backend="proxyd")``. Needs this host's agent
(``PROXYD_SOCKET``, else /run/proxyd/agent.sock). What happens where: docs/pytorch.md.
"""

from __future__ import annotations

from proxyd_client.torch import pipelining
from proxyd_client.torch.functions import eta_s, group_of, link_state, recv_tensor
from proxyd_client.torch.group import BACKEND_NAME, ProcessGroupProxyd, register
from proxyd_client.torch.membership import Options
from proxyd_client.torch.tensors import TensorError

register()
pipelining.install()

__all__ = [
    "BACKEND_NAME",
    "Options",
    "ProcessGroupProxyd",
    "TensorError",
    "eta_s",
    "group_of",
    "link_state",
    "pipelining",
    "recv_tensor",
    "register",
]
