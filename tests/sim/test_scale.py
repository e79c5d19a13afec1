"""The fluid senders at scale, made small: everything arrives, nothing is granted twice, nothing is left."""

from __future__ import annotations

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import Pace
from proxyd.sim.fluid import NANOS, FluidSender, FluidWorld
from proxyd.sim.scale import RATE_BYTES_PER_S, RTT_NS, long, wide

LINK = LinkName("a", "b")


def test_many_agents_on_many_links() -> None:
    result = wide(agents=40, links=8, transfers=600, nbytes=1 << 20)
    assert (result.agents, result.links, result.transfers, result.violations) == (40, 8, 600, 0)
    assert result.grants >= 600
    # Five agents with two messages each on a link that takes 8.6 ms for one.
    least_s = (1 << 20) / RATE_BYTES_PER_S + RTT_NS / 2 / NANOS
    assert least_s < result.fct_mean_s < 12 * (1 << 20) / RATE_BYTES_PER_S + RTT_NS / NANOS


def test_hours_of_bursts() -> None:
    result = long(agents=16, links=4, seconds=120)
    assert result.violations == 0
    assert 6 * 16 <= result.transfers <= 12 * 16
    # Four messages at once on each link: the last one waits for the other three.
    assert 4 * (8 << 20) / RATE_BYTES_PER_S < result.fct_p99_s < 4.5 * (8 << 20) / RATE_BYTES_PER_S + RTT_NS / NANOS


def test_figures_depend_on_the_seed_alone() -> None:
    def figures(seed: int) -> tuple[float, ...]:
        result = long(agents=8, links=2, seconds=60, seed=seed)
        return result.transfers, result.grants, result.events, result.fct_mean_s, result.fct_p99_s

    assert figures(1) == figures(1) != figures(2)


def make(*, finished: list[TransferId] | None = None, echoes: bool = False, control_ns: int = 500_000) -> FluidWorld:
    settings = LinkSettings(LINK, RATE_BYTES_PER_S, RTT_NS, RATE_BYTES_PER_S // 100, mtu_bytes=9000)
    machine = CoordinatorMachine(CoordinatorConfig(links=(settings,)), epoch=1)
    return FluidWorld(
        machine,
        [FluidSender(AgentName("a", "host"), LINK, RTT_NS)],
        finishes=None if finished is None else lambda session, transfer: finished.append(transfer),
        echoes=echoes,
        control_ns=control_ns,
    )


def test_a_transfer_is_over_a_round_trip_after_its_last_byte() -> None:
    finished: list[TransferId] = []
    world = make(finished=finished)
    world.run(NANOS // 10)
    transfer = world.send(1, 8 << 20)
    world.run(world.now_ns + 2 * NANOS)
    assert finished == [transfer]
    (link,) = world.machine.links_status(world.now_ns)
    assert (link.outstanding_bytes, link.waiting) == (0, 0)
    assert sum(link.totals.class_bytes) == link.totals.delivered_bytes == 8 << 20


def test_a_new_pace_holds_for_what_is_held() -> None:
    sender = FluidSender(AgentName("a", "host"), LINK, RTT_NS)
    world = make()
    world.senders[1] = sender
    world.run(NANOS // 10)
    world.send(1, 8 << 20)
    world.run(world.now_ns + 20_000_000)
    assert sender.grants
    world._said(1, Pace(LINK, 1_000_000, 1))
    before = sender.left_bytes
    held = sender.backlog_bytes
    sender.advance(world.now_ns + 10_000_000)
    assert sender.left_bytes - before == pytest.approx(10_000, abs=10)
    assert sender.backlog_bytes == held - (sender.left_bytes - before)


def test_echoes_tell_the_coordinator_how_far_away_a_sender_is() -> None:
    world = make(echoes=True, control_ns=40_000_000)
    before = world.events
    world.run(NANOS)
    assert world.events - before > 10  # beats come back
