"""A control connection between two agents, after its handshake: small frames both ways, never behind bulk data.

Each side pings when it has heard nothing for a second, and ends the connection after six: its user dials again and goes
on where it was, so that costs little, and a path that swallows everything without a word (a firewall, a NAT that forgot
the flow, a cable) is noticed whether anything is under way or not. A ping a second also keeps every middle box awake. A
stopped process, whose kernel goes on acknowledging, is silent as well; it counts as lost only when it stays so
(``peer_timeout``). A machine that slept itself asks before it judges. While data is under way its user has it ping more
often (:meth:`ControlChannel.probe`), to tell the delays of the two directions apart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from proxyd.agent import tcp
from proxyd.agent.tls_socket import Connection, held_bytes
from proxyd.core.oneway import OneWayDelays
from proxyd.wire import peer as wire
from proxyd.wire.codec import DamagedFrame, WireError
from proxyd.wire.envelope import TransferId

READ_BYTES = 256 << 10
PROBE_NS = 10_000_000
"""Pings for the delays are at least so far apart: each costs some 50 microseconds of either host in all ..."""
PROBE_BYTES = 125
PROBE_OF_PACE = 200
"""... and so many bytes of either direction, of which they take no more than this part."""
PING_BYTES = wire.HEADER_BYTES + 8
"""A Ping as it travels, and a Pong at least."""
SILENCE_NS = 6_000_000_000
"""Silence that ends a connection: three retransmissions of a ping on a path of 300 ms that loses packets, and a process
that isn't scheduled for seconds, stay below."""
CHECKS = 6
"""How often within that time the silence is looked at, and a ping sent."""
MAX_UNSENT_BYTES = 16 << 20
"""What may wait for a peer that doesn't read. Control frames are some hundred bytes for each message under way, so this
is far beyond any working peer."""


class ControlChannel:
    """Frames in order, both ways. ``closed(reason)`` is called once, when the connection ends by itself.

    :param received: told of each frame but pings.
    :param timeout_ns: of the peer; the connection ends after that much silence, and no more than SILENCE_NS.
    """

    def __init__(
        self,
        sock: Connection,
        received: Callable[[TransferId, wire.Frame], None],
        closed: Callable[[str], None],
        *,
        timeout_ns: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._received = received
        self._closed_callback = closed
        self._decoder = wire.ControlDecoder()
        self._out = bytearray()
        self._flush_due = False
        self._writing = False
        self._open = True
        self._timeout_ns = min(SILENCE_NS, timeout_ns)
        self._heard_ns = self._checked_ns = time.monotonic_ns()
        self._pinged_ns = 0
        self.damaged = False
        """It ended because a frame failed its checksum."""
        self._asked: dict[int, asyncio.Future[int]] = {}
        """Pings that somebody waits for, by when they left."""
        self.delays = OneWayDelays()
        """Of this connection's pings."""
        tcp.note_arrivals(sock)
        self._loop.add_reader(sock, self._on_readable)
        if held_bytes(sock):
            self._loop.call_soon(self._on_readable)  # the kernel doesn't know of it
        self._check = self._loop.call_later(self._timeout_ns / CHECKS / 1e9, self._check_silence)

    @property
    def silent_ns(self) -> int:
        """How long nothing has been heard."""
        return time.monotonic_ns() - self._heard_ns

    def _check_silence(self) -> None:
        now_ns = time.monotonic_ns()
        interval_ns = self._timeout_ns // CHECKS
        if now_ns - self._checked_ns > self._timeout_ns // 2:
            self._heard_ns = now_ns  # it was this process that stood still
        self._checked_ns = now_ns
        silent_ns = now_ns - self._heard_ns
        if silent_ns > self._timeout_ns:
            self._fail(f"it has been silent for {silent_ns / 1e9:.1f} s")
            return
        if silent_ns > interval_ns // 2:
            self._ping(now_ns)
        self._check = self._loop.call_later(interval_ns / 1e9, self._check_silence)

    def probe(self, pace_bytes_per_s: int) -> None:
        """Measure the delays of both directions, unless that was done just now.

        :param pace_bytes_per_s: of the data beside it; 0: without limit.
        """
        now_ns = time.monotonic_ns()
        interval_ns = PROBE_NS
        if pace_bytes_per_s:
            interval_ns = max(interval_ns, PROBE_BYTES * PROBE_OF_PACE * 1_000_000_000 // pace_bytes_per_s)
        if now_ns - self._pinged_ns >= interval_ns and not self._out:
            self._ping(now_ns)
            self.flush()  # it says when it leaves

    def _ping(self, now_ns: int) -> None:
        self._pinged_ns = now_ns
        self.send(wire.Ping(now_ns))

    def ask(self, nbytes: int = 0) -> asyncio.Future[int]:
        """A ping now; the round trip of its answer in nanoseconds. Cancelled when the connection ends before.

        :param nbytes: so many bytes of pings at once, which TCP puts into as large packets as it believes the path to
            carry; the answers do the same on the way back. The round trip is the last one's.
        """
        now_ns = time.monotonic_ns()
        count = max(1, -(-nbytes // PING_BYTES))
        for number in range(count):
            self.send(wire.Ping(now_ns + number))
        answer: asyncio.Future[int] = self._loop.create_future()
        last_ns = now_ns + count - 1
        self._asked[last_ns] = answer
        answer.add_done_callback(lambda _: self._asked.pop(last_ns, None))
        self.flush()
        return answer

    def path_sizes(self) -> tcp.PathSizes:
        """Of this connection. Raises OSError when it is gone."""
        return tcp.read_path_sizes(self._sock)

    def send(self, frame: wire.Frame, transfer: TransferId = wire.NO_TRANSFER) -> None:
        """Queue a frame; those of one tick of the loop leave together."""
        if not self._open:
            return
        self._out += wire.encode(frame, transfer)
        if len(self._out) > MAX_UNSENT_BYTES:
            self._fail(f"it has not read its last {len(self._out)} bytes of control frames")
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what is queued, as far as the socket takes it."""
        self._flush_due = False
        if not self._open:
            return
        try:
            while self._out:
                sent = self._sock.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            if self._writing:
                self._loop.add_writer(self._sock, self.flush)
            else:
                self._loop.remove_writer(self._sock)

    def last_words(self) -> None:
        """Another connection of the peer ended: take in what has arrived over this one by now.

        A peer that ends says here first what becomes of its messages, and why it ends. But where it leaves data unread
        its kernel resets the data connection, and that is seen in the same turn of the loop, or before.
        """
        while self._open and self._read():
            pass

    def _on_readable(self) -> None:
        self._read()

    def _read(self) -> bool:
        """Take in one piece. False: nothing more is there, for now or ever."""
        try:
            data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, tcp.TIMESTAMP_SPACE)
        except BlockingIOError:
            return False
        except OSError as error:
            self._fail(error.strerror or str(error))
            return False
        if not data:
            self._fail("it closed the connection")
            return False
        self._heard_ns = time.monotonic_ns()
        arrived_ns = self._heard_ns - tcp.waited_ns(ancillary)
        self._decoder.feed(data)
        answered = False
        try:
            while self._open and (item := self._decoder.next_frame()) is not None:
                transfer, frame = item
                if isinstance(frame, wire.Ping):
                    self.send(wire.Pong(frame.left_ns, arrived_ns, time.monotonic_ns()))
                    answered = True
                elif isinstance(frame, wire.Pong):
                    if (asked := self._asked.get(frame.left_ns)) is not None and not asked.done():
                        asked.set_result(max(0, arrived_ns - frame.left_ns))
                    if 0 <= arrived_ns - frame.left_ns <= self._timeout_ns:
                        self.delays.add(frame.left_ns, frame.arrived_ns, frame.answered_ns, arrived_ns)
                elif isinstance(frame, wire.Bye):
                    self._fail(f"it said good-bye: {frame.message}")
                else:
                    self._received(transfer, frame)
        except WireError as error:
            self.damaged = isinstance(error, DamagedFrame)
            self._fail(str(error))
        if answered:
            self.flush()  # they say when they leave
        return self._open

    def _fail(self, reason: str) -> None:
        if self._open:
            self.close()
            self._closed_callback(reason)

    def close(self, good_bye: str = "") -> None:
        """End it, without ``closed``. What is queued is tried once more, with a Bye when there is a reason to give."""
        if not self._open:
            return
        if good_bye:
            self._out += wire.encode(wire.Bye(good_bye[:500]))
        self._open = False
        for answer in list(self._asked.values()):
            answer.cancel()
        self._check.cancel()
        self._loop.remove_reader(self._sock)
        if self._writing:
            self._loop.remove_writer(self._sock)
        if self._out:
            try:
                self._sock.send(self._out)
            except OSError:
                pass  # it is closed either way
        self._sock.close()
