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
    now_ns = host.now_ns
    for link in host.machine.links_status(now_ns):
        outstanding = [lane.outstanding_bytes for lane in link.lanes]
        where = f"at {now_ns / 1e9:.6f} s, {link.link}"
        if link.window_violations or not 0 <= link.outstanding_bytes <= link.window_bytes:
            raise InvariantError(f"{where}: {link.outstanding_bytes} bytes granted, the window is {link.window_bytes}")
        if sum(outstanding) != link.outstanding_bytes or min(outstanding, default=0) < 0:
            raise InvariantError(f"{where}: lanes hold {outstanding}, the link counts {link.outstanding_bytes}")
        if link.granted_rate_bytes_per_s > link.pace_bytes_per_s and not host.settling:
            raise InvariantError(
                f"{where}: lanes may send {link.granted_rate_bytes_per_s} bytes/s, the pace is {link.pace_bytes_per_s}"
            )
        if link.fallback_bytes_per_s * 5 > link.bottleneck_bytes_per_s * 4:
            raise InvariantError(f"{where}: fallback rates sum to {link.fallback_bytes_per_s} bytes/s")
        if link.totals.clamped_reports:
            raise InvariantError(f"{where}: an agent reported the impossible: {link.totals}")


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
