"""Which of an agent's worker processes a connection is for.

Several workers stand behind one address (``[agent] workers``). Each is an agent with a name of its own, ``gw#0``,
``gw#1``, ...; nobody can configure such a name. Whoever dials one of them sends a *preamble* first, in the clear and
before anything else, also before TLS: 16 bytes that say which worker. The process that accepts reads exactly these and
passes the connection on. They are no secret and no proof: the handshake that follows says, and proves, whom it means.
"""

from __future__ import annotations

import re
import struct

from proxyd.wire.codec import WireError

MAX_WORKERS = 64
SEPARATOR = "#"

_MAGIC = b"\0proxyd-worker"
"""No TLS record begins with a NUL, nor does a frame between agents."""
_FORM = struct.Struct(f"!{len(_MAGIC)}sH")
PREAMBLE_BYTES = _FORM.size
_WORKER = re.compile(rf"(?P<agent>[^{SEPARATOR}]+){SEPARATOR}(?P<worker>0|[1-9][0-9]?)", re.ASCII)


def worker_name(name: str, worker: int) -> str:
    """What the worker of an agent is called."""
    return f"{name}{SEPARATOR}{worker}"


def worker_of(name: str) -> int | None:
    """The worker that an agent's name means; None: it is an agent without workers."""
    found = _WORKER.fullmatch(name)
    if found is None or int(found["worker"]) >= MAX_WORKERS:
        return None
    return int(found["worker"])


def configured_name(name: str) -> str:
    """The name in the configuration of the agent that a worker belongs to; any other name as it is."""
    return name if worker_of(name) is None else name.partition(SEPARATOR)[0]


def preamble(worker: int) -> bytes:
    """What a connection to that worker begins with."""
    return _FORM.pack(_MAGIC, worker)


def may_be_preamble(data: bytes) -> bool:
    """Whether a connection that begins with these bytes (one at least) may begin with a preamble."""
    return _MAGIC.startswith(data[: len(_MAGIC)])


def read_preamble(data: bytes) -> int:
    """The worker that :data:`PREAMBLE_BYTES` mean; there may be none of that number. Raises WireError."""
    if len(data) != PREAMBLE_BYTES:
        raise WireError(f"a preamble has {PREAMBLE_BYTES} bytes, not {len(data)}")
    magic, worker = _FORM.unpack(data)
    if magic != _MAGIC:
        raise WireError("what a connection began with is no preamble")
    return int(worker)
