"""The coordinator is away: killed, or stopped; for ten minutes, or to be replaced; for all agents, or for one."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from proxyd.core.coordinator import CoordinatorMachine
from proxyd.core.events import CoordinatorLost
from proxyd.core.ids import AgentName, EndpointName, LinkName
from proxyd.sim.link import LinkCounts
from proxyd.sim.scenario import COORDINATOR, JOB, Run, load_scenario
from proxyd.sim.scenario_file import Scenario
from proxyd.sim.world import World

pytestmark = pytest.mark.faults

SCENARIO = load_scenario(Path(__file__).parents[1] / "scenarios" / "coordinator_restarts.toml")
MS, SECOND = 1_000_000, 1_000_000_000
AWAY_NS = 600 * SECOND
KILLED_NS = 1_200 * MS
MIB = 1 << 20
RATE_BYTES_PER_S = 100_000_000 // 8
EACH = 25
"""Messages of each of the four senders at a time: a hundred."""


def hundred(at_ns: int, nbytes: int = MIB, *, again: bool = False) -> Scenario:
    """A hundred messages at once, and (``again``) another hundred a moment before the coordinator is back."""
    (burst,) = SCENARIO.bursts
    one = dataclasses.replace(burst, at_ns=at_ns, size_bytes=nbytes, times=1, gap_ns=0)
    second = dataclasses.replace(one, at_ns=KILLED_NS + AWAY_NS - 2 * SECOND)
    bursts = (one,) * EACH + (second,) * EACH * again
    return dataclasses.replace(SCENARIO, bursts=bursts, faults=(), expect={}, duration_ns=AWAY_NS + 60 * SECOND)


class Watch:
    """The link's counters every 10 ms."""

    def __init__(self, run: Run) -> None:
        self.run, self.link = run, run.world.link("hami", "shenzhen")
        self.samples: list[tuple[LinkCounts, bool]] = []
        self._look()

    def _look(self) -> None:
        pending = any(not fate.settled for fate in self.run.world.fates.values())
        self.samples.append((self.link.counts(), pending))
        self.run.world.clock.after(10 * MS, self._look)

    def longest_stall_ns(self) -> int:
        """The longest time without a byte while messages were pending."""
        longest = since = 0
        for (before, _), (now, pending) in zip(self.samples, self.samples[1:], strict=False):
            if not pending or now.carried_bytes > before.carried_bytes:
                since = now.time_ns
            longest = max(longest, now.time_ns - (since or now.time_ns))
        return longest

    def most_in(self, span_ns: int, from_ns: int, until_ns: int) -> float:
        """The most that was offered within any such span, as a part of what the link carries."""
        inside = [counts for counts, _ in self.samples if from_ns <= counts.time_ns <= until_ns]
        steps = span_ns // (10 * MS)
        most = max(b.offered_bytes - a.offered_bytes for a, b in zip(inside, inside[steps:], strict=False))
        return most * SECOND / (span_ns * RATE_BYTES_PER_S)

    def dropped(self, from_ns: int, until_ns: int) -> int:
        """Our bytes that the gateway dropped meanwhile."""
        inside = [counts for counts, _ in self.samples if from_ns <= counts.time_ns <= until_ns]
        return inside[-1].dropped_bytes - inside[0].dropped_bytes


def restart(run: Run, machine_epoch: int, address: str = COORDINATOR) -> None:
    run.world.start_coordinator(address, run._config, machine_epoch)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_hundred_transfers_outlive_ten_minutes_without_a_coordinator(how: str) -> None:
    run = Run(hundred(1 * SECOND, again=True), 0)
    world, watch = run.world, Watch(run)
    before_kill: list[int] = []
    if how == "killed":
        world.clock.at(KILLED_NS, lambda: world.coordinators[COORDINATOR].kill("killed"))
        world.clock.at(KILLED_NS + AWAY_NS, partial(restart, run, 2))
    else:
        world.clock.at(KILLED_NS, lambda: world.coordinators[COORDINATOR].pause(AWAY_NS))
    world.clock.at(KILLED_NS, lambda: before_kill.append(sum(f.settled for f in world.fates.values())))
    result = run.result()
    assert before_kill[0] < 50, "most of them were under way when it died"
    assert (result.messages, result.delivered, result.failed) == (8 * EACH, 8 * EACH, 0)
    assert result.fallback_bytes > 90 * MIB, "without grants they went at the fallback rate"
    assert watch.longest_stall_ns() <= SECOND
    back_ns = KILLED_NS + AWAY_NS
    # Alone: 0.8 of the link, and nobody more. Back: no burst, though a hundred messages wait.
    assert watch.most_in(SECOND, KILLED_NS + SECOND, back_ns) <= 0.85
    assert watch.most_in(100 * MS, back_ns - SECOND, back_ns + 5 * SECOND) <= 1.03
    assert watch.dropped(KILLED_NS + SECOND, back_ns + 10 * SECOND) == 0
    assert world.coordinators[COORDINATOR].machine.waiting == 0


def settled_ns(run: Run, back_ns: int) -> int:
    """How long after its return the coordinator granted the whole pace again."""
    machine, clock = run.world.coordinators[COORDINATOR].machine, run.world.clock
    clock.run(back_ns)
    machine = run.world.coordinators[COORDINATOR].machine
    while clock.now_ns < back_ns + 4 * SECOND:
        clock.run(clock.now_ns + 10 * MS)
        status = next(link for link in machine.links_status(clock.now_ns) if link.link.src_site == "hami")
        if machine.status(clock.now_ns).agents and status.pace_bytes_per_s > 0.97 * status.bottleneck_bytes_per_s:
            return clock.now_ns - back_ns
    raise AssertionError("it never did")


def test_a_restarted_coordinator_has_the_whole_link_as_soon_as_all_agents_are_back() -> None:
    """They say what they were allowed to send without it: what those still away may send is kept free, no more."""
    for seed in range(3):
        run = Run(hundred(1 * SECOND, 4 * MIB), seed)
        back_ns = KILLED_NS + SECOND
        run.world.clock.at(KILLED_NS, lambda run=run: run.world.coordinators[COORDINATOR].kill("killed"))  # type: ignore[misc]
        run.world.clock.at(back_ns, partial(restart, run, 2))
        watch = Watch(run)
        last_dial_ns = 1_010 * MS
        assert settled_ns(run, back_ns) <= last_dial_ns + 100 * MS, "half of the lease that it took before"
        run.world.clock.run(back_ns + 4 * SECOND)
        assert watch.dropped(back_ns, back_ns + 4 * SECOND) == 0
        assert watch.most_in(100 * MS, back_ns, back_ns + 4 * SECOND) <= 1.03


def test_an_agent_that_never_returns_holds_its_part_back_for_one_lease() -> None:
    run = Run(hundred(1 * SECOND, 4 * MIB), 0)
    back_ns = KILLED_NS + SECOND
    world = run.world
    world.clock.at(KILLED_NS, lambda: world.coordinators[COORDINATOR].kill("killed"))
    world.clock.at(KILLED_NS + 100 * MS, lambda: world.kill_agent(AgentName("hami", "host3")))
    world.clock.at(back_ns, partial(restart, run, 2))
    took_ns = settled_ns(run, back_ns)
    assert 1_900 * MS <= took_ns <= 3_000 * MS, "from the return of the first one on"


class Cut:
    """Cuts one agent off from the coordinator, both ways, and heals it; over the WAN it is reached as before."""

    def __init__(self, world: World, agent: AgentName) -> None:
        self.world, self.agent = world, agent
        self._send, self._said = world.to_coordinator, world.said
        self.on = False
        world.to_coordinator = self.to_coordinator  # type: ignore[method-assign,assignment]
        world.said = self.said  # type: ignore[method-assign,assignment]

    def to_coordinator(self, host, address, message) -> None:  # type: ignore[no-untyped-def]
        if not (self.on and host.name == self.agent):
            self._send(host, address, message)

    def said(self, host, address, session, message) -> None:  # type: ignore[no-untyped-def]
        if not (self.on and host.name == self.agent):
            self._said(host, address, session, message)

    def noticed(self, *, tell: bool = True) -> None:
        """Seven seconds later pings have found out, on both sides; ``tell``: also the agent, which runs."""
        world, host = self.world, self.world.hosts[self.agent]
        key = (host.name, host.incarnation, COORDINATOR)
        session = world._sessions.pop(key)
        world.coordinators[COORDINATOR].lost(session, "ping timeout")
        if tell:
            host.emit(CoordinatorLost(COORDINATOR, "ping timeout"))

    def heal(self) -> None:
        """It dials again."""
        self.on = False
        self.world._connect(self.world.hosts[self.agent], COORDINATOR, 500 * MS)


def test_one_agent_cut_off_from_the_coordinator_alone() -> None:
    """It goes on at its fallback rate for a minute, which stays reserved for as long; the others get the rest."""
    run = Run(hundred(1 * SECOND, 8 * MIB), 0)
    world, watch = run.world, Watch(run)
    cut = Cut(world, AgentName("hami", "host3"))
    cut_ns, healed_ns = 3 * SECOND, 63 * SECOND
    world.clock.at(cut_ns, lambda: setattr(cut, "on", True))
    world.clock.at(cut_ns + 7 * SECOND, cut.noticed)
    world.clock.at(healed_ns, cut.heal)
    world.clock.run(cut_ns)
    machine = world.coordinators[COORDINATOR].machine
    share = next(r for link, r in _fallback_of(world, "host3") if link.src_site == "hami")
    assert share == pytest.approx(0.2 * RATE_BYTES_PER_S, rel=0.06)
    world.clock.run(cut_ns + 2_500 * MS)
    granted = _granted(machine)
    sent = _fallback_bytes(world, "host3")
    for until_ns in range(cut_ns + 3_500 * MS, healed_ns, SECOND):
        world.clock.run(until_ns)
        # Its slots were reclaimed, its rate is kept free, and the others get 95 % of the rest and more.
        granted, before = _granted(machine), granted
        sent, sent_before = _fallback_bytes(world, "host3"), sent
        own = sent - sent_before
        assert own == pytest.approx(share, rel=0.05)
        pace = next(link for link in machine.links_status(until_ns) if link.link.src_site == "hami").pace_bytes_per_s
        assert granted - before >= 0.95 * (pace - share), f"at {until_ns / 1e9:.1f} s"
        assert granted - before + own <= 1.01 * pace
    assert any(entry.endpoint == EndpointName(JOB, 3) for entry in machine.status(world.clock.now_ns).endpoints)
    world.clock.run(healed_ns + 5 * SECOND)
    assert watch.dropped(cut_ns + 600 * MS, healed_ns + 5 * SECOND) == 0
    assert watch.most_in(100 * MS, cut_ns + 600 * MS, healed_ns + 5 * SECOND) <= 1.03
    result = run.result()
    assert (result.delivered, result.failed) == (4 * EACH, 0)


def _fallback_of(world: World, name: str) -> list[tuple[LinkName, int]]:
    books = world.hosts[AgentName("hami", name)].machine.sender.asking.links
    return [(link, book.fallback_rate_bytes_per_s) for link, book in books.items()]


def _fallback_bytes(world: World, name: str) -> int:
    return sum(one.fallback_bytes for one in world.hosts[AgentName("hami", name)].machine.status(0).links)


def _granted(machine: CoordinatorMachine) -> int:
    link = next(link for link in machine.links_status(0) if link.link.src_site == "hami")
    return link.totals.delivered_bytes


def test_a_dead_agent_that_nobody_sees_holds_its_part_back_for_one_lease() -> None:
    run = Run(hundred(1 * SECOND, 8 * MIB), 0)
    world = run.world
    world.clock.at(3 * SECOND, lambda: world.kill_agent(AgentName("hami", "host3")))
    world.clock.run(3 * SECOND + 1_900 * MS)
    machine = world.coordinators[COORDINATOR].machine
    assert _reserved(machine, world.clock.now_ns) > 0
    world.clock.run(3 * SECOND + 2_100 * MS)
    assert _reserved(machine, world.clock.now_ns) == 0


def _reserved(machine: CoordinatorMachine, now_ns: int) -> int:
    return sum(lane.reserve_bytes_per_s for link in machine.links_status(now_ns) for lane in link.lanes)


def test_an_agent_that_stands_still_for_thirty_seconds_catches_nothing_up() -> None:
    """SIGSTOP: its session is lost after seven, its slots and its rate go to the others, and it comes back."""
    run = Run(hundred(1 * SECOND, 8 * MIB), 0)
    world, watch = run.world, Watch(run)
    stopped_ns, resumed_ns = 3 * SECOND, 33 * SECOND
    host = world.hosts[AgentName("hami", "host3")]
    cut = Cut(world, host.name)
    world.clock.at(stopped_ns, lambda: host.pause(resumed_ns - stopped_ns))
    world.clock.at(stopped_ns + 7 * SECOND, lambda: cut.noticed(tell=False))
    world.clock.at(resumed_ns + 1, lambda: host.emit(CoordinatorLost(COORDINATOR, "broken pipe")))
    world.clock.at(resumed_ns + 1, cut.heal)
    world.clock.run(resumed_ns)
    result = run.result()
    assert (result.delivered, result.failed) == (4 * EACH, 0)
    # 0.98 of the link in each second, but for the slots that the stopped one took with it, and its fallback rate while
    # it is not known whether it sends by itself. Its peers see its connections for as long as it stands still.
    for second in range(1, 60):
        from_ns = 2 * SECOND + second * SECOND
        rate = watch.most_in(SECOND, from_ns, from_ns + SECOND)
        if from_ns < stopped_ns or from_ns > resumed_ns + 2 * SECOND:
            assert rate == pytest.approx(0.985, rel=0.1), f"in second {from_ns / 1e9:.0f}"
        elif from_ns > stopped_ns + 2 * SECOND:
            assert rate >= 0.95 * 0.78, f"in second {from_ns / 1e9:.0f}"
    assert watch.most_in(100 * MS, stopped_ns, resumed_ns + 10 * SECOND) <= 1.03
    assert watch.dropped(stopped_ns, resumed_ns + 10 * SECOND) == 0
