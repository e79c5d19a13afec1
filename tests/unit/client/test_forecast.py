"""What an endpoint is told of messages that are announced only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxyd.wire import client as wire
from proxyd.wire.envelope import Envelope, TransferId
from proxyd_client.forecast import MOST_EARLY, MOST_FORETOLD, PAST_NS, Forecast
from tests.fakes.fake_agent import FakeAgent

from .conftest import Connect

SECOND = 1_000_000_000


def tell(forecast: Forecast, number: int, at_s: float = 1.0, *, src: int = 0, group: str = "", tag: int = 1) -> None:
    forecast.on_foretold(wire.Foretold(number, src, group, tag, 1000, int(at_s * SECOND), 5), 0)


def offer(forecast: Forecast, *, src: int = 0, group: str = "", tag: int = 1, sequence: int = 1) -> int:
    return forecast.offered(TransferId(9, sequence), Envelope("job", src, 1, group, tag, 0, 1000, "", ()))


def first(forecast: Forecast, src: int | None = 0, group: str = "", tag: int = 1, now_ns: int = 0) -> int:
    found = forecast.next(src, group, tag, now_ns)
    return found.number if found is not None else 0


def test_predictions_of_a_channel_are_over_in_the_order_of_its_messages() -> None:
    forecast = Forecast()
    for number in (1, 2, 3):
        tell(forecast, number, number, group="g")
    assert forecast.eta_s(0, "g", 1, SECOND // 4) == 0.75
    found = []
    while number := first(forecast, group="g"):
        found.append(number)
        offer(forecast, group="g")
    assert found == [1, 2, 3]
    offer(forecast, group="g")
    assert len(forecast) == 0


def test_channels_are_apart_and_any_source_takes_the_earliest() -> None:
    forecast = Forecast()
    tell(forecast, 1, 3)
    tell(forecast, 2, 2, src=1)
    tell(forecast, 3, 1, src=2, tag=2)
    assert first(forecast, None) == 2
    assert first(forecast) == 1
    assert first(forecast, tag=2) == 0
    assert forecast.eta_s(None, "other", 1, 0) is None


def test_a_withdrawn_one_ends_wherever_it_stands() -> None:
    forecast = Forecast()
    for number in (1, 2, 3):
        tell(forecast, number)
    tell(forecast, 2, 0)
    tell(forecast, 9, 0)
    offer(forecast)
    assert first(forecast) == 3
    assert len(forecast) == 1


@pytest.mark.parametrize("end", [lambda f: f.lost(0), lambda f: f.clear()])
def test_predictions_end_with_who_made_them(end: Callable[[Forecast], None]) -> None:
    forecast = Forecast()
    tell(forecast, 1)
    end(forecast)
    assert first(forecast) == 0
    assert len(forecast) == 0


def test_one_that_is_long_past_says_nothing() -> None:
    forecast = Forecast()
    tell(forecast, 1, 1)
    tell(forecast, 2, 9)
    assert first(forecast, now_ns=SECOND + PAST_NS) == 1
    assert first(forecast, now_ns=SECOND + PAST_NS + 1) == 2
    assert len(forecast) == 1


def test_an_agent_cannot_fill_the_trainers_memory() -> None:
    forecast = Forecast()
    for number in range(1, MOST_FORETOLD + 5):
        tell(forecast, number, tag=number)
    assert len(forecast) == MOST_FORETOLD
    for sequence in range(MOST_EARLY + 1):
        forecast.expected(TransferId(9, sequence), 7)
    assert offer(forecast, sequence=0) == 0, "the oldest went"
    assert offer(forecast, sequence=1) == 7
    assert offer(forecast, sequence=1) == 0


def test_eta_before_the_message_exists(connect: Connect, agent: FakeAgent) -> None:
    sender, receiver = connect(agent, 0), connect(agent, 1)

    def say(number: int, finish_in_ns: int) -> None:
        agent.tell(1, wire.Foretold(number, 0, "", 8, 1000, finish_in_ns, 1))
        receiver.link_state(0)  # its answer comes behind it

    assert receiver.eta(0, 8) is None
    say(1, 5 * SECOND)
    assert 4 < (receiver.eta(0, 8) or 0) <= 5
    assert 4 < (receiver.eta(None, 8) or 0) <= 5
    assert receiver.eta(0, 9) is None
    say(2, 9 * SECOND)
    assert 4 < (receiver.eta(0, 8) or 0) <= 5
    say(1, 0)
    assert 8 < (receiver.eta(0, 8) or 0) <= 9
    sender.send(b"x", 1, 8, timeout_s=20)
    receiver.link_state(0)
    assert receiver.eta(0, 8) == 0.0
    assert bytes(receiver.recv(0, 8, timeout_s=20).data) == b"x"
    assert receiver.eta(0, 8) is None, "the message of that prediction has come"


def test_the_state_of_a_link_says_how_far_to_trust_it(connect: Connect, agent: FakeAgent) -> None:
    sender, _ = connect(agent, 0), connect(agent, 1)
    assert sender.link_state(1).confidence == 0.75
