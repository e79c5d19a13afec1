"""An agent's peers and links as plain values, for people."""

from __future__ import annotations

from proxyd.agent.peers import PeerLink
from proxyd.core.agent import AgentMachine, LinkSending
from proxyd.core.ids import AgentName
from proxyd.core.transfer import RecvState
from proxyd.runtime.translate_agent import LinkTold, PeerTold


def known_agents(machine: AgentMachine) -> dict[AgentName, str]:
    """Other agents that trainers are listed at, and where each is dialled."""
    directory = machine.sender.directory
    found = {name: directory.of_agent(name)[0].data_address for name in directory.agents()}
    found.pop(machine.config.agent, None)
    return found


def peer_told(name: AgentName, address: str, link: PeerLink | None) -> PeerTold:
    """A peer that is known, and the connections to it, if there are any."""
    if link is None or link.channel is None:
        return PeerTold(name, address if link is None else link.address)
    rtt_ns, rate = link.rtt_and_rate()
    try:
        path_mtu = link.channel.path_sizes().path_mtu
    except OSError:
        path_mtu = 0
    return PeerTold(name, link.address, True, link.stream_count, rtt_ns, rate, path_mtu)


def arriving(machine: AgentMachine) -> int:
    """Messages of other agents that are not whole yet."""
    states = (RecvState.OFFERED, RecvState.WANTED, RecvState.LANDING)
    return sum(one.state in states for one in machine.receiver.transfers.values())


def link_told(sending: LinkSending, machine: AgentMachine) -> LinkTold:
    """A link, with what its coordinator has said of it."""
    info = machine.sender.asking.links[sending.link].info
    return LinkTold(
        link=sending.link,
        coordinator=sending.coordinator,
        fallback=sending.fallback,
        rate_bytes_per_s=0 if info is None else info.rate_bytes_per_s,
        rtt_ns=0 if info is None else info.rtt_ns,
        source="" if info is None else info.source,
        backlog_bytes=sending.backlog_bytes,
        waiting_transfers=sending.waiting_transfers,
        granted_bytes=sending.granted_taken_bytes,
        fallback_bytes=sending.fallback_bytes,
    )
