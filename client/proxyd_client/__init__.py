"""proxyd's trainer side: send and receive tensors through this host's agent.

::

    import proxyd_client

    with proxyd_client.connect(job="llama", rank=0) as ep:
        handle = ep.isend(activations, dst=1, tag=7)
        gradients = ep.recv(src=1, tag=8, timeout_s=30).array
        handle.wait(timeout_s=30)

Needs numpy and nothing else: no grpc, no protobuf, no event loop in a trainer.
"""

from __future__ import annotations

from proxyd_client.endpoint import Endpoint, LinkState, connect
from proxyd_client.errors import (
    AgentUnavailable,
    ArgumentError,
    ClosedError,
    ConfigError,
    MismatchError,
    PeerLost,
    ProxydError,
    TransferCancelled,
    TransferFailed,
    TransferTimeout,
)
from proxyd_client.handle import Handle
from proxyd_client.lending import SendBuffer
from proxyd_client.message import Message

__all__ = [
    "connect",
    "Endpoint",
    "Handle",
    "Message",
    "SendBuffer",
    "LinkState",
    "ProxydError",
    "ArgumentError",
    "ConfigError",
    "AgentUnavailable",
    "PeerLost",
    "TransferTimeout",
    "TransferFailed",
    "TransferCancelled",
    "MismatchError",
    "ClosedError",
]
