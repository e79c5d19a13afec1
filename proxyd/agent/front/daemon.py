"""``proxyd agent`` with several workers: the process that accepts, passes connections on, and answers for all.

It relays no payload and holds no trainer's memory; should it be killed, its workers end with it, and trainers and peers
go on with what the next front starts, each trainer with the worker that it had (:mod:`.worker`, ``lives_elsewhere``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from typing import Any

import grpc
import grpc.aio

from proxyd import __version__
from proxyd.agent.admin import AdminServer, admin_server
from proxyd.agent.agent_metrics import door_families
from proxyd.agent.entrances import Entrances, open_entrances
from proxyd.agent.front.doors import PeerDoor, TrainerDoor
from proxyd.agent.front.line import LineError
from proxyd.agent.front.merging import (
    FRONT,
    WorkerSeen,
    families_of,
    labelled,
    merged_drain,
    merged_families,
    merged_status,
    worker_families,
)
from proxyd.agent.front.placing import Placing
from proxyd.agent.front.workers import Charge, Worker, failure_of
from proxyd.runtime import config as conf
from proxyd.runtime.json_values import as_plain
from proxyd.runtime.lifecycle import Stop, announce_ready, ping_watchdog, run_daemon
from proxyd.runtime.logs import fields
from proxyd.runtime.metrics import (
    MAX_LABEL_SETS,
    MetricFamily,
    MetricsServer,
    build_info,
    make_registry,
    process_families,
)
from proxyd.runtime.notify import Notifier
from proxyd.runtime.pages import Pages
from proxyd.runtime.reloading import AgentReloader, Reloads
from proxyd.runtime.tls import agent_tls
from proxyd.v1 import admin_pb2, coordination_pb2
from proxyd.v1.admin_pb2_grpc import AgentAdminServicer

ANSWER_S = 2.0
"""What a worker has to answer a question; one that is late is left out."""
PING_S = 1200.0
"""A person's pings take as long as was asked for, 100 of them 10 s apart at the most."""

_log = logging.getLogger("proxyd.agent.front")
_Context = grpc.aio.ServicerContext[Any, Any]


def run(config: conf.Config, ready_fd: int | None = None, path: str | None = None) -> int:
    """As :func:`proxyd.agent.daemon.run`, with worker processes."""
    section = config.require_agent()
    token = conf.read_token(section.token_file) or b""
    reloader = None if path is None else AgentReloader(config, path, token)
    fronts: list[Front] = []

    def reload() -> None:
        """The workers read a file that is good; each says what it took on."""
        if reloader is not None and reloader.reload():
            for front in fronts:
                front.reload()

    async def serve(stop: Stop) -> None:
        front = Front(config, token, path)
        fronts.append(front)
        if reloader is not None:
            front.reloads = reloader.reloads
        notifier = Notifier()
        try:
            starting, asked = asyncio.ensure_future(front.start()), asyncio.ensure_future(stop.wait())
            await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if not starting.done():
                starting.cancel()  # a worker that hangs at its start must not keep the end waiting
                return
            starting.result()
            announce_ready(ready_fd, front.facts())
            notifier.ready(f"agent {section.site}/{section.name} at {section.socket}, {section.workers} workers")
            watchdog = asyncio.create_task(ping_watchdog(notifier))
            checks = asyncio.create_task(front.keep_checking(notifier.ping_interval_ns))
            reason = await stop.wait()
            watchdog.cancel()
            checks.cancel()
            notifier.stopping(reason)
            _log.info("stopping", extra=fields(reason=reason))
            await front.stop()
        finally:
            await front.close()
            notifier.close()

    return run_daemon(serve, reload)


class Front:
    """On the running loop. The constructor listens (and raises ListenError); nothing is accepted before
    :meth:`start`."""

    def __init__(self, config: conf.Config, token: bytes, path: str | None) -> None:
        section = config.require_agent()
        # What would fail in every worker is said once, before any is started.
        agent_tls(section.tls, section.site, section.name)
        conf.read_job_tokens(config.jobs)
        self._section = section
        self._begun_ns = time.monotonic_ns()
        self._incarnation = secrets.randbits(63) + 1
        self._entrances: Entrances = open_entrances(section)
        self._admin: AdminServer | None = None
        self._metrics: MetricsServer | None = None
        self.statuses: dict[int, admin_pb2.AgentStatusResponse] = {}
        """What the workers said of themselves when :meth:`status` was asked for last."""
        self._scraped: dict[int, list[MetricFamily]] = {}
        self.reloads = Reloads()
        self.workers: list[Worker] = []
        try:
            self._admin = admin_server(section.admin_path)
            if section.metrics_address is not None:
                self._metrics = MetricsServer(
                    section.metrics_address,
                    self._families,
                    Pages("agent.html", lambda: {"status": as_plain(self._merged())}),
                    registry=make_registry(self._families, MAX_LABEL_SETS * (section.workers + 1), process=False),
                    fetch=self._fetch,
                )
        except BaseException:
            self._entrances.close()
            if self._admin is not None:
                self._admin.release()
            raise
        charge = Charge(config, path, token, self._entrances)
        self.placing = Placing(section.workers)
        self.workers = [Worker(number, charge, self._heard, self._died) for number in range(section.workers)]
        self._doors: list[TrainerDoor | PeerDoor] = []
        self._trainers: TrainerDoor | None = None

    async def start(self) -> None:
        """Start the workers, and accept once all of them serve. Raises WorkerFailed, ConfigError."""
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            await worker.ready.wait()
            if not worker.up:
                raise failure_of(worker)
        entrances, places = self._entrances, self._section.strangers
        self._trainers = TrainerDoor(
            entrances.local, "socket", lambda worker: worker.local, self.workers, self.placing, places
        )
        self._doors = [self._trainers, PeerDoor(entrances.data, self.workers, places)]
        if entrances.gateway is not None:
            self._doors.append(
                TrainerDoor(
                    entrances.gateway, "gateway", lambda worker: worker.gateway, self.workers, self.placing, places
                )
            )
        doors = [one.door for one in self._doors]
        for door in doors:
            door.neighbours = doors
        if self._metrics is not None:
            await self._metrics.start()
        if self._admin is not None:
            await self._admin.start(FrontAdmin(self))
        _log.info(
            "agent is up",
            extra=fields(
                agent=f"{self._section.site}/{self._section.name}",
                workers=len(self.workers),
                socket=self._section.socket,
                data_address=self._entrances.data_address,
            ),
        )

    def facts(self) -> dict[str, object]:
        """What a parent process wants to know."""
        facts: dict[str, object] = {
            "site": self._section.site,
            "name": self._section.name,
            "socket": os.path.abspath(self._section.socket),
            "data_address": str(self._entrances.data_address),
            "admin": None if self._admin is None else os.path.abspath(self._admin.path),
            "metrics": None if self._metrics is None else self._metrics.url,
            "pid": os.getpid(),
            "workers": [worker.pid for worker in self.workers],
        }
        if self._entrances.gateway_address is not None:
            facts["gateway_address"] = str(self._entrances.gateway_address)
        return facts

    def reload(self) -> None:
        """The file was read again, and is good."""
        for worker in self.workers:
            worker.must_reload = True
            if worker.up:
                worker.signal(signal.SIGHUP)

    async def keep_checking(self, interval_ns: int | None) -> None:
        """Where systemd watches this process, it watches its workers: one that doesn't answer for as long as systemd
        would wait is killed. Returns at once where it doesn't."""
        while interval_ns is not None:
            await asyncio.sleep(interval_ns / 1e9)
            await asyncio.gather(*(worker.check(3 * interval_ns / 1e9) for worker in self.workers))

    # -- the workers' news -------------------------------------------------------------------------------------------

    def _heard(self, number: int, news: dict[str, Any]) -> None:
        if "attached" in news:
            self.placing.reported(number, news["settled"], news["attached"])
        elif "home" in news and self._trainers is not None and self._trainers.watch(news["pid"]):
            self.placing.keep(news["pid"], news["home"])

    def _died(self, number: int) -> None:
        self.placing.begins_anew(number)

    # -- for people and scrapes --------------------------------------------------------------------------------------

    async def ask_each(self, what: str, body: bytes = b"", timeout_s: float = ANSWER_S) -> dict[int, bytes]:
        """The answers of those workers that serve and answer in time, by number."""
        asked = [worker for worker in self.workers if worker.up]
        answers = await asyncio.gather(
            *(worker.line.ask(what, body, timeout_s=timeout_s) for worker in asked), return_exceptions=True
        )
        found: dict[int, bytes] = {}
        for worker, answer in zip(asked, answers, strict=True):
            if isinstance(answer, bytes):
                found[worker.number] = answer
            elif isinstance(answer, LineError):
                _log.warning("a worker gave no answer: %s", answer, extra=fields(worker=worker.number, asked=what))
            else:
                raise answer
        return found

    async def status(self) -> admin_pb2.AgentStatusResponse:
        """Of the whole agent, now."""
        request = admin_pb2.AgentStatusRequest().SerializeToString()
        answers = await self.ask_each("status", request)
        self.statuses = {number: admin_pb2.AgentStatusResponse.FromString(answer) for number, answer in answers.items()}
        return self._merged()

    def _merged(self) -> admin_pb2.AgentStatusResponse:
        front = admin_pb2.AgentStatusResponse(
            agent=coordination_pb2.AgentName(site=self._section.site, name=self._section.name),
            version=__version__,
            incarnation=self._incarnation,
            uptime_ns=time.monotonic_ns() - self._begun_ns,
            pid=os.getpid(),
            socket=os.path.abspath(self._section.socket),
            data_address=str(self._entrances.data_address),
        )
        return merged_status(front, self.statuses, len(self.workers))

    async def _fetch(self, path: str) -> None:
        """For the metrics' server, which answers at once."""
        if path == "/status.json":
            await self.status()
        elif path in ("/", "/metrics"):
            answers = await self.ask_each("metrics")
            self._scraped = {number: families_of(answer, str(number)) for number, answer in answers.items()}

    def _families(self) -> list[MetricFamily]:
        own = [
            build_info("front"),
            *process_families(),
            *door_families([one.door for one in self._doors]),
            *self.reloads.families(),
        ]
        seen = [
            WorkerSeen(
                worker.number,
                worker.up,
                worker.restarts,
                {door: passage.passed for door, passage in worker.passages()},
            )
            for worker in self.workers
        ]
        return merged_families([*self._scraped.values(), labelled(own, FRONT), worker_families(seen)])

    # -- the end -----------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Accept no more, and end the workers in order."""
        for door in self._doors:
            door.close()
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def close(self) -> None:
        """Let everything go; also after a start that failed half-way."""
        for worker in self.workers:
            worker.kill()
        for door in self._doors:
            door.close()
        if self._metrics is not None:
            await self._metrics.close()
        if self._admin is not None:
            await self._admin.close()
        for worker in self.workers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await worker.ended()
            worker.close()
        self._entrances.close()


class FrontAdmin(AgentAdminServicer):
    """The agent's admin service, answered by all workers together."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def AgentStatus(
        self, request: admin_pb2.AgentStatusRequest, context: _Context
    ) -> admin_pb2.AgentStatusResponse:
        """Everything at a glance."""
        return await self._front.status()

    async def Drain(self, request: admin_pb2.DrainRequest, context: _Context) -> admin_pb2.DrainResponse:
        """All workers; one that is started meanwhile begins so."""
        for worker in self._front.workers:
            worker.draining = request.drain
        answers = await self._front.ask_each("drain", request.SerializeToString())
        if len(answers) < len(self._front.workers):
            missing = sorted({worker.number for worker in self._front.workers} - set(answers))
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"workers {missing} don't answer now; they do as asked as soon as they serve. Ask again",
            )
        return merged_drain([admin_pb2.DrainResponse.FromString(answer) for answer in answers.values()])

    async def Ping(self, request: admin_pb2.PingRequest, context: _Context) -> admin_pb2.PingResponse:
        """From one worker: one that is connected to that peer, if any is."""
        await self._front.status()
        numbers = [worker.number for worker in self._front.workers if worker.up]
        if not numbers:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no worker serves at the moment")
        peers = {
            number: [peer for peer in status.peers if peer.agent == request.peer]
            for number, status in self._front.statuses.items()
        }
        best = max(numbers, key=lambda one: [peer.connected for peer in peers.get(one, ())])
        worker = self._front.workers[best]
        try:
            answer = await worker.line.ask("ping", request.SerializeToString(), timeout_s=PING_S)
        except LineError as error:
            await context.abort(getattr(grpc.StatusCode, error.status or "UNAVAILABLE"), error.what)
            raise
        return admin_pb2.PingResponse.FromString(answer)
