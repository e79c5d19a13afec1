"""Where a send stands, as a trainer is told."""

from __future__ import annotations

import enum


class SendPhase(enum.IntEnum):
    """Where a send stands; named in timeouts."""

    RESOLVE = 0
    CREDIT = 1
    QUEUED = 2
    GRANTED = 3
    SENDING = 4
    UNACKNOWLEDGED = 5
    RECONNECTING = 6
    AGENT_AWAY = 7
    DRAINING = 8

    @property
    def label(self) -> str:
        """What the phase waits for, in words."""
        return _PHASE_LABELS[self]


_PHASE_LABELS = {
    SendPhase.RESOLVE: "looking for the destination",
    SendPhase.CREDIT: "waiting for room at the receiver",
    SendPhase.QUEUED: "queued at the coordinator",
    SendPhase.GRANTED: "granted",
    SendPhase.SENDING: "sending",
    SendPhase.UNACKNOWLEDGED: "sent, waiting for the acknowledgement",
    SendPhase.RECONNECTING: "waiting for the connection to the receiver's agent to come back",
    SendPhase.AGENT_AWAY: "waiting for this host's agent to come back",
    SendPhase.DRAINING: "held: this host's agent drains (proxyd undrain ends that)",
}
