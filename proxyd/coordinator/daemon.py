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
from proxyd.coordinator.coordinator_metrics import coordinator_families, session_families, standby_families
from proxyd.coordinator.drain import DrainGate
from proxyd.coordinator.election import Election
from proxyd.coordinator.grant_log import GrantLog
from proxyd.coordinator.guard import Guard
from proxyd.coordinator.history import SAMPLE_NS, History
from proxyd.coordinator.observer import Observer
from proxyd.coordinator.policy_keeper import PolicyKeeper
from proxyd.coordinator.server import ControlServer
from proxyd.coordinator.servicer import SessionServicer
from proxyd.coordinator.story import Stories
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect
from proxyd.core.errors import EXIT_FAILED, ConfigError
from proxyd.core.events import CoordinatorEvent, TimePassed
from proxyd.runtime.addresses import parse_address
from proxyd.runtime.config import Config, read_token
from proxyd.runtime.config_fields import parse_lock
from proxyd.runtime.drain_metrics import drain_families
from proxyd.runtime.driver import Driver, loop_timer
from proxyd.runtime.json_values import as_plain
from proxyd.runtime.lifecycle import Stop, announce_ready, ping_watchdog, run_daemon
from proxyd.runtime.limits import STRANGERS
from proxyd.runtime.logs import fields
from proxyd.runtime.metrics import MetricFamily, MetricsServer
from proxyd.runtime.notify import Notifier
from proxyd.runtime.pages import Pages
from proxyd.runtime.reloading import Reloads
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


def _always() -> bool:
    return True


class Coordinator:
    """The machine with everything around it but a network: also what tests and benchmarks drive.

    :param on_failure: told of a bug in the machine; see :class:`proxyd.runtime.driver.Driver`.
    :param grant_log: where the grant log goes, and how large it may be.
    :param servicer, admin: those of a standby that takes over; None: its own.
    :param election: the lock that it holds; None: there is no other coordinator of its name.
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
        servicer: SessionServicer | None = None,
        admin: AdminService | None = None,
        election: Election | None = None,
    ) -> None:
        self.guard = Guard() if guard is None else guard
        fence = 0 if election is None else election.fence
        self.machine = CoordinatorMachine(config, new_epoch() if epoch is None else epoch, fence=fence)
        self._may_act: Callable[[], bool] = _always if election is None else election.holds
        self.grant_log = None if grant_log is None else GrantLog(*grant_log, self.machine)
        self._event_ns = 0
        """Of the event that the machine has or had last: what it did is of that moment."""
        self.observer = Observer()
        self.stories = Stories(self.machine)
        self.history = History()
        self.servicer = SessionServicer(token, None, self.guard, places=strangers) if servicer is None else servicer
        self.servicer.activate(self._on_event, self._may_act)
        self.admin = AdminService() if admin is None else admin
        self.drain = DrainGate(self.machine, self._on_event, lambda effect: self.servicer.perform((effect,)))
        self.admin.tls = self.guard.tls
        self.admin.activate(self.machine, self.stories, self.drain)
        self.driver: Driver[CoordinatorEvent, CoordinatorEffect] = Driver(
            self.machine,
            self._perform,
            timer=loop_timer(asyncio.get_running_loop()),
            record=self._record,
            on_failure=on_failure,
        )

    def _on_event(self, event: CoordinatorEvent) -> None:
        # Who has lost the lock may have been stopped for an hour: it decides nothing more.
        if self._may_act() and not self.drain.take(event):
            self.driver.handle(event)

    def _record(self, now_ns: int, event: CoordinatorEvent | TimePassed) -> None:
        self._event_ns = now_ns
        if self.grant_log is not None:
            self.grant_log.saw(now_ns, event)
        self.observer.saw(now_ns, event)
        self.history.saw(event)
        self.stories.saw(now_ns, event)

    def _perform(self, effects: Sequence[CoordinatorEffect]) -> None:
        if not self._may_act():
            return  # a timer's
        if self.grant_log is not None:
            self.grant_log.performed(effects)
        self.observer.performed(self._event_ns, effects)
        self.history.performed(self._event_ns, effects)
        self.stories.performed(self._event_ns, effects)
        self.servicer.perform(effects)

    def close(self) -> None:
        """Take no more events; what the grant log still holds is written."""
        self.driver.close()
        if self.grant_log is not None:
            self.grant_log.close()

    async def remember(self) -> None:
        """Keep what the status page shows of the last minutes, for as long as this runs."""
        while True:
            now_ns = self.driver.now_ns()
            self.history.sample(now_ns, self.machine.status(now_ns, transfers_per_link=0))
            await asyncio.sleep(SAMPLE_NS / 1e9)

    def shown(self) -> dict[str, object]:
        """For the status page."""
        now_ns = self.driver.now_ns()
        return {"status": as_plain(self.admin.told(now_ns)), **self.history.plain(now_ns)}

    def families(self) -> Iterable[MetricFamily]:
        """For a scrape."""
        status = self.machine.status(self.driver.now_ns(), transfers_per_link=0)
        yield from coordinator_families(status, self.observer)
        yield from session_families(self.servicer)
        yield from security_families(self.guard.refusals, self.guard.tls)
        yield from drain_families(draining=self.drain.draining, held=self.drain.held)


def _say_why_it_ended(task: asyncio.Task[None]) -> None:
    """The page's history is no reason to end a coordinator, and its silence should be one to look."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the status page remembers nothing more", exc_info=error)


def _grant_log_of(config: Config) -> tuple[Path, int] | None:
    section = config.require_coordinator()
    return None if section.grant_log is None else (Path(section.grant_log), section.grant_log_bytes)


def make_election(config: Config) -> Election | None:
    """The lock that the configuration names; None: there is one coordinator. Raises ConfigError."""
    section = config.require_coordinator()
    if section.lock is None:
        return None
    kind, places, key = parse_lock(section.lock)
    try:
        if kind == "etcd":
            from proxyd.coordinator.etcd_lock import EtcdLock
            from proxyd.coordinator.etcd_tls import EtcdTls

            found = [parse_address(place) for place in places]
            key = key or f"/proxyd/coordinator/{section.name}"
            endpoints = [(address.host, address.port) for address in found]
            tls = None
            if section.lock_ca is not None:
                tls = EtcdTls(section.lock_ca, section.lock_certificate, section.lock_key)
                tls.credentials()  # whether they can be used, for a person to read at start
            lock = EtcdLock(endpoints, key, section.told_address, section.lock_ttl_ns, tls)
            return Election(lock, section.lock_ttl_ns)
        from proxyd.coordinator.kubernetes_lock import KubernetesLock

        lease = key or f"proxyd-{section.name}".lower().replace("_", "-").replace(".", "-")
        return Election(
            KubernetesLock(places[0], lease, section.told_address, section.lock_ttl_ns), section.lock_ttl_ns
        )
    except ImportError as error:
        raise ConfigError(
            f"[coordinator] lock = {section.lock!r} needs a library that is not installed",
            why=str(error),
            next_step="Install the extra: pip install 'proxyd[daemon,ha]'",
        ) from error


async def serve(config: Config, token: bytes, stop: Stop, ready_fd: int | None, path: str | None = None) -> None:
    """Everything between a checked configuration and the end. Raises ListenError."""
    daemon = _Daemon(config, token, stop, path)
    async with contextlib.AsyncExitStack() as ending:
        await daemon.listen(ending)
        if daemon.election is not None:
            daemon.say_ready(ready_fd)
            await daemon.stand_by(ending, daemon.election)
        if not stop.asked:
            await daemon.take_over(ending)
        if daemon.election is None:
            daemon.say_ready(ready_fd)
        reason = await stop.wait()
        daemon.notifier.stopping(reason)
        log.info("coordinator stops", extra=fields(reason=reason))
        await daemon.servicer.stop()


class _Daemon:
    """What there is before there is a machine, and what comes when there is one."""

    def __init__(self, config: Config, token: bytes, stop: Stop, path: str | None) -> None:
        self._config, self._token, self._stop, self._path = config, token, stop, path
        self._section = section = config.require_coordinator()
        self.election = make_election(config)
        self.notifier = Notifier()
        self.coordinator: Coordinator | None = None
        self._guard = guard = Guard(coordinator_tls(section.tls))
        self.servicer = SessionServicer(
            token, None, guard, name=section.name, active=self._active, places=section.strangers
        )
        self.admin = AdminService(why_standby=self._why_standby)
        self._server = ControlServer(self.servicer, self.admin, guard, with_reflection=section.reflection)
        self.admin.serve = self._server.serve
        self._metrics: MetricsServer | None = None
        self._reloads = Reloads()
        if self.election is None:
            self._make()  # what is wrong with the grant log shows before anything listens

    def _active(self) -> str:
        return "" if self.election is None else self.election.holder

    def _why_standby(self) -> str:
        active = self._active()
        return f"this coordinator stands by for {self._section.name}; " + (
            f"ask the active one, at {active}" if active else "nobody holds the lock at the moment"
        )

    def _families(self) -> Iterable[MetricFamily]:
        if self.coordinator is not None:
            return [*self.coordinator.families(), *self._reloads.families()]
        guard = self._guard
        return [
            *self._reloads.families(),
            *standby_families(),
            *session_families(self.servicer),
            *security_families(guard.refusals, guard.tls),
        ]

    def _shown(self) -> object:
        return {"standby": self._why_standby()} if self.coordinator is None else self.coordinator.shown()

    async def listen(self, ending: contextlib.AsyncExitStack) -> None:
        """Be there, as a standby or not."""
        section = self._section
        ending.callback(self.notifier.close)
        if self.election is None:
            self._keep_policy(ending)
        else:
            # The file is read again when this one takes over; until then there is nothing that a reload could change.
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, log.info, "a standby reads nothing again")
        if section.metrics_address is not None:
            self._metrics = MetricsServer(
                section.metrics_address, self._families, Pages("coordinator.html", self._shown)
            )
            ending.push_async_callback(self._metrics.close)
        await self._server.start(section.listen_addresses, active=self.election is None)
        ending.push_async_callback(self._server.stop)
        if self._metrics is not None:
            await self._metrics.start()
        watchdog = asyncio.get_running_loop().create_task(ping_watchdog(self.notifier))
        ending.callback(watchdog.cancel)
        if self._guard.tls is not None:
            for watch in (watch_certificate(self._guard.tls), self._guard.watch()):
                ending.callback(asyncio.get_running_loop().create_task(watch).cancel)

    def say_ready(self, ready_fd: int | None) -> None:
        """Tell who started us, systemd and the log."""
        section, metrics = self._section, self._metrics
        addresses = self._server.addresses
        facts = {
            "address": next((one for one in addresses if not one.startswith("unix:")), addresses[0]),
            "addresses": addresses,
            "metrics": None if metrics is None else metrics.url,
            "pid": os.getpid(),
        }
        announce_ready(ready_fd, facts)
        kind = "coordinator" if self.election is None else "standby coordinator"
        self.notifier.ready(f"{kind} {section.name} at {', '.join(addresses)}")
        log.info(
            f"{kind} is up",
            extra=fields(
                name=section.name,
                listen=", ".join(addresses),
                links=len(self._config.links),
                metrics="off" if metrics is None else metrics.url,
            ),
        )

    async def stand_by(self, ending: contextlib.AsyncExitStack, election: Election) -> None:
        """Until the lock is ours, or the end is asked for."""
        ending.push_async_callback(election.resign)
        loop = asyncio.get_running_loop()
        acquiring, stopping = loop.create_task(election.acquire()), loop.create_task(self._stop.wait())
        try:
            await asyncio.wait((acquiring, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.asked:
                log.info(
                    "the lock is ours: taking over", extra=fields(name=self._section.name, fence=acquiring.result())
                )
        finally:
            for task in (acquiring, stopping):
                task.cancel()
            await asyncio.gather(acquiring, stopping, return_exceptions=True)

    async def take_over(self, ending: contextlib.AsyncExitStack) -> None:
        """From here on this is the coordinator."""
        coordinator = self.coordinator or self._make()
        coordinator.driver.start()
        remembering = asyncio.get_running_loop().create_task(coordinator.remember())
        remembering.add_done_callback(_say_why_it_ended)
        ending.callback(remembering.cancel)
        if self.election is not None:
            holding = asyncio.get_running_loop().create_task(self._hold(self.election))
            ending.callback(holding.cancel)
            self._keep_policy(ending).reload()  # it may have stood by for weeks
            await self._server.take_over()
            self.notifier.ready(f"coordinator {self._section.name} at {', '.join(self._server.addresses)}")
        log.info("coordinator is active", extra=fields(name=self._section.name, epoch=coordinator.machine.epoch))

    def _keep_policy(self, ending: contextlib.AsyncExitStack) -> PolicyKeeper:
        assert self.coordinator is not None
        loop = asyncio.get_running_loop()
        ending.callback(self.coordinator.close)
        keeper = PolicyKeeper(
            self._config,
            self._path,
            self.coordinator.driver.handle,
            loop.call_later,
            apply=self._reconfigure,
            token=self._token,
            reloads=self._reloads,
        )
        self.admin.policy = keeper
        ending.callback(keeper.close)
        keeper.start()
        loop.add_signal_handler(signal.SIGHUP, keeper.reload)
        return keeper

    def _reconfigure(self, config: Config) -> str:
        """What a file that was read again changes outside of the machine. ConfigError: nothing was changed."""
        tls, paths = self._guard.tls, config.require_coordinator().tls
        return "TLS files" if tls is not None and paths is not None and tls.move(paths) else ""

    async def _hold(self, election: Election) -> None:
        """Without the lock this process has nothing left to do: started again, it stands by."""
        why = await election.hold()
        log.warning(
            "the lock is lost: another coordinator may be active, and this one ends to stand by anew",
            extra=fields(name=self._section.name, fence=election.fence, why=why),
        )
        self._stop.ask(f"lost the lock: {why}", EXIT_FAILED)

    def _make(self) -> Coordinator:
        where = _grant_log_of(self._config)
        try:
            self.coordinator = Coordinator(
                machine_config(self._config),
                self._token,
                self._stop.fail,
                grant_log=where,
                guard=self._guard,
                servicer=self.servicer,
                admin=self.admin,
                election=self.election,
            )
        except OSError as error:
            raise ConfigError(
                f"the grant log {self._section.grant_log} can't be written",
                why=error.strerror or str(error),
                next_step="Make its directory writable for the coordinator, or remove grant_log from [coordinator]",
            ) from error
        return self.coordinator
