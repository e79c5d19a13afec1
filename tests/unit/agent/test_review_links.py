"""Links to peers that are restarted, or said to be, while they are dialled or stand."""

from __future__ import annotations

import asyncio
import dataclasses

from proxyd.core.events import InboundOpened, PeerConnected, PeerDisconnected
from tests.unit.agent.test_peers import B, Rig, play


def test_a_peer_whose_restart_is_told_after_it_was_reached_again_keeps_its_link() -> None:
    """The dialler was faster than the directory: it already talks to the new life."""

    async def body() -> None:
        rig = Rig()
        address = str(rig.listener.address)
        rig.link.want(address, B.incarnation - 1, 2)
        await rig.sender.until(lambda: bool(rig.sender.of(PeerConnected)))
        rig.link.want(address, B.incarnation, 2)
        await rig.talk()
        assert len(rig.sender.of(PeerConnected)) == 1
        assert not rig.sender.of(PeerDisconnected)
        assert len(rig.receiver.of(InboundOpened)) == 1
        await rig.close()

    play(body)


def test_a_restart_that_is_told_while_dialling_makes_one_link() -> None:
    async def body() -> None:
        rig = Rig()
        address = str(rig.listener.address)
        rig.link.want(address, B.incarnation - 1, 2)
        await asyncio.sleep(0)
        rig.link.want(address, B.incarnation, 2)
        await rig.sender.until(lambda: bool(rig.sender.of(PeerConnected)))
        await rig.talk()
        assert len(rig.sender.of(PeerConnected)) == 1
        assert not rig.sender.of(PeerDisconnected)
        await rig.close()

    play(body)


def test_a_link_to_a_life_that_is_over_by_the_time_it_stands_is_made_anew() -> None:
    async def body() -> None:
        rig = Rig()
        old = dataclasses.replace(B, incarnation=B.incarnation - 1)
        rig.listener._me = old
        address = str(rig.listener.address)
        rig.link.want(address, old.incarnation, 2)
        await asyncio.sleep(0)
        rig.link.want(address, B.incarnation, 2)
        await rig.sender.until(lambda: bool(rig.sender.of(PeerConnected)))
        rig.listener._me = B
        await rig.sender.until(lambda: len(rig.sender.of(PeerConnected)) == 2)
        kinds = [type(e) for e in rig.sender.all if isinstance(e, PeerConnected | PeerDisconnected)]
        assert kinds == [PeerConnected, PeerDisconnected, PeerConnected]
        last = rig.sender.of(PeerConnected)[-1]
        assert isinstance(last, PeerConnected)
        assert last.incarnation == B.incarnation
        await rig.close()

    play(body)
