"""Which connection a person's pings take."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import pytest

from proxyd.agent import ping as pings
from proxyd.agent.handshake import Identity
from proxyd.agent.peers import PeerLink
from proxyd.agent.tcp import PathSizes
from proxyd.core.ids import AgentName
from proxyd.runtime.translate_agent import PingTold, PingWanted

PEER = AgentName("b", "1")


@dataclasses.dataclass
class FakeLink:
    """Its channel answers so many pings; then it is gone, or is silent."""

    answers: int
    ends: bool
    address: str = "10.0.0.2:7601"
    stream_count: int = 1

    def __post_init__(self) -> None:
        self.channel: FakeLink | None = self

    def rtt_and_rate(self) -> tuple[int, int]:
        return 0, 0

    def ask(self, nbytes: int = 0) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.answers:
            self.answers -= 1
            future.set_result(5)
        elif self.ends:
            self.channel = None
            future.cancel()
        return future

    def path_sizes(self) -> Any:
        if self.channel is None:
            raise OSError
        return PathSizes(1500, 1448)


def pinged(monkeypatch: pytest.MonkeyPatch, link: FakeLink) -> tuple[PingTold, list[str]]:
    """What is told of two pings, and where was dialled: nobody is there."""
    dialled: list[str] = []

    async def dial(me: object, to: AgentName, address: str, *_: object, **__: object) -> None:
        dialled.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(pings, "dial_peer", dial)
    monkeypatch.setattr(pings, "ANSWER_S", 0)
    wanted = PingWanted(PEER, "", 2, 0)
    told = asyncio.run(pings.ping(wanted, "", cast(PeerLink, link), cast(Identity, None), 0))
    return told, dialled


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_connection_that_ends_meanwhile_is_dialled_anew(monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    """The last trainer there has left, say: what a ping would tell of that is that the path is broken, or narrow."""
    told, dialled = pinged(monkeypatch, FakeLink(answers, ends=True))
    assert dialled == ["10.0.0.2:7601"]
    assert (told.dialled, told.sent, told.rtts_ns) == (True, 0, [])
    assert "cannot reach agent" in told.error
    assert "at 10.0.0.2:7601" in told.error


@pytest.mark.parametrize("answers", [0, 1, 2, 3])
def test_one_that_stands_and_is_silent_is_what_is_told(monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    told, dialled = pinged(monkeypatch, FakeLink(answers, ends=False))
    assert not dialled
    assert (told.dialled, told.sent, len(told.rtts_ns)) == (False, 2, min(2, answers))
    assert bool(told.large_rtt_ns) == (answers == 3)
