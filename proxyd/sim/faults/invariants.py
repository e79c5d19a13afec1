"""What must hold after every event, and when all is over.

Accounts are looked at from both sides: what an agent's book says of itself must add up, and must be something that its
coordinator granted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxyd.core.effects import TellPeerGone
from proxyd.core.ids import EndpointName, LinkName
from proxyd.core.messages import Beat
from proxyd.core.transfer import RecvState
from proxyd.sim.faults.plan import SECOND
from proxyd.sim.faults.trainers import Broken, Message

if TYPE_CHECKING:
    from proxyd.sim.faults.agents import AgentLife
    from proxyd.sim.faults.sessions import CoordinatorLife
    from proxyd.sim.faults.world import World

HOLDS_BLOCK = (RecvState.LANDING, RecvState.LANDED)


def check_agent(life: AgentLife) -> None:
    """After each event of an agent's machine."""
    machine = life.machine
    sender, receiver = machine.sender, machine.receiver
    held: dict[object, int] = {}
    for link, book in sender.asking.links.items():
        if problem := book.problem():
            raise Broken(f"{life.name}: {link}: {problem}")
        for grant in book.grants:
            if not grant.announcement:
                held[grant.transfer] = held.get(grant.transfer, 0) + grant.left_bytes
        for transfer in book.asked:
            if transfer not in sender.transfers:
                raise Broken(f"{life.name}: {link}: {transfer} waits for grants, and has ended")
    for transfer, out in sender.transfers.items():
        if out.held_bytes != held.pop(transfer, 0):
            raise Broken(f"{life.name}: {out.envelope.describe()} counts {out.held_bytes} bytes held")
        if out.finished:
            raise Broken(f"{life.name}: {out.envelope.describe()} is over and still there")
        if not 0 <= out.next_offset <= out.nbytes:
            raise Broken(f"{life.name}: {out.envelope.describe()} is at {out.next_offset}")
    if held:
        raise Broken(f"{life.name}: grants are held for transfers that have ended: {held}")
    for name, peer in sender.peers.items():
        for pair, used in peer.eager_used_bytes.items():
            if not 0 < used <= peer.eager_bytes:
                raise Broken(f"{life.name}: {used} of {peer.eager_bytes} eager bytes to {name} for {pair}")
    if not 0 <= life.used_bytes <= life.world.shape.memory_bytes:
        raise Broken(f"{life.name}: {life.used_bytes} bytes of memory are used")
    for transfer, incoming in receiver.transfers.items():
        if incoming.state in HOLDS_BLOCK and incoming.nbytes and transfer not in life.blocks:
            raise Broken(f"{life.name}: {incoming.envelope.describe()} is {incoming.state.value} without a block")
    if len(life.blocks) > len(receiver.transfers):
        raise Broken(f"{life.name}: {len(life.blocks)} blocks for {len(receiver.transfers)} messages")
    check_reach(life)


def check_reach(life: AgentLife) -> None:
    """After each event: who waits for a rank whose agent hasn't been connected for the timeout, knows it."""
    now_ns, timeout_ns = life.host.now_ns, life.machine.config.peer_timeout_ns
    for endpoint, trainer in life.attached_trainers.items():
        for rank, here_ns in trainer.here_ns.items():
            entry = life.machine.entry_of(EndpointName(endpoint.job, rank))
            if entry is None or entry.agent == life.name or entry.agent in life.inbound:
                continue
            since_ns = max(here_ns, life.left_ns.get(entry.agent, 0))
            if now_ns > since_ns + timeout_ns and rank not in trainer.out_of_reach and trainer.alive:
                away_s = (now_ns - since_ns) / SECOND
                raise Broken(f"{life.name}: {endpoint} waits for rank {rank}, cut off for {away_s:.3f} s")


def check_out_of_reach(life: AgentLife, effect: TellPeerGone) -> None:
    """A rank is said to be out of reach: its agent isn't connected, and hasn't been for the timeout."""
    entry = life.machine.entry_of(EndpointName(effect.endpoint.job, effect.rank))
    if entry is None or (entry.incarnation, entry.agent in life.inbound) != (effect.incarnation, False):
        raise Broken(f"{life.name}: rank {effect.rank} is said to be out of reach: {entry}")
    away_ns = life.host.now_ns - life.left_ns.get(entry.agent, 0)
    if away_ns < life.machine.config.peer_timeout_ns:
        raise Broken(f"{life.name}: rank {effect.rank} is said to be out of reach after {away_ns / SECOND:.3f} s")


def check_coordinator(life: CoordinatorLife) -> None:
    """After each event of a coordinator's machine."""
    if problem := life.machine.audit(life.host.now_ns):
        raise Broken(f"{life.name}: {problem}")


def fallback_rates(life: AgentLife) -> dict[LinkName, int]:
    """What an agent may send by itself."""
    return {link: book.fallback_rate_bytes_per_s for link, book in life.machine.sender.asking.links.items()}


def check_raised(life: AgentLife, coordinator: CoordinatorLife, beat: Beat, before: dict[LinkName, int]) -> None:
    """An agent has heard a beat: it isn't allowed more than before unless the others leave it, those that listen to the
    same life of the coordinator, whatever they have heard of it until now.

    Who has heard no beat of it may hold what an earlier life left, and it may not know. Where the total moves nothing
    follows from what they were told under another one.
    """
    if life.world.shape.live:
        return
    for info in beat.links:
        rate = fallback_rates(life).get(info.link, 0)
        if rate <= before.get(info.link, 0):
            continue
        lives = [host.life for host in life.world.hosts.values() if host.life is not None]
        listening = [one for one in lives if one.dialling[coordinator.address].listens_to is coordinator]
        held = [fallback_rates(one).get(info.link, 0) for one in listening]
        if sum(held) > info.fallback_bytes_per_s:
            raise Broken(f"{life.name}: {info.link}: raised to {rate}, {held} of {info.fallback_bytes_per_s} are held")


def check_reports(life: CoordinatorLife) -> None:
    """What agents told it until now can be true: no account was charged with what another life had granted."""
    for link in life.machine.links_status(life.host.now_ns):
        if link.totals.clamped_reports:
            raise Broken(f"{life.name}: {link.link}: {link.totals.clamped_reports} reports of the impossible")


def check_end(world: World) -> None:
    """The faults are over, and so is the time to heal."""
    for message in world.messages.values():
        sender, taker = message.sender, message.taken_by
        if sender.alive and not message.outcome:
            raise Broken(f"{message}: neither done nor failed in the end; its agent: {_stands(world, message)}")
        if message.must_arrive and message.outcome != "done":
            raise Broken(f"{message}: posted after all had healed, and failed: {message.outcome}: {message.why}")
        if taker is not None and taker.alive and not message.landed and not message.receive_failed:
            raise Broken(f"{message}: its receiver waits for {message.envelope.nbytes - message.landed_bytes} bytes")
    for host in world.hosts.values():
        if host.life is not None:
            _check_idle(host.life)
    for coordinator in world.coordinators.values():
        _check_nothing_owed(coordinator)
    lives = {t.endpoint.rank: t.incarnation for host in world.hosts.values() for t in host.trainers.values()}
    for trainer in [t for host in world.hosts.values() for t in host.trainers.values()]:
        others = {rank: life for rank, life in lives.items() if rank != trainer.endpoint.rank}
        if trainer.out_of_reach or trainer.here != others:
            raise Broken(
                f"{trainer.endpoint} knows of {trainer.here} in the end, {trainer.out_of_reach} out of reach; "
                f"there are {others}"
            )


def _stands(world: World, message: Message) -> str:
    for host in world.hosts.values():
        if host.life is not None:
            out = host.life.machine.sender.transfers.get(message.transfer)
            if out is not None:
                return f"{host.name} has it {out.state.value}, {out.taken_bytes} bytes taken, needs {out.need_bytes}"
    return "none knows it"


def _check_idle(life: AgentLife) -> None:
    sender, receiver = life.machine.sender, life.machine.receiver
    left = [out.envelope.describe() for out in sender.transfers.values() if not out.padding]
    left += [incoming.envelope.describe() for incoming in receiver.transfers.values()]
    if left or life.blocks or life.used_bytes:
        raise Broken(f"{life.name}: in the end there are {len(life.blocks)} blocks and {left}")
    for link, book in sender.asking.links.items():
        if book.asked or any(not grant.announcement for grant in book.grants):
            raise Broken(f"{life.name}: {link}: {book.untaken_bytes} bytes held, {list(book.asked)} wait in the end")
    for name, peer in sender.peers.items():
        if peer.connected and peer.eager_used_bytes:
            raise Broken(f"{life.name}: eager budget to {name} in the end: {peer.eager_used_bytes}")


def _check_nothing_owed(life: CoordinatorLife) -> None:
    now_ns = life.host.now_ns
    status = life.machine.status(now_ns)
    check_reports(life)
    living = {host.name for host in life.world.hosts.values()}
    if len(status.agents) != len(living) or {agent.agent for agent in status.agents} != living:
        raise Broken(f"{life.name}: sessions in the end: {[str(agent.agent) for agent in status.agents]}")
    if len(life.sessions) != len(status.agents):
        raise Broken(f"{life.name}: {len(life.sessions)} streams for {len(status.agents)} agents in the end")
    for agent in status.agents:
        if agent.transfers:
            raise Broken(f"{life.name}: {agent.transfers} transfers of {agent.agent} are open in the end")
    for link in status.links:
        if link.outstanding_bytes or link.waiting:
            raise Broken(
                f"{life.name}: {link.link}: {link.outstanding_bytes} bytes outstanding, {link.waiting} transfers wait "
                f"in the end, at {now_ns / SECOND:.3f} s of its clock"
            )
        if link.window_violations:
            raise Broken(f"{life.name}: {link.link}: the window was exceeded {link.window_violations} times")
