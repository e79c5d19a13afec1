"""What a link does wrong, packet by packet: checked against checksums that are reckoned anew."""

from __future__ import annotations

import socket
import struct

import pytest

from proxyd.wan.errors import WanError
from proxyd.wan.faults import LinkFaults, Tamperer, checksum

SYN, RST, ACK = 0x02, 0x04, 0x10


def tcp_packet(payload: bytes, *, port: int = 1000, seq: int = 7, flags: int = ACK, options: bytes = b"") -> bytes:
    """A valid IPv4 packet with a TCP segment."""
    header = struct.pack("!HHIIBBHHH", port, 80, seq, 9, (20 + len(options)) // 4 << 4, flags, 1000, 0, 0) + options
    segment = bytearray(header + payload)
    addresses = socket.inet_aton("10.77.1.1") + socket.inet_aton("10.77.2.1")
    pseudo = addresses + struct.pack("!BBH", 0, 6, len(segment))
    segment[16:18] = checksum(pseudo + bytes(segment))
    ip = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), 1, 0x4000, 64, 6, 0) + addresses)
    ip[10:12] = checksum(bytes(ip))
    return bytes(ip + segment)


def sums_fit(packet: bytes) -> bool:
    pseudo = packet[12:20] + struct.pack("!BBH", 0, 6, len(packet) - 20)
    return checksum(packet[:20]) == b"\0\0" and checksum(pseudo + packet[20:]) == b"\0\0"


@pytest.mark.parametrize("length", [1, 2, 3, 1460, 8949])
def test_a_flipped_bit_keeps_the_checksum_right_and_the_headers_as_they_were(length: int) -> None:
    packet = tcp_packet(bytes(range(256)) * 35 if length > 256 else b"\xff" * length, options=b"\1" * 12)
    packet = tcp_packet(packet[52 : 52 + length], options=b"\1" * 12)
    assert sums_fit(packet)
    tamperer = Tamperer()
    tamperer.set(LinkFaults(corrupt=0.999999, seed=length))
    for _ in range(50):
        (changed,) = tamperer.deliver(packet, 0)
        assert sums_fit(changed)
        assert changed[:36] == packet[:36]
        assert changed[38:52] == packet[38:52]
        differing = [a ^ b for a, b in zip(changed[52:], packet[52:], strict=True) if a != b]
        assert len(differing) == 1
        assert differing[0].bit_count() == 1
    assert tamperer.corrupted_packets == 50


def test_a_packet_without_tcp_payload_is_left_alone() -> None:
    tamperer = Tamperer()
    tamperer.set(LinkFaults(corrupt=0.999999))
    udp = bytearray(tcp_packet(b"x" * 50))
    udp[9] = 17
    for packet in (tcp_packet(b""), bytes(udp), b"\x45" * 30):
        assert tamperer.deliver(packet, 0) == [packet]
    assert tamperer.corrupted_packets == 0


def test_each_connection_is_reset_once_at_the_number_that_is_expected() -> None:
    tamperer = Tamperer()
    tamperer.reset(True)
    opening = tcp_packet(b"", flags=SYN)
    assert tamperer.deliver(opening, 0) == [opening], "a reset in its place would be no answer to anything"
    (forged,) = tamperer.deliver(tcp_packet(b"data" * 100, seq=12345), 0)
    assert sums_fit(forged)
    assert struct.unpack("!H", forged[2:4])[0] == len(forged) == 40
    assert struct.unpack("!I", forged[24:28])[0] == 12345
    assert forged[33] & RST
    again = tcp_packet(b"data", seq=12749)
    assert tamperer.deliver(again, 0) == [again]
    (other,) = tamperer.deliver(tcp_packet(b"", port=1001), 0)
    assert other[33] & RST
    tamperer.reset(False)
    third = tcp_packet(b"data", port=1002)
    assert tamperer.deliver(third, 0) == [third]
    assert tamperer.reset_packets == 2


def test_what_is_late_comes_behind_its_successors() -> None:
    tamperer = Tamperer()
    tamperer.set(LinkFaults(reorder=0.5, reorder_ns=100, seed=3))
    sent = [tcp_packet(b"x", seq=number) for number in range(40)]
    arrived: list[bytes] = []
    for number, packet in enumerate(sent):
        while (late := tamperer.pop_due(number * 10)) is not None:
            arrived.append(late)
        arrived += tamperer.deliver(packet, number * 10)
    assert tamperer.next_due_ns() is not None
    while (late := tamperer.pop_due(10_000)) is not None:
        arrived.append(late)
    assert tamperer.next_due_ns() is None
    assert sorted(arrived) == sorted(sent)
    assert arrived != sent
    assert 10 < tamperer.reordered_packets < 30


def test_twice_too_large_and_the_same_again_with_the_same_seed() -> None:
    packet = tcp_packet(b"x" * 1000)

    def run() -> list[int]:
        tamperer = Tamperer()
        tamperer.set(LinkFaults(duplicate=0.5, seed=5))
        return [len(tamperer.deliver(packet, 0)) for _ in range(50)]

    assert run() == run()
    assert set(run()) == {1, 2}
    tamperer = Tamperer()
    tamperer.set(LinkFaults(mtu_bytes=1040))
    assert tamperer.fits(1040)
    assert not tamperer.fits(1041)
    assert tamperer.oversized_packets == 1


def test_a_connection_that_was_silent_for_too_long_is_forgotten_and_no_other() -> None:
    tamperer = Tamperer()
    tamperer.set(LinkFaults(forget_ns=100))
    quiet, busy = tcp_packet(b"x"), tcp_packet(b"x", port=1001)
    assert tamperer.knows(quiet, 0), "one that stood before is known"
    assert [tamperer.knows(busy, at) for at in (0, 100, 200)] == [True] * 3
    assert tamperer.knows(quiet, 100)
    assert not tamperer.knows(quiet, 201)
    assert not tamperer.knows(quiet, 202), "trying again soon brings nothing back"
    assert tamperer.knows(busy, 203)
    assert tamperer.knows(tcp_packet(b"", flags=SYN), 204), "a new connection, though its ports are the old one's"
    assert tamperer.knows(quiet, 205)
    udp = bytearray(quiet)
    udp[9] = 17
    assert tamperer.knows(bytes(udp), 900)


WRONG = [{"corrupt": 1.0}, {"duplicate": -0.1}, {"reorder_ns": -1}, {"mtu_bytes": 67}, {"forget_ns": 0}]


@pytest.mark.parametrize("wrong", WRONG)
def test_faults_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(WanError):
        LinkFaults(**wrong)  # type: ignore[arg-type]


def test_faults_travel_as_plain_values() -> None:
    faults = LinkFaults(corrupt=0.1, mtu_bytes=1400)
    assert LinkFaults.from_json(faults.to_json()) == faults
