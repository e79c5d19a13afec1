"""What a link can do wrong besides losing and delaying packets; pure, seeded.

TCP's checksum would turn flipped bits into losses, which every sender survives. The faults that get through are those
of a box on the way that computes checksums itself: :attr:`LinkFaults.corrupt` flips one bit of the payload and mends
the checksum, so that only a check above TCP can notice. A reset is forged in the place of a packet that is due: its
sequence number is then the one that the receiver expects, and anything else would be answered with a challenge
(RFC 5961).
"""

from __future__ import annotations

import heapq
import random
from dataclasses import asdict, dataclass
from typing import Any

from proxyd.wan.errors import WanError

_TCP = 6
_IP_CHECKSUM, _TCP_CHECKSUM = 10, 16
_SYN, _RST, _ACK = 0x02, 0x04, 0x10
_ADDRESSES = slice(12, 20)
_TCP_HEADER_BYTES = 20


@dataclass(frozen=True)
class LinkFaults:
    """Faults of one direction. Chances are per packet, in [0, 1); none by default.

    ``corrupt``: one bit of a TCP payload is flipped, and the checksum fits. ``duplicate``: a packet arrives twice.
    ``reorder``: a packet arrives ``reorder_ns`` later than it should, behind its successors. ``mtu_bytes``: larger IP
    packets vanish, and nobody is told (a path MTU that ICMP doesn't report). ``forget_ns``: of a TCP connection that
    had no packet this way for longer everything vanishes from then on (a NAT or firewall that dropped its entry); new
    connections pass.
    """

    corrupt: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_ns: int = 5_000_000
    mtu_bytes: int | None = None
    forget_ns: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("corrupt", "duplicate", "reorder"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise WanError(f"{name} is the chance of a packet, in [0, 1), got {getattr(self, name)}")
        if self.reorder_ns < 0:
            raise WanError(f"reorder_ns must be >= 0, got {self.reorder_ns}")
        if self.mtu_bytes is not None and self.mtu_bytes < 68:
            raise WanError(f"mtu_bytes must be at least 68, the least that IPv4 allows, got {self.mtu_bytes}")
        if self.forget_ns is not None and self.forget_ns <= 0:
            raise WanError(f"forget_ns must be > 0, got {self.forget_ns}")

    def to_json(self) -> dict[str, Any]:
        """Plain values for the emulator."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LinkFaults:
        """The inverse of :meth:`to_json`."""
        return cls(**fields)


class Tamperer:
    """Does to the packets of one direction what :class:`LinkFaults` says, and what :meth:`reset` asks for."""

    def __init__(self) -> None:
        self.faults = LinkFaults()
        self.corrupted_packets = self.duplicated_packets = self.reordered_packets = 0
        self.reset_packets = self.oversized_packets = 0
        self._random = random.Random(self.faults.seed)
        self._resetting = False
        self._was_reset: set[bytes] = set()
        self._heard_ns: dict[bytes, int | None] = {}
        """When each connection's last packet came; None: it is forgotten."""
        self._late: list[tuple[int, int, bytes]] = []
        self._made_late = 0

    def set(self, faults: LinkFaults) -> None:
        """From now on these; the seed begins anew. What is under way late stays so."""
        self.faults = faults
        self._random = random.Random(faults.seed)
        if faults.forget_ns is None:
            self._heard_ns.clear()

    def reset(self, on: bool) -> None:
        """Each TCP connection's next packet, and no other, becomes a reset, until this is switched off."""
        self._resetting = on
        self._was_reset.clear()

    def fits(self, length_bytes: int) -> bool:
        """Whether a packet of this size gets through at all; counts it if not."""
        if self.faults.mtu_bytes is None or length_bytes <= self.faults.mtu_bytes:
            return True
        self.oversized_packets += 1
        return False

    def knows(self, packet: bytes, now_ns: int) -> bool:
        """Whether the connection of a packet hasn't been forgotten over a silence; notes that it was heard of."""
        if self.faults.forget_ns is None or (found := _tcp(packet)) is None:
            return True
        flow = _flow(packet, found[0])
        heard_ns = now_ns if packet[found[0] + 13] & _SYN else self._heard_ns.get(flow, now_ns)
        if heard_ns is None or now_ns - heard_ns > self.faults.forget_ns:
            self._heard_ns[flow] = None
            return False
        self._heard_ns[flow] = now_ns
        return True

    def deliver(self, packet: bytes, now_ns: int) -> list[bytes]:
        """What arrives now in the place of a packet that is due: one packet, two, or none (yet)."""
        faults = self.faults
        if self._resetting and (forged := self._forge(packet)) is not None:
            return [forged]
        if faults.corrupt and self._random.random() < faults.corrupt:
            packet = self._flip(packet)
        if faults.reorder and self._random.random() < faults.reorder:
            self.reordered_packets += 1
            self._made_late += 1
            heapq.heappush(self._late, (now_ns + faults.reorder_ns, self._made_late, packet))
            return []
        if faults.duplicate and self._random.random() < faults.duplicate:
            self.duplicated_packets += 1
            return [packet, packet]
        return [packet]

    def next_due_ns(self) -> int | None:
        """When the next late packet arrives; None if there is none."""
        return self._late[0][0] if self._late else None

    def pop_due(self, now_ns: int) -> bytes | None:
        """The next late packet that arrives by now, or None."""
        if not self._late or self._late[0][0] > now_ns:
            return None
        return heapq.heappop(self._late)[2]

    def _flip(self, packet: bytes) -> bytes:
        found = _tcp(packet)
        if found is None:
            return packet
        tcp, payload = found
        if payload >= len(packet):
            return packet
        self.corrupted_packets += 1
        index = self._random.randrange(payload, len(packet))
        changed = bytearray(packet)
        changed[index] ^= 1 << self._random.randrange(8)
        # RFC 1624: the sum moves by what its 16-bit word moved by; a last odd byte counts as a high one.
        shift = 0 if (index - tcp) % 2 else 8
        at = tcp + _TCP_CHECKSUM
        total = ~int.from_bytes(packet[at : at + 2], "big") & 0xFFFF
        total += (~(packet[index] << shift) & 0xFFFF) + (changed[index] << shift)
        changed[at : at + 2] = (~_folded(total) & 0xFFFF).to_bytes(2, "big")
        return bytes(changed)

    def _forge(self, packet: bytes) -> bytes | None:
        """The reset in the place of a connection's packet; None: none of a connection that has had none."""
        found = _tcp(packet)
        if found is None or packet[found[0] + 13] & (_SYN | _RST):
            return None
        tcp = found[0]
        flow = _flow(packet, tcp)
        if flow in self._was_reset:
            return None
        self._was_reset.add(flow)
        self.reset_packets += 1
        forged = bytearray(packet[: tcp + _TCP_HEADER_BYTES])
        forged[2:4] = len(forged).to_bytes(2, "big")
        forged[tcp + 12 : tcp + 16] = bytes((_TCP_HEADER_BYTES // 4 << 4, _RST | _ACK, 0, 0))
        forged[tcp + 18 : tcp + 20] = b"\0\0"
        forged[_IP_CHECKSUM : _IP_CHECKSUM + 2] = b"\0\0"
        forged[_IP_CHECKSUM : _IP_CHECKSUM + 2] = checksum(bytes(forged[:tcp]))
        forged[tcp + _TCP_CHECKSUM : tcp + _TCP_CHECKSUM + 2] = b"\0\0"
        pseudo = bytes(forged[_ADDRESSES]) + bytes((0, _TCP)) + (len(forged) - tcp).to_bytes(2, "big")
        forged[tcp + _TCP_CHECKSUM : tcp + _TCP_CHECKSUM + 2] = checksum(pseudo + bytes(forged[tcp:]))
        return bytes(forged)


def _tcp(packet: bytes) -> tuple[int, int] | None:
    """Where the TCP header and its payload begin in an IPv4 packet; None: it is no whole first fragment of TCP."""
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != _TCP or packet[6] & 0x3F or packet[7]:
        return None
    tcp = (packet[0] & 15) * 4
    if len(packet) < tcp + _TCP_HEADER_BYTES:
        return None
    return tcp, tcp + (packet[tcp + 12] >> 4) * 4


def _flow(packet: bytes, tcp: int) -> bytes:
    """What tells one direction of a connection from all others: addresses and ports."""
    return packet[_ADDRESSES] + packet[tcp : tcp + 4]


def _folded(total: int) -> int:
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def checksum(data: bytes) -> bytes:
    """The Internet checksum (RFC 1071) of ``data``, two bytes."""
    padded = data + b"\0" * (len(data) % 2)
    words = memoryview(padded)
    total = sum(int.from_bytes(words[at : at + 2], "big") for at in range(0, len(padded), 2))
    return (~_folded(total) & 0xFFFF).to_bytes(2, "big")
