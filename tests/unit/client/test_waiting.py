"""How long a trainer stood still: what is counted, and when its agent hears of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from proxyd.wire import client as wire
from proxyd_client.core import SessionCore
from proxyd_client.waiting import TELL_EVERY_NS, Waiting, library_thread
from tests.fakes.fake_agent import FakeAgent

from .conftest import Connect


class Core:
    """What Waiting needs of a session; its waits take as long as the test says."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.lock = threading.Lock()
        self.away = False
        self.failure: object = None
        self.progress = self.link = self
        self.told_ns: list[int] = []
        self.ready_at_ns: int | None = 0
        self.ends_at_ns: int | None = None

    def wait_for(self, ready: Callable[[], bool], deadline_ns: int | None) -> bool:
        """As Progress does it: until it is so, or the deadline, or the session has ended."""
        moments = [at for at in (self.ready_at_ns, deadline_ns, self.ends_at_ns) if at is not None]
        self.now_ns = max(self.now_ns, min(moments))
        return ready()

    def send(self, frame: wire.Waited) -> None:
        self.told_ns.append(frame.waited_ns)

    def send_with_next(self, data: bytes) -> None:
        decoder = wire.Decoder(allow_payload=False)
        decoder.feed(data)
        item = decoder.next_frame()
        assert item is not None
        assert isinstance(item[0], wire.Waited)
        self.told_ns.append(item[0].waited_ns)

    def is_ready(self) -> bool:
        return self.ready_at_ns is not None and self.now_ns >= self.ready_at_ns


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def waiting(core: Core) -> Waiting:
    return Waiting(cast(SessionCore, core), lambda: core.now_ns)


def test_short_waits_are_told_together_and_not_more_often_than_that(core: Core, waiting: Waiting) -> None:
    step_ns = TELL_EVERY_NS // 10
    for number in range(1, 31):
        core.ready_at_ns = core.now_ns + step_ns // 2
        assert waiting.wait_for(core.is_ready, None)
        core.now_ns = number * step_ns  # it computes
    assert len(core.told_ns) <= 3
    waiting.tell(now=True)
    assert sum(core.told_ns) == 30 * step_ns // 2


def test_a_long_wait_is_told_while_it_lasts(core: Core, waiting: Waiting) -> None:
    core.ready_at_ns = 10 * TELL_EVERY_NS
    assert waiting.wait_for(core.is_ready, None)
    assert core.told_ns == [TELL_EVERY_NS] * 10


def test_a_timeout_and_the_end_of_the_session_end_it(core: Core, waiting: Waiting) -> None:
    core.ready_at_ns = None
    assert not waiting.wait_for(core.is_ready, 3 * TELL_EVERY_NS // 2)
    assert core.now_ns == 3 * TELL_EVERY_NS // 2
    core.ends_at_ns = core.now_ns
    assert not waiting.wait_for(core.is_ready, None), "and it doesn't spin"


def test_threads_that_wait_at_once_count_once(core: Core, waiting: Waiting) -> None:
    with waiting:
        core.now_ns += 100
        with waiting:
            core.now_ns += 100
        core.now_ns += 100
    core.now_ns += 1000
    waiting.tell(now=True)
    assert core.told_ns == [300]


def test_threads_of_the_library_count_for_nothing(core: Core, waiting: Waiting) -> None:
    def work() -> None:
        with library_thread(), waiting:
            core.now_ns += 100

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    waiting.tell(now=True)
    assert core.told_ns == []


def test_what_was_waited_while_the_agent_was_away_is_told_to_its_next_life(core: Core, waiting: Waiting) -> None:
    core.away = True
    core.ready_at_ns = 4 * TELL_EVERY_NS
    assert waiting.wait_for(core.is_ready, None)
    assert core.told_ns == []
    core.away = False
    waiting.tell()
    assert core.told_ns == [4 * TELL_EVERY_NS]


def test_an_error_ends_it_too(core: Core, waiting: Waiting) -> None:
    def fails() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        waiting.wait_for(fails, None)
    core.now_ns += 1000
    waiting.tell(now=True)
    assert core.told_ns == []


def test_the_agent_hears_of_it_at_the_end_at_the_latest(agent: FakeAgent, connect: Connect) -> None:
    sender, receiver = connect(agent, 0), connect(agent, 1)
    with pytest.raises(TimeoutError):
        receiver.recv(0, timeout_s=0.05)
    sender.send(b"x", 1)
    receiver.recv(0)
    receiver.close()
    sender.close()
    deadline_s = time.monotonic() + 10
    while not agent.call(lambda: agent.waited_ns[1]):
        assert time.monotonic() < deadline_s, "its good-bye was read, and it said nothing"
    assert agent.waited_ns[1] >= 50_000_000
    assert agent.waited_ns[0] == 0, "a wait for a delivery is none for a message"
