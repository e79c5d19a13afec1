"""A forwarding process from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from proxyd.core.errors import ConfigError
from proxyd.forward.doors import Target
from proxyd.forward.station import Station, chance_rank, exit_rank
from proxyd.runtime.addresses import parse_address
from proxyd.runtime.config_forward import ForwardConfig
from proxyd.runtime.lifecycle import Stop, announce_ready
from proxyd.runtime.logs import fields
from proxyd.runtime.networks import Rule, parse_network
from proxyd.runtime.notify import Notifier
from proxyd_client import AgentUnavailable, Endpoint, ProxydError, connect

log = logging.getLogger("proxyd.forward")

DRAIN_S = 10.0
"""So long connections may go on after SIGTERM."""


async def serve(
    tables: Sequence[ForwardConfig], stop: Stop, *, job: str, socket: str | Path | None, ready_fd: int | None
) -> None:
    """Open all doors and carry until the end is asked for. Raises ConfigError and ProxydError."""
    rules = [Rule.parse(text) for table in tables for text in table.allow]
    networks = [[parse_network(text) for text in table.clients] for table in tables]
    loop = asyncio.get_running_loop()
    endpoint = await loop.run_in_executor(None, _connect, job, bool(rules), socket)
    notifier = Notifier()
    station = Station(endpoint, rules if rules else None)
    hearing = loop.create_task(station.run())
    try:
        doors = []
        for table, clients in zip(tables, networks, strict=True):
            if table.listen is None or table.to is None:
                continue
            address = parse_address(table.listen)
            target = None
            if table.target is not None:
                wanted = parse_address(table.target)
                target = Target(wanted.host, wanted.port)
            kind = "tcp" if table.kind == "exit" else table.kind
            host, port = await station.listen(
                address.host, address.port, kind, table.to, target, table.traffic, clients
            )
            doors.append(f"{Target(host, port)}")
            log.info(
                "a door is open",
                extra=fields(kind=kind, listen=doors[-1], to=table.to, target=target, traffic_class=table.traffic),
            )
        if rules:
            log.info("this is the exit of its site", extra=fields(site=endpoint.site, rank=endpoint.rank))
        announce_ready(ready_fd, {"doors": doors, "site": endpoint.site, "rank": endpoint.rank})
        notifier.ready(f"forwards for {endpoint.site}: {', '.join(doors) or 'exit only'}")
        stopping = loop.create_task(stop.wait())
        await asyncio.wait((hearing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if hearing.done():
            stopping.cancel()
            hearing.result()  # it ends by an error only
        notifier.stopping(stop.reason)
        await station.close_doors()
        deadline_s = time.monotonic() + DRAIN_S
        while station.streams and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if station.streams:
            log.warning("%d connections are cut off: they took longer than %g s to end", station.streams, DRAIN_S)
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        log.info(
            "stopped",
            extra=fields(
                finished=station.finished,
                broken=station.broken,
                refused=station.refused,
                bytes_out=station.bytes_out,
                bytes_in=station.bytes_in,
            ),
        )
        await loop.run_in_executor(None, endpoint.close)
        notifier.close()


def _connect(job: str, is_exit: bool, socket: str | Path | None) -> Endpoint:
    """The exit's rank follows from the site, which the agent tells: so it is asked first, under a rank by chance."""
    try:
        endpoint = connect(job, chance_rank(), socket=socket)
        if not is_exit:
            return endpoint
        site = endpoint.site
        endpoint.close()
        return connect(job, exit_rank(site), socket=socket)
    except AgentUnavailable as error:
        raise ConfigError(
            "there is no agent to forward through",
            why=str(error),
            next_step="Start the agent, or name its socket with --socket or PROXYD_SOCKET",
        ) from error
    except ProxydError as error:
        raise ConfigError("the agent doesn't let this station in", why=str(error)) from error
