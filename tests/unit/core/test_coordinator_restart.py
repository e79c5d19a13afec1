"""What a coordinator that was started again says: its epoch, and who is still there."""

from __future__ import annotations

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import MAX_EPOCH, RETURN_NS, CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import ToAgent
from proxyd.core.events import SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Directory, EndpointUp, Grant, Request, Welcome
from proxyd.wire.envelope import TrafficClass

LINK = LinkName("a", "b")
MS = 1_000_000


class Life:
    """One life of a coordinator, and what it said to whom."""

    def __init__(self, epoch: int) -> None:
        links = (LinkSettings(LINK, 50_000_000, 60 * MS, 300_000),)
        self.machine = CoordinatorMachine(CoordinatorConfig(links=links), epoch)
        self.said: list[tuple[int, object]] = []
        self.now_ns = 1_000 * MS

    def put(self, event: SessionOpened | SessionMessage | TimePassed) -> None:
        for effect in self.machine.handle(event, self.now_ns):
            if isinstance(effect, ToAgent):
                self.said.append((effect.session, effect.message))

    def hello(self, session: int, site: str, epoch_seen: int) -> Welcome:
        self.put(SessionOpened(session, AgentHello(AgentName(site, "0"), session, f"{site}:1", epoch_seen)))
        return self.heard(session, Welcome)[-1]

    def heard(self, session: int, kind: type) -> list:
        return [message for to, message in self.said if to == session and isinstance(message, kind)]

    def advance(self, end_ns: int) -> None:
        while (due_ns := self.machine.next_deadline_ns()) is not None and due_ns <= end_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.put(TimePassed())
        self.now_ns = end_ns


def test_an_epoch_that_the_clock_let_fall_is_raised_above_what_was_seen() -> None:
    life = Life(epoch=500)
    assert life.hello(1, "a", epoch_seen=900).epoch == 901
    assert life.hello(2, "b", epoch_seen=900).epoch == 901
    life.put(
        SessionMessage(1, Request(TransferId(1, 1), LINK, AgentName("b", "0"), "j", TrafficClass.PIPELINE, 1 << 20))
    )
    assert {grant.epoch for grant in life.heard(1, Grant)} == {901}


def test_an_epoch_that_meets_its_earlier_life_exactly_is_raised_too() -> None:
    assert Life(epoch=900).hello(1, "a", epoch_seen=900).epoch == 901


def test_an_epoch_that_somebody_has_heard_stays() -> None:
    life = Life(epoch=500)
    assert life.hello(1, "a", epoch_seen=0).epoch == 500
    assert life.hello(2, "b", epoch_seen=900).epoch == 500
    assert life.hello(3, "a", epoch_seen=500).epoch == 500, "its own session broke, and it is back"


def test_an_epoch_does_not_follow_into_what_cannot_be_counted() -> None:
    assert Life(epoch=500).hello(1, "a", epoch_seen=MAX_EPOCH).epoch == 500


def test_who_is_not_back_yet_is_not_called_gone() -> None:
    life = Life(epoch=500)
    life.hello(1, "a", epoch_seen=400)
    assert [directory.full for directory in life.heard(1, Directory)] == [False]
    life.advance(life.now_ns + 2_400 * MS)
    life.hello(2, "b", epoch_seen=400)
    endpoint = EndpointName("job", 1)
    life.put(SessionMessage(2, EndpointUp(endpoint, 101)))
    life.advance(1_000 * MS + RETURN_NS - MS)
    assert not any(directory.full for directory in life.heard(1, Directory))
    life.advance(1_000 * MS + RETURN_NS)
    whole = life.heard(1, Directory)[-1]
    assert whole.full
    assert [entry.endpoint for entry in whole.entries] == [endpoint]


def test_a_coordinator_that_starts_for_the_first_time_knows_all_there_is() -> None:
    life = Life(epoch=500)
    life.hello(1, "a", epoch_seen=0)
    assert [directory.full for directory in life.heard(1, Directory)] == [True]
