"""One end of ``bench relay`` and ``bench local``: a process that sends or receives messages through agents, plain TCP
(or TLS) or gloo.

    python -m proxyd.cli.relay_worker KIND ROLE ARGS    (KIND: see KINDS; ROLE: send | recv; ARGS: JSON)

Commands come as JSON lines on stdin, answers leave as JSON lines on stdout; times are CLOCK_MONOTONIC, which all
processes of one machine share::

    -> {"event": "ready", ...}
    {"op": "bulk", "count": N}                    -> {"start_ns", "end_ns", "cpu_s"}
    {"op": "latency", "count": N, "nbytes": B}    -> {"latencies_ns": [...]} from the receiver
    {"op": "round_trips", "count": N, "nbytes": B} -> {"round_trips_ns": [...], "cpu_s"} from the sender
"""

from __future__ import annotations

import json
import os
import resource
import socket
import ssl
import struct
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import proxyd_client

IN_FLIGHT = 3
"""Messages that a sender has under way: enough that the path never waits for an acknowledgement (ARGS: in_flight)."""
POSTED = 2
"""Receives that are posted ahead, as a trainer does that knows what comes next: memory is granted for the next message
while this one lands. A byte stream needs no such thing (ARGS: posted)."""
PING_INTERVAL_S = 0.002
TIMEOUT_S = 120.0
_STAMP = struct.Struct("<q")
Bytes = npt.NDArray[np.uint8]


class End(Protocol):
    """One end of a transport. ``spare``: further buffers that :meth:`recv_many` fills in turn."""

    spare: list[Bytes]

    def send(self, data: Bytes) -> None: ...
    def recv(self, out: Bytes) -> None: ...
    def send_whole(self, data: Bytes) -> None: ...
    def recv_many(self, out: Bytes, count: int) -> None: ...
    def drain(self) -> None: ...
    def received(self, out: Bytes) -> list[Bytes]: ...


class Relay:
    """Through the agents."""

    def __init__(self, args: dict[str, Any], sends: bool) -> None:
        import proxyd_client

        self._me, self._other = (0, 1) if sends else (1, 0)
        self._endpoint = proxyd_client.connect(args.get("job", "bench"), self._me, socket=args["socket"])
        self._handles: deque[proxyd_client.Handle[None]] = deque()
        self._in_flight, self._posted = args.get("in_flight", IN_FLIGHT), args.get("posted", POSTED)
        self.spare = [] if sends else [np.full(args["nbytes"], 1, np.uint8) for _ in range(self._posted - 1)]

    def send(self, data: Bytes) -> None:
        while len(self._handles) >= self._in_flight:
            self._handles.popleft().wait(TIMEOUT_S)
        self._handles.append(self._endpoint.isend(data, dst=self._other))

    def send_whole(self, data: Bytes) -> None:
        self._endpoint.send(data, dst=self._other, timeout_s=TIMEOUT_S)

    def recv(self, out: Bytes) -> None:
        self._endpoint.recv_into(out, src=self._other, timeout_s=TIMEOUT_S)

    def recv_many(self, out: Bytes, count: int) -> None:
        buffers = [out, *self.spare]
        posted = deque(self._endpoint.irecv_into(buffer, src=self._other) for buffer in buffers[:count])
        for number in range(count):
            posted.popleft().wait(TIMEOUT_S)
            if number + self._posted < count:
                posted.append(self._endpoint.irecv_into(buffers[number % self._posted], src=self._other))

    def drain(self) -> None:
        while self._handles:
            self._handles.popleft().wait(TIMEOUT_S)

    def received(self, out: Bytes) -> list[Bytes]:
        """What the last messages left: all buffers are full."""
        return [out, *self.spare]


class Lent(Relay):
    """Through the agents, without a copy at either end: from memory that the agent reads, as views of its memory.

    A trainer would write into its buffers where this only waits until it could: what a kernel of a model writes is no
    copy, wherever it lies.
    """

    def __init__(self, args: dict[str, Any], sends: bool) -> None:
        super().__init__({**args, "job": "lent"}, sends)
        self.spare = []
        self._last: proxyd_client.Message | None = None
        self._buffers: deque[proxyd_client.SendBuffer] = deque()
        for _ in range(self._in_flight if sends else 0):
            self._buffers.append(self._endpoint.send_buffer(args["nbytes"]))
            self._buffers[-1].array[:] = content(args["nbytes"])

    def send(self, data: Bytes) -> None:
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.wait(TIMEOUT_S)
        self._handles.append(self._endpoint.isend(buffer, dst=self._other))
        while self._handles[0].done() and len(self._handles) > 1:
            self._handles.popleft()

    def recv_many(self, out: Bytes, count: int) -> None:
        posted = deque(self._endpoint.irecv(src=self._other) for _ in range(min(count, self._posted)))
        for number in range(count):
            self._last = posted.popleft().wait(TIMEOUT_S)
            if number + self._posted < count:
                posted.append(self._endpoint.irecv(src=self._other))

    def received(self, out: Bytes) -> list[Bytes]:
        return [] if self._last is None else [self._last.array]


class Tcp:
    """One plain blocking connection."""

    spare: list[Bytes] = []

    _sock: socket.socket

    def __init__(self, args: dict[str, Any], sends: bool) -> None:
        if sends:
            self._sock = socket.create_connection(("127.0.0.1", args["port"]))
        else:
            with socket.create_server(("127.0.0.1", 0)) as server:
                say(event="port", port=server.getsockname()[1])
                self._sock, _ = server.accept()
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: Bytes) -> None:
        self._sock.sendall(data.data)

    send_whole = send

    def recv(self, out: Bytes) -> None:
        view = out.data
        got = 0
        while got < len(view):
            size = self._sock.recv_into(view[got:])
            if size == 0:
                raise ConnectionResetError("the sender is gone")
            got += size

    def recv_many(self, out: Bytes, count: int) -> None:
        for _ in range(count):
            self.recv(out)

    def drain(self) -> None:
        pass

    def received(self, out: Bytes) -> list[Bytes]:
        return [out]


class Tls(Tcp):
    """One plain blocking connection under TLS 1.3, both sides with certificates."""

    def __init__(self, args: dict[str, Any], sends: bool) -> None:
        super().__init__(args, sends)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if sends else ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(args["certificate"], args["key"])
        context.load_verify_locations(args["ca"])
        self._sock = context.wrap_socket(self._sock, server_side=not sends)


class Gloo:
    """torch.distributed's TCP transport."""

    spare: list[Bytes] = []

    def __init__(self, args: dict[str, Any], sends: bool) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist = torch, dist
        meet_at = f"file://{args['store']}"
        self._other = 1 if sends else 0
        dist.init_process_group("gloo", init_method=meet_at, rank=0 if sends else 1, world_size=2)

    def send(self, data: Bytes) -> None:
        self._dist.send(self._torch.from_numpy(data), dst=self._other)

    send_whole = send

    def recv(self, out: Bytes) -> None:
        self._dist.recv(self._torch.from_numpy(out), src=self._other)

    def recv_many(self, out: Bytes, count: int) -> None:
        for _ in range(count):
            self.recv(out)

    def drain(self) -> None:
        pass

    def received(self, out: Bytes) -> list[Bytes]:
        return [out]


KINDS: dict[str, type[Relay] | type[Tcp] | type[Gloo]] = {
    "relay": Relay,
    "lent": Lent,
    "tcp": Tcp,
    "tls": Tls,
    "gloo": Gloo,
}


def content(nbytes: int) -> Bytes:
    """What is sent."""
    return np.arange(nbytes, dtype=np.uint8)


def say(**event: Any) -> None:
    """One event, in one write."""
    os.write(1, json.dumps(event).encode() + b"\n")


def cpu_s() -> float:
    """Processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def bulk(end: End, sends: bool, data: Bytes, count: int) -> None:
    """``count`` messages; the receiver's last byte ends the clock."""
    cpu_before_s, start_ns = cpu_s(), time.monotonic_ns()
    if sends:
        for _ in range(count):
            end.send(data)
        end.drain()
    else:
        end.recv_many(data, count)
    say(start_ns=start_ns, end_ns=time.monotonic_ns(), cpu_s=cpu_s() - cpu_before_s)


def latency(end: End, sends: bool, count: int, nbytes: int) -> None:
    """One-way times of single messages, stamped with the sender's clock."""
    data = np.zeros(nbytes, np.uint8)
    latencies_ns = []
    for _ in range(count):
        if sends:
            time.sleep(PING_INTERVAL_S)
            data[: _STAMP.size] = np.frombuffer(_STAMP.pack(time.monotonic_ns()), np.uint8)
            end.send(data)
        else:
            end.recv(data)
            latencies_ns.append(time.monotonic_ns() - _STAMP.unpack_from(data.data)[0])
    end.drain()
    say(latencies_ns=latencies_ns)


def round_trips(end: End, sends: bool, count: int, nbytes: int) -> None:
    """There and back, one after the other; each send ends before anything is received."""
    data, back = np.arange(nbytes, dtype=np.uint8), np.zeros(nbytes, np.uint8)
    times_ns = []
    cpu_before_s = cpu_s()
    for _ in range(count):
        start_ns = time.monotonic_ns()
        if sends:
            end.send_whole(data)
            end.recv(back)
        else:
            end.recv(back)
            end.send_whole(back)
        times_ns.append(time.monotonic_ns() - start_ns)
    if not np.array_equal(data, back):
        raise RuntimeError("what came back is not what was sent")
    say(round_trips_ns=times_ns, cpu_s=cpu_s() - cpu_before_s)


def main() -> int:
    """Obey until stdin ends."""
    kind, role, args = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    sends = role == "send"
    data = content(args["nbytes"]) if sends else np.zeros(args["nbytes"], np.uint8)
    end = KINDS[kind](args, sends)
    say(event="ready")
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "bulk":
            bulk(end, sends, data, command["count"])
        elif command["op"] == "latency":
            latency(end, sends, command["count"], command["nbytes"])
        elif command["op"] == "round_trips":
            round_trips(end, sends, command["count"], command["nbytes"])
        elif command["op"] == "check":
            # The content is what was sent, not merely as much of it.
            buffers, wanted = end.received(data), content(len(data))
            say(right=bool(buffers) and all(bool(np.array_equal(buffer, wanted)) for buffer in buffers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
