"""What must hold in every run: after each event at a coordinator, and when all is over."""

from __future__ import annotations

from proxyd.core.ids import TransferId
from proxyd.sim.host import AgentHost
from proxyd.sim.trainer import Fate
from proxyd.sim.world import CoordinatorHost, World


class InvariantError(AssertionError):
    """Something that must always hold did not."""


def check_coordinator(host: CoordinatorHost) -> None:
    """Live grants within the window, rates within the pace, fallback within its share."""
    problem = host.machine.audit(host.now_ns)
    if problem:
        raise InvariantError(f"at {host.now_ns / 1e9:.6f} s: {problem}")


def check_end(world: World) -> None:
    """Every message has one fate, nothing is left over anywhere."""
    for fate in world.fates.values():
        _check_fate(world, fate)
    for trainer in world.trainers.values():
        _check_order(world, trainer.offers)
    for host in world.hosts.values():
        if host.alive:
            _check_host(host)
    for coordinator in world.coordinators.values():
        if not coordinator.alive:
            continue
        for link in coordinator.machine.links_status(world.clock.now_ns):
            if link.totals.clamped_reports:
                raise InvariantError(f"{link.link}: an agent reported the impossible: {link.totals}")
            if link.outstanding_bytes or link.waiting:
                left = f"{link.outstanding_bytes} bytes outstanding and {link.waiting} transfers waiting"
                raise InvariantError(f"{link.link}: {left} at the end")


def _check_fate(world: World, fate: Fate) -> None:
    name = f"{fate.transfer} ({fate.envelope.describe()})"
    sender = world.trainers[fate.envelope.source]
    if sender.alive and sender.incarnation == fate.transfer.incarnation and not fate.settled:
        raise InvariantError(f"{name}: posted at {fate.posted_ns / 1e9:.3f} s, neither done nor failed at the end")
    if fate.done_ns and fate.landed_ns == 0:
        raise InvariantError(f"{name}: acknowledged, but not delivered")
    if fate.done_ns and fate.landed_bytes != fate.envelope.nbytes:
        raise InvariantError(f"{name}: acknowledged with {fate.landed_bytes} bytes landed")
    if fate.landed_ns and fate.receive_failed is not None:
        raise InvariantError(f"{name}: delivered, and failed at the receiver")


def _check_order(world: World, offers: list[TransferId]) -> None:
    last: dict[int, int] = {}
    for transfer in offers:
        if transfer.sequence <= last.get(transfer.incarnation, 0):
            raise InvariantError(f"{transfer} was offered out of order to {world.fates[transfer].envelope.destination}")
        last[transfer.incarnation] = transfer.sequence


def _check_host(host: AgentHost) -> None:
    status = host.machine.status(host.world.clock.now_ns)
    if host.blocks or status.outgoing or status.incoming:
        raise InvariantError(
            f"{host.name}: {len(host.blocks)} receive blocks, {status.outgoing} outgoing and {status.incoming} "
            "incoming transfers left at the end"
        )
    for link in status.links:
        if link.backlog_bytes or link.waiting_transfers:
            raise InvariantError(
                f"{host.name}: {link.link} holds {link.backlog_bytes} bytes and {link.waiting_transfers} transfers wait"
            )
