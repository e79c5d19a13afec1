"""The coordinator under random lives: bytes are conserved, windows hold, nothing starves, and liars gain nothing."""

from __future__ import annotations

import random

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import ToAgent
from proxyd.core.events import SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Grant, Report
from proxyd.sim.fluid import FluidSender, FluidWorld
from proxyd.wire.envelope import TrafficClass

LINK = LinkName("hami", "shenzhen")
RTT_NS = 60_000_000
SECOND = 1_000_000_000
LEASE_NS = 2 * SECOND


def make(rng: random.Random, senders: int) -> tuple[FluidWorld, CoordinatorMachine]:
    buffer_bytes = rng.choice([0, 60_000, 300_000, 3_000_000])
    capacity = rng.choice([1_250_000, 12_500_000, 50_000_000, 1_250_000_000])
    settings = LinkSettings(LINK, capacity, rng.choice([0, 5_000_000, RTT_NS]), buffer_bytes, mtu_bytes=9000)
    machine = CoordinatorMachine(CoordinatorConfig(links=(settings,), lease_ns=LEASE_NS), epoch=3)
    fluids = [
        FluidSender(AgentName("hami", f"host{i}"), LINK, settings.rtt_ns, rng.choice([0, 0, 0, capacity // 3]))
        for i in range(senders)
    ]

    def check(now_ns: int) -> None:
        (link,) = machine.status(now_ns, 0).links
        assert link.window_violations == 0
        assert 0 <= link.outstanding_bytes <= link.window_bytes
        assert link.outstanding_bytes == sum(lane.outstanding_bytes for lane in link.lanes)
        assert all(lane.outstanding_bytes >= 0 for lane in link.lanes)
        assert link.granted_rate_bytes_per_s <= link.pace_bytes_per_s, link.lanes

    world = FluidWorld(machine, fluids, control_ns=rng.choice([0, 200_000, 3_000_000]), check=check)
    return world, machine


def garbage(rng: random.Random) -> Report:
    def number() -> int:
        return rng.choice([-1, -(2**63), 0, 1, 2**62, rng.randrange(2**40)])

    return Report(
        LINK,
        number(),
        number(),
        number(),
        number(),
        number(),
        number(),
        number(),
        number(),
        number(),
        number(),
        number(),
        rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_lives(seed: int) -> None:
    """Sends, cancels (also at the moment of grant), stops and repeated reports: invariants hold after every event,
    every transfer of a live sender is granted exactly what it wants, and at the end nothing is outstanding."""
    rng = random.Random(seed)
    world, machine = make(rng, rng.randrange(1, 9))
    wanted: dict[TransferId, int] = {}
    cancelled: set[TransferId] = set()
    dead: set[int] = set()
    world.run(10_000_000)
    (link,) = machine.status(world.now_ns).links
    for _ in range(rng.randrange(20, 60)):
        session = rng.choice(sorted(world.senders))
        kind = rng.random()
        if kind < 0.6 and session not in dead:
            nbytes = rng.choice([1, 65_537, link.chunk_bytes, rng.randrange(1, 40 * link.chunk_bytes)])
            wanted[world.send(session, nbytes, rng.choice(list(TrafficClass)))] = nbytes
        elif kind < 0.85 and wanted:
            # Half of the time one that has just been granted: the grant is on its way.
            recent = [grant.transfer for _, _, grant in world.grants[-3:]]
            pool = recent if recent and rng.random() < 0.5 else sorted(wanted)
            transfer = rng.choice(pool)
            if transfer.incarnation not in dead and transfer not in cancelled:
                cancelled.add(transfer)
                world.cancel(transfer.incarnation, transfer)
        elif kind < 0.9 and len(dead) < len(world.senders) - 1:
            dead.add(session)
            if rng.random() < 0.5:
                world.close(session)
            else:
                world.senders[session].frozen = True  # hangs: neither sends, nor reports, nor goes away
        elif session not in dead:
            report = world.senders[session].report(world.now_ns)
            for delay_ns in (0, rng.randrange(SECOND)):  # twice, the second one late
                world.at(
                    world.now_ns + delay_ns,
                    lambda s=session, r=report: world._deliver(SessionMessage(s, r)),  # type: ignore[misc]
                )
        world.run(world.now_ns + rng.choice([0, 1_000_000, 20_000_000, 300_000_000]))
    world.run(world.now_ns + 400 * SECOND)

    granted: dict[TransferId, int] = {}
    for _, session, grant in world.grants:
        assert grant.transfer.incarnation == session
        granted[grant.transfer] = granted.get(grant.transfer, 0) + grant.nbytes
    (link,) = machine.status(world.now_ns).links
    for session, sender in world.senders.items():
        if session in dead:
            continue
        assert sender.granted_bytes == sender.left_bytes + sender.returned_bytes  # nothing lost, nothing twice
        for transfer, nbytes in wanted.items():
            if transfer.incarnation == session and transfer not in cancelled:
                again = sender.wanted_bytes[transfer] - nbytes  # expired and asked for anew
                assert granted[transfer] == nbytes + again, f"{transfer} waits: {machine.why(transfer)}"
    assert link.outstanding_bytes == 0
    waiting_dead = [t for t in machine.status(world.now_ns).links[0].transfers if t.transfer.incarnation not in dead]
    assert not waiting_dead


@pytest.mark.parametrize("seed", range(30))
def test_liars_gain_nothing(seed: int) -> None:
    """One agent's reports are garbage. The window holds, and honest senders get all they want."""
    rng = random.Random(seed)
    world, machine = make(rng, 3)
    world.run(10_000_000)
    (link,) = machine.status(world.now_ns).links
    sizes = {}
    for _ in range(6):
        for session in world.senders:
            nbytes = rng.randrange(1, 20 * link.chunk_bytes)
            sizes[world.send(session, nbytes)] = nbytes
        for _ in range(10):
            world._deliver(SessionMessage(1, garbage(rng)))
            world.run(world.now_ns + rng.choice([0, 5_000_000]))
    world.run(world.now_ns + 100 * SECOND)
    (link,) = machine.status(world.now_ns).links
    assert link.totals.clamped_reports > 0
    assert link.outstanding_bytes == 0
    for transfer, nbytes in sizes.items():
        if transfer.incarnation != 1:
            got = sum(grant.nbytes for _, _, grant in world.grants if grant.transfer == transfer)
            assert got >= nbytes


def test_a_dead_waiter_frees_the_link_within_one_lease() -> None:
    """A sender hangs with the whole link in its hands. The next one starts within a lease, and nothing stays
    outstanding."""
    for closes in (False, True):
        settings = LinkSettings(LINK, 50_000_000, RTT_NS, 300_000, mtu_bytes=9000)
        machine = CoordinatorMachine(CoordinatorConfig(links=(settings,), lease_ns=LEASE_NS), epoch=1)
        senders = [FluidSender(AgentName("hami", f"host{i}"), LINK, RTT_NS) for i in range(2)]
        world = FluidWorld(machine, senders)
        world.run(100_000_000)
        world.send(1, 64 << 20)
        world.run(200_000_000)
        world.send(2, 8 << 20)
        world.run(300_000_000)
        if closes:
            world.close(1)
        else:
            world.senders[1].frozen = True
        died_ns = world.now_ns
        world.run(died_ns + 10 * SECOND)
        first_ns = next(issued_ns for issued_ns, session, _ in world.grants if session == 2)
        assert first_ns - died_ns < LEASE_NS // 2
        (link,) = machine.status(world.now_ns).links
        assert link.outstanding_bytes == 0
        assert senders[1].left_bytes == 8 << 20


def test_bulk_does_not_starve_behind_endless_pipeline_traffic() -> None:
    """Pipeline messages keep the link full for ten seconds; a bulk transfer still gets about 5 % of it."""
    settings = LinkSettings(LINK, 50_000_000, RTT_NS, 300_000, mtu_bytes=9000)
    machine = CoordinatorMachine(CoordinatorConfig(links=(settings,)), epoch=1)
    senders = [FluidSender(AgentName("hami", f"host{i}"), LINK, RTT_NS) for i in range(3)]
    world = FluidWorld(machine, senders)
    world.run(100_000_000)
    bulk = world.send(3, 1 << 30, TrafficClass.BULK)
    begin_ns = world.now_ns
    while world.now_ns < begin_ns + 10 * SECOND:
        if machine.waiting < 4:
            world.send(1, 4 << 20)
            world.send(2, 4 << 20)
        world.run(world.now_ns + 10_000_000)
    got = sum(grant.nbytes for _, _, grant in world.grants if grant.transfer == bulk)
    all_granted = sum(grant.nbytes for _, _, grant in world.grants)
    assert 0.03 < got / all_granted < 0.08
    (link,) = machine.status(world.now_ns).links
    assert link.totals.starvation_turns > 5
    assert all_granted > 0.9 * link.pace_bytes_per_s * 10  # the turns cost little


def test_replay_is_exact() -> None:
    """The same events give the same effects, whatever the process's hash seed did to the order of sets."""
    runs: list[list[object]] = []
    for _ in range(2):
        rng = random.Random(5)
        machine = CoordinatorMachine(
            CoordinatorConfig(links=(LinkSettings(LINK, 50_000_000, RTT_NS, 300_000),)), epoch=1
        )
        seen: list[object] = []
        for session in range(1, 6):
            hello = AgentHello(AgentName("hami", f"h{session}"), 1, "10.0.0.1:7500")
            seen += machine.handle(SessionOpened(session, hello), session)
        for step in range(300):
            session = rng.randrange(1, 6)
            seen += machine.handle(SessionMessage(session, garbage(rng)), 1000 + step * 1_000_000)
            seen += machine.handle(TimePassed(), 1000 + step * 1_000_000)
        runs.append(seen)
    assert runs[0] == runs[1]
    assert not [e for e in runs[0] if isinstance(e, ToAgent) and isinstance(e.message, Grant)]
