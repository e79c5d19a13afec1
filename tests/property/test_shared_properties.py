"""Links that share a line, under random lives: over all of them together window and rate hold after every event, and
nobody starves."""

from __future__ import annotations

import random

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.policy import BottleneckSettings
from proxyd.sim.fluid import FluidSender, FluidWorld
from proxyd.wire.envelope import TrafficClass

RTT_NS = 60_000_000
SECOND = 1_000_000_000
LEASE_NS = 2 * SECOND
TOLERANCE = 1.07
"""What isn't worth a word to the agents, and a pace that has just moved."""


def make(rng: random.Random) -> tuple[FluidWorld, CoordinatorMachine]:
    line = rng.choice([2_500_000, 12_500_000, 125_000_000])
    links = tuple(
        LinkSettings(
            LinkName("a", to),
            int(line * rng.choice([0.3, 1, 1, 4])),
            RTT_NS,
            line // 100,
            mtu_bytes=9000,
            live=rng.random() < 0.5,
        )
        for to in rng.choice(["bc", "bcd"])
    )
    known = rng.choice([line, line, 0])
    shared = [BottleneckSettings("a", True, known, rng.choice([0, line // 2]))]
    if rng.random() < 0.5:
        shared.append(BottleneckSettings("b", False, line // 2))
    config = CoordinatorConfig(links=links, lease_ns=LEASE_NS, bottlenecks=tuple(shared))
    machine = CoordinatorMachine(config, epoch=3)
    fluids = [
        FluidSender(AgentName("a", f"host{i}"), links[i % len(links)].link, RTT_NS, rng.choice([0, 0, 0, line // 5]))
        for i in range(rng.randrange(2, 9))
    ]

    def check(now_ns: int) -> None:
        status = machine.status(now_ns, 0)
        assert machine.audit(now_ns) == ""
        by_name = {link.link: link for link in status.links}
        for one in status.bottlenecks:
            crossing = [by_name[name] for name, _ in one.links]
            outstanding = sum(link.outstanding_bytes for link in crossing)
            assert outstanding == one.outstanding_bytes <= one.window_bytes
            assert one.window_violations == 0
            rate = sum(lane.rate_bytes_per_s for link in crossing for lane in link.lanes if not lane.leaving)
            assert rate <= TOLERANCE * one.pace_bytes_per_s, (one, now_ns)

    world = FluidWorld(machine, fluids, control_ns=rng.choice([0, 200_000, 3_000_000]), check=check)
    return world, machine


@pytest.mark.parametrize("seed", range(16))
def test_random_lives_over_a_shared_line(seed: int) -> None:
    rng = random.Random(seed)
    world, machine = make(rng)
    wanted: dict[TransferId, int] = {}
    cancelled: set[TransferId] = set()
    dead: set[int] = set()
    world.run(10_000_000)
    for _ in range(rng.randrange(20, 50)):
        session = rng.choice(sorted(world.senders))
        kind = rng.random()
        if kind < 0.7 and session not in dead:
            nbytes = rng.choice([1, 65_537, rng.randrange(1, 8 << 20)])
            wanted[world.send(session, nbytes, rng.choice(list(TrafficClass)))] = nbytes
        elif kind < 0.85 and wanted:
            transfer = rng.choice(sorted(wanted))
            if transfer.incarnation not in dead and transfer not in cancelled:
                cancelled.add(transfer)
                world.cancel(transfer.incarnation, transfer)
        elif kind < 0.9 and len(dead) < len(world.senders) - 1:
            dead.add(session)
            if rng.random() < 0.5:
                world.close(session)
            else:
                world.senders[session].frozen = True
        world.run(world.now_ns + rng.choice([0, 1_000_000, 20_000_000, 300_000_000]))
    # A frozen sender whose session stands is granted what it asked for once, one lease after the other.
    world.run(world.now_ns + 1200 * SECOND)

    granted: dict[TransferId, int] = {}
    for _, _, grant in world.grants:
        granted[grant.transfer] = granted.get(grant.transfer, 0) + grant.nbytes
    for session, sender in world.senders.items():
        if session in dead:
            continue
        for transfer, nbytes in wanted.items():
            if transfer.incarnation == session and transfer not in cancelled:
                again = sender.wanted_bytes[transfer] - nbytes  # expired and asked for anew
                assert granted.get(transfer) == nbytes + again, f"{transfer} waits: {machine.why(transfer)}"
    for one in machine.status(world.now_ns, 0).bottlenecks:
        assert one.outstanding_bytes == 0
