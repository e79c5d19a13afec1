"""A TCP proxy that breaks connections on purpose, for faults on loopback that need no emulated WAN.

    with FlakyProxy() as proxy:
        proxy.target = ("127.0.0.1", 7601)
        ...                                     # something dials proxy.address
        proxy.stall("down")                     # a blackhole: connections stay, nothing comes through
        proxy.heal()
        proxy.flip(10_000, "up")                # one bit of the 10,000th byte from now on
        proxy.reset()                           # every connection ends with a reset; new ones work
        proxy.cut()                             # they end in order, and new ones are refused until heal()
        proxy.slow(3, 100_000)                  # the fourth connection of those that stand carries so much a second

"up" is from who dials to the target, "down" the other way.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from typing import Literal

Way = Literal["up", "down"]
Ways = Literal["both", "up", "down"]
PIECE_BYTES = 256 << 10
TURN_S = 0.005
"""A slow connection is served so often."""
SLOW_BUFFER_BYTES = 16 << 10
"""What the kernel keeps of a slow connection on our side: the rest has to wait where it comes from."""
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER 0: close() sends RST


class _Flow:
    """One way of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        self.source, self.sink, self.way = source, sink, way
        self.held = b""
        """Read, and not yet written."""
        self.ended = False
        """The source has sent its end."""


class _Pair:
    """A connection that was accepted and the one that was made for it."""

    def __init__(self, dialler: socket.socket, server: socket.socket) -> None:
        self.sockets = (dialler, server)
        self.flows = (_Flow(dialler, server, "up"), _Flow(server, dialler, "down"))
        self.bytes_per_s = 0
        """What it carries up; 0: as much as comes."""
        self.credit_bytes = 0.0
        self.credited_s = 0.0

    def may_read_bytes(self, flow: _Flow) -> int:
        """At most so much now."""
        return int(self.credit_bytes) if self.bytes_per_s and flow.way == "up" else PIECE_BYTES

    def gain(self, now_s: float) -> None:
        """Time has passed for a slow one. It saves up no more than two turns' worth."""
        gained = (now_s - self.credited_s) * self.bytes_per_s
        self.credit_bytes = min(self.credit_bytes + gained, 2 * TURN_S * self.bytes_per_s)
        self.credited_s = now_s


class FlakyProxy:
    """See the module's text. One thread; what is asked for has happened when a call returns."""

    def __init__(self, target: tuple[str, int] | None = None) -> None:
        self.target = target
        self.accepted = 0
        self.flipped = 0
        """Bits that :meth:`flip` has flipped so far."""
        self.passed = {"up": 0, "down": 0}
        self._lock = threading.Lock()
        self._stalled: set[Way] = set()
        self._flips: dict[Way, list[int]] = {"up": [], "down": []}
        self._pairs: list[_Pair] = []
        self._slow: list[_Pair] = []
        self._closed = self._cut = False
        # A change by another thread acts on an epoll that is being waited for: nobody needs to be woken.
        self._selector = selectors.EpollSelector()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="flaky-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> FlakyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """What to dial."""
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many there are now."""
        with self._lock:
            return len(self._pairs)

    def stall(self, ways: Ways = "both") -> None:
        """Let nothing through this way any more; connections stay, and new ones are accepted."""
        with self._lock:
            self._stalled |= {"up", "down"} if ways == "both" else {ways}
            self._watch_all()

    def cut(self) -> None:
        """End all connections and refuse new ones."""
        with self._lock:
            self._cut = True
            self._end_all()

    def reset(self) -> None:
        """End all connections with a reset on both sides; new ones work."""
        with self._lock:
            self._end_all(reset=True)

    def slow(self, number: int, bytes_per_s: int) -> None:
        """Let one connection, by its place among those that stand in the order in which they were accepted, carry no
        more than this up."""
        with self._lock:
            pair = self._pairs[number]
            pair.bytes_per_s, pair.credited_s = bytes_per_s, time.monotonic()
            pair.credit_bytes = TURN_S * bytes_per_s  # something to wake up for
            pair.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
            self._slow = [one for one in self._pairs if one.bytes_per_s]
            self._watch(pair)

    def flip(self, after_bytes: int, way: Way) -> None:
        """Flip a bit of the byte that comes ``after_bytes`` after what has passed this way, over all connections."""
        with self._lock:
            self._flips[way] = sorted([*self._flips[way], self.passed[way] + after_bytes])

    def heal(self) -> None:
        """End stalls and cuts, slow ones are slow no more; what was held goes on."""
        with self._lock:
            self._cut = False
            for pair in self._slow:
                pair.bytes_per_s = 0
            self._slow = []
            self._stalled.clear()
            self._watch_all()

    def close(self) -> None:
        """End everything."""
        with self._lock:
            self._closed = True
            self._end_all()
        # One more connection wakes the thread.
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        self._thread.join(5)
        self._listener.close()
        self._selector.close()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _end_all(self, reset: bool = False) -> None:
        for pair in self._pairs:
            self._end(pair, reset)
        self._pairs.clear()

    def _end(self, pair: _Pair, reset: bool = False) -> None:
        for sock in pair.sockets:
            self._listen_to(sock, 0, pair)
            if reset:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            sock.close()

    def _watch_all(self) -> None:
        for pair in self._pairs:
            self._watch(pair)

    def _watch(self, pair: _Pair) -> None:
        """Wait for what each of the two sockets can do next; a stalled one isn't even asked whether it has ended."""
        for sock in pair.sockets:
            events = 0
            for flow in pair.flows:
                if flow.way not in self._stalled:
                    if flow.source is sock and not flow.held and not flow.ended and pair.may_read_bytes(flow):
                        events |= selectors.EVENT_READ
                    if flow.sink is sock and flow.held:
                        events |= selectors.EVENT_WRITE
            self._listen_to(sock, events, pair)

    def _listen_to(self, sock: socket.socket, events: int, pair: _Pair) -> None:
        known = sock in self._selector.get_map()
        if events and known:
            self._selector.modify(sock, events, pair)
        elif events:
            self._selector.register(sock, events, pair)
        elif known:
            self._selector.unregister(sock)

    def _pass(self, pair: _Pair, flow: _Flow) -> None:
        """Carry what there is. Raises OSError when the connection has ended."""
        if flow.way in self._stalled:
            return
        try:
            most = pair.may_read_bytes(flow)
            if not flow.held and not flow.ended and most:
                flow.held = self._tampered(flow.source.recv(most), flow.way)
                pair.credit_bytes -= len(flow.held) if pair.bytes_per_s and flow.way == "up" else 0
                if not flow.held:
                    flow.ended = True
                    flow.sink.shutdown(socket.SHUT_WR)
            if flow.held:
                flow.held = flow.held[flow.sink.send(flow.held) :]
        except BlockingIOError:
            return

    def _tampered(self, data: bytes, way: Way) -> bytes:
        first, flips = self.passed[way], self._flips[way]
        self.passed[way] += len(data)
        while flips and flips[0] < self.passed[way]:
            changed = bytearray(data)
            changed[flips.pop(0) - first] ^= 0x10
            data = bytes(changed)
            self.flipped += 1
        return data

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            ready = self._selector.select(TURN_S if self._slow else None)
            with self._lock:
                for pair in self._slow:
                    if pair in self._pairs:
                        pair.gain(time.monotonic())
                        self._watch(pair)
            for key, _ in ready:
                with self._lock:
                    if key.data is None:
                        self._accept()
                    elif key.data in self._pairs:
                        self._serve(key.data)

    def _serve(self, pair: _Pair) -> None:
        try:
            for flow in pair.flows:
                self._pass(pair, flow)
        except OSError:
            # One side was reset: so is the other.
            self._pairs.remove(pair)
            self._end(pair, reset=True)
            return
        if all(flow.ended and not flow.held for flow in pair.flows):
            self._pairs.remove(pair)
            self._end(pair)
        else:
            self._watch(pair)

    def _accept(self) -> None:
        try:
            dialler, _ = self._listener.accept()
        except OSError:
            return
        try:
            if self._closed or self._cut or self.target is None:
                raise ConnectionRefusedError
            server = socket.create_connection(self.target, 5)
        except OSError:
            dialler.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            dialler.close()
            return
        self.accepted += 1
        for sock in (dialler, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = _Pair(dialler, server)
        self._pairs.append(pair)
        self._watch(pair)
