"""What the kernel offers for one TCP socket beyond Python's wrappers: pacing, unsent limit, counters.

Buffer sizes are never set: ``SO_SNDBUF`` and ``SO_RCVBUF`` turn the kernel's autotuning off, which on a long path costs
most of its rate. How much can't be revoked is bounded by ``TCP_NOTSENT_LOWAT`` instead.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from proxyd.agent.tls_socket import Connection, TlsSocket, payload_rate, wire_rate
from proxyd.core.errors import ConfigError

SO_MAX_PACING_RATE = 47
UNPACED = (1 << 64) - 1
TCP_USER_TIMEOUT = 18
TCP_INFO_BYTES = 256
TCP_CA_OPEN = 0
MIN_NOTSENT_BYTES = 16 << 10
MAX_NOTSENT_BYTES = 4 << 20
NOTSENT_NS = 8_000_000
"""Unsent bytes are held to what one stream sends in this time: short enough to stop soon, long enough that the event
loop of a busy host refills in time. They delay no hand-over: the predicted end of a slot counts them."""
NOTSENT_YIELDING_NS = 3_000_000
"""The same of what gives way: a tensor that comes now waits for it, and no harm is done where a busy host leaves gaps
in it."""
DEAD_PATH_NS = 7_000_000_000
"""What is sent and not acknowledged for so long ends its connection (five losses of one segment in a row, at least).
A control connection notices a second earlier (:data:`proxyd.agent.channel.SILENCE_NS`)."""
KEEPALIVE_S = 15
"""NATs and firewalls forget idle flows after 30 s (strict ones) to an hour."""
NEARLY_FULL = 0.9
"""A congestion window in use to this part, or the kernel's own pace below this part of ours, limits a stream."""

_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@qq")
TIMESTAMP_SPACE = socket.CMSG_SPACE(_TIMESPEC.size)
_MOST_WAITED_NS = 1_000_000_000
DELAYED_ACK_NS = 40_000_000
"""Linux sends a delayed acknowledgement so much later at the latest, while data flows (TCP_DELACK_MIN)."""

_PROC = Path("/proc/sys/net/ipv4")


class TcpState(NamedTuple):
    """One reading of a stream's counters."""

    unacked_bytes: int
    """Written and not acknowledged, unsent ones included."""
    unsent_bytes: int
    srtt_ns: int
    min_rtt_ns: int
    retransmits: int
    delivery_rate_bytes_per_s: int
    unacked_packets: int
    window_packets: int
    """TCP's congestion window."""
    window_bytes: int
    window_grows: bool
    """In slow start."""
    sacked_bytes: int
    """Acknowledged selectively, behind a hole."""
    lost_bytes: int
    """Taken for lost and not sent again yet."""
    pacing_bytes_per_s: int
    """What TCP's own pacing allows, our ceiling included."""
    recovers: bool
    """From a loss, or from what may be one."""

    def acknowledged_in_pairs_ns(self, pace_bytes_per_s: int) -> int:
        """What of ``srtt_ns`` is no queue: a receiver acknowledges every second packet (RFC 1122, 4.2.3.2), so the
        first of two waits for the second, which leaves so much later as the pace says, or for the kernel's timer.

        :param pace_bytes_per_s: our ceiling; 0: none.
        """
        rate = min((one for one in (pace_bytes_per_s, self.pacing_bytes_per_s) if one > 0), default=0)
        if not rate or not self.window_packets:
            return 0
        return min(self.window_bytes // self.window_packets * 1_000_000_000 // rate, DELAYED_ACK_NS)

    def path_limited(self, pace_bytes_per_s: int) -> bool:
        """TCP holds bytes back, rather than our ceiling (0: none) or a lack of data."""
        if self.unsent_bytes <= 0:
            return False
        full = self.unacked_packets >= NEARLY_FULL * self.window_packets
        return full or self.pacing_bytes_per_s < NEARLY_FULL * pace_bytes_per_s


# Of struct tcp_info: state of the congestion control at 1; segment size at 16; packets unacknowledged, sacked, lost and
# sent again at 24 to 36; smoothed RTT at 68, slow start threshold at 76, congestion window at 80, total retransmits at
# 100, pacing rate at 104, bytes not sent at 144, minimum RTT at 148, delivery rate at 160. Unpacked in one go: this is
# read for every stream up to 200 times a second.
_INFO = struct.Struct("=xB14xI4xIIII28xI4xII16xIQ32xII8xQ")
_queued = array.array("i", [0])
_NO_SAMPLE_US = 0xFFFF_FFFF


def read_tcp_state(sock: Connection) -> TcpState:
    """Two system calls. Raises OSError when the socket is gone. Under TLS bytes and rates are payload, records taken
    off; windows and losses stay what the kernel says."""
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, _queued)
    unacked_bytes = _queued[0]
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    if len(info) < _INFO.size:
        raise OSError(f"TCP_INFO has {len(info)} bytes; {_INFO.size} are needed (Linux 4.9 or later)")
    (
        state,
        segment_bytes,
        in_flight,
        sacked,
        lost,
        again,
        srtt_us,
        threshold,
        window,
        retransmits,
        pacing,
        unsent_bytes,
        min_rtt_us,
        delivery_rate,
    ) = _INFO.unpack_from(info)
    unsent_bytes = min(unacked_bytes, unsent_bytes)
    if isinstance(sock, TlsSocket):
        unacked_bytes, unsent_bytes = sock.plain_bytes_behind(unacked_bytes, unsent_bytes)
        delivery_rate = payload_rate(sock, delivery_rate)
    return TcpState(
        unacked_bytes,
        unsent_bytes,
        srtt_us * 1000,
        0 if min_rtt_us == _NO_SAMPLE_US else min_rtt_us * 1000,
        retransmits,
        delivery_rate,
        in_flight,
        window,
        window * segment_bytes,
        window < threshold,
        sacked * segment_bytes,
        max(0, lost - again) * segment_bytes,
        pacing,
        state != TCP_CA_OPEN,
    )


class PathSizes(NamedTuple):
    """Packet sizes of a connection, as TCP knows them now."""

    path_mtu: int
    """Largest packet on the way, headers included."""
    segment_bytes: int
    """Payload of one packet that we send."""


_SIZES = struct.Struct("=16xI40xI")  # segment size at 16, path MTU at 60


def read_path_sizes(sock: Connection) -> PathSizes:
    """One system call. Raises OSError when the socket is gone."""
    segment_bytes, path_mtu = _SIZES.unpack_from(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))
    return PathSizes(path_mtu, segment_bytes)


def set_pace(sock: Connection, rate_bytes_per_s: int, *, yields: bool = False) -> None:
    """Hold one stream to ``rate_bytes_per_s`` of payload (0: no ceiling), and its unsent bytes to 8 ms of that, or 3 ms
    where they give way."""
    rate = wire_rate(sock, rate_bytes_per_s) or UNPACED
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=Q", rate))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, notsent_limit_bytes(rate_bytes_per_s, yields=yields))


def lift_pace(sock: Connection) -> None:
    """No ceiling for what TCP reckons as its own pace; how much may wait unsent stays."""
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=Q", UNPACED))


def reopen_window(sock: Connection) -> bool:
    """Let slow start go on, from the present window. Answers whether that could be done.

    Nothing in the socket interface says so. But bbr forgets where slow start was to end when it takes a connection over
    (Linux, ``bbr_init``), and the algorithm before it takes it back with that. Not to be done in a recovery.
    """
    before = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    if before == b"bbr":
        return False
    try:
        for name in (b"bbr", before):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    except OSError:
        # One of them isn't for us (net.ipv4.tcp_allowed_congestion_control). Should it be the way back, the stream goes
        # on under bbr.
        return False
    return True


def notsent_limit_bytes(rate_bytes_per_s: int, *, yields: bool = False) -> int:
    """TCP_NOTSENT_LOWAT for a stream of that pace; 0: unpaced."""
    if rate_bytes_per_s == 0:
        return MAX_NOTSENT_BYTES
    unsent_bytes = rate_bytes_per_s * (NOTSENT_YIELDING_NS if yields else NOTSENT_NS) // 1_000_000_000
    return min(MAX_NOTSENT_BYTES, max(MIN_NOTSENT_BYTES, unsent_bytes))


def prepare(sock: socket.socket, *, peer_timeout_ns: int, congestion_control: str = "") -> None:
    """Options of every connection between agents. A dead path ends the connection within seconds, an idle one too:
    what was under way is resumed over the next one."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    timeout_ms = max(1000, min(DEAD_PATH_NS, peer_timeout_ns) // 1_000_000)
    sock.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, timeout_ms)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Only for idle data connections, to keep middle boxes awake: there are many, and the control connection notices a
    # dead path long before.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if congestion_control:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
        except OSError as error:
            raise ConfigError(
                f"the kernel refuses congestion control {congestion_control!r}",
                why=error.strerror or str(error),
                next_step=f'Load it (modprobe tcp_{congestion_control}), or set congestion_control = "auto"',
            ) from error


def read_sysctl(name: str, default: str = "") -> str:
    """A value below net.ipv4; ``default`` where this kernel or namespace doesn't show it."""
    try:
        return (_PROC / name).read_text().strip()
    except OSError:
        return default


def stream_capacity_bytes() -> int:
    """What one stream can have in flight at most: the autotuning limit of its send buffer.

    Half of it: the kernel counts its own bookkeeping into the buffer (2.8 MB in flight filled one of 4 MiB), and unsent
    bytes need room as well. With too few streams the first round trip of every slot ends in a pause of some ms: the
    buffer is full and nothing is acknowledged yet.
    """
    fields = read_sysctl("tcp_wmem", "4096 16384 4194304").split()
    return max(64 << 10, int(fields[-1]) // 2)


def choose_congestion_control(configured: str, slow_start_after_idle: str, available: str) -> str:
    """The algorithm under the grants; "auto" decides by what silence does to the window.

    Under grants every stream is idle most of the time. With slow start after idle on, cubic falls back to ten
    segments each time and slots turn into slow starts; bbr keeps its model. With it off, cubic keeps its window and
    shares better.
    """
    if configured != "auto":
        return configured
    names = available.split()
    if slow_start_after_idle.strip() == "0":
        return "cubic" if "cubic" in names else ""
    return "bbr" if "bbr" in names else ("cubic" if "cubic" in names else "")


def slow_start_after_idle() -> bool:
    """Whether this network namespace's kernel shrinks a connection's window after one RTO of silence (RFC 2861)."""
    return read_sysctl("tcp_slow_start_after_idle", "1") != "0"


def keeps_windows(configured: str) -> bool:
    """Whether a connection that was warmed up stays so over a pause: only bbr does where the kernel takes windows back
    (measured: after a second of silence cubic was back at its start, bbr was not)."""
    return not slow_start_after_idle() or congestion_control_here(configured) == "bbr"


def congestion_control_here(configured: str) -> str:
    """:func:`choose_congestion_control` for this network namespace; "" leaves the kernel's default."""
    return choose_congestion_control(
        configured,
        read_sysctl("tcp_slow_start_after_idle", "1"),
        read_sysctl("tcp_available_congestion_control", "cubic reno"),
    )


def note_arrivals(sock: Connection) -> None:
    """Have the kernel note when what is received arrived; see :func:`waited_ns`."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def waited_ns(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    """How long what ``recvmsg`` has just returned (the last of it) had waited in the kernel for this process: on a busy
    host that is some milliseconds. 0 when the kernel doesn't tell.

    The kernel's note is of the wall clock, so only its age is used: that the clock is set within it is rare.
    """
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS) and len(data) == _TIMESPEC.size:
            seconds, nanos = _TIMESPEC.unpack(data)
            age_ns = time.time_ns() - (seconds * 1_000_000_000 + nanos)
            return age_ns if 0 < age_ns < _MOST_WAITED_NS else 0
    return 0
