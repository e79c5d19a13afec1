"""``proxyd agent``: everything put together on one event loop, from the listeners to the orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from proxyd import __version__
from proxyd.agent import tcp
from proxyd.agent.admin import AdminServer, AgentAdmin, admin_server
from proxyd.agent.agent_metrics import agent_families
from proxyd.agent.arenas import Block
from proxyd.agent.clients import ClientHub
from proxyd.agent.drain import DrainGate
from proxyd.agent.effects import Effects
from proxyd.agent.entrances import Entrances, open_entrances
from proxyd.agent.handshake import Identity
from proxyd.agent.inbound import InboundListener
from proxyd.agent.local import ClientListener, client_limit
from proxyd.agent.memory import IDLE_NS
from proxyd.agent.peers import PeerLink
from proxyd.agent.ping import ping
from proxyd.agent.session import CoordinatorSessions
from proxyd.agent.streams import Outgoing
from proxyd.agent.told import arriving, known_agents, link_told, peer_told
from proxyd.agent.trainer_proofs import TrainerProofs
from proxyd.core.agent import AgentConfig, AgentMachine, LinkSending, PathState
from proxyd.core.effects import AgentEffect
from proxyd.core.events import AgentEvent, Stopping, TimePassed
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import AgentHello
from proxyd.runtime import config as conf
from proxyd.runtime.drain_metrics import drain_families
from proxyd.runtime.driver import Driver, loop_timer
from proxyd.runtime.json_values import as_plain
from proxyd.runtime.lifecycle import Stop, announce_ready, ping_watchdog, run_daemon
from proxyd.runtime.limits import Descriptors, Door
from proxyd.runtime.logs import fields
from proxyd.runtime.metrics import MetricFamily, MetricsServer, make_registry
from proxyd.runtime.notify import Notifier
from proxyd.runtime.pages import Pages
from proxyd.runtime.reloading import AgentReloader, Reloads
from proxyd.runtime.tls import agent_tls, security_families, watch_certificate
from proxyd.runtime.translate_agent import AgentTold, PingTold, PingWanted, agent_status_response
from proxyd.wire.peer import MAX_CHUNK_BYTES

GOOD_BYE_S = 0.2
"""What the last frames get to leave; a client that doesn't read them sees the end of its connection anyway."""

_ZEROS = memoryview(bytes(MAX_CHUNK_BYTES))

_log = logging.getLogger(__name__)


def run(config: conf.Config, ready_fd: int | None = None, path: str | None = None) -> int:
    """Serve until SIGTERM or SIGINT; answers the exit code. Raises ListenError and ConfigError at start.

    :param ready_fd: see :func:`proxyd.runtime.lifecycle.announce_ready`.
    :param path: the file that ``config`` is from: SIGHUP makes it be read again.
    """
    section = config.require_agent()
    token = conf.read_token(section.token_file) or b""
    reloader = None if path is None else AgentReloader(config, path, token)
    proofs = trainer_proofs(config, token)

    async def serve(stop: Stop) -> None:
        agent = Agent(section, token, stop, proofs)
        if reloader is not None:
            reloader.apply = agent.reconfigure
            agent.reloads = reloader.reloads
        await _serve(agent, section, ready_fd, stop)

    return run_daemon(serve, None if reloader is None else reloader.reload)


def trainer_proofs(config: conf.Config, token: bytes) -> TrainerProofs:
    """What trainers must prove, by the configuration. Raises ConfigError for a job's token that can't be read."""
    return TrainerProofs(token, conf.read_job_tokens(config.jobs), config.require_agent().jobs == "proven")


async def _serve(agent: Agent, section: conf.AgentConfig, ready_fd: int | None, stop: Stop) -> None:
    notifier = Notifier()
    try:
        await agent.start()
        announce_ready(ready_fd, agent.facts())
        notifier.ready(f"agent {agent.name} at {section.socket}")
        watchdog = asyncio.create_task(ping_watchdog(notifier))
        reason = await stop.wait()
        watchdog.cancel()
        notifier.stopping(reason)
        _log.info("stopping", extra=fields(reason=reason))
        await agent.stop(reason)
    finally:
        await agent.close()
        notifier.close()


class Agent:
    """One agent on the running loop. The constructor listens (and raises ListenError); nothing is accepted before
    :meth:`start`."""

    def __init__(
        self,
        section: conf.AgentConfig,
        token: bytes,
        stop: Stop,
        proofs: TrainerProofs | None = None,
        entrances: Entrances | None = None,
        incarnation: int = 0,
    ) -> None:
        """``entrances``: of a worker, to which another process passes its connections on; by default its own, as
        configured. ``incarnation``: by default one that is drawn."""
        self._section = section
        self._begun_ns = time.monotonic_ns()
        self._admin: AdminServer | None = None
        self.name = AgentName(section.site, section.name)
        self._tls = agent_tls(section.tls, section.site, section.name)
        me = Identity(self.name, incarnation or secrets.randbits(63) + 1, token, self._tls)
        self._entrances = open_entrances(section) if entrances is None else entrances
        self.data_address = self._entrances.data_address
        try:
            self._admin = admin_server(section.admin_path)
            metrics = section.metrics_address
            pages = Pages("agent.html", self._shown)
            self._metrics = MetricsServer(metrics, self._families, pages) if metrics is not None else None
        except BaseException:
            self._entrances.close()
            if self._admin is not None:
                self._admin.release()
            raise
        self.machine = AgentMachine(
            AgentConfig(
                agent=self.name,
                incarnation=me.incarnation,
                data_address=str(self.data_address),
                coordinators=section.coordinators,
                stream_capacity_bytes=tcp.stream_capacity_bytes(),
                streams=section.stream_count or 0,
                resolve_timeout_ns=section.resolve_timeout_ns,
                peer_timeout_ns=section.peer_timeout_ns,
                linger_ns=section.linger_ns,
                fallback_percent=section.fallback_percents,
                warm=section.warm and tcp.keeps_windows(section.congestion_control),
            )
        )
        loop = asyncio.get_running_loop()
        self.driver: Driver[AgentEvent, AgentEffect] = Driver(
            self.machine, self._perform, timer=loop_timer(loop), on_failure=stop.fail
        )
        self.gate = DrainGate(self.emit, lambda effect: self.hub.tell_send_state(effect))
        self.hub = ClientHub(
            me,
            memory_bytes=section.memory_bytes,
            arena_bytes=section.arena_bytes,
            linger_ns=section.linger_ns,
            reconnect_ns=section.peer_timeout_ns,
            emit=self.gate.emit,
            link_state=self._link_state,
            max_clients=section.max_clients or client_limit(Descriptors.here().limit),
            max_sends=section.sends,
        )
        if proofs is not None:
            self.hub.proofs = proofs
        self.sessions = CoordinatorSessions(
            section.coordinators,
            lambda: AgentHello(self.name, me.incarnation, str(self.data_address)),
            token,
            self.emit,
            logger=logging.getLogger("proxyd.agent.session"),
            tls=self._tls,
        )
        self._me = me
        self.reloads = Reloads()
        self._effects: Effects | None = None
        self._inbound: InboundListener | None = None
        self._listeners: list[ClientListener] = []
        self._housekeeping: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    def reconfigure(self, config: conf.Config) -> str:
        """Take on what a file that was read again changes here, see :attr:`AgentReloader.apply`."""
        proofs, paths = trainer_proofs(config, self._me.token), config.require_agent().tls
        done = []
        if self._tls is not None and paths is not None and self._tls.move(paths):
            done.append("TLS files")
        if proofs != self.hub.proofs:
            self.hub.proofs = proofs
            done.append("what trainers must prove")
        return ", ".join(done)

    def emit(self, event: AgentEvent) -> None:
        """Feed the machine."""
        self.driver.handle(event)

    async def start(self) -> None:
        """Accept trainers and peers, and look for the coordinators."""
        entrances = self._entrances
        self._inbound = InboundListener(
            entrances.data,
            self._me,
            eager_bytes=self._section.eager_bytes,
            peer_timeout_ns=self._section.peer_timeout_ns,
            block_of=self._block_of,
            emit=self.emit,
            places=self._section.strangers,
        )
        congestion_control = tcp.congestion_control_here(self._section.congestion_control)
        self._effects = Effects(
            self._me,
            hub=self.hub,
            inbound=self._inbound,
            sessions=self.sessions,
            emit=self.emit,
            take=self._take,
            took=self._took,
            congestion_control=congestion_control,
            peer_timeout_ns=self._section.peer_timeout_ns,
        )
        self.driver.start()
        self.sessions.start()
        self._listeners = [
            ClientListener(sock, self.hub, places=self._section.strangers)
            for sock in (entrances.local, entrances.gateway)
            if sock is not None
        ]
        for door in self._doors():
            door.neighbours = self._doors()
        if self._metrics is not None:
            await self._metrics.start()
        if self._admin is not None:
            await self._admin.start(self.admin())
        self._housekeeping = asyncio.create_task(self._keep_house())
        if self._tls is not None:
            self._watch = asyncio.create_task(watch_certificate(self._tls))
        # What exists now lives as long as the daemon: no need to look at it in every collection.
        gc.collect()
        gc.freeze()
        _log.info(
            "agent is up",
            extra=fields(
                agent=self.name,
                socket=self._section.socket,
                data_address=self.data_address,
                congestion_control=congestion_control,
            ),
        )
        if tcp.slow_start_after_idle():
            _log.warning(
                "net.ipv4.tcp_slow_start_after_idle is 1: the kernel forgets each connection's window during pauses, "
                "and slots under grants begin after pauses. Bursts take up to twice as long. Set it to 0 in the "
                "agent's network namespace (deploy/sysctl/90-proxyd.conf)",
                extra=fields(congestion_control=congestion_control),
            )

    def facts(self) -> dict[str, object]:
        """What a parent process wants to know."""
        facts: dict[str, object] = {
            "site": self.name.site,
            "name": self.name.name,
            "socket": os.path.abspath(self._section.socket),
            "data_address": str(self.data_address),
            "admin": None if self._admin is None else os.path.abspath(self._admin.path),
            "metrics": None if self._metrics is None else self._metrics.url,
            "pid": os.getpid(),
        }
        if self._entrances.gateway_address is not None:
            facts["gateway_address"] = str(self._entrances.gateway_address)
        return facts

    # -- the machine's hands -----------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[AgentEffect]) -> None:
        if self._effects is not None:
            self._effects.perform(effects)

    def _take(self, peer: AgentName) -> Outgoing | None:
        """The next chunk for a peer, with its payload."""
        while (chunk := self.machine.next_chunk(peer, self.driver.now_ns())) is not None:
            if chunk.padding:
                return Outgoing(chunk, _ZEROS[: chunk.length])
            block = self.hub.outgoing_of(chunk.transfer)
            if block is not None:
                return Outgoing(chunk, block.payload[chunk.offset : chunk.offset + chunk.length])
            _log.error("a chunk of a message without memory", extra=fields(transfer=chunk.transfer))
        return None

    def _block_of(self, peer: AgentName, transfer: TransferId) -> Block | None:
        """Where a chunk from ``peer`` goes; None: nowhere."""
        return self.hub.block_of(transfer) if self.machine.expects_chunks(peer, transfer) else None

    def _took(self) -> None:
        self.driver.handle(TimePassed())

    def _link_state(self, source: EndpointName, rank: int) -> PathState:
        return self.machine.link_state(source, rank, self.driver.now_ns())

    def _families(self) -> list[MetricFamily]:
        connected = self.sessions.connected
        families = agent_families(
            self.machine.status(time.monotonic_ns()),
            self.hub,
            [(address, address in connected) for address in self._section.coordinators],
            slow_start_after_idle=tcp.slow_start_after_idle(),
            denied=0 if self._effects is None else self._effects.denied,
            doors=self._doors(),
            damaged_frames=self._damaged_frames(),
            connections=self._connections(),
        )
        drain = drain_families(draining=self.gate.draining, held=self.gate.held)
        return [*families, *security_families(self._me.refusals, self._tls), *self.reloads.families(), *drain]

    def _connections(self) -> dict[str, int]:
        inbound = 0 if self._inbound is None else self._inbound.data_connection_count
        outbound = 0 if self._effects is None else sum(link.stream_count for link in self._effects.peers.values())
        return {"out": outbound, "in": inbound}

    def _damaged_frames(self) -> int:
        inbound = 0 if self._inbound is None else self._inbound.damaged_frames
        links = [] if self._effects is None else self._effects.peers.values()
        return inbound + sum(link.damaged_frames for link in links)

    def _doors(self) -> list[Door]:
        doors = [listener.door for listener in self._listeners]
        return doors if self._inbound is None else [*doors, self._inbound.door]

    # -- for people --------------------------------------------------------------------------------------------------

    def drain(self, wanted: bool) -> None:
        """Begin no new message of a trainer's, or go on as before."""
        self.hub.hands_over = not wanted
        self.gate.drain(wanted)

    def admin(self) -> AgentAdmin:
        """What a person may ask of this agent."""
        return AgentAdmin(self._told, self.drain, self._ping)

    def registry(self) -> CollectorRegistry:
        """What a scrape shows."""
        return make_registry(self._families)

    def _links(self) -> dict[AgentName, PeerLink]:
        return {} if self._effects is None else self._effects.peers

    def _shown(self) -> object:
        """For the status page."""
        return {"status": as_plain(agent_status_response(self._told()))}

    def _told(self) -> AgentTold:
        now_ns = time.monotonic_ns()
        status = self.machine.status(now_ns)
        connected = self.sessions.connected
        known = known_agents(self.machine)
        links = self._links()
        return AgentTold(
            agent=self.name,
            version=__version__,
            incarnation=self._me.incarnation,
            uptime_ns=now_ns - self._begun_ns,
            pid=os.getpid(),
            socket=os.path.abspath(self._section.socket),
            data_address=str(self.data_address),
            draining=self.gate.draining,
            held_transfers=self.gate.held,
            outgoing_transfers=status.outgoing,
            arriving_transfers=arriving(self.machine),
            trainers=[endpoint for endpoint, _ in status.endpoints],
            coordinators=[(address, address in connected) for address in self._section.coordinators],
            peers=[peer_told(name, known.get(name, ""), links.get(name)) for name in sorted({*known, *links})],
            links=[link_told(one, self.machine) for one in status.links],
            certificate="" if self._tls is None else self._tls.state,
            congestion_control=tcp.congestion_control_here(self._section.congestion_control) or "the kernel's default",
        )

    async def _ping(self, wanted: PingWanted) -> PingTold:
        link = self._links().get(wanted.peer)
        known = known_agents(self.machine)
        address = wanted.address or known.get(wanted.peer, "")
        if link is None and not address:
            names = ", ".join(map(str, sorted(known))) or "none"
            raise LookupError(
                f"this agent doesn't know where {wanted.peer} is: agents are known once a trainer is attached to them"
                f" (known: {names}). Say where it is: --address HOST:PORT, or --coordinator ADDRESS on that one's host"
            )
        told = await ping(wanted, address, link, self._me, self._section.peer_timeout_ns)
        name = LinkName(self.name.site, wanted.peer.site)
        told.link = next((link_told(one, self.machine) for one in self._sending() if one.link == name), None)
        return told

    def _sending(self) -> Sequence[LinkSending]:
        return self.machine.status(time.monotonic_ns()).links

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(IDLE_NS / 2e9)
            self.hub.reclaim(IDLE_NS)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def stop(self, reason: str) -> None:
        """Fail what is pending, tell trainers, peers and coordinators."""
        for listener in self._listeners:
            listener.close()
        self.emit(Stopping(reason))
        # One turn of the loop carries the last frames to their sockets.
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(GOOD_BYE_S):
                await self.sessions.close()
        except TimeoutError:
            _log.info("coordinators were not told in time", extra=fields(limit_s=GOOD_BYE_S))
        if self._effects is not None:
            await self._effects.close(f"agent {self.name} stops: {reason}")
        if self._inbound is not None:
            await self._inbound.close(f"agent {self.name} stops: {reason}")

    async def close(self) -> None:
        """Let everything go; also after a start that failed half-way."""
        self.driver.close()
        for task in (self._housekeeping, self._watch):
            if task is not None:
                task.cancel()
        for listener in self._listeners:
            listener.close()
        self.hub.close("the agent stops")
        if self._effects is not None:
            await self._effects.close("")
        if self._inbound is not None:
            await self._inbound.close("")
        if self._metrics is not None:
            await self._metrics.close()
        if self._admin is not None:
            await self._admin.close()
        self._entrances.close()
