"""Messages that arrive over TCP: no memory is shared with the agent, so they land in memory of the trainer's own."""

from __future__ import annotations

import numpy as np

from proxyd.wire.client import RecvData
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import TransferId
from proxyd_client.buffers import Bytes, view_of
from proxyd_client.matching import Incoming


class Private:
    """Buffers by transfer. Guarded by the session's lock."""

    def __init__(self) -> None:
        self._buffers: dict[TransferId, Bytes] = {}
        self._end = 0

    def room_for(self, incoming: Incoming, frame: RecvData, payload_bytes: int) -> memoryview:
        """Where the next piece of a message goes. Raises WireError when it isn't the next one."""
        if frame.offset != incoming.landed_bytes or frame.offset + payload_bytes > incoming.envelope.nbytes:
            raise WireError(f"transfer {incoming.transfer}: {payload_bytes} bytes at {frame.offset} are out of place")
        buffer = self._buffers.get(incoming.transfer)
        if buffer is None:
            buffer = self._buffers[incoming.transfer] = np.empty(incoming.envelope.nbytes, np.uint8)
        incoming.accepted = True
        self._end = frame.offset + payload_bytes
        return view_of(buffer[frame.offset : self._end])

    def filled(self, incoming: Incoming) -> None:
        """The piece that :meth:`room_for` made room for is in place."""
        incoming.landed_bytes = self._end

    def get(self, transfer: TransferId) -> Bytes | None:
        """A message's memory, if it has any here."""
        return self._buffers.get(transfer)

    def forget(self, transfer: TransferId) -> None:
        """It is handed over, or will not come."""
        self._buffers.pop(transfer, None)

    def clear(self) -> None:
        """All of them."""
        self._buffers.clear()
