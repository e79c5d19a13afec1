"""The hands of the agent machine: each of its effects, carried out on sockets and memory."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from proxyd.agent.clients import ClientHub
from proxyd.agent.handshake import Identity
from proxyd.agent.inbound import InboundListener
from proxyd.agent.peers import PeerLink
from proxyd.agent.session import CoordinatorSessions
from proxyd.agent.streams import Outgoing
from proxyd.core import effects as ef
from proxyd.core.events import AgentEvent
from proxyd.core.ids import AgentName
from proxyd.core.units import format_rate
from proxyd.runtime.logs import Throttle, fields
from proxyd.wire.envelope import ErrorCode
from proxyd.wire.peer import Ack

_log = logging.getLogger("proxyd.agent")


class Effects:
    """Carries out what the machine wants; answers come back as events through ``emit``.

    :param take: the machine's next chunk for a peer, with its payload.
    :param took: told after chunks were taken outside of the machine's own turn.
    """

    def __init__(
        self,
        me: Identity,
        *,
        hub: ClientHub,
        inbound: InboundListener,
        sessions: CoordinatorSessions,
        emit: Callable[[AgentEvent], None],
        take: Callable[[AgentName], Outgoing | None],
        took: Callable[[], None],
        congestion_control: str,
        peer_timeout_ns: int,
    ) -> None:
        self._me = me
        self._hub = hub
        self._inbound = inbound
        self._sessions = sessions
        self._emit = emit
        self._take = take
        self._took = took
        self._congestion_control = congestion_control
        self._peer_timeout_ns = peer_timeout_ns
        self._random = random.Random(me.incarnation)
        self.peers: dict[AgentName, PeerLink] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._throttle = Throttle(logging.getLogger(__name__))
        self.denied = 0
        """Messages that a coordinator, or its operator's rules, denied."""
        self._hands = self._make_hands()

    def perform(self, effects: Sequence[ef.AgentEffect]) -> None:
        """In order."""
        for effect in effects:
            self._hands[type(effect)](effect)

    def _make_hands(self) -> dict[type[ef.AgentEffect], Callable[[Any], None]]:
        """What is done for each kind of effect."""
        hub = self._hub
        return {
            ef.ToPeer: self._to_peer,
            ef.ToCoordinator: lambda effect: self._sessions.send(effect.address, effect.message),
            ef.Pump: self._pump,
            ef.SetPace: self._set_pace,
            ef.AllocateBlock: hub.allocate,
            ef.FreeBlock: hub.free,
            ef.TellOffered: hub.tell_offered,
            ef.TellBlock: hub.tell_block,
            ef.TellLanded: hub.tell_landed,
            ef.TellRecvFailed: hub.tell_recv_failed,
            ef.TellExpect: hub.tell_expect,
            ef.TellForetold: hub.tell_foretold,
            ef.TellSendState: hub.tell_send_state,
            ef.TellSendDelivered: lambda effect: hub.once_told(
                effect.transfer, partial(hub.tell_send_delivered, effect)
            ),
            ef.TellSendDone: lambda effect: hub.once_told(effect.transfer, partial(hub.tell_send_done, effect)),
            ef.TellSendFailed: self._tell_send_failed,
            ef.TellPeerHere: hub.tell_peer_here,
            ef.TellPeerGone: hub.tell_peer_gone,
            ef.CloseClient: hub.close_client,
            ef.WantPeer: self._want_peer,
            ef.DropPeer: lambda effect: self._drop_peer(effect.peer, effect.reason),
            ef.FallbackBegan: self._fallback_began,
            ef.FallbackEnded: self._fallback_ended,
        }

    def _pump(self, effect: ef.Pump) -> None:
        if (link := self.peers.get(effect.peer)) is not None:
            link.pump()

    def _set_pace(self, effect: ef.SetPace) -> None:
        if (link := self.peers.get(effect.peer)) is not None:
            link.set_pace(effect.rate_bytes_per_s, effect.live, effect.yields)

    def _to_peer(self, effect: ef.ToPeer) -> None:
        if effect.inbound and isinstance(effect.frame, Ack):
            answer = partial(self._inbound.send, effect.peer, effect.transfer, effect.frame)
            self._hub.once_told(effect.transfer, answer)
        elif effect.inbound:
            self._inbound.send(effect.peer, effect.transfer, effect.frame)
        elif (link := self.peers.get(effect.peer)) is not None:
            link.send(effect.transfer, effect.frame)

    def _tell_send_failed(self, effect: ef.TellSendFailed) -> None:
        for link in self.peers.values():
            link.keep(effect.transfer)
        self._hub.tell_send_failed(effect)
        if effect.code is ErrorCode.REFUSED:
            self.denied += 1
            self._throttle.warning(effect.endpoint.job, effect.message)

    @staticmethod
    def _fallback_began(effect: ef.FallbackBegan) -> None:
        _log.warning(
            "coordinator is silent: going on at the fallback rate",
            extra=fields(
                link=effect.link,
                coordinator=effect.coordinator,
                silent_s=round(effect.silent_ns / 1e9, 2),
                rate=format_rate(effect.rate_bytes_per_s),
            ),
        )

    @staticmethod
    def _fallback_ended(effect: ef.FallbackEnded) -> None:
        _log.info(
            "coordinator is heard: going on under grants",
            extra=fields(link=effect.link, after_s=round(effect.after_ns / 1e9, 2), sent_bytes=effect.nbytes),
        )

    def _want_peer(self, effect: ef.WantPeer) -> None:
        link = self.peers.get(effect.peer)
        if link is None:
            link = self.peers[effect.peer] = PeerLink(
                self._me,
                effect.peer,
                take=self._take,
                took=self._took,
                emit=self._emit,
                congestion_control=self._congestion_control,
                peer_timeout_ns=self._peer_timeout_ns,
                seed=self._random.getrandbits(32),
            )
        link.want(effect.address, effect.incarnation, effect.streams)

    def _drop_peer(self, peer: AgentName, reason: str) -> None:
        link = self.peers.pop(peer, None)
        if link is not None:
            for task in link.close(reason):
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    async def close(self, reason: str) -> None:
        """Hang up on every peer."""
        for peer in list(self.peers):
            self._drop_peer(peer, reason)
        await asyncio.gather(*self._ending, return_exceptions=True)
