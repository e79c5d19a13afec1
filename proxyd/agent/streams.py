"""Data connections between agents: payload straight from the sender's mapping into the receiver's.

A chunk is one header (48 bytes) and its payload. Everything is done on plain non-blocking sockets in the loop's
readiness callbacks: a buffered protocol would cost one more copy, and Python's own work is paid per system call, so
calls are as large as the kernel takes them. One callback moves at most :data:`TURN_BYTES`, so that no stream starves
the others.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol

import xxhash

from proxyd.agent import tcp
from proxyd.agent.arenas import Block
from proxyd.agent.ledger import StreamLedger
from proxyd.agent.tcp import TcpState
from proxyd.agent.tls_socket import Connection, held_bytes, most_held_bytes
from proxyd.core.effects import Chunk
from proxyd.core.striping import Stripe, WindowKeeper, least_pace
from proxyd.wire import peer as wire
from proxyd.wire.codec import DamagedFrame, WireError
from proxyd.wire.envelope import TransferId

TURN_BYTES = 4 << 20
_SCRATCH_BYTES = 256 << 10
SAME_PACE = 256
"""A ceiling that would change by less than this part stays."""
WAKE_BYTES = 512 << 10
"""Within a chunk the kernel wakes us for this much, not for every few segments: a wake-up costs as much as copying
100 KB. The end of a chunk always wakes."""
PIECE_BYTES = 512 << 10
"""Read at a time, and hashed right after: by the end of a chunk of 2 MiB its beginning has left the core's own cache,
and to fetch that once more costs more than to hash it."""
WAKE_OF_BUFFER = 8
"""And never for more than this part of the receive buffer as it has grown so far: where it is too small for
``SO_RCVLOWAT`` the kernel sets the *window's* limit to that, for good (``tcp_set_rcvlowat``), and a long path carries a
sixth."""


class Outgoing(NamedTuple):
    """A chunk and its payload."""

    chunk: Chunk
    payload: memoryview


class SendStream:
    """One outgoing data connection.

    :param stripe: what is known of its speed.
    :param take: asked for the next chunk whenever the socket can take one; None: nothing now.
    :param took: told after a turn in which chunks were taken: the machine may have effects waiting.
    :param failed: told once, with the reason; the stream is closed then.
    """

    def __init__(
        self,
        sock: Connection,
        stripe: Stripe,
        take: Callable[[], Outgoing | None],
        took: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.sock = sock
        self.stripe = stripe
        self._take = take
        self._took = took
        self._has_taken = False
        self._failed = failed
        self.ledger = StreamLedger()
        self._head = b""
        self._payload = memoryview(b"")
        self._transfer: TransferId | None = None
        self._waiting = False
        self._open = True
        self._pace: int | None = None
        self._yielded = self.yields = False
        """What it sends gives way to others, when its ceiling was set last and now."""
        self._rests = False
        """Without a ceiling, because nothing is to be sent."""
        self.window_bytes = 0
        """Its congestion window as last read; 0: not yet."""
        self.window_grows = True
        """It was in slow start then."""
        self.has_to_send = False
        """Something of it hasn't left, or must leave again, as far as is known."""
        self._packet_bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        self._highest_pace = 0
        self._can_reopen = True
        self._keeper = WindowKeeper()
        # The peer sends nothing on a data connection: anything readable is its end.
        self._loop.add_reader(sock, self._on_readable)

    @property
    def is_waiting(self) -> bool:
        """The socket is full; the stream goes on by itself."""
        return self._waiting

    @property
    def pace_bytes_per_s(self) -> int:
        """Its ceiling; 0: none."""
        return self._pace or 0

    def set_pace(self, rate_bytes_per_s: int) -> None:
        """This stream's share of the peer's ceiling; 0: none."""
        before = self._pace
        if rate_bytes_per_s:
            self._highest_pace = max(self._highest_pace, rate_bytes_per_s)
            rate_bytes_per_s = max(rate_bytes_per_s, least_pace(self._packet_bytes, self._highest_pace))
        same = self.yields == self._yielded
        if same and before and rate_bytes_per_s and abs(rate_bytes_per_s - before) * SAME_PACE < before:
            return  # it costs two system calls
        if (rate_bytes_per_s != before or not same) and self._open:
            self._pace = rate_bytes_per_s
            if not self._rests:
                self._set_pace()

    def _set_pace(self) -> None:
        self._yielded = self.yields
        tcp.set_pace(self.sock, self.pace_bytes_per_s, yields=self.yields)

    def _rest(self) -> None:
        """All that was written has left: lift the ceiling until there is more, while acknowledgements still come in.

        A lower ceiling acts at once, a higher one with the next acknowledgement. A stream whose last slot ended at a
        low rate (its share shrank while others grew) would begin the next one at that: for a round trip, since
        nothing that could be acknowledged is under way then. It was measured: 1.8 of 50 MB/s for 60 ms.
        """
        if self._pace and not self._rests and not self._payload and self._open:
            self._rests = True
            tcp.lift_pace(self.sock)

    def look(self, state: TcpState, min_rtt_ns: int, now_ns: int) -> None:
        """The kernel was read: see to the window, and to the ceiling of a stream that has nothing to send.

        :param min_rtt_ns: 0 when it isn't known, or when windows are TCP's own business.
        """
        self.window_bytes, self.window_grows = state.window_bytes, state.window_grows
        if (
            self._keeper.reopens(
                window_bytes=state.window_bytes,
                in_slow_start=state.window_grows,
                retransmits=state.retransmits,
                recovers=state.recovers,
                pace_bytes_per_s=self.pace_bytes_per_s,
                rtt_ns=min_rtt_ns,
                now_ns=now_ns,
            )
            and self._can_reopen
        ):
            self._can_reopen = tcp.reopen_window(self.sock)
        self.has_to_send = bool(self._payload) or state.unsent_bytes > 0 or state.lost_bytes > 0
        if not state.unsent_bytes:
            self._rest()

    def pump(self) -> None:
        """Write until the socket is full, there is nothing to send, or the turn is over."""
        if not self._waiting:
            self._write()

    def _write(self) -> None:
        if self._open:
            self._write_turn()
            if self._has_taken:
                self._has_taken = False
                self._took()

    def _write_turn(self) -> None:
        budget = TURN_BYTES
        try:
            while budget > 0:
                if not self._payload and not self._next():
                    self._wait(False)
                    return
                if self._head:
                    asked = len(self._head) + len(self._payload)
                    sent = self.sock.sendmsg((self._head, self._payload))
                    self.ledger.wrote(sent)
                    of_head = min(sent, len(self._head))
                    self._head = self._head[of_head:]
                    self._payload = self._payload[sent - of_head :]
                else:
                    asked = len(self._payload)
                    sent = self.sock.send(self._payload)
                    self.ledger.wrote(sent)
                    self._payload = self._payload[sent:]
                budget -= sent
                if sent < asked:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._wait(True)

    def _next(self) -> bool:
        outgoing = self._take()
        if outgoing is None:
            return False
        self._has_taken = self.has_to_send = True
        if self._rests:
            self._rests = False
            self._set_pace()
        chunk, payload = outgoing
        if chunk.padding:
            self._head = wire.encode_padding_header(chunk.length)
        else:
            # Right before the copy into the kernel: the hash warms the cache for it.
            checksum = xxhash.xxh3_64_intdigest(payload)
            self._head = wire.encode_data_header(chunk.transfer, chunk.offset, chunk.length, checksum)
        self._payload = payload
        self._transfer = chunk.transfer
        self.ledger.begin(wire.HEADER_BYTES, len(payload), granted=chunk.granted)
        return True

    def keep(self, transfer: TransferId) -> None:
        """A message ended while a chunk of it may be half written, and its block is its trainer's again: write the rest
        from a copy. Else the receiver, where the news of the end may come after the chunk, would see damage."""
        if self._payload and self._transfer == transfer:
            self._payload = memoryview(bytes(self._payload))

    def _wait(self, waiting: bool) -> None:
        if waiting != self._waiting and self._open:
            self._waiting = waiting
            if waiting:
                self._loop.add_writer(self.sock, self._write)
            else:
                self._loop.remove_writer(self.sock)

    def _on_readable(self) -> None:
        try:
            data = self.sock.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        self._fail("it sent bytes on a data connection" if data else "it closed a data connection")

    def _fail(self, reason: str) -> None:
        if self._open:
            self.close()
            self._failed(reason)

    def close(self) -> None:
        """Close the socket and drop the views; ``failed`` isn't called."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self.sock)
            if self._waiting:
                self._loop.remove_writer(self.sock)
            self._payload = memoryview(b"")
            self.sock.close()


class ChunkSink(Protocol):
    """Where chunks go."""

    def block_of(self, transfer: TransferId) -> Block | None:
        """The memory of a message; None: not offered yet, or no longer wanted."""

    def was_offered(self, transfer: TransferId) -> bool:
        """Whether the message's OFFER has come. Its chunks travel on other connections and may overtake it."""

    def when_offered(self, header: wire.Header, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` once the OFFER of this chunk's message has come, or after a while without."""

    def arrived(self, transfer: TransferId, offset: int, length: int, good: bool) -> None:
        """A chunk is in place (or was damaged on its way)."""

    def damaged(self) -> None:
        """A header failed its checksum: the connection ends."""


class ReceiveStream:
    """One incoming data connection.

    A chunk that has overtaken its OFFER waits in the kernel, and what is behind it on this connection: reading on would
    mean to keep it somewhere or to lose it. Chunks of a message that was offered and has no memory (any more) are
    thrown away.

    :param failed: told once, with the reason; the stream is closed then.
    """

    _scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def __init__(self, sock: Connection, sink: ChunkSink, failed: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._sink = sink
        self._failed = failed
        self._head = memoryview(bytearray(wire.HEADER_BYTES))
        self._head_bytes = 0
        self._header: wire.Header | None = None
        self._early: wire.Header | None = None
        self._block: Block | None = None
        self._got_bytes = 0
        self._hash = xxhash.xxh3_64()
        self._low_water = 1
        self._open = True
        self._start_reading()

    def _start_reading(self) -> None:
        self._loop.add_reader(self._sock, self._on_readable)
        if held_bytes(self._sock):
            self._loop.call_soon(self._on_readable)  # the kernel doesn't know of it

    def _on_readable(self) -> None:
        if self._early is not None:
            return
        budget = TURN_BYTES
        try:
            while budget > 0 and self._open:
                got, more = self._read_head() if self._header is None else self._read_payload(self._header)
                budget -= got
                if not more:
                    break
            else:
                if self._open and held_bytes(self._sock):
                    self._loop.call_soon(self._on_readable)
            self._wake_at()
        except BlockingIOError:
            self._wake_at()
        except WireError as error:
            if isinstance(error, DamagedFrame):
                self._sink.damaged()
            self._fail(str(error))
        except OSError as error:
            self._fail(error.strerror or str(error))

    def _wake_at(self) -> None:
        """Tell the kernel how much it is worth waking up for."""
        header = self._header
        low = 1 if header is None else min(WAKE_BYTES, header.length - self._got_bytes - most_held_bytes(self._sock))
        low = max(1, low)
        if low != self._low_water and self._open:
            sock = self._sock
            if low > 1:
                low = max(1, min(low, sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // WAKE_OF_BUFFER))
            self._low_water = low
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)

    def _read_head(self) -> tuple[int, bool]:
        if self._head_bytes < wire.HEADER_BYTES:
            got = self._sock.recv_into(self._head[self._head_bytes :])
            if got == 0:
                raise WireError("it closed a data connection" + (" inside a header" if self._head_bytes else ""))
            self._head_bytes += got
            if self._head_bytes < wire.HEADER_BYTES:
                return got, False
        self._head_bytes = 0
        header = wire.decode_header(self._head)
        if header.type == wire.PADDING_TYPE:
            self._begin(header, None)
            return wire.HEADER_BYTES, True
        if header.type != wire.DATA_TYPE:
            raise WireError(f"control frame type {header.type} came on a data connection")
        block = self._sink.block_of(header.transfer)
        if block is None and not self._sink.was_offered(header.transfer):
            self._early = header
            self._loop.remove_reader(self._sock)
            self._sink.when_offered(header, self._go_on)
            return wire.HEADER_BYTES, False
        self._begin(header, block)
        return wire.HEADER_BYTES, True

    def _go_on(self) -> None:
        header = self._early
        if header is None or not self._open:
            return
        self._early = None
        try:
            self._begin(header, self._sink.block_of(header.transfer))
        except WireError as error:
            self._fail(str(error))
            return
        self._start_reading()

    def _begin(self, header: wire.Header, block: Block | None) -> None:
        if block is not None:
            chunk = block.chunk_bytes
            if header.offset % chunk or header.length != min(chunk, block.nbytes - header.offset):
                raise WireError(
                    f"{header.length} bytes at {header.offset} are no chunk of transfer {header.transfer}"
                    f" ({block.nbytes} bytes in chunks of {chunk})"
                )
        self._header = header
        self._block = block
        self._got_bytes = 0
        self._hash.reset()

    def _read_payload(self, header: wire.Header) -> tuple[int, bool]:
        rest = header.length - self._got_bytes
        block = self._block
        # Freed under way (cancelled, its trainer died): the memory may be somebody else's by now. Landed as another
        # copy (it was turned down at first, and sent again): with the last chunk the sender's block went back to its
        # trainer, so this copy may end in other bytes, while the receiving trainer reads the good one.
        if block is not None and (not block.live or header.offset in block.landed):
            block = self._block = None
        if block is None:
            target = self._scratch[: min(rest, _SCRATCH_BYTES)]
        else:
            at = header.offset + self._got_bytes
            target = block.payload[at : at + min(rest, PIECE_BYTES)]
        # The next header comes in the same call: one system call less for each chunk.
        got, _, _, _ = self._sock.recvmsg_into((target, self._head) if len(target) == rest else (target,))
        if got == 0:
            raise WireError(f"it closed a data connection {rest} bytes before the end of a chunk")
        if block is not None:
            self._hash.update(target[: min(got, rest)])
        if got < rest:
            self._got_bytes += got
            return got, got == len(target)
        self._head_bytes = got - rest
        self._header = self._block = None
        if block is not None:
            good = header.checksum_algorithm == wire.ChecksumAlgorithm.NONE or self._hash.intdigest() == header.checksum
            if good:
                block.mark(header.offset)
            self._sink.arrived(header.transfer, header.offset, header.length, good)
        return got, self._head_bytes == wire.HEADER_BYTES

    def _fail(self, reason: str) -> None:
        if self._open:
            self.close()
            self._failed(reason)

    def close(self) -> None:
        """Close the socket; ``failed`` isn't called."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            self._header = self._early = self._block = None
            self._sock.close()
