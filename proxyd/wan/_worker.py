"""A plain sender or receiver on one host. Run by path (``python -I -S``): it imports nothing of proxyd.

Commands come as JSON lines on stdin, events leave as JSON lines on stdout; times are CLOCK_MONOTONIC, which all
processes of one machine share. A message on the wire is a 16-byte header (sender u32, sequence u32, length u64), zeros.

    receive PORT       events  {"event": "listening"}
                               {"event": "received", "sender", "sequence", "bytes", "first_ns", "last_ns"}
    pong PORT          events  {"event": "listening"}
                               {"event": "delays", "delays_ns"} when a ping has said that it is done
    ping ADDRESS PORT COUNT BYTES GAP_NS
                       datagrams that carry the clock, one every GAP_NS -> {"event": "pinged"}
    sink PORT              datagrams to there vanish; events {"event": "listening"}
    flood ADDRESS PORT BYTES_PER_S PACKET_BYTES
                           a steady stream of datagrams until killed; {"event": "flooding"} at first
    send ID            {"op": "connect", "address", "port", "congestion", "notsent_lowat_bytes"}
                           -> {"event": "connected"}
                       {"op": "send", "sequence", "bytes", "at_ns", "pace_bytes_per_s", "leaving_bytes"}
                           -> {"event": "leaving"} once at most leaving_bytes have not left this host (if not null)
                           -> {"event": "sent", "sequence", "start_ns", "end_ns"}
                       {"op": "info"} -> {"event": "info", "retransmits", "cwnd_packets", "congestion"}
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import socket
import struct
import sys
import termios
import time
from typing import Any

HEADER = struct.Struct("<IIQ")
SO_MAX_PACING_RATE = 47
TCP_NOTSENT_LOWAT = 25
SIOCOUTQNSD = 0x894B
UNLIMITED = (1 << 64) - 1
CHUNK_BYTES = 64 << 10
POLL_S = 0.0002


def say(**event: Any) -> None:
    """One event; in one write, so that events never interleave."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class Receiver:
    """Counts the messages of one connection."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.header = bytearray()
        self.left = 0
        self.sender = self.sequence = self.length = 0
        self.first_ns = 0

    def on_readable(self, buffer: memoryview) -> bool:
        """Take what is there; False once the sender has closed."""
        while True:
            # Never beyond one message, so that its last byte has a time of its own.
            wanted = self.left or HEADER.size - len(self.header)
            try:
                count = self.peer.recv_into(buffer[: min(wanted, len(buffer))])
            except BlockingIOError:
                return True
            now_ns = time.monotonic_ns()
            if count == 0:
                return False
            if self.left:
                self.left -= count
                if self.left == 0:
                    self.finish(now_ns)
                continue
            if not self.header:
                self.first_ns = now_ns
            self.header += buffer[:count]
            if len(self.header) == HEADER.size:
                self.sender, self.sequence, self.length = HEADER.unpack(self.header)
                self.header.clear()
                self.left = self.length
                if self.left == 0:
                    self.finish(now_ns)

    def finish(self, now_ns: int) -> None:
        """The last byte of a message has arrived."""
        say(
            event="received",
            sender=self.sender,
            sequence=self.sequence,
            bytes=self.length,
            first_ns=self.first_ns,
            last_ns=now_ns,
        )


def receive(port: int) -> None:
    """Serve until killed."""
    server = socket.create_server(("0.0.0.0", port), backlog=512)
    server.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(server, selectors.EVENT_READ)
    buffer = memoryview(bytearray(1 << 20))
    say(event="listening")
    while True:
        for key, _ in selector.select():
            if key.data is None:
                peer, _ = server.accept()
                peer.setblocking(False)
                selector.register(peer, selectors.EVENT_READ, Receiver(peer))
            elif not key.data.on_readable(buffer):
                selector.unregister(key.fileobj)
                key.data.peer.close()


def ahead_of_others() -> None:
    """Real-time priority if we may: what is measured is the WAN, not this machine's other work."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(40))
    except PermissionError:
        pass  # measures the same, later at the 99th percentile


def pong(port: int) -> None:
    """One-way delays of datagrams; an empty time stamp ends a series."""
    peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    peer.bind(("0.0.0.0", port))
    ahead_of_others()
    say(event="listening")
    delays: list[int] = []
    while True:
        data = peer.recv(65536)
        now_ns = time.monotonic_ns()
        sent_ns = int.from_bytes(data[:8], "little")
        if sent_ns:
            delays.append(now_ns - sent_ns)
        elif delays:
            say(event="delays", delays_ns=delays)
            delays = []


def ping(address: str, port: int, count: int, size: int, gap_ns: int) -> None:
    """A series of datagrams at a steady rate."""
    peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    padding = bytes(size - 8)
    ahead_of_others()
    due_ns = time.monotonic_ns()
    for _ in range(count):
        peer.sendto(time.monotonic_ns().to_bytes(8, "little") + padding, (address, port))
        due_ns += gap_ns
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
    # Several, in case the link loses packets; the receiver takes the first.
    for _ in range(10):
        time.sleep(0.05)
        peer.sendto(bytes(8), (address, port))
    say(event="pinged")


def sink(port: int) -> None:
    """Take datagrams in and never look at them: without a listener each would be answered with an ICMP error."""
    peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    peer.bind(("0.0.0.0", port))
    say(event="listening")
    sys.stdin.read()


def flood(address: str, port: int, rate_bytes_per_s: int, packet_bytes: int) -> None:
    """Datagrams whose IP packets have this rate; somebody's stream that no congestion slows down."""
    peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    padding = bytes(packet_bytes - 28)  # IPv4 and UDP headers
    ahead_of_others()
    say(event="flooding")
    start_ns = time.monotonic_ns()
    sent = 0
    while True:
        # A late wake-up catches up, but by at most 20 ms: what this host was not awake for was not sent.
        due = (time.monotonic_ns() - start_ns) * rate_bytes_per_s // 1_000_000_000
        if due - sent > rate_bytes_per_s // 50:
            sent = due - rate_bytes_per_s // 50
        while sent < due:
            peer.sendto(padding, (address, port))
            sent += packet_bytes
        time.sleep(max(0.0, (sent - due) / rate_bytes_per_s))


def outgoing_bytes(peer: socket.socket, request: int) -> int:
    """SIOCOUTQNSD: not yet sent; TIOCOUTQ: not yet acknowledged."""
    result = fcntl.ioctl(peer.fileno(), request, struct.pack("i", 0))
    return int(struct.unpack("i", result)[0])


def send_message(peer: socket.socket, sender: int, command: dict[str, Any], zeros: memoryview) -> None:
    """One message at its time, and what the command wants to know about its leaving."""
    pace = command.get("pace_bytes_per_s") or UNLIMITED
    peer.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace.to_bytes(8, "little"))
    wait_ns = command["at_ns"] - time.monotonic_ns()
    if wait_ns > 0:
        time.sleep(wait_ns / 1e9)
    start_ns = time.monotonic_ns()
    peer.sendall(HEADER.pack(sender, command["sequence"], command["bytes"]))
    leaving_bytes: int | None = command.get("leaving_bytes")
    left = command["bytes"]
    # Small writes only where somebody waits to be told: they cost CPU.
    step = len(zeros) if leaving_bytes is None else CHUNK_BYTES
    while left:
        left -= peer.send(zeros[: min(left, step)])
        if leaving_bytes is not None and left + outgoing_bytes(peer, SIOCOUTQNSD) <= leaving_bytes:
            say(event="leaving", sequence=command["sequence"])
            leaving_bytes = None
    while leaving_bytes is not None:
        if outgoing_bytes(peer, SIOCOUTQNSD) <= leaving_bytes:
            say(event="leaving", sequence=command["sequence"])
            leaving_bytes = None
        else:
            time.sleep(POLL_S)
    say(event="sent", sequence=command["sequence"], start_ns=start_ns, end_ns=time.monotonic_ns())


def send(sender: int) -> None:
    """Obey until stdin ends."""
    zeros = memoryview(bytes(1 << 20))
    peer = socket.socket()
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "connect":
            # Always by name: a host's default may be anything, and in a namespace the sysctl may refuse to change.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, command["congestion"].encode())
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if command.get("notsent_lowat_bytes"):
                peer.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, command["notsent_lowat_bytes"])
            peer.connect((command["address"], command["port"]))
            say(event="connected")
        elif command["op"] == "send":
            send_message(peer, sender, command, zeros)
        elif command["op"] == "info":
            info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            # struct tcp_info: 8 bytes of flags, then u32 fields; cwnd is the 19th, total_retrans the 24th.
            words = struct.unpack_from("<24I", info, 8)
            name = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
            unacked = outgoing_bytes(peer, termios.TIOCOUTQ)
            say(event="info", retransmits=words[23], cwnd_packets=words[18], unacked_bytes=unacked, congestion=name)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    elif sys.argv[1] == "send":
        send(int(sys.argv[2]))
    elif sys.argv[1] == "pong":
        pong(int(sys.argv[2]))
    elif sys.argv[1] == "sink":
        sink(int(sys.argv[2]))
    elif sys.argv[1] == "flood":
        flood(sys.argv[2], *(int(text) for text in sys.argv[3:]))
    else:
        ping(sys.argv[2], *(int(text) for text in sys.argv[3:]))
