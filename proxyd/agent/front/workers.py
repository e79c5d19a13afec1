"""The worker processes as the front sees them: started, watched, started again, ended."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from proxyd.agent.entrances import Entrances
from proxyd.agent.front.line import Line, encode
from proxyd.agent.passing import Passage
from proxyd.core.errors import EXIT_USAGE, ConfigError, ProxydError
from proxyd.runtime.config import Config
from proxyd.runtime.logs import fields

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
SETTLED_S = 30.0
"""A worker that lived for less counts as one more failure for the backoff."""
STOP_S = 10.0
"""What workers have for an orderly end; an agent needs less than one second."""
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")

_log = logging.getLogger("proxyd.agent.front")


@dataclasses.dataclass(frozen=True, slots=True)
class Charge:
    """What every worker is told, in every life."""

    config: Config
    path: str | None
    token: bytes = dataclasses.field(repr=False)
    entrances: Entrances


class Worker:
    """One of them.

    :param heard: takes its news (see :mod:`.worker`).
    :param died: told when a life of it has ended by itself.
    """

    def __init__(
        self,
        number: int,
        charge: Charge,
        heard: Callable[[int, dict[str, Any]], None],
        died: Callable[[int], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.number = number
        self._charge = charge
        self._heard_by_front = heard
        self._died = died
        self.local = Passage()
        self.data = Passage()
        self.gateway = None if charge.entrances.gateway is None else Passage()
        self.line = Line({}, self._heard)
        self.facts: dict[str, Any] = {}
        self.restarts = 0
        self.draining = False
        """What its next life begins with."""
        self.must_reload = False
        """The file has been read again since the front's start."""
        self.up = False
        """It serves."""
        self.ready = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._ended = asyncio.Event()
        self._ended.set()
        self._talk: asyncio.Task[None] | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._begun_s = 0.0
        self._again: asyncio.TimerHandle | None = None
        self._stopping = False
        self.exit_code: int | None = None
        """Of its last life."""

    @property
    def pid(self) -> int:
        """0: no life now."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Begin a life. Raises OSError."""
        self._again = None
        near, far = socket.socketpair()
        inherited = [far.fileno(), *(one.far.fileno() for _, one in self.passages())]
        # Not by fork alone: grpc's threads run here. A safe path: the daemon's directory holds no modules of ours.
        command = [sys.executable, "-P", "-m", "proxyd.agent.front.worker", str(os.getpid()), *map(str, inherited)]
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
        try:
            # In a session of its own: a terminal's Ctrl-C is for the front, which ends its workers.
            self._process = subprocess.Popen(
                command, pass_fds=inherited, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        except OSError:
            near.close()
            raise
        finally:
            far.close()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._on_end)
        self._begun_s = time.monotonic()
        self._ended.clear()
        near.sendall(self._beginning())  # some kilobytes: far less than the kernel takes at once
        self._talk = self._loop.create_task(self._listen(near))

    async def _listen(self, sock: socket.socket) -> None:
        await self.line.run(await self.line.open(sock))

    def _beginning(self) -> bytes:
        charge, entrances = self._charge, self._charge.entrances
        gateway = entrances.gateway_address
        return encode(
            {
                "config": charge.config.model_dump(mode="json", by_alias=True, exclude_unset=True),
                "path": charge.path,
                "token": base64.b64encode(charge.token).decode(),
                "worker": self.number,
                "workers": charge.config.require_agent().workers,
                "data_address": str(entrances.data_address),
                "gateway_address": None if gateway is None else str(gateway),
                "draining": self.draining,
            }
        )

    def _heard(self, news: dict[str, Any]) -> None:
        if "ready" in news:
            self.facts = news["ready"]
            self.up = True
            self.ready.set()
            if self.must_reload:
                self.signal(signal.SIGHUP)
        self._heard_by_front(self.number, news)

    def _on_end(self) -> None:
        """The process has ended."""
        process = self._process
        assert process is not None
        self.exit_code = process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process = None
        was_up, self.up = self.up, False
        self._ended.set()
        self.ready.set()  # nobody may wait for a process that is gone
        if self._talk is not None:
            self._talk.cancel()
        if self._stopping:
            return
        self._died(self.number)
        if not was_up and self.restarts == 0 and not self.facts:
            return  # it never served: the front ends, and says why
        lived_s = time.monotonic() - self._begun_s
        if lived_s >= SETTLED_S:
            self._backoff_s = FIRST_BACKOFF_S
        _log.warning(
            "a worker has died and is started again",
            extra=fields(
                worker=self.number,
                pid=process.pid,
                exit_code=self.exit_code,
                lived_s=round(lived_s, 1),
                again_in_s=self._backoff_s,
            ),
        )
        self._again = self._loop.call_later(self._backoff_s, self._restart)
        self._backoff_s = min(MAX_BACKOFF_S, 2 * self._backoff_s)

    def _restart(self) -> None:
        self.restarts += 1
        self.ready.clear()
        try:
            self.start()
        except OSError as error:
            _log.error(
                "a worker can't be started: %s", error.strerror or error, extra=fields(again_in_s=self._backoff_s)
            )
            self._again = self._loop.call_later(self._backoff_s, self._restart)
            self._backoff_s = min(MAX_BACKOFF_S, 2 * self._backoff_s)

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal, if there is one."""
        if self._process is not None:
            self._process.send_signal(number)

    async def check(self, limit_s: float) -> None:
        """Kill it if its loop hangs: an answer that is so late means that it serves nobody."""
        process = self._process
        if not self.up or process is None:
            return
        try:
            await self.line.ask("alive", timeout_s=limit_s)
        except ProxydError as error:
            if self._process is process:
                _log.warning("a worker is killed: %s", error, extra=fields(worker=self.number, pid=process.pid))
                process.kill()

    async def stop(self) -> None:
        """End it in order, and by force after :data:`STOP_S`."""
        self._stopping = True
        if self._again is not None:
            self._again.cancel()
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await self._ended.wait()
        except TimeoutError:
            _log.error("a worker does not end and is killed", extra=fields(worker=self.number, pid=self.pid))
            self.kill()
            await self._ended.wait()

    async def ended(self) -> None:
        """Until its process is gone."""
        await self._ended.wait()

    def passages(self) -> list[tuple[str, Passage]]:
        """Its ways in, by the door."""
        found = [("socket", self.local), ("data", self.data)]
        return found if self.gateway is None else [*found, ("gateway", self.gateway)]

    def kill(self) -> None:
        """End it at once."""
        self._stopping = True
        if self._again is not None:
            self._again.cancel()
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of the connections that nobody took."""
        for _, one in self.passages():
            one.close()


class WorkerFailed(ProxydError):
    """A worker ended before it served for the first time; it has said why on stderr."""

    code = "worker-failed"


def failure_of(worker: Worker) -> ProxydError:
    """What a worker's end at its start is to whoever started the agent."""
    what = f"worker {worker.number} ended at its start, exit code {worker.exit_code}"
    kind = ConfigError if worker.exit_code == EXIT_USAGE else WorkerFailed
    return kind(what, why="see its words above")
