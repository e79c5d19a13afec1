"""Outgoing connections: one control and N data connections to each peer that the machine wants.

A link is up when all of its connections are, and down as soon as one of them fails: what then is sent again is the
machine's business (rules in :mod:`proxyd.core.transfer`). Dialling goes on for as long as the peer is wanted, with
jittered backoff, so that a restarted gateway isn't met by everybody in one instant.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import socket
import time
from collections.abc import Callable

from proxyd.agent import tcp
from proxyd.agent.channel import ControlChannel
from proxyd.agent.handshake import CONNECT_S, HandshakeError, Identity, dial
from proxyd.agent.streams import Outgoing, SendStream
from proxyd.agent.tls_socket import Connection
from proxyd.core.errors import ProxydError
from proxyd.core.events import AgentEvent, PeerConnected, PeerDisconnected, PeerFrame, PeerUnreachable, SendProgress
from proxyd.core.ids import AgentName, TransferId
from proxyd.core.striping import Stripe, Stripes, stream_paces
from proxyd.runtime.addresses import parse_address
from proxyd.runtime.logs import Throttle, fields
from proxyd.wire import peer as wire
from proxyd.wire.codec import WireError

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
"""Short, since transfers wait for the path to heal; a try is one packet (and its repetition) while nobody answers."""
SETTLED_S = 5.0
"""A link that stood for less counts as one more failure for the backoff."""
MIN_POLL_NS = 5_000_000
RTT_PER_POLL = 16
MAX_STREAMS = 256

_log = logging.getLogger(__name__)


class PeerLink:
    """Connections to one peer. ``emit`` gets PeerConnected, PeerDisconnected, PeerUnreachable, PeerFrame, SendProgress.

    :param take: the next chunk for this peer, with its payload.
    :param took: told after a stream has taken chunks.
    """

    def __init__(
        self,
        me: Identity,
        peer: AgentName,
        *,
        take: Callable[[AgentName], Outgoing | None],
        emit: Callable[[AgentEvent], None],
        congestion_control: str,
        peer_timeout_ns: int,
        seed: int,
        took: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._me = me
        self.peer = peer
        self._take = take
        self._took = took
        self._emit = emit
        self._congestion_control = congestion_control
        self._peer_timeout_ns = peer_timeout_ns
        self._random = random.Random(seed)
        self._throttle = Throttle(_log)
        self._address = ""
        self._wanted_incarnation = 0
        self._wanted_streams = 1
        self._pace_bytes_per_s = 0
        self._live = self._yields = False
        self._min_rtt_ns = 0
        self._channel: ControlChannel | None = None
        self.damaged_frames = 0
        """Frames that failed their checksum here, each the end of a connection."""
        self._incarnation = 0
        self._streams: list[SendStream] = []
        self._stripes = Stripes()
        self._at_work: list[bool] = []
        """Which streams had something to send when they were given their ceilings."""
        self._turn = 0
        self._task: asyncio.Task[None] | None = None
        self._adding: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        self._poll: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def is_connected(self) -> bool:
        """The link is up."""
        return self._channel is not None

    @property
    def stream_count(self) -> int:
        """Data connections that stand."""
        return len(self._streams)

    @property
    def channel(self) -> ControlChannel | None:
        """The control connection, while the link is up."""
        return self._channel

    @property
    def address(self) -> str:
        """Where the peer is dialled."""
        return self._address

    def rtt_and_rate(self) -> tuple[int, int]:
        """Smoothed round trip (ns) and delivered rate (bytes/s) that TCP shows now, for people: unlike
        :meth:`progress` nothing is settled by looking. Zeros while there is nothing to look at."""
        try:
            states = [tcp.read_tcp_state(stream.sock) for stream in self._streams]
        except OSError:
            return 0, 0
        rate = sum(state.delivery_rate_bytes_per_s for state in states)
        return sum(state.srtt_ns for state in states) // max(1, len(states)), rate

    def want(self, address: str, incarnation: int, streams: int) -> None:
        """Where the peer is (now) and how many data connections it is worth."""
        moved = (address, incarnation) != (self._address, self._wanted_incarnation)
        self._address, self._wanted_incarnation = address, incarnation
        self._wanted_streams = min(MAX_STREAMS, max(1, streams))
        if self._task is None:
            self._task = self._loop.create_task(self._run(), name=f"peer {self.peer}")
        elif self._channel is not None and moved and incarnation not in (0, self._incarnation):
            self._down("its agent was restarted")
        elif self._channel is not None and len(self._streams) < self._wanted_streams and self._adding is None:
            self._adding = self._loop.create_task(self._add_streams(), name=f"more streams to {self.peer}")
        elif moved and self._channel is None:
            self._again.set()

    # -- the machine's effects ---------------------------------------------------------------------------------------

    def send(self, transfer: TransferId, frame: wire.Frame) -> None:
        """A control frame; dropped while the link is down (the machine heard of that)."""
        if self._channel is not None:
            self._channel.send(frame, transfer)

    def set_pace(self, rate_bytes_per_s: int, live: bool = False, yields: bool = False) -> None:
        """Ceiling of all data connections together; 0: none. ``live``: their windows may be reopened below it;
        ``yields``: little shall wait in the kernel."""
        self._pace_bytes_per_s = rate_bytes_per_s
        self._live, self._yields = live, yields
        for stream in self._streams:
            stream.yields = yields
        self._share_pace()

    def pump(self) -> None:
        """Offer chunks to the streams that can take one. They take turns in being first."""
        if self._channel is not None:
            self._channel.flush()  # an OFFER before its chunks, where both leave now
        streams = self._streams
        count = len(streams)
        self._turn += 1
        for index in range(count):
            if index >= len(streams):
                break  # a stream failed under way, and the link went with it
            stream = streams[(self._turn + index) % len(streams)]
            if stream.stripe.rests(time.monotonic_ns()):
                continue
            stream.pump()
            if not stream.is_waiting:
                break  # it took all there was

    def keep(self, transfer: TransferId) -> None:
        """See :meth:`SendStream.keep`."""
        for stream in self._streams:
            stream.keep(transfer)

    def _share_pace(self) -> None:
        if not self._streams:
            return
        if not self._pace_bytes_per_s:
            for stream in self._streams:
                stream.set_pace(0)
            return
        now_ns = time.monotonic_ns()
        self._at_work = [stream.has_to_send for stream in self._streams]
        working = [stream for stream in self._streams if not stream.stripe.rests(now_ns)] or self._streams
        resting = sum(stream.stripe.speed for stream in self._streams if stream.stripe.rests(now_ns))
        pace = max(self._pace_bytes_per_s - resting, self._pace_bytes_per_s // 2)
        windows, grow = [stream.window_bytes for stream in working], [stream.window_grows for stream in working]
        shares = stream_paces(pace, windows, self._min_rtt_ns, grow, [stream.has_to_send for stream in working])
        for stream, share in zip(working, shares, strict=True):
            stream.set_pace(share)

    # -- connecting --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._closed:
            self._again.clear()
            up_at_s = None
            try:
                await self._connect()
                up_at_s = self._loop.time()
            except (OSError, TimeoutError, WireError, ProxydError) as error:
                reason = f"cannot reach agent {self.peer} at {self._address}: {error_words(error)}"
                self._throttle.warning("dial", reason, next_try_s=round(backoff_s, 2))
                self._emit(PeerUnreachable(self.peer, reason))
            if up_at_s is None:
                # Unreachable: until the backoff is over, or the peer is said to be elsewhere.
                try:
                    async with asyncio.timeout(backoff_s * self._random.uniform(0.5, 1.0)):
                        await self._again.wait()
                except TimeoutError:
                    backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
                    continue
            else:
                if self._again.is_set() and self._wanted_incarnation not in (0, self._incarnation):
                    self._down("its agent was restarted")  # that was said while we dialled
                # Up: until it is down, whatever else was said meanwhile. A second link would throw out the first.
                while self._channel is not None:
                    self._again.clear()
                    await self._again.wait()
            if up_at_s is None or self._loop.time() - up_at_s > SETTLED_S:
                backoff_s = FIRST_BACKOFF_S
            else:
                # Two agents of one name take turns in throwing each other out: at least not in a hurry.
                await asyncio.sleep(backoff_s)
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)

    async def _connect(self) -> None:
        control, welcome = await self._dial(wire.StreamPurpose.CONTROL, 0)
        sockets: list[Connection] = []
        try:
            sockets = await self._dial_data(range(self._wanted_streams), welcome.incarnation)
        except BaseException:
            control.close()
            raise
        self._incarnation = welcome.incarnation
        self._channel = ControlChannel(control, self._on_frame, self._down, timeout_ns=self._peer_timeout_ns)
        for sock in sockets:
            self._add(sock)
        self._share_pace()
        _log.info(
            "peer is up",
            extra=fields(peer=self.peer, address=self._address, streams=len(sockets), cc=self._congestion_control),
        )
        self._emit(PeerConnected(self.peer, welcome.incarnation, welcome.eager_bytes))
        # The handshakes were a first look at the path, and the windows are known to be cold.
        if (progress := self.progress()) is not None:
            self._emit(progress)

    def _add(self, sock: Connection) -> None:
        stripe = Stripe()
        take = functools.partial(self._take_next, stripe)
        stream = SendStream(sock, stripe, take, self._on_took, self._stream_ended)
        stream.yields = self._yields
        self._streams.append(stream)

    def _take_next(self, stripe: Stripe) -> Outgoing | None:
        return None if stripe.rests(time.monotonic_ns()) else self._take(self.peer)

    def _on_took(self) -> None:
        if self._pace_bytes_per_s and self._at_work != [stream.has_to_send for stream in self._streams]:
            self._share_pace()  # one has begun: the others leave it its part
        self._start_polling()
        self._took()

    async def _add_streams(self) -> None:
        """More data connections beside those that stand; without them the link is slower, not down."""
        channel = self._channel
        try:
            missing = range(len(self._streams), self._wanted_streams)
            sockets = await self._dial_data(missing, self._incarnation)
        except (OSError, TimeoutError, WireError, ProxydError) as error:
            self._throttle.warning("more", f"no further data connections to {self.peer}: {error_words(error)}")
            return
        finally:
            self._adding = None
        if self._channel is not channel or channel is None:
            for sock in sockets:
                sock.close()
            return
        for sock in sockets:
            self._add(sock)
        self._share_pace()
        self.pump()

    async def _dial_data(self, numbers: range, incarnation: int) -> list[Connection]:
        """Connections with these numbers, all of one life of the peer, or none."""
        sockets: list[Connection] = []
        try:
            # A few at a time: a burst of handshakes would meet the peer's cap for strangers.
            for start in range(numbers.start, numbers.stop, 16):
                some = range(start, min(start + 16, numbers.stop))
                results = await asyncio.gather(
                    *(self._dial(wire.StreamPurpose.DATA, number) for number in some), return_exceptions=True
                )
                sockets += [result[0] for result in results if not isinstance(result, BaseException)]
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
                    if result[1].incarnation != incarnation:
                        raise HandshakeError("it was restarted while its connections were set up")
        except BaseException:
            for sock in sockets:
                sock.close()
            raise
        return sockets

    async def _dial(self, purpose: wire.StreamPurpose, number: int) -> tuple[Connection, wire.Welcome]:
        return await dial_peer(
            self._me,
            self.peer,
            self._address,
            purpose,
            number,
            peer_timeout_ns=self._peer_timeout_ns,
            congestion_control=self._congestion_control if purpose is wire.StreamPurpose.DATA else "",
        )

    def _on_frame(self, transfer: TransferId, frame: wire.Frame) -> None:
        self._emit(PeerFrame(self.peer, False, transfer, frame))

    def _stream_ended(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.last_words()  # which may say it better
            self._down(reason)

    def _down(self, reason: str) -> None:
        if self._channel is None:
            return
        silent_ns = self._channel.silent_ns
        self.damaged_frames += self._channel.damaged
        self._hang_up("")
        if not self._closed:
            _log.warning("peer is down", extra=fields(peer=self.peer, reason=reason))
            text = f"the connection to agent {self.peer} ended: {reason}"
            self._emit(PeerDisconnected(self.peer, text, silent_ns))
            self._again.set()

    def _hang_up(self, good_bye: str) -> None:
        if self._channel is not None:
            self._channel.close(good_bye)
            self._channel = None
        for stream in self._streams:
            stream.close()
        # A new list: pump may be walking over the old one.
        self._streams = []
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None

    def close(self, reason: str) -> list[asyncio.Task[None]]:
        """Hang up and dial no more. No event follows. Answers the tasks that are ending."""
        self._closed = True
        self._hang_up(reason)
        tasks = [task for task in (self._task, self._adding) if task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    # -- progress ----------------------------------------------------------------------------------------------------

    def _start_polling(self) -> None:
        if self._poll is None and any(not stream.ledger.is_settled for stream in self._streams):
            self._poll = self._loop.call_later(MIN_POLL_NS / 1e9, self._on_poll)

    def _on_poll(self) -> None:
        self._poll = None
        progress = self.progress()
        if progress is None:
            return
        if any(not stream.ledger.is_settled for stream in self._streams):
            if self._channel is not None:
                self._channel.probe(self._pace_bytes_per_s)
            interval_ns = max(MIN_POLL_NS, progress.min_rtt_ns // RTT_PER_POLL)
            self._poll = self._loop.call_later(interval_ns / 1e9, self._on_poll)
        self._emit(progress)

    def progress(self) -> SendProgress | None:
        """The streams' counters now; None while the link is down."""
        left = delivered = unsent = retransmits = rate = window = sacked = lost = 0
        srtt_ns: list[int] = []
        min_rtt_ns: list[int] = []
        path_limited = grows = False
        now_ns = time.monotonic_ns()
        try:
            for stream in self._streams:
                state = tcp.read_tcp_state(stream.sock)
                settled = stream.ledger.settle(state.unacked_bytes, state.unsent_bytes)
                left += settled.granted_left_bytes
                delivered += settled.granted_delivered_bytes
                unsent += state.unsent_bytes + stream.ledger.pending_bytes
                retransmits += state.retransmits
                rate += state.delivery_rate_bytes_per_s
                window += state.window_bytes
                grows = grows or state.window_grows
                sacked += state.sacked_bytes
                lost += state.lost_bytes
                path_limited = path_limited or state.path_limited(stream.pace_bytes_per_s)
                # Without it a low pace looked like a queue, which made it lower: 200 Mbit/s and 5 ms ended at 4.
                paired_ns = state.acknowledged_in_pairs_ns(stream.pace_bytes_per_s)
                srtt_ns.append(max(min(state.srtt_ns, state.min_rtt_ns), state.srtt_ns - paired_ns))
                min_rtt_ns.append(state.min_rtt_ns)
                stream.look(state, self._min_rtt_ns if self._live else 0, now_ns)
                acked_bytes = stream.ledger.written_bytes - state.unacked_bytes
                busy = state.unsent_bytes > 0 or stream.ledger.pending_bytes > 0
                stream.stripe.seen(acked_bytes, stream.pace_bytes_per_s, busy=busy)
        except OSError as error:
            self._stream_ended(error_words(error))
            return None
        if not self._streams:
            return None
        self._min_rtt_ns = min((one for one in min_rtt_ns if one), default=0)
        if len(self._streams) > 1:
            self._stripes.look([stream.stripe for stream in self._streams], self._min_rtt_ns, now_ns)
            self._share_pace()
        mean_rtt_ns = sum(srtt_ns) // len(srtt_ns)
        queue_ns = max(0, mean_rtt_ns - self._min_rtt_ns)
        return SendProgress(
            peer=self.peer,
            granted_left_bytes=left,
            granted_delivered_bytes=delivered,
            unsent_bytes=unsent,
            srtt_ns=mean_rtt_ns,
            min_rtt_ns=self._min_rtt_ns,
            retransmits=retransmits,
            delivery_rate_bytes_per_s=rate,
            path_limited=path_limited,
            window_bytes=window,
            window_grows=grows,
            sacked_bytes=sacked,
            lost_bytes=lost,
            back_queue_ns=self._channel.delays.back_queue_ns(queue_ns, now_ns) if self._channel is not None else 0,
        )


async def dial_peer(
    me: Identity,
    peer: AgentName,
    where: str,
    purpose: wire.StreamPurpose,
    number: int,
    *,
    peer_timeout_ns: int,
    congestion_control: str = "",
) -> tuple[Connection, wire.Welcome]:
    """A connection to a peer with its handshake done. Raises OSError, TimeoutError, WireError, ProxydError."""
    loop = asyncio.get_running_loop()
    address = parse_address(where, port_zero_ok=False)
    async with asyncio.timeout(CONNECT_S):
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, target = found[0]
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
    try:
        tcp.prepare(sock, peer_timeout_ns=peer_timeout_ns, congestion_control=congestion_control)
        async with asyncio.timeout(CONNECT_S):
            await loop.sock_connect(sock, target)
        return await dial(sock, me, peer, purpose, number)
    except BaseException:
        sock.close()
        raise


def error_words(error: BaseException) -> str:
    """Why a peer could not be dialled, in few words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)  # the loop's own text repeats the address and forgets the reason
    return str(error)
