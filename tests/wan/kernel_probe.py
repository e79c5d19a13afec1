"""One TCP connection, paced as an agent paces its streams: what the kernel makes of ceilings. Run on hosts of a WAN."""

from __future__ import annotations

import json
import socket
import sys
import time

from proxyd.agent import tcp

FAST = 40_000_000
LOW = 10_000_000


def receive(port: int) -> None:
    """Read whatever comes, until the sender is through."""
    with socket.create_server(("", port)) as server:
        print("listening", flush=True)
        peer, _ = server.accept()
        buffer = bytearray(1 << 20)
        while peer.recv_into(buffer):
            pass


class Sender:
    """Writes zeros as fast as the kernel takes them."""

    def __init__(self, address: str, port: int) -> None:
        self.sock = socket.create_connection((address, port))
        tcp.prepare(self.sock, peer_timeout_ns=10_000_000_000, congestion_control="cubic")
        self.sock.setblocking(False)
        self.zeros = bytes(1 << 20)
        self.written = 0

    def write(self, seconds: float, most_bytes: int = 1 << 40) -> None:
        """At most so much within that time."""
        end_s, left = time.monotonic() + seconds, most_bytes
        while time.monotonic() < end_s:
            try:
                sent = self.sock.send(self.zeros[: min(left, len(self.zeros))]) if left else 0
                left -= sent
                self.written += sent
            except BlockingIOError:
                pass
            time.sleep(0.002)

    @property
    def left_bytes(self) -> int:
        """Sent at least once."""
        return self.written - tcp.read_tcp_state(self.sock).unsent_bytes


def narrow_window(sender: Sender, reopen: bool) -> dict[str, object]:
    """Losses leave a small window; they cease when this says so, and two round trips later the ceiling is high."""
    tcp.set_pace(sender.sock, LOW)
    sender.write(1.5)
    print("lossy", flush=True)
    sys.stdin.readline()
    sender.write(0.3)
    while tcp.read_tcp_state(sender.sock).recovers:
        time.sleep(0.001)
    before = tcp.read_tcp_state(sender.sock)
    reopened = tcp.reopen_window(sender.sock) if reopen else False
    after = tcp.read_tcp_state(sender.sock)
    tcp.set_pace(sender.sock, FAST)
    sender.write(1.0)
    state = tcp.read_tcp_state(sender.sock)
    name = sender.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return {
        "slow_start_was_over": not before.window_grows,
        "reopened": reopened,
        "slow_start_goes_on": after.window_grows,
        "window_bytes": state.window_bytes,
        "congestion_control": name.rstrip(b"\0").decode(),
    }


def raised_after_silence(sender: Sender, lift: bool) -> dict[str, object]:
    """A wide window, a low ceiling for the last bytes, silence; then a high one, for 2 MB."""
    tcp.set_pace(sender.sock, FAST)
    sender.write(1.0)
    tcp.set_pace(sender.sock, 0)
    time.sleep(0.5)
    tcp.set_pace(sender.sock, 2_000_000)
    sender.write(0.01, 50_000)
    while tcp.read_tcp_state(sender.sock).unsent_bytes:
        time.sleep(0.001)
    if lift:
        tcp.lift_pace(sender.sock)
    time.sleep(0.3)
    before = sender.left_bytes
    tcp.set_pace(sender.sock, FAST)
    sender.write(0.045)
    return {"left_bytes": sender.left_bytes - before}


def raised_in_time(sender: Sender, lowest: int) -> dict[str, object]:
    """A very low ceiling for a moment, then a high one."""
    tcp.set_pace(sender.sock, FAST)
    sender.write(1.0)
    tcp.set_pace(sender.sock, 0)
    time.sleep(0.5)
    tcp.set_pace(sender.sock, lowest)
    sender.write(0.02, 100_000)
    tcp.set_pace(sender.sock, FAST)
    begun_s = time.monotonic()
    while tcp.read_tcp_state(sender.sock).unsent_bytes and time.monotonic() < begun_s + 4:
        time.sleep(0.001)
    return {"seconds": time.monotonic() - begun_s}


def main() -> None:
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
        return
    sender = Sender(sys.argv[3], int(sys.argv[2]))
    what, value = sys.argv[4], int(sys.argv[5])
    if what == "narrow_window":
        result = narrow_window(sender, bool(value))
    elif what == "raised_after_silence":
        result = raised_after_silence(sender, bool(value))
    else:
        result = raised_in_time(sender, value)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
