"""The coordinator daemon: configuration in, machine, server and metrics put together, exit code out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from proxyd.coordinator.admin import AdminService
from proxyd.coordinator.coordinator_metrics import coordinator_families, session_families
from proxyd.coordinator.grant_log import GrantLog
from proxyd.coordinator.guard import Guard
from proxyd.coordinator.observer import Observer
from proxyd.coordinator.policy_keeper import PolicyKeeper
from proxyd.coordinator.server import ControlServer
from proxyd.coordinator.servicer import SessionServicer
from proxyd.coordinator.story import Stories
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect
from proxyd.core.errors import ConfigError
from proxyd.core.events import CoordinatorEvent, TimePassed
from proxyd.runtime.config import Config, read_token
from proxyd.runtime.driver import Driver, loop_timer
from proxyd.runtime.lifecycle import Stop, announce_ready, ping_watchdog, run_daemon
from proxyd.runtime.limits import STRANGERS
from proxyd.runtime.logs import fields
from proxyd.runtime.metrics import MetricFamily, MetricsServer
from proxyd.runtime.notify import Notifier
from proxyd.runtime.tls import coordinator_tls, security_families, watch_certificate

log = logging.getLogger("proxyd.coordinator")


def run(config: Config, ready_fd: int | None = None, path: str | None = None) -> int:
    """Serve until SIGTERM or SIGINT; answers the exit code. Raises ConfigError and ListenError at start.

    :param ready_fd: see :func:`proxyd.runtime.lifecycle.announce_ready`.
    :param path: the file that ``config`` is from: SIGHUP and the Admin service make it be read again.
    """
    token = read_token(config.require_coordinator().token_file) or b""
    return run_daemon(lambda stop: serve(config, token, stop, ready_fd, path))


def machine_config(config: Config) -> CoordinatorConfig:
    """The machine's view of a configuration file."""
    section = config.require_coordinator()
    return CoordinatorConfig(
        name=section.name,
        owns=section.owns,
        links=tuple(
            dataclasses.replace(link.settings, observe=(link.mode or section.mode) == "observe")
            for link in config.links
        ),
        beat_ns=section.beat_ns,
        lease_ns=section.lease_ns,
        absent_ns=section.peer_timeout_ns,
        control_rtt_ns=section.rtt_control_ns,
        observe=section.mode == "observe",
        bottlenecks=tuple(one.settings for one in config.bottlenecks),
    )


def new_epoch() -> int:
    """Higher than in any earlier life, without keeping a file: wall-clock milliseconds.

    Not so when the clock was set back by more than the coordinator was away; then the first agent that comes back tells
    what it has seen, and the machine goes above that (see :class:`~proxyd.core.coordinator.CoordinatorMachine`).
    """
    return time.time_ns() // 1_000_000


class Coordinator:
    """The machine with everything around it but a network: also what tests and benchmarks drive.

    :param on_failure: told of a bug in the machine; see :class:`proxyd.runtime.driver.Driver`.
    :param grant_log: where the grant log goes, and how large it may be.
    :raises OSError: nothing can be written there.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        token: bytes,
        on_failure: Callable[[BaseException], None] | None = None,
        *,
        epoch: int | None = None,
        grant_log: tuple[Path, int] | None = None,
        strangers: int = STRANGERS,
        guard: Guard | None = None,
    ) -> None:
        self.guard = Guard() if guard is None else guard
        self.machine = CoordinatorMachine(config, new_epoch() if epoch is None else epoch)
        self.grant_log = None if grant_log is None else GrantLog(*grant_log, self.machine)
        self._event_ns = 0
        """Of the event that the machine has or had last: what it did is of that moment."""
        self.observer = Observer()
        self.stories = Stories(self.machine)
        self.servicer = SessionServicer(token, self._on_event, self.guard, places=strangers)
        self.admin = AdminService(self.machine, self.stories)
        self.driver: Driver[CoordinatorEvent, CoordinatorEffect] = Driver(
            self.machine,
            self._perform,
            timer=loop_timer(asyncio.get_running_loop()),
            record=self._record,
            on_failure=on_failure,
        )

    def _on_event(self, event: CoordinatorEvent) -> None:
        self.driver.handle(event)

    def _record(self, now_ns: int, event: CoordinatorEvent | TimePassed) -> None:
        self._event_ns = now_ns
        if self.grant_log is not None:
            self.grant_log.saw(now_ns, event)
        self.observer.saw(now_ns, event)
        self.stories.saw(now_ns, event)

    def _perform(self, effects: Sequence[CoordinatorEffect]) -> None:
        if self.grant_log is not None:
            self.grant_log.performed(effects)
        self.observer.performed(self._event_ns, effects)
        self.stories.performed(self._event_ns, effects)
        self.servicer.perform(effects)

    def close(self) -> None:
        """Take no more events; what the grant log still holds is written."""
        self.driver.close()
        if self.grant_log is not None:
            self.grant_log.close()

    def families(self) -> Iterable[MetricFamily]:
        """For a scrape."""
        status = self.machine.status(self.driver.now_ns(), transfers_per_link=0)
        yield from coordinator_families(status, self.observer)
        yield from session_families(self.servicer)
        yield from security_families(self.guard.refusals, self.guard.tls)


def _make(config: Config, token: bytes, stop: Stop) -> Coordinator:
    section = config.require_coordinator()
    guard = Guard(coordinator_tls(section.tls))
    where = None if section.grant_log is None else (Path(section.grant_log), section.grant_log_bytes)
    try:
        return Coordinator(
            machine_config(config), token, stop.fail, grant_log=where, strangers=section.strangers, guard=guard
        )
    except OSError as error:
        raise ConfigError(
            f"the grant log {section.grant_log} can't be written",
            why=error.strerror or str(error),
            next_step="Make its directory writable for the coordinator, or remove grant_log from [coordinator]",
        ) from error


async def serve(config: Config, token: bytes, stop: Stop, ready_fd: int | None, path: str | None = None) -> None:
    """Everything between a checked configuration and the end. Raises ListenError."""
    section = config.require_coordinator()
    coordinator = _make(config, token, stop)
    loop = asyncio.get_running_loop()
    keeper = PolicyKeeper(config, path, coordinator.driver.handle, loop.call_later)
    coordinator.admin.policy = keeper
    guard = coordinator.guard
    server = ControlServer(coordinator.servicer, coordinator.admin, guard, with_reflection=section.reflection)
    notifier = Notifier()
    async with contextlib.AsyncExitStack() as ending:
        ending.callback(notifier.close)
        ending.callback(coordinator.close)
        ending.callback(keeper.close)
        keeper.start()
        loop.add_signal_handler(signal.SIGHUP, keeper.reload)
        metrics = None
        if section.metrics_address is not None:
            metrics = MetricsServer(section.metrics_address, coordinator.families)
            ending.push_async_callback(metrics.close)
        await server.start(section.listen_addresses)
        ending.push_async_callback(server.stop)
        if metrics is not None:
            await metrics.start()
        coordinator.driver.start()
        watchdog = loop.create_task(ping_watchdog(notifier))
        ending.callback(watchdog.cancel)
        if guard.tls is not None:
            for watch in (watch_certificate(guard.tls), guard.watch()):
                ending.callback(loop.create_task(watch).cancel)
        facts = {
            "address": next((one for one in server.addresses if not one.startswith("unix:")), server.addresses[0]),
            "addresses": server.addresses,
            "metrics": None if metrics is None else metrics.url,
            "pid": os.getpid(),
        }
        announce_ready(ready_fd, facts)
        notifier.ready(f"coordinator {section.name} at {', '.join(server.addresses)}")
        log.info(
            "coordinator is up",
            extra=fields(
                name=section.name,
                epoch=coordinator.machine.epoch,
                listen=", ".join(server.addresses),
                links=len(config.links),
                metrics="off" if metrics is None else metrics.url,
            ),
        )
        reason = await stop.wait()
        notifier.stopping(reason)
        log.info("coordinator stops", extra=fields(reason=reason))
        await coordinator.servicer.stop()
