"""Why the sending half gave a message up, in words: what was waited for, how long, and what to look at."""

from __future__ import annotations

from proxyd.core.linkbook import NANOS
from proxyd.core.messages import DirectoryEntry
from proxyd.core.peering import Peer
from proxyd.core.transfer import Outgoing


def stays_away(out: Outgoing, peer: Peer, own_address: str, now_ns: int) -> str:
    """The receiver's agent has been away for too long."""
    away_s = (now_ns - (peer.away_since_ns or now_ns)) / NANOS
    address = peer.wanted.address if peer.wanted is not None else "?"
    done = min(out.nbytes, out.taken_bytes)
    if peer.connected_ns > (peer.away_since_ns or 0):
        why = (
            f"no progress for {away_s:.1f} s after {done} of {out.nbytes} bytes: connections from "
            f"{own_address} to agent {peer.name} at {address} come up and break again without "
            f"letting data through (MTU? a firewall?); the last one ended with: {peer.last_error}"
        )
    else:
        why = (
            f"agent {peer.name} at {address} has been away for {away_s:.1f} s ({done} of {out.nbytes} bytes "
            f"were handed to it): {peer.last_error}. Send it again once the agent is back"
        )
    return f"{out.envelope.describe()}: {why}"


def has_not_returned(out: Outgoing, peer: Peer, now_ns: int) -> str:
    """The receiver's agent is back in another life, and the receiver is not."""
    away_s = (now_ns - out.broken_ns) / NANOS
    return (
        f"{out.envelope.describe()}: agent {peer.name} was started again, and {out.envelope.destination} has not come "
        f"back to it for {away_s:.1f} s; look whether that process lives"
    )


def not_reached(out: Outgoing, entry: DirectoryEntry, peer: Peer | None, now_ns: int) -> str:
    """The destination is known, its agent was not reached."""
    waited_s = (now_ns - out.posted_ns) / NANOS
    if peer is not None and peer.connected:
        return (
            f"{out.envelope.describe()}: agent {entry.agent} was started again, and {entry.endpoint} has not come back "
            f"to it for {waited_s:.1f} s; look whether that process lives"
        )
    why = peer.last_error if peer is not None else "not tried yet"
    return (
        f"{out.envelope.describe()}: agent {entry.agent} at {entry.data_address} could not be reached for "
        f"{waited_s:.1f} s ({why}); check that it runs and that its data port is open"
    )


def no_coordinator(out: Outgoing, configured: tuple[str, ...], now_ns: int) -> str:
    """Nobody is there who could know the destination."""
    waited_s = (now_ns - out.posted_ns) / NANOS
    return (
        f"{out.envelope.describe()}: no coordinator reached for {waited_s:.1f} s, so the destination can't be "
        f"looked up (configured: {', '.join(configured) or 'none'}); start one, or check [agent] coordinators"
    )


def not_registered(out: Outgoing, ranks: list[int], now_ns: int) -> str:
    """Nobody is registered as the destination."""
    waited_s = (now_ns - out.posted_ns) / NANOS
    return (
        f"{out.envelope.describe()}: no endpoint {out.envelope.destination} has registered within {waited_s:.1f} s "
        f"(known ranks of job {out.envelope.job!r}: {ranks}); check the rank and that its trainer is connected"
    )
