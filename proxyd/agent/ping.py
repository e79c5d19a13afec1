"""Pings from agent to agent for a person: over the connection that transfers use, or over one dialled for it.

The first pings are small. The last is as many of them at once as fill two packets of the size that TCP believes the
path to carry, and the answers fill as many on the way back: where small ones are answered and that one isn't, a box on
the path drops full packets without a word. Whoever answers has proven its token and its certificate before.
"""

from __future__ import annotations

import asyncio

from proxyd.agent.channel import ControlChannel
from proxyd.agent.handshake import Identity
from proxyd.agent.peers import PeerLink, dial_peer, error_words
from proxyd.core.errors import ProxydError
from proxyd.core.ids import TransferId
from proxyd.runtime.translate_agent import PingTold, PingWanted
from proxyd.wire import peer as wire
from proxyd.wire.codec import WireError

ANSWER_S = 2.0
"""For one ping: the way there and back, with a loss or two."""
MAX_LARGE_BYTES = 32 << 10
"""On loopback a segment has 64 KiB; a control connection shall not be filled."""
DIAL_S = 6.0


async def ping(wanted: PingWanted, address: str, link: PeerLink | None, me: Identity, timeout_ns: int) -> PingTold:
    """Ping a peer.

    :param address: where it is dialled when there are no connections to it.
    :param link: the connections to it that there are.
    :param timeout_ns: of a silent peer.
    """
    told = PingTold(wanted.peer, address)
    if link is not None:
        told.address, channel = link.address, link.channel
        if channel is None:
            told.error = f"the connection to {wanted.peer} is down, and the agent dials it again and again"
            return told
        _, told.delivery_rate_bytes_per_s = link.rtt_and_rate()
        told.streams = link.stream_count
        await _ping_over(channel, wanted, told)
        if link.channel is channel or (len(told.rtts_ns) == wanted.pings and told.large_rtt_ns):
            return told
        # It ended meanwhile, most likely because the last trainer there had left: that says nothing of the path.
        told = PingTold(wanted.peer, told.address)
    told.dialled = True
    ended: list[str] = []
    try:
        async with asyncio.timeout(DIAL_S):
            sock, _ = await dial_peer(
                me, wanted.peer, told.address, wire.StreamPurpose.CONTROL, 0, peer_timeout_ns=timeout_ns
            )
    except (OSError, TimeoutError, WireError, ProxydError) as error:
        told.error = f"cannot reach agent {wanted.peer} at {told.address}: {error_words(error)}"
        return told
    channel = ControlChannel(sock, _ignore, ended.append, timeout_ns=timeout_ns)
    try:
        await _ping_over(channel, wanted, told)
    finally:
        channel.close("it was only a ping")
    if ended and not (told.rtts_ns and told.large_rtt_ns):
        told.error = f"the connection ended: {ended[0]}"
    return told


def _ignore(transfer: TransferId, frame: wire.Frame) -> None:
    """Nothing is under way over a connection that was made for a ping."""


async def _ping_over(channel: ControlChannel, wanted: PingWanted, told: PingTold) -> None:
    for number in range(wanted.pings):
        if number:
            await asyncio.sleep(wanted.interval_ns / 1e9)
        told.sent += 1
        if (rtt_ns := await _answer(channel.ask())) is not None:
            told.rtts_ns.append(rtt_ns)
    try:
        sizes = channel.path_sizes()
    except OSError:
        return  # it ended meanwhile
    told.path_mtu, told.segment_bytes = sizes.path_mtu, sizes.segment_bytes
    if not told.rtts_ns:
        return
    told.large_bytes = min(MAX_LARGE_BYTES, 2 * sizes.segment_bytes)
    told.large_rtt_ns = await _answer(channel.ask(told.large_bytes)) or 0


async def _answer(answer: asyncio.Future[int]) -> int | None:
    """None: it did not come in time, or the connection has ended."""
    await asyncio.wait({answer}, timeout=ANSWER_S)
    if not answer.done():
        answer.cancel()
        return None
    return None if answer.cancelled() else answer.result()
