"""Shadow mode: what is reckoned, and that it never touches what really happens."""

from __future__ import annotations

import dataclasses

import pytest

from proxyd.core import shadow as module
from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.events import CoordinatorEvent, SessionClosed, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, AgentMessage, CancelRequest, Grant, Report, Request, TransferDone, Welcome
from proxyd.core.shadow import Distribution, ShadowStatus, bound_ns
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000
AB = LinkName("a", "b")
RATE = 50_000_000
RTT_NS = 40 * MS
SETTINGS = LinkSettings(AB, RATE, RTT_NS, 400_000, mtu_bytes=9000, observe=True)
NBYTES = 4_000_000
SENDING_NS = NBYTES * 1_000_000_000 // SETTINGS.payload_bytes_per_s


class Observed:
    """A machine with two agents at a, told what happens on an observed link."""

    def __init__(self, settings: LinkSettings = SETTINGS) -> None:
        self.machine = CoordinatorMachine(CoordinatorConfig(links=(settings,)), epoch=1)
        self.effects: list[CoordinatorEffect] = []
        self.now_ns = 0
        for session in (1, 2):
            self.handle(SessionOpened(session, AgentHello(AgentName("a", f"h{session}"), session, "10.0.0.1:7500")))

    def handle(self, event: CoordinatorEvent) -> None:
        self.effects += self.machine.handle(event, self.now_ns)

    def say(self, session: int, message: AgentMessage) -> None:
        self.handle(SessionMessage(session, message))

    def run(self, until_ns: int) -> None:
        while (due_ns := self.machine.next_deadline_ns()) is not None and due_ns <= until_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.handle(TimePassed())
        self.now_ns = until_ns

    def ask(self, session: int, number: int, nbytes: int = NBYTES) -> None:
        transfer = TransferId(session, number)
        self.say(session, Request(transfer, AB, AgentName("b", "x"), "job", TrafficClass.PIPELINE, nbytes))

    def done(self, session: int, number: int, *, ok: bool = True) -> None:
        self.say(session, TransferDone(TransferId(session, number), AB, TrafficClass.PIPELINE, NBYTES, ok, 0))

    @property
    def shadow(self) -> ShadowStatus:
        [link] = [link for link in self.machine.links_status(self.now_ns) if link.link == AB]
        assert link.shadow is not None
        return link.shadow


def test_agents_are_told_to_go_at_once_and_nothing_is_granted() -> None:
    observed = Observed()
    observed.ask(1, 1)
    observed.run(2000 * MS)
    messages = [effect.message for effect in observed.effects if isinstance(effect, ToAgent)]
    assert [info.observe for m in messages if isinstance(m, Welcome) for info in m.links] == [True, True]
    assert not [message for message in messages if isinstance(message, Grant)]
    [link] = [link for link in observed.machine.links_status(observed.now_ns) if link.link == AB]
    assert (link.totals.grants, link.outstanding_bytes, link.waiting) == (0, 0, 0)
    assert observed.machine.audit(observed.now_ns) == ""


def test_two_at_once_would_have_gone_one_after_the_other() -> None:
    observed = Observed()
    observed.ask(1, 1)
    observed.ask(2, 1)
    observed.run(300 * MS)
    for session in (1, 2):
        observed.done(session, 1)
    observed.run(2000 * MS)
    [found] = observed.shadow.classes
    assert found.real.count == found.shadow.count == found.wait.count == 2
    assert found.real.mean_ns == 300 * MS
    expected_ns = SENDING_NS * 3 // 2 / 0.98 + RTT_NS
    assert found.shadow.mean_ns == pytest.approx(expected_ns, rel=0.05)
    assert found.wait.most_ns == pytest.approx(SENDING_NS / 0.98, rel=0.1)
    assert observed.shadow.shadow_queue.most_ns < 10 * MS
    assert (observed.shadow.open, observed.shadow.behind) == (0, 0)


def test_it_waits_for_whichever_way_is_slower() -> None:
    observed = Observed()
    observed.ask(1, 1)
    observed.run(10 * MS)
    observed.done(1, 1)
    assert not observed.shadow.classes
    assert (observed.shadow.open, observed.shadow.behind) == (0, 1)
    observed.run(1000 * MS)
    assert observed.shadow.classes[0].shadow.count == 1
    observed.ask(1, 2)
    observed.run(3000 * MS)
    assert (observed.shadow.open, observed.shadow.behind) == (1, 0)
    observed.done(1, 2)
    assert observed.shadow.classes[0].real.count == 2


@pytest.mark.parametrize("how", ["failed", "cancelled", "session"])
def test_what_did_not_end_well_is_not_judged(how: str) -> None:
    observed = Observed()
    observed.ask(1, 1)
    observed.ask(2, 1)
    observed.run(30 * MS)
    if how == "failed":
        observed.done(1, 1, ok=False)
    elif how == "cancelled":
        observed.say(1, CancelRequest(TransferId(1, 1), "test"))
    else:
        observed.handle(SessionClosed(1, "gone"))
    observed.run(200 * MS)
    observed.done(2, 1)
    observed.run(2000 * MS)
    [found] = observed.shadow.classes
    assert found.real.count == 1
    if how != "session":  # a vanished agent's grants bind for a while, in the shadow as in reality
        assert found.shadow.mean_ns < SENDING_NS + RTT_NS + 60 * MS
    assert (observed.shadow.open, observed.shadow.behind) == (0, 0)


def test_chunks_that_were_lost_are_not_asked_for_in_the_shadow() -> None:
    observed = Observed()
    observed.ask(1, 1)
    observed.run(20 * MS)
    observed.ask(1, 1, NBYTES + 1_000_000)
    observed.run(1000 * MS)
    observed.done(1, 1)
    [found] = observed.shadow.classes
    assert found.shadow.mean_ns == pytest.approx(SENDING_NS / 0.98 + RTT_NS, rel=0.06)


def test_a_shadow_that_cannot_keep_up_forgets_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BEHIND", 5)
    observed = Observed()
    for number in range(1, 21):
        observed.ask(1, number)
        observed.run(observed.now_ns + MS)
        observed.done(1, number)
    assert (observed.shadow.behind, observed.shadow.abandoned) == (5, 15)
    observed.run(10_000 * MS)
    assert observed.shadow.behind == 0


def report(left: int, delivered: int, srtt_ns: int, retransmits: int = 0) -> Report:
    return Report(
        AB, 0, 0, 0, 0, 0, 0, 0, srtt_ns, RTT_NS, retransmits, 0, True,
        observed_left_bytes=left, observed_delivered_bytes=delivered,
    )  # fmt: skip


def test_the_real_queue_is_what_reports_show() -> None:
    observed = Observed()
    observed.ask(1, 1)
    for number in range(1, 101):
        observed.run(number * 5 * MS)
        observed.say(1, report(number * 250_000, max(0, number - 8) * 250_000, RTT_NS + 12 * MS, retransmits=number))
    assert observed.shadow.real_queue.count == 100
    assert observed.shadow.real_queue.mean_ns == pytest.approx(12 * MS, rel=0.01)
    [link] = [link for link in observed.machine.links_status(observed.now_ns) if link.link == AB]
    assert link.totals.retransmits == 100


def test_a_live_link_is_found_from_what_is_observed() -> None:
    settings = dataclasses.replace(SETTINGS, capacity_bytes_per_s=0, rtt_ns=0, buffer_bytes=0, live=True)
    observed = Observed(settings)
    observed.ask(1, 1, 400_000_000)
    for number in range(1, 401):
        observed.run(number * 5 * MS)
        observed.say(1, report(number * 250_000, max(0, number - 12) * 250_000, RTT_NS + 20 * MS))
    [link] = [link for link in observed.machine.links_status(observed.now_ns) if link.link == AB]
    assert link.bottleneck_bytes_per_s == pytest.approx(RATE, rel=0.1)


def test_unconfigured_links_are_observed_when_the_coordinator_says_so() -> None:
    for observe in (True, False):
        machine = CoordinatorMachine(CoordinatorConfig(observe=observe), epoch=1)
        for session, site in enumerate("ab", 1):
            machine.handle(SessionOpened(session, AgentHello(AgentName(site, "h"), session, "10.0.0.1:7500")), 0)
        assert [link.shadow is not None for link in machine.links_status(0)] == [observe, observe]


def test_a_distribution() -> None:
    found = Distribution()
    assert (found.mean_ns, found.percentile_ns(0.5)) == (0, 0)
    for milliseconds in range(1, 1001):
        found.add(milliseconds * MS)
    assert found.mean_ns == 500_500_000
    assert found.most_ns == 1000 * MS
    for share in (0.1, 0.5, 0.9, 0.99, 1.0):
        assert found.percentile_ns(share) == pytest.approx(share * 1000 * MS, rel=0.03)
    found.add(-5)
    found.add(10**18)
    assert found.counts[0] == 2
    assert found.counts[-1] == 1
    assert sum(found.counts) == found.count == 1002
    assert bound_ns(8) == 2 * bound_ns(0)
