"""What a coordinator that was started again says: its epoch, and who is still there."""

from __future__ import annotations

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import MAX_EPOCH, RETURN_NS, CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import ToAgent
from proxyd.core.events import SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Beat, Carried, Directory, EndpointUp, Grant, Report, Request, Welcome
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


def carried(fallback: int, total: int = 40_000_000, **more: int) -> Carried:
    values = {"unsent_bytes": 0, "unsent_rate_bytes_per_s": 0} | more
    return Carried(LINK, fallback, total, **values)  # type: ignore[arg-type]


def pace(life: Life) -> int:
    return life.machine.links_status(life.now_ns)[0].pace_bytes_per_s


def test_what_agents_that_are_not_back_may_send_is_kept_free_and_no_more() -> None:
    life = Life(epoch=500)
    whole = pace(life)
    for session in range(1, 5):
        life.put(SessionOpened(session, AgentHello(AgentName("a", str(session)), session, "a:1", 400)))
    assert pace(life) == whole // 6, "nobody has said anything yet: all may send what they were allowed to"
    for session, left in ((1, 30_000_000), (2, 20_000_000), (3, 10_000_000)):
        life.put(SessionMessage(session, carried(10_000_000)))
        assert pace(life) == max(whole // 6, whole - left)
    life.put(SessionMessage(4, carried(10_000_000)))
    assert pace(life) == whole, "all are back"


def test_who_does_not_come_back_is_waited_for_one_lease() -> None:
    life = Life(epoch=500)
    whole = pace(life)
    life.hello(1, "a", epoch_seen=400)
    life.put(SessionMessage(1, carried(10_000_000)))
    assert pace(life) == whole - 30_000_000
    life.advance(1_000 * MS + 2_000 * MS)
    assert pace(life) == whole


def test_a_returned_agent_keeps_its_rate_should_this_life_end_too() -> None:
    life = Life(epoch=500)
    for session in (1, 2):
        life.put(SessionOpened(session, AgentHello(AgentName("a", str(session)), session, "a:1", 400)))
    assert not [rate for beat in life.heard(1, Beat) for rate in beat.fallback], "not a word of 0: it keeps what it has"
    life.put(SessionMessage(1, carried(10_000_000)))
    life.advance(life.now_ns + 200 * MS)
    first = dict(life.heard(1, Beat)[-1].fallback)
    assert first[LINK] == 10_000_000
    assert not life.heard(2, Beat)[-1].fallback, "30 MB/s of 40 may be in others' hands"
    life.advance(life.now_ns + 2_200 * MS)
    shares = [dict(life.heard(session, Beat)[-1].fallback)[LINK] for session in (1, 2)]
    assert shares[0] == shares[1]
    assert sum(shares) <= 40_000_000


def test_what_the_kernel_still_holds_leaves_before_others_get_the_rest() -> None:
    life = Life(epoch=500)
    for session in (1, 2):
        life.put(SessionOpened(session, AgentHello(AgentName("a", str(session)), session, "a:1", 400)))
    life.put(SessionMessage(1, carried(20_000_000, unsent_bytes=400_000, unsent_rate_bytes_per_s=20_000_000)))
    life.put(SessionMessage(2, carried(20_000_000)))
    whole = pace(life)
    life.put(
        SessionMessage(2, Request(TransferId(2, 1), LINK, AgentName("b", "0"), "j", TrafficClass.PIPELINE, 64 << 20))
    )
    assert {grant.rate_bytes_per_s for grant in life.heard(2, Grant)} == {whole - 20_000_000}
    life.advance(life.now_ns + 21 * MS)
    nbytes = sum(grant.nbytes for grant in life.heard(2, Grant))
    life.put(SessionMessage(2, Report(LINK, nbytes, nbytes, 0, 0, 0, 0, 0, 60 * MS, 60 * MS, 0, 0, True)))
    assert life.heard(2, Grant)[-1].rate_bytes_per_s == whole


def test_a_live_link_begins_with_the_estimate_that_the_last_life_told() -> None:
    config = CoordinatorConfig(links=(LinkSettings(LINK, live=True),))
    for age_ns, least, most in ((5 * MS, 49_000_000, 51_000_000), (3600 * 1000 * MS, 11_000_000, 13_000_000)):
        machine = CoordinatorMachine(config, 500)
        machine.handle(SessionOpened(1, AgentHello(AgentName("a", "0"), 1, "a:1", 400)), 1_000 * MS)
        message = carried(0, 0, estimate_bytes_per_s=50_000_000, estimate_age_ns=age_ns)
        machine.handle(SessionMessage(1, message), 1_001 * MS)
        (status,) = machine.links_status(1_002 * MS)
        assert least <= status.bottleneck_bytes_per_s <= most, "as old as it is"
        later = carried(0, 0, estimate_bytes_per_s=90_000_000, estimate_age_ns=0)
        machine.handle(SessionMessage(1, later), 1_003 * MS)
        assert machine.links_status(1_004 * MS)[0].bottleneck_bytes_per_s <= most, "the first one counts"


def test_a_holder_of_a_lock_succeeds_somebody_and_its_epoch_is_its_fence() -> None:
    links = (LinkSettings(LINK, 50_000_000, 60 * MS, 300_000),)
    machine = CoordinatorMachine(CoordinatorConfig(links=links), 999, fence=41)
    effects = machine.handle(SessionOpened(1, AgentHello(AgentName("a", "0"), 1, "a:1", 90)), 1_000 * MS)
    (welcome,) = [e.message for e in effects if isinstance(e, ToAgent) and isinstance(e.message, Welcome)]
    assert (welcome.epoch, welcome.fence) == (41, 41), "raised by nobody's word"
    (directory,) = [e.message for e in effects if isinstance(e, ToAgent) and isinstance(e.message, Directory)]
    assert not directory.full, "who isn't here yet isn't gone"
