"""Start and end of a daemon: the loop, signals, readiness, the watchdog.

A daemon's ``main`` is one coroutine that serves until its :class:`Stop` is asked for and answers the exit code::

    def run(config: Config, ready_fd: int | None = None) -> int:
        return run_daemon(lambda stop: serve(config, ready_fd, stop))

SIGTERM and SIGINT ask for an orderly stop (exit code 0), as process 1 of a container too, where the kernel drops
signals that nobody handles. SIGHUP makes a daemon read its file again. A broken invariant asks for a stop with exit
code 1: state is soft, and a restart is the cure.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import uvloop

from proxyd.core.errors import EXIT_FAILED, EXIT_OK
from proxyd.runtime.limits import raise_descriptor_limit
from proxyd.runtime.notify import Notifier

log = logging.getLogger("proxyd.lifecycle")

GC_THRESHOLDS = (10_000, 20, 20)
"""Python's own are 700, 10, 10: with a thousand waiting transfers, hundreds of vain walks a second."""


class Stop:
    """Somebody wants the daemon to end. The first who asks decides reason and exit code, but a failure always shows."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""
        self.exit_code = EXIT_OK

    @property
    def asked(self) -> bool:
        return self._event.is_set()

    def ask(self, reason: str, exit_code: int = EXIT_OK) -> None:
        """Ask for the end. To be called on the loop."""
        if not self._event.is_set():
            self.reason = reason
        self.exit_code = self.exit_code or exit_code
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """A bug: log it with its traceback and end with exit code 1. Fits ``Driver(on_failure=...)``."""
        log.critical("internal error, the daemon ends: %s", error, exc_info=error)
        self.ask(f"internal error: {type(error).__name__}", EXIT_FAILED)

    async def wait(self) -> str:
        """Until somebody asks; answers the reason."""
        await self._event.wait()
        return self.reason


def run_daemon(main: Callable[[Stop], Coroutine[Any, Any, None]], reload: Callable[[], object] | None = None) -> int:
    """Run ``main`` on uvloop with signals connected to its Stop; answers the exit code.

    ``reload`` is called on the loop at SIGHUP; without it SIGHUP does nothing until ``main`` handles it.
    What ``main`` raises goes to the caller: a ListenError at start is for a person to read.
    """

    raise_descriptor_limit()

    async def guarded() -> int:
        stop = Stop()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.ask, f"got {number.name}")
        loop.add_signal_handler(signal.SIGHUP, _ignore if reload is None else reload)
        # A task that dies silently would leave half a daemon: every unhandled exception ends it.
        loop.set_exception_handler(lambda _, context: _on_loop_error(stop, context))
        calm_collector()
        await main(stop)
        return stop.exit_code

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(guarded())


def _ignore() -> None:
    log.info("got SIGHUP before there was anything to read again")


def calm_collector() -> None:
    """Let the garbage collector look at what comes from now on only, and less often.

    Nearly all that a daemon makes is freed by its reference count. What is left for the collector are the few cycles
    of ended tasks; a walk over all modules, which takes some ten milliseconds, would find nothing else.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _on_loop_error(stop: Stop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if error is None:
        log.warning("event loop: %s", context.get("message", "unknown"))
    else:
        stop.fail(error)


async def ping_watchdog(notifier: Notifier) -> None:
    """Ping systemd's watchdog from this loop, for ever; returns at once when none is expected."""
    interval_ns = notifier.ping_interval_ns
    while interval_ns is not None:
        notifier.watchdog()
        await asyncio.sleep(interval_ns / 1e9)


def announce_ready(ready_fd: int | None, facts: Mapping[str, object]) -> None:
    """Tell who started us (``--ready-fd``): one line, ``READY {json}``, with the addresses that were really bound.

    A parent that has gone meanwhile is no reason to fail: its children are tied to its life otherwise.
    """
    if ready_fd is None:
        return
    with contextlib.suppress(BrokenPipeError):
        os.write(ready_fd, b"READY " + json.dumps(dict(facts)).encode() + b"\n")
    os.close(ready_fd)
