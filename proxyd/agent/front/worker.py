"""A worker process: an agent whose connections come from the front, and whose front alone may ask it.

Started by :mod:`proxyd.agent.front.workers`, with arguments ``PARENT LINE LOCAL DATA [GATEWAY]``: the front's pid, and
inherited descriptors. The first frame on the line says what to be. It ends with its front, at once and without a word,
as an agent that is killed does: then its trainers and peers go on with the next one.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from proxyd.agent.front.line import Line, LineError, receive
from proxyd.agent.passing import PassedSockets
from proxyd.core.errors import EXIT_FAILED, ProxydError
from proxyd.runtime.addresses import parse_address
from proxyd.runtime.config import AgentConfig, Config
from proxyd.runtime.environment import choose_grpc_engine
from proxyd.runtime.grpc_options import only_tls_1_3
from proxyd.runtime.logs import say_everywhere, setup_logging
from proxyd.wire.routing import MAX_WORKERS, worker_name

if TYPE_CHECKING:
    from proxyd.agent.daemon import Agent
    from proxyd.runtime.lifecycle import Stop

_PR_SET_PDEATHSIG = 1
REPORT_S = 1.0
"""How often it is looked whether the front knows our trainers; it hears of most changes at once."""
HOME_REMEMBERED = 4096


def main(argv: Sequence[str]) -> int:
    """The exit code; see the module's text."""
    parent, *fds = map(int, argv)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return EXIT_FAILED  # it was gone before it could be tied to us
    line, *doors = (socket.socket(fileno=fd) for fd in fds)
    try:
        begin, _ = receive(line)
        config = Config.model_validate(begin["config"])
        setup_logging(config.log.level, config.log.format)
        say_everywhere(worker=begin["worker"])
        # Before grpc is imported, with the daemon.
        only_tls_1_3()
        choose_grpc_engine(os.environ)
        return _run(config, begin, line, doors)
    except ProxydError as error:
        print(f"proxyd: {error} [{error.code}]", file=sys.stderr)  # noqa: T201 # as proxyd.cli.main does
        return error.exit_code


def worker_section(section: AgentConfig, worker: int) -> AgentConfig:
    """The configuration of one worker: what holds for all of them together is divided."""
    workers = section.workers
    clients = section.max_clients
    return section.model_copy(
        update={
            "name": worker_name(section.name, worker),
            "memory": str(section.memory_bytes // workers),
            "clients": "auto" if clients is None else clients // workers + (worker < clients % workers),
            "strangers": max(1, section.strangers // workers),
            "admin": "off",
            "metrics": "off",
        }
    )


def home_of(incarnation: int) -> int:
    """The worker that an incarnation was drawn by."""
    return incarnation % MAX_WORKERS


def draw_incarnation(worker: int) -> int:
    """A life of a worker: its trainers name it when they come back, and so say where they were."""
    return (secrets.randbits(56) + 1) * MAX_WORKERS + worker


def _run(config: Config, begin: dict[str, Any], line: socket.socket, doors: Sequence[socket.socket]) -> int:
    from proxyd.agent.daemon import Agent, trainer_proofs
    from proxyd.agent.entrances import Entrances
    from proxyd.runtime.lifecycle import run_daemon
    from proxyd.runtime.reloading import AgentReloader

    worker: int = begin["worker"]
    token = base64.b64decode(begin["token"])
    section = worker_section(config.require_agent(), worker)
    reloader = None if begin["path"] is None else AgentReloader(config, begin["path"], token)
    proofs = trainer_proofs(config, token)

    async def serve(stop: Stop) -> None:
        data_address, gateway_address = parse_address(begin["data_address"]), None
        local = PassedSockets(doors[0], socket.AF_UNIX, section.socket)
        data = PassedSockets(doors[1], socket.AF_INET, (data_address.host, data_address.port))
        gateway = None
        if begin["gateway_address"] is not None:
            gateway_address = parse_address(begin["gateway_address"])
            gateway = PassedSockets(doors[2], socket.AF_INET, (gateway_address.host, gateway_address.port))
        entrances = Entrances(local, data, gateway, data_address, gateway_address)
        agent = Agent(section, token, stop, proofs, entrances, draw_incarnation(worker))
        if reloader is not None:
            reloader.apply = agent.reconfigure
            agent.reloads = reloader.reloads
        await _Worker(agent, [one for one in (local, gateway) if one is not None], begin).serve(line, stop)

    return run_daemon(serve, None if reloader is None else reloader.reload)


class _Worker:
    """One agent and its line to the front."""

    def __init__(self, agent: Agent, doors: Sequence[PassedSockets], begin: dict[str, Any]) -> None:
        self._agent = agent
        self._doors = doors
        self._begin = begin
        self._admin = agent.admin()
        self._registry = agent.registry()
        self._told: tuple[int, int] | None = None
        self._report_due = False
        self._sent_home: set[tuple[int, int]] = set()
        self._line = Line(
            {
                "status": self._status,
                "drain": self._drain,
                "ping": self._ping,
                "metrics": self._metrics,
                "alive": self._alive,
            }
        )

    async def serve(self, line: socket.socket, stop: Stop) -> None:
        """Until the end is asked for."""
        agent = self._agent
        tied = asyncio.create_task(self._tied(await self._line.open(line)))
        try:
            agent.hub.changed = self._changed
            agent.hub.lives_elsewhere = self._lives_elsewhere
            await agent.start()
            if self._begin["draining"]:
                agent.drain(True)
            reporting = asyncio.create_task(self._keep_reporting())
            self._line.tell(ready=agent.facts())
            reason = await stop.wait()
            reporting.cancel()
            await agent.stop(reason)
        finally:
            await agent.close()
            tied.cancel()

    async def _tied(self, reader: asyncio.StreamReader) -> NoReturn:
        await self._line.run(reader)
        os._exit(EXIT_FAILED)

    # -- the front's questions ---------------------------------------------------------------------------------------

    async def _alive(self, _: bytes) -> bytes:
        return b""

    async def _status(self, body: bytes) -> bytes:
        from proxyd.v1 import admin_pb2

        request = admin_pb2.AgentStatusRequest.FromString(body)
        return await _answer(lambda context: self._admin.AgentStatus(request, context))

    async def _drain(self, body: bytes) -> bytes:
        from proxyd.v1 import admin_pb2

        request = admin_pb2.DrainRequest.FromString(body)
        return await _answer(lambda context: self._admin.Drain(request, context))

    async def _ping(self, body: bytes) -> bytes:
        from proxyd.v1 import admin_pb2

        request = admin_pb2.PingRequest.FromString(body)
        return await _answer(lambda context: self._admin.Ping(request, context))

    async def _metrics(self, _: bytes) -> bytes:
        families = [
            [
                metric.name,
                metric.documentation,
                metric.type,
                [[sample.name, sample.labels, sample.value] for sample in metric.samples],
            ]
            for metric in self._registry.collect()
        ]
        return json.dumps(families).encode()

    # -- news for it -------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        if not self._report_due:
            self._report_due = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._report_due = False
        hub = self._agent.hub
        now = sum(door.taken for door in self._doors) - hub.stranger_count, hub.client_count
        if now != self._told:
            self._told = now
            self._line.tell(settled=now[0], attached=now[1])

    async def _keep_reporting(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(REPORT_S)

    def _lives_elsewhere(self, pid: int, life: int) -> bool:
        """A trainer comes back from that life of an agent. True: another worker's; the front knows that from now on,
        and the trainer shall come once more."""
        home = home_of(life)
        here = self._begin["worker"]
        if pid <= 0 or home == here or home >= self._begin["workers"] or (pid, life) in self._sent_home:
            return False
        if len(self._sent_home) >= HOME_REMEMBERED:
            self._sent_home.clear()
        self._sent_home.add((pid, life))
        self._line.tell(home=home, pid=pid)
        return True


class _Refusal:
    """Stands for the context of a call, as far as :class:`~proxyd.agent.admin.AgentAdmin` needs one."""

    async def abort(self, code: Any, details: str = "") -> NoReturn:
        raise LineError(details, status=code.name)


async def _answer(call: Callable[[Any], Awaitable[Any]]) -> bytes:
    answer: bytes = (await call(_Refusal())).SerializeToString()
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
